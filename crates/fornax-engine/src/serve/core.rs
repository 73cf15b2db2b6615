//! Everything that changes, and one turn of the loop over it: let in, schedule, run, hand out.
//! Whoever owns it calls [`Core::turn`]; it has no thread, no channel and no text of its own.

use std::cmp::Reverse;
use std::collections::BTreeMap;
#[cfg(test)]
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};
#[cfg(test)]
use std::time::Duration;
use std::time::Instant;

use fornax_plan::{Cmd, Plan, Program, SeqStep, SlotId, StepOutput, Ticket, TokenId, Tokens, Want};

use super::api::{Finish, RequestId, Stats, Update};
use super::choose::Chooser;
use super::cost::{Cost, Work};
use super::request::{End, Seq};
use super::schedule::Pick;
use super::trial::Trial;
use crate::error::Error;
use crate::kv::{CopyOf, Kv, KvRules};

/// KV groups of a plan, at most; every step lists a block table for each.
pub(crate) const GROUPS_MAX: usize = 8;

/// What a core is made for.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) slots: usize,
    /// Positions of one request.
    pub(crate) context: usize,
    /// Token rows and wanted rows of one step.
    pub(crate) rows: usize,
    pub(crate) wanted: usize,
    pub(crate) kv: KvRules,
    /// Milliseconds of a step, while others decode and while none does.
    pub(crate) busy_ms: f64,
    pub(crate) idle_ms: f64,
    pub(crate) speculate: bool,
    /// Hand over a step while the one before it runs, where its tokens need not be known.
    pub(crate) ahead: bool,
}

/// Where time comes from.
#[derive(Clone, Debug)]
pub(crate) enum Clock {
    Real,
    /// Nanoseconds since a moment, counted by a simulation.
    #[cfg(test)]
    Told(Instant, Arc<AtomicU64>),
}

impl Clock {
    pub(crate) fn now(&self) -> Instant {
        match self {
            Clock::Real => Instant::now(),
            #[cfg(test)]
            Clock::Told(start, ns) => *start + Duration::from_nanos(ns.load(Ordering::Relaxed)),
        }
    }
}

/// What a turn came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// A step ran, or a request ended.
    Worked,
    /// There is nothing to do.
    Idle,
}

/// A place in the queue: by priority, then by arrival.
type Rank = (Reverse<i32>, RequestId);

