//! A plan's ops as launches: which kernel, which memory, which grid. What can be decided before
//! the first token is decided here, and what cannot be done is refused by name. It knows no step.

mod action;
mod choice;
mod mixture;
mod places;
mod plain;
mod room;
mod tapes;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use fornax_gguf::TensorType;
use fornax_plan::liveness;
use fornax_plan::{ActMode, Error, KvType, Limits, Op, Plan, Result, RowSpace, ValueId, WeightId};

use crate::args::EmbedRowsArgs;
use crate::args::{EmbedArgs, NormArgs, SelectArgs};
use crate::compiler::Compiler;
use crate::driver::{Gpu, Memory, Module};
use crate::fast::decode::{Decode, Parts, RowsKernel, Words};
use crate::fast::drive::Drive;
use crate::fast::fold::{self, Folded};
use crate::fast::planes;
use crate::fast::stage::STAGE_BYTES;
use crate::fast::tape::Tape;
use crate::fast::{Addresses, Dense, Wire};
use crate::feed::Shape;
use crate::kernels::{self, entry};
use crate::rows::{self, Rows};
use crate::support::refusals;

pub(crate) use self::action::{Action, Extent, Grid, Place};
use self::places::{Fast, Places, planed_table, raw_weights};

/// Tokens of one KV block.
pub(crate) const KV_BLOCK: u32 = 64;
/// Warps of a block that takes one output or head a warp.
const WARPS: u32 = 8;

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
    /// The kernels of the fast path, where any op takes it.
    pub(crate) rows: Option<RowsKernel>,
    /// Whole decode steps, where every op has a stage.
    pub(crate) decode: Option<Decode>,
    /// Decoding of one sequence from tapes, where the plan and the GPU are fit for it.
    pub(crate) tape: Option<Tape>,
    /// Steps of many rows, where tensor cores do any of it.
    pub(crate) many: Option<Rows>,
    /// By slot: the token chosen last.
    pub(crate) last: u64,
    /// By slot, then by position: tokens that penalties look at.
    pub(crate) history: u64,
    /// By state: that of every slot.
    pub(crate) states: Vec<Memory>,
    pub(crate) weight_bytes: u64,
    pub(crate) scratch_bytes: u64,
    /// Kept for the actions, which hold addresses.
    _memory: Vec<Memory>,
}

/// What was asked of the device beside limits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    /// From where on products of many rows have activations of halves.
    pub(crate) long_from: Option<u32>,
    pub(crate) drive: Drive,
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
    asked: Asked,
) -> Result<Prepared> {
    plan.validate()?;
    if let Some(r) = refusals(plan, limits).first() {
        return Err(Error::unsupported(format!("cuda: {}: {}; {}", r.what, r.why, r.help)));
    }
    room::check(gpu, plan, limits)?;
    // The stand-in has no fast kernels: they are written in NVIDIA's own instructions.
    let exact = limits.act == Some(ActMode::F32) || gpu.arch == 0;
    let folded = if exact { fold::nothing(plan) } else { fold::fold(plan) };
    let mut builder = Builder::new(gpu, compiler, &folded, limits, shape, exact)?;
    let mut spans = Vec::new();
    for (at, op) in folded.plan.ops.iter().enumerate() {
        let from = builder.out.actions.len();
        builder.op(at, op)?;
        spans.push(from..builder.out.actions.len());
    }
    let many = if exact { None } else { builder.many(&spans, asked.long_from)? };
    let mut prepared = builder.finish(asked.drive)?;
    prepared.scratch_bytes += many.as_ref().map_or(0, Rows::scratch_bytes);
    prepared.many = many;
    // The weights were copied beside the stream, the rest was cleared on it.
    gpu.finish()?;
    Ok(prepared)
}

/// Bytes of so many elements of keys or values.
pub(crate) fn kv_bytes(ty: KvType, elements: usize) -> usize {
    match ty {
        KvType::F32 => 4 * elements,
        KvType::F16 => 2 * elements,
        KvType::Q8_0 => elements + elements / 32 * 2,
    }
}

