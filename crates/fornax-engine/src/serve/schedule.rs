//! Who takes part in the next step and with how many tokens: those that decode first, then
//! prompts as far as the budget reaches, in the order of their rank. It chooses no token.

use std::ops::Range;

use fornax_plan::Want;

use super::api::Pooling;
use super::core::Core;
use super::cost::Work;
use super::request::{End, Seq};
use crate::error::Error;
use crate::speculate::{DRAFT_MAX, look_up};

/// Rows of a prompt that run in a step however long it takes, so that every prompt gets on.
const PROMPT_MIN: usize = 16;
/// How much longer than the busy time a step gets at most for a crowd of prompts.
const CROWD_MAX: f64 = 5.0;
/// Rows of whole logits that a prompt asks for in one step.
const LOGIT_ROWS_MAX: usize = 16;

/// One sequence's part of a step.
#[derive(Clone, Debug)]
pub(crate) struct Pick {
    /// Its place among the running.
    pub(crate) at: usize,
    /// Position of its first row.
    pub(crate) pos: usize,
    /// Its rows, the guessed ones among them.
    pub(crate) rows: usize,
    /// Which of the step's wants are its.
    pub(crate) wants: Range<usize>,
    /// Whether it reaches the sequence's last token.
    pub(crate) ends: bool,
    /// Whether it is part of a prompt.
    pub(crate) is_prompt: bool,
    /// Whether its token is the one that the device chooses in the step before.
    pub(crate) follows: bool,
}

impl Work {
    /// This and `rows` more from `pos` on.
    pub(crate) fn with(self, rows: usize, pos: usize) -> Work {
        let (rows, pos) = (rows as f64, pos as f64);
        Work { rows: self.rows + rows, seen: self.seen + rows * (pos + rows / 2.0) }
    }
}

impl Core {
    /// Fills `picks` and `wants`.
    ///
    /// # Errors
    /// Where a state could not be read.
    pub(super) fn schedule(&mut self) -> Result<(), Error> {
        self.picks.clear();
        self.wants.clear();
        // One that finds no room gives way and is no suspect any more.
        while let Some(at) = self.running.iter().position(|s| s.suspect && s.end.is_none()) {
            self.pick_prompt(at, usize::MAX, 0);
            if !self.picks.is_empty() {
                return Ok(());
            }
        }
        self.pick_decodes();
        if self.may_guess() {
            self.draft()?;
        }
        self.pick_prompts();
        Ok(())
    }

    /// Rows and wanted rows that the step has left.
    fn left(&self) -> (usize, usize) {
        let rows: usize = self.picks.iter().map(|p| p.rows).sum();
        let wanted: usize = self.wants.iter().map(|(r, _)| r.len()).sum();
        (self.rules.rows - rows.min(self.rules.rows), self.rules.wanted.saturating_sub(wanted))
    }

    fn pick_decodes(&mut self) {
        let mut at = 0;
        while at < self.running.len() {
            let seq = &mut self.running[at];
            if !seq.decodes() || seq.end.is_some() {
                at += 1;
                continue;
            }
            if !self.kv.ensure(&mut seq.table, seq.tokens.len()) {
                // Whoever ranks last gives way; it may be this one.
                if self.running.len() == 1 {
                    self.running[at].finish(End::Failed(Error::no_room()));
                    return;
                }
                self.preempt_last();
                continue;
            }
            let rows = seq.pending();
            let (rows_left, wanted_left) = self.left();
            if rows <= rows_left && wanted_left > 0 {
                self.pick(at, rows);
            }
            at += 1;
        }
    }

    /// Milliseconds that the step may take. The more wait for their first token, against those
    /// that decode, the longer they are given; half the busy time is always theirs.
    fn budget(&self) -> f64 {
        if self.picks.is_empty() {
            return self.rules.idle_ms;
        }
        let begun = self.running.iter().filter(|s| !s.decodes()).count();
        let first = begun + self.waiting.len().min(self.free_slots.len());
        let crowd = 1.0 + 2.0 * first as f64 / (self.picks.len() + 1) as f64;
        let busy = self.rules.busy_ms;
        (busy * crowd.min(CROWD_MAX)).max(self.cost.predict(self.work()) + busy / 2.0)
    }

    fn pick_prompts(&mut self) {
        let budget = self.budget();
        let mut at = 0;
        let mut first = true;
        while at < self.running.len() {
            let seq = &self.running[at];
            if seq.decodes() || seq.end.is_some() || seq.pending() == 0 {
                at += 1;
                continue;
            }
            let fit = self.cost.rows_within(budget, self.work(), seq.computed as f64) as usize;
            if fit < PROMPT_MIN && !first {
                break;
            }
            let least = if first { PROMPT_MIN } else { 0 };
            let picked = self.picks.len();
            if !self.pick_prompt(at, fit, least) {
                break;
            }
            first &= self.picks.len() == picked;
            at += 1;
        }
    }

