//! What this provider does not do, found at load and told by name. It knows no driver.

use fornax_gguf::TensorType;
use fornax_plan::{KvType, Limits, Op, Plan, Refusal, WeightId};

use crate::kernels;

/// Elements of a value head that the attention kernel has registers for.
const V_WIDTH_MAX: u32 = 256;
/// Experts that the kernel which chooses them has bits for, and chosen ones that it has lanes for.
const EXPERTS_MAX: u32 = 1024;
const CHOSEN_MAX: u32 = 32;

/// What this form of the device does not do, by name.
pub(crate) fn refusals(plan: &Plan, limits: &Limits) -> Vec<Refusal> {
    let mut all = Vec::new();
    let mut refuse = |what: String, why: String, help: &str| {
        let refusal = Refusal { what, why, help: help.to_string() };
        if !all.contains(&refusal) {
            all.push(refusal);
        }
    };
    if limits.kv_type == KvType::Q8_0 {
        for g in plan.kv.iter().filter(|g| g.k_width % 32 != 0 || g.v_width % 32 != 0) {
            let why = format!("heads of {} and {} are no whole blocks of 32", g.k_width, g.v_width);
            refuse("kv type q8_0".to_string(), why, "use --kv-type f16");
        }
    }
    for g in plan.kv.iter().filter(|g| g.v_width > V_WIDTH_MAX) {
        let why = format!("value heads of {} elements, at most {V_WIDTH_MAX}", g.v_width);
        refuse("attention".to_string(), why, "use --device cpu");
    }
    for op in &plan.ops {
        if let Op::MoeRoute { router, top_k, .. } = op {
            let experts = plan.weights[router.weight.ix()].rows;
            if experts > EXPERTS_MAX || *top_k > CHOSEN_MAX {
                let why =
                    format!("{top_k} of {experts} experts, at most {CHOSEN_MAX} of {EXPERTS_MAX}");
                refuse(op.name().to_string(), why, "use --device cpu");
            }
        }
        let matrices = matrices(op);
        for ty in matrices.iter().map(|id| plan.weights[id.ix()].ty) {
            if !kernels::WEIGHT_TYPES.contains(&ty) {
                let what = format!("{} of {ty}", op.name());
                refuse(what, "no kernel reads the type".to_string(), "use --device cpu");
            }
        }
        for id in op.weights().into_iter().filter(|id| !matrices.contains(id)) {
            let w = &plan.weights[id.ix()];
            if w.ty != TensorType::F32 {
                let what = format!("{} with {} of {}", op.name(), w.name, w.ty);
                refuse(what, "vectors are read as F32".to_string(), "use --device cpu");
            }
        }
    }
    all
}

/// The weights that an op reads as rows of blocks.
pub(crate) fn matrices(op: &Op) -> Vec<WeightId> {
    let table = if let Op::Embed { table, .. } = op { Some(*table) } else { None };
    op.linears().iter().map(|l| l.weight).chain(table).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fornax_plan::conformance;

    #[test]
    fn a_llama_is_taken_and_what_is_not_is_named() {
        let case = conformance::proof(TensorType::Q8_0);
        let reference = fornax_plan::reference::ReferenceDevice::default();
        let limits = conformance::limits_for(&case, &reference);
        assert_eq!(refusals(&case.plan, &limits), []);
        let q8 = Limits { kv_type: KvType::Q8_0, ..limits.clone() };
        assert_eq!(refusals(&case.plan, &q8), []);
        let mut odd = case.plan.clone();
        odd.kv[0].k_width = 80;
        let named: Vec<String> = refusals(&odd, &q8).into_iter().map(|r| r.what).collect();
        assert_eq!(named, ["kv type q8_0"]);
        // Every case of the list is taken: mixtures, convolutions, every format that the list has.
        for case in conformance::cases() {
            let limits =
                Limits { deterministic: true, ..conformance::limits_for(&case, &reference) };
            assert_eq!(refusals(&case.plan, &limits), [], "{}", case.name);
        }
        let mut odd = case.plan.clone();
        odd.weights.iter_mut().for_each(|w| {
            if w.name == "ffn_up" {
                w.ty = TensorType::Q8_K;
            }
        });
        let named: Vec<String> = refusals(&odd, &limits).into_iter().map(|r| r.what).collect();
        assert_eq!(named, ["gated_mlp of Q8_K"]);
    }
}
