//! Which norms are folded into the product that reads them, as a plan without those norms, so that the shared allocator
//! of buffers sees what is really read when. It knows no address.

use std::collections::HashMap;

use fornax_gguf::TensorType;
use fornax_plan::{Op, Plan, ValueId, WeightId};

use super::planes;

/// A plan without the norms that are folded.
#[derive(Debug)]
pub(crate) struct Folded {
    pub(crate) plan: Plan,
    /// By op of that plan: the norm of its input, and its epsilon.
    pub(crate) norms: HashMap<usize, (WeightId, f32)>,
    /// By op of that plan: its number in the given one.
    pub(crate) origin: Vec<u32>,
}

/// True where all of an op's matrices are products out of planes.
pub(crate) fn planed(plan: &Plan, op: &Op) -> bool {
    let linears = op.linears();
    let ok = |id: WeightId| {
        let w = &plan.weights[id.ix()];
        planes::number(w.ty).is_some() && w.experts == 1 && w.cols.is_multiple_of(32)
    };
    let vector = |id: WeightId| plan.weights[id.ix()].ty == TensorType::F32;
    let all = linears.iter().all(|l| ok(l.weight) && l.bias.is_none_or(vector));
    let types: Vec<TensorType> = linears.iter().map(|l| plan.weights[l.weight.ix()].ty).collect();
    match op {
        Op::MatMul { .. } | Op::Qkv { .. } | Op::Logits { .. } => all,
        Op::GatedMlp { .. } => all && types[0] == types[1],
        _ => false,
    }
}

fn input(op: &mut Op) -> Option<&mut ValueId> {
    match op {
        Op::MatMul { x, .. }
        | Op::Qkv { x, .. }
        | Op::Logits { x, .. }
        | Op::GatedMlp { x, .. } => Some(x),
        _ => None,
    }
}

/// The plan as it is.
pub(crate) fn nothing(plan: &Plan) -> Folded {
    let origin = (0..plan.ops.len() as u32).collect();
    Folded { plan: plan.clone(), norms: HashMap::new(), origin }
}

/// Folds every norm that one product alone reads.
pub(crate) fn fold(plan: &Plan) -> Folded {
    let mut folded = Folded { plan: plan.clone(), norms: HashMap::new(), origin: Vec::new() };
    let mut uses = vec![0; plan.values.len()];
    for v in plan.ops.iter().flat_map(|op| op.inputs().iter().collect::<Vec<_>>()) {
        uses[v.ix()] += 1;
    }
    // By value: what stands for it.
    let mut gone: HashMap<ValueId, (ValueId, WeightId, f32)> = HashMap::new();
    let reader = |out: ValueId| {
        plan.ops.iter().find(|op| input(&mut (*op).clone()).is_some_and(|x| *x == out))
    };
    folded.plan.ops.clear();
    for (at, op) in plan.ops.iter().enumerate() {
        if let Op::RmsNorm { x, weight, eps, residual: None, out } = *op
            && uses[out.ix()] == 1
            && plan.weights[weight.ix()].ty == TensorType::F32
            && reader(out).is_some_and(|op| planed(plan, op))
        {
            gone.insert(out, (x, weight, eps));
            continue;
        }
        let mut op = op.clone();
        if let Some(x) = input(&mut op)
            && let Some((from, weight, eps)) = gone.get(x)
        {
            *x = *from;
            folded.norms.insert(folded.plan.ops.len(), (*weight, *eps));
        }
        folded.plan.ops.push(op);
        folded.origin.push(at as u32);
    }
    folded
}

#[cfg(test)]
mod tests {
    use super::*;
    use fornax_plan::conformance;

    #[test]
    fn the_norms_of_a_layer_and_of_the_head_are_folded_where_formats_have_planes() {
        let case = conformance::proof(TensorType::Q8_0);
        let folded = fold(&case.plan);
        assert_eq!(folded.norms.len(), 3);
        assert!(!folded.plan.ops.iter().any(|op| matches!(op, Op::RmsNorm { .. })));
        let (at, _) = folded.norms.iter().min_by_key(|n| n.0).unwrap();
        assert_eq!((folded.plan.ops[*at].name(), folded.origin[*at]), ("qkv", 2));
        let case = conformance::proof(TensorType::F32);
        assert_eq!(fold(&case.plan).plan.ops, case.plan.ops);
    }
}
