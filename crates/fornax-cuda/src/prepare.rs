//! A plan's ops as launches: which kernel, which memory, which grid. What can be decided before
//! the first token is decided here, and what cannot be done is refused by name. It knows no step.

use std::collections::HashMap;
use std::sync::Arc;

use fornax_gguf::TensorType;
use fornax_plan::liveness::{self, Buffers};
use fornax_plan::{
    Activation, Error, KvRef, KvType, Limits, Linear, Op, Plan, Result, RopePairs, RowSpace,
    ValueId, WeightId,
};

use crate::args::{
    ArgmaxArgs, AttentionArgs, EmbedArgs, GatedArgs, KvWriteArgs, MatmulArgs, NormArgs, RopeArgs,
    SelectArgs,
};
use crate::compiler::Compiler;
use crate::driver::{Function, Gpu, Memory, Module};
use crate::feed::Shape;
use crate::kernels::{self, entry};
use crate::support::{matrices, refusals};

/// Tokens of one KV block.
pub(crate) const KV_BLOCK: u32 = 64;
/// Warps of a block that takes one output or head a warp, and rows of a tile.
const WARPS: u32 = 8;
const TILE: u32 = 8;

/// An argument: memory of the program, or this round's part of the step's words.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    At(u64),
    /// This round's rows.
    Rows,
    /// This round's wanted rows.
    Wanted,
}

/// Which rows an action runs over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    Rows,
    Wanted,
}

/// Blocks of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Grid {
    /// One for each row.
    Rows,
    /// So many, times one for each row.
    ByRow(u32),
    /// So many, times one for each tile of rows.
    ByTile(u32),
}

impl Grid {
    pub(crate) fn of(self, rows: u32) -> (u32, u32) {
        match self {
            Grid::Rows => (rows, 1),
            Grid::ByRow(x) => (x, rows),
            Grid::ByTile(x) => (x, rows.div_ceil(TILE)),
        }
    }
}

/// One step of a round.
#[derive(Clone, Debug)]
pub(crate) enum Action {
    Launch {
        op: u32,
        function: Function,
        grid: Grid,
        threads: u32,
        extent: Extent,
        /// The first word is the number of rows.
        constants: Vec<u32>,
        /// A word for where this round's rows begin among all rows.
        base_at: Option<usize>,
        places: Vec<Place>,
    },
    /// The host's copy of the logits, where it wants them.
    CopyLogits { from: u64 },
    /// The host's copy of the hidden rows.
    CopyHidden { from: u64 },
}

/// One layer's keys and values.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) keys: Memory,
    pub(crate) values: Memory,
}

/// Everything that a program keeps on the device.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) actions: Vec<Action>,
    /// By group, then by layer.
    pub(crate) pools: Vec<Vec<Pool>>,
    /// The ticket up to which every slot is to stop.
    pub(crate) stop: Memory,
    /// The step's words, as [`Shape`] lays them out.
    pub(crate) feed: Memory,
    /// The ticket's outputs.
    pub(crate) out: Memory,
    /// Nothing after the copies of a round writes what they copy, so that they may follow it.
    pub(crate) copies_last: bool,
    pub(crate) weight_bytes: u64,
    pub(crate) scratch_bytes: u64,
    /// Kept for the actions, which hold addresses.
    _memory: Vec<Memory>,
}

/// Makes everything ready.
///
/// # Errors
/// `is_malformed` for a plan that contradicts itself or a kernel that does not compile,
/// `is_unsupported` for what [`refusals`] names, `is_out_of_memory` with the bytes needed.
pub(crate) fn prepare(
    gpu: &Arc<Gpu>,
    compiler: &Compiler,
    plan: &Plan,
    limits: &Limits,
    shape: &Shape,
) -> Result<Prepared> {
    plan.validate()?;
    if let Some(r) = refusals(plan, limits).first() {
        return Err(Error::unsupported(format!("cuda: {}: {}; {}", r.what, r.why, r.help)));
    }
    check_room(gpu, plan, limits)?;
    let mut builder = Builder::new(gpu, compiler, plan, limits, shape)?;
    for (at, op) in plan.ops.iter().enumerate() {
        builder.op(at as u32, op)?;
    }
    // The weights were copied beside the stream, the rest was cleared on it.
    gpu.finish()?;
    Ok(builder.finish())
}

