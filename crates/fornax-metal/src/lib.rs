//! The Metal provider's host side: a plan becomes commands with resolved pipelines and buffer
//! ranges, a step becomes one command buffer, and barriers stand only where two commands conflict.
//!
//! For now the commands run on [`api`]'s recorded stand-in: scalar kernels on the host, in a
//! shuffled order between barriers, each confined to the ranges that it declared. It proves the
//! host path and is no GPU. This crate knows the boundary (`fornax-plan`), no model and no other
//! provider.

pub mod api;
mod args;
mod device;
mod encode;
mod feed;
mod hazard;
mod prepare;
mod program;
mod stub;

pub use device::{Journal, MetalDevice};
pub use encode::Barriers;
