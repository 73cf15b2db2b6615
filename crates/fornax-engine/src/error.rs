//! The engine's error: one opaque type with predicates; those of the crates below keep their
//! messages and gain what was being done.

use std::fmt;

/// What went wrong while loading a model or running it.
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
    Request,
    Device,
    Deadline,
}

/// A result whose error is the engine's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    fn new(kind: Kind, message: impl Into<String>) -> Error {
        Error(Box::new(Inner { kind, message: message.into() }))
    }

    /// A model file that contradicts itself or lacks something.
    pub(crate) fn malformed(message: impl Into<String>) -> Error {
        Error::new(Kind::Malformed, message)
    }

    /// A model file that is sound but of a kind that is not read.
    pub(crate) fn unsupported(message: impl Into<String>) -> Error {
        Error::new(Kind::Unsupported, message)
    }

    /// A request that cannot be served as it is.
    pub(crate) fn request(message: impl Into<String>) -> Error {
        Error::new(Kind::Request, message)
    }

    /// A device, or the engine's thread, that cannot go on.
    pub(crate) fn device(message: impl Into<String>) -> Error {
        Error::new(Kind::Device, message)
    }

    /// What a step failed with, for one of the sequences that were in it.
    pub(crate) fn from_step(e: &fornax_plan::Error) -> Error {
        Error::new(Kind::of(e), e.to_string())
    }

    /// A request that waited too long.
    pub(crate) fn deadline() -> Error {
        Error::new(Kind::Deadline, "the request ran out of time")
    }

    /// Something that does not fit what is free.
    pub(crate) fn out_of_memory(message: impl Into<String>) -> Error {
        Error::new(Kind::OutOfMemory, message)
    }

    /// A sequence that outgrew the pool though nothing else runs.
    pub(crate) fn no_room() -> Error {
        Error::new(Kind::OutOfMemory, "the pool of keys and values has no room for the request")
    }

    /// True for a model file that contradicts itself or lacks something.
    pub fn is_malformed(&self) -> bool {
        self.0.kind == Kind::Malformed
    }

    /// True for something sound that fornax does not do.
    pub fn is_unsupported(&self) -> bool {
        self.0.kind == Kind::Unsupported
    }

    /// True where memory ran out.
    pub fn is_out_of_memory(&self) -> bool {
        self.0.kind == Kind::OutOfMemory
    }

    /// True for a request that cannot be served as it is (too long, a parameter out of range).
    pub fn is_request(&self) -> bool {
        self.0.kind == Kind::Request
    }

    /// True for a request that its deadline ended.
    pub fn is_deadline(&self) -> bool {
        self.0.kind == Kind::Deadline
    }

    /// True where the device failed.
    pub fn is_device(&self) -> bool {
        self.0.kind == Kind::Device
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl std::error::Error for Error {}

impl From<fornax_gguf::Error> for Error {
    fn from(e: fornax_gguf::Error) -> Error {
        let kind = if e.is_unsupported() { Kind::Unsupported } else { Kind::Malformed };
        Error::new(kind, e.to_string())
    }
}

impl Kind {
    fn of(e: &fornax_plan::Error) -> Kind {
        if e.is_unsupported() {
            Kind::Unsupported
        } else if e.is_out_of_memory() {
            Kind::OutOfMemory
        } else if e.is_lost() {
            Kind::Device
        } else {
            Kind::Request
        }
    }
}

impl From<fornax_plan::Error> for Error {
    fn from(e: fornax_plan::Error) -> Error {
        Error::new(Kind::of(&e), e.to_string())
    }
}

impl From<fornax_text::Error> for Error {
    fn from(e: fornax_text::Error) -> Error {
        Error::new(Kind::Malformed, e.to_string())
    }
}
