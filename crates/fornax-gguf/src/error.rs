//! The crate's one error: what was being done, on what, found against expected, what to do. It must not
//! know how a message is shown.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// What went wrong while reading, writing or converting.
///
/// Opaque: ask the predicates for the class and print it for the details.
pub struct Error(Box<Inner>);

struct Inner {
    class: Class,
    message: String,
    path: Option<PathBuf>,
    source: Option<io::Error>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Malformed,
    Unsupported,
    Missing,
    Argument,
    Io,
}

impl Error {
    fn new(class: Class, message: String) -> Error {
        Error(Box::new(Inner { class, message, path: None, source: None }))
    }

    /// The bytes contradict the format, or contradict each other.
    pub(crate) fn malformed(message: impl Into<String>) -> Error {
        Error::new(Class::Malformed, message.into())
    }

    /// The bytes may be sound, but are of a kind that this crate does not read.
    pub(crate) fn unsupported(message: impl Into<String>) -> Error {
        Error::new(Class::Unsupported, message.into())
    }

    /// A metadata key or a shard that has to be there is not.
    pub(crate) fn missing(message: impl Into<String>) -> Error {
        Error::new(Class::Missing, message.into())
    }

    /// The caller passed lengths or values that cannot be.
    pub(crate) fn argument(message: impl Into<String>) -> Error {
        Error::new(Class::Argument, message.into())
    }

    pub(crate) fn io(doing: impl Into<String>, source: io::Error) -> Error {
        let mut error = Error::new(Class::Io, doing.into());
        error.0.source = Some(source);
        error
    }

    /// Names the file, unless a more precise place has named one already.
    pub(crate) fn in_file(mut self, path: &Path) -> Error {
        self.0.path.get_or_insert_with(|| path.to_path_buf());
        self
    }

    /// True if the file contradicts the format or itself: it is damaged, cut or hostile.
    pub fn is_malformed(&self) -> bool {
        self.0.class == Class::Malformed
    }

    /// True if the file or the request is of a kind that this crate does not handle.
    pub fn is_unsupported(&self) -> bool {
        self.0.class == Class::Unsupported
    }

    /// True if a required metadata key or a shard of a split set is absent.
    pub fn is_missing(&self) -> bool {
        self.0.class == Class::Missing
    }

    /// True if the caller's arguments cannot be (a slice of the wrong length, say).
    pub fn is_argument(&self) -> bool {
        self.0.class == Class::Argument
    }

    /// True if the operating system refused; [`std::error::Error::source`] has its reason.
    pub fn is_io(&self) -> bool {
        self.0.class == Class::Io
    }

    /// The file that the error is about, where there is one.
    pub fn path(&self) -> Option<&Path> {
        self.0.path.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(path) = &self.0.path {
            write!(f, "{}: ", path.display())?;
        }
        f.write_str(&self.0.message)?;
        if let Some(source) = &self.0.source {
            write!(f, ": {source}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}({self})", self.0.class)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_ref().map(|e| e as _)
    }
}

/// A name from a file made fit for a message: quoted, escaped and cut to a readable length.
pub(crate) fn quoted(name: &str) -> String {
    const LEN_MAX: usize = 80;
    if name.len() <= LEN_MAX {
        return format!("{name:?}");
    }
    let mut end = LEN_MAX;
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    format!("{:?}… ({} bytes)", &name[..end], name.len())
}
