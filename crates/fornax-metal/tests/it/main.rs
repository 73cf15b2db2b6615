//! The recorded commands against the reference: the proof plan, the conformance list, and what
//! must go wrong when a barrier is missing.

mod barriers;
mod emulated;
mod faults;
mod fits;
mod proof;
mod report;
mod sampling;

use fornax_metal::MetalDevice;

/// What runs the kernel sources: the GPU of this Mac, elsewhere the emulator with that seed.
fn kernels(seed: u64) -> MetalDevice {
    if cfg!(target_os = "macos") {
        MetalDevice::system().expect("on a Mac the kernels run on its GPU")
    } else {
        MetalDevice::emulated(seed)
    }
}