    /// Picks up to `fit` rows of a sequence, `least` at least where it has them. False when the
    /// step can take no more of anybody.
    fn pick_prompt(&mut self, at: usize, fit: usize, least: usize) -> bool {
        let (rows_left, wanted_left) = self.left();
        if rows_left == 0 || wanted_left == 0 {
            return false;
        }
        let seq = &self.running[at];
        let each = wants_each_row(seq);
        let mut most = seq.pending().min(fit.max(least)).min(rows_left);
        if each {
            let many = seq.prompt_logprobs && seq.logprobs.is_some_and(|n| n > 0);
            most = most.min(wanted_left).min(if many { LOGIT_ROWS_MAX } else { usize::MAX });
        }
        let rows = self.cut(seq, most);
        let seq = &mut self.running[at];
        if self.kv.ensure(&mut seq.table, seq.computed + rows) {
            self.pick(at, rows);
            return true;
        }
        // What there is room for; else somebody who ranks lower gives way, unless the step
        // needs him.
        let covered = self.kv.covered(&seq.table);
        if covered > seq.computed {
            let rows = covered - seq.computed;
            self.pick(at, rows);
        } else if self.running.len() == 1 {
            self.running[at].finish(End::Failed(Error::no_room()));
        } else if at + 1 < self.running.len()
            && self.picks.iter().all(|p| p.at + 1 < self.running.len())
        {
            self.preempt_last();
            return self.pick_prompt(at, fit, least);
        } else if self.picks.is_empty() {
            // It ranks last and nobody else can run.
            self.preempt_last();
            return false;
        }
        true
    }

    /// Cuts a prompt's part so that the next one starts where a chunk of the cache does; a model
    /// with states stops at the last such place to save them.
    fn cut(&self, seq: &Seq, most: usize) -> usize {
        let chunk = self.kv.chunk();
        let (from, n) = (seq.computed, seq.tokens.len());
        let whole = from + most == n;
        let saves = self.stateful && self.kv.saves_states();
        let to = if !whole {
            (from + most) / chunk * chunk
        } else if saves {
            (n - 1) / chunk * chunk
        } else {
            n
        };
        if to > from { to - from } else { most }
    }

    /// Adds a sequence to the step, with what is wanted of its rows.
    fn pick(&mut self, at: usize, rows: usize) {
        let seq = &self.running[at];
        let (from, start) = (seq.computed, self.wants.len());
        let ends = from + rows == seq.tokens.len();
        let end = rows as u32;
        if seq.prompt_logprobs {
            // The row at p tells of the token at p + 1.
            let first = (seq.told.max(1) - 1).max(from);
            let last = (from + rows).min(seq.prompt - 1);
            let all = seq.logprobs.is_some_and(|n| n > 0);
            if all && first < last {
                let rows = (first - from) as u32..(last - from) as u32;
                self.wants.push((rows, Want::Logits));
            } else {
                let of = |p: usize| ((p - from) as u32, Want::LogprobOf(seq.tokens[p + 1]));
                self.wants.extend((first..last).map(of).map(|(r, w)| (r..r + 1, w)));
            }
        }
        match seq.pool {
            Some(Pooling::Mean) if seq.pooled_rows < from + rows => {
                let first = (seq.pooled_rows.max(from) - from) as u32;
                self.wants.push((first..end, Want::Hidden));
            }
            Some(Pooling::Last) if ends => self.wants.push((end - 1..end, Want::Hidden)),
            _ => {}
        }
        if ends && seq.wants_token() {
            let logprob = seq.logprobs.is_some();
            let want = if seq.on_host() { Want::Logits } else { Want::Token { logprob } };
            self.wants.push((end - 1..end, want));
        }
        self.picks.push(Pick {
            at,
            pos: from,
            rows,
            wants: start..self.wants.len(),
            ends,
            is_prompt: !seq.decodes(),
            follows: false,
        });
    }