fn kv_element(ty: KvType) -> usize {
    if ty == KvType::F32 { 4 } else { 2 }
}

/// Bytes of one layer's keys and of its values.
fn pool_bytes(g: &fornax_plan::KvGroup, limits: &Limits) -> [usize; 2] {
    let tokens = limits.kv_blocks as usize * KV_BLOCK as usize;
    [g.k_width, g.v_width].map(|w| tokens * (g.heads * w) as usize * kv_element(limits.kv_type))
}

fn check_room(gpu: &Gpu, plan: &Plan, limits: &Limits) -> Result<()> {
    let weights: u64 = distinct(plan).values().map(|w| *w as u64).sum();
    let kv = |g: &fornax_plan::KvGroup| {
        (pool_bytes(g, limits).iter().sum::<usize>() * g.layers.len()) as u64
    };
    let kv: u64 = plan.kv.iter().map(kv).sum();
    let free = gpu.free_bytes()?;
    if weights + kv > free {
        return Err(Error::out_of_memory(format!(
            "cuda: {weights} bytes of weights and {kv} bytes of keys and values are needed, {free} \
             are free; lower the KV limit or use a smaller model"
        )));
    }
    Ok(())
}

/// Where a weight's bytes are, and how many; a tied head is the embedding table a second time.
type Bytes = (usize, usize);

fn bytes_of(w: &fornax_plan::WeightRef) -> Bytes {
    (w.bytes().as_ptr() as usize, w.len_bytes())
}

fn distinct(plan: &Plan) -> HashMap<Bytes, usize> {
    plan.weights.iter().map(|w| (bytes_of(w), w.len_bytes())).collect()
}

struct Builder<'a> {
    plan: &'a Plan,
    shape: &'a Shape,
    kv_type: TensorType,
    values: Buffers,
    buffers: Vec<u64>,
    weights: Vec<u64>,
    ropes: Vec<u64>,
    last: u64,
    modules: HashMap<&'static str, Arc<Module>>,
    out: Prepared,
}

