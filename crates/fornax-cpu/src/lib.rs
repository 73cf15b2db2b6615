//! The CPU provider: instruction tiers, a resident thread pool, packed matrices and a paged KV
//! cache. It knows plans and block formats, but no model family, no file and no other provider.
//!
//! Order of reading: [`CpuDevice`] prepares a plan; `stages` cuts it at barriers and `compile`
//! resolves every address; `run` is what each thread of the `pool` does in a round; `matrix` and
//! `ops` are the arithmetic.
//!
//! The numbers of a row depend on that row alone: not on the tier, the number of threads, the
//! rows beside it or how its sequence was cut into steps. The one exception is asked for by name
//! ([`CpuOptions::fast_prompt`], `prompt`): there it depends on how many rows of its sequence come
//! in a step.

mod check;
mod compile;
#[cfg(test)]
mod conformance;
mod device;
mod heads;
pub mod isa;
mod kv;
mod long_blocks;
mod matrix;
mod memory;
mod moe;
mod ops;
mod pool;
mod product;
mod program;
mod prompt;
mod run;
mod stages;
mod stream;
mod topology;
mod weights;

pub use device::{CpuDevice, CpuOptions};
pub use isa::Isa;
pub use stream::Stream;
/// What kernels reach by themselves, for examples and reports.
#[doc(hidden)]
pub mod measure {
    pub use crate::matrix::measure::{Case, Rates, multiply};
    pub use crate::ops::measure::{Look, attention};
}
pub use topology::last_level_cache;
