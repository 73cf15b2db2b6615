//! The Metal Shading Language on the CPU: compiles unchanged kernel source as C++ against a stand-in for Metal's standard
//! library, runs it with real threadgroups, simdgroups and barriers, and reports what a GPU would not: accesses out of bounds,
//! reads of what was never written, barriers that not all threads reach, misaligned accesses, data races, and arguments
//! that do not fit the kernel's signature. It must not know what any kernel computes, nor the engine that dispatches it.
//!
//! Each access is judged before it happens: the C++ compiler's sanitizer instrumentation is on, and this crate's run-time
//! library answers it in place of the sanitizers' own. It needs g++ or clang++ on the PATH.
//!
//! ```
//! use fornax_msl::{Buffer, Command, Dispatch, Library, Options, Queue};
//!
//! let source = "
//!     #include <metal_stdlib>
//!     using namespace metal;
//!     kernel void twice(device float *x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
//!         x[i] *= 2.0f;
//!     }";
//! let twice = Library::compile(&[("twice.metal", source)])?.pipeline("twice", &[])?;
//! let x = Buffer::new("x", 128)?;
//! x.write(0, &[0; 124])?;
//! let dispatch = Dispatch::new(&twice, [1, 1, 1], [32, 1, 1]).buffer(0, &x);
//! let error = Queue::new(Options::default()).run(&[Command::Dispatch(dispatch)]).unwrap_err();
//! // kernel twice (twice.metal:5), buffer 'x', argument 0, threadgroup [0, 0, 0], thread 31, dispatch 0: read of 4 bytes ...
//! assert_eq!(error.as_fault().unwrap().offset, 124);
//! # Ok::<(), fornax_msl::Error>(())
//! ```
//!
//! What it does not have: textures, quad groups, tensor operations, asynchronous copies, kernels in namespaces. A struct field
//! with a swizzle's name (`xy`, `lo`) takes that swizzle from the whole source. What it cannot show: effects of memory order
//! between threads that run at once, and what a read of a thread variable without a value gives on a device; [`lint`] sees
//! the plain cases of the latter, and all mixing of address spaces.

mod compiler;
mod dispatch;
mod error;
mod ffi;
mod glue;
mod inline;
mod lex;
mod library;
mod lines;
mod lint;
mod memory;
mod prepare;
mod queue;
mod report;
mod rewrite;
mod signature;

/// Says whether kernels can be compiled here.
///
/// # Errors
/// `is_host` when there is no C++ compiler, or no folder for what it makes.
pub fn ready() -> Result<(), Error> {
    compiler::Compiler::get().map(|_| ())
}

pub use dispatch::{Bound, Dispatch, INLINE_BYTES, THREADGROUP_MEMORY};
pub use error::{Error, Fault, FaultKind};
pub use library::{
    Argument, BarrierId, CompileOptions, FunctionConstant, KernelInfo, Library, Pipeline, Space,
    Value,
};
pub use lint::lint;
pub use memory::{Buffer, Owner};
pub use prepare::BarrierSite;
pub use queue::{Command, Options, Order, Queue};
pub use report::{DispatchReport, Report, Traffic};
