//! A prepared model: buffers, weights, cache and the steps that run on them. It knows the
//! boundary and the pool; what a stage does is [`crate::run`]'s.

use std::sync::{Arc, Mutex, PoisonError};

use fornax_gguf::blocks;
use fornax_plan::{
    Batch, Cmd, Error, Limits, MemoryUse, Op, OpTime, Plan, Program, Progress, Result, RowSpace,
    SeqStep, SlotId, Slots, StepOutput, Ticket, ValueId,
};

use crate::compile::{Coarse, Compiler, Finish, PIECE_TILES, Rows, Stage, Tiles, Wide, hand_over};
use crate::isa::Isa;
use crate::kv::Cache;
use crate::matrix::coarse::{CoarseRows, ROWS};
use crate::matrix::{Arena, Floats, GROUP, Memory, Q8Rows, Share, TILE};
use crate::moe::Order;
use crate::ops::{BLOCK, QUERIES, SPLIT, Scratch, TileScratch, VectorOps, part_len};
use crate::pool::Pool;
use crate::prompt::{COLUMNS, Cuts, Prompt};
use crate::run::{Machine, Parts, ROW_BLOCK, Round, Slot, Times, Worker};
use crate::stages;
use crate::stream::reading_threads;
use crate::weights::Weights;

pub(crate) struct CpuProgram {
    plan: Plan,
    limits: Limits,
    pool: Arc<Mutex<Pool>>,
    machine: Machine,
    weights: Weights,
    slots: Slots,
    batch: Batch,
    cuts: Cuts,
    done: StepOutput,
    tickets: u64,
    /// Rows of logits and of hidden states, where the plan makes them.
    logits: Option<Rows>,
    hidden: Option<Rows>,
    /// Seconds by stage, then of choosing; empty unless a step is profiled.
    times: Vec<f64>,
    /// What the addresses in `machine` point into: what all token rows have, and the rest.
    values: Share,
    memory: Vec<Memory>,
    /// Threads of a round with a single row: it is bound by memory.
    readers: usize,
    lost: Option<String>,
}

/// Memory for rows of f32, kept in `held`.
fn rows(held: &mut Vec<Memory>, rows: usize, width: usize, what: &str) -> Result<Rows> {
    let memory = Memory::zeroed(4 * rows * width, what)?;
    let at = memory.as_ptr().cast();
    held.push(memory);
    Ok(Rows { at, width })
}

/// The same in `arena`.
fn token_values(arena: &mut Arena, rows: usize, width: usize) -> Rows {
    Rows { at: arena.take(4 * rows * width).as_ptr().cast(), width }
}

/// Largest sizes over the mixtures of a plan.
#[derive(Default)]
struct Mixtures {
    top_k: usize,
    experts: usize,
    width: usize,
    ff: usize,
    out: usize,
}

impl Mixtures {
    fn of(plan: &Plan) -> Mixtures {
        let mut m = Mixtures::default();
        for op in &plan.ops {
            if let Op::MoeMlp { x, ids, gate, out, .. } = *op {
                let w = &plan.weights[gate.weight.ix()];
                m.top_k = m.top_k.max(plan.width(ids) as usize);
                m.experts = m.experts.max(w.experts as usize);
                m.width = m.width.max(plan.width(x) as usize);
                m.ff = m.ff.max(w.rows as usize);
                m.out = m.out.max(plan.width(out) as usize);
            }
            if let Op::MoeRoute { router, .. } = *op {
                m.experts = m.experts.max(plan.weights[router.weight.ix()].rows as usize);
            }
        }
        m
    }
}

