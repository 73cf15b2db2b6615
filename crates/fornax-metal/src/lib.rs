//! The Metal provider's host side: a plan becomes commands with resolved pipelines and buffer
//! ranges, a step becomes one command buffer, and barriers stand only where two commands conflict.
//!
//! The commands run on the system's GPU, where there is one, or on one of [`api`]'s two stand-ins: the kernels of
//! `kernels/**`, unchanged, under an emulator that judges every access; or scalar kernels on the
//! host, each confined to the ranges that it declared, which prove the host path alone. Both
//! shuffle what no barrier orders. This crate knows the boundary (`fornax-plan`), no model and no
//! other provider.

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
mod policy;
mod prepare;
mod profile;
mod program;
mod report;
#[cfg(test)]
mod rules;
mod stub;
mod tune;

pub use api::Fault;
pub use device::{Journal, MetalDevice};
pub use encode::Barriers;
pub use policy::Family;
