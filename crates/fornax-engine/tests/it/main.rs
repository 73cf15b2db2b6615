//! Integration tests of the engine: tiny models of every family against logits from an
//! independent implementation.

mod fixture;
mod golden;
mod hostile;
mod sessions;
mod snapshot;
