//! The thin set of Metal types that this crate calls: device, queue, command buffer, encoder,
//! pipeline, buffer. It knows no plan and no op.
//!
//! Behind it are the system's Metal, where there is one, and two stand-ins. One runs the real kernel sources under
//! the emulator, with every access judged. The other runs scalar kernels and proves the host alone. What it keeps of
//! the real thing: a command sees its arguments and nothing else; commands of one concurrent encoder run in any
//! order between barriers (here in one that a seed shuffles); nothing runs before the commit and
//! nothing may be read before the wait; a written argument may not overlap another argument of
//! the same command. What it does not have: threads, simdgroups, threadgroup memory, time.

mod emulator;
mod failure;
mod health;
mod memory;
mod pace;
mod queue;
mod recording;
mod stand_in;
#[cfg(target_os = "macos")]
mod system;
#[cfg(not(target_os = "macos"))]
#[path = "absent.rs"]
mod system;

pub use crate::hazard::Access;
pub use health::Fault;
pub(crate) use health::Health;
pub(crate) use memory::View;
pub use memory::{Buffer, Slice};
pub use queue::{CommandBuffer, Committed, Encoder, Queue};
pub(crate) use recording::Ran;
pub(crate) use system::Gpu;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fornax_gguf::Mapping;
use fornax_plan::{Error, Result};

use crate::stub::{self, Kernel};
use health::Live;
use memory::Memory;

/// How the stand-in runs what it recorded.
#[derive(Clone, Copy, Debug)]
pub struct Order {
    /// Seed of the shuffle between barriers.
    pub seed: u64,
    /// Refuse to run commands side by side whose declared ranges conflict.
    pub check_conflicts: bool,
}

/// What a device is made to be.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Of the stand-ins.
    pub order: Order,
    /// Threads of a threadgroup in any pipeline of a stand-in.
    pub threads_max: u32,
    /// Seconds that a command buffer may run by prediction; the usual where absent.
    pub budget_s: Option<f64>,
}

/// A device: memory, a library of kernels, and the order in which it runs commands.
#[derive(Clone, Debug)]
pub struct Device {
    memory: Arc<Mutex<Memory>>,
    setup: Setup,
    backend: Backend,
    health: Arc<Health>,
}

/// What runs the commands.
#[derive(Clone, Debug)]
pub(crate) enum Backend {
    Recorded,
    Emulated,
    System(Arc<Gpu>),
}

impl Backend {
    pub(crate) fn form(&self) -> Form {
        match self {
            Backend::Recorded => Form::Recorded,
            Backend::Emulated => Form::Emulated,
            Backend::System(_) => Form::System,
        }
    }
}

/// What runs the commands, as a plain word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Scalar kernels on the host.
    Recorded,
    /// The kernel sources, under the emulator.
    Emulated,
    /// The kernel sources, on the system's GPU.
    System,
}

/// A kernel of the library, resolved once.
#[derive(Clone, Debug)]
pub struct Pipeline {
    pub(crate) name: Arc<str>,
    pub(crate) code: Code,
    /// Threads that a threadgroup of it may have.
    pub(crate) threads_max: u32,
    _live: Live,
}

/// What a pipeline runs.
#[derive(Clone, Debug)]
pub(crate) enum Code {
    Scalar(Kernel),
    Emulated(fornax_msl::Pipeline),
    #[cfg_attr(not(target_os = "macos"), allow(dead_code, reason = "of the system's Metal"))]
    System(system::Pipeline),
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
    pub(crate) fn new(setup: Setup, backend: Backend, health: Arc<Health>) -> Device {
        Device { memory: Arc::default(), setup, backend, health }
    }

    /// What runs this device's commands.
    pub fn form(&self) -> Form {
        self.backend.form()
    }