/// The engine without its thread.
#[allow(clippy::vec_box, reason = "a change of order or place moves a pointer, not a sequence")]
pub(crate) struct Core {
    pub(super) program: Box<dyn Program>,
    pub(super) rules: Rules,
    pub(super) groups: usize,
    pub(super) stateful: bool,
    pub(super) vocab: usize,
    pub(super) hidden: usize,
    pub(super) kv: Kv,
    pub(super) running: Vec<Box<Seq>>,
    pub(super) waiting: BTreeMap<Rank, Box<Seq>>,
    pub(super) free_slots: Vec<SlotId>,
    pub(super) cost: Cost,
    pub(super) trial: Trial,
    pub(super) clock: Clock,
    pub(super) stats: Stats,
    pub(super) chooser: Chooser,
    /// The step under way and what comes of it.
    pub(super) picks: Vec<Pick>,
    pub(super) wants: Vec<(std::ops::Range<u32>, Want)>,
    pub(super) out: StepOutput,
    /// The step that was handed over behind it.
    pub(super) next: Next,
    pub(super) guess: Vec<TokenId>,
    copies: Vec<CopyOf>,
    pub(super) state: Vec<f32>,
    steps: Vec<SeqStep<'static>>,
    tables: Vec<[&'static [fornax_plan::BlockId]; GROUPS_MAX]>,
    next_deadline: Option<Instant>,
    /// Requests that are over and have not been told.
    over: Vec<Box<Seq>>,
    /// Memory for those that wait for a twin.
    put_off: Vec<Box<Seq>>,
}

/// A step that was handed over while the one before it ran, and goes on from the tokens that the
/// device chose there. As long as there is one, nobody joins or leaves and no block is taken back.
#[derive(Default)]
pub(super) struct Next {
    ticket: Option<Ticket>,
    pub(super) picks: Vec<Pick>,
    pub(super) wants: Vec<(std::ops::Range<u32>, Want)>,
}

/// Requests at the head of the queue that may wait for a twin while others pass.
const PUT_OFF_MAX: usize = 64;

/// An empty vector's memory for elements of another lifetime.
fn reuse<A, B>(mut from: Vec<A>) -> Vec<B> {
    from.clear();
    from.into_iter().map(|_| unreachable!("the vector is empty")).collect()
}

impl Core {
    pub(crate) fn new(program: Box<dyn Program>, plan: &Plan, rules: Rules, clock: Clock) -> Core {
        let now = clock.now();
        Core {
            program,
            groups: plan.kv.len(),
            stateful: !plan.states.is_empty(),
            vocab: plan.hyper.vocab as usize,
            hidden: plan.hidden_width() as usize,
            kv: Kv::new(&plan.kv, rules.kv),
            running: Vec::with_capacity(rules.slots),
            waiting: BTreeMap::new(),
            free_slots: (0..rules.slots as u32).rev().map(SlotId).collect(),
            cost: Cost::new(),
            trial: Trial::default(),
            clock,
            stats: Stats::new(rules.kv.blocks, now),
            chooser: Chooser::new(plan.hyper.vocab as usize),
            picks: Vec::new(),
            wants: Vec::new(),
            // Whole rows come for those that are chosen on the host: room for all, touched as they come.
            out: StepOutput {
                logits: Vec::with_capacity(rules.wanted * plan.hyper.vocab as usize),
                ..StepOutput::default()
            },
            next: Next::default(),
            guess: Vec::new(),
            copies: Vec::new(),
            state: Vec::new(),
            steps: Vec::new(),
            tables: Vec::new(),
            next_deadline: None,
            over: Vec::new(),
            put_off: Vec::new(),
            rules,
        }
    }

    /// Puts a request in the queue.
    pub(crate) fn enqueue(&mut self, seq: Box<Seq>) {
        self.note_deadline(seq.deadline);
        self.waiting.insert(seq.rank(), seq);
    }

    fn note_deadline(&mut self, deadline: Option<Instant>) {
        self.next_deadline = [self.next_deadline, deadline].into_iter().flatten().min();
    }

    /// Ends a request, wherever it is.
    pub(crate) fn cancel(&mut self, id: RequestId) {
        if let Some(seq) = self.running.iter_mut().find(|s| s.id == id) {
            seq.finish(End::Finished(Finish::Cancelled));
        } else if let Some(rank) = self.waiting.keys().find(|r| r.1 == id).copied()
            && let Some(mut seq) = self.waiting.remove(&rank)
        {
            seq.finish(End::Finished(Finish::Cancelled));
            self.over.push(seq);
        }
    }

    /// Tells the requests that are over how they ended. Apart from the turn, so that a snapshot
    /// can be published first: who hears of an end finds it counted.
    pub(crate) fn tell_over(&mut self) {
        self.over.drain(..).for_each(|mut seq| seq.tell_end());
    }

    /// Ends every request with the same word.
    pub(crate) fn end_all(&mut self, how: impl Fn() -> End) {
        self.forget_next();
        for mut seq in std::mem::take(&mut self.waiting).into_values() {
            seq.finish(how());
            self.over.push(seq);
        }
        for seq in &mut self.running {
            seq.finish(how());
        }
        self.sweep();
    }

    /// Whether nothing runs and nothing waits.
    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// A snapshot.
    pub(crate) fn stats(&self) -> Stats {
        let (used, cached) = self.kv.usage();
        Stats {
            running: self.running.len(),
            waiting: self.waiting.len(),
            kv_blocks_used: used,
            kv_blocks_cached: cached,
            ..self.stats.clone()
        }
    }

    /// Positions that one request can have.
    pub(crate) fn capacity(&self) -> usize {
        let (mut fits, mut too_many) = (0, self.rules.context + 1);
        while fits + 1 < too_many {
            let middle = usize::midpoint(fits, too_many);
            if self.kv.can_ever_fit(middle) { fits = middle } else { too_many = middle }
        }
        fits
    }

