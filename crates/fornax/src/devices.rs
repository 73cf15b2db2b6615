//! Which provider computes: the only place that knows them all.
//! Everything above sees `fornax_plan::Device`.

use std::sync::OnceLock;

use anyhow::{Context, Result, anyhow, bail};
use fornax_cpu::{CpuDevice, CpuOptions, Isa, Stream};
use fornax_plan::reference::ReferenceDevice;
use fornax_plan::{ActMode, Device, DeviceInfo, KvType};

use crate::flags::high::Config;
use crate::flags::low::{ActName, DeviceName, KvName, Layout};
use crate::output;

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

/// Multiplications and additions a second; none where the processor has no such instructions.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OpRates {
    pub(crate) vnni: Option<f64>,
    pub(crate) amx: Option<f64>,
}

/// Reading more than this tells nothing new and costs the start time.
const READ_BYTES_MAX: u64 = 512 << 20;
/// The same where the time of a pass is set against that of a token.
const STREAM_BYTES_MAX: u64 = 2 << 30;

impl Opened {
    /// The device that the flags ask for. Whether it can run a given model is seen when the model is prepared:
    /// where a GPU cannot, [`Opened::fallback`] is what computes. `auto` is the GPU where there is one: beside an H200
    /// its sixteen cores generated 883 against 1,886 tokens/s at 135 M and 186 against 1,581 at 0.6 B (Q8_0).
    ///
    /// # Errors
    /// When it is not in this build or not in this machine.
    pub(crate) fn new(config: &Config) -> Result<Opened> {
        if config.fast_prompt && !matches!(config.device, DeviceName::Auto | DeviceName::Cpu) {
            bail!("--fast-prompt: only the CPU has such a form; use --device cpu or leave it out");
        }
        match config.device {
            DeviceName::Auto => auto(config),
            DeviceName::Cpu => Ok(Opened::Cpu(cpu(config)?)),
            DeviceName::Reference => Ok(Opened::Reference(ReferenceDevice::default())),
            DeviceName::Metal => Ok(Opened::Gpu(metal(config)?)),
            DeviceName::MetalEmulated => Ok(Opened::Gpu(metal_emulated()?)),
            DeviceName::Cuda => Ok(Opened::Gpu(cuda()?)),
        }
    }

    /// What computes the whole model where this device refuses it; `None` where the refusal is final.
    ///
    /// # Errors
    /// When the CPU's threads cannot be started.
    pub(crate) fn fallback(&self, config: &Config) -> Result<Option<Opened>> {
        match self {
            Opened::Gpu(_) => Ok(Some(Opened::Cpu(cpu(config)?))),
            _ => Ok(None),
        }
    }

