//! Answers held to grammars, on the vocabularies of several families: what comes out is always valid, what is valid
//! can come out, and what cannot be enforced is refused in bounded time.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod formats;
mod hostile;
mod random;
mod schemas;
mod session;
mod walk;
