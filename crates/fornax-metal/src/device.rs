//! The devices as the boundary sees them. It knows no step.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use fornax_plan::{ActMode, Device, DeviceInfo, Error, Limits, Plan, Program, Refusal, Result};

use crate::api::{self, Backend, Fault, Gpu, Health, Setup};
use crate::encode::Barriers;
use crate::feed::Shape;
use crate::policy::{Family, Policy};
use crate::prepare::{self, KV_BLOCK};
use crate::profile::Profile;
use crate::program::MetalProgram;
use crate::{library, tune};

/// Threads of a threadgroup at most, as Apple's GPUs have it.
const THREADS_MAX: u32 = 1024;

/// The Metal provider over the system's GPU or its stand-in.
#[derive(Clone, Debug)]
pub struct MetalDevice {
    backend: Backend,
    setup: Setup,
    barriers: Barriers,
    journal: Arc<Journal>,
    health: Arc<Health>,
    policy: Policy,
}

/// What a device's programs did so far.
#[derive(Debug, Default)]
pub struct Journal {
    pub(crate) submissions: AtomicU64,
    pub(crate) commands: AtomicU64,
    pub(crate) barriers: AtomicU64,
    pub(crate) waits: AtomicU64,
}

impl Journal {
    /// Command buffers committed.
    pub fn submissions(&self) -> u64 {
        self.submissions.load(Relaxed)
    }

    /// Commands recorded.
    pub fn commands(&self) -> u64 {
        self.commands.load(Relaxed)
    }

    /// Barriers that the hazard tracker asked for.
    pub fn barriers(&self) -> u64 {
        self.barriers.load(Relaxed)
    }

    /// Waits for a command buffer.
    pub fn waits(&self) -> u64 {
        self.waits.load(Relaxed)
    }
}

impl MetalDevice {
    /// The GPU of this Mac. Opened once in a process; a failure is remembered.
    ///
    /// # Errors
    /// `is_unsupported`, saying why, where there is no GPU that the kernels run on; `is_lost` once
    /// it has failed for good.
    pub fn system() -> Result<MetalDevice> {
        static OPENED: OnceLock<std::result::Result<MetalDevice, String>> = OnceLock::new();
        let opened = OPENED.get_or_init(|| match Gpu::open() {
            Ok(gpu) => Ok(MetalDevice::over(Backend::System(gpu), 0)),
            Err(e) => Err(e.to_string()),
        });
        let device = opened.clone().map_err(Error::unsupported)?;
        device.health.check()?;
        Ok(MetalDevice { journal: Arc::default(), ..device })
    }

    /// A device that runs the kernel sources themselves under the emulator, which judges every
    /// access; commands between barriers run interleaved in the order that `seed` shuffles. The
    /// kernels are compiled when a plan is prepared, which needs a C++ compiler.
    pub fn emulated(seed: u64) -> MetalDevice {
        MetalDevice::over(Backend::Emulated, seed)
    }

    fn over(backend: Backend, seed: u64) -> MetalDevice {
        let setup = Setup { seed, threads_max: THREADS_MAX, budget_s: None };
        let (journal, health) = Default::default();
        let family = match &backend {
            Backend::System(gpu) => gpu.family(),
            // What the least of them has.
            _ => Family::Apple7,
        };
        let policy = Policy { family, profile: Profile::default() };
        MetalDevice { backend, setup, barriers: Barriers::Tracked, journal, health, policy }
    }

    /// Says whether the emulator can compile kernels here, before any model is loaded.
    ///
    /// # Errors
    /// `is_unsupported`, saying what is missing.
    pub fn ready(&self) -> Result<()> {
        match self.backend {
            Backend::Emulated => fornax_msl::ready().map_err(|e| Error::unsupported(e.to_string())),
            _ => self.health.check(),
        }
    }

    /// The same with fewer barriers: for tests that must see a fault.
    pub fn sabotaged(self, barriers: Barriers) -> MetalDevice {
        MetalDevice { barriers, journal: Arc::default(), ..self }
    }

    /// The same with faults and losses of its own, of which others over the same GPU hear nothing: for tests.
    pub fn apart(self) -> MetalDevice {
        MetalDevice { health: Arc::default(), ..self }
    }

    /// The same with command buffers of at most so many seconds by prediction: for tests.
    pub fn hurried(self, budget_s: f64) -> MetalDevice {
        MetalDevice { setup: Setup { budget_s: Some(budget_s), ..self.setup }, ..self }
    }

    /// The same as a stand-in for a device whose pipelines take at most so many threads: for tests.
    pub fn narrowed(self, threads_max: u32) -> MetalDevice {
        MetalDevice { setup: Setup { threads_max, ..self.setup }, ..self }
    }

