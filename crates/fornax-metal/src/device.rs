//! The devices as the boundary sees them. It knows no step.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use fornax_plan::{ActMode, Device, DeviceInfo, Limits, Plan, Program, Refusal, Result};

use crate::api::{self, Form, Order};
use crate::encode::Barriers;
use crate::feed::Shape;
use crate::prepare::{self, KV_BLOCK};
use crate::program::MetalProgram;
use crate::{library, stub};

/// The Metal provider over one of its stand-ins for a GPU.
#[derive(Clone, Debug)]
pub struct MetalDevice {
    form: Form,
    order: Order,
    barriers: Barriers,
    journal: Arc<Journal>,
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
    /// A device that runs its recorded commands in the order that `seed` shuffles, checks that
    /// no two commands between barriers conflict, and writes the barriers that its tracker asks
    /// for.
    pub fn recorded(seed: u64) -> MetalDevice {
        let order = Order { seed, check_conflicts: true };
        let barriers = Barriers::Tracked;
        MetalDevice { form: Form::Recorded, order, barriers, journal: Arc::default() }
    }

    /// A device that runs the kernel sources themselves under the emulator, which judges every
    /// access; commands between barriers run interleaved in the order that `seed` shuffles. The
    /// kernels are compiled when a plan is prepared, which needs a C++ compiler.
    pub fn emulated(seed: u64) -> MetalDevice {
        MetalDevice { form: Form::Emulated, ..MetalDevice::recorded(seed) }
    }

    /// The same with fewer barriers, or without the check: for tests that must see a fault.
    pub fn sabotaged(self, barriers: Barriers, check_conflicts: bool) -> MetalDevice {
        let order = Order { check_conflicts, ..self.order };
        MetalDevice { order, barriers, journal: Arc::default(), ..self }
    }

    /// What the programs of this device did so far.
    pub fn journal(&self) -> &Journal {
        &self.journal
    }
}

impl Device for MetalDevice {
    fn info(&self) -> DeviceInfo {
        let (name, tier, weight_types) = match self.form {
            Form::Recorded => {
                ("recorded commands on the host", "recorded-stub", stub::WEIGHT_TYPES)
            }
            Form::Emulated => ("Metal kernels on the host", "emulated", library::WEIGHT_TYPES),
        };
        DeviceInfo {
            kind: "metal",
            name: name.into(),
            tier: tier.into(),
            threads: 1,
            kv_block: KV_BLOCK,
            act: ActMode::F32,
            weight_types: weight_types.to_vec(),
            in_flight: 2,
        }
    }

    fn supports(&self, plan: &Plan, limits: &Limits) -> Vec<Refusal> {
        prepare::refusals(plan, limits, self.form)
    }

    fn prepare(&self, plan: &Plan, limits: &Limits) -> Result<Box<dyn Program>> {
        let device = api::Device::new(self.order, self.form);
        let shape = Shape::new(plan, limits);
        let prepared = prepare::prepare(&device, plan, limits, &shape)?;
        let journal = Arc::clone(&self.journal);
        let program =
            MetalProgram::new(device, plan, limits, shape, prepared, self.barriers, journal)?;
        Ok(Box::new(program))
    }
}
