//! Which provider computes: the only place that knows them all.
//! Everything above sees `fornax_plan::Device`.

use anyhow::{Result, bail};
use fornax_plan::reference::ReferenceDevice;
use fornax_plan::{Device, DeviceInfo, KvType, Limits, Plan};

use crate::flags::high::Config;
use crate::flags::low::{DeviceName, KvName};

/// The device that the flags ask for.
///
/// # Errors
/// When it is not in this build or not in this machine.
pub(crate) fn open(config: &Config) -> Result<Box<dyn Device>> {
    match config.device {
        DeviceName::Auto | DeviceName::Reference => Ok(Box::new(ReferenceDevice::default())),
        other => bail!("--device {other:?} is not in this build; --device reference is"),
    }
}

/// A device of this machine.
pub(crate) struct Found {
    pub(crate) info: DeviceInfo,
    /// What `--cpu-isa` takes here, slowest first; empty for other devices.
    pub(crate) tiers: Vec<&'static str>,
}

/// Every device of this machine, the best first.
///
/// # Errors
/// When the flags ask for a tier that is not there.
pub(crate) fn all(_config: &Config) -> Result<Vec<Found>> {
    Ok(vec![Found { info: ReferenceDevice::default().info(), tiers: Vec::new() }])
}

/// The oracle with blocks of the same size, for comparisons.
pub(crate) fn reference(like: &dyn Device) -> ReferenceDevice {
    ReferenceDevice { kv_block: like.info().kv_block }
}

/// `--kv-type` as the boundary calls it; where it was not given, f16, and for the oracle its own f32.
pub(crate) fn kv_type(config: &Config, device: &dyn Device) -> KvType {
    match config.kv {
        Some(KvName::F16) => KvType::F16,
        Some(KvName::Q8_0) => KvType::Q8_0,
        None if device.info().kind == "reference" => KvType::F32,
        None => KvType::F16,
    }
}

/// Fails with every reason at once where a device cannot run a plan.
///
/// # Errors
/// Names the op or limit, why, and what would help.
pub(crate) fn accept(device: &dyn Device, plan: &Plan, limits: &Limits) -> Result<()> {
    let refusals = device.supports(plan, limits);
    if refusals.is_empty() {
        return Ok(());
    }
    let lines = refusals.iter().map(|r| format!("{}: {}; {}", r.what, r.why, r.help));
    bail!("{} cannot run this model: {}", device.info().kind, lines.collect::<Vec<_>>().join("; "))
}
