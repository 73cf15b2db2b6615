//! The choice of how to decode, by a short timing at load: a few tokens of each way, on blocks and slots that are as new
//! afterwards. It knows no kernel.

use std::time::Instant;

use fornax_plan::{BlockId, Program, Result, SeqStep, SlotId, StepOutput, Tokens, Want};

use super::CudaProgram;
use crate::fast::decode::ROWS_MAX;
use crate::fast::drive::{self, Found, Kept, Way, Ways};
use crate::feed::CHAIN_MAX;
use crate::prepare::KV_BLOCK;
use crate::slots::Slots;

/// Tokens of one try.
const TOKENS: u32 = 12;
/// Where they begin, if there is room: what a short conversation has behind it.
const DEPTH: u32 = 128;

impl CudaProgram {
    /// The ways that there are for one row, and for several.
    fn ways_there(&self) -> [Vec<Way>; 2] {
        let decode = |rows| self.prepared.decode.as_ref().is_some_and(|d| d.takes(rows));
        let tape = self.prepared.tape.is_some();
        let there = |rows: u32| {
            let has = |way: &Way| match way {
                Way::Tape => tape && rows == 1,
                Way::Whole => decode(rows),
                Way::Graph => true,
            };
            Way::ALL.into_iter().filter(has).collect::<Vec<_>>()
        };
        [there(1), there(self.several())]
    }

    /// Rows of the steps that stand for all of a few.
    fn several(&self) -> u32 {
        self.limits.slots.min(ROWS_MAX)
    }

    /// The first of the ways that there are: what is taken where nothing is timed.
    pub(super) fn first_ways(&self) -> Ways {
        let [one, several] = self.ways_there();
        Ways { one: one[0], several: several[0] }
    }

    /// Takes the fastest of the ways that there are, or what `kept` says of them, and gives up what no step takes then.
    ///
    /// # Errors
    /// `is_lost` where the GPU is.
    pub(crate) fn race(&mut self, kept: &Kept) -> Result<()> {
        let [one, several] = self.ways_there();
        if one.len() + several.len() == 2 {
            return Ok(());
        }
        if let Some(ways) = kept.read([&one, &several]) {
            self.ways = ways;
            self.give_up();
            return Ok(());
        }
        let rows = self.several();
        let timed = self.found(&one, 1).and_then(|a| {
            let b = if rows > 1 { self.found(&several, rows) } else { Ok(alone(several[0])) };
            Ok((a, b?))
        });
        self.forget()?;
        match timed {
            Ok((a, b)) => {
                kept.write(&a, &b);
                self.ways = Ways { one: a.way, several: b.way };
                self.give_up();
                Ok(())
            }
            Err(e) if e.is_lost() => Err(e),
            // What cannot be timed is taken as it comes: a step will tell what is wrong.
            Err(_) => Ok(()),
        }
    }

    fn found(&mut self, ways: &[Way], rows: u32) -> Result<Found> {
        match ways {
            [way] => Ok(alone(*way)),
            _ => drive::fastest(ways, |way| self.trial(way, rows)),
        }
    }

    /// Seconds of a step of so many rows, by one way.
    pub(crate) fn trial(&mut self, way: Way, rows: u32) -> Result<f64> {
        let before = std::mem::replace(&mut self.ways, Ways { one: way, several: way });
        let timed = self.timed(rows);
        self.ways = before;
        timed
    }

    fn timed(&mut self, rows: u32) -> Result<f64> {
        let each = self.limits.kv_blocks / rows;
        let room = each.saturating_mul(KV_BLOCK).min(self.plan.hyper.context);
        let n = TOKENS.min(room.max(1));
        let pos = room.saturating_sub(n).min(DEPTH);
        let each = (pos + n).div_ceil(KV_BLOCK);
        let table = |row: u32| (0..each).map(|b| BlockId(row * each + b)).collect::<Vec<_>>();
        let tables: Vec<Vec<BlockId>> = (0..rows).map(table).collect();
        let groups = self.plan.kv.len();
        let tables: Vec<Vec<&[BlockId]>> = tables.iter().map(|t| vec![&t[..]; groups]).collect();
        let wants = [(0..1, Want::Token { logprob: false })];
        let mut out = StepOutput::default();
        let began = Instant::now();
        let mut done = 0;
        while done < n {
            let more = (n - done).min(self.limits.chain).clamp(1, CHAIN_MAX);
            let step = |row: u32| SeqStep {
                slot: SlotId(row),
                tokens: Tokens::Host(&[0]),
                pos: pos + done,
                tables: &tables[row as usize],
                wants: &wants,
                sample: None,
                max_new: more,
                stop: &[],
            };
            let steps: Vec<SeqStep<'_>> = (0..rows).map(step).collect();
            let ticket = self.submit(&steps)?;
            self.wait(ticket, &mut out)?;
            done += more;
        }
        Ok(began.elapsed().as_secs_f64() / f64::from(n))
    }

    /// Makes everything as it was before a timing: no keys, no values, no tokens, no graphs.
    pub(crate) fn forget(&mut self) -> Result<()> {
        self.gpu.finish()?;
        self.graphs.clear();
        self.slots = Slots::new(&self.limits, self.plan.hyper.context);
        for frame in &mut self.frames {
            frame.result.clear();
        }
        self.gpu.clear_range(self.prepared.last, 4 * self.limits.slots as usize)?;
        let each = (DEPTH + TOKENS).div_ceil(KV_BLOCK);
        let blocks = (self.several() * each).min(self.limits.kv_blocks);
        for group in 0..self.plan.kv.len() {
            for (at, bytes) in self.block_ranges(group, 0..blocks) {
                self.gpu.clear_range(at, bytes)?;
            }
        }
        self.gpu.finish()
    }

    /// Frees what no step takes any more: tapes are the weights once again.
    fn give_up(&mut self) {
        if self.ways.one != Way::Tape
            && let Some(tape) = self.prepared.tape.take()
        {
            self.prepared.weight_bytes -= tape.bytes();
        }
        if self.ways.one == Way::Graph && self.ways.several == Way::Graph {
            self.prepared.decode = None;
        }
    }
}

/// The only way that there is.
fn alone(way: Way) -> Found {
    Found { way, seconds: Vec::new() }
}
