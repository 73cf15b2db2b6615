//! The Metal provider's host side: a plan becomes commands with resolved pipelines and buffer
//! ranges, a step becomes one command buffer, and barriers stand only where two commands conflict.
//!
//! The commands run on the system's GPU, where there is one, or on [`api`]'s stand-in: the kernels of
//! `kernels/**`, unchanged, under an emulator that judges every access and shuffles what no barrier
//! orders. This crate knows the boundary (`fornax-plan`), no model and no other provider.

pub mod api;
mod args;
pub mod cost;
mod device;
mod encode;
mod feed;
mod hazard;
#[cfg(test)]
mod ladder;
mod library;
mod pieces;
mod policy;
mod prepare;
mod profile;
mod program;
mod report;
#[cfg(test)]
mod rules;
mod tune;
mod work;

pub use api::Fault;
pub use device::{Journal, MetalDevice};
pub use encode::Barriers;
pub use policy::Family;
