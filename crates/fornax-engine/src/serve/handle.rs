//! The engine's thread and the handle that everybody else holds. Requests and cancellations go in
//! by one channel; updates come back by each request's own function.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fornax_plan::Device;

use super::api::{Finish, Generation, Publish, Refused, RequestId, ServeOptions, Stats};
use super::core::{Clock, Core, Turn};
use super::request::{End, Reply, Seq};
use super::size::size;
use crate::error::{Error, Result};
use crate::model::Model;

/// The batching engine.
#[derive(Debug)]
pub struct Engine;

/// Through which requests reach an engine; cheap to clone. The engine ends when its last handle
/// does.
#[derive(Clone)]
pub struct EngineHandle {
    inbox: Sender<Message>,
    shared: Arc<Shared>,
    model: Arc<Model>,
}

impl fmt::Debug for EngineHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineHandle").field("model", &self.model.name()).finish_non_exhaustive()
    }
}

enum Message {
    Submit(Box<Seq>),
    Cancel(RequestId),
    /// Run what is there until then, and end.
    Shutdown(Instant),
}

/// What handles and thread both see.
struct Shared {
    stats: Mutex<Stats>,
    /// Requests that were taken and have not ended.
    live: AtomicUsize,
    next: AtomicU64,
    closed: AtomicBool,
    fault: Mutex<Option<String>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    facts: Facts,
}

/// What a request is checked against.
#[derive(Clone, Copy, Debug)]
struct Facts {
    max_live: usize,
    max_running: usize,
    /// Positions of one request.
    capacity: usize,
    groups: usize,
    vocab: u32,
    hidden: bool,
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    /// Prepares the model on the device and starts the engine's one thread.
    ///
    /// # Errors
    /// `is_unsupported` for what the device does not do, by name; `is_out_of_memory` where keys and
    /// values do not fit, with the bytes.
    #[allow(clippy::needless_pass_by_value, reason = "options are made for one engine")]
    pub fn start(
        model: Arc<Model>,
        device: &dyn Device,
        options: ServeOptions,
    ) -> Result<EngineHandle> {
        let plan = model.plan();
        let (limits, rules) = size(plan, device, &options)?;
        let program = device.prepare(plan, &limits)?;
        let (inbox, messages) = mpsc::channel();
        let facts = Facts {
            max_live: options.max_running.max(1).saturating_add(options.max_queue),
            max_running: options.max_running.max(1),
            capacity: 0,
            groups: plan.kv.len(),
            vocab: plan.hyper.vocab,
            hidden: plan.hidden_width() > 0,
        };
        let core = Core::new(program, plan, rules, Clock::Real);
        let shared = Arc::new(Shared {
            stats: Mutex::new(core.stats()),
            live: AtomicUsize::new(0),
            next: AtomicU64::new(1),
            closed: AtomicBool::new(false),
            fault: Mutex::new(None),
            thread: Mutex::new(None),
            facts: Facts { capacity: core.capacity(), ..facts },
        });
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("fornax-engine".into())
            .spawn(move || Loop { core, messages, shared: theirs, until: None }.run())
            .map_err(|e| Error::device(format!("starting the engine's thread: {e}")))?;
        *locked(&shared.thread) = Some(thread);
        Ok(EngineHandle { inbox, shared, model })
    }
}

impl EngineHandle {
    /// Takes a request, or says at once why not. Updates come by `publish` on the engine's thread.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn submit(
        &self,
        generation: Generation,
        publish: Publish,
    ) -> std::result::Result<RequestId, Refused> {
        let shared = &self.shared;
        if shared.closed.load(Ordering::Acquire) {
            let fault = locked(&shared.fault).clone();
            return Err(Refused::Lost(fault.unwrap_or_else(|| "the engine is ending".into())));
        }
        shared.facts.check(&generation)?;
        let take = |live| (live < shared.facts.max_live).then_some(live + 1);
        if shared.live.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).is_err() {
            return Err(Refused::QueueFull { retry_after_s: self.retry_after() });
        }
        let id = RequestId(shared.next.fetch_add(1, Ordering::Relaxed));
        let (groups, capacity) = (shared.facts.groups, shared.facts.capacity);
        let counted = Arc::clone(shared);
        let reply = Reply::new(publish).then(move || {
            counted.live.fetch_sub(1, Ordering::AcqRel);
        });
        // A position more than there is room for: the last token is never run.
        let seq = Box::new(Seq::new(id, generation, reply, groups, capacity + 1));
        match self.inbox.send(Message::Submit(seq)) {
            Ok(()) => Ok(id),
            Err(mpsc::SendError(message)) => {
                if let Message::Submit(mut seq) = message {
                    seq.reply.forget();
                }
                Err(Refused::Lost("the engine has ended".into()))
            }
        }
    }

    /// Seconds after which a place may be free: a guess from the load.
    fn retry_after(&self) -> u32 {
        let stats = self.stats();
        let per_place = stats.waiting / self.shared.facts.max_running.max(1);
        (1 + per_place).min(60) as u32
    }

    /// Ends a request within the step under way; one that has ended already is left alone.
    pub fn cancel(&self, id: RequestId) {
        // An engine that has ended has ended all requests.
        drop(self.inbox.send(Message::Cancel(id)));
    }

    /// A snapshot, as of the end of the last step.
    pub fn stats(&self) -> Stats {
        locked(&self.shared.stats).clone()
    }

    /// Takes no more requests, runs those that are there for at most `drain`, cancels the rest,
    /// and returns when the engine has ended.
    pub fn shutdown(&self, drain: Duration) {
        self.shared.closed.store(true, Ordering::Release);
        let until = Instant::now().checked_add(drain);
        let until = until.unwrap_or_else(|| Instant::now() + Duration::from_secs(1 << 30));
        drop(self.inbox.send(Message::Shutdown(until)));
        let thread = locked(&self.shared.thread).take();
        // Its own thread cannot wait for itself.
        if let Some(thread) = thread.filter(|t| t.thread().id() != std::thread::current().id()) {
            drop(thread.join());
        }
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Positions that one request can have: those of its prompt and of what is generated.
    pub fn capacity(&self) -> usize {
        self.shared.facts.capacity
    }
}

