//! Kernel sources to pipelines, by the driver's compiler: language version and math mode said each time, because no
//! default is the same everywhere. It runs nothing.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use fornax_plan::{Error, Result};
use objc2::available;
use objc2::rc::autoreleasepool;
use objc2_foundation::NSString;
use objc2_metal::{
    MTLCompileOptions, MTLComputePipelineDescriptor, MTLComputePipelineState, MTLDataType,
    MTLDevice, MTLFunctionConstantValues, MTLLanguageVersion, MTLLibrary,
    MTLMathFloatingPointFunctions, MTLMathMode, MTLPipelineOption,
};

use super::{Gpu, Object, text};
use crate::library::{self, FAMILIES, family_of};

/// Lanes of a simdgroup, on every GPU of Apple's.
const SIMD_WIDTH: usize = 32;

/// Name, function constants, and threads that it must take.
pub(super) type Key = (String, Vec<u32>, Option<u32>);

/// A kernel with its constants, compiled for the device.
#[derive(Clone)]
pub(crate) struct Pipeline(pub(super) Object<dyn MTLComputePipelineState>);

impl std::fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Pipeline").field(&self.threads_max()).finish()
    }
}

impl Pipeline {
    /// Threads that a threadgroup may have: less the more registers the kernel takes. With more, nothing runs and
    /// nothing is said.
    pub(in crate::api) fn threads_max(&self) -> u32 {
        self.0.maxTotalThreadsPerThreadgroup().min(1024) as u32
    }

    fn threadgroup_bytes(&self) -> usize {
        self.0.staticThreadgroupMemoryLength()
    }
}

/// The language of every compilation: the newest that the oldest system with it compiles alike.
pub(super) fn version() -> (MTLLanguageVersion, &'static str) {
    if available!(macos = 15.0) {
        (MTLLanguageVersion::Version3_2, "Metal 3.2")
    } else {
        (MTLLanguageVersion::Version3_1, "Metal 3.1")
    }
}

impl Gpu {
    /// The kernel `name` with its function constants; where `threads` are given, with no more registers than leave
    /// room for so many in a threadgroup. Each is built once in a process.
    ///
    /// # Errors
    /// `is_unsupported` with the compiler's text.
    pub(in crate::api) fn pipeline(
        self: &Arc<Gpu>,
        name: &str,
        constants: &[u32],
        threads: Option<u32>,
    ) -> Result<Pipeline> {
        let key = (name.to_string(), constants.to_vec(), threads);
        let mut built = self.pipelines.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pipeline) = built.get(&key) {
            return Ok(pipeline.clone());
        }
        self.warm();
        let pipeline = autoreleasepool(|_| self.build(name, constants, threads));
        let pipeline = pipeline.map_err(|what| {
            Error::unsupported(format!(
                "metal: building the pipeline {name} with constants {constants:?}: {what}"
            ))
        })?;
        built.insert(key, pipeline.clone());
        Ok(pipeline)
    }

    /// Compiles all families side by side, in the compiler's own processes.
    fn warm(self: &Arc<Gpu>) {
        self.warming.call_once(|| {
            for (at, family) in FAMILIES.iter().enumerate() {
                let gpu = Arc::clone(self);
                let name = format!("metal {}", family.name);
                // Where no thread is to be had, the one that asks compiles.
                let _ = std::thread::Builder::new().name(name).spawn(move || {
                    let _ = gpu.library(at);
                });
            }
        });
    }

    fn library(&self, family: usize) -> std::result::Result<&Object<dyn MTLLibrary>, String> {
        let compiled = self.libraries[family].get_or_init(|| {
            autoreleasepool(|_| {
                let source = NSString::from_str(&FAMILIES[family].source());
                let options = options();
                self.device
                    .newLibraryWithSource_options_error(&source, Some(&options))
                    .map_err(|e| text(&e))
            })
        });
        compiled
            .as_ref()
            .map_err(|e| format!("compiling the {} kernels: {e}", FAMILIES[family].name))
    }

    fn build(
        &self,
        name: &str,
        constants: &[u32],
        threads: Option<u32>,
    ) -> std::result::Result<Pipeline, String> {
        let family = family_of(name).ok_or("the kernel library has no function of that name")?;
        let library = self.library(family)?;
        let values = MTLFunctionConstantValues::new();
        for (at, value) in constants.iter().enumerate() {
            let value: NonNull<c_void> = NonNull::from(value).cast();
            // SAFETY: the value is read here, four bytes as its type says; the kernels have few constants.
            unsafe { values.setConstantValue_type_atIndex(value, MTLDataType::UInt, at) };
        }
        let label = NSString::from_str(name);
        let function = library
            .newFunctionWithName_constantValues_error(&label, &values)
            .map_err(|e| text(&e))?;
        let descriptor = MTLComputePipelineDescriptor::new();
        descriptor.setLabel(Some(&label));
        descriptor.setComputeFunction(Some(&function));
        if let Some(threads) = threads {
            descriptor.setMaxTotalThreadsPerThreadgroup(threads as usize);
        }
        // SAFETY: every grid has whole simdgroups; the encoder checks it.
        unsafe { descriptor.setThreadGroupSizeIsMultipleOfThreadExecutionWidth(true) };
        let state = self
            .device
            .newComputePipelineStateWithDescriptor_options_reflection_error(
                &descriptor,
                MTLPipelineOption::None,
                None,
            )
            .map_err(|e| text(&e))?;
        let pipeline = Pipeline(state);
        self.fits(&pipeline)?;
        Ok(pipeline)
    }

    /// What every kernel takes for granted.
    fn fits(&self, pipeline: &Pipeline) -> std::result::Result<(), String> {
        let width = pipeline.0.threadExecutionWidth();
        if width != SIMD_WIDTH {
            return Err(format!("simdgroups of {width} lanes, the kernels are written for 32"));
        }
        let (bytes, max) = (pipeline.threadgroup_bytes(), self.device.maxThreadgroupMemoryLength());
        if bytes > max {
            return Err(format!("{bytes} bytes of threadgroup memory, the device has {max}"));
        }
        Ok(())
    }

    /// Every kernel built once: its limits, or why it cannot be built.
    pub(super) fn pipelines(self: &Arc<Gpu>) -> Vec<(String, String)> {
        let started = Instant::now();
        self.warm();
        let mut lines: Vec<(String, String)> = library::every_entry()
            .map(|(name, constants)| {
                let text = match self.build(&name, &constants, None) {
                    Ok(p) => format!(
                        "at most {} threads, {} bytes of threadgroup memory",
                        p.threads_max(),
                        p.threadgroup_bytes()
                    ),
                    Err(e) => format!("FAILED: {e}"),
                };
                (format!("pipeline {name}"), text)
            })
            .collect();
        let ms = started.elapsed().as_millis();
        lines.push(("all pipelines".to_string(), format!("built in {ms} ms")));
        lines
    }
}

/// Language and math of every compilation.
fn options() -> objc2::rc::Retained<MTLCompileOptions> {
    let options = MTLCompileOptions::new();
    options.setLanguageVersion(version().0);
    if available!(macos = 15.0) {
        options.setMathMode(MTLMathMode::Safe);
        options.setMathFloatingPointFunctions(MTLMathFloatingPointFunctions::Precise);
    } else {
        // The setters above are not there yet, and this one means both.
        #[allow(deprecated, reason = "the only one before macOS 15")]
        options.setFastMathEnabled(false);
    }
    options
}
