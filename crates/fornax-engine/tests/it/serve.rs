//! The engine's thread and its handle, on real devices and tiny models.

use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fornax_cpu::{CpuDevice, CpuOptions};
use fornax_engine::serve::{
    BitSet, Constraint, Done, Engine, EngineHandle, Finish, Generation, Publish, Refused,
    ServeOptions, TokenUpdate, Update,
};
use fornax_engine::{Error, Model, SampleParams};
use fornax_plan::TokenId;

use crate::fixture::testdata;

pub(crate) fn model(name: &str) -> Arc<Model> {
    let path = testdata().join("models").join(name).join("model.gguf");
    Arc::new(Model::open(&path).unwrap_or_else(|e| panic!("{name}: {e}")))
}

pub(crate) fn cpu() -> CpuDevice {
    CpuDevice::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap()
}

/// Everything that one request was told.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) started: Option<u32>,
    pub(crate) prompt: Vec<TokenUpdate>,
    pub(crate) tokens: Vec<TokenUpdate>,
    pub(crate) done: Option<Done>,
    pub(crate) failed: Option<Error>,
}

impl Answer {
    pub(crate) fn ids(&self) -> Vec<TokenId> {
        self.tokens.iter().map(|t| t.id).collect()
    }
}

pub(crate) fn channel_of() -> (Publish, Receiver<Update>) {
    let (tx, rx) = channel();
    let publish = Box::new(move |update| match tx.send(update) {
        Ok(()) => ControlFlow::Continue(()),
        Err(_) => ControlFlow::Break(()),
    });
    (publish, rx)
}

/// Reads a request's updates to the end, and that nothing follows it.
pub(crate) fn collect(updates: &Receiver<Update>) -> Answer {
    let mut answer = Answer::default();
    while let Ok(update) = updates.recv_timeout(Duration::from_secs(120)) {
        assert!(answer.done.is_none() && answer.failed.is_none(), "{update:?} after the end");
        match update {
            Update::Started { cached } => {
                assert!(answer.started.replace(cached).is_none(), "started twice");
            }
            Update::Prompt(p) => answer.prompt.extend(p),
            Update::Tokens(t) => answer.tokens.extend(t),
            Update::Done(d) => answer.done = Some(d),
            Update::Failed(e) => answer.failed = Some(e),
        }
    }
    assert!(answer.done.is_some() != answer.failed.is_some(), "no end: {answer:?}");
    answer
}

pub(crate) fn ask(engine: &EngineHandle, g: Generation) -> Answer {
    let (publish, updates) = channel_of();
    engine.submit(g, publish).unwrap();
    collect(&updates)
}

#[test]
fn the_handle_is_shared_between_threads() {
    fn is<T: Send + Sync + Clone>() {}
    is::<EngineHandle>();
}

#[test]
fn one_request_is_answered_as_a_session_would() {
    use fornax_engine::{Event, Request, Session, SessionOptions};
    let model = model("llama3-q8_0");
    let device = cpu();
    let prompt: Vec<TokenId> = (1..40).collect();
    let mut session = Session::new(&device, model.plan(), &SessionOptions::default()).unwrap();
    let mut want = Vec::new();
    let request = Request {
        prompt: &prompt,
        sample: SampleParams::default(),
        sampler: None,
        max_new: 20,
        stop: &[],
        logprobs: false,
    };
    session
        .generate(&request, |e| {
            if let Event::Token { token, .. } = e {
                want.push(token);
            }
            ControlFlow::Continue(())
        })
        .unwrap();
    let engine = Engine::start(model, &device, ServeOptions::default()).unwrap();
    for cached in [0, 32, 32] {
        let answer = ask(&engine, Generation::new(&prompt[..], 20));
        assert_eq!(answer.ids(), want);
        assert_eq!(answer.started, Some(cached));
        let done = answer.done.unwrap();
        assert_eq!((done.finish, done.prompt, done.generated), (Finish::Length, 39, 20));
    }
    let stats = engine.stats();
    assert!(stats.healthy && stats.tokens == 60 && stats.prefix_hits == 64, "{stats:?}");
    engine.shutdown(Duration::from_secs(1));
    let (publish, _updates) = channel_of();
    let refused = engine.submit(Generation::new([1], 1), publish);
    assert!(matches!(refused, Err(Refused::Lost(_))), "{refused:?}");
}

fn start(name: &str, options: ServeOptions) -> EngineHandle {
    Engine::start(model(name), &cpu(), options).unwrap()
}