    /// A buffer of 4-byte words that host and device share. Nobody reads a word before somebody
    /// has written it.
    ///
    /// # Errors
    /// `is_out_of_memory` when there is no memory for it.
    pub fn buffer(&self, label: &str, words: usize) -> Result<Buffer> {
        let live = self.allocation(label, 4 * words)?;
        let mut memory = self.lock();
        let buffer = match &self.backend {
            Backend::Recorded => memory.add(words),
            Backend::Emulated => memory.add_emulated(label, words)?,
            Backend::System(gpu) => memory.add_system(gpu.buffer(label, 4 * words)?, 0, 4 * words),
        };
        memory.keep(live);
        Ok(buffer)
    }

    /// The same buffer with room for more words behind those that are there, which stay where they are. The device must
    /// not be using it.
    ///
    /// # Errors
    /// `is_unsupported` for the system's memory, `is_out_of_memory` when there is none.
    pub fn grow(&self, buffer: Buffer, words: usize) -> Result<Buffer> {
        let live = self.allocation("more blocks", (4 * words).saturating_sub(buffer.len_bytes))?;
        // It counts as one buffer still.
        drop(live);
        self.lock().grow(buffer, words)
    }

    /// A read-only buffer over bytes of a file's map, without a copy.
    ///
    /// # Errors
    /// `is_out_of_memory` when there is no memory for it.
    pub fn wrap(&self, map: &Arc<Mapping>, offset: usize, len: usize) -> Result<Buffer> {
        let live = self.allocation("weights", len)?;
        let mut memory = self.lock();
        let buffer = match &self.backend {
            Backend::Recorded => memory.wrap(map, offset, len),
            Backend::Emulated => memory.wrap_emulated(map, offset, len)?,
            Backend::System(gpu) => {
                let (buffer, at) = gpu.wrap(&mut memory.pages, map, offset, len)?;
                memory.add_system(buffer, at, len)
            }
        };
        memory.keep(live);
        Ok(buffer)
    }

    /// Buffers made so far.
    pub fn allocations(&self) -> u64 {
        self.lock().made()
    }

    fn allocation(&self, label: &str, bytes: usize) -> Result<Live> {
        match self.health.due(&[Fault::NoMemory]) {
            None => Ok(Live::new(&self.health)),
            Some(_) => Err(Error::out_of_memory(format!(
                "metal: no memory for {bytes} bytes ({label}); try a smaller --ctx"
            ))),
        }
    }

    /// The kernel called `name` with its function constants, by their places.
    ///
    /// # Errors
    /// `is_unsupported` when the library has none of that name, or cannot be compiled here.
    pub fn pipeline(&self, name: &str, constants: &[u32]) -> Result<Pipeline> {
        self.pipeline_for(name, constants, None)
    }

    /// The same, compiled so that a threadgroup may have `threads` where that is possible.
    ///
    /// # Errors
    /// As [`Device::pipeline`].
    pub fn pipeline_for(
        &self,
        name: &str,
        constants: &[u32],
        threads: Option<u32>,
    ) -> Result<Pipeline> {
        if self.health.due(&[Fault::NoPipeline]).is_some() {
            return Err(Error::unsupported(format!(
                "metal: building the pipeline {name} with constants {constants:?}: a fault that a test asked for"
            )));
        }
        let mut threads_max = self.setup.threads_max;
        let code = match &self.backend {
            Backend::Recorded => {
                let found = stub::LIBRARY.iter().find(|(n, _)| *n == name);
                let (_, kernel) = found.ok_or_else(|| {
                    Error::unsupported(format!("metal: the kernel library has no function {name}"))
                })?;
                Code::Scalar(*kernel)
            }
            Backend::Emulated => emulator::pipeline(name, constants)?,
            Backend::System(gpu) => {
                let pipeline = gpu.pipeline(name, constants, threads)?;
                threads_max = pipeline.threads_max();
                Code::System(pipeline)
            }
        };
        Ok(Pipeline { name: name.into(), code, threads_max, _live: Live::new(&self.health) })
    }

    /// A queue; its command buffers run in the order of their commits.
    ///
    /// # Errors
    /// `is_lost` when the system gives none.
    pub fn queue(&self) -> Result<Queue> {
        self.health.check()?;
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
