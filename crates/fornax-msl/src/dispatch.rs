//! A dispatch: a pipeline, what is bound to its arguments, and the grid; and the check of the one against the others, which
//! the real API makes only with its validation layer on. It runs nothing.

use crate::library::{Argument, Pipeline, Space};
use crate::memory::Buffer;
use crate::{Error, ffi};

/// The most bytes of threadgroup memory.
pub const THREADGROUP_MEMORY: usize = 32 << 10;
/// The most bytes that travel with a dispatch for one argument.
pub const INLINE_BYTES: usize = 4 << 10;

/// What is bound to a buffer argument.
#[derive(Clone, Debug)]
pub enum Bound {
    /// A range of a buffer.
    Buffer {
        /// The buffer.
        buffer: Buffer,
        /// The first byte.
        offset: usize,
        /// The bytes that the kernel may touch.
        length: usize,
    },
    /// Bytes that travel with the dispatch.
    Bytes(Vec<u8>),
}

/// One run of a kernel over a grid of threadgroups.
#[derive(Clone, Debug)]
pub struct Dispatch {
    /// The kernel.
    pub pipeline: Pipeline,
    /// What is bound at which index.
    pub bound: Vec<(u32, Bound)>,
    /// The lengths in bytes of threadgroup arguments, by index.
    pub threadgroup_memory: Vec<(u32, usize)>,
    /// Threadgroups along each axis.
    pub grid: [u32; 3],
    /// Threads of a threadgroup along each axis.
    pub threads: [u32; 3],
}

impl Dispatch {
    /// A dispatch with nothing bound.
    pub fn new(pipeline: &Pipeline, grid: [u32; 3], threads: [u32; 3]) -> Dispatch {
        let pipeline = pipeline.clone();
        Dispatch { pipeline, bound: Vec::new(), threadgroup_memory: Vec::new(), grid, threads }
    }

    /// Binds a whole buffer.
    #[must_use]
    pub fn buffer(self, index: u32, buffer: &Buffer) -> Dispatch {
        self.range(index, buffer, 0, buffer.len())
    }

    /// Binds a range of a buffer.
    #[must_use]
    pub fn range(mut self, index: u32, buffer: &Buffer, offset: usize, length: usize) -> Dispatch {
        self.bound.push((index, Bound::Buffer { buffer: buffer.clone(), offset, length }));
        self
    }

    /// Binds bytes.
    #[must_use]
    pub fn bytes(mut self, index: u32, bytes: &[u8]) -> Dispatch {
        self.bound.push((index, Bound::Bytes(bytes.to_vec())));
        self
    }

    /// Sets the length of a threadgroup argument.
    #[must_use]
    pub fn threadgroup(mut self, index: u32, length: usize) -> Dispatch {
        self.threadgroup_memory.push((index, length));
        self
    }

    fn error(&self, what: &str) -> Error {
        Error::arguments(format!("dispatch of kernel {}: {what}", self.pipeline.info().name))
    }

