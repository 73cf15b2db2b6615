//! What this provider does not do, found at load and told by name. It knows no driver.

use fornax_gguf::TensorType;
use fornax_plan::{KvType, Limits, Op, Plan, Refusal, WeightId};

use crate::kernels;

/// Elements of a value head that the attention kernel has registers for.
const V_WIDTH_MAX: u32 = 256;

/// What this form of the device does not do, by name.
pub(crate) fn refusals(plan: &Plan, limits: &Limits) -> Vec<Refusal> {
    let mut all = Vec::new();
    let mut refuse = |what: String, why: String, help: &str| {
        let refusal = Refusal { what, why, help: help.to_string() };
        if !all.contains(&refusal) {
            all.push(refusal);
        }
    };
    if limits.deterministic {
        let why = "kernels and orders of sums change with the rows of a step".to_string();
        refuse("deterministic".to_string(), why, "use --device cpu");
    }
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
        if matches!(op, Op::ShortConv { .. } | Op::MoeRoute { .. } | Op::MoeMlp { .. }) {
            let why = "there is no kernel for it".to_string();
            refuse(op.name().to_string(), why, "use --device cpu");
            continue;
        }
        let matrices = matrices(op);
        for ty in matrices.iter().map(|id| plan.weights[id.ix()].ty) {
            if !kernels::WEIGHT_TYPES.contains(&ty) {
                let what = format!("{} of {ty}", op.name());
                refuse(what, "no kernel reads the type".to_string(), "use --device cpu");
            }
        }
        if let Op::GatedMlp { gate, up, .. } = op {
            let types = [gate, up].map(|l| plan.weights[l.weight.ix()].ty);
            if types[0] != types[1] {
                let what = format!("gated_mlp of {} and {}", types[0], types[1]);
                let why = "gate and up must have one type".to_string();
                refuse(what, why, "use --device cpu");
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
        let cases = conformance::cases();
        let moe = cases.iter().find(|c| c.name.starts_with("moe/")).unwrap();
        let named: Vec<String> = refusals(&moe.plan, &limits).into_iter().map(|r| r.what).collect();
        assert_eq!(named, ["moe_route", "moe_mlp"]);
        let mut odd = case.plan.clone();
        odd.weights.iter_mut().for_each(|w| {
            if w.name == "ffn_up" {
                w.ty = TensorType::IQ2_S;
            }
        });
        let named: Vec<String> = refusals(&odd, &limits).into_iter().map(|r| r.what).collect();
        assert_eq!(named, ["gated_mlp of IQ2_S", "gated_mlp of Q8_0 and IQ2_S"]);
    }
}
