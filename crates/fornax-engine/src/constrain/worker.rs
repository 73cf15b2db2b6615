//! Masks computed beside the model's step instead of before the choice. It knows constraints; it knows no scheduler.

use std::fmt;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use fornax_plan::TokenId;

use crate::serve::{BitSet, Constraint};
use crate::{Error, Result};

type Job = Box<dyn FnOnce() + Send>;

/// Where jobs go; nothing once the worker is gone.
type Jobs = Arc<Mutex<Option<Sender<Job>>>>;

/// Threads that compute masks.
///
/// A constraint that went through [`ConstraintWorker::overlap`] starts on its next mask as soon as a token is
/// accepted, while the device runs the next step; [`Constraint::mask`] then waits for what is left of it, as a rule
/// nothing. Dropping the worker waits for the masks in progress; constraints that outlive it compute on the caller's
/// thread.
pub struct ConstraintWorker {
    jobs: Jobs,
    threads: Vec<JoinHandle<()>>,
    vocab: usize,
}

impl fmt::Debug for ConstraintWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConstraintWorker").field("threads", &self.threads.len()).finish()
    }
}

impl ConstraintWorker {
    /// Starts `threads` threads, at least one. Masks are over `vocab` tokens, as those that
    /// [`Constraint::mask`] will be called with.
    ///
    /// # Errors
    /// `is_request` where no thread can be had.
    pub fn new(threads: usize, vocab: usize) -> Result<ConstraintWorker> {
        let (sender, queue) = mpsc::channel::<Job>();
        let queue = Arc::new(Mutex::new(queue));
        let mut worker = ConstraintWorker {
            jobs: Arc::new(Mutex::new(Some(sender))),
            threads: Vec::new(),
            vocab,
        };
        for _ in 0..threads.max(1) {
            let queue = Arc::clone(&queue);
            let thread = std::thread::Builder::new().name("masks".into());
            let thread = thread.spawn(move || work(&queue)).map_err(|e| {
                Error::request(format!("starting the thread that computes masks: {e}"))
            })?;
            worker.threads.push(thread);
        }
        Ok(worker)
    }

    /// The same constraint, its masks computed ahead. The first one is started at once.
    pub fn overlap(&self, constraint: Box<dyn Constraint>) -> Box<dyn Constraint> {
        let mut ahead = Ahead {
            jobs: Arc::clone(&self.jobs),
            state: State::Lost,
            mask: BitSet::new(self.vocab),
            may_end: false,
            done: false,
        };
        ahead.send(constraint);
        Box::new(ahead)
    }
}

