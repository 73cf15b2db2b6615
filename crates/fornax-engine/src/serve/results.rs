//! What a step's rows turn into: tokens that are told, ends, sums of hidden states, and chunks
//! that can be found again. It decides nothing about who runs.

use std::ops::Range;

use fornax_plan::sample::log_sum_exp;
use fornax_plan::{Cmd, StepOutput};

use super::api::{Finish, Pooling, TokenUpdate, Update};
use super::choose::{Chosen, likeliest};
use super::core::Core;
use super::request::{End, Seq};
use super::schedule::Pick;
use crate::error::Error;

/// How far the lists of a step's output are read.
#[derive(Default)]
struct Read {
    tokens: usize,
    logits: usize,
    logprobs: usize,
    hidden: usize,
}

/// The entries of a list that belong to sequence `seq`, from `at` on, which moves past them.
fn mine(len: usize, at: &mut usize, seq: u32, of: impl Fn(usize) -> u32) -> Range<usize> {
    let from = *at;
    while *at < len && of(*at) == seq {
        *at += 1;
    }
    from..*at
}

impl Core {
    /// Hands out what the step that just ran has yielded.
    ///
    /// # Errors
    /// Where a state could not be read or written.
    pub(super) fn hand_out(&mut self) -> Result<(), Error> {
        let mut out = std::mem::take(&mut self.out);
        let mut read = Read::default();
        let mut result = Ok(());
        for i in 0..self.picks.len() {
            let pick = self.picks[i].clone();
            let one = self.hand_out_one(i as u32, &pick, &mut out, &mut read);
            result = result.and(one);
        }
        self.out = out;
        result
    }

    fn hand_out_one(
        &mut self,
        i: u32,
        pick: &Pick,
        out: &mut StepOutput,
        read: &mut Read,
    ) -> Result<(), Error> {
        let tokens = mine(out.tokens.len(), &mut read.tokens, i, |x| out.tokens[x].seq);
        let logits = mine(out.logit_rows.len(), &mut read.logits, i, |x| out.logit_rows[x].seq);
        let told = mine(out.logprobs.len(), &mut read.logprobs, i, |x| out.logprobs[x].0.seq);
        let hidden = mine(out.hidden_rows.len(), &mut read.hidden, i, |x| out.hidden_rows[x].seq);
        let seq = &mut self.running[pick.at];
        seq.suspect &= !pick.ends;
        tell_prompt(seq, out, told, logits.clone(), self.vocab);
        for row in hidden {
            add_hidden(
                seq,
                out.hidden_rows[row].pos,
                &out.hidden[row * self.hidden..][..self.hidden],
            );
        }
        if seq.end.is_some() {
            // The receiver wants no more: nothing of this step counts.
            let known = seq.tokens.len() - std::mem::take(&mut seq.drafted);
            seq.tokens.truncate(known);
            return Ok(());
        }
        if !pick.ends {
            seq.computed += pick.rows;
        } else if !seq.wants_token() {
            seq.computed += pick.rows;
            seq.finish(End::Finished(Finish::Length));
        } else if seq.on_host() {
            seq.computed += pick.rows;
            let row = logits.end.saturating_sub(1) * self.vocab;
            match self.chooser.choose(seq, &mut out.logits[row..row + self.vocab]) {
                Ok(Chosen::Token(update)) => self.stats.tokens += take_one(seq, update),
                Ok(Chosen::End) => seq.finish(End::Finished(Finish::Stop)),
                Err(e) => seq.finish(End::Failed(e)),
            }
        } else {
            let kept = self.take_chosen(pick, &out.tokens[tokens]);
            self.stats.tokens += kept;
            self.take_back(pick)?;
        }
        self.advance(pick.at)
    }

    /// Takes the tokens that the device chose, as far as the guess they stand on was right.
    /// Returns how many were told.
    fn take_chosen(&mut self, pick: &Pick, chosen: &[fornax_plan::TokenOut]) -> u64 {
        let seq = &mut self.running[pick.at];
        let drafted = seq.drafted;
        let known = seq.tokens.len() - drafted;
        let (mut accepted, mut new) = (0, 0);
        let mut end = None;
        let mut updates = Vec::with_capacity(chosen.len());
        for (j, out) in chosen.iter().enumerate() {
            if seq.stop.contains(&out.token) {
                end = Some(Finish::Stop);
                break;
            }
            let right = j < drafted && seq.tokens[known + j] == out.token;
            if right {
                accepted += 1;
            } else {
                seq.tokens.truncate(known + j);
                seq.tokens.push(out.token);
            }
            new += 1;
            let logprob = seq.logprobs.map(|_| out.logprob);
            updates.push(TokenUpdate { id: out.token, logprob, top: Vec::new() });
            if known + new == seq.most {
                end = Some(Finish::Length);
                break;
            }
            if !right {
                break;
            }
        }
        seq.tokens.truncate(known + new);
        seq.computed = known + accepted;
        if drafted > 0 {
            seq.record.note(drafted, accepted);
            self.stats.drafted += drafted as u64;
            self.stats.accepted += accepted as u64;
        }
        let told = updates.len() as u64;
        if told > 0 {
            seq.tell(Update::Tokens(updates));
        }
        if let Some(end) = end {
            seq.finish(End::Finished(end));
        }
        told
    }

