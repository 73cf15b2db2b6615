//! What a device's programs hold and what befell them: live objects, faults that a test asks for, and the first
//! failure after which nothing works any more. It knows no Metal.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fornax_plan::{Error, Result};

/// What a test can make fail, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A buffer for which there is no memory.
    NoMemory,
    /// A pipeline that the device's compiler refuses.
    NoPipeline,
    /// A command buffer that ends with an error; the device goes on.
    Failed,
    /// A command buffer that runs too long; the device goes on.
    TimedOut,
    /// A command buffer that the system ignores, as all that follow.
    Ignored,
}

/// Counts, and the failure that ended everything.
#[derive(Debug, Default)]
pub(crate) struct Health {
    live: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The fault to come and how many of its kind pass before it.
    armed: Option<(Fault, u64)>,
    lost: Option<Arc<str>>,
}

impl Health {
    /// Lets `after` allocations, pipelines or command buffers pass and fails the next.
    pub(crate) fn arm(&self, fault: Fault, after: u64) {
        self.lock().armed = Some((fault, after));
    }

    /// Objects that exist now: buffers, pipelines, queues, command buffers.
    pub(crate) fn live(&self) -> u64 {
        self.live.load(Relaxed)
    }

    /// Counts one event of the kinds in `of`; the fault that is due, if any.
    pub(super) fn due(&self, of: &[Fault]) -> Option<Fault> {
        let mut state = self.lock();
        let (fault, after) = state.armed.filter(|(fault, _)| of.contains(fault))?;
        state.armed = after.checked_sub(1).map(|left| (fault, left));
        (after == 0).then_some(fault)
    }

    /// Nothing works from now on; the first cause is kept.
    pub(super) fn lose(&self, cause: &str) {
        self.lock().lost.get_or_insert_with(|| cause.into());
    }

    /// # Errors
    /// `is_lost` with the first cause, once the device is gone.
    pub(crate) fn check(&self) -> Result<()> {
        match &self.lock().lost {
            None => Ok(()),
            Some(cause) => Err(Error::lost(format!(
                "metal: the device was given up after: {cause}; start the program again"
            ))),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts the object that holds it.
#[derive(Debug)]
pub(crate) struct Live(Arc<Health>);

impl Live {
    pub(super) fn new(health: &Arc<Health>) -> Live {
        health.live.fetch_add(1, Relaxed);
        Live(Arc::clone(health))
    }
}

impl Clone for Live {
    fn clone(&self) -> Live {
        Live::new(&self.0)
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.0.live.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_event_of_a_kind_fails_once() {
        let health = Health::default();
        health.arm(Fault::NoMemory, 2);
        assert_eq!(health.due(&[Fault::Failed, Fault::Ignored]), None, "another kind");
        let all: Vec<_> = (0..5).map(|_| health.due(&[Fault::NoMemory])).collect();
        assert_eq!(all, [None, None, Some(Fault::NoMemory), None, None]);
    }

    #[test]
    fn objects_are_counted_while_they_live() {
        let health = Arc::new(Health::default());
        let one = Live::new(&health);
        let two = one.clone();
        assert_eq!(health.live(), 2);
        drop((one, two));
        assert_eq!(health.live(), 0);
    }

    #[test]
    fn the_first_cause_is_kept() {
        let health = Health::default();
        assert!(health.check().is_ok());
        health.lose("page fault");
        health.lose("ignored");
        let e = health.check().unwrap_err();
        assert!(e.is_lost() && e.to_string().contains("page fault"), "{e}");
    }
}