impl Drop for ConstraintWorker {
    fn drop(&mut self) {
        lock(&self.jobs).take();
        for thread in self.threads.drain(..) {
            // Jobs do not unwind into the loop; a thread that did end early took no constraint with it.
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn work(queue: &Mutex<Receiver<Job>>) {
    loop {
        let job = lock(queue).recv();
        let Ok(job) = job else { return };
        // A constraint that panics is lost with its job, and its request learns so; the thread goes on.
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
    }
}

/// A constraint, the mask after its last token, and how computing that went.
struct Computed {
    constraint: Box<dyn Constraint>,
    mask: BitSet,
    outcome: Result<()>,
}

impl Computed {
    fn new(mut constraint: Box<dyn Constraint>, mut mask: BitSet) -> Computed {
        let outcome = constraint.mask(&mut mask);
        Computed { constraint, mask, outcome }
    }
}

enum State {
    Here(Computed),
    /// With a worker.
    Away(Receiver<Computed>),
    /// A worker broke down with it.
    Lost,
}

/// A constraint that is one mask ahead.
struct Ahead {
    jobs: Jobs,
    state: State,
    /// Memory for the next mask.
    mask: BitSet,
    /// What the constraint said when it was last here.
    may_end: bool,
    done: bool,
}

impl Ahead {
    /// Has the next mask computed, elsewhere if there still is somewhere.
    fn send(&mut self, mut constraint: Box<dyn Constraint>) {
        self.may_end = constraint.may_end();
        self.done = constraint.is_done();
        let mask = std::mem::take(&mut self.mask);
        if let Some(jobs) = &*lock(&self.jobs) {
            let (sender, receiver) = mpsc::sync_channel(1);
            let job = Box::new(move || {
                // A request that was cancelled meanwhile waits for nothing.
                let _ = sender.send(Computed::new(constraint, mask));
            });
            // A queue that closed under us drops the job, and with it the sender: that reads as lost.
            let _ = jobs.send(job);
            self.state = State::Away(receiver);
        } else {
            self.state = State::Here(Computed::new(constraint, mask));
        }
    }

    /// Waits for the constraint.
    ///
    /// # Errors
    /// `is_request` where it was lost.
    fn here(&mut self) -> Result<&mut Computed> {
        if let State::Away(receiver) = &self.state {
            self.state = receiver.recv().map_or(State::Lost, State::Here);
        }
        match &mut self.state {
            State::Here(computed) => Ok(computed),
            State::Away(_) | State::Lost => Err(Error::request(
                "holding the answer to its grammar: computing its mask broke down",
            )),
        }
    }
}

impl Constraint for Ahead {
    fn mask(&mut self, allowed: &mut BitSet) -> Result<()> {
        let computed = self.here()?;
        // An error is given once; the constraint under it stays in error, so asking again finds it again.
        match std::mem::replace(&mut computed.outcome, Ok(())) {
            Ok(()) if computed.mask.is_empty() => computed.constraint.mask(allowed),
            Ok(()) => {
                allowed.copy_from_words(computed.mask.words());
                Ok(())
            }
            Err(e) => {
                computed.mask.clear();
                Err(e)
            }
        }
    }

    fn accept(&mut self, token: TokenId) -> Result<()> {
        let computed = self.here()?;
        if let Err(e) = computed.constraint.accept(token) {
            // What comes next is for the constraint to say; the mask was for before.
            computed.mask.clear();
            let (may_end, done) = (computed.constraint.may_end(), computed.constraint.is_done());
            (self.may_end, self.done) = (may_end, done);
            return Err(e);
        }
        let State::Here(computed) = std::mem::replace(&mut self.state, State::Lost) else {
            unreachable!("invariant: it was waited for");
        };
        self.mask = computed.mask;
        self.send(computed.constraint);
        Ok(())
    }

    fn may_end(&mut self) -> bool {
        self.may_end
    }

    fn is_done(&mut self) -> bool {
        self.done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Allows the tokens up to the number accepted so far, and ends after five; panics on request.
    struct Counting {
        accepted: u32,
        panics_at: u32,
    }

    impl Constraint for Counting {
        fn mask(&mut self, allowed: &mut BitSet) -> Result<()> {
            assert!(self.accepted != self.panics_at, "as asked");
            allowed.clear();
            (0..=self.accepted).for_each(|id| allowed.insert(id));
            Ok(())
        }

        fn accept(&mut self, token: TokenId) -> Result<()> {
            if token > self.accepted {
                return Err(Error::request("not allowed"));
            }
            self.accepted += 1;
            Ok(())
        }

        fn may_end(&mut self) -> bool {
            self.accepted >= 4
        }

        fn is_done(&mut self) -> bool {
            self.accepted >= 5
        }
    }

    fn counting(panics_at: u32) -> Box<dyn Constraint> {
        Box::new(Counting { accepted: 0, panics_at })
    }

    #[test]
    fn a_constraint_ahead_answers_as_the_one_under_it() {
        let worker = ConstraintWorker::new(2, 40).unwrap();
        let mut many: Vec<_> = (0..8).map(|_| worker.overlap(counting(99))).collect();
        let mut allowed = BitSet::new(40);
        for step in 0..5 {
            for constraint in &mut many {
                for _ in 0..2 {
                    constraint.mask(&mut allowed).unwrap();
                    assert_eq!(allowed.count(), step + 1);
                }
                assert_eq!(constraint.may_end(), step >= 4);
                assert!(!constraint.is_done());
                assert!(constraint.accept(30).is_err());
                constraint.accept(0).unwrap();
                assert_eq!(constraint.is_done(), step == 4);
            }
        }
    }

    #[test]
    fn a_mask_that_breaks_down_ends_its_request_alone() {
        let worker = ConstraintWorker::new(1, 4).unwrap();
        let (mut broken, mut whole) = (worker.overlap(counting(1)), worker.overlap(counting(9)));
        let mut allowed = BitSet::new(4);
        broken.accept(0).unwrap();
        whole.accept(0).unwrap();
        assert!(broken.mask(&mut allowed).unwrap_err().to_string().contains("broke down"));
        assert!(broken.accept(0).is_err());
        whole.mask(&mut allowed).unwrap();
        assert_eq!(allowed.count(), 2);
    }

    #[test]
    fn constraints_outlive_their_worker() {
        let worker = ConstraintWorker::new(1, 4).unwrap();
        let mut constraint = worker.overlap(counting(9));
        drop(worker);
        let mut allowed = BitSet::new(4);
        for step in 1..4 {
            constraint.mask(&mut allowed).unwrap();
            assert_eq!(allowed.count(), step);
            constraint.accept(0).unwrap();
        }
    }
}
