//! The CPU provider through the boundary alone.

mod conformance;