    /// Recounts blocks and places.
    ///
    /// # Errors
    /// A sentence about the first thing that is wrong.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.kv.check(self.running.iter().chain(self.waiting.values()).map(|s| &s.table))?;
        let taken = self.running.iter().filter(|s| s.slot.is_some()).count();
        if taken + self.free_slots.len() != self.rules.slots || taken != self.running.len() {
            return Err(format!(
                "{taken} slots are taken and {} free of {}, {} sequences run",
                self.free_slots.len(),
                self.rules.slots,
                self.running.len()
            ));
        }
        if !self.running.is_sorted_by_key(|s| s.rank()) {
            return Err("the running sequences are out of order".into());
        }
        Ok(())
    }

    /// One turn: ends what is over, lets in what fits, runs one step and hands out its results. A
    /// step that was handed over the turn before takes the place of a new one.
    ///
    /// # Errors
    /// What made the device useless; every request has to be ended then.
    pub(crate) fn turn(&mut self) -> Result<Turn, Error> {
        self.expire();
        let ticket = match self.next.ticket.take() {
            Some(ticket) => {
                std::mem::swap(&mut self.picks, &mut self.next.picks);
                std::mem::swap(&mut self.wants, &mut self.next.wants);
                Ok(ticket)
            }
            None => {
                self.sweep();
                self.admit()?;
                self.schedule()?;
                if self.picks.is_empty() {
                    self.sweep();
                    return Ok(if self.over.is_empty() { Turn::Idle } else { Turn::Worked });
                }
                self.stats.step_since = Some(self.clock.now());
                self.submit()
            }
        };
        self.stats.kv_blocks_peak = self.stats.kv_blocks_peak.max(self.kv.usage().0);
        let ran = match ticket {
            Ok(ticket) => {
                self.go_ahead();
                self.program.wait(ticket, &mut self.out)
            }
            Err(e) => Err(e),
        };
        let ms = self.note_step();
        match ran {
            Ok(()) => {
                let work = self.work();
                self.stats.last_rows = work.rows as u32;
                let (prompts, told) = (self.picks.iter().any(|p| p.is_prompt), self.stats.tokens);
                self.cost.observe(work, prompts, ms);
                self.hand_out()?;
                if !prompts {
                    self.trial.note(self.picks.len(), self.stats.tokens - told, ms);
                }
            }
            Err(e) if e.is_lost() => return Err(e.into()),
            Err(e) => {
                self.forget_next();
                self.suspect(&e);
            }
        }
        if self.next.ticket.is_none() {
            self.sweep();
        }
        Ok(Turn::Worked)
    }

    /// Counts the step that has just ended; gives its milliseconds. One that was handed over behind
    /// it began now.
    fn note_step(&mut self) -> f64 {
        let now = self.clock.now();
        let began = self.stats.step_since.unwrap_or(now);
        let ms = now.duration_since(began).as_secs_f64() * 1e3;
        self.stats.step_since = self.next.ticket.map(|_| now);
        self.stats.last_step = now;
        self.stats.last_step_ms = ms as f32;
        self.stats.steps += 1;
        ms
    }

    /// Hands over the step after the one under way, where it needs no token that is not known.
    fn go_ahead(&mut self) {
        if !self.schedule_next() {
            return;
        }
        std::mem::swap(&mut self.picks, &mut self.next.picks);
        std::mem::swap(&mut self.wants, &mut self.next.wants);
        // What cannot be handed over now is scheduled anew when this step has ended; if the device
        // is lost, that step says so.
        self.next.ticket = self.submit().ok();
        std::mem::swap(&mut self.picks, &mut self.next.picks);
        std::mem::swap(&mut self.wants, &mut self.next.wants);
        self.stats.steps_ahead += u64::from(self.next.ticket.is_some());
    }