#[test]
fn a_request_gets_as_many_tokens_as_it_asked_for() {
    let engine = start("llama3-q8_0", ServeOptions { context: 32, ..ServeOptions::default() });
    for n in [0, 1, 2, 3] {
        let done = ask(&engine, Generation::new([1, 2, 3], n)).done.unwrap();
        assert_eq!((done.generated, done.finish), (n, Finish::Length));
    }
    // The last token is told and never run: 30 positions of 32 leave room for three.
    let all = ask(&engine, Generation::new((1..31).collect::<Vec<_>>(), u32::MAX));
    assert_eq!(all.tokens.len(), 3);
    let (publish, updates) = channel_of();
    let refused = engine.submit(Generation::new((1..31).collect::<Vec<_>>(), 4), publish);
    assert_eq!(refused.unwrap_err(), Refused::NeverFits { needs: 33, has: 32 });
    assert!(updates.recv().is_err(), "a refused request was told something");
    for (prompt, why) in [(vec![], "no tokens"), (vec![1, 1 << 30], "vocabulary")] {
        let (publish, _updates) = channel_of();
        let Err(Refused::Invalid(said)) = engine.submit(Generation::new(prompt, 1), publish) else {
            panic!("taken")
        };
        assert!(said.contains(why), "{said}");
    }
}

#[test]
fn a_pool_too_small_for_all_serves_all_in_turn() {
    use fornax_plan::reference::ReferenceDevice;
    let device = ReferenceDevice { kv_block: 16, ..ReferenceDevice::default() };
    let options = ServeOptions {
        kv_tokens: Some(64),
        context: 1000,
        kv_type: fornax_plan::KvType::F32,
        ..ServeOptions::default()
    };
    let engine = Engine::start(model("llama3-q8_0"), &device, options).unwrap();
    let alone: Vec<_> = [(10, 38), (10, 38), (10, 5), (30, 35)]
        .iter()
        .map(|(n, new)| ask(&engine, Generation::new((1..=*n).collect::<Vec<_>>(), *new)).ids())
        .collect();
    // A and B grow to three blocks each, C needs one, E fills the pool to its last position.
    let mut open = Vec::new();
    for round in 0..8 {
        for (i, (n, new)) in [(10, 38), (10, 38), (10, 5), (30, 35)].iter().enumerate() {
            let (publish, updates) = channel_of();
            engine.submit(Generation::new((1..=*n).collect::<Vec<_>>(), *new), publish).unwrap();
            open.push((round, i, updates));
        }
    }
    let (publish, _updates) = channel_of();
    let needs_five = engine.submit(Generation::new((1..=40).collect::<Vec<_>>(), 30), publish);
    assert!(matches!(needs_five, Err(Refused::NeverFits { has: 64, .. })), "{needs_five:?}");
    for (round, i, updates) in open {
        assert_eq!(collect(&updates).ids(), alone[i], "round {round}, request {i}");
    }
    let stats = engine.stats();
    assert!(stats.preemptions > 0, "{stats:?}");
    assert_eq!((stats.kv_blocks_used, stats.kv_blocks_total), (0, 4));
}

#[test]
fn cancelling_frees_everything_at_any_stage() {
    let options = ServeOptions {
        max_running: 2,
        step_rows: 16,
        step_ms_idle: 0.1,
        step_ms_busy: 0.1,
        context: 2048,
        ..ServeOptions::default()
    };
    let engine = start("llama3-q8_0", options);
    let long: Vec<TokenId> = (0..1500).map(|i| i % 90 + 1).collect();
    for round in 0..12 {
        let mut open = Vec::new();
        for _ in 0..4 {
            let (publish, updates) = channel_of();
            let id = engine.submit(Generation::new(&long[round..], 400), publish).unwrap();
            open.push((id, updates));
        }
        // Two run or are in their prompts, two wait.
        if round % 3 == 1 {
            drop(open[0].1.recv_timeout(Duration::from_secs(60)).unwrap());
        }
        for (i, (id, updates)) in open.into_iter().enumerate() {
            if (i + round) % 4 == 0 {
                // The receiver goes away; the engine finds out when it next has something to say.
                drop(updates);
                engine.cancel(id);
                continue;
            }
            engine.cancel(id);
            let mut last = None;
            while let Ok(update) = updates.recv_timeout(Duration::from_secs(60)) {
                last = Some(update);
            }
            let Some(Update::Done(done)) = last else { panic!("{last:?}") };
            assert_eq!(done.finish, Finish::Cancelled);
        }
    }
    let answer = ask(&engine, Generation::new([5, 6, 7], 4));
    assert_eq!(answer.tokens.len(), 4);
    let stats = engine.stats();
    assert_eq!((stats.running, stats.waiting, stats.kv_blocks_used), (0, 0, 0), "{stats:?}");
}

