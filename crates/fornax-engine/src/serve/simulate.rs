//! A seeded simulation: the engine without its thread on a device that computes nothing. Every
//! answer is a hash of exactly what a row may see through its tables, windows and states, so that
//! a block that was given out wrongly, a state that kept a rejected token or a stale cache entry
//! shows as a wrong token. A failure prints its seed.

mod device;
mod real;

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fornax_plan::{SampleParams, TokenId};

use super::api::{Finish, Generation, Pooling, Publish, RequestId, TokenUpdate, Update};
use super::core::{Clock, Core, Rules, Turn};
use super::request::{End, Reply, Seq};
use crate::error::Error;
use crate::kv::KvRules;
use crate::sampler::{Sampler, SamplerParams};
use device::{Oracle, Shape, VOCAB};

/// A repeatable stream of numbers (SplitMix64).
pub(super) struct Rng(pub(super) u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        device::mix(self.0)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}

/// Says which seed failed.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the simulation failed with seed {}", self.0);
        }
    }
}

/// How a request ended: as it should, with what was pooled, or why not.
type Ended = Result<(Finish, Option<Vec<f32>>), String>;

/// What a request was told.
#[derive(Default)]
struct Log {
    started: Option<u32>,
    prompt: Vec<TokenUpdate>,
    tokens: Vec<TokenUpdate>,
    end: Option<Ended>,
}

/// A request as the simulation remembers it.
struct Asked {
    id: RequestId,
    prompt: Vec<TokenId>,
    max_new: usize,
    seed: u64,
    stop: Vec<TokenId>,
    prompt_logprobs: bool,
    pool: Option<Pooling>,
    /// Its tokens' log-probabilities are the device's own.
    device_logprobs: bool,
    may_be_cut: bool,
    log: Arc<Mutex<Log>>,
}

struct Simulation {
    core: Core,
    oracle: Oracle,
    rng: Rng,
    open: Vec<Asked>,
    next: u64,
    clock: Arc<AtomicU64>,
    start: Instant,
    ended: usize,
    /// How requests ended: finished, cancelled, failed.
    ends: [usize; 3],
    answered: u64,
}

impl Simulation {
    fn new(seed: u64) -> Simulation {
        let mut rng = Rng(seed);
        let shape = Shape::draw(&mut rng);
        let clock = Arc::new(AtomicU64::new(0));
        let start = Instant::now();
        let slots = 1 + rng.below(8);
        let rows = slots.max(rng.of(&[8, 16, 24, 64]));
        let per_request = 80usize.div_ceil(shape.block);
        let blocks = per_request + rng.below(3 * per_request);
        let wanted = slots.max(rng.of(&[8, 16, 64])).min(rows);
        let rules = Rules {
            slots,
            context: 80,
            rows,
            wanted,
            kv: KvRules {
                block: shape.block,
                blocks: blocks as u32,
                rows,
                cache: !rng.one_in(4),
                states: shape.stateful.then(|| rng.of(&[1, 4, 100])),
            },
            busy_ms: 3.0,
            idle_ms: 10.0,
            speculate: !rng.one_in(4),
            ahead: !rng.one_in(3),
        };
        let oracle = Oracle::new(shape.clone());
        let (program, plan) = device::program(shape, &rules, clock.clone());
        let core = Core::new(program, &plan, rules, Clock::Told(start, clock.clone()));
        Simulation {
            core,
            oracle,
            rng,
            open: Vec::new(),
            next: 1,
            clock,
            start,
            ended: 0,
            ends: [0; 3],
            answered: 0,
        }
    }

    /// A prompt that often begins as others do, and now and then repeats itself.
    fn prompt(&mut self) -> Vec<TokenId> {
        let mut p = Vec::new();
        if !self.rng.one_in(3) {
            let which = self.rng.below(3) as u64;
            let n = self.rng.below(70);
            p.extend((0..n as u64).map(|i| (device::mix(which << 32 | i) % VOCAB as u64) as u32));
        }
        if self.rng.one_in(4) {
            let round = 1 + self.rng.below(4);
            p.extend((0..self.rng.below(12)).map(|i| (i % round) as u32));
        }
        let tail = 1 + self.rng.below(20);
        p.extend((0..tail).map(|_| self.rng.below(VOCAB) as u32));
        p
    }

