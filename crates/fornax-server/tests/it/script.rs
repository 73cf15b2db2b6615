//! An engine that says what a test wrote down, behind the same trait as the real one.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use fornax_engine::Model;
use fornax_engine::serve::{
    Done, Finish, Generation, Publish, Refused, RequestId, Stats, TokenUpdate, Update,
};
use fornax_server::Backend;

/// What one request is answered.
#[derive(Clone, Debug, Default)]
pub(crate) struct Script {
    /// Tokens by their bytes; each comes in an update of its own.
    pub(crate) tokens: Vec<u32>,
    /// The end, unless the limit comes first; a failure where there is none.
    pub(crate) finish: Option<Finish>,
    /// Wait for the test after so many tokens.
    pub(crate) hold_after: Option<usize>,
}

#[derive(Default)]
struct State {
    scripts: VecDeque<Script>,
    refusals: VecDeque<Refused>,
    cancelled: Vec<RequestId>,
    released: bool,
    seen: Vec<Seen>,
}

/// What the server asked for.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) prompt: Arc<[u32]>,
    pub(crate) max_new: u32,
    pub(crate) seed: u64,
    pub(crate) on_host: bool,
    pub(crate) constrained: bool,
    pub(crate) priority: i32,
}

/// The scripted engine.
pub(crate) struct Scripted {
    model: Arc<Model>,
    state: Mutex<State>,
    changed: Condvar,
    next: AtomicU64,
    pub(crate) running: AtomicUsize,
    /// Makes the engine look stuck or lost.
    pub(crate) stats: Mutex<Option<Stats>>,
}

impl Scripted {
    pub(crate) fn new(model: Arc<Model>) -> Arc<Scripted> {
        Arc::new(Scripted {
            model,
            state: Mutex::default(),
            changed: Condvar::new(),
            next: AtomicU64::new(1),
            running: AtomicUsize::new(0),
            stats: Mutex::default(),
        })
    }

    /// The next request is answered so: text by single tokens of the vocabulary.
    pub(crate) fn say(&self, text: &str) {
        self.say_pieces(&[text.as_bytes()]);
    }

    /// The next request is answered by these pieces, each cut into bytes' tokens.
    pub(crate) fn say_pieces(&self, pieces: &[&[u8]]) {
        let tokens = pieces.iter().flat_map(|p| self.bytes(p)).collect();
        self.script(Script { tokens, finish: Some(Finish::Stop), hold_after: None });
    }

    pub(crate) fn script(&self, script: Script) {
        self.state.lock().expect("no other thread of the test failed").scripts.push_back(script);
    }

    /// The next request is refused so.
    pub(crate) fn refuse(&self, refused: Refused) {
        self.state.lock().expect("no other thread of the test failed").refusals.push_back(refused);
    }

    /// One token for each byte.
    pub(crate) fn bytes(&self, bytes: &[u8]) -> Vec<u32> {
        let tokenizer = self.model.tokenizer();
        let one = |byte: &u8| {
            let found = (0..tokenizer.vocab_len() as u32)
                .find(|id| tokenizer.token_bytes(*id) == [*byte] && !tokenizer.is_control(*id));
            found.expect("a token for every byte")
        };
        bytes.iter().map(one).collect()
    }

    /// Lets everything that is held go on.
    pub(crate) fn release(&self) {
        self.state.lock().expect("no other thread of the test failed").released = true;
        self.changed.notify_all();
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.state.lock().expect("no other thread of the test failed").seen.clone()
    }

    /// Waits until so many requests were cancelled.
    pub(crate) fn wait_for_cancels(&self, n: usize) {
        let state = self.state.lock().expect("no other thread of the test failed");
        let waited = self
            .changed
            .wait_timeout_while(state, Duration::from_secs(20), |s| s.cancelled.len() < n)
            .expect("no other thread of the test failed");
        assert!(!waited.1.timed_out(), "{} of {n} were cancelled", waited.0.cancelled.len());
    }

    fn held(&self, id: RequestId) {
        let state = self.state.lock().expect("no other thread of the test failed");
        let going = self
            .changed
            .wait_while(state, |s| !s.released && !s.cancelled.contains(&id))
            .expect("no other thread of the test failed");
        drop(going);
    }

    fn run(&self, id: RequestId, script: &Script, request: &Generation, mut publish: Publish) {
        let _ = publish(Update::Started { cached: 0 });
        let mut generated = 0;
        for (i, token) in script.tokens.iter().enumerate() {
            if script.hold_after == Some(i) {
                self.held(id);
            }
            if generated == request.max_new
                || self
                    .state
                    .lock()
                    .expect("no other thread of the test failed")
                    .cancelled
                    .contains(&id)
            {
                break;
            }
            let top = request
                .logprobs
                .map_or(Vec::new(), |n| (0..u32::from(n)).map(|k| (k, -1.0 - k as f32)).collect());
            let logprob = request.logprobs.map(|_| -0.5);
            generated += 1;
            let update = Update::Tokens(vec![TokenUpdate { id: *token, logprob, top }]);
            if publish(update) == ControlFlow::Break(()) {
                break;
            }
        }
        if script.hold_after.is_some_and(|at| at >= script.tokens.len()) {
            self.held(id);
        }
        let cancelled =
            self.state.lock().expect("no other thread of the test failed").cancelled.contains(&id);
        let all = generated as usize == script.tokens.len();
        let finish = match script.finish {
            None if !cancelled => {
                let error = Model::open("no such file".as_ref()).expect_err("it is not there");
                let _ = publish(Update::Failed(error));
                return;
            }
            _ if cancelled => Finish::Cancelled,
            Some(finish) if all => finish,
            _ => Finish::Length,
        };
        let prompt = request.prompt.len() as u32;
        let hidden = request.pool.map(|_| vec![3.0, 4.0]);
        let _ = publish(Update::Done(Done { finish, prompt, cached: 0, generated, hidden }));
    }
}

/// Shares the engine with its threads.
pub(crate) struct Shared(pub(crate) Arc<Scripted>);

impl Backend for Shared {
    fn submit(&self, request: Generation, publish: Publish) -> Result<RequestId, Refused> {
        let scripted = self.0.clone();
        let mut state = scripted.state.lock().expect("no other thread of the test failed");
        if let Some(refused) = state.refusals.pop_front() {
            return Err(refused);
        }
        let script = state.scripts.pop_front().unwrap_or_default();
        state.seen.push(Seen {
            prompt: request.prompt.clone(),
            max_new: request.max_new,
            seed: request.sample.seed,
            on_host: request.sampler.is_some(),
            constrained: request.constraint.is_some(),
            priority: request.priority,
        });
        drop(state);
        let id = RequestId(scripted.next.fetch_add(1, SeqCst));
        std::thread::spawn(move || {
            scripted.running.fetch_add(1, SeqCst);
            scripted.run(id, &script, &request, publish);
            scripted.running.fetch_sub(1, SeqCst);
        });
        Ok(id)
    }

    fn cancel(&self, request: RequestId) {
        self.0.state.lock().expect("no other thread of the test failed").cancelled.push(request);
        self.0.changed.notify_all();
    }

    fn stats(&self) -> Stats {
        let told = self.0.stats.lock().expect("no other thread of the test failed").clone();
        told.unwrap_or_else(|| quiet(self.0.running.load(SeqCst)))
    }

    fn shutdown(&self, _: Duration) {
        self.0.release();
    }
}

/// What an engine says of itself that works and has just made a step.
pub(crate) fn quiet(running: usize) -> Stats {
    Stats { running, steps: 7, last_rows: 1, last_step_ms: 1.0, ..Stats::new(64, Instant::now()) }
}
