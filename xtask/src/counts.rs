//! `cargo xtask counts`: what a decoded token costs on Metal, model by model, counted under the emulator and kept in
//! `docs/metal-counts`, where predictions are made of it. Knows the program by its output, and what a token may cost.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::docs::Mode;

/// Cores that the smallest matrix and attention at any length have a threadgroup for.
const CORES: u64 = 40;

/// Counts every model that is kept again; writes the counts, or fails where they differ.
///
/// # Errors
/// When the program fails, counts differ, or a token costs more than it may.
pub(crate) fn run(root: &Path, mode: Mode) -> Result<()> {
    let program = crate::docs::program(&crate::built(root, &["--bin", "fornax"])?);
    for kept in kept(root)? {
        let now = json!({ "model": kept.model, "step_report": count(&program, &kept)? });
        let name = kept.file.display();
        within(&now["step_report"]).with_context(|| format!("{name}"))?;
        if now["step_report"] == kept.report {
            println!("{name} is up to date");
        } else if mode == Mode::Write {
            fs::write(&kept.file, format!("{now:#}\n"))
                .with_context(|| format!("writing {name}"))?;
            println!("wrote {name}");
        } else {
            bail!("{name} is out of date, run `cargo xtask counts`; counted now: {now:#}");
        }
    }
    Ok(())
}

/// A file of counts: named after the model, then the keys that its token saw.
struct Kept {
    file: PathBuf,
    model: String,
    keys: u32,
    report: Value,
}

fn kept(root: &Path) -> Result<Vec<Kept>> {
    let folder = root.join("docs/metal-counts");
    let mut all = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))? {
        let file = entry?.path();
        all.push(read(&file).with_context(|| format!("in {}", file.display()))?);
    }
    all.sort_by(|a, b| a.file.cmp(&b.file));
    Ok(all)
}

fn read(file: &Path) -> Result<Kept> {
    let stem = file.file_stem().and_then(|s| s.to_str()).unwrap_or_default();
    let (_, keys) = stem.split_once('@').context("the name does not say how many keys")?;
    let text: Value = serde_json::from_slice(&fs::read(file)?)?;
    Ok(Kept {
        file: file.to_path_buf(),
        model: text["model"].as_str().context("no model")?.to_owned(),
        keys: keys.parse().context("the number of keys")?,
        report: text["step_report"].clone(),
    })
}

/// Counts a token of the model behind as many keys, its own among them.
fn count(program: &Path, kept: &Kept) -> Result<Value> {
    let depth = kept.keys.saturating_sub(1).to_string();
    let mut bench = Command::new(program);
    bench.args(["bench", "--device", "metal-emulated", "--step-report", "--json", "--synthetic"]);
    let output = crate::said(bench.args([&kept.model, "-d", &depth]))
        .with_context(|| format!("counting {}", kept.model))?;
    let mut all: Value = serde_json::from_slice(&output).context("the program's output")?;
    Ok(all["step_report"].take())
}

/// Holds a token to what it may cost: one submission and one wait, eight dispatches and five barriers a layer, every byte
/// read once, four bytes back, nothing allocated, and work for all cores.
fn within(report: &Value) -> Result<()> {
    let of = |key: &str| report[key].as_u64().with_context(|| format!("no {key:?}"));
    let layers = of("layers")?;
    for (key, most) in [
        ("command_buffers", 1),
        ("encoders", 1),
        ("waits", 1),
        ("layer_dispatches", 8 * layers),
        ("layer_barriers", 5 * layers),
        ("readback_bytes", 4),
        ("allocations", 0),
    ] {
        let found = of(key)?;
        ensure!(found <= most, "{key}: {found}, at most {most} are allowed");
    }
    let (read, needed) = (of("bytes_read")?, of("bytes_needed")?);
    ensure!(layers > 0 && needed > 0 && of("readback_bytes")? > 0, "nothing was counted");
    ensure!(100 * read <= 105 * needed, "{read} bytes were read where {needed} are needed");
    let kernels = report["kernels"].as_array().context("no kernels")?;
    let heavy =
        |name: &str| ["matvec", "qkv", "gated", "attention"].iter().any(|k| name.starts_with(k));
    let mut seen = 0;
    for kernel in kernels {
        let name = kernel["kernel"].as_str().context("a kernel without a name")?;
        let groups = kernel["threadgroups"].as_u64().context("a kernel without threadgroups")?;
        ensure!(!heavy(name) || groups >= CORES, "{name}: {groups} threadgroups for {CORES} cores");
        seen += u32::from(heavy(name));
    }
    ensure!(seen >= 5, "only {seen} kernels read matrices or the cache");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_costs_no_more_than_it_may() {
        let all = kept(&crate::root()).expect("files of counts");
        for kept in &all {
            within(&kept.report).unwrap_or_else(|e| panic!("{}: {e:#}", kept.file.display()));
        }
        for model in ["qwen3-0.6b:q8_0", "llama-1b:q4_k"] {
            for keys in [17, 1025] {
                let here = |k: &&Kept| k.model == model && k.keys == keys;
                assert_eq!(all.iter().filter(here).count(), 1, "{model} at {keys} keys");
            }
        }
    }

    #[test]
    fn what_costs_more_is_named() {
        let all = kept(&crate::root()).expect("files of counts");
        for (key, value) in [
            ("waits", 2),
            ("layer_dispatches", 8 * 64 + 1),
            ("layer_barriers", 5 * 64 + 1),
            ("bytes_read", u64::MAX / 200),
            ("readback_bytes", 8),
            ("allocations", 1),
        ] {
            let mut report = all[0].report.clone();
            report[key] = value.into();
            let error = within(&report).expect_err(key).to_string();
            assert!(error.contains(&value.to_string()), "{key}: {error}");
        }
        let mut report = all[0].report.clone();
        for kernel in report["kernels"].as_array_mut().expect("kernels") {
            kernel["threadgroups"] = 39.into();
        }
        assert!(within(&report).expect_err("few threadgroups").to_string().contains("40 cores"));
    }
}
