//! The reference device: scalar, sequential, no tricks, kept for ever. It is the oracle that
//! every kernel is compared with and the first thing to read. Speed is nobody's business here.
//!
//! It computes with f32 values and f64 sums; with [`ActMode::Q8`] it rounds the activations of
//! block-quantised matrices the way the fast kernels do ([`crate::q8`]), so that a kernel can be
//! held to it tightly in its own mode.

mod cache;
mod ops;

use std::time::Instant;

use crate::batch::Batch;
use crate::device::{
    ActMode, Cmd, Device, DeviceInfo, KvType, Limits, MemoryUse, OpTime, Program, Progress,
    Refusal, Ticket,
};
use crate::error::{Error, Result};
use crate::ids::{SlotId, TokenId};
use crate::op::{Linear, Op};
use crate::plan::Plan;
use crate::slots::Slots;
use crate::step::{SeqStep, StepOutput};
use cache::Cache;
use ops::{Activations, Mat};

/// The oracle as a provider.
#[derive(Clone, Debug)]
pub struct ReferenceDevice {
    /// Tokens of one KV block.
    pub kv_block: u32,
    /// Moves activations a little before they are rounded to 8 bits.
    pub jitter: Option<Jitter>,
}

/// What another order of f32 sums could have given: noise on the activations of block-quantised
/// matrices, just before they are rounded. A value on a rounding edge then falls to either side,
/// as it may on any device, and one flipped step grows to whole quantisation noise within a few
/// layers. A test that finds a device far from the reference looks for noise that explains it,
/// position after position: an edge is matched by some noise of this size, a fault by none.
#[derive(Clone, Debug, PartialEq)]
pub struct Jitter {
    /// Which noise, by position; the last one for all positions from there on.
    pub seeds: Vec<u64>,
    /// Its size, as a share of the largest magnitude of the block.
    pub size: f32,
}

impl Default for ReferenceDevice {
    fn default() -> ReferenceDevice {
        ReferenceDevice { kv_block: 32, jitter: None }
    }
}

impl Device for ReferenceDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            kind: "reference",
            name: "reference".into(),
            tier: "scalar".into(),
            threads: 1,
            kv_block: self.kv_block,
            act: ActMode::F32,
            weight_types: fornax_gguf::TensorType::ALL.to_vec(),
            in_flight: 1,
            step_rows: 512,
        }
    }

    fn supports(&self, plan: &Plan, limits: &Limits) -> Vec<Refusal> {
        let mut refusals = Vec::new();
        let odd =
            |g: &crate::KvGroup| !g.k_width.is_multiple_of(32) || !g.v_width.is_multiple_of(32);
        if limits.kv_type == KvType::Q8_0 && plan.kv.iter().any(odd) {
            refusals.push(Refusal {
                what: "kv type q8_0".into(),
                why: "a head's width is not a multiple of 32".into(),
                help: "use --kv-type f16".into(),
            });
        }
        refusals
    }

    fn prepare(&self, plan: &Plan, limits: &Limits) -> Result<Box<dyn Program>> {
        plan.validate()?;
        if let Some(r) = self.supports(plan, limits).first() {
            return Err(Error::unsupported(format!(
                "reference: {}: {}; {}",
                r.what, r.why, r.help
            )));
        }
        let cache = Cache::new(&plan.kv, limits.kv_blocks, self.kv_block, limits.kv_type)?;
        let states = (0..limits.slots)
            .map(|_| plan.states.iter().map(|s| vec![0.0; s.len as usize]).collect())
            .collect();
        Ok(Box::new(ReferenceProgram {
            act: Activations {
                mode: limits.act.unwrap_or(ActMode::F32),
                jitter: self.jitter.clone(),
                positions: Vec::new(),
                op: 0,
            },
            slots: Slots::new(limits, plan.hyper.vocab, plan.hyper.context),
            plan: plan.clone(),
            limits: limits.clone(),
            cache,
            states,
            batch: Batch::default(),
            done: StepOutput::default(),
            tickets: 0,
            times: Vec::new(),
        }))
    }
}

struct ReferenceProgram {
    plan: Plan,
    limits: Limits,
    act: Activations,
    cache: Cache,
    /// By slot, then by state.
    states: Vec<Vec<Vec<f32>>>,
    slots: Slots,
    batch: Batch,
    done: StepOutput,
    tickets: u64,
    /// Filled while profiling: seconds by op.
    times: Vec<f64>,
}