    /// Waits for the step that was handed over ahead, and uses nothing of it.
    fn forget_next(&mut self) {
        if let Some(ticket) = self.next.ticket.take() {
            // It fails with the step before it, or yields what nobody wants any more.
            drop(self.program.wait(ticket, &mut self.out));
            self.stats.step_since = None;
        }
    }

    /// What the picks of this step come to.
    pub(super) fn work(&self) -> Work {
        self.picks.iter().fold(Work { rows: 0.0, seen: 0.0 }, |sum, p| sum.with(p.rows, p.pos))
    }

    /// Hands the picks over.
    fn submit(&mut self) -> fornax_plan::Result<Ticket> {
        let mut tables: Vec<[&[fornax_plan::BlockId]; GROUPS_MAX]> =
            reuse(std::mem::take(&mut self.tables));
        for pick in &self.picks {
            let table = &self.running[pick.at].table;
            let mut all = [&[][..]; GROUPS_MAX];
            for (g, entry) in all.iter_mut().enumerate().take(self.groups) {
                *entry = table.group(g);
            }
            tables.push(all);
        }
        let mut steps: Vec<SeqStep<'_>> = reuse(std::mem::take(&mut self.steps));
        for (pick, tables) in self.picks.iter().zip(&tables) {
            let seq = &self.running[pick.at];
            let tokens = match pick.follows {
                true => Tokens::Last { draft: &[] },
                false => Tokens::Host(&seq.tokens[pick.pos..pick.pos + pick.rows]),
            };
            steps.push(SeqStep {
                slot: seq.slot.unwrap_or(SlotId(0)),
                tokens,
                pos: pick.pos as u32,
                tables: &tables[..self.groups],
                wants: &self.wants[pick.wants.clone()],
                sample: Some(seq.sample),
                max_new: 1,
                stop: &[],
            });
        }
        let ticket = self.program.submit(&steps);
        self.steps = reuse(steps);
        self.tables = reuse(tables);
        ticket
    }

    /// A step failed without naming a sequence: each of its sequences runs alone until it has
    /// shown that it can, and one that fails alone ends with the error.
    fn suspect(&mut self, error: &fornax_plan::Error) {
        let alone = self.picks.len() == 1;
        for i in 0..self.picks.len() {
            let at = self.picks[i].at;
            let seq = &mut self.running[at];
            let drafted = std::mem::take(&mut seq.drafted);
            seq.tokens.truncate(seq.tokens.len() - drafted);
            // A wrong guess may have been what failed.
            if alone && drafted == 0 {
                seq.finish(End::Failed(Error::from_step(error)));
                continue;
            }
            seq.suspect = true;
            if self.stateful {
                // Its states have moved on, and nobody knows how far.
                self.kv.release(&mut seq.table);
                seq.computed = 0;
            }
        }
    }

    /// Fails what is past its time.
    fn expire(&mut self) {
        let Some(next) = self.next_deadline else { return };
        let now = self.clock.now();
        if now < next {
            return;
        }
        let late = |s: &Seq| s.deadline.is_some_and(|d| d <= now);
        let error = || End::Failed(Error::deadline());
        for seq in self.running.iter_mut().filter(|s| late(s)) {
            seq.finish(error());
        }
        let gone: Vec<Rank> =
            self.waiting.iter().filter(|(_, s)| late(s)).map(|(rank, _)| *rank).collect();
        for rank in gone {
            if let Some(mut seq) = self.waiting.remove(&rank) {
                seq.finish(error());
                self.over.push(seq);
            }
        }
        let left = self.running.iter().chain(self.waiting.values());
        self.next_deadline = left.filter(|s| s.end.is_none()).filter_map(|s| s.deadline).min();
    }

    /// Takes out the running requests that are over.
    fn sweep(&mut self) {
        let mut at = 0;
        while at < self.running.len() {
            if self.running[at].end.is_none() {
                at += 1;
                continue;
            }
            let mut seq = self.running.remove(at);
            self.withdraw(&mut seq);
            self.over.push(seq);
        }
    }

    /// Takes slot and blocks from a sequence.
    fn withdraw(&mut self, seq: &mut Seq) {
        self.kv.release(&mut seq.table);
        self.free_slots.extend(seq.slot.take());
        seq.computed = 0;
        seq.suspect = false;
    }

