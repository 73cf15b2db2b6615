//! The CPU provider through the boundary alone.

mod conformance;
mod invariance;
mod program;