impl<'a> Builder<'a> {
    fn new(
        gpu: &Arc<Gpu>,
        compiler: &Compiler,
        plan: &'a Plan,
        limits: &Limits,
        shape: &'a Shape,
    ) -> Result<Builder<'a>> {
        let mut memory = Vec::new();
        let mut keep = |m: Memory| {
            let ptr = m.ptr;
            memory.push(m);
            ptr
        };
        let values = liveness::assign(plan);
        let mut scratch_bytes = 0;
        let mut buffers = Vec::new();
        for b in &values.specs {
            let rows = if b.rows == RowSpace::Tokens { limits.rows } else { limits.wanted };
            let bytes = 4 * rows.max(limits.slots) as usize * b.width as usize;
            scratch_bytes += bytes as u64;
            buffers.push(keep(gpu.alloc(bytes)?));
        }
        let mut uploaded: HashMap<Bytes, u64> = HashMap::new();
        let mut weights = Vec::new();
        for w in &plan.weights {
            let at = match uploaded.get(&bytes_of(w)) {
                Some(at) => *at,
                None => {
                    let at = keep(gpu.alloc(w.len_bytes())?);
                    gpu.write(at, w.bytes())?;
                    uploaded.insert(bytes_of(w), at);
                    at
                }
            };
            weights.push(at);
        }
        let mut ropes = Vec::new();
        for r in &plan.ropes {
            let bytes: Vec<u8> = r.inv_freq.iter().flat_map(|f| f.to_le_bytes()).collect();
            let at = keep(gpu.alloc(bytes.len())?);
            gpu.write(at, &bytes)?;
            ropes.push(at);
        }
        let mut pools = Vec::new();
        for g in &plan.kv {
            let [keys, values] = pool_bytes(g, limits);
            let pool = |_: &u32| Ok(Pool { keys: gpu.alloc(keys)?, values: gpu.alloc(values)? });
            pools.push(g.layers.iter().map(pool).collect::<Result<Vec<_>>>()?);
        }
        let last = keep(gpu.alloc(4 * limits.slots as usize)?);
        let out = Prepared {
            actions: Vec::new(),
            pools,
            stop: gpu.alloc(4 * limits.slots as usize)?,
            feed: gpu.alloc(4 * shape.len())?,
            out: gpu.alloc(4 * shape.out_len())?,
            copies_last: false,
            weight_bytes: uploaded.keys().map(|(_, len)| *len as u64).sum(),
            scratch_bytes,
            _memory: memory,
        };
        let kv_type = if limits.kv_type == KvType::F32 { TensorType::F32 } else { TensorType::F16 };
        let modules = compile(gpu, compiler, plan)?;
        Ok(Builder { plan, shape, kv_type, values, buffers, weights, ropes, last, modules, out })
    }

    fn finish(mut self) -> Prepared {
        let is_copy = |a: &Action| !matches!(a, Action::Launch { .. });
        let first = self.out.actions.iter().position(is_copy).unwrap_or(0);
        // argmax, which has `base_at`, writes no value.
        let writes = |a: &Action| matches!(a, Action::Launch { base_at: None, .. });
        self.out.copies_last = !self.out.actions[first..].iter().any(writes);
        self.out
    }

    fn value(&self, v: ValueId) -> Place {
        Place::At(self.buffers[self.values.ix(v)])
    }

    fn weight(&self, id: WeightId) -> Place {
        Place::At(self.weights[id.ix()])
    }

    /// No address where there is nothing; the constants say so too.
    fn optional(&self, id: Option<WeightId>) -> Place {
        id.map_or(Place::At(0), |id| self.weight(id))
    }

    fn optional_value(&self, v: Option<ValueId>) -> Place {
        v.map_or(Place::At(0), |v| self.value(v))
    }

    fn words(&self, range: std::ops::Range<usize>) -> Place {
        Place::At(self.out.feed.ptr + 4 * range.start as u64)
    }

    fn extent(&self, v: ValueId) -> Extent {
        match self.plan.values[v.ix()].rows {
            RowSpace::Tokens => Extent::Rows,
            RowSpace::Wanted => Extent::Wanted,
        }
    }

    fn push(
        &mut self,
        op: u32,
        (family, name): (&str, &str),
        (grid, threads, extent): (Grid, u32, Extent),
        constants: Vec<u32>,
        places: Vec<Place>,
    ) -> Result<()> {
        let module = self.modules.get(family).ok_or_else(|| {
            Error::malformed(format!("cuda: no family {family} holds the kernel {name}"))
        })?;
        let function = module.function(name)?;
        let base_at = None;
        self.out.actions.push(Action::Launch {
            op,
            function,
            grid,
            threads,
            extent,
            constants,
            base_at,
            places,
        });
        Ok(())
    }

    fn op(&mut self, at: u32, op: &Op) -> Result<()> {
        match *op {
            Op::Embed { table, scale, out } => {
                let w = &self.plan.weights[table.ix()];
                let constants = EmbedArgs { rows: 0, width: w.cols, vocab: w.rows, scale }.words();
                let places =
                    vec![self.weight(table), Place::Rows, Place::At(self.last), self.value(out)];
                let name = entry("embed", w.ty);
                self.push(at, ("embed", &name), (Grid::Rows, 256, Extent::Rows), constants, places)
            }
            Op::RmsNorm { x, weight, eps, residual, out } => {
                let constants = NormArgs {
                    rows: 0,
                    width: self.plan.width(x),
                    eps,
                    residual: u32::from(residual.is_some()),
                };
                let places = vec![
                    self.value(x),
                    self.weight(weight),
                    self.optional_value(residual),
                    self.value(out),
                ];
                let shape = (Grid::Rows, 256, self.extent(x));
                self.push(at, ("norm", "rms_norm"), shape, constants.words(), places)
            }
            Op::MatMul { x, linear, residual, out } => {
                self.matmul(at, x, linear, residual, out, (1.0, None))
            }
            Op::Qkv { x, q, k, v, q_out, k_out, v_out } => {
                self.matmul(at, x, q, None, q_out, (1.0, None))?;
                self.matmul(at, x, k, None, k_out, (1.0, None))?;
                self.matmul(at, x, v, None, v_out, (1.0, None))
            }
            Op::QkNormRope { q, k, q_norm, k_norm, q_out, k_out, .. } => {
                self.norm_rope(at, op, q, q_norm, q_out)?;
                self.norm_rope(at, op, k, k_norm, k_out)
            }
            Op::KvWrite { k, v, kv } => self.kv_write(at, k, v, kv),
            Op::Attention { .. } => self.attention(at, op),
            Op::GatedMlp { x, gate, up, act, out } => self.gated(at, x, [gate, up], act, out),
            Op::SelectRows { x, out } => {
                let constants = SelectArgs { rows: 0, width: self.plan.width(x) }.words();
                let places = vec![self.value(x), Place::Wanted, self.value(out)];
                let shape = (Grid::Rows, 256, Extent::Wanted);
                self.push(at, ("choose", "select_rows"), shape, constants, places)
            }
            Op::Logits { x, linear, scale, softcap, out } => {
                self.matmul(at, x, linear, None, out, (scale, softcap))
            }
            Op::Sample { logits } => self.argmax(at, logits),
            Op::HiddenOut { x } => {
                let from = self.buffers[self.values.ix(x)];
                self.out.actions.push(Action::CopyHidden { from });
                Ok(())
            }
            Op::ShortConv { .. } | Op::MoeRoute { .. } | Op::MoeMlp { .. } => {
                Err(Error::unsupported(format!("cuda: no kernel for {}", op.name())))
            }
        }
    }

    fn matmul(
        &mut self,
        at: u32,
        x: ValueId,
        linear: Linear,
        residual: Option<ValueId>,
        out: ValueId,
        (scale, softcap): (f32, Option<f32>),
    ) -> Result<()> {
        let w = &self.plan.weights[linear.weight.ix()];
        let constants = MatmulArgs {
            rows: 0,
            cols: w.cols,
            outs: w.rows,
            bias: u32::from(linear.bias.is_some()),
            residual: u32::from(residual.is_some()),
            scale,
            softcap: softcap.unwrap_or(0.0),
        };
        let places = vec![
            self.weight(linear.weight),
            self.value(x),
            self.optional(linear.bias),
            self.optional_value(residual),
            self.value(out),
        ];
        let shape = (Grid::ByTile(w.rows.div_ceil(WARPS)), 32 * WARPS, self.extent(x));
        let name = entry("matmul", w.ty);
        self.push(at, ("matmul", &name), shape, constants.words(), places)
    }

    fn gated(
        &mut self,
        at: u32,
        x: ValueId,
        [gate, up]: [Linear; 2],
        act: Activation,
        out: ValueId,
    ) -> Result<()> {
        let w = &self.plan.weights[gate.weight.ix()];
        let (act, alpha, limit) = match act {
            Activation::Silu => (0, 0.0, 0.0),
            Activation::GeluTanh => (1, 0.0, 0.0),
            Activation::SwigluClamped { alpha, limit } => (2, alpha, limit),
        };
        let bias = u32::from(gate.bias.is_some()) | u32::from(up.bias.is_some()) << 1;
        let (cols, outs) = (w.cols, w.rows);
        let constants = GatedArgs { rows: 0, cols, outs, bias, act, alpha, limit };
        let places = vec![
            self.weight(gate.weight),
            self.weight(up.weight),
            self.value(x),
            self.optional(gate.bias),
            self.optional(up.bias),
            self.value(out),
        ];
        let shape = (Grid::ByTile(outs.div_ceil(WARPS)), 32 * WARPS, self.extent(x));
        let name = entry("gated_mlp", w.ty);
        self.push(at, ("gated_mlp", &name), shape, constants.words(), places)
    }

    fn norm_rope(
        &mut self,
        at: u32,
        op: &Op,
        x: ValueId,
        norm: Option<WeightId>,
        out: ValueId,
    ) -> Result<()> {
        let Op::QkNormRope { eps, rope, dim, .. } = *op else { return Ok(()) };
        let table = rope.map(|r| &self.plan.ropes[r.ix()]);
        let heads = self.plan.width(x) / dim;
        let constants = RopeArgs {
            rows: 0,
            heads,
            dim,
            norm: u32::from(norm.is_some()),
            eps,
            pairs: table.map_or(0, |t| t.inv_freq.len() as u32),
            halves: u32::from(table.is_some_and(|t| t.pairs == RopePairs::Halves)),
            magnitude: table.map_or(1.0, |t| t.magnitude),
        };
        let places = vec![
            self.value(x),
            self.optional(norm),
            Place::At(rope.map_or(0, |r| self.ropes[r.ix()])),
            Place::Rows,
            self.value(out),
        ];
        let shape = (Grid::ByRow(heads.div_ceil(WARPS)), 32 * WARPS, Extent::Rows);
        self.push(at, ("norm", "norm_rope"), shape, constants.words(), places)
    }

    fn pool(&self, kv: KvRef) -> [Place; 2] {
        let pool = &self.out.pools[kv.group as usize][kv.layer as usize];
        [Place::At(pool.keys.ptr), Place::At(pool.values.ptr)]
    }

    fn kv_write(&mut self, at: u32, k: ValueId, v: ValueId, kv: KvRef) -> Result<()> {
        let [keys, values] = self.pool(kv);
        let constants = KvWriteArgs {
            rows: 0,
            k_width: self.plan.width(k),
            v_width: self.plan.width(v),
            block: KV_BLOCK,
            stride: self.shape.stride as u32,
        };
        let tables = self.words(self.shape.tables(kv.group as usize));
        let places = vec![self.value(k), self.value(v), Place::Rows, tables, keys, values];
        let name = entry("kv_write", self.kv_type);
        let shape = (Grid::Rows, 128, Extent::Rows);
        self.push(at, ("attention", &name), shape, constants.words(), places)
    }

    fn attention(&mut self, at: u32, op: &Op) -> Result<()> {
        let Op::Attention { q, kv, heads, scale, softcap, sinks, out } = *op else {
            return Ok(());
        };
        let group = &self.plan.kv[kv.group as usize];
        let [keys, values] = self.pool(kv);
        let constants = AttentionArgs {
            rows: 0,
            heads,
            kv_heads: group.heads,
            k_width: group.k_width,
            v_width: group.v_width,
            block: KV_BLOCK,
            stride: self.shape.stride as u32,
            window: group.window.unwrap_or(0),
            scale,
            softcap: softcap.unwrap_or(0.0),
            sinks: u32::from(sinks.is_some()),
        };
        let tables = self.words(self.shape.tables(kv.group as usize));
        let places = vec![
            self.value(q),
            Place::Rows,
            tables,
            keys,
            values,
            self.optional(sinks),
            self.value(out),
        ];
        let name = entry("attention", self.kv_type);
        let shape = (Grid::ByRow(heads), 128, Extent::Rows);
        self.push(at, ("attention", &name), shape, constants.words(), places)
    }

    fn argmax(&mut self, at: u32, logits: ValueId) -> Result<()> {
        let (first, next) = self.shape.out_counts();
        let constants = ArgmaxArgs {
            rows: 0,
            vocab: self.plan.width(logits),
            base: 0,
            out_first: first as u32,
            out_next: next as u32,
        };
        let places = vec![
            self.value(logits),
            Place::Wanted,
            self.words(self.shape.all_rows()),
            Place::At(self.last),
            self.words(self.shape.stops()),
            Place::At(self.out.stop.ptr),
            Place::At(self.out.out.ptr),
        ];
        let from = self.buffers[self.values.ix(logits)];
        self.out.actions.push(Action::CopyLogits { from });
        let shape = (Grid::Rows, 1024, Extent::Wanted);
        self.push(at, ("choose", "argmax"), shape, constants.words(), places)?;
        if let Some(Action::Launch { base_at, .. }) = self.out.actions.last_mut() {
            *base_at = Some(2);
        }
        Ok(())
    }
}

/// Every family with entries for the plan's formats, loaded.
fn compile(
    gpu: &Arc<Gpu>,
    compiler: &Compiler,
    plan: &Plan,
) -> Result<HashMap<&'static str, Arc<Module>>> {
    let used: Vec<WeightId> = plan.ops.iter().flat_map(matrices).collect();
    let mut types: Vec<TensorType> = used.iter().map(|id| plan.weights[id.ix()].ty).collect();
    types.sort_unstable();
    types.dedup();
    let mut modules = HashMap::new();
    for family in kernels::families() {
        let code = compiler.compile(family, &types, gpu.arch)?;
        modules.insert(family.name, gpu.module(&code.cubin)?);
    }
    Ok(modules)
}