#[test]
fn priorities_go_first_and_likes_go_in_turn() {
    let options = ServeOptions { max_running: 1, context: 4096, ..ServeOptions::default() };
    let engine = start("llama3-q8_0", options);
    let generation = |name: u32, priority| {
        // No two begin alike: whoever waits for a twin lets others pass.
        let mut g = Generation::new([name + 3, 5, 7], 60);
        g.priority = priority;
        g
    };
    let alone = ask(&engine, generation(0, 0)).ids();
    let begun = Arc::new(Mutex::new(Vec::new()));
    let (mut ends, (first, running)) = (Vec::new(), channel());
    // The first runs when the others come; five are its likes, the last two are not.
    for (name, priority) in [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 7), (7, -7)] {
        let (mut publish, updates) = channel_of();
        let (begun, first) = (Arc::clone(&begun), first.clone());
        let listen: Publish = Box::new(move |update| {
            if let Update::Started { .. } = update {
                begun.lock().unwrap().push(name);
            }
            if name == 0 && matches!(update, Update::Tokens(_)) {
                let _ = first.send(());
                // The others have time to come.
                std::thread::sleep(Duration::from_millis(2));
            }
            publish(update)
        });
        engine.submit(generation(name, priority), listen).unwrap();
        ends.push(updates);
        if name == 0 {
            running.recv_timeout(Duration::from_secs(60)).unwrap();
        }
    }
    let answers: Vec<Answer> = ends.iter().map(collect).collect();
    assert_eq!(begun.lock().unwrap()[..], [0, 6, 1, 2, 3, 4, 5, 7]);
    assert!(engine.stats().preemptions > 0, "the first gives its place away");
    assert_eq!(answers[0].ids(), alone, "and goes on as if it had not");
}

#[test]
fn a_receiver_that_breaks_off_or_panics_ends_its_own_request_alone() {
    let engine = start("llama3-q8_0", ServeOptions::default());
    for panics in [false, true] {
        let (tx, rx) = channel();
        let mut heard = 0;
        let publish: Publish = Box::new(move |update| {
            heard += 1;
            if let Update::Done(d) = update {
                tx.send(d).unwrap();
            } else if heard == 4 {
                assert!(!panics, "the receiver falls over");
                return ControlFlow::Break(());
            }
            ControlFlow::Continue(())
        });
        engine.submit(Generation::new([1, 2, 3], 500), publish).unwrap();
        let other = ask(&engine, Generation::new([4, 5], 20));
        assert_eq!(other.tokens.len(), 20);
        let done = rx.recv_timeout(Duration::from_secs(60)).unwrap();
        assert_eq!(done.finish, Finish::Cancelled);
        assert!(done.generated < 10, "{done:?}");
    }
    assert!(engine.stats().healthy);
}

#[test]
fn a_full_queue_and_a_passed_deadline_are_told() {
    let options = ServeOptions { max_running: 1, max_queue: 1, ..ServeOptions::default() };
    let engine = start("llama3-q8_0", options);
    let (publish, first) = channel_of();
    let running = engine.submit(Generation::new([1, 2], 3000), publish).unwrap();
    let mut late = Generation::new([1, 2], 5);
    late.deadline = Some(std::time::Instant::now());
    let (publish, second) = channel_of();
    engine.submit(late, publish).unwrap();
    let mut refused = 0;
    for _ in 0..3 {
        let (publish, _updates) = channel_of();
        match engine.submit(Generation::new([1], 1), publish) {
            Err(Refused::QueueFull { retry_after_s }) => {
                assert!(retry_after_s > 0);
                refused += 1;
            }
            other => drop(other.unwrap()),
        }
    }
    let late = collect(&second).failed.unwrap();
    assert!(late.is_deadline(), "{late}");
    engine.cancel(running);
    drop(first);
    assert!(refused > 0);
}

