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

/// What runs the kernel sources, with faults of its own: the GPU of this Mac; elsewhere, and with a line on a Mac that has
/// none for them, the emulator with that seed.
#[allow(clippy::print_stdout, reason = "a line of what is not tested")]
fn kernels(seed: u64) -> MetalDevice {
    if cfg!(target_os = "macos") {
        let emulated = |why| {
            println!("not run on a GPU, there is none: {why}");
            MetalDevice::emulated(seed)
        };
        MetalDevice::system().unwrap_or_else(emulated).apart()
    } else {
        MetalDevice::emulated(seed)
    }
}
