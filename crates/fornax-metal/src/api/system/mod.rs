//! The system's Metal: the GPU, what it can do, and what a user is asked to report of it. Every call that may leave
//! temporary objects behind runs within a pool that lets go of them. It knows no plan.

mod library;
mod memory;
mod run;

pub(crate) use library::Pipeline;
pub(crate) use memory::Buffer;
pub(crate) use run::{Flight, Queue};

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once, OnceLock};

use fornax_plan::{Error, Result};
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2::{available, msg_send};
use objc2_foundation::{NSError, NSProcessInfo, NSString};
use objc2_metal::{
    MTLArchitecture, MTLCopyAllDevices, MTLCreateSystemDefaultDevice, MTLDevice, MTLGPUFamily,
    MTLLibrary,
};

use crate::library::FAMILIES;
use crate::policy::Family;

/// An object of one of Metal's protocols.
type Object<T> = Retained<ProtocolObject<T>>;

// Without it in the process the system names no default device.
#[link(name = "CoreGraphics", kind = "framework")]
unsafe extern "C" {}

/// The GPU of this Mac.
pub(crate) struct Gpu {
    device: Object<dyn MTLDevice>,
    name: String,
    family: Family,
    /// By family of kernels, compiled when the first of them is asked for.
    libraries: Vec<OnceLock<std::result::Result<Object<dyn MTLLibrary>, String>>>,
    warming: Once,
    /// What was built: the layers of a model ask for the same again and again.
    pipelines: Mutex<HashMap<library::Key, Pipeline>>,
    /// Bytes of all buffers that exist.
    held: Arc<AtomicU64>,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu").field("name", &self.name).field("family", &self.family).finish()
    }
}

impl Gpu {
    /// The GPU that is part of the chip.
    ///
    /// # Errors
    /// `is_unsupported`, saying what is missing.
    pub(crate) fn open() -> Result<Arc<Gpu>> {
        autoreleasepool(|_| {
            if !available!(macos = 14.0) {
                return Err(Error::unsupported("metal: macOS 14 or later is needed"));
            }
            let device = found().ok_or_else(|| {
                Error::unsupported(
                    "metal: the system names no GPU; this session may have no access to it (over ssh, in a sandbox, as a \
                     daemon): try from a terminal of the desktop, or --device cpu",
                )
            })?;
            let name = device.name().to_string();
            let Some(family) = family(&device) else {
                return Err(Error::unsupported(format!(
                    "metal: {name} is not of family Apple7 (M1) or later, which the kernels need; use --device cpu"
                )));
            };
            if available!(macos = 13.3) {
                device.setShouldMaximizeConcurrentCompilation(true);
            }
            let libraries = FAMILIES.iter().map(|_| OnceLock::new()).collect();
            let (warming, pipelines, held) = (Once::new(), Mutex::default(), Arc::default());
            Ok(Arc::new(Gpu { device, name, family, libraries, warming, pipelines, held }))
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn family(&self) -> Family {
        self.family
    }

    /// Bytes that are left of the working set.
    pub(crate) fn free(&self) -> u64 {
        self.device.recommendedMaxWorkingSetSize().saturating_sub(self.held.load(Ordering::Relaxed))
    }

    /// What to say of it when something is wrong.
    pub(crate) fn report(self: &Arc<Gpu>) -> Vec<(String, String)> {
        autoreleasepool(|_| {
            let mut lines = Vec::new();
            let mut say = |name: &str, text: String| lines.push((name.to_string(), text));
            let process = NSProcessInfo::processInfo();
            say("system", process.operatingSystemVersionString().to_string());
            say("memory", format!("{} bytes", process.physicalMemory()));
            say("thermal state", format!("{} of 0 to 3", process.thermalState().0));
            say("low power mode", process.isLowPowerModeEnabled().to_string());
            let d = &self.device;
            say("gpu", format!("{} ({})", self.name, architecture(d)));
            let families = FAMILY_NAMES.iter().filter(|(_, raw)| d.supportsFamily(*raw));
            say("families", families.map(|(name, _)| *name).collect::<Vec<_>>().join(" "));
            let (unified, removable) = (d.hasUnifiedMemory(), d.isRemovable());
            say(
                "unified, removable, headless",
                format!("{unified}, {removable}, {}", d.isHeadless()),
            );
            say("working set", format!("{} bytes", d.recommendedMaxWorkingSetSize()));
            say("largest buffer", format!("{} bytes", d.maxBufferLength()));
            say("allocated", format!("{} bytes", d.currentAllocatedSize()));
            say("threadgroup memory", format!("{} bytes", d.maxThreadgroupMemoryLength()));
            say("threads of a threadgroup", d.maxThreadsPerThreadgroup().width.to_string());
            say("language", format!("{}, safe math, precise functions", library::version().1));
            say("tensor operations", "not used".to_string());
            lines.extend(self.pipelines());
            lines
        })
    }
}

const FAMILY_NAMES: [(&str, MTLGPUFamily); 7] = [
    ("Apple6", MTLGPUFamily::Apple6),
    ("Apple7", MTLGPUFamily::Apple7),
    ("Apple8", MTLGPUFamily::Apple8),
    ("Apple9", MTLGPUFamily::Apple9),
    ("Apple10", MTLGPUFamily::Apple10),
    ("Metal3", MTLGPUFamily::Metal3),
    ("Metal4", MTLGPUFamily::Metal4),
];

/// Either way of asking may fail alone: the default device in sessions without a display, the list within a sandbox.
fn found() -> Option<Object<dyn MTLDevice>> {
    let built_in = |d: &Object<dyn MTLDevice>| !d.isRemovable() && d.hasUnifiedMemory();
    let default = MTLCreateSystemDefaultDevice();
    if let Some(device) = default.as_ref().filter(|d| built_in(d)) {
        return Some(device.clone());
    }
    let all = MTLCopyAllDevices();
    all.iter().find(built_in).or(default).or_else(|| all.iter().next())
}

fn family(device: &ProtocolObject<dyn MTLDevice>) -> Option<Family> {
    let all = [
        (MTLGPUFamily::Apple10, Family::Apple10),
        (MTLGPUFamily::Apple9, Family::Apple9),
        (MTLGPUFamily::Apple8, Family::Apple8),
        (MTLGPUFamily::Apple7, Family::Apple7),
    ];
    all.iter().find(|(raw, _)| device.supportsFamily(*raw)).map(|(_, family)| *family)
}

/// The binding says that there always is one; an emulated device has none.
fn architecture(device: &ProtocolObject<dyn MTLDevice>) -> String {
    // SAFETY: the selector exists from macOS 14 on, which `open` asks for, takes nothing and gives an object or nil.
    let architecture: Option<Retained<MTLArchitecture>> =
        unsafe { msg_send![device, architecture] };
    // SAFETY: as above.
    let name: Option<Retained<NSString>> =
        architecture.and_then(|a| unsafe { msg_send![&*a, name] });
    name.map_or_else(|| "no architecture".to_string(), |n| n.to_string())
}

/// Domain, number and text.
fn text(error: &NSError) -> String {
    format!("{} {}: {}", error.domain(), error.code(), error.localizedDescription())
}
