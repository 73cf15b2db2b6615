//! A ragged step as flat rows, checked once: what providers that run on the host iterate over.
//! It knows no device and computes nothing.

use crate::device::Limits;
use crate::error::{Error, Result};
use crate::ids::{SlotId, TokenId};
use crate::plan::Plan;
use crate::step::{SeqStep, StepOutput, Tokens, Want};

/// One token row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Index of the sequence in the step.
    pub seq: u32,
    /// Its position.
    pub pos: u32,
    /// Its token.
    pub token: TokenId,
}

/// A sequence's rows within the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Index of the sequence in the step.
    pub seq: u32,
    /// Its slot.
    pub slot: SlotId,
    /// First row in the batch.
    pub start: u32,
    /// Number of rows.
    pub rows: u32,
    /// Position of the first row.
    pub pos: u32,
}

/// One wanted row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wanted {
    /// Row of the batch.
    pub row: u32,
    /// What is wanted of it.
    pub want: Want,
}

/// The flat rows of one round: the step itself, or one more token of its chains.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// All token rows, sequence after sequence.
    pub rows: Vec<Row>,
    /// The sequences that take part in this round.
    pub spans: Vec<Span>,
    /// The wanted rows, in row order.
    pub wanted: Vec<Wanted>,
    /// How many tokens each sequence of the step has still to produce after this round.
    left: Vec<u32>,
}

impl Batch {
    /// Room for everything that `limits` allows, so that filling never allocates.
    pub fn with_capacity(limits: &Limits) -> Batch {
        Batch {
            rows: Vec::with_capacity(limits.rows as usize),
            spans: Vec::with_capacity(limits.slots as usize),
            wanted: Vec::with_capacity(limits.wanted as usize),
            left: Vec::with_capacity(limits.slots as usize),
        }
    }

