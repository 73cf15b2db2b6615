//! What the server needs of an engine: one trait, so that tests can script what an engine says. Knows the
//! engine's types, no HTTP.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use fornax_engine::Model;
use fornax_engine::serve::{EngineHandle, Generation, Publish, Refused, RequestId, Stats};

/// Something that runs generations: an engine's handle, or a script.
pub trait Backend: Send + Sync {
    /// Takes a request, or says at once why not.
    ///
    /// # Errors
    /// Why the request cannot be taken; it then leaves nothing behind.
    fn submit(&self, request: Generation, publish: Publish) -> Result<RequestId, Refused>;

    /// Ends a request early; one that has ended is nobody's concern.
    fn cancel(&self, request: RequestId);

    /// A snapshot; cheap.
    fn stats(&self) -> Stats;

    /// Takes no more requests, waits for those that run, at most so long, and ends.
    fn shutdown(&self, drain: Duration);
}

/// A model that is served, and the engine that runs it.
#[derive(Clone)]
pub struct Served {
    /// What clients call it.
    pub alias: String,
    /// Its file.
    pub model: Arc<Model>,
    /// What runs it.
    pub engine: Arc<dyn Backend>,
    /// Positions of one request: prompt and answer.
    pub context: u32,
    /// When it was loaded, seconds since 1970.
    pub created: u64,
}

impl fmt::Debug for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Served").field("alias", &self.alias).finish_non_exhaustive()
    }
}

impl Backend for EngineHandle {
    fn submit(&self, request: Generation, publish: Publish) -> Result<RequestId, Refused> {
        EngineHandle::submit(self, request, publish)
    }

    fn cancel(&self, request: RequestId) {
        EngineHandle::cancel(self, request);
    }

    fn stats(&self) -> Stats {
        EngineHandle::stats(self)
    }

    fn shutdown(&self, drain: Duration) {
        EngineHandle::shutdown(self, drain);
    }
}
