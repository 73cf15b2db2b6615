//! Prints what counted tokens should take on Apple's chips, as a page in Markdown. Takes files that `fornax bench --step-report
//! --json` wrote, each called MODEL@KEYS.json with + for blanks.

use std::error::Error;
use std::path::Path;

use fornax_metal::cost;
use fornax_plan::{KernelCount, StepReport};
use serde_json::Value;

#[allow(clippy::print_stdout, reason = "the page is what it is for")]
fn main() -> Result<(), Box<dyn Error>> {
    let mut models = Vec::new();
    for file in std::env::args().skip(1) {
        let stem = Path::new(&file)
            .file_stem()
            .and_then(|s| s.to_str())
            .ok_or("a name that is no text")?;
        let (name, keys) = stem.split_once('@').ok_or("a name without the number of keys")?;
        let all: Value = serde_json::from_slice(&std::fs::read(&file)?)?;
        let report = &all["step_report"];
        models.push((name.replace('+', " "), keys.parse()?, read(report)));
    }
    print!("{}", cost::page(&models));
    Ok(())
}

fn read(v: &Value) -> StepReport {
    let n = |key: &str| v[key].as_u64().unwrap_or(0);
    let kernels = v["kernels"].as_array().map_or(&[][..], Vec::as_slice);
    StepReport {
        layers: n("layers") as u32,
        dispatches: n("dispatches"),
        barriers: n("barriers"),
        layer_dispatches: n("layer_dispatches"),
        layer_barriers: n("layer_barriers"),
        bytes_read: n("bytes_read"),
        bytes_loaded: n("bytes_loaded"),
        bytes_written: n("bytes_written"),
        bytes_needed: n("bytes_needed"),
        readback_bytes: n("readback_bytes"),
        kernels: kernels.iter().map(kernel).collect(),
        ..StepReport::default()
    }
}

fn kernel(v: &Value) -> KernelCount {
    let n = |key: &str| v[key].as_u64().unwrap_or(0);
    KernelCount {
        kernel: v["kernel"].as_str().unwrap_or("").to_string(),
        dispatches: n("dispatches"),
        threadgroups: n("threadgroups"),
        threads: n("threads") as u32,
        bytes_read: n("bytes_read"),
        bytes_written: n("bytes_written"),
        ..KernelCount::default()
    }
}
