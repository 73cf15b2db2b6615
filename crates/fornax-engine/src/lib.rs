//! From a model file to generated tokens: families, KV blocks, and the loop that drives a
//! device's program. It knows no provider and no HTTP.

#![forbid(unsafe_code)]

pub mod arch;
mod error;

pub use error::{Error, Result};
