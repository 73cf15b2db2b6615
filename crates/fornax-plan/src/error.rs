//! The boundary's error: one opaque type with predicates. It knows no provider.

use std::fmt;

/// What went wrong at the boundary: in a plan, at `prepare`, or in a step.
///
/// The message says what was being done, on what, what was found against what was expected.
#[derive(Debug)]
pub struct Error(Box<Inner>);

#[derive(Debug)]
struct Inner {
    kind: Kind,
    message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Malformed,
    Unsupported,
    OutOfMemory,
    Failed,
    Lost,
}

/// A result whose error is the boundary's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    fn new(kind: Kind, message: impl Into<String>) -> Error {
        Error(Box::new(Inner { kind, message: message.into() }))
    }

    /// A plan, a weight or a step that contradicts itself.
    pub fn malformed(message: impl Into<String>) -> Error {
        Error::new(Kind::Malformed, message)
    }

    /// Something that this device does not do.
    pub fn unsupported(message: impl Into<String>) -> Error {
        Error::new(Kind::Unsupported, message)
    }

    /// Memory that could not be had; say how much was needed and which limit shrinks it.
    pub fn out_of_memory(message: impl Into<String>) -> Error {
        Error::new(Kind::OutOfMemory, message)
    }

    /// A step that the device did not do; the next may work.
    pub fn failed(message: impl Into<String>) -> Error {
        Error::new(Kind::Failed, message)
    }

    /// The device failed and cannot be used any more.
    pub fn lost(message: impl Into<String>) -> Error {
        Error::new(Kind::Lost, message)
    }

    /// True for a plan, weight or step that contradicts itself.
    pub fn is_malformed(&self) -> bool {
        self.0.kind == Kind::Malformed
    }

    /// True for something that this device does not do.
    pub fn is_unsupported(&self) -> bool {
        self.0.kind == Kind::Unsupported
    }

    /// True where memory ran out.
    pub fn is_out_of_memory(&self) -> bool {
        self.0.kind == Kind::OutOfMemory
    }

    /// True where the device did not do a step, and the next may work.
    pub fn is_failed(&self) -> bool {
        self.0.kind == Kind::Failed
    }

    /// True where the device cannot be used any more.
    pub fn is_lost(&self) -> bool {
        self.0.kind == Kind::Lost
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl std::error::Error for Error {}
