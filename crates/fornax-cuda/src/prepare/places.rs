//! Where a plan's values, weights and caches are, and what the fast path makes while the plan is gone through. It knows
//! no launch.

use std::sync::Arc;

use fornax_gguf::TensorType;
use fornax_plan::liveness::Buffers;
use fornax_plan::{KvRef, Op, Plan, Result, ValueId, WeightId};

use crate::compiler::Compiler;
use crate::driver::{Gpu, Memory};
use crate::fast::planes::{self, Planes};
use crate::fast::stage::{STAGE_BYTES, Stage};
use crate::fast::{Addresses, Wire, decode};
use crate::kernels;
use crate::support::matrices;

/// Where everything is.
pub(super) struct Places {
    pub(super) gpu: Arc<Gpu>,
    pub(super) values: Buffers,
    pub(super) buffers: Vec<u64>,
    /// By weight; 0 where it exists as planes alone.
    pub(super) weights: Vec<u64>,
    pub(super) ropes: Vec<u64>,
    /// By group and layer: keys and values.
    pub(super) pools: Vec<Vec<[u64; 2]>>,
    pub(super) memory: Vec<Memory>,
}

impl Addresses for Places {
    fn value(&self, v: ValueId) -> u64 {
        self.buffers[self.values.ix(v)]
    }

    fn vector(&self, id: WeightId) -> u64 {
        self.weights[id.ix()]
    }

    fn pool(&self, kv: KvRef) -> [u64; 2] {
        self.pools[kv.group as usize][kv.layer as usize]
    }

    fn keep(&mut self, values: &[f32]) -> Result<u64> {
        let bytes: Vec<u8> = values.iter().flat_map(|f| f.to_le_bytes()).collect();
        let memory = self.gpu.alloc(bytes.len())?;
        self.gpu.write(memory.ptr, &bytes)?;
        let at = memory.ptr;
        self.memory.push(memory);
        Ok(at)
    }
}

/// What the fast path makes while the plan is gone through.
pub(super) struct Fast {
    pub(super) planes: Planes,
    pub(super) wire: Wire,
    /// Stages of the list of launches, in the order of [`Fast::at`].
    pub(super) list: Vec<Stage>,
    pub(super) at: Memory,
    pub(super) merge: [Memory; 2],
}

impl Fast {
    pub(super) fn new(gpu: &Arc<Gpu>, compiler: &Compiler, plan: &Plan) -> Result<Fast> {
        let module = kernels::load(gpu, compiler, "retile", planes::PLANED, &[])?;
        let merge = decode::merge_memory(gpu, plan)?;
        let wire = Wire::new(gpu.units, [merge[0].ptr, merge[1].ptr]);
        let at = gpu.alloc(STAGE_BYTES * (3 * plan.ops.len() + 1))?;
        let planes = Planes::new(gpu, module)?;
        Ok(Fast { planes, wire, list: Vec::new(), at, merge })
    }
}

/// True for an embedding out of planes.
pub(super) fn planed_table(plan: &Plan, op: &Op) -> bool {
    let Op::Embed { table, .. } = op else { return false };
    let w = &plan.weights[table.ix()];
    planes::number(w.ty).is_some() && w.cols.is_multiple_of(32)
}

/// The weights that are uploaded as they are, and the formats of the matrices among them.
pub(super) fn raw_weights(
    plan: &Plan,
    fast: impl Fn(&Op) -> bool,
) -> (Vec<WeightId>, Vec<TensorType>) {
    let mut raw = Vec::new();
    let mut types = Vec::new();
    for op in &plan.ops {
        let all = matrices(op);
        let planed = fast(op);
        raw.extend(op.weights().into_iter().filter(|id| !planed || !all.contains(id)));
        if !planed {
            types.extend(all.iter().map(|id| plan.weights[id.ix()].ty));
        }
    }
    // Norms that were folded are no op's weights any more.
    let vector = |w: &fornax_plan::WeightRef| w.ty == TensorType::F32 && w.rows == 1;
    raw.extend(
        (0..plan.weights.len())
            .filter(|ix| vector(&plan.weights[*ix]))
            .map(|ix| WeightId(ix as u32)),
    );
    raw.sort_unstable();
    raw.dedup();
    types.sort_unstable();
    types.dedup();
    (raw, types)
}
