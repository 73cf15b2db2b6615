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
    });
    let report =
        Report { devices: lines.collect(), last_level_cache_bytes: fornax_cpu::last_level_cache() };
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
        let _ = writeln!(
            text,
            "{:<10} {}: {}{tiers}; {} threads",
            line.kind, line.name, line.tier, line.threads
        );
    }
    output::product(text.as_bytes())
}