    /// Fills `next` with the step after the one in `picks`, which runs; false where there is to be
    /// none: where somebody could join or leave, or a token has to be known first.
    pub(super) fn schedule_next(&mut self) -> bool {
        self.next.picks.clear();
        self.next.wants.clear();
        let may_join = match (self.waiting.first_key_value(), self.running.last()) {
            (Some((rank, _)), Some(last)) => !self.free_slots.is_empty() || last.rank().0 > rank.0,
            (waits, _) => waits.is_some(),
        };
        if !self.rules.ahead || may_join || self.picks.len() != self.running.len() {
            return false;
        }
        let chunk = self.kv.chunk();
        let saves = self.stateful && self.kv.saves_states();
        let simple = |p: &Pick| {
            let seq = &self.running[p.at];
            let goes_on = p.ends && seq.end.is_none() && seq.wants_token();
            // A state is read where a chunk ends, before anything else changes it.
            let read = saves && (p.pos + p.rows).is_multiple_of(chunk);
            goes_on && !seq.on_host() && !seq.suspect && seq.drafted == 0 && !read
        };
        if !self.picks.iter().all(simple) || self.may_guess() && self.would_guess() {
            return false;
        }
        for i in 0..self.picks.len() {
            let at = self.picks[i].at;
            let seq = &mut self.running[at];
            let pos = seq.tokens.len();
            // With the token under way it has as many as it may.
            if pos + 1 >= seq.most {
                continue;
            }
            if !self.kv.ensure(&mut seq.table, pos + 1) {
                return false;
            }
            let start = self.next.wants.len();
            self.next.wants.push((0..1, Want::Token { logprob: seq.logprobs.is_some() }));
            let wants = start..start + 1;
            let pick =
                Pick { at, pos, rows: 1, wants, ends: true, is_prompt: false, follows: true };
            self.next.picks.push(pick);
        }
        !self.next.picks.is_empty()
    }

    /// Whether a step may guess ahead: where steps are handed over one behind another, as long as that gives more.
    fn may_guess(&self) -> bool {
        self.rules.speculate && (!self.rules.ahead || self.trial.guesses())
    }

    /// Whether any of the running would guess ahead now.
    fn would_guess(&mut self) -> bool {
        let yield_rate = self.picks.len() as f64 / self.cost.predict(self.work()).max(1e-6);
        (0..self.picks.len()).any(|i| self.guesses(i, DRAFT_MAX, yield_rate))
    }

    /// Puts the guess of a pick's sequence into `guess`, if that pays and there is one.
    fn guesses(&mut self, i: usize, most: usize, yield_rate: f64) -> bool {
        let Pick { at, pos, .. } = self.picks[i];
        let seq = &mut self.running[at];
        let room = (seq.most - seq.tokens.len()).saturating_sub(1);
        let most = most.min(room);
        self.guess.clear();
        if most == 0 || seq.on_host() || !seq.wants_token() {
            return false;
        }
        let worth = f64::from(seq.record.worth());
        if worth > yield_rate * self.cost.row(pos as f64) {
            look_up(&seq.tokens, most, &mut self.guess);
        }
        !self.guess.is_empty()
    }

    /// Lets decoding sequences guess ahead while that pays: a guessed token must be likelier to
    /// come right, for the time that its row takes, than the step yields tokens without it.
    fn draft(&mut self) -> Result<(), Error> {
        let prompts = self.running.iter().any(|s| !s.decodes());
        if self.picks.is_empty() || prompts {
            return Ok(());
        }
        let alone = self.work();
        let yield_rate = self.picks.len() as f64 / self.cost.predict(alone).max(1e-6);
        for i in 0..self.picks.len() {
            let Pick { at, rows, .. } = self.picks[i];
            let (rows_left, wanted_left) = self.left();
            let most = DRAFT_MAX.min(rows_left).min(wanted_left);
            if rows != 1 || !self.guesses(i, most, yield_rate) {
                continue;
            }
            let seq = &mut self.running[at];
            let positions = seq.tokens.len() + self.guess.len();
            if !self.kv.ensure(&mut seq.table, positions) {
                continue;
            }
            seq.drafted = self.guess.len();
            seq.tokens.extend_from_slice(&self.guess);
            let slot = seq.slot;
            if let (true, Some(slot)) = (self.stateful, slot) {
                let mut before = std::mem::take(&mut self.running[at].before);
                self.read_state(slot, &mut before)?;
                self.running[at].before = before;
            }
            let pick = &mut self.picks[i];
            pick.rows = 1 + self.guess.len();
            // Its one want is the last row's; now every row chooses.
            if let [(range, _)] = &mut self.wants[pick.wants.clone()] {
                *range = 0..pick.rows as u32;
            }
        }
        Ok(())
    }
}

/// Whether something is wanted of every row of a prompt.
fn wants_each_row(seq: &Seq) -> bool {
    (seq.prompt_logprobs && seq.told < seq.prompt) || seq.pool == Some(Pooling::Mean)
}
