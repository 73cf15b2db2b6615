//! The thin set of Metal types that this crate calls: device, queue, command buffer, encoder,
//! pipeline, buffer. It knows no plan and no op.
//!
//! Two stand-ins for hosts without Metal. One runs the real kernel sources under the emulator,
//! with every access judged. The other records commands for scalar kernels and proves the host
//! alone. What it keeps of the real thing: a
//! command sees its arguments and nothing else; commands of one concurrent encoder run in any
//! order between barriers (here in one that a seed shuffles); nothing runs before the commit and
//! nothing may be read before the wait; a written argument may not overlap another argument of
//! the same command. What it does not have: threads, simdgroups, threadgroup memory, time.

mod emulator;
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
    form: Form,
}

/// What runs the commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Scalar kernels on the host.
    Recorded,
    /// The kernel sources, under the emulator.
    Emulated,
}

/// A kernel of the library, resolved once.
#[derive(Clone, Debug)]
pub struct Pipeline {
    pub(crate) name: Arc<str>,
    pub(crate) code: Code,
}

/// What a pipeline runs.
#[derive(Clone, Debug)]
pub(crate) enum Code {
    Scalar(Kernel),
    Emulated(fornax_msl::Pipeline),
}

/// Threadgroups along each axis, and the threads of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Threadgroups.
    pub groups: [u32; 3],
    /// Threads of a threadgroup, in a row.
    pub threads: u32,
}

impl Device {
    /// A device with no memory in use.
    pub fn new(order: Order, form: Form) -> Device {
        Device { memory: Arc::default(), order, form }
    }

    /// What runs this device's commands.
    pub fn form(&self) -> Form {
        self.form
    }

    /// A buffer of 4-byte words that host and device share. Nobody reads a word before somebody
    /// has written it.
    ///
    /// # Errors
    /// When there is no memory for it.
    pub fn buffer(&self, label: &str, words: usize) -> Result<Buffer> {
        match self.form {
            Form::Recorded => Ok(self.lock().add(words)),
            Form::Emulated => self.lock().add_emulated(label, words),
        }
    }

    /// A read-only buffer over bytes of a file's map, without a copy.
    ///
    /// # Errors
    /// When there is no memory for it.
    pub fn wrap(&self, map: &Arc<Mapping>, offset: usize, len: usize) -> Result<Buffer> {
        match self.form {
            Form::Recorded => Ok(self.lock().wrap(map, offset, len)),
            Form::Emulated => self.lock().wrap_emulated(map, offset, len),
        }
    }

    /// The kernel called `name` with its function constants, by their places.
    ///
    /// # Errors
    /// `is_unsupported` when the library has none of that name, or cannot be compiled here.
    pub fn pipeline(&self, name: &str, constants: &[u32]) -> Result<Pipeline> {
        if self.form == Form::Emulated {
            return emulator::pipeline(name, constants);
        }
        let found = stub::LIBRARY.iter().find(|(n, _)| *n == name);
        let &(name, kernel) = found.ok_or_else(|| {
            Error::unsupported(format!("metal: the kernel library has no function {name}"))
        })?;
        Ok(Pipeline { name: name.into(), code: Code::Scalar(kernel) })
    }

    /// A queue; its command buffers run in the order of their commits.
    pub fn queue(&self) -> Queue {
        Queue::new(self.clone())
    }

    /// Copies words into a buffer, from word `at` on. The device must not be using them.
    pub fn write(&self, buffer: Buffer, at: usize, words: &[u32]) {
        self.lock().write(buffer, at, words);
    }

    /// Copies words out of a buffer, from word `at` on. The device must not be writing them.
    pub fn read(&self, buffer: Buffer, at: usize, words: &mut [u32]) {
        self.lock().read(buffer, at, words);
    }

    fn lock(&self) -> MutexGuard<'_, Memory> {
        // Memory is plain words: a panic elsewhere leaves it as usable as it was.
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