    /// Takes states back to where they were before a guess that was not right to its end: the
    /// right tokens then run once more.
    fn take_back(&mut self, pick: &Pick) -> Result<(), Error> {
        let seq = &mut self.running[pick.at];
        let drafted = std::mem::take(&mut seq.drafted);
        let Some(slot) = seq.slot else { return Ok(()) };
        if self.stateful && drafted > 0 && seq.computed < pick.pos + pick.rows {
            seq.computed = pick.pos;
            self.program.command(Cmd::WriteState { slot, data: &seq.before })?;
        }
        Ok(())
    }

    /// Lists what was computed, with the states where a chunk ends.
    fn advance(&mut self, at: usize) -> Result<(), Error> {
        let chunk = self.kv.chunk();
        let seq = &mut self.running[at];
        let mut state = std::mem::take(&mut self.state);
        let mut read = Ok(false);
        let saves = self.stateful && self.kv.saves_states() && seq.computed.is_multiple_of(chunk);
        if let (true, Some(slot)) = (saves, seq.slot) {
            read = self.program.command(Cmd::ReadState { slot, out: &mut state }).map(|()| true);
        }
        if let Ok(read) = read {
            let state = read.then_some(&state[..]);
            self.kv.advance(&mut seq.table, &seq.tokens, seq.computed, state);
        }
        self.state = state;
        Ok(read.map(drop)?)
    }
}

/// Takes the one token that the host chose. Returns how many were told.
fn take_one(seq: &mut Seq, update: TokenUpdate) -> u64 {
    let id = update.id;
    if seq.stop.contains(&id) {
        seq.finish(End::Finished(Finish::Stop));
        return 0;
    }
    let accepted = seq.constraint.as_mut().map_or(Ok(()), |c| c.accept(id));
    if let Err(e) = accepted {
        seq.finish(End::Failed(e));
        return 0;
    }
    seq.tokens.push(id);
    seq.tell(Update::Tokens(vec![update]));
    if seq.constraint.as_mut().is_some_and(|c| c.is_done()) {
        seq.finish(End::Finished(Finish::Stop));
    } else if seq.tokens.len() == seq.most {
        seq.finish(End::Finished(Finish::Length));
    }
    1
}

/// Tells the log-probabilities of prompt tokens that this step yielded.
fn tell_prompt(
    seq: &mut Seq,
    out: &StepOutput,
    given: Range<usize>,
    logits: Range<usize>,
    vocab: usize,
) {
    if !seq.prompt_logprobs || seq.told >= seq.prompt {
        return;
    }
    let mut updates = Vec::new();
    if seq.told == 0 {
        updates.push(TokenUpdate { id: seq.tokens[0], logprob: None, top: Vec::new() });
        seq.told = 1;
    }
    for (row, logprob) in &out.logprobs[given] {
        let at = row.pos as usize + 1;
        if at == seq.told {
            let id = seq.tokens[at];
            updates.push(TokenUpdate { id, logprob: Some(*logprob), top: Vec::new() });
            seq.told += 1;
        }
    }
    for row in logits {
        let at = out.logit_rows[row].pos as usize + 1;
        if at == seq.told && at < seq.prompt {
            let row = &out.logits[row * vocab..][..vocab];
            let sum = log_sum_exp(row);
            let id = seq.tokens[at];
            let logprob = Some((f64::from(row[id as usize]) - sum) as f32);
            let top = likeliest(row, usize::from(seq.logprobs.unwrap_or(0)), sum);
            updates.push(TokenUpdate { id, logprob, top });
            seq.told += 1;
        }
    }
    if !updates.is_empty() {
        seq.tell(Update::Prompt(updates));
    }
}

/// Adds a hidden row to what is pooled.
fn add_hidden(seq: &mut Seq, pos: u32, row: &[f32]) {
    match seq.pool {
        Some(Pooling::Last) => {
            seq.pooled.clear();
            seq.pooled.extend(row.iter().map(|v| f64::from(*v)));
            seq.pooled_rows = seq.prompt;
        }
        Some(Pooling::Mean) if pos as usize == seq.pooled_rows => {
            seq.pooled.resize(row.len(), 0.0);
            seq.pooled.iter_mut().zip(row).for_each(|(sum, v)| *sum += f64::from(*v));
            seq.pooled_rows += 1;
        }
        _ => {}
    }
}
