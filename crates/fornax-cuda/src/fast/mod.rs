//! The fast path: matrices as planes, 8-bit activations, products with their norms folded in, and whole decode steps in
//! one launch. What it lacks the plain kernels do. It knows ops and addresses, no step.

pub(crate) mod decode;
pub(crate) mod drive;
pub(crate) mod fold;
pub(crate) mod planes;
pub(crate) mod stage;
pub(crate) mod tape;
mod wire;

pub(crate) use wire::{Addresses, Dense, Wire};