    /// Sends the sequence that ranks last back to the queue; what it said stays said.
    pub(super) fn preempt_last(&mut self) {
        let Some(mut seq) = self.running.pop() else { return };
        self.withdraw(&mut seq);
        self.stats.preemptions += 1;
        self.enqueue(seq);
    }

    /// Lets in from the head of the queue what there is room for. A request that outranks a
    /// running one takes its place.
    fn admit(&mut self) -> Result<(), Error> {
        let mut put_off = std::mem::take(&mut self.put_off);
        while let Some((rank, mut seq)) = self.waiting.pop_first() {
            if put_off.len() < PUT_OFF_MAX && self.has_twin(&seq) {
                put_off.push(seq);
                continue;
            }
            let outranks = |s: &Seq| s.rank().0 > rank.0;
            let let_in = !self.free_slots.is_empty() && self.let_in(&mut seq)?;
            if let_in {
                let at = self.running.partition_point(|s| s.rank() < rank);
                self.running.insert(at, seq);
                continue;
            }
            self.waiting.insert(rank, seq);
            match self.running.last() {
                Some(last) if outranks(last) => self.preempt_last(),
                _ => break,
            }
        }
        self.waiting.extend(put_off.drain(..).map(|seq| (seq.rank(), seq)));
        self.put_off = put_off;
        Ok(())
    }

    /// Whether a sequence that runs is still computing what this one begins with: it then waits,
    /// and finds it in the cache.
    fn has_twin(&self, seq: &Seq) -> bool {
        if !self.rules.kv.cache || seq.may_reuse() == 0 {
            return false;
        }
        let chunk = self.kv.chunk();
        self.running.iter().filter(|r| !r.decodes() && !r.suspect && r.end.is_none()).any(|r| {
            let pairs = r.tokens.iter().zip(&seq.tokens);
            let same = pairs.take_while(|(a, b)| a == b).count() / chunk * chunk;
            // States are saved at the end of a prompt alone.
            let found = !self.stateful || same >= (r.tokens.len() - 1) / chunk * chunk;
            found && same >= r.computed + 2 * chunk
        })
    }

    /// Gives a request a slot and what the cache holds of it, where the rest fits too.
    fn let_in(&mut self, seq: &mut Seq) -> Result<bool, Error> {
        let most = seq.may_reuse();
        let mut hit =
            self.kv.begin(&mut seq.table, &seq.tokens, most, &mut self.copies, &mut self.state);
        let others = || self.running.iter().map(|s| (&s.table, s.tokens.len()));
        if !self.running.is_empty()
            && !self.kv.has_room(&seq.table, seq.tokens.len() + 1, &others())
        {
            self.kv.release(&mut seq.table);
            return Ok(false);
        }
        let Some(slot) = self.free_slots.pop() else {
            self.kv.release(&mut seq.table);
            return Ok(false);
        };
        seq.slot = Some(slot);
        for c in &self.copies {
            let CopyOf { group, from, to } = *c;
            self.program.command(Cmd::CopyBlock { group, from, to })?;
        }
        if self.stateful && hit > 0 {
            self.program.command(Cmd::WriteState { slot, data: &self.state })?;
        }
        // A prompt that was told row by row cannot have come from the cache.
        hit = hit.min(most);
        seq.computed = hit;
        self.stats.prefix_hits += hit.min(seq.prompt) as u64;
        if seq.cached.is_none() {
            self.stats.prompt_tokens += seq.prompt as u64;
            seq.cached = Some(hit as u32);
            seq.tell(Update::Started { cached: hit as u32 });
            if !seq.wants_token() && !seq.prompt_logprobs && seq.pool.is_none() {
                seq.finish(End::Finished(Finish::Length));
            }
        }
        Ok(true)
    }

    /// Reads the states of a slot into `into`.
    pub(super) fn read_state(&mut self, slot: SlotId, into: &mut Vec<f32>) -> Result<(), Error> {
        Ok(self.program.command(Cmd::ReadState { slot, out: into })?)
    }
}
