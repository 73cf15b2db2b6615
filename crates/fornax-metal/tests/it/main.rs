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

/// What runs the kernel sources, with faults of its own: the GPU of this Mac, elsewhere the emulator with that seed.
fn kernels(seed: u64) -> MetalDevice {
    if cfg!(target_os = "macos") {
        MetalDevice::system().expect("on a Mac the kernels run on its GPU").apart()
    } else {
        MetalDevice::emulated(seed)
    }
}