impl Facts {
    /// What can be said of a request before it waits.
    fn check(&self, g: &Generation) -> std::result::Result<(), Refused> {
        let invalid = |why: String| Err(Refused::Invalid(why));
        if g.prompt.is_empty() {
            return invalid("the prompt has no tokens, expected at least one".into());
        }
        if let Some(t) = g.prompt.iter().find(|t| **t >= self.vocab) {
            return invalid(format!("token {t} is not in the vocabulary of {}", self.vocab));
        }
        if let Err(e) = g.sample.validate() {
            return invalid(e.to_string());
        }
        if g.pool.is_some() && !self.hidden {
            return invalid("this model's plan hands out no hidden states".into());
        }
        if g.pool.is_some() && (g.prompt_logprobs || g.constraint.is_some()) {
            return invalid("a pooled hidden state comes without tokens or probabilities".into());
        }
        // The last generated token is told and never run.
        let new = if g.max_new == u32::MAX || g.pool.is_some() { 1 } else { g.max_new };
        let needs = g.prompt.len() as u64 + u64::from(new.max(1)) - 1;
        if needs > self.capacity as u64 {
            return Err(Refused::NeverFits { needs, has: self.capacity as u64 });
        }
        Ok(())
    }
}

/// The engine's thread.
struct Loop {
    core: Core,
    messages: Receiver<Message>,
    shared: Arc<Shared>,
    /// When what still runs is cancelled.
    until: Option<Instant>,
}

impl Loop {
    fn run(mut self) {
        let fault = loop {
            match catch_unwind(AssertUnwindSafe(|| self.turn())) {
                Ok(Ok(true)) => {}
                Ok(Ok(false)) => break None,
                Ok(Err(e)) => break Some(e.to_string()),
                Err(panic) => break Some(format!("the engine failed: {}", said(panic.as_ref()))),
            }
        };
        self.shared.closed.store(true, Ordering::Release);
        if let Some(fault) = fault {
            *locked(&self.shared.fault) = Some(fault.clone());
            let mut stats = locked(&self.shared.stats);
            (stats.healthy, stats.fault, stats.step_since) = (false, Some(fault.clone()), None);
            (stats.running, stats.waiting) = (0, 0);
            drop(stats);
            let core = &mut self.core;
            let fail = || {
                core.end_all(|| End::Failed(Error::device(fault.clone())));
                core.tell_over();
            };
            // What is left broken by a panic may panic again; the replies then speak for
            // themselves when they are dropped.
            drop(catch_unwind(AssertUnwindSafe(fail)));
        }
    }

    /// Takes in what has come and runs one step; false when the engine is to end.
    fn turn(&mut self) -> Result<bool> {
        let idle = self.core.is_idle();
        let go_on = self.listen();
        if idle && !self.core.is_idle() {
            // Told before the step: it may be one that never comes back.
            let mut stats = self.core.stats();
            stats.step_since = Some(Instant::now());
            *locked(&self.shared.stats) = stats;
        }
        if !go_on {
            self.core.end_all(|| End::Finished(Finish::Cancelled));
            self.publish_stats();
            self.core.tell_over();
            return Ok(false);
        }
        let turn = self.core.turn()?;
        if turn == Turn::Worked && self.core.is_idle() {
            self.core.check().map_err(|e| {
                Error::device(format!("the bookkeeping of the key/value cache is wrong: {e}"))
            })?;
        }
        if turn == Turn::Idle && !self.core.is_idle() {
            // Nothing should wait without a reason; if it does, not at full speed.
            std::thread::sleep(Duration::from_millis(1));
        }
        self.publish_stats();
        self.core.tell_over();
        Ok(true)
    }

    /// Takes in all messages, waiting for one where there is nothing to do; false when there is
    /// nothing more to wait for.
    fn listen(&mut self) -> bool {
        if self.core.is_idle() {
            let none_left = self.until.is_some();
            if none_left {
                return false;
            }
            match self.messages.recv() {
                Ok(message) => self.take(message),
                Err(_) => return false,
            }
        }
        loop {
            match self.messages.try_recv() {
                Ok(message) => self.take(message),
                Err(TryRecvError::Empty) => break,
                // Nobody is left who could cancel what runs, or ask for more.
                Err(TryRecvError::Disconnected) => return false,
            }
        }
        self.until.is_none_or(|until| Instant::now() < until)
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Submit(seq) => self.core.enqueue(seq),
            Message::Cancel(id) => self.core.cancel(id),
            Message::Shutdown(until) => {
                self.until = Some(self.until.map_or(until, |earlier| earlier.min(until)));
            }
        }
    }

    fn publish_stats(&self) {
        *locked(&self.shared.stats) = self.core.stats();
    }
}

/// What a panic said.
fn said(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no reason given")
}
