//! The integration tests of `fornax-gguf`. They know bytes and fixtures; they must not know models.
#![allow(clippy::unwrap_used, reason = "a test stops where it fails")]

mod blocks;
mod bytes;
mod corpus;
mod errors;
mod exercise;
mod hostile;
mod mapping;
mod metadata;
mod oracle;
mod split;
mod writer;
