//! The CUDA provider: kernels compiled at run time, a step as plain launches, a chain of further
//! tokens as one captured graph that the device replays without the host. It knows the boundary
//! (`fornax-plan`), no model and no other provider.
//!
//! A machine without an NVIDIA driver gets an error from [`CudaDevice::open`] and nothing else.

// The examples that tests share name the crate.
#[cfg(test)]
extern crate self as fornax_cuda;

mod args;
mod compiler;
mod device;
mod driver;
mod fast;
mod feed;
mod kernels;
#[cfg(test)]
mod ladder;
mod prepare;
mod program;
mod rows;
mod slots;
mod support;

pub use compiler::Compiler;
pub use device::CudaDevice;
pub use kernels::{Family, Variant, families, variants};