    fn arrive(&mut self) {
        let prompt = self.prompt();
        let room = self.core.capacity() + 1;
        if prompt.len() >= room {
            return;
        }
        let max_new = self.rng.below(40).min(room - prompt.len());
        let mut g = Generation::new(&prompt[..], max_new as u32);
        let seed = if self.rng.one_in(3) { 0 } else { self.rng.next() % 4 };
        g.sample = SampleParams { seed, ..SampleParams::default() };
        if self.rng.one_in(4) {
            g.stop = vec![self.rng.below(VOCAB) as u32];
        }
        if self.rng.one_in(5) {
            let base = g.sample;
            g.sampler = Some(Sampler::new(SamplerParams { base, ..Default::default() }).unwrap());
        }
        g.prompt_logprobs = self.rng.one_in(8);
        g.logprobs = [None, None, Some(0), Some(2)][self.rng.below(4)];
        if self.rng.one_in(10) {
            g.prompt_logprobs = false;
            g.pool = Some(self.rng.of(&[Pooling::Mean, Pooling::Last]));
        }
        g.priority = self.rng.of(&[0, 0, 0, 0, 1, -1]);
        let mut may_be_cut = false;
        if self.rng.one_in(12) {
            let ns = self.clock.load(Ordering::Relaxed) + self.rng.next() % 60_000_000;
            g.deadline = Some(self.start + Duration::from_nanos(ns));
            may_be_cut = true;
        }
        let patience = if self.rng.one_in(10) { self.rng.below(10) } else { usize::MAX };
        let asked = Asked {
            id: RequestId(self.next),
            prompt,
            max_new,
            seed,
            stop: g.stop.clone(),
            prompt_logprobs: g.prompt_logprobs,
            pool: g.pool,
            device_logprobs: g.logprobs == Some(0) && g.sampler.is_none(),
            may_be_cut,
            log: Arc::default(),
        };
        self.next += 1;
        let reply = Reply::new(receiver(asked.log.clone(), patience));
        let groups = self.oracle.shape.windows.len();
        self.core.enqueue(Box::new(Seq::new(asked.id, g, reply, groups, room)));
        self.open.push(asked);
    }

    /// One turn of the engine, and everything that must hold after it.
    fn turn(&mut self) {
        let idle = self.core.is_idle();
        let turn = self.core.turn().unwrap_or_else(|e| panic!("the device was lost: {e}"));
        self.core.tell_over();
        assert!(idle || turn == Turn::Worked, "requests are there and nothing ran");
        self.core.check().unwrap_or_else(|e| panic!("bookkeeping: {e}"));
        let (oracle, ends) = (&self.oracle, &mut self.ends);
        let before = self.open.len();
        let answered = &mut self.answered;
        self.open.retain(|asked| {
            let log = asked.log.lock().unwrap();
            if log.end.is_none() {
                return true;
            }
            asked.judge(&log, oracle, ends);
            *answered += log.tokens.len() as u64;
            false
        });
        self.ended += before - self.open.len();
    }

    /// Runs until nothing is left.
    fn drain(&mut self) {
        let mut turns = 0;
        let most = 400 * (1 + self.open.len());
        while !self.core.is_idle() {
            self.turn();
            turns += 1;
            assert!(turns < most, "requests do not end");
        }
        self.turn();
        assert!(self.open.is_empty(), "{} requests were never answered", self.open.len());
        assert_eq!(self.core.stats().kv_blocks_used, 0, "blocks are held by nobody");
    }
}

