//! Placeholder.

pub mod isa;
#[allow(dead_code, reason = "its callers are being written")]
mod matrix;
