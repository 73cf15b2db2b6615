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
    let mut tests = Command::new(crate::cargo_itself());
    tests.args(["test", "--no-fail-fast"]);
    let mut skipped = Vec::new();
    for (package, ignored) in packages(root)? {
        tests.args(["-p", &package]);
        skipped.extend(ignored.into_iter().filter(|t| !t.is_check).map(|t| t.name));
    }
    // Ignored tests are the complete ones; the others are the checks' own.
    tests.args(["--", "--ignored"]);
    for name in skipped {
        tests.args(["--skip", &name]);
    }
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
        crate::called_plainly(command).current_dir(root);
    }
    Ok(steps)
}

/// A test that is left out of the checks.
#[derive(Debug)]
struct Ignored {
    name: String,
    /// It checks something. What says that a script runs it, or that it is for another machine, makes something instead.
    is_check: bool,
}

/// The packages that have ignored tests which check something, with all of theirs: no others are built.
fn packages(root: &Path) -> Result<Vec<(String, Vec<Ignored>)>> {
    let mut all = Vec::new();
    for package in fs::read_dir(root.join("crates")).context("listing the crates")? {
        let package = package?.path();
        let found: Vec<Ignored> =
            ["src", "tests"].iter().flat_map(|part| ignored(&package.join(part))).collect();
        if let (true, Some(name)) = (found.iter().any(|t| t.is_check), package.file_name()) {
            all.push((name.to_string_lossy().into_owned(), found));
        }
    }
    all.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(all)
}

/// The ignored tests of the sources in a folder.
fn ignored(folder: &Path) -> Vec<Ignored> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            all.extend(ignored(&path));
        } else if path.extension().is_some_and(|e| e == "rs") {
            all.extend(ignored_in(&fs::read_to_string(&path).unwrap_or_default()));
        }
    }
    all
}

fn ignored_in(text: &str) -> Vec<Ignored> {
    let mut lines = text.lines();
    let mut all = Vec::new();
    while let Some(line) = lines.next() {
        if !line.trim_start().starts_with("#[ignore") {
            continue;
        }
        let is_check = !["scripts/", "for another machine"].iter().any(|r| line.contains(r));
        let name =
            lines.find_map(|l| l.split_once("fn ").and_then(|(_, rest)| rest.split_once('(')));
        all.extend(name.map(|(name, _)| Ignored { name: name.to_owned(), is_check }));
    }
    all
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
        let names: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
        assert!(names.contains(&"fornax-metal") && names.contains(&"fornax-engine"), "{names:?}");
        // The one has none, the other one that needs NVIDIA's compiler and a folder to write to.
        assert!(!names.contains(&"fornax-gguf") && !names.contains(&"fornax-cuda"), "{names:?}");
    }

    #[test]
    fn what_a_script_runs_is_no_check() {
        let text = "#[test]\n#[ignore = \"all\"]\npub(super) fn every_one() {\n}\n#[test]\n#[ignore = \"for scripts/a.sh\"]\n\
                    fn writes() {}\n#[test]\nfn runs() {}\n";
        let found = ignored_in(text);
        let told: Vec<(&str, bool)> = found.iter().map(|t| (t.name.as_str(), t.is_check)).collect();
        assert_eq!(told, [("every_one", true), ("writes", false)]);
    }

    #[test]
    fn the_complete_tests_come_first() {
        let steps = steps(&crate::root()).expect("a folder of crates");
        assert!(steps.len() > 1 && steps[0].1.get_args().any(|a| a == "--ignored"));
    }
}