fn receiver(log: Arc<Mutex<Log>>, patience: usize) -> Publish {
    let mut heard = 0;
    Box::new(move |update| {
        let mut log = log.lock().unwrap();
        assert!(log.end.is_none(), "an update after the end");
        heard += 1;
        match update {
            Update::Started { cached } => {
                assert!(log.started.replace(cached).is_none(), "started twice");
            }
            Update::Prompt(p) => log.prompt.extend(p),
            Update::Tokens(t) => log.tokens.extend(t),
            Update::Done(d) => {
                assert_eq!(d.generated as usize, log.tokens.len());
                log.end = Some(Ok((d.finish, d.hidden)));
            }
            Update::Failed(e) => log.end = Some(Err(e.to_string())),
        }
        if heard > patience { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
}

impl Asked {
    /// Compares what was told with what a model that sees everything would say.
    fn judge(&self, log: &Log, oracle: &Oracle, ends: &mut [usize; 3]) {
        let id = self.id;
        let mut tokens = self.prompt.clone();
        let n = tokens.len();
        assert!(log.started.is_none_or(|c| (c as usize) < n), "{id}: all of it was cached");
        let mut finish = (self.max_new == 0 || self.pool.is_some()).then_some(Finish::Length);
        let mut poisoned = false;
        let mut told = 0;
        while finish.is_none() {
            let row = oracle.row(&tokens, tokens.len() - 1);
            if row.poison {
                poisoned = true;
                break;
            }
            let next = row.token(self.seed);
            if self.stop.contains(&next) {
                finish = Some(Finish::Stop);
                break;
            }
            if told == log.tokens.len() {
                break;
            }
            let have = &log.tokens[told];
            assert_eq!(have.id, next, "{id}: token {told} after {tokens:?}");
            if self.device_logprobs {
                assert_eq!(have.logprob, Some(row.seen_logprob()), "{id}: token {told}");
            }
            tokens.push(next);
            told += 1;
            if told == self.max_new {
                finish = Some(Finish::Length);
            }
        }
        assert_eq!(told, log.tokens.len(), "{id}: more was told than there is");
        for (at, update) in log.prompt.iter().enumerate() {
            assert_eq!(update.id, self.prompt[at], "{id}: prompt token {at}");
            let want = at
                .checked_sub(1)
                .map(|p| oracle.row(&self.prompt, p).logprob(update.id, self.seed));
            assert!(same(update.logprob, want), "{id}: {:?} and {want:?} at {at}", update.logprob);
        }
        match log.end.as_ref().unwrap() {
            Ok((Finish::Cancelled, _)) => ends[1] += 1,
            Ok((how, hidden)) => {
                ends[0] += 1;
                assert_eq!(Some(*how), finish, "{id}: how it ended");
                if self.prompt_logprobs {
                    assert_eq!(log.prompt.len(), n, "{id}: prompt tokens told");
                }
                if let Some(pool) = self.pool {
                    let of = |p: usize| f64::from(oracle.row(&self.prompt, p).hidden());
                    let want = match pool {
                        Pooling::Last => of(n - 1),
                        Pooling::Mean => (0..n).map(of).sum::<f64>() / n as f64,
                    };
                    let have = hidden.as_ref().unwrap();
                    assert_eq!(have[..], [want as f32], "{id}: pooled");
                }
            }
            Err(why) => {
                ends[2] += 1;
                let prompt_poisoned = (0..n).any(|p| oracle.row(&self.prompt, p).poison);
                let late = self.may_be_cut && why.contains("out of time");
                assert!(poisoned || prompt_poisoned || late, "{id} failed: {why}");
            }
        }
    }
}

fn same(a: Option<f32>, b: Option<f32>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => (a - b).abs() < 1e-3,
        (a, b) => a == b,
    }
}

/// What a run came to, for a test that looks whether anything happened at all.
#[derive(Default, Debug)]
struct Summary {
    steps: u64,
    tokens: u64,
    requests: usize,
    ends: [usize; 3],
    preemptions: u64,
    hits: u64,
    accepted: u64,
    ahead: u64,
}

fn run(seed: u64, turns: usize) -> Summary {
    let _seed = Seed(seed);
    let mut sim = Simulation::new(seed);
    let eager = 2 + sim.rng.below(12);
    let mut cancelled = None;
    for _ in 0..turns {
        if sim.open.len() < 40 && sim.rng.one_in(eager) {
            for _ in 0..1 + sim.rng.below(4) {
                sim.arrive();
            }
        }
        if !sim.open.is_empty() && sim.rng.one_in(25) {
            let at = sim.rng.below(sim.open.len());
            let id = sim.open[at].id;
            sim.core.cancel(id);
            cancelled = Some(id);
        }
        sim.turn();
        // Wherever it was, the step under way was its last.
        let still = cancelled.take().is_some_and(|id| sim.open.iter().any(|a| a.id == id));
        assert!(!still, "cancelled before a step, and there after it");
    }
    sim.drain();
    let stats = sim.core.stats();
    Summary {
        steps: stats.steps,
        tokens: sim.answered,
        requests: sim.ended,
        ends: sim.ends,
        preemptions: stats.preemptions,
        hits: stats.prefix_hits,
        accepted: stats.accepted,
        ahead: stats.steps_ahead,
    }
}

fn run_all(seeds: std::ops::Range<u64>, turns: usize) -> Summary {
    let mut all = Summary::default();
    for seed in seeds {
        let s = run(seed, turns);
        all.steps += s.steps;
        all.tokens += s.tokens;
        all.requests += s.requests;
        (0..3).for_each(|i| all.ends[i] += s.ends[i]);
        all.preemptions += s.preemptions;
        all.hits += s.hits;
        all.accepted += s.accepted;
        all.ahead += s.ahead;
    }
    println!("{all:?}");
    let Summary { ends, preemptions, hits, accepted, ahead, .. } = all;
    assert!(ends.iter().all(|n| *n > 0) && preemptions > 0 && hits > 0, "{all:?}");
    assert!(accepted > 0 && ahead > 0, "{all:?}");
    all
}

#[test]
fn requests_are_answered_as_if_they_were_alone() {
    run_all(0..120, 150);
}

#[test]
fn a_million_steps() {
    let mut seed = 1000;
    let mut steps = 0;
    while steps < 1_000_000 {
        steps += run_all(seed..seed + 100, 500).steps;
        seed += 100;
    }
    println!("{steps} steps");
}

#[test]
fn a_lost_device_ends_every_request_by_name() {
    for seed in 0..20 {
        let _seed = Seed(seed);
        let mut sim = Simulation::new(seed);
        for _ in 0..12 {
            sim.arrive();
        }
        for _ in 0..3 {
            sim.turn();
        }
        device::LOST.with(|l| l.set(true));
        let lost = loop {
            match sim.core.turn() {
                Ok(Turn::Worked) => {}
                Ok(Turn::Idle) => break None,
                Err(e) => break Some(e),
            }
        };
        device::LOST.with(|l| l.set(false));
        let Some(e) = lost else { continue };
        assert!(e.is_device(), "{e}");
        sim.core.end_all(|| End::Failed(Error::device(e.to_string())));
        sim.core.tell_over();
        for asked in &sim.open {
            let log = asked.log.lock().unwrap();
            let end = log.end.as_ref().expect("a request was not told");
            let why = end.as_ref().err();
            let named = |w: &String| w.contains("unplugged") || w.contains("out of time");
            assert!(why.is_none_or(named), "{why:?}");
        }
        assert!(sim.core.is_idle());
    }
}
