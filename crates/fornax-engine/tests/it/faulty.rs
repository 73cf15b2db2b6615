//! An engine on a device that fails: every request is told, by name, and nothing hangs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use fornax_engine::serve::{Engine, Generation, Refused, ServeOptions};
use fornax_plan::{
    Cmd, Device, DeviceInfo, Error, Limits, MemoryUse, OpTime, Plan, Program, Progress, Refusal,
    Result, SeqStep, SlotId, StepOutput, Ticket,
};

use crate::serve::{channel_of, collect, cpu, model};

/// How it fails.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Lost,
    Panic,
    /// Does not come back from a step until good ones are allowed.
    Stuck,
    /// Fails any step that holds this token.
    Token(u32),
}

struct Faulty {
    inner: Box<dyn Device>,
    fault: Fault,
    /// Steps that still go well.
    good: Arc<AtomicU32>,
}

struct FaultyProgram {
    inner: Box<dyn Program>,
    fault: Fault,
    good: Arc<AtomicU32>,
    failed: bool,
}

impl Device for Faulty {
    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }

    fn supports(&self, plan: &Plan, limits: &Limits) -> Vec<Refusal> {
        self.inner.supports(plan, limits)
    }

    fn prepare(&self, plan: &Plan, limits: &Limits) -> Result<Box<dyn Program>> {
        let inner = self.inner.prepare(plan, limits)?;
        let (fault, good) = (self.fault, Arc::clone(&self.good));
        Ok(Box::new(FaultyProgram { inner, fault, good, failed: false }))
    }
}

impl Program for FaultyProgram {
    fn submit(&mut self, step: &[SeqStep<'_>]) -> Result<Ticket> {
        let left =
            self.good.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
        match (self.fault, left) {
            (Fault::Lost, Err(_)) => return Err(Error::lost("the cable fell out")),
            (Fault::Panic, Err(_)) => panic!("an index out of range"),
            (Fault::Token(bad), _) => {
                self.failed = step.iter().any(|s| match s.tokens {
                    fornax_plan::Tokens::Host(tokens) => tokens.contains(&bad),
                    fornax_plan::Tokens::Last { draft } => draft.contains(&bad),
                });
            }
            _ => {}
        }
        self.inner.submit(step)
    }

    fn poll(&mut self, ticket: &Ticket, out: &mut StepOutput) -> Result<Progress> {
        self.inner.poll(ticket, out)
    }

    fn wait(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<()> {
        self.inner.wait(ticket, out)?;
        while self.fault == Fault::Stuck && self.good.load(Ordering::Relaxed) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        if self.failed {
            return Err(Error::malformed("sampling: no usable logit at position 3"));
        }
        Ok(())
    }

    fn stop(&mut self, slot: SlotId) {
        self.inner.stop(slot);
    }

    fn command(&mut self, command: Cmd<'_>) -> Result<()> {
        self.inner.command(command)
    }

    fn memory(&self) -> MemoryUse {
        self.inner.memory()
    }

    fn grow_kv(&mut self, blocks: u32) -> Result<()> {
        self.inner.grow_kv(blocks)
    }

    fn profile(&mut self, step: &[SeqStep<'_>], out: &mut StepOutput) -> Result<Vec<OpTime>> {
        self.inner.profile(step, out)
    }
}

fn faulty(fault: Fault, good: u32) -> Faulty {
    Faulty { inner: Box::new(cpu()), fault, good: Arc::new(AtomicU32::new(good)) }
}

#[test]
fn a_lost_device_or_a_panic_ends_all_requests_and_is_told() {
    for (fault, word) in [(Fault::Lost, "cable"), (Fault::Panic, "an index out of range")] {
        let options = ServeOptions { max_running: 2, ..ServeOptions::default() };
        let engine = Engine::start(model("llama3-q8_0"), &faulty(fault, 8), options).unwrap();
        let mut open = Vec::new();
        for i in 0..6 {
            let (publish, updates) = channel_of();
            match engine.submit(Generation::new([1 + i, 2, 3], 100), publish) {
                Ok(_) => open.push(updates),
                // The device may be lost before the last of them come.
                Err(Refused::Lost(why)) if i > 0 => assert!(why.contains(word), "{why}"),
                Err(other) => panic!("{fault:?}: request {i}: {other:?}"),
            }
        }
        for updates in open {
            let answer = collect(&updates);
            let e = answer.failed.unwrap();
            assert!(e.is_device() && e.to_string().contains(word), "{fault:?}: {e}");
            assert!(answer.tokens.len() < 100);
        }
        let patience = Instant::now() + Duration::from_secs(60);
        while engine.stats().healthy && Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(1));
        }
        let stats = engine.stats();
        assert!(!stats.healthy && stats.fault.is_some_and(|f| f.contains(word)));
        let (publish, _updates) = channel_of();
        let Err(Refused::Lost(why)) = engine.submit(Generation::new([1], 1), publish) else {
            panic!("taken")
        };
        assert!(why.contains(word), "{why}");
        engine.shutdown(Duration::ZERO);
    }
}

#[test]
fn a_step_that_does_not_come_back_is_seen_from_outside() {
    let device = faulty(Fault::Stuck, 0);
    let good = Arc::clone(&device.good);
    let engine = Engine::start(model("llama3-q8_0"), &device, ServeOptions::default()).unwrap();
    assert!(engine.stats().step_since.is_none());
    let (publish, updates) = channel_of();
    engine.submit(Generation::new([1, 2, 3], 2), publish).unwrap();
    let patience = Instant::now() + Duration::from_secs(60);
    // Its very first step: nothing was told after the engine had nothing to do.
    while engine.stats().step_since.is_none() {
        assert!(Instant::now() < patience, "{:?}", engine.stats());
        std::thread::sleep(Duration::from_millis(1));
    }
    let stats = engine.stats();
    assert_eq!((stats.running + stats.waiting, stats.steps), (1, 0), "{stats:?}");
    good.store(1000, Ordering::Relaxed);
    assert_eq!(collect(&updates).tokens.len(), 2);
    let stats = engine.stats();
    assert_eq!((stats.running + stats.waiting, stats.step_since), (0, None), "{stats:?}");
}

#[test]
fn a_step_that_fails_costs_only_the_sequence_that_fails_alone() {
    for name in ["llama3-q8_0", "lfm2"] {
        let bad = 77;
        let model = model(name);
        let good = Engine::start(model.clone(), &cpu(), ServeOptions::default()).unwrap();
        let engine =
            Engine::start(model, &faulty(Fault::Token(bad), 0), ServeOptions::default()).unwrap();
        let prompts: Vec<Vec<u32>> = (0..6)
            .map(|i| (1..40).map(|t| t % 7 + i).chain((i == 3).then_some(bad)).collect())
            .collect();
        let open: Vec<_> = prompts
            .iter()
            .map(|p| {
                let (publish, updates) = channel_of();
                engine.submit(Generation::new(&p[..], 12), publish).unwrap();
                updates
            })
            .collect();
        for (i, updates) in open.iter().enumerate() {
            let have = collect(updates);
            let want = crate::serve::ask(&good, Generation::new(&prompts[i][..], 12));
            // One that makes the bad token itself fails where it would run it.
            let fed = want.ids().iter().position(|t| *t == bad).map_or(12, |at| at + 1);
            if i == 3 {
                assert!(have.failed.unwrap().to_string().contains("no usable logit"));
            } else {
                assert_eq!(have.ids(), want.ids()[..fed], "{name}, request {i}");
                assert_eq!(have.failed.is_some(), fed < 12);
            }
        }
        assert!(engine.stats().healthy);
    }
}
