//! Steps of many rows, launch by launch on the tensor cores: batches, prompts and both at once. What it has no kernel
//! for stays with the plain launches, op by op. It knows ops and addresses; which rows a step has it is told.
//!
//! Up to [`Rows::long_from`] rows products take 8-bit activations, as whole decode steps do, so that a row gets the same
//! numbers in every batch. From there on, on GPUs that have warpgroup products, each matrix is expanded to halves once a
//! step, and activations are halves too.

mod item;
mod kernels;
mod launch;
mod scratch;

pub(crate) use item::{Item, Source, items};
pub(crate) use kernels::variants;
pub(crate) use launch::{Kinds, Rows, Step, tables};
pub(crate) use scratch::parts;