/// Bytes of one layer's keys and of its values.
fn pool_bytes(g: &fornax_plan::KvGroup, limits: &Limits) -> [usize; 2] {
    let tokens = limits.kv_blocks as usize * KV_BLOCK as usize;
    [g.k_width, g.v_width].map(|w| kv_bytes(limits.kv_type, tokens * (g.heads * w) as usize))
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
    gpu: &'a Arc<Gpu>,
    compiler: &'a Compiler,
    plan: &'a Plan,
    limits: &'a Limits,
    shape: &'a Shape,
    folded: &'a Folded,
    kv_type: TensorType,
    /// Formats that plain kernels read.
    plain: Vec<TensorType>,
    places: Places,
    modules: HashMap<&'static str, Arc<Module>>,
    fast: Option<Fast>,
    /// Block formats see 8-bit activations.
    rounds: bool,
    /// Memory within an op, by what it is for and its words; one op after the other has it.
    scratch: HashMap<(&'static str, usize), u64>,
    out: Prepared,
}

impl<'a> Builder<'a> {
    fn new(
        gpu: &'a Arc<Gpu>,
        compiler: &'a Compiler,
        folded: &'a Folded,
        limits: &'a Limits,
        shape: &'a Shape,
        exact: bool,
    ) -> Result<Builder<'a>> {
        let plan = &folded.plan;
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
        let fast = |op: &Op| !exact && fold::planed(plan, op);
        let (raw, plain) = raw_weights(plan, |op| fast(op) || !exact && planed_table(plan, op));
        let mut uploaded: HashMap<Bytes, u64> = HashMap::new();
        let mut weights = vec![0; plan.weights.len()];
        for id in raw {
            let w = &plan.weights[id.ix()];
            let at = match uploaded.get(&bytes_of(w)) {
                Some(at) => *at,
                None => {
                    let at = keep(gpu.alloc(w.len_bytes())?);
                    gpu.write(at, w.bytes())?;
                    uploaded.insert(bytes_of(w), at);
                    at
                }
            };
            weights[id.ix()] = at;
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
        let history = keep(gpu.alloc(4 * limits.slots as usize * shape.remembered)?);
        let state = |s: &fornax_plan::StateSpec| gpu.alloc(4 * (limits.slots * s.len) as usize);
        let states = plan.states.iter().map(state).collect::<Result<Vec<_>>>()?;
        let at = |p: &Pool| [p.keys.ptr, p.values.ptr];
        let places = Places {
            gpu: Arc::clone(gpu),
            values,
            buffers,
            weights,
            ropes,
            pools: pools.iter().map(|g| g.iter().map(at).collect()).collect(),
            memory,
        };
        let out = Prepared {
            actions: Vec::new(),
            pools,
            stop: gpu.alloc(4 * limits.slots as usize)?,
            feed: gpu.alloc(4 * shape.len())?,
            out: gpu.alloc(4 * shape.out_len())?,
            copies_last: false,
            rows: None,
            decode: None,
            tape: None,
            many: None,
            last,
            history,
            states,
            weight_bytes: uploaded.keys().map(|(_, len)| *len as u64).sum(),
            scratch_bytes,
            _memory: Vec::new(),
        };
        let kv_type = match limits.kv_type {
            KvType::F32 => TensorType::F32,
            KvType::F16 => TensorType::F16,
            KvType::Q8_0 => TensorType::Q8_0,
        };
        let fast = if plan.ops.iter().any(|op| fast(op) || !exact && planed_table(plan, op)) {
            Some(Fast::new(gpu, compiler, plan)?)
        } else {
            None
        };
        let modules = HashMap::new();
        Ok(Builder {
            gpu,
            compiler,
            plan,
            limits,
            shape,
            folded,
            kv_type,
            plain,
            places,
            modules,
            fast,
            rounds: limits.act != Some(ActMode::F32),
            scratch: HashMap::new(),
            out,
        })
    }

    /// The launches of steps with many rows; `spans` are the actions of each op.
    fn many(
        &self,
        spans: &[std::ops::Range<usize>],
        long_from: Option<u32>,
    ) -> Result<Option<Rows>> {
        let items = rows::items(&rows::Source {
            plan: self.plan,
            actions: &self.out.actions,
            spans,
            stages: self.fast.as_ref().map_or(&[], |f| &f.list),
            at: &self.places,
            ropes: &self.places.ropes,
            kv_type: self.limits.kv_type,
            deterministic: self.limits.deterministic,
        });
        if self.gpu.arch < 80 || items.iter().all(|i| matches!(i, rows::Item::Action(_))) {
            return Ok(None);
        }
        let (gpu, compiler) = (self.gpu, self.compiler);
        Rows::new(gpu, compiler, self.plan, self.limits, items, long_from).map(Some)
    }

    fn finish(mut self, drive: Drive) -> Result<Prepared> {
        let is_copy =
            |a: &Action| matches!(a, Action::CopyLogits { .. } | Action::CopyHidden { .. });
        let first = self.out.actions.iter().position(is_copy).unwrap_or(0);
        // What chooses tokens has `base_at`, and writes no value.
        let writes =
            |a: &Action| !is_copy(a) && !matches!(a, Action::Launch { base_at: Some(_), .. });
        self.out.copies_last = !self.out.actions[first..].iter().any(writes);
        if let Some(mut fast) = self.fast.take() {
            let bytes: Vec<u8> = fast.list.iter().flat_map(|s| s.bytes()).collect();
            self.gpu.write(fast.at.ptr, &bytes)?;
            self.out.rows = Some(RowsKernel::new(self.gpu, self.compiler, &fast.list)?);
            let x = match self.plan.ops.first() {
                Some(Op::Embed { out, .. }) => self.places.value(*out),
                _ => 0,
            };
            let (gpu, compiler, plan) = (self.gpu, self.compiler, self.plan);
            let parts = Parts { gpu, compiler, plan, limits: self.limits, shape: self.shape };
            let Fast { planes, wire, merge, at, .. } = &mut fast;
            let _ = at;
            let merge_memory = std::mem::replace(merge, [gpu.alloc(4)?, gpu.alloc(4)?]);
            // Whole steps share the work out by the rows that there are.
            if !self.limits.deterministic {
                let whole = (wire as &Wire, merge_memory, x);
                self.out.decode = Decode::new(&parts, drive, whole, planes)?;
                self.out.tape = self.tape(&parts, drive, wire, planes)?;
                self.out.weight_bytes += self.out.tape.as_ref().map_or(0, Tape::bytes);
            }
            self.out.weight_bytes += fast.planes.bytes;
            self.places.memory.push(fast.at);
            self.places.memory.extend(fast.planes.finish()?);
        }
        self.out._memory = self.places.memory;
        Ok(self.out)
    }

    fn value(&self, v: ValueId) -> Place {
        Place::At(self.places.value(v))
    }

    fn weight(&self, id: WeightId) -> Place {
        Place::At(self.places.vector(id))
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
        let function = self.module(family)?.function(name)?;
        let (base_at, ways) = (None, 0);
        self.out.actions.push(Action::Launch {
            op,
            function,
            grid,
            threads,
            extent,
            constants,
            base_at,
            places,
            ways,
        });
        Ok(())
    }

    /// Memory that one op after the other may use: so many words for each row.
    fn scratch(&mut self, what: &'static str, extent: Extent, width: u32) -> Result<Place> {
        let rows = if extent == Extent::Rows { self.limits.rows } else { self.limits.wanted };
        let words = rows.max(self.limits.slots) as usize * width as usize;
        if let Some(at) = self.scratch.get(&(what, words)) {
            return Ok(Place::At(*at));
        }
        let memory = self.gpu.alloc(4 * words)?;
        let at = memory.ptr;
        self.out.scratch_bytes += memory.len as u64;
        self.places.memory.push(memory);
        self.scratch.insert((what, words), at);
        Ok(Place::At(at))
    }

    /// A family with entries for the formats that plain kernels read, compiled when it is first needed.
    fn module(&mut self, family: &str) -> Result<&Arc<Module>> {
        let family = kernels::families()
            .iter()
            .find(|f| f.name == family)
            .ok_or_else(|| Error::malformed(format!("cuda: there is no kernel family {family}")))?;
        match self.modules.entry(family.name) {
            Entry::Occupied(made) => Ok(made.into_mut()),
            Entry::Vacant(gap) => {
                let f32 = [TensorType::F32];
                let types = if self.plain.is_empty() { &f32[..] } else { &self.plain };
                let code = self.compiler.compile(family, types, self.gpu.arch)?;
                Ok(gap.insert(self.gpu.module(&code.cubin)?))
            }
        }
    }

    /// The op by the fast path, if it takes it.
    fn fast(&mut self, ix: usize, op: &Op) -> Result<bool> {
        let at = self.folded.origin[ix];
        let plan = self.plan;
        let Some(fast) = &mut self.fast else { return Ok(false) };
        if fold::planed(plan, op) {
            let norm = self.folded.norms.get(&ix).copied();
            let dense = Dense { op, norm };
            let stages = fast.wire.dense(plan, &dense, &mut self.places, &mut fast.planes)?;
            let inputs = op.inputs();
            let x = inputs.iter().next();
            let rows = x.map_or(RowSpace::Tokens, |x| plan.values[x.ix()].rows);
            let extent = if rows == RowSpace::Tokens { Extent::Rows } else { Extent::Wanted };
            for stage in stages {
                let address = fast.at.ptr + (STAGE_BYTES * fast.list.len()) as u64;
                fast.list.push(stage);
                self.out.actions.push(Action::Stage { op: at, at: address, extent });
            }
            return Ok(true);
        }
        fast.wire.other(plan, op, &self.places);
        if let (Op::Embed { table, scale, out }, true) = (op, planed_table(plan, op)) {
            let w = &plan.weights[table.ix()];
            let ty = planes::number(w.ty).unwrap_or_default();
            let constants =
                EmbedRowsArgs { rows: 0, width: w.cols, vocab: w.rows, ty, scale: *scale }.words();
            let table = Place::At(fast.planes.of(&[w], false)?);
            let places = vec![
                table,
                Place::Rows,
                Place::At(self.out.last),
                Place::At(self.places.value(*out)),
            ];
            self.out.actions.push(Action::EmbedRows { op: at, constants, places });
            return Ok(true);
        }
        Ok(false)
    }

    fn op(&mut self, ix: usize, op: &Op) -> Result<()> {
        if self.fast(ix, op)? {
            return Ok(());
        }
        let at = self.folded.origin[ix];
        match *op {
            Op::Embed { table, scale, out } => {
                let w = &self.plan.weights[table.ix()];
                let constants = EmbedArgs { rows: 0, width: w.cols, vocab: w.rows, scale }.words();
                let last = Place::At(self.out.last);
                let places = vec![self.weight(table), Place::Rows, last, self.value(out)];
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
                let residual = residual.map(|r| self.value(r));
                self.matmul(at, x, linear, residual, self.value(out), (1.0, None))
            }
            Op::Qkv { x, q, k, v, q_out, k_out, v_out } => {
                self.matmul(at, x, q, None, self.value(q_out), (1.0, None))?;
                self.matmul(at, x, k, None, self.value(k_out), (1.0, None))?;
                self.matmul(at, x, v, None, self.value(v_out), (1.0, None))
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
                self.matmul(at, x, linear, None, self.value(out), (scale, softcap))
            }
            Op::Sample { logits } => self.choice(at, logits),
            Op::HiddenOut { x } => {
                let from = self.places.value(x);
                self.out.actions.push(Action::CopyHidden { from });
                Ok(())
            }
            Op::ShortConv { x, kernel, state, out } => self.short_conv(at, x, kernel, state, out),
            Op::MoeRoute { .. } => self.moe_route(at, op),
            Op::MoeMlp { .. } => self.moe(at, op),
        }
    }
}

impl Prepared {
    /// Where a step's words are, for whole steps.
    pub(crate) fn words(&self, shape: &Shape, wanted: std::ops::Range<usize>) -> Words {
        let at = |word: usize| self.feed.ptr + 4 * word as u64;
        Words {
            all_rows: at(shape.all_rows().start),
            wanted: at(wanted.start),
            last: self.last,
            stops: at(shape.stops().start),
            stop: self.stop.ptr,
            outs: self.out.ptr,
            tables: at(shape.tables(0).start),
        }
    }
}
