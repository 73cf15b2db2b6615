//! One sequence on one prepared program: what a command at a prompt needs, and no scheduler.
//! Knows tokens and positions, no text.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use fornax_plan::{
    ActMode, BlockId, Device, DeviceInfo, KvType, Limits, OpTime, Plan, Program, SampleParams,
    SeqStep, SlotId, StepOutput, TokenOut, Tokens, Want,
};

use crate::devices;

/// KV groups that a plan may have; families have one or two.
const GROUPS_MAX: usize = 8;

/// A prepared program and the one sequence that runs on it.
pub(crate) struct Lane {
    program: Box<dyn Program>,
    pub(crate) info: DeviceInfo,
    /// The same blocks in every group, in order.
    table: Vec<BlockId>,
    groups: usize,
    /// Tokens whose keys and values are there.
    pos: u32,
    context: usize,
    vocab: usize,
    /// A state cannot be rewound, keys and values can.
    has_states: bool,
    out: StepOutput,
    /// Times by op, where profiling.
    profile: Option<Vec<OpTime>>,
}

/// What a lane is prepared for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    /// Tokens of the context.
    pub(crate) context: usize,
    /// Rows whose logits are taken at once.
    pub(crate) wanted: usize,
    pub(crate) kv: KvType,
    /// The device's own form where absent.
    pub(crate) act: Option<ActMode>,
    pub(crate) profile: bool,
}

impl Lane {
    /// Rows of one prefill step.
    pub(crate) const CHUNK: usize = 512;

    /// # Errors
    /// When the device cannot run the plan or has no room for it.
    pub(crate) fn prepare(device: &dyn Device, plan: &Plan, room: Room) -> Result<Lane> {
        let info = device.info();
        let limits = Limits {
            slots: 1,
            rows: room.context.clamp(1, Lane::CHUNK) as u32,
            wanted: room.wanted.clamp(1, Lane::CHUNK) as u32,
            kv_blocks: room.context.div_ceil(info.kv_block as usize) as u32,
            kv_type: room.kv,
            act: room.act,
        };
        if plan.kv.len() > GROUPS_MAX {
            bail!(
                "the model has {} groups of KV layers; up to {GROUPS_MAX} are handled",
                plan.kv.len()
            );
        }
        devices::accept(device, plan, &limits)?;
        Ok(Lane {
            program: device.prepare(plan, &limits)?,
            info,
            table: (0..limits.kv_blocks).map(BlockId).collect(),
            groups: plan.kv.len(),
            pos: 0,
            context: room.context,
            vocab: plan.hyper.vocab as usize,
            has_states: !plan.states.is_empty(),
            out: StepOutput::default(),
            profile: room.profile.then(Vec::new),
        })
    }

    /// Tokens that are in the context.
    pub(crate) fn pos(&self) -> usize {
        self.pos as usize
    }

    /// Tokens that still fit.
    pub(crate) fn left(&self) -> usize {
        self.context - self.pos()
    }

    /// Forgets everything from `pos` on, and with a state everything; says how much is left.
    pub(crate) fn rewind(&mut self, pos: usize) -> usize {
        if pos < self.pos() {
            self.pos = if self.has_states { 0 } else { pos as u32 };
        }
        self.pos()
    }

    /// Feeds a prompt in chunks and chooses the token that follows it.
    ///
    /// # Errors
    /// When the context is full or the device failed.
    pub(crate) fn prompt(
        &mut self,
        tokens: &[u32],
        sample: SampleParams,
        logprob: bool,
    ) -> Result<TokenOut> {
        let Some(last) = tokens.len().checked_sub(1) else {
            bail!("there is nothing to answer: the prompt is empty")
        };
        let mut done = 0;
        for chunk in tokens.chunks(Lane::CHUNK) {
            done += chunk.len();
            let row = chunk.len() as u32 - 1;
            let want = [(row..row + 1, Want::Token { logprob })];
            let wants = if done > last { &want[..] } else { &[] };
            self.step(Tokens::Host(chunk), wants, Some(sample))?;
        }
        self.chosen()
    }