    /// Holds the dispatch against the kernel's signature and the limits of a device.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.check_sizes()?;
        for (n, (index, _)) in self.bound.iter().enumerate() {
            if self.bound[..n].iter().any(|(i, _)| i == index) {
                return Err(self.error(&format!("buffer index {index} is bound twice")));
            }
            let fits = |a: &&Argument| a.space != Space::Threadgroup && a.index == *index;
            if !self.pipeline.arguments().iter().any(|a| fits(&a)) {
                return Err(self.error(&format!(
                    "something is bound at buffer index {index}, where the kernel has no argument"
                )));
            }
        }
        for (index, length) in &self.threadgroup_memory {
            let fits = |a: &&Argument| a.space == Space::Threadgroup && a.index == *index;
            if !self.pipeline.arguments().iter().any(|a| fits(&a)) {
                return Err(self.error(&format!(
                    "threadgroup memory is given at index {index}, where the kernel takes none"
                )));
            }
            if *length == 0 || length % 16 != 0 {
                return Err(self.error(&format!(
                    "threadgroup memory at index {index} of {length} bytes; the length has to be a multiple of 16"
                )));
            }
        }
        for argument in self.pipeline.arguments() {
            self.check_argument(argument)?;
        }
        self.check_overlap()
    }

    fn check_sizes(&self) -> Result<(), Error> {
        if self.grid.contains(&0) || self.threads.contains(&0) {
            return Err(self.error(&format!(
                "a grid of {:?} threadgroups of {:?} threads has an empty axis",
                self.grid, self.threads
            )));
        }
        let threads: u64 = self.threads.iter().map(|&t| u64::from(t)).product();
        let most = self.pipeline.info().max_threads.min(1024);
        if threads > u64::from(most) {
            return Err(self.error(&format!(
                "{threads} threads in a threadgroup; the kernel takes {most} at most"
            )));
        }
        let bytes: usize = self.threadgroup_memory.iter().map(|(_, n)| n).sum();
        if bytes > THREADGROUP_MEMORY {
            return Err(self.error(&format!(
                "{bytes} bytes of threadgroup memory; the limit is {THREADGROUP_MEMORY}"
            )));
        }
        Ok(())
    }

    fn check_argument(&self, a: &Argument) -> Result<(), Error> {
        let (index, name) = (a.index, &a.name);
        if a.space == Space::Threadgroup {
            return match self.threadgroup_memory.iter().any(|(i, _)| *i == index) {
                true => Ok(()),
                false => Err(self.error(&format!(
                    "threadgroup argument '{name}' at index {index} has no length"
                ))),
            };
        }
        let Some((_, bound)) = self.bound.iter().find(|(i, _)| *i == index) else {
            return Err(self.error(&format!(
                "argument '{name}' ({}) at index {index} is not bound",
                a.type_text
            )));
        };
        let length = match bound {
            Bound::Bytes(bytes) => {
                if !a.read_only {
                    return Err(self.error(&format!(
                        "argument '{name}' at index {index} is written, so it cannot be bytes"
                    )));
                }
                if bytes.len() > INLINE_BYTES {
                    return Err(self.error(&format!(
                        "{} bytes for argument '{name}' at index {index}; the limit is {INLINE_BYTES}",
                        bytes.len()
                    )));
                }
                bytes.len()
            }
            Bound::Buffer { buffer, offset, length } => {
                self.check_range(a, buffer, *offset, *length)?;
                *length
            }
        };
        if length < a.size.max(1) {
            return Err(self.error(&format!(
                "argument '{name}' at index {index} needs {} bytes for its {}, and {length} are bound",
                a.size, a.type_text
            )));
        }
        Ok(())
    }

    fn check_range(&self, a: &Argument, b: &Buffer, at: usize, len: usize) -> Result<(), Error> {
        let what = format!("argument '{}' at index {}", a.name, a.index);
        if at.checked_add(len).is_none_or(|end| end > b.len()) {
            return Err(self.error(&format!(
                "{what}: {len} bytes at {at} of buffer '{}', which has {}",
                b.label(),
                b.len()
            )));
        }
        if !at.is_multiple_of(a.align.max(1)) {
            return Err(self.error(&format!(
                "{what}: offset {at} in buffer '{}' is not a multiple of {}, which its {} needs",
                b.label(),
                a.align,
                a.type_text
            )));
        }
        if b.is_read_only() && !a.read_only {
            return Err(
                self.error(&format!("{what} is written, and buffer '{}' is read-only", b.label()))
            );
        }
        Ok(())
    }

    /// The ranges of buffers, with the argument's index and whether the kernel may write them.
    pub(crate) fn ranges(&self) -> Vec<(u32, &Buffer, usize, usize, bool)> {
        let writes = |index: u32| {
            let a = |a: &&Argument| a.space != Space::Threadgroup && a.index == index;
            self.pipeline.arguments().iter().find(a).is_some_and(|a| !a.read_only)
        };
        let one = |(index, bound): &'_ (u32, Bound)| match bound {
            Bound::Bytes(_) => None,
            Bound::Buffer { offset, length, .. } => Some((*index, *offset, *length)),
        };
        let mut out = Vec::new();
        for entry in &self.bound {
            if let (Some((index, offset, length)), Bound::Buffer { buffer, .. }) =
                (one(entry), &entry.1)
            {
                out.push((index, buffer, offset, length, writes(index)));
            }
        }
        out
    }

    /// Two arguments may not meet in memory if either is written: the compiler assumes it.
    fn check_overlap(&self) -> Result<(), Error> {
        let ranges = self.ranges();
        for (n, &(index, buffer, at, len, writes)) in ranges.iter().enumerate() {
            for &(other, b, o_at, o_len, o_writes) in &ranges[..n] {
                let meet = b.id() == buffer.id() && at < o_at + o_len && o_at < at + len;
                if meet && (writes || o_writes) {
                    return Err(self.error(&format!(
                        "arguments {other} and {index} overlap in buffer '{}', and one of them is written",
                        buffer.label()
                    )));
                }
            }
        }
        Ok(())
    }

    /// Threadgroup memory lengths by index, as the run-time library takes them.
    pub(crate) fn group_bytes(&self) -> [u32; ffi::SLOTS] {
        let mut out = [0; ffi::SLOTS];
        for &(index, length) in &self.threadgroup_memory {
            if let Some(slot) = out.get_mut(index as usize) {
                *slot = length as u32;
            }
        }
        out
    }
}
