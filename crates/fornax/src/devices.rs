//! Which provider computes: the only place that knows them all.
//! Everything above sees `fornax_plan::Device`.

use anyhow::{Result, bail};
use fornax_cpu::{CpuDevice, CpuOptions, Isa};
use fornax_plan::reference::ReferenceDevice;
use fornax_plan::{Device, DeviceInfo, KvType};

use crate::flags::high::Config;
use crate::flags::low::{DeviceName, KvName};

/// A device that is ready to prepare a plan.
pub(crate) enum Opened {
    Cpu(CpuDevice),
    Reference(ReferenceDevice),
    Gpu(Box<dyn Device>),
}

/// A device of this machine.
pub(crate) struct Found {
    pub(crate) info: DeviceInfo,
    /// What `--cpu-isa` takes here, slowest first; empty for other devices.
    pub(crate) tiers: Vec<&'static str>,
}

/// How fast the weights of one token could be read at most.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadRate {
    pub(crate) bytes_per_s: f64,
    /// The buffer fits the last-level cache, so the rate is that cache's.
    pub(crate) cache_resident: bool,
}

/// Reading more than this tells nothing new and costs the start time.
const READ_BYTES_MAX: u64 = 512 << 20;

impl Opened {
    /// The device that the flags ask for.
    ///
    /// # Errors
    /// When it is not in this build or not in this machine.
    pub(crate) fn new(config: &Config) -> Result<Opened> {
        match config.device {
            DeviceName::Auto | DeviceName::Cpu => Ok(Opened::Cpu(cpu(config)?)),
            DeviceName::Reference => Ok(Opened::Reference(ReferenceDevice::default())),
            DeviceName::Metal => bail!("--device metal is not in this build; use cpu"),
            DeviceName::Cuda => Ok(Opened::Gpu(cuda()?)),
        }
    }

    pub(crate) fn device(&self) -> &dyn Device {
        match self {
            Opened::Cpu(device) => device,
            Opened::Reference(device) => device,
            Opened::Gpu(device) => &**device,
        }
    }

    /// The oracle with blocks of the same size, for comparisons.
    pub(crate) fn reference(&self) -> ReferenceDevice {
        ReferenceDevice { kv_block: self.device().info().kv_block, ..ReferenceDevice::default() }
    }

    /// `--kv-type` as the boundary calls it; where it was not given, f16, and for the oracle its own f32.
    pub(crate) fn kv_type(&self, config: &Config) -> KvType {
        match (config.kv, self) {
            (Some(KvName::F16), _) | (None, Opened::Cpu(_) | Opened::Gpu(_)) => KvType::F16,
            (Some(KvName::Q8_0), _) => KvType::Q8_0,
            (None, Opened::Reference(_)) => KvType::F32,
        }
    }

    /// Reads a buffer of `bytes` with the threads that will read the weights; only where that is the CPU's.
    ///
    /// # Errors
    /// When there is no memory for the buffer.
    pub(crate) fn read_rate(&self, bytes: u64) -> Result<Option<ReadRate>> {
        let Opened::Cpu(cpu) = self else { return Ok(None) };
        let cache_resident = fornax_cpu::last_level_cache().is_some_and(|cache| bytes <= cache);
        let bytes_per_s = cpu.read_rate(bytes.min(READ_BYTES_MAX) as usize)?;
        Ok(Some(ReadRate { bytes_per_s, cache_resident }))
    }
}

impl ReadRate {
    /// Which share of the rate `bytes` in `seconds` is, in percent.
    pub(crate) fn percent(&self, bytes: u64, seconds: f64) -> f64 {
        100.0 * bytes as f64 / seconds.max(1e-12) / self.bytes_per_s
    }
}

/// Every device of this machine, the best first.
///
/// # Errors
/// When the flags ask for a tier that is not there.
pub(crate) fn all(config: &Config) -> Result<Vec<Found>> {
    let tiers = Isa::available().into_iter().map(Isa::name).collect();
    let plain = |info| Found { info, tiers: Vec::new() };
    let gpu = cuda().ok().map(|gpu| plain(gpu.info()));
    let cpu = Found { info: cpu(config)?.info(), tiers };
    let reference = plain(ReferenceDevice::default().info());
    Ok(gpu.into_iter().chain([cpu, reference]).collect())
}

#[cfg(feature = "cuda")]
fn cuda() -> Result<Box<dyn Device>> {
    Ok(Box::new(fornax_cuda::CudaDevice::open(0)?))
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> Result<Box<dyn Device>> {
    bail!("--device cuda is not in this build; use cpu")
}

fn cpu(config: &Config) -> Result<CpuDevice> {
    let isa = match &config.cpu_isa {
        None => None,
        Some(name) => match Isa::parse(name) {
            Some(isa) => Some(isa),
            None => {
                let known: Vec<&str> = Isa::ALL.iter().map(|isa| isa.name()).collect();
                let line = format!("there is no CPU tier {name:?}; there are {}", known.join(", "));
                return Err(crate::cmd::Usage(line).into());
            }
        },
    };
    Ok(CpuDevice::new(CpuOptions { threads: config.threads, isa, pin: None })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_the_rate_is_in_percent() {
        let rate = ReadRate { bytes_per_s: 1e9, cache_resident: false };
        assert!((rate.percent(50_000_000, 0.1) - 50.0).abs() < 1e-9);
    }
}