    /// Feeds tokens and wants nothing of them.
    ///
    /// # Errors
    /// As [`Lane::prompt`].
    pub(crate) fn fill(&mut self, tokens: &[u32]) -> Result<()> {
        tokens.chunks(Lane::CHUNK).try_for_each(|chunk| self.step(Tokens::Host(chunk), &[], None))
    }

    /// Feeds the token chosen last and chooses the next.
    ///
    /// # Errors
    /// As [`Lane::prompt`].
    pub(crate) fn next(&mut self, sample: SampleParams, logprob: bool) -> Result<TokenOut> {
        self.step(Tokens::Last { draft: &[] }, &[(0..1, Want::Token { logprob })], Some(sample))?;
        self.chosen()
    }

    /// Feeds tokens and hands out the logits after each of them, or after the last alone.
    ///
    /// # Errors
    /// As [`Lane::prompt`].
    pub(crate) fn logits(
        &mut self,
        tokens: &[u32],
        all: bool,
        mut row: impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let mut done = 0;
        for chunk in tokens.chunks(Lane::CHUNK) {
            done += chunk.len();
            let n = chunk.len() as u32;
            let first = if all { 0 } else { n - 1 };
            let wants = [(first..n, Want::Logits)];
            let wants = if all || done == tokens.len() { &wants[..] } else { &[] };
            self.step(Tokens::Host(chunk), wants, None)?;
            let rows = self.out.logits.chunks_exact(self.vocab).zip(&self.out.logit_rows);
            for (logits, at) in rows {
                row(at.pos as usize, logits)?;
            }
        }
        Ok(())
    }

    /// Times by op so far, longest first; empty unless profiling.
    pub(crate) fn profile(&self) -> &[OpTime] {
        self.profile.as_deref().unwrap_or_default()
    }

    fn step(
        &mut self,
        tokens: Tokens<'_>,
        wants: &[(std::ops::Range<u32>, Want)],
        sample: Option<SampleParams>,
    ) -> Result<()> {
        let rows = tokens.rows();
        if rows > self.left() {
            bail!("the context of {} tokens is full; --ctx makes it larger", self.context);
        }
        let tables = [self.table.as_slice(); GROUPS_MAX];
        let step = [SeqStep {
            slot: SlotId(0),
            tokens,
            pos: self.pos,
            tables: &tables[..self.groups],
            wants,
            sample,
            max_new: 1,
            stop: &[],
        }];
        match &mut self.profile {
            None => {
                let ticket = self.program.submit(&step)?;
                self.program.wait(ticket, &mut self.out)?;
            }
            Some(all) => add(all, self.program.profile(&step, &mut self.out)?),
        }
        self.pos += rows as u32;
        Ok(())
    }

    fn chosen(&self) -> Result<TokenOut> {
        match self.out.tokens.last() {
            Some(token) => Ok(*token),
            None => bail!("the device chose no token"),
        }
    }
}

fn add(all: &mut Vec<OpTime>, step: Vec<OpTime>) {
    for time in step {
        match all.iter_mut().find(|t| t.name == time.name) {
            Some(sum) => {
                sum.calls += time.calls;
                sum.seconds += time.seconds;
                sum.bytes += time.bytes;
            }
            None => all.push(time),
        }
    }
    all.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
}

/// How long each step of a generation took.
#[derive(Clone, Debug, Default)]
pub(crate) struct Steps {
    count: u32,
    sum: Duration,
    min: Option<Duration>,
    max: Duration,
}

impl Steps {
    /// Runs one step and notes its time.
    ///
    /// # Errors
    /// Those of the step.
    pub(crate) fn time<T>(&mut self, step: impl FnOnce() -> Result<T>) -> Result<T> {
        let begin = Instant::now();
        let result = step()?;
        let took = begin.elapsed();
        self.count += 1;
        self.sum += took;
        self.min = Some(self.min.map_or(took, |m| m.min(took)));
        self.max = self.max.max(took);
        Ok(result)
    }

    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    pub(crate) fn mean_s(&self) -> f64 {
        self.sum.as_secs_f64() / f64::from(self.count.max(1))
    }

    pub(crate) fn min_ms(&self) -> f64 {
        self.min.unwrap_or_default().as_secs_f64() * 1e3
    }

    pub(crate) fn max_ms(&self) -> f64 {
        self.max.as_secs_f64() * 1e3
    }
}