#[test]
fn prompts_are_told_and_hidden_states_pooled() {
    use fornax_engine::serve::Pooling;
    use fornax_engine::{Session, SessionOptions};
    let model = model("llama3-q8_0");
    let prompt: Vec<TokenId> = (0..70).map(|i| i * 3 % 100 + 1).collect();
    let mut session = Session::new(&cpu(), model.plan(), &SessionOptions::default()).unwrap();
    let want = session.logprobs(&prompt).unwrap();
    let options = ServeOptions { step_rows: 24, max_running: 4, ..ServeOptions::default() };
    let engine = Engine::start(model, &cpu(), options).unwrap();
    for (logprobs, max_new) in [(Some(0), 3), (Some(3), 0), (None, 1)] {
        let mut g = Generation::new(&prompt[..], max_new);
        (g.prompt_logprobs, g.logprobs) = (true, logprobs);
        let answer = ask(&engine, g);
        assert_eq!(answer.prompt.iter().map(|t| t.id).collect::<Vec<_>>(), prompt);
        assert_eq!(answer.prompt[0].logprob, None);
        for (have, want) in answer.prompt[1..].iter().zip(&want) {
            assert!((have.logprob.unwrap() - want).abs() < 1e-5);
            assert_eq!(have.top.len(), usize::from(logprobs.unwrap_or(0)));
        }
        assert_eq!(answer.tokens.len(), max_new as usize);
    }
    let pooled = |pool, prompt: &[TokenId]| {
        let mut g = Generation::new(prompt, 0);
        g.pool = Some(pool);
        ask(&engine, g).done.unwrap().hidden.unwrap()
    };
    let n = prompt.len();
    let last = pooled(Pooling::Last, &prompt);
    assert_eq!(last, pooled(Pooling::Last, &prompt), "cold and warm");
    let mut mean = vec![0.0f64; last.len()];
    for k in 1..=n {
        let row = pooled(Pooling::Last, &prompt[..k]);
        mean.iter_mut().zip(row).for_each(|(m, v)| *m += f64::from(v) / n as f64);
    }
    for (have, want) in pooled(Pooling::Mean, &prompt).iter().zip(mean) {
        assert!((f64::from(*have) - want).abs() < 1e-4, "{have} and {want}");
    }
}

/// Allows even ids alone and is complete after so many.
struct Even {
    left: usize,
    empty: bool,
}

impl Constraint for Even {
    fn mask(&mut self, allowed: &mut BitSet) -> fornax_engine::Result<()> {
        let vocab = allowed.vocab() as u32;
        (0..vocab).filter(|t| t % 2 == 0 && !self.empty).for_each(|t| allowed.insert(t));
        Ok(())
    }

    fn accept(&mut self, token: TokenId) -> fornax_engine::Result<()> {
        assert_eq!(token % 2, 0);
        self.left -= 1;
        Ok(())
    }

    fn may_end(&mut self) -> bool {
        self.left == 0
    }

    fn is_done(&mut self) -> bool {
        self.left == 0
    }
}

#[test]
fn a_constraint_is_kept_or_the_request_fails() {
    let engine = start("llama3-q8_0", ServeOptions::default());
    for temperature in [0.0, 1.5] {
        let mut g = Generation::new([1, 2, 3], 50);
        g.sample = SampleParams { temperature, ..SampleParams::default() };
        // A stop token that is even, and not allowed before the end.
        g.stop = (0..50).map(|i| 2 * i).collect();
        g.constraint = Some(Box::new(Even { left: 9, empty: false }));
        let answer = ask(&engine, g);
        assert_eq!(answer.done.as_ref().unwrap().finish, Finish::Stop);
        assert_eq!(answer.tokens.len(), 9);
        assert!(answer.ids().iter().all(|t| t % 2 == 0 && *t >= 100), "{answer:?}");
    }
    let mut g = Generation::new([1, 2, 3], 50);
    g.constraint = Some(Box::new(Even { left: 9, empty: true }));
    let answer = ask(&engine, g);
    assert!(answer.failed.unwrap().to_string().contains("no token is allowed"));
    assert!(answer.tokens.is_empty());
}

#[test]
fn ten_thousand_short_requests_are_each_answered_once() {
    let options = ServeOptions { max_queue: 10_000, ..ServeOptions::default() };
    let engine = start("llama3-q8_0", options);
    let open: Vec<_> = (0..10_000u32)
        .map(|i| {
            let (publish, updates) = channel_of();
            engine.submit(Generation::new([1 + i % 90, 2, 3], 1 + i % 3), publish).unwrap();
            (1 + i % 3, updates)
        })
        .collect();
    for (n, updates) in open {
        assert_eq!(collect(&updates).tokens.len(), n as usize);
    }
    engine.shutdown(Duration::from_secs(5));
}

#[test]
fn shutting_down_lets_finish_what_can_and_cancels_the_rest() {
    let engine = start("llama3-q8_0", ServeOptions::default());
    let (publish, short) = channel_of();
    engine.submit(Generation::new([1, 2], 5), publish).unwrap();
    engine.shutdown(Duration::from_secs(60));
    assert_eq!(collect(&short).done.unwrap().finish, Finish::Length);
    let engine = start("llama3-q8_0", ServeOptions::default());
    let (publish, long) = channel_of();
    engine.submit(Generation::new([1, 2], 4000), publish).unwrap();
    engine.shutdown(Duration::ZERO);
    assert_eq!(collect(&long).done.unwrap().finish, Finish::Cancelled);
}
