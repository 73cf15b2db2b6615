//! `cargo xtask deep`: what takes too long for every change. Complete sweeps and mutations, which the checks sample; and the
//! builds for a Mac, as far as they can be made here. Knows the tests by their being ignored, the rest as scripts.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};

/// What is run, in this order; all of it, whatever fails.
fn steps(root: &Path) -> Result<Vec<(&'static str, Command)>> {
    let script = |name: &str| Command::new(root.join("scripts").join(name));
    let mut tests = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    tests.args(["test", "--no-fail-fast"]);
    for package in packages(root)? {
        tests.args(["-p", &package]);
    }
    // Ignored tests are the complete ones; the others are the checks' own.
    tests.args(["--", "--ignored"]);
    let mut counts = Command::new(std::env::current_exe().context("naming this program")?);
    counts.args(["counts", "--check"]);
    let mut steps = vec![
        ("complete sweeps, every barrier removed in turn", tests),
        ("counts of a token on Metal", counts),
        ("Metal kernels with address spaces", script("lint-metal.sh")),
        ("types for aarch64-apple-darwin", script("check-apple.sh")),
        ("objects for aarch64-apple-darwin", script("objects-apple.sh")),
    ];
    for (_, command) in &mut steps {
        command.current_dir(root);
    }
    Ok(steps)
}

/// The packages that have ignored tests which run here: no others are built.
fn packages(root: &Path) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for package in fs::read_dir(root.join("crates")).context("listing the crates")? {
        let package = package?.path();
        let found = ["src", "tests"].iter().any(|part| ignores(&package.join(part)));
        if let (true, Some(name)) = (found, package.file_name()) {
            all.push(name.to_string_lossy().into_owned());
        }
    }
    all.sort();
    Ok(all)
}

/// Whether a source in the folder has an ignored test, other than one that makes something for another machine.
fn ignores(folder: &Path) -> bool {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).any(|path| {
        let text = || fs::read_to_string(&path).unwrap_or_default();
        let here = |line: &str| line.contains("#[ignore") && !line.contains("another machine");
        path.is_dir() && ignores(&path)
            || path.extension().is_some_and(|e| e == "rs") && text().lines().any(here)
    })
}

/// Runs everything and tells what failed.
///
/// # Errors
/// When anything did.
pub(crate) fn run(root: &Path) -> Result<()> {
    report(steps(root)?)
}

fn report(steps: Vec<(&'static str, Command)>) -> Result<()> {
    let mut failed = Vec::new();
    let (started, all) = (Instant::now(), steps.len());
    for (what, mut command) in steps {
        println!("deep: {what}");
        let begin = Instant::now();
        let status = command.status().with_context(|| format!("starting {command:?}"));
        let seconds = begin.elapsed().as_secs();
        match status {
            Ok(status) if status.success() => println!("deep: {what}: good, {seconds} s"),
            Ok(status) => failed.push(format!("{what} ({status})")),
            Err(e) => failed.push(format!("{what} ({e:#})")),
        }
    }
    if failed.is_empty() {
        println!("deep: all of {all} good, {} s", started.elapsed().as_secs());
        return Ok(());
    }
    bail!("failed: {}", failed.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_are_run_and_the_failed_are_named() {
        let all = [("one", "false"), ("two", "true"), ("three", "/nonexistent/tool")];
        let steps = all.map(|(what, tool)| (what, Command::new(tool))).into_iter().collect();
        let error = report(steps).expect_err("two fail").to_string();
        assert!(error.contains("one (") && error.contains("three ("), "{error}");
        assert!(!error.contains("two"), "{error}");
    }

    #[test]
    fn packages_with_ignored_tests_are_found() {
        let all = packages(&crate::root()).expect("a folder of crates");
        assert!(all.contains(&"fornax-metal".to_string()), "{all:?}");
        assert!(all.contains(&"fornax-engine".to_string()), "{all:?}");
        // The one has none, the other one that needs NVIDIA's compiler and a folder to write to.
        for other in ["fornax-gguf", "fornax-cuda"] {
            assert!(!all.contains(&other.to_string()), "{all:?}");
        }
    }

    #[test]
    fn the_complete_tests_come_first() {
        let steps = steps(&crate::root()).expect("a folder of crates");
        assert!(steps.len() > 1 && steps[0].1.get_args().any(|a| a == "--ignored"));
    }
}
