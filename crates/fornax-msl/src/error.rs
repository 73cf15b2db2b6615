//! The crate's one error, and the report of a fault that a running kernel committed. It must not know how either is shown.

use std::fmt;

/// What a running kernel did wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultKind {
    /// An access outside of the bound range, the threadgroup array or every known memory.
    OutOfBounds,
    /// A read of bytes that nothing has written.
    Unwritten,
    /// A barrier or simdgroup function that not all threads concerned reach.
    Divergent,
    /// An address that is not a multiple of its type's alignment.
    Misaligned,
    /// Two threads of a threadgroup access the same bytes, one writes, and no barrier orders them.
    Race,
    /// Two threadgroups, of one dispatch or of two with no barrier between, access the same bytes and one writes.
    Conflict,
    /// More threadgroup memory than a device has.
    ThreadgroupMemory,
    /// A write to an argument bound for reading, or to program-scope data.
    ReadOnlyWrite,
    /// An index outside of an array in thread memory or at program scope.
    ArrayIndex,
    /// An integer division by zero.
    Division,
}

/// The report of a fault: which kernel, which thread, which buffer, where in the source.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fault {
    /// What went wrong.
    pub kind: FaultKind,
    /// The kernel's name.
    pub kernel: String,
    /// The place of the dispatch among those of the run, from 0.
    pub dispatch: usize,
    /// The threadgroup's position in the grid.
    pub threadgroup: [u32; 3],
    /// The thread's index in its threadgroup.
    pub thread: u32,
    /// The label of the buffer concerned.
    pub buffer: Option<String>,
    /// The index of the kernel argument concerned.
    pub argument: Option<u32>,
    /// The offset in bytes, from the start of the bound range or of the threadgroup array.
    pub offset: i64,
    /// The source file's name and the line, where the compiler left them.
    pub place: Option<(String, u32)>,
    pub(crate) text: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel {}", self.kernel)?;
        if let Some((file, line)) = &self.place {
            write!(f, " ({file}:{line})")?;
        }
        if let Some(buffer) = &self.buffer {
            write!(f, ", buffer '{buffer}'")?;
        }
        if let Some(index) = self.argument {
            write!(f, ", argument {index}")?;
        }
        write!(
            f,
            ", threadgroup {:?}, thread {}, dispatch {}: {}",
            self.threadgroup, self.thread, self.dispatch, self.text
        )
    }
}

/// What went wrong while compiling, binding or running kernels.
///
/// Opaque: ask the predicates for the class and print it for the details.
pub struct Error(Box<Inner>);

enum Inner {
    Compile(String),
    Arguments(String),
    Host(String),
    Fault(Fault),
}

impl Error {
    pub(crate) fn compile(message: impl Into<String>) -> Error {
        Error(Box::new(Inner::Compile(message.into())))
    }

    pub(crate) fn arguments(message: impl Into<String>) -> Error {
        Error(Box::new(Inner::Arguments(message.into())))
    }

    pub(crate) fn host(message: impl Into<String>) -> Error {
        Error(Box::new(Inner::Host(message.into())))
    }

    pub(crate) fn fault(fault: Fault) -> Error {
        Error(Box::new(Inner::Fault(fault)))
    }

    /// True if the kernel source is wrong: it does not compile, or breaks a rule of the language.
    pub fn is_compile(&self) -> bool {
        matches!(*self.0, Inner::Compile(_))
    }

    /// True if a name, a function constant, a binding or a size does not fit the kernel's signature or the device's limits.
    pub fn is_arguments(&self) -> bool {
        matches!(*self.0, Inner::Arguments(_))
    }

    /// True if this machine has no compiler, or refused memory or a file.
    pub fn is_host(&self) -> bool {
        matches!(*self.0, Inner::Host(_))
    }

    /// What the kernel did, if it did something wrong while it ran.
    pub fn as_fault(&self) -> Option<&Fault> {
        match &*self.0 {
            Inner::Fault(fault) => Some(fault),
            _ => None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.0 {
            Inner::Compile(m) | Inner::Arguments(m) | Inner::Host(m) => f.write_str(m),
            Inner::Fault(fault) => fault.fmt(f),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}
