//! The command line in two steps: what was typed (`low`), then what it means here (`high`).
//! Knows no model, no device and no network.

pub(crate) mod held;
pub(crate) mod high;
pub(crate) mod low;
pub(crate) mod serve;
