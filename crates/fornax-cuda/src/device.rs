//! The device as the boundary sees it. It knows no step.

use std::sync::Arc;

use fornax_plan::{ActMode, Device, DeviceInfo, Limits, Plan, Program, Refusal, Result};

use crate::compiler::Compiler;
use crate::driver::Gpu;
use crate::fast::drive::{Drive, Kept};
use crate::feed::Shape;
use crate::kernels;
use crate::prepare::{self, Asked, KV_BLOCK};
use crate::program::CudaProgram;
use crate::support;

/// One NVIDIA GPU.
#[derive(Debug)]
pub struct CudaDevice {
    gpu: Arc<Gpu>,
    compiler: Compiler,
    long_from: Option<u32>,
    /// How to decode, where the environment is not asked.
    drive: Option<Drive>,
    /// Whether ways of decoding are timed at load: not where nothing runs.
    races: bool,
}

impl CudaDevice {
    /// Opens the GPU of this number and finds the kernel compiler.
    ///
    /// # Errors
    /// `is_unsupported` where there is no driver, no such GPU or no compiler; says what is
    /// missing and what would help. Nothing panics.
    pub fn open(ordinal: u32) -> Result<CudaDevice> {
        let (gpu, compiler) = (Gpu::open(ordinal)?, Compiler::load()?);
        Ok(CudaDevice { gpu, compiler, long_from: None, drive: None, races: true })
    }

    /// The same device with products of `rows` rows and more as those of long prompts, with activations of halves:
    /// from where on that is so otherwise is the device's choice.
    #[must_use]
    pub fn with_long_from(self, rows: u32) -> CudaDevice {
        CudaDevice { long_from: Some(rows), ..self }
    }

    /// The same device decoding as `FORNAX_CUDA_DRIVER` would have it with this text, whatever that is.
    ///
    /// # Errors
    /// `is_malformed` for anything but `graph`, `persistent`, `tape` and nothing.
    pub fn with_driver(self, name: &str) -> Result<CudaDevice> {
        Ok(CudaDevice { drive: Some(Drive::parse(Some(name))?), ..self })
    }

    /// Objects of the driver that programs and the device hold: memory, code, graphs, events.
    pub fn objects(&self) -> usize {
        // Each of them holds the GPU.
        Arc::strong_count(&self.gpu) - 1
    }

    /// Why the GPU cannot be used by this process any more; `None` as long as it can.
    pub fn lost(&self) -> Option<String> {
        self.gpu.lost().map(str::to_string)
    }

    /// A device that compiles for an H200 and runs nothing.
    #[cfg(test)]
    pub(crate) fn on_paper() -> Result<CudaDevice> {
        let gpu = crate::driver::host::blank(90, 132, 232_448);
        Ok(CudaDevice {
            gpu,
            compiler: Compiler::load()?,
            long_from: None,
            drive: None,
            races: false,
        })
    }

    /// What programs are made with.
    #[cfg(test)]
    pub(crate) fn parts(&self) -> (&Arc<Gpu>, &Compiler) {
        (&self.gpu, &self.compiler)
    }

    /// A device whose kernels run on the CPU, and the hand on it.
    #[cfg(test)]
    pub(crate) fn on_the_cpu() -> (CudaDevice, crate::driver::host::Control) {
        let (gpu, control) = crate::driver::host::gpu();
        let compiler = Compiler::none();
        (CudaDevice { gpu, compiler, long_from: None, drive: None, races: true }, control)
    }
}

impl CudaDevice {
    /// Where the choice of how to decode such a plan on this GPU is kept.
    fn kept(&self, plan: &Plan, limits: &Limits) -> Kept {
        let shapes: Vec<_> = plan.weights.iter().map(|w| (w.ty, w.rows, w.cols)).collect();
        let ops: Vec<String> = plan.ops.iter().map(|op| format!("{op:?}")).collect();
        let limits = format!("{:?} {} {:?}", limits.kv_type, limits.slots, limits.act);
        let what = (&self.gpu.name, kernels::decoding_sources(), shapes, ops, limits);
        Kept::new(self.compiler.folder(), &what)
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
        let drive = self.drive.map_or_else(Drive::asked, Ok)?;
        let asked = Asked { long_from: self.long_from, drive };
        let prepared = prepare::prepare(&self.gpu, &self.compiler, plan, limits, &shape, asked)?;
        let mut program = CudaProgram::new(Arc::clone(&self.gpu), plan, limits, shape, prepared)?;
        if self.races && drive == Drive::Either {
            program.race(&self.kept(plan, limits))?;
        }
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
