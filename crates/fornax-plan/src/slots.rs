//! What host-run providers remember of a sequence between steps, and what a wanted row turns
//! into. It knows no kernel: it starts where the logits are.

use crate::batch::Batch;
use crate::device::Limits;
use crate::error::Result;
use crate::ids::{SlotId, TokenId};
use crate::sample::{self, SampleParams};
use crate::step::{RowOut, SeqStep, StepOutput, TokenOut, Want};

/// Last token and history of every slot, and the sampler's memory.
#[derive(Debug)]
pub struct Slots {
    slots: Vec<Slot>,
    scratch: sample::Scratch,
}

#[derive(Debug, Default)]
struct Slot {
    last: Option<TokenId>,
    /// The tokens at positions 0 .. as far as this device saw them.
    history: Vec<TokenId>,
    stopped: bool,
}

impl Slots {
    /// Slots for `limits`, with room for histories of `context` tokens.
    pub fn new(limits: &Limits, vocab: u32, context: u32) -> Slots {
        let room = context.min(1 << 16) as usize + 1;
        let slot = || Slot { history: Vec::with_capacity(room), ..Slot::default() };
        Slots {
            slots: (0..limits.slots).map(|_| slot()).collect(),
            scratch: sample::Scratch::with_capacity(vocab as usize, room),
        }
    }

    /// The token that a slot chose last.
    pub fn last(&self, slot: SlotId) -> Option<TokenId> {
        self.slots.get(slot.ix()).and_then(|s| s.last)
    }

    /// Asks the slot's chain to end before its next token.
    pub fn stop(&mut self, slot: SlotId) {
        if let Some(s) = self.slots.get_mut(slot.ix()) {
            s.stopped = true;
        }
    }

    /// Whether [`Slots::stop`] was called since the last step of this slot began.
    pub fn stopped(&self, slot: SlotId) -> bool {
        self.slots[slot.ix()].stopped
    }

    /// Notes the tokens of a round in the histories, before it runs.
    pub fn observe(&mut self, batch: &Batch, first_round: bool) {
        for span in &batch.spans {
            let slot = &mut self.slots[span.slot.ix()];
            slot.stopped &= !first_round;
            slot.history.truncate(span.pos as usize);
            let rows = span.start as usize..(span.start + span.rows) as usize;
            slot.history.extend(batch.rows[rows].iter().map(|r| r.token));
        }
    }

    /// Turns the wanted rows of a round into results. `logits` and `hidden` hold one row per
    /// wanted row; either may be empty where the plan does not compute it.
    ///
    /// # Errors
    /// `is_malformed` when no logit of a row is usable, or the plan lacks what is wanted.
    pub fn finish(
        &mut self,
        step: &[SeqStep<'_>],
        batch: &Batch,
        logits: &mut [f32],
        hidden: &[f32],
        out: &mut StepOutput,
    ) -> Result<()> {
        let n = batch.wanted.len().max(1);
        let (vocab, width) = (logits.len() / n, hidden.len() / n);
        for (ix, wanted) in batch.wanted.iter().enumerate() {
            let row = batch.rows[wanted.row as usize];
            let at = RowOut { seq: row.seq, pos: row.pos };
            let lacks =
                |what: &str| crate::Error::malformed(format!("step: the plan computes no {what}"));
            if wanted.want == Want::Hidden {
                if width == 0 {
                    return Err(lacks("hidden rows"));
                }
                out.hidden.extend_from_slice(&hidden[ix * width..][..width]);
                out.hidden_rows.push(at);
                continue;
            }
            if vocab == 0 {
                return Err(lacks("logits"));
            }
            let logits = &mut logits[ix * vocab..][..vocab];
            match wanted.want {
                Want::Logits => {
                    out.logits.extend_from_slice(logits);
                    out.logit_rows.push(at);
                }
                Want::LogprobOf(id) => out.logprobs.push((at, sample::logprob_of(logits, id))),
                Want::Token { logprob } => {
                    let seq = &step[row.seq as usize];
                    let token = self.choose(logits, seq.sample, seq.slot, row.pos + 1, logprob)?;
                    out.tokens.push(TokenOut { seq: row.seq, ..token });
                }
                Want::Hidden => unreachable!("handled above"),
            }
        }
        Ok(())
    }

    fn choose(
        &mut self,
        logits: &mut [f32],
        params: Option<SampleParams>,
        slot: SlotId,
        pos: u32,
        logprob: bool,
    ) -> Result<TokenOut> {
        let slot = &mut self.slots[slot.ix()];
        let known = &slot.history[..slot.history.len().min(pos as usize)];
        // Penalties change the row in place; the log-probability is of the row as it came.
        let lse = logprob.then(|| sample::log_sum_exp(logits));
        let before = params.is_some_and(|p| logprob && p.penalises()).then(|| logits.to_vec());
        let token =
            sample::choose(logits, &params.unwrap_or_default(), known, pos, &mut self.scratch)?;
        let row = before.as_deref().unwrap_or(logits);
        let logprob = lse.map_or(f32::NAN, |lse| (f64::from(row[token as usize]) - lse) as f32);
        slot.last = Some(token);
        Ok(TokenOut { seq: 0, pos, token, logprob })
    }
}
