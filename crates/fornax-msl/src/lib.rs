//! The Metal Shading Language on the CPU: compiles unchanged kernel source as C++ against a stand-in for Metal's standard
//! library, runs it with real threadgroups, simdgroups and barriers, and reports what a GPU would not: accesses out of bounds,
//! reads of what was never written, barriers that not all threads reach, misaligned accesses, data races, and arguments
//! that do not fit the kernel's signature. It must not know what any kernel computes, nor the engine that dispatches it.
//!
//! Each access is judged before it happens: the C++ compiler's sanitizer instrumentation is on, and this crate's run-time
//! library answers it in place of the sanitizers' own. It needs g++ or clang++ on the PATH.

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

pub use dispatch::{Bound, Dispatch, INLINE_BYTES, THREADGROUP_MEMORY};
pub use error::{Error, Fault, FaultKind};
pub use library::{
    Argument, CompileOptions, FunctionConstant, KernelInfo, Library, Pipeline, Space, Value,
};
pub use lint::lint;
pub use memory::{Buffer, Owner};
pub use prepare::BarrierSite;
pub use queue::{Command, Options, Order, Queue};
pub use report::{DispatchReport, Report, Traffic};
