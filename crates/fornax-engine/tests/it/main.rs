//! Integration tests of the engine: tiny models of every family against logits from an
//! independent implementation.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod accuracy;
mod batching;
mod chains;
mod cpu;
mod faulty;
mod fixture;
mod golden;
mod hostile;
mod invariance;
mod metal;
mod serve;
mod sessions;
mod snapshot;
