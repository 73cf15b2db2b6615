//! The crate's one error: what was being done, on what, found against expected, what to do. It must not
//! know how a message is shown.

use std::fmt;

/// Why a tokenizer or a chat template cannot be built or used.
///
/// Opaque: ask the predicates for the class and print it for the details.
pub struct Error(Box<Inner>);

struct Inner {
    class: Class,
    message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Malformed,
    Unsupported,
    Missing,
    Template,
    Raised,
}

impl Error {
    fn new(class: Class, message: String) -> Error {
        Error(Box::new(Inner { class, message }))
    }

    pub(crate) fn malformed(message: impl Into<String>) -> Error {
        Error::new(Class::Malformed, message.into())
    }

    pub(crate) fn unsupported(message: impl Into<String>) -> Error {
        Error::new(Class::Unsupported, message.into())
    }

    pub(crate) fn missing(message: impl Into<String>) -> Error {
        Error::new(Class::Missing, message.into())
    }

    pub(crate) fn template(message: impl Into<String>) -> Error {
        Error::new(Class::Template, message.into())
    }

    pub(crate) fn raised(message: impl Into<String>) -> Error {
        Error::new(Class::Raised, message.into())
    }

    /// True if the vocabulary contradicts itself: wrong lengths, ids out of range, broken merges.
    pub fn is_malformed(&self) -> bool {
        self.0.class == Class::Malformed
    }

    /// True if the tokenizer or its splitting rule is of a kind that this crate does not have.
    pub fn is_unsupported(&self) -> bool {
        self.0.class == Class::Unsupported
    }

    /// True if the model lacks what was asked for: a metadata key, or a chat template.
    pub fn is_missing(&self) -> bool {
        self.0.class == Class::Missing
    }

    /// True if the chat template does not parse, or failed while rendering.
    pub fn is_template(&self) -> bool {
        self.0.class == Class::Template
    }

    /// True if the chat template itself refused the messages (`raise_exception`). The message is the
    /// template's own, word for word.
    pub fn is_raised(&self) -> bool {
        self.0.class == Class::Raised
    }
}

impl From<fornax_gguf::Error> for Error {
    fn from(error: fornax_gguf::Error) -> Error {
        let message = error.to_string();
        if error.is_missing() {
            Error::missing(message)
        } else if error.is_unsupported() {
            Error::unsupported(message)
        } else {
            Error::malformed(message)
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.0.class, self.0.message)
    }
}

impl std::error::Error for Error {}