impl CpuProgram {
    pub(crate) fn new(
        plan: &Plan,
        limits: &Limits,
        isa: Isa,
        fast_prompt: bool,
        pool: Arc<Mutex<Pool>>,
    ) -> Result<CpuProgram> {
        let threads = pool.lock().unwrap_or_else(PoisonError::into_inner).threads();
        let mut weights = Weights::pack(plan, threads)?;
        let readers = {
            let mut pool = pool.lock().unwrap_or_else(PoisonError::into_inner);
            reading_threads(&mut pool, &weights.arena)?
        };
        if let Some(kernels) = isa.coarse().filter(|_| fast_prompt) {
            weights.coarsen(plan, kernels, threads)?;
        }
        let mut memory = Vec::new();
        let held = &mut memory;
        let (token_rows, wanted) = (limits.rows.max(1) as usize, limits.wanted.max(1) as usize);
        let mix = Mixtures::of(plan);
        let groups = stages::cut(plan);
        let layout = stages::assign(plan, &groups);
        let (mut angles, mut angle_width) = (Vec::new(), 0);
        for table in &plan.ropes {
            let from = angle_width;
            angle_width += 2 * table.inv_freq.len();
            angles.push(from..angle_width);
        }
        let quantised = shared_q8(plan, token_rows, wanted, &mix);
        let of_tokens = |b: &&(RowSpace, usize)| b.0 == RowSpace::Tokens;
        let token_width: usize = layout.buffers.iter().filter(of_tokens).map(|b| b.1).sum();
        let lines = 64 * (layout.buffers.len() + 1);
        let room = 4 * token_rows * (token_width + angle_width) + lines;
        // Prompts reach all rows, each on a page of its own if pages are small.
        let mut arena = Arena::new(room + 2 * Q8Rows::room(quantised), "values")?;
        let mut buffers = Vec::new();
        for (space, width) in &layout.buffers {
            buffers.push(match space {
                RowSpace::Tokens => token_values(&mut arena, token_rows, *width),
                RowSpace::Wanted => rows(held, wanted, *width, "values")?,
            });
        }
        let place = |v: usize| {
            layout.of[v].map(|b| Rows { at: buffers[b].at, width: plan.values[v].width as usize })
        };
        let places: Vec<Option<Rows>> = (0..plan.values.len()).map(place).collect();
        let of = |v: Option<ValueId>| v.and_then(|v| places[v.ix()]);
        let logits = of(plan.ops.iter().find_map(|op| match op {
            Op::Sample { logits } => Some(*logits),
            _ => None,
        }));
        let hidden = of(plan.ops.iter().find_map(|op| match op {
            Op::HiddenOut { x } => Some(*x),
            _ => None,
        }));
        let mut compiler = Compiler {
            plan,
            weights: &mut weights,
            places,
            scores: rows(held, token_rows, mix.experts, "router scores")?.at,
            angles,
            threads,
        };
        let mut stages: Vec<Stage> = groups.iter().map(|g| compiler.stage(g)).collect();
        hand_over(plan, &mut stages);
        // A look at a small weight brought its neighbours; whatever is needed again is read again.
        plan.weights.iter().for_each(|w| w.data.release(0..w.data.len()));
        let pairs = token_rows * mix.top_k;
        let states = plan.states.iter().map(|s| s.len as usize).sum();
        let prompt = prompt(isa, &stages, token_rows)?;
        let tiled = prompt.as_ref().is_some_and(|p| p.attend.is_some());
        let worker = || worker(plan, &stages, &mix, pairs, tiled);
        let parts = parts(plan, limits.kv_blocks, threads)?;
        let machine = Machine {
            parts,
            kernels: isa.kernels(),
            ops: VectorOps::of(isa),
            cache: Cache::new(&plan.kv, limits.kv_blocks, limits.kv_type)?,
            q8: Q8Rows::placed(&mut arena, quantised),
            made: Q8Rows::placed(&mut arena, made_q8(&stages, token_rows, wanted)),
            prompt,
            angles: token_values(&mut arena, token_rows, angle_width),
            ropes: plan.ropes.clone(),
            states: rows(held, limits.slots as usize, states, "states")?,
            pairs: [
                rows(held, pairs, mix.width, "mixture inputs")?,
                rows(held, pairs, mix.ff, "mixture products")?,
                rows(held, pairs, mix.out, "mixture outputs")?,
            ],
            workers: (0..threads).map(|_| worker().map(Slot::new)).collect::<Result<_>>()?,
            stages,
        };
        Ok(CpuProgram {
            slots: Slots::new(limits, plan.hyper.vocab, plan.hyper.context),
            batch: Batch::with_capacity(limits),
            cuts: Cuts::with_capacity(if fast_prompt { token_rows } else { 0 }),
            plan: plan.clone(),
            limits: limits.clone(),
            pool,
            machine,
            weights,
            done: StepOutput::default(),
            tickets: 0,
            logits,
            hidden,
            times: Vec::new(),
            values: arena.taken(),
            memory,
            readers,
            lost: None,
        })
    }

