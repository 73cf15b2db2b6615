//! The thin set of Metal types that this crate calls: device, queue, command buffer, encoder,
//! pipeline, buffer. It knows no plan and no op.
//!
//! This is the recorded stand-in for hosts without Metal. What it keeps of the real thing: a
//! command sees its arguments and nothing else; commands of one concurrent encoder run in any
//! order between barriers (here in one that a seed shuffles); nothing runs before the commit and
//! nothing may be read before the wait; a written argument may not overlap another argument of
//! the same command. What it does not have: threads, simdgroups, threadgroup memory, time.

mod memory;
mod queue;

pub use crate::hazard::Access;
pub(crate) use memory::View;
pub use memory::{Buffer, Slice};
pub use queue::{CommandBuffer, Committed, Encoder, Queue};

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fornax_gguf::Mapping;
use fornax_plan::{Error, Result};

use crate::stub::{self, Kernel};
use memory::Memory;

/// How the stand-in runs what it recorded.
#[derive(Clone, Copy, Debug)]
pub struct Order {
    /// Seed of the shuffle between barriers.
    pub seed: u64,
    /// Refuse to run commands side by side whose declared ranges conflict.
    pub check_conflicts: bool,
}

/// A device: memory, a library of kernels, and the order in which it runs commands.
#[derive(Clone, Debug)]
pub struct Device {
    memory: Arc<Mutex<Memory>>,
    order: Order,
}

/// A kernel of the library, resolved once.
#[derive(Clone, Copy, Debug)]
pub struct Pipeline {
    pub(crate) name: &'static str,
    pub(crate) kernel: Kernel,
}

impl Device {
    /// A device with no memory in use.
    pub fn new(order: Order) -> Device {
        Device { memory: Arc::default(), order }
    }

    /// A buffer of `words` zeroed 4-byte words that host and device share.
    pub fn buffer(&self, words: usize) -> Buffer {
        self.lock().add(words)
    }

    /// A read-only buffer over bytes of a file's map, without a copy.
    pub fn wrap(&self, map: &Arc<Mapping>, offset: usize, len: usize) -> Buffer {
        self.lock().wrap(map, offset, len)
    }

    /// The kernel called `name`.
    ///
    /// # Errors
    /// `is_unsupported` when the library has none of that name.
    pub fn pipeline(&self, name: &str) -> Result<Pipeline> {
        let found = stub::LIBRARY.iter().find(|(n, _)| *n == name);
        let &(name, kernel) = found.ok_or_else(|| {
            Error::unsupported(format!("metal: the kernel library has no function {name}"))
        })?;
        Ok(Pipeline { name, kernel })
    }

    /// A queue; its command buffers run in the order of their commits.
    pub fn queue(&self) -> Queue {
        Queue::new(self.clone())
    }

    /// Copies words into a buffer, from word `at` on. The device must not be using them.
    pub fn write(&self, buffer: Buffer, at: usize, words: &[u32]) {
        self.lock().words_mut(buffer)[at..at + words.len()].copy_from_slice(words);
    }

    /// Copies words out of a buffer, from word `at` on. The device must not be writing them.
    pub fn read(&self, buffer: Buffer, at: usize, words: &mut [u32]) {
        let n = words.len();
        words.copy_from_slice(&self.lock().words_mut(buffer)[at..at + n]);
    }

    fn lock(&self) -> MutexGuard<'_, Memory> {
        // Memory is plain words: a panic elsewhere leaves it as usable as it was.
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