    /// The same device with keys and values laid out as the flags say, for sequences of at most `context` tokens;
    /// `None` where it is so already.
    ///
    /// # Errors
    /// When the device has no such layout.
    pub(crate) fn laid_out(&self, config: &Config, context: u32) -> Result<Option<Opened>> {
        let paged = config.layout == Layout::Paged;
        match self {
            _ if paged => Ok(None),
            Opened::Cpu(device) => Ok(Some(Opened::Cpu(device.with_kv_block(context)))),
            Opened::Reference(device) => {
                let device = ReferenceDevice { kv_block: context.max(1), ..device.clone() };
                Ok(Some(Opened::Reference(device)))
            }
            Opened::Gpu(device) => {
                let info = device.info();
                bail!(
                    "--kv contiguous: {} keeps keys and values in blocks of {} tokens only; use --kv paged or \
                     --device cpu",
                    info.kind,
                    info.kv_block
                )
            }
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
        match (config.kv_type, self) {
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
        let bytes_per_s = cpu.read_rate(bytes.min(READ_BYTES_MAX) as usize)?;
        Ok(Some(ReadRate { bytes_per_s, cache_resident: self.cache_resident(bytes) }))
    }

    /// Whether so many bytes fit the last-level cache of the CPU, where that is the device.
    pub(crate) fn cache_resident(&self, bytes: u64) -> bool {
        matches!(self, Opened::Cpu(_))
            && fornax_cpu::last_level_cache().is_some_and(|cache| bytes <= cache)
    }

    /// A buffer that those threads read pass by pass, of `bytes` or as many of them as are worth a pass.
    ///
    /// # Errors
    /// When there is no memory for the buffer.
    pub(crate) fn stream(&self, bytes: u64) -> Result<Option<Stream>> {
        let Opened::Cpu(cpu) = self else { return Ok(None) };
        Ok(Some(cpu.stream(bytes.min(STREAM_BYTES_MAX) as usize)?))
    }

    /// What the threads multiply and add of 8-bit integers in registers; nothing where the CPU is not the device.
    ///
    /// # Errors
    /// When a thread failed.
    pub(crate) fn op_rates(&self) -> Result<OpRates> {
        let Opened::Cpu(cpu) = self else { return Ok(OpRates::default()) };
        Ok(OpRates { vnni: cpu.vnni_rate()?, amx: cpu.amx_rate()? })
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
    let gpus = [metal(config), cuda()].into_iter().flatten().map(|gpu| plain(gpu.info()));
    let cpu = Found { info: cpu(config)?.info(), tiers };
    let reference = plain(ReferenceDevice::default().info());
    Ok(gpus.chain([cpu, reference]).collect())
}

/// `--act` as the boundary calls it.
pub(crate) fn act(config: &Config) -> Option<ActMode> {
    config.act.map(|act| match act {
        ActName::F32 => ActMode::F32,
        ActName::Q8 => ActMode::Q8,
    })
}

/// What a Mac user is asked to report of the GPU, name and text; or why there is none.
#[cfg(unix)]
pub(crate) fn gpu_report() -> Result<Vec<(String, String)>> {
    Ok(fornax_metal::MetalDevice::system()?.report())
}

#[cfg(not(unix))]
pub(crate) fn gpu_report() -> Result<Vec<(String, String)>> {
    bail!("metal is not in this build")
}

/// The GPU: on a Mac with one line where it cannot be had, since each has one; elsewhere where there is one. Who asks
/// for threads, a tier or the fast form of prompts asks for the CPU.
fn auto(config: &Config) -> Result<Opened> {
    if config.threads.is_some() || config.cpu_isa.is_some() || config.fast_prompt {
        return Ok(Opened::Cpu(cpu(config)?));
    }
    if cfg!(target_os = "macos") {
        match metal(config) {
            Ok(gpu) => return Ok(Opened::Gpu(gpu)),
            Err(why) => {
                output::note(config, &format!("the CPU computes instead of the GPU: {why:#}"))
            }
        }
    } else if let Ok(gpu) = cuda() {
        return Ok(Opened::Gpu(gpu));
    }
    Ok(Opened::Cpu(cpu(config)?))
}

/// The GPU of this Mac, with the variants that `fornax tune` found to be the fastest.
#[cfg(unix)]
fn metal(config: &Config) -> Result<Box<dyn Device>> {
    let device = fornax_metal::MetalDevice::system()?;
    let Some(profile) = config.tuning().and_then(|path| std::fs::read_to_string(path).ok()) else {
        return Ok(Box::new(device));
    };
    let tuned = device.clone().with_profile(&profile);
    let tuned = tuned.inspect_err(|why| output::note(config, &format!("not tuned: {why}")));
    Ok(Box::new(tuned.unwrap_or(device)))
}

#[cfg(not(unix))]
fn metal(_: &Config) -> Result<Box<dyn Device>> {
    bail!("--device metal is not in this build; use --device cpu")
}

/// The first GPU. A driver that failed once is not tried again in this process.
fn cuda() -> Result<Box<dyn Device>> {
    static FAILED: OnceLock<String> = OnceLock::new();
    remembered(&FAILED, open_cuda)
}

#[cfg(feature = "cuda")]
fn open_cuda() -> Result<Box<dyn Device>> {
    Ok(Box::new(fornax_cuda::CudaDevice::open(0)?))
}

#[cfg(not(feature = "cuda"))]
fn open_cuda() -> Result<Box<dyn Device>> {
    bail!("--device cuda is not in this build; use --device cpu")
}

/// The Metal kernels under the emulator: for tests and counts, so that only who names it meets it.
///
/// # Errors
/// When there is no C++ compiler to compile them with.
#[cfg(unix)]
fn metal_emulated() -> Result<Box<dyn Device>> {
    // One order of what is unordered: repeats agree.
    const SEED: u64 = 1;
    let device = fornax_metal::MetalDevice::emulated(SEED);
    device.ready().context("--device metal-emulated")?;
    Ok(Box::new(device))
}

#[cfg(not(unix))]
fn metal_emulated() -> Result<Box<dyn Device>> {
    bail!("--device metal-emulated is not in this build; use --device cpu")
}

/// What `open` gives, unless it failed before: then what it said.
fn remembered<T>(failed: &OnceLock<String>, open: impl FnOnce() -> Result<T>) -> Result<T> {
    if let Some(cause) = failed.get() {
        return Err(anyhow!("{cause}"));
    }
    open().inspect_err(|cause| drop(failed.set(format!("{cause:#}"))))
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
    Ok(CpuDevice::new(CpuOptions {
        threads: config.threads,
        isa,
        pin: None,
        fast_prompt: config.fast_prompt,
    })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_failed_is_not_opened_again() {
        let (failed, mut opened) = (OnceLock::new(), 0);
        for _ in 0..3 {
            let found: Result<()> = remembered(&failed, || {
                opened += 1;
                bail!("no driver")
            });
            assert_eq!(found.unwrap_err().to_string(), "no driver");
        }
        assert_eq!(opened, 1);
    }

    #[test]
    fn a_share_of_the_rate_is_in_percent() {
        let rate = ReadRate { bytes_per_s: 1e9, cache_resident: false };
        assert!((rate.percent(50_000_000, 0.1) - 50.0).abs() < 1e-9);
    }
}
