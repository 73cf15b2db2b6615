//! `fornax devices`: what this machine could compute on.

use std::fmt::Write;

use anyhow::Result;
use serde::Serialize;

use crate::flags::high::Config;
use crate::flags::low::Devices;
use crate::{devices, output};

/// The one object of `--json`.
#[derive(Serialize)]
struct Report {
    devices: Vec<Line>,
    last_level_cache_bytes: Option<u64>,
    /// With `--report`.
    #[serde(skip_serializing_if = "Option::is_none")]
    report: Option<Vec<Said>>,
}

#[derive(Serialize)]
struct Said {
    name: String,
    text: String,
}

#[derive(Serialize)]
struct Line {
    kind: &'static str,
    name: String,
    /// The one that is used unless told otherwise.
    tier: String,
    /// All that `--cpu-isa` takes here, slowest first.
    tiers: Vec<&'static str>,
    threads: u32,
    /// Of a GPU that shares the machine's memory: as much as it should ever use.
    #[serde(skip_serializing_if = "Option::is_none")]
    working_set_bytes: Option<u64>,
}

/// Prints a line for each device.
///
/// # Errors
/// When stdout fails.
pub(crate) fn devices(config: &Config, flags: &Devices) -> Result<()> {
    let lines = devices::all(config)?.into_iter().map(|found| Line {
        kind: found.info.kind,
        name: found.info.name,
        tier: found.info.tier,
        tiers: found.tiers,
        threads: found.info.threads,
        working_set_bytes: working_set(found.info.kind),
    });
    let report = Report {
        devices: lines.collect(),
        last_level_cache_bytes: fornax_cpu::last_level_cache(),
        report: flags.report.then(said),
    };
    if flags.json {
        return output::json(&report);
    }
    let mut text = String::new();
    for line in &report.devices {
        let tiers = if line.tiers.is_empty() {
            String::new()
        } else {
            format!(" of {}", line.tiers.join(", "))
        };
        let _ = write!(
            text,
            "{:<10} {}: {}{tiers}; {} threads",
            line.kind, line.name, line.tier, line.threads
        );
        let set = line.working_set_bytes.map(|b| format!("; working set {:.1} GB", b as f64 / 1e9));
        let _ = writeln!(text, "{}", set.unwrap_or_default());
    }
    for Said { name, text: said } in report.report.iter().flatten() {
        let _ = writeln!(text, "{name}: {said}");
    }
    output::product(text.as_bytes())
}

/// What the system's GPU may use, before anything is loaded.
#[cfg(unix)]
fn working_set(kind: &str) -> Option<u64> {
    use fornax_plan::Device;
    let metal = || fornax_metal::MetalDevice::system().ok();
    (kind == "metal").then(metal).flatten().and_then(|gpu| gpu.memory_free())
}

#[cfg(not(unix))]
fn working_set(_: &str) -> Option<u64> {
    None
}

/// This build, this machine, and the GPU or why there is none.
fn said() -> Vec<Said> {
    let say = |name: &str, text: String| Said { name: name.to_owned(), text };
    let host = format!("{} {}", std::env::consts::OS, std::env::consts::ARCH);
    let mut all = vec![
        say("fornax", format!("{} for {host}", env!("CARGO_PKG_VERSION"))),
        say("debug build", cfg!(debug_assertions).to_string()),
    ];
    match devices::gpu_report() {
        Ok(lines) => all.extend(lines.into_iter().map(|(name, text)| Said { name, text })),
        Err(why) => all.push(say("metal gpu", format!("{why:#}"))),
    }
    all
}