    /// One round on all threads, then what the wanted rows ask for.
    fn round(&mut self, step: &[SeqStep<'_>]) -> Result<()> {
        let times = match self.times.is_empty() {
            true => std::ptr::null_mut(),
            false => self.times.as_mut_ptr(),
        };
        if self.machine.prompt.is_some() {
            self.cuts.fill(&self.batch);
        }
        let (batch, cuts) = (&self.batch, &self.cuts);
        let round = Round { step, batch, cuts, times: Times(times) };
        let machine = &self.machine;
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        let threads = if self.batch.rows.len() == 1 { self.readers } else { pool.threads() };
        if let Err(cause) = pool.run_on(threads, &|team| machine.round(team, &round)) {
            self.lost = Some(cause.clone());
            return Err(lost(&cause));
        }
        drop(pool);
        let n = self.batch.wanted.len();
        let all = |rows: Option<Rows>| match rows {
            // SAFETY: the region is over and nothing else touches the buffers before the next.
            Some(r) => unsafe { std::slice::from_raw_parts_mut(r.at, n * r.width) },
            None => &mut [],
        };
        let since = std::time::Instant::now();
        let (logits, hidden) = (all(self.logits), all(self.hidden));
        self.slots.finish(step, &self.batch, logits, hidden, &mut self.done)?;
        if let Some(last) = self.times.last_mut() {
            *last += since.elapsed().as_secs_f64();
        }
        Ok(())
    }

    fn alive(&self) -> Result<()> {
        self.lost.as_ref().map_or(Ok(()), |cause| Err(lost(cause)))
    }

    /// The states of a slot, all of them side by side.
    fn state(&mut self, slot: SlotId) -> Result<&mut [f32]> {
        if slot.0 >= self.limits.slots {
            return Err(Error::malformed(format!("slot {} does not exist", slot.0)));
        }
        // SAFETY: no region runs, and the slot exists.
        Ok(unsafe { self.machine.states.row_mut(slot.ix()) })
    }
}

fn lost(cause: &str) -> Error {
    Error::lost(format!("cpu: {cause}; the model has to be loaded again"))
}

/// Room for the parts of as many rows as attention is split over threads for: those whose key
/// heads are fewer than twice the threads, up to the model's context.
fn parts(plan: &Plan, kv_blocks: u32, threads: usize) -> Result<Parts> {
    let positions = (kv_blocks as usize * BLOCK).min(plan.hyper.context as usize);
    let splits = positions.div_ceil(SPLIT);
    let mut most = 0;
    for op in &plan.ops {
        if let Op::Attention { kv, heads, .. } = op {
            let g = &plan.kv[kv.group as usize];
            let rows = (2 * threads - 1) / g.heads as usize;
            let len = part_len(g.v_width.next_multiple_of(16) as usize);
            let each = (rows * *heads as usize).saturating_mul(splits * len);
            most = most.max(each);
        }
    }
    let most = if threads > 1 { most } else { 0 };
    Ok(Parts { memory: Memory::zeroed(most.saturating_mul(4), "parts of attention")?, splits })
}

/// Rows and columns of the 8-bit rows that all threads share.
fn shared_q8(plan: &Plan, tokens: usize, wanted: usize, mix: &Mixtures) -> (usize, usize) {
    let pairs = tokens * mix.top_k;
    let mut most = (1, 32);
    let mut need = |rows: usize, cols: usize| {
        let blocks =
            |(rows, cols): (usize, usize)| rows.next_multiple_of(GROUP) * cols.div_ceil(32);
        if blocks((rows, cols)) > blocks(most) {
            most = (rows, cols);
        }
    };
    for op in &plan.ops {
        let rows = match op {
            Op::MoeMlp { .. } => pairs,
            Op::Logits { .. } => wanted.max(tokens),
            _ if stages::space(plan, op) == RowSpace::Wanted => wanted,
            _ => tokens,
        };
        for linear in op.linears().iter() {
            need(rows, plan.weights[linear.weight.ix()].cols as usize);
        }
    }
    most
}

/// Rows and columns of the 8-bit rows that one stage makes for the next.
fn made_q8(stages: &[Stage], tokens: usize, wanted: usize) -> (usize, usize) {
    let rows = |space| if space == RowSpace::Tokens { tokens } else { wanted };
    let need = |s: &Stage| match &s.wide {
        Wide::Tiles(t) if t.ready => Some((rows(s.space), t.x.rows.width)),
        _ => None,
    };
    let most = stages.iter().filter_map(need).max_by_key(|(r, w)| r.next_multiple_of(GROUP) * w);
    most.unwrap_or((1, 32))
}

/// What coarse stages need; none where there are none.
fn prompt(isa: Isa, stages: &[Stage], rows: usize) -> Result<Option<Prompt>> {
    let (mut most, mut made) = (0, 0);
    for stage in stages {
        if let Wide::Tiles(Tiles { x, coarse: Some(Coarse { ready, .. }), .. }) = &stage.wide {
            let widest = if *ready { &mut made } else { &mut most };
            *widest = x.rows.width.max(*widest);
        }
    }
    let Some(kernels) = isa.coarse().filter(|_| most.max(made) > 0) else { return Ok(None) };
    let (acts, made) = (CoarseRows::new(rows, most)?, CoarseRows::new(rows, made)?);
    Ok(Some(Prompt { kernels, acts, made, attend: isa.long_attend() }))
}

fn worker(
    plan: &Plan,
    stages: &[Stage],
    mix: &Mixtures,
    pairs: usize,
    tiled: bool,
) -> Result<Worker> {
    let alone = |s: &&Stage| matches!(s.wide, Wide::Tiles(_) | Wide::Moe(_));
    let slots = stages.iter().filter(alone).map(|s| 2 * s.chain.len()).max().unwrap_or(0);
    let widest = plan.values.iter().map(|v| v.width as usize).max().unwrap_or(0);
    let slot_width = widest.next_multiple_of(16);
    let columns = plan.ops.iter().flat_map(|op| op.linears().iter().collect::<Vec<_>>());
    let columns = columns.map(|l| plan.weights[l.weight.ix()].cols as usize).max().unwrap_or(32);
    let values = plan.kv.iter().map(|g| g.v_width.next_multiple_of(16) as usize).max();
    let gated = |s: &Stage| match &s.wide {
        Wide::Tiles(t) => t.coarse.is_some() && matches!(t.finish, Finish::Gate { .. }),
        _ => false,
    };
    let coarse = if stages.iter().any(gated) { ROWS * COLUMNS } else { 0 };
    let room = ROW_BLOCK * PIECE_TILES * TILE;
    let widest = |of: fn(&fornax_plan::KvGroup) -> u32| {
        plan.kv.iter().map(of).max().filter(|_| tiled).unwrap_or(0) as usize
    };
    Ok(Worker {
        tiles: TileScratch::new(widest(|g| g.k_width), widest(|g| g.v_width))?,
        slots: Memory::zeroed(4 * slots * slot_width, "a thread's values")?,
        slot_width,
        q8: Q8Rows::new(1, columns)?,
        pair: [Floats::zeroed(room), Floats::zeroed(room)],
        coarse: [Floats::zeroed(coarse), Floats::zeroed(coarse)],
        heads: Floats::zeroed(QUERIES * values.unwrap_or(16)),
        scratch: Scratch::new(values.unwrap_or(16)),
        q8_pairs: Q8Rows::new(mix.top_k.max(1), mix.ff.max(32))?,
        order: Order::with_capacity(pairs, mix.experts),
    })
}

/// Whether rows of the table can be decoded; what `prepare` asks before the first token does.
pub(crate) fn decodes(ty: fornax_gguf::TensorType) -> bool {
    let (mut out, bytes) = (vec![0.0; ty.block_len()], vec![0; ty.block_bytes()]);
    blocks::dequantize(ty, &bytes, &mut out).is_ok()
}

impl Program for CpuProgram {
    fn submit(&mut self, step: &[SeqStep<'_>]) -> Result<Ticket> {
        self.alive()?;
        let slots = &self.slots;
        let (plan, limits) = (&self.plan, &self.limits);
        self.batch.fill(step, plan, limits, BLOCK as u32, |s| slots.last(s))?;
        for at in 0..self.batch.spans.len() {
            if self.batch.spans[at].pos == 0 {
                self.state(self.batch.spans[at].slot)?.fill(0.0);
            }
        }
        self.done.clear();
        self.slots.observe(&self.batch, true);
        self.round(step)?;
        let mut rounds = 1;
        while self.batch.next_round(step, &self.done, |s| self.slots.stopped(s)) {
            self.slots.observe(&self.batch, false);
            self.round(step)?;
            rounds += 1;
        }
        if rounds > 1 {
            self.done.tokens.sort_unstable_by_key(|t| (t.seq, t.pos));
        }
        self.tickets += 1;
        Ok(Ticket(self.tickets))
    }

    fn poll(&mut self, _: &Ticket, out: &mut StepOutput) -> Result<Progress> {
        self.alive()?;
        // List by list, so that the caller's memory is kept.
        out.tokens.clone_from(&self.done.tokens);
        out.logits.clone_from(&self.done.logits);
        out.logit_rows.clone_from(&self.done.logit_rows);
        out.logprobs.clone_from(&self.done.logprobs);
        out.hidden.clone_from(&self.done.hidden);
        out.hidden_rows.clone_from(&self.done.hidden_rows);
        Ok(Progress::Done)
    }

    fn wait(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<()> {
        self.poll(&ticket, out).map(drop)
    }

    fn stop(&mut self, slot: SlotId) {
        self.slots.stop(slot);
    }

    fn command(&mut self, command: Cmd<'_>) -> Result<()> {
        match command {
            Cmd::ReadState { slot, out } => {
                let state = self.state(slot)?;
                out.clear();
                out.extend_from_slice(state);
                Ok(())
            }
            Cmd::WriteState { slot, data } => {
                let state = self.state(slot)?;
                if data.len() != state.len() {
                    let (found, want) = (data.len(), state.len());
                    return Err(Error::malformed(format!(
                        "write state: {found} elements, expected {want}"
                    )));
                }
                state.copy_from_slice(data);
                Ok(())
            }
            other => {
                let ops = self.machine.ops;
                self.machine.cache.command(ops, other)
            }
        }
    }

    fn memory(&self) -> MemoryUse {
        let prompt = self.machine.prompt.as_ref();
        let q8 = prompt.map_or(0, |p| p.acts.bytes() + p.made.bytes());
        let held: usize = self.memory.iter().map(Memory::len).sum();
        MemoryUse {
            weights: self.weights.bytes(),
            kv: self.machine.cache.bytes(),
            scratch: (self.values.len() + held + q8 + self.machine.parts.memory.len()) as u64,
        }
    }

    fn grow_kv(&mut self, blocks: u32) -> Result<()> {
        let all = self.limits.kv_blocks + blocks;
        let parts = parts(&self.plan, all, self.machine.workers.len())?;
        self.machine.cache.grow(blocks)?;
        self.machine.parts = parts;
        self.limits.kv_blocks = all;
        Ok(())
    }

    fn profile(&mut self, step: &[SeqStep<'_>], out: &mut StepOutput) -> Result<Vec<OpTime>> {
        self.times = vec![0.0; self.machine.stages.len() + 1];
        let ran = self.submit(step).and_then(|t| self.wait(t, out));
        let times = std::mem::take(&mut self.times);
        ran?;
        let mut all: Vec<OpTime> = Vec::new();
        let choosing = ("sample", 0);
        let stages = self.machine.stages.iter().map(|s| (s.name.as_str(), s.bytes));
        for ((name, bytes), seconds) in stages.chain([choosing]).zip(times) {
            match all.iter_mut().find(|t| t.name == name) {
                Some(t) => {
                    t.calls += 1;
                    t.seconds += seconds;
                    t.bytes += bytes;
                }
                None => all.push(OpTime { name: name.to_string(), calls: 1, seconds, bytes }),
            }
        }
        all.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        Ok(all)
    }
}
