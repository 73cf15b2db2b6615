//! One shared allocator of value buffers: which values can live in the same memory. Providers
//! use it so that scratch is small and reuse invents no hazards. It knows no device.

use crate::ids::ValueId;
use crate::op::Op;
use crate::plan::{Plan, RowSpace, ValueType};

/// A buffer that several values use one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferSpec {
    /// Rows it needs.
    pub rows: RowSpace,
    /// Element type of all its values.
    pub ty: ValueType,
    /// Columns of the widest of them.
    pub width: u32,
}

/// Where every value lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffers {
    /// The buffers.
    pub specs: Vec<BufferSpec>,
    /// Index into `specs`, by value.
    pub of: Vec<u32>,
}

impl Buffers {
    /// The buffer of a value.
    pub fn ix(&self, value: ValueId) -> usize {
        self.of[value.ix()] as usize
    }
}

/// Assigns buffers: a value takes a buffer that was free before its op ran, so that no op writes
/// where it reads, and frees it after its last reader.
pub fn assign(plan: &Plan) -> Buffers {
    let mut last_use = vec![0; plan.values.len()];
    let mut kept = vec![false; plan.values.len()];
    for (at, op) in plan.ops.iter().enumerate() {
        for v in op.inputs().iter().chain(op.outputs().iter()) {
            last_use[v.ix()] = at;
        }
        // What the host asks for is read after the last op.
        if matches!(op, Op::Sample { .. } | Op::HiddenOut { .. }) {
            op.inputs().iter().for_each(|v| kept[v.ix()] = true);
        }
    }
    let mut buffers = Buffers { specs: Vec::new(), of: vec![u32::MAX; plan.values.len()] };
    let mut free: Vec<u32> = Vec::new();
    for (at, op) in plan.ops.iter().enumerate() {
        for v in op.outputs().iter() {
            let ix = take(&mut buffers, &mut free, plan, v);
            buffers.of[v.ix()] = ix;
        }
        for v in op.inputs().iter().chain(op.outputs().iter()) {
            let ix = buffers.of[v.ix()];
            if last_use[v.ix()] == at && !kept[v.ix()] && !free.contains(&ix) {
                free.push(ix);
            }
        }
    }
    buffers
}

/// The free buffer of the right kind that wastes least, or a new one.
fn take(buffers: &mut Buffers, free: &mut Vec<u32>, plan: &Plan, value: ValueId) -> u32 {
    let spec = &plan.values[value.ix()];
    let fits = |b: &BufferSpec| b.rows == spec.rows && b.ty == spec.ty;
    let waste = |ix: &u32| buffers.specs[*ix as usize].width.abs_diff(spec.width);
    let best =
        free.iter().copied().filter(|ix| fits(&buffers.specs[*ix as usize])).min_by_key(waste);
    if let Some(ix) = best {
        free.retain(|f| *f != ix);
        let b = &mut buffers.specs[ix as usize];
        b.width = b.width.max(spec.width);
        return ix;
    }
    buffers.specs.push(BufferSpec { rows: spec.rows, ty: spec.ty, width: spec.width });
    buffers.specs.len() as u32 - 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Linear;
    use crate::plan::{Hyper, WeightRef};

    #[test]
    fn no_op_writes_a_buffer_that_it_or_a_later_reader_still_needs() {
        let hyper = Hyper { family: "test".into(), vocab: 4, width: 8, context: 8 };
        let mut plan = Plan::new(hyper);
        let table = plan.weight(WeightRef::from_f32("t", 4, 8, &[0.0; 32]));
        let square = plan.weight(WeightRef::from_f32("w", 8, 8, &[0.0; 64]));
        let mut x = plan.value("x", 8);
        plan.push(Op::Embed { table, scale: 1.0, out: x });
        for _ in 0..20 {
            let h = plan.value("h", 8);
            let linear = Linear { weight: square, bias: None };
            plan.push(Op::MatMul { x, linear, residual: None, out: h });
            let y = plan.value("y", 8);
            plan.push(Op::MatMul { x: h, linear, residual: Some(x), out: y });
            x = y;
        }
        let buffers = assign(&plan);
        assert_eq!(buffers.specs.len(), 3);
        for (at, op) in plan.ops.iter().enumerate() {
            for out in op.outputs().iter() {
                for other in 0..plan.values.len() as u32 {
                    let other = ValueId(other);
                    let reads = |o: &Op| o.inputs().iter().any(|v| v == other);
                    let live =
                        plan.ops[..at].iter().any(|o| o.outputs().iter().any(|v| v == other))
                            && plan.ops[at..].iter().any(reads);
                    assert!(!live || buffers.ix(other) != buffers.ix(out), "op {at}");
                }
            }
        }
    }
}