    /// Checks the step against plan and limits and lays out its rows. `last` tells the token
    /// that a slot chose last.
    ///
    /// # Errors
    /// `is_malformed`, naming the sequence, what was found and what was expected.
    pub fn fill(
        &mut self,
        step: &[SeqStep<'_>],
        plan: &Plan,
        limits: &Limits,
        kv_block: u32,
        last: impl Fn(SlotId) -> Option<TokenId>,
    ) -> Result<()> {
        self.rows.clear();
        self.spans.clear();
        self.wanted.clear();
        self.left.clear();
        for (ix, seq) in step.iter().enumerate() {
            let bad = |what: String| Error::malformed(format!("step, sequence {ix}: {what}"));
            check(seq, plan, limits, kv_block).map_err(bad)?;
            if self.spans.iter().any(|s| s.slot == seq.slot) {
                return Err(bad(format!("slot {} is used twice", seq.slot.0)));
            }
            let start = self.rows.len() as u32;
            let add = |batch: &mut Batch, token: TokenId| {
                if token >= plan.hyper.vocab {
                    let vocab = plan.hyper.vocab;
                    return Err(bad(format!("token {token}, expected less than {vocab}")));
                }
                let pos = seq.pos + batch.rows.len() as u32 - start;
                batch.rows.push(Row { seq: ix as u32, pos, token });
                Ok(())
            };
            match seq.tokens {
                Tokens::Host(tokens) => tokens.iter().try_for_each(|t| add(self, *t))?,
                Tokens::Last { draft } => {
                    let token = last(seq.slot).ok_or_else(|| {
                        bad(format!("slot {} has chosen no token yet", seq.slot.0))
                    })?;
                    add(self, token)?;
                    draft.iter().try_for_each(|t| add(self, *t))?;
                }
            }
            let rows = self.rows.len() as u32 - start;
            self.spans.push(Span { seq: ix as u32, slot: seq.slot, start, rows, pos: seq.pos });
            for (range, want) in seq.wants {
                self.wanted.extend(range.clone().map(|r| Wanted { row: start + r, want: *want }));
            }
            self.left.push(seq.max_new - 1);
        }
        let over = |what: &str, have: usize, most: u32| {
            Err(Error::malformed(format!("step: {have} {what}, expected at most {most}")))
        };
        if self.rows.len() > limits.rows as usize {
            return over("token rows", self.rows.len(), limits.rows);
        }
        if self.wanted.len() > limits.wanted as usize {
            return over("wanted rows", self.wanted.len(), limits.wanted);
        }
        Ok(())
    }

    /// Lays out the next round of the step's chains: one row for every sequence whose last
    /// token, found at the end of `out.tokens`, is to be fed back. False when no chain goes on.
    pub fn next_round(
        &mut self,
        step: &[SeqStep<'_>],
        out: &StepOutput,
        stopped: impl Fn(SlotId) -> bool,
    ) -> bool {
        let (rows, spans, wanted, left) =
            (&mut self.rows, &mut self.spans, &mut self.wanted, &mut self.left);
        let mut at = 0;
        wanted.clear();
        rows.clear();
        spans.retain_mut(|span| {
            let seq = &step[span.seq as usize];
            let left = &mut left[span.seq as usize];
            let chosen = out.tokens.iter().rev().find(|t| t.seq == span.seq);
            let Some(chosen) = chosen.filter(|t| *left > 0 && !seq.stop.contains(&t.token)) else {
                return false;
            };
            if stopped(span.slot) {
                return false;
            }
            *left -= 1;
            let (_, want) = seq.wants[seq.wants.len() - 1].clone();
            *span = Span { start: at, rows: 1, pos: chosen.pos, ..*span };
            rows.push(Row { seq: span.seq, pos: chosen.pos, token: chosen.token });
            wanted.push(Wanted { row: at, want });
            at += 1;
            true
        });
        !rows.is_empty()
    }
}

fn check(
    seq: &SeqStep<'_>,
    plan: &Plan,
    limits: &Limits,
    kv_block: u32,
) -> std::result::Result<(), String> {
    let rows = seq.tokens.rows() as u64;
    if seq.slot.0 >= limits.slots {
        return Err(format!("slot {}, expected less than {}", seq.slot.0, limits.slots));
    }
    if rows == 0 {
        return Err("no tokens, expected at least one".into());
    }
    if seq.max_new == 0 {
        return Err("max_new is 0, expected at least 1".into());
    }
    if seq.max_new > limits.chain {
        return Err(format!("max_new is {}, expected at most {}", seq.max_new, limits.chain));
    }
    if seq.stop.len() > limits.stops as usize {
        return Err(format!("{} stop tokens, expected at most {}", seq.stop.len(), limits.stops));
    }
    if let Some(sample) = &seq.sample {
        sample.validate().map_err(|e| e.to_string())?;
    }
    let mut from = 0;
    for (range, want) in seq.wants {
        if let Want::LogprobOf(id) = want
            && *id >= plan.hyper.vocab
        {
            let vocab = plan.hyper.vocab;
            return Err(format!("wants the probability of token {id}, expected less than {vocab}"));
        }
        if range.start < from || range.end <= range.start || u64::from(range.end) > rows {
            return Err(format!(
                "wants rows {range:?}, expected ascending ranges within 0..{rows}"
            ));
        }
        from = range.end;
    }
    let ends_in_token = seq.wants.last().is_some_and(|(range, want)| {
        u64::from(range.end) == rows && matches!(want, Want::Token { .. })
    });
    if seq.max_new > 1 && !ends_in_token {
        return Err(format!("max_new is {} but its last row wants no token", seq.max_new));
    }
    if seq.tables.len() != plan.kv.len() {
        return Err(format!("{} block tables, expected {}", seq.tables.len(), plan.kv.len()));
    }
    let positions = u64::from(seq.pos) + rows + u64::from(seq.max_new) - 1;
    if positions > u64::from(u32::MAX) {
        return Err(format!("{positions} positions, more than 32 bits hold"));
    }
    let need = positions.div_ceil(u64::from(kv_block));
    for (group, table) in seq.tables.iter().enumerate() {
        if (table.len() as u64) < need {
            return Err(format!("table {group} has {} blocks, {need} are needed", table.len()));
        }
        if let Some(b) = table.iter().find(|b| b.0 >= limits.kv_blocks) {
            return Err(format!(
                "table {group} names block {}, the pool has {}",
                b.0, limits.kv_blocks
            ));
        }
    }
    Ok(())
}
