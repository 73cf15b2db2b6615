//! The thin set of Metal types that this crate calls: device, queue, command buffer, encoder,
//! pipeline, buffer. It knows no plan and no op.
//!
//! Behind it are the system's Metal, where there is one, and a stand-in, which runs the kernel sources under
//! the emulator, with every access judged. What it keeps of the real thing: a command sees its arguments and nothing
//! else; commands of one concurrent encoder run in any order between barriers (here in one that a seed shuffles);
//! nothing runs before the commit and nothing may be read before the wait; a written argument may not overlap
//! another argument of the same command. What it does not have: time.

mod emulator;
mod failure;
mod health;
mod memory;
mod pace;
mod queue;
mod recording;
#[cfg(target_os = "macos")]
mod system;
#[cfg(not(target_os = "macos"))]
#[path = "absent.rs"]
mod system;

pub use crate::hazard::Access;
pub use health::Fault;
pub(crate) use health::Health;
pub use memory::{Buffer, Slice};
pub use queue::{CommandBuffer, Committed, Encoder, Queue};
pub use recording::Note;
pub(crate) use recording::Ran;
pub(crate) use system::Gpu;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fornax_gguf::Mapping;
use fornax_plan::{Error, Result};

use crate::library::PIECES_AT;
use health::Live;
use memory::Memory;

/// Argument slots of one kernel, as Metal has them.
const SLOTS: usize = 31;

/// What a device is made to be.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Of the stand-in's shuffle between barriers.
    pub seed: u64,
    /// Threads of a threadgroup in any pipeline of the stand-in.
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
    Emulated,
    System(Arc<Gpu>),
}

/// A kernel of the library, resolved once.
#[derive(Clone, Debug)]
pub struct Pipeline {
    pub(crate) name: Arc<str>,
    /// Function constants, by their places.
    constants: Arc<[u32]>,
    /// Threads that it had to be compiled for.
    asked: Option<u32>,
    pub(crate) code: Code,
    /// Threads that a threadgroup of it may have.
    pub(crate) threads_max: u32,
    _live: Live,
}

/// What a pipeline runs.
#[derive(Clone, Debug)]
pub(crate) enum Code {
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

    /// Whether its times are those of a GPU.
    pub fn has_clock(&self) -> bool {
        matches!(self.backend, Backend::System(_))
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
            Backend::Emulated => memory.add_emulated(label, words)?,
            Backend::System(gpu) => memory.add_system(gpu.buffer(label, 4 * words)?, 0, 4 * words),
        };
        memory.keep(live);
        Ok(buffer)
    }

    /// Lets go of a buffer that nothing is bound to any more. The device must not be using it.
    pub fn release(&self, buffer: Buffer) {
        self.lock().release(buffer);
    }

    /// A read-only buffer over bytes of a file's map, without a copy.
    ///
    /// # Errors
    /// `is_out_of_memory` when there is no memory for it.
    pub fn wrap(&self, map: &Arc<Mapping>, offset: usize, len: usize) -> Result<Buffer> {
        let live = self.allocation("weights", len)?;
        let mut memory = self.lock();
        let buffer = match &self.backend {
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
            Backend::Emulated => emulator::pipeline(name, constants)?,
            Backend::System(gpu) => {
                let pipeline = gpu.pipeline(name, constants, threads)?;
                threads_max = pipeline.threads_max();
                Code::System(pipeline)
            }
        };
        let (name, constants, asked) = (name.into(), constants.into(), threads);
        Ok(Pipeline { name, constants, asked, code, threads_max, _live: Live::new(&self.health) })
    }

    /// The same kernel for a cache in so many pieces, in as many threads.
    ///
    /// # Errors
    /// As [`Device::pipeline`], and where it does not take so many threads any more.
    pub fn in_pieces(&self, pipeline: &Pipeline, pieces: usize, threads: u32) -> Result<Pipeline> {
        let mut constants = pipeline.constants.to_vec();
        constants[PIECES_AT] = pieces as u32;
        let built = self.pipeline_for(&pipeline.name, &constants, pipeline.asked)?;
        if threads <= built.threads_max {
            return Ok(built);
        }
        let built = self.pipeline_for(&pipeline.name, &constants, Some(threads))?;
        if threads <= built.threads_max {
            return Ok(built);
        }
        Err(Error::unsupported(format!(
            "metal: {} takes no {threads} threads with a cache in {pieces} pieces; ask for a larger --ctx at the start",
            pipeline.name
        )))
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
