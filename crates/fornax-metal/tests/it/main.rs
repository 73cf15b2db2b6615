//! The recorded commands against the reference: the proof plan, the conformance list, and what
//! must go wrong when a barrier is missing.

mod barriers;
mod emulated;
mod faults;
mod fits;
mod proof;
