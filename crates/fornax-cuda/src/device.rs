//! The device as the boundary sees it. It knows no step.

use std::sync::Arc;

use fornax_plan::{ActMode, Device, DeviceInfo, Limits, Plan, Program, Refusal, Result};

use crate::compiler::Compiler;
use crate::driver::Gpu;
use crate::feed::Shape;
use crate::kernels;
use crate::prepare::{self, KV_BLOCK};
use crate::program::CudaProgram;
use crate::support;

/// One NVIDIA GPU.
#[derive(Debug)]
pub struct CudaDevice {
    gpu: Arc<Gpu>,
    compiler: Compiler,
    long_from: Option<u32>,
}

impl CudaDevice {
    /// Opens the GPU of this number and finds the kernel compiler.
    ///
    /// # Errors
    /// `is_unsupported` where there is no driver, no such GPU or no compiler; says what is
    /// missing and what would help. Nothing panics.
    pub fn open(ordinal: u32) -> Result<CudaDevice> {
        Ok(CudaDevice { gpu: Gpu::open(ordinal)?, compiler: Compiler::load()?, long_from: None })
    }

    /// The same device with products of `rows` rows and more as those of long prompts, with activations of halves:
    /// from where on that is so otherwise is the device's choice.
    #[must_use]
    pub fn with_long_from(self, rows: u32) -> CudaDevice {
        CudaDevice { long_from: Some(rows), ..self }
    }

    /// Why the GPU cannot be used by this process any more; `None` as long as it can.
    pub fn lost(&self) -> Option<String> {
        self.gpu.lost().map(str::to_string)
    }

    /// A device that compiles for an H200 and runs nothing.
    #[cfg(test)]
    pub(crate) fn on_paper() -> Result<CudaDevice> {
        let gpu = crate::driver::host::blank(90, 132, 232_448);
        Ok(CudaDevice { gpu, compiler: Compiler::load()?, long_from: None })
    }

    /// A device whose kernels run on the CPU, and the hand on it.
    #[cfg(test)]
    pub(crate) fn on_the_cpu() -> (CudaDevice, crate::driver::host::Control) {
        let (gpu, control) = crate::driver::host::gpu();
        (CudaDevice { gpu, compiler: Compiler::none(), long_from: None }, control)
    }
}

impl Device for CudaDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            kind: "cuda",
            name: self.gpu.name.clone(),
            tier: format!("sm_{}", self.gpu.arch),
            threads: 1,
            kv_block: KV_BLOCK,
            act: ActMode::Q8,
            weight_types: kernels::WEIGHT_TYPES.to_vec(),
            in_flight: 2,
            // Large GPUs, which have the memory for it, expand every matrix once a step.
            step_rows: if self.gpu.units >= 100 { 2048 } else { 512 },
        }
    }

    fn memory_free(&self) -> Option<u64> {
        self.gpu.free_bytes().ok()
    }

    fn supports(&self, plan: &Plan, limits: &Limits) -> Vec<Refusal> {
        support::refusals(plan, limits)
    }

    fn prepare(&self, plan: &Plan, limits: &Limits) -> Result<Box<dyn Program>> {
        let shape = Shape::new(plan, limits);
        let prepared =
            prepare::prepare(&self.gpu, &self.compiler, plan, limits, &shape, self.long_from)?;
        let program = CudaProgram::new(Arc::clone(&self.gpu), plan, limits, shape, prepared)?;
        Ok(Box::new(program))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_gpu_or_compiler_gets_an_error_and_no_panic() {
        // With a driver the number is out of range; without one, the driver is missing.
        let e = CudaDevice::open(1_000).unwrap_err();
        assert!(e.is_unsupported() && e.to_string().contains("--device cpu"), "{e}");
    }
}