    /// The same with the choices for another family: for tests.
    pub fn as_family(self, family: Family) -> MetalDevice {
        MetalDevice { policy: Policy { family, ..self.policy }, ..self }
    }

    /// The same with the variants that a profile of [`MetalDevice::tune`] names.
    ///
    /// # Errors
    /// `is_malformed` naming the line; `is_unsupported` for the profile of another GPU.
    pub fn with_profile(self, text: &str) -> Result<MetalDevice> {
        let profile = Profile::parse(text, &self.info().name)?;
        Ok(MetalDevice { policy: Policy { profile, ..self.policy }, ..self })
    }

    /// Times the variants of the kernels on a plan's shapes, cold, and returns the profile
    /// of the fastest, a text. `say` hears of each shape when it is done.
    ///
    /// # Errors
    /// `is_unsupported` on a stand-in, whose times say nothing of a GPU; as
    /// [`Program::wait`](fornax_plan::Program::wait).
    pub fn tune(&self, plan: &Plan, say: impl FnMut(&str)) -> Result<String> {
        let device = self.open()?;
        tune::tune(&device, &self.info().name, plan, say).map(|profile| profile.to_string())
    }

    /// What [`MetalDevice::tune`] would time, line by line, on any host.
    pub fn tunable(plan: &Plan) -> Vec<String> {
        tune::listing(plan)
    }

    /// Every family of kernels by its name and its source, as the driver gets it.
    pub fn sources() -> impl Iterator<Item = (&'static str, String)> {
        library::FAMILIES.iter().map(|family| (family.name, family.source()))
    }

    /// Builds a pipeline of every kernel, whether a plan needs it or not. Returns their number.
    ///
    /// # Errors
    /// `is_unsupported` naming the first that cannot be built, with the compiler's text.
    pub fn build_all(&self) -> Result<usize> {
        let device = self.open()?;
        let build = |(name, constants): (String, Vec<u32>)| device.pipeline(&name, &constants);
        library::every_entry().map(build).try_fold(0, |n, built| built.map(|_| n + 1))
    }

    pub(crate) fn open(&self) -> Result<api::Device> {
        self.health.check()?;
        let health = Arc::clone(&self.health);
        Ok(api::Device::new(self.setup, self.backend.clone(), health))
    }

    /// Lets `after` allocations, pipelines or command buffers pass and fails the next, once: for
    /// tests.
    pub fn fail(&self, fault: Fault, after: u64) {
        self.health.arm(fault, after);
    }

    /// Buffers, pipelines, queues and command buffers that its programs hold now.
    pub fn live_objects(&self) -> u64 {
        self.health.live()
    }

    /// What the programs of this device did so far.
    pub fn journal(&self) -> &Journal {
        &self.journal
    }

    /// What to say of the GPU when something is wrong with it: name and text, line by line; empty
    /// for a stand-in.
    pub fn report(&self) -> Vec<(String, String)> {
        match &self.backend {
            Backend::System(gpu) => gpu.report(),
            _ => Vec::new(),
        }
    }
}

impl Device for MetalDevice {
    fn info(&self) -> DeviceInfo {
        let (name, tier) = match &self.backend {
            Backend::Emulated => ("Metal kernels on the host", "emulated".to_string()),
            Backend::System(gpu) => (gpu.name(), format!("{:?}", gpu.family()).to_lowercase()),
        };
        DeviceInfo {
            kind: "metal",
            name: name.into(),
            tier,
            threads: 1,
            kv_block: KV_BLOCK,
            act: ActMode::F32,
            weight_types: library::WEIGHT_TYPES.to_vec(),
            in_flight: 2,
            step_rows: 512,
        }
    }

    fn memory_free(&self) -> Option<u64> {
        match &self.backend {
            Backend::Emulated => None,
            Backend::System(gpu) => Some(gpu.free()),
        }
    }

    fn memory_unasked(&self) -> Option<u64> {
        // The rest of the machine lives on the same memory.
        self.memory_free().map(|bytes| bytes / 2)
    }

    fn supports(&self, plan: &Plan, limits: &Limits) -> Vec<Refusal> {
        prepare::refusals(plan, limits)
    }

    fn prepare(&self, plan: &Plan, limits: &Limits) -> Result<Box<dyn Program>> {
        let device = self.open()?;
        let shape = Shape::new(plan, limits)?;
        let prepared = prepare::prepare(&device, &self.policy, plan, limits, &shape)?;
        let journal = Arc::clone(&self.journal);
        let program =
            MetalProgram::new(device, plan, limits, shape, prepared, self.barriers, journal)?;
        Ok(Box::new(program))
    }
}