impl ReferenceProgram {
    /// One round: every op of the plan over the rows of `self.batch`.
    fn round(&mut self, step: &[SeqStep<'_>]) -> Result<()> {
        let mut values: Vec<Mat> = vec![Mat::default(); self.plan.values.len()];
        let mut logits = Mat::default();
        let mut hidden = Mat::default();
        for at in 0..self.plan.ops.len() {
            let op = self.plan.ops[at].clone();
            self.act.enter(at, &op, &self.batch);
            let started = Instant::now();
            match op {
                Op::Sample { logits: v } => logits = values[v.ix()].clone(),
                Op::HiddenOut { x } => hidden = values[x.ix()].clone(),
                _ => self.run(&op, step, &mut values),
            }
            if let Some(t) = self.times.get_mut(at) {
                *t += started.elapsed().as_secs_f64();
            }
        }
        self.slots.finish(step, &self.batch, &mut logits.data, &hidden.data, &mut self.done)
    }

    fn run(&mut self, op: &Op, step: &[SeqStep<'_>], values: &mut [Mat]) {
        let plan = &self.plan;
        let act = &self.act;
        let matmul = |x: &Mat, l: Linear| ops::matmul(x, plan, l, act);
        match *op {
            Op::Embed { table, scale, out } => {
                let tokens: Vec<TokenId> = self.batch.rows.iter().map(|r| r.token).collect();
                values[out.ix()] = ops::embed(&plan.weights[table.ix()], &tokens, scale);
            }
            Op::RmsNorm { x, weight, eps, residual, out } => {
                let y = ops::rms_norm(&values[x.ix()], &plan.weight_f32(weight), eps);
                values[out.ix()] = y.plus(residual.map(|r| &values[r.ix()]));
            }
            Op::MatMul { x, linear, residual, out } => {
                let y = matmul(&values[x.ix()], linear);
                values[out.ix()] = y.plus(residual.map(|r| &values[r.ix()]));
            }
            Op::Qkv { x, q, k, v, q_out, k_out, v_out } => {
                for (linear, out) in [(q, q_out), (k, k_out), (v, v_out)] {
                    values[out.ix()] = matmul(&values[x.ix()], linear);
                }
            }
            Op::QkNormRope { q, k, q_norm, k_norm, eps, rope, dim, q_out, k_out } => {
                let rope = rope.map(|r| &plan.ropes[r.ix()]);
                for (x, norm, out) in [(q, q_norm, q_out), (k, k_norm, k_out)] {
                    let norm = norm.map(|w| plan.weight_f32(w));
                    let mut y = values[x.ix()].clone();
                    for (row, at) in y.rows_mut().zip(&self.batch.rows) {
                        for head in row.chunks_mut(dim as usize) {
                            if let Some(norm) = &norm {
                                ops::rms_norm_row(head, norm, eps);
                            }
                            if let Some(rope) = rope {
                                ops::rope(head, rope, at.pos);
                            }
                        }
                    }
                    values[out.ix()] = y;
                }
            }
            Op::KvWrite { k, v, kv } => {
                let (k, v) = (&values[k.ix()], &values[v.ix()]);
                for (row, at) in self.batch.rows.iter().enumerate() {
                    let table = step[at.seq as usize].tables[kv.group as usize];
                    self.cache.write(kv, table, at.pos, k.row(row), v.row(row));
                }
            }
            Op::Attention { q, kv, heads, scale, softcap, sinks, out } => {
                let sinks = sinks.map(|w| plan.weight_f32(w));
                let group = &plan.kv[kv.group as usize];
                let mut y = Mat::zeros(self.batch.rows.len(), (heads * group.v_width) as usize);
                for (row, at) in self.batch.rows.iter().enumerate() {
                    let table = step[at.seq as usize].tables[kv.group as usize];
                    let first = group.window.map_or(0, |w| (at.pos + 1).saturating_sub(w));
                    let keys =
                        ops::Keys { cache: &self.cache, kv, table, range: first..at.pos + 1 };
                    let head =
                        ops::HeadRule { heads, group, scale, softcap, sinks: sinks.as_deref() };
                    ops::attention(values[q.ix()].row(row), &keys, &head, y.row_mut(row));
                }
                values[out.ix()] = y;
            }
            Op::GatedMlp { x, gate, up, act, out } => {
                let g = matmul(&values[x.ix()], gate);
                let u = matmul(&values[x.ix()], up);
                values[out.ix()] = ops::gated(&g, &u, act);
            }
            Op::ShortConv { x, kernel, state, out } => {
                let w = &plan.weights[kernel.ix()];
                let (taps, kernel) = (w.cols as usize, w.to_f32());
                let mut y = Mat::zeros(self.batch.rows.len(), plan.width(out) as usize);
                for span in &self.batch.spans {
                    let state = &mut self.states[span.slot.ix()][state.ix()];
                    for row in span.start..span.start + span.rows {
                        let row = row as usize;
                        ops::short_conv(
                            values[x.ix()].row(row),
                            &kernel,
                            taps,
                            state,
                            y.row_mut(row),
                        );
                    }
                }
                values[out.ix()] = y;
            }
            Op::MoeRoute { x, router, top_k, gating, ids, weights } => {
                let scores = matmul(&values[x.ix()], router);
                let (i, w) = ops::route(&scores, top_k as usize, gating);
                values[ids.ix()] = i;
                values[weights.ix()] = w;
            }
            Op::MoeMlp { x, ids, weights, gate, up, down, act, residual, out } => {
                let m = ops::Experts { gate, up, down, act };
                let y = ops::moe(
                    &values[x.ix()],
                    &values[ids.ix()],
                    &values[weights.ix()],
                    plan,
                    &m,
                    &self.act,
                );
                values[out.ix()] = y.plus(residual.map(|r| &values[r.ix()]));
            }
            Op::SelectRows { x, out } => {
                let rows = self.batch.wanted.iter().map(|w| values[x.ix()].row(w.row as usize));
                let data: Vec<f32> = rows.flatten().copied().collect();
                values[out.ix()] = Mat { width: plan.width(out) as usize, data };
            }
            Op::Logits { x, linear, scale, softcap, out } => {
                let mut y = matmul(&values[x.ix()], linear);
                for v in &mut y.data {
                    *v *= scale;
                    *v = softcap.map_or(*v, |cap| cap * (*v / cap).tanh());
                }
                values[out.ix()] = y;
            }
            Op::Sample { .. } | Op::HiddenOut { .. } => unreachable!("handled by the round"),
        }
    }
}

impl Program for ReferenceProgram {
    fn submit(&mut self, step: &[SeqStep<'_>]) -> Result<Ticket> {
        let mut batch = std::mem::take(&mut self.batch);
        let filled =
            batch.fill(step, &self.plan, &self.limits, self.cache.block, |s| self.slots.last(s));
        self.batch = batch;
        filled?;
        for span in self.batch.spans.iter().filter(|s| s.pos == 0) {
            self.states[span.slot.ix()].iter_mut().for_each(|s| s.fill(0.0));
        }
        self.done.clear();
        self.slots.observe(&self.batch, true);
        self.round(step)?;
        while self.batch.next_round(step, &self.done, |s| self.slots.stopped(s)) {
            self.slots.observe(&self.batch, false);
            self.round(step)?;
        }
        self.done.tokens.sort_by_key(|t| (t.seq, t.pos));
        self.tickets += 1;
        Ok(Ticket(self.tickets))
    }

    fn poll(&mut self, _: &Ticket, out: &mut StepOutput) -> Result<Progress> {
        out.clone_from(&self.done);
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
                let states = self.states.get(slot.ix()).ok_or_else(|| no_slot(slot))?;
                out.clear();
                out.extend(states.iter().flatten());
                Ok(())
            }
            Cmd::WriteState { slot, data } => {
                let states = self.states.get_mut(slot.ix()).ok_or_else(|| no_slot(slot))?;
                let want: usize = states.iter().map(Vec::len).sum();
                if data.len() != want {
                    let found = data.len();
                    return Err(Error::malformed(format!(
                        "write state: {found} elements, expected {want}"
                    )));
                }
                let mut data = data;
                for state in states {
                    let (head, rest) = data.split_at(state.len());
                    state.copy_from_slice(head);
                    data = rest;
                }
                Ok(())
            }
            other => self.cache.command(other),
        }
    }

    fn memory(&self) -> MemoryUse {
        let states: usize = self.states.iter().flatten().map(Vec::len).sum();
        MemoryUse { weights: 0, kv: self.cache.bytes(), scratch: 4 * states as u64 }
    }

    fn grow_kv(&mut self, blocks: u32) -> Result<()> {
        self.cache.grow(blocks)?;
        self.limits.kv_blocks += blocks;
        Ok(())
    }

    fn profile(&mut self, step: &[SeqStep<'_>], out: &mut StepOutput) -> Result<Vec<OpTime>> {
        self.times = vec![0.0; self.plan.ops.len()];
        let ran = self.submit(step).and_then(|t| self.wait(t, out));
        let times = std::mem::take(&mut self.times);
        ran?;
        Ok(OpTime::by_name(&self.plan, &times))
    }
}

fn no_slot(slot: SlotId) -> Error {
    Error::malformed(format!("slot {} does not exist", slot.0))
}
