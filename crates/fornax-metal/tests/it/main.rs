//! The kernels through the whole program against the reference: the proof plan, the conformance list, faults and growth, and
//! what must go wrong when a barrier is missing.

mod emulated;
mod faults;
mod fits;
mod grow;
mod proof;
#[cfg(not(target_os = "macos"))]
mod report;
mod sampling;

use fornax_metal::MetalDevice;

/// What runs the kernel sources, with faults of its own: the GPU of this Mac, elsewhere the emulator with that seed. A
/// Mac without one that the kernels run on ends the tests with a line that says so.
fn kernels(seed: u64) -> MetalDevice {
    if cfg!(target_os = "macos") {
        MetalDevice::system().unwrap_or_else(|why| not_run(&why)).apart()
    } else {
        MetalDevice::emulated(seed)
    }
}

/// Past the harness, which keeps what tests print to itself.
fn not_run(why: &fornax_plan::Error) -> ! {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "NOT RUN, there is no GPU for them: {why}");
    std::process::exit(0)
}
