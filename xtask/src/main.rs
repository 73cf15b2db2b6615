//! Tasks around the code: `cargo xtask TASK`. Knows the repository's files, and the programs only by running them.

#![forbid(unsafe_code)]
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a report is what these tasks are for"
)]

mod counts;
mod deep;
mod docs;
mod fixtures;
mod receipts;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

const USAGE: &str = "\
usage: cargo xtask TASK

  tidy                   check the rules that no compiler knows; report the size of the code
  deep                   run the complete sweeps and mutations, and the builds for a Mac: an hour
  counts [--check]       count what a token costs on Metal again, or fail where it differs: minutes in the emulator
  docs [--check]         write the generated pages under docs/, or fail where they are not up to date
  fixtures FROM [--all]  copy the test models again from an unpacked set; --all: those that git ignores too
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let root = root();
    let result = match words[..] {
        ["tidy"] => tidy::run(&root),
        ["deep"] => deep::run(&root),
        ["counts"] => counts::run(&root, docs::Mode::Write),
        ["counts", "--check"] => counts::run(&root, docs::Mode::Check),
        ["docs"] => docs::run(&root, docs::Mode::Write),
        ["docs", "--check"] => docs::run(&root, docs::Mode::Check),
        ["fixtures", from] => fixtures::run(&root, from.as_ref(), fixtures::Extent::Kept),
        ["fixtures", from, "--all"] => fixtures::run(&root, from.as_ref(), fixtures::Extent::All),
        ["help" | "--help" | "-h"] => {
            print!("{USAGE}");
            Ok(())
        }
        _ => {
            eprint!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The repository's root: this package lies directly in it.
fn root() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package).to_path_buf()
}

/// Cargo says which cargo it is, so that a toolchain override is kept.
fn cargo_itself() -> std::ffi::OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// Takes from a command what cargo tells a program that it runs of the program's package: a cargo below it would run the build
/// scripts that ask for such names again, and compile what stands on them, and the next cargo from a shell once more.
fn called_plainly(command: &mut Command) -> &mut Command {
    for (name, _) in std::env::vars_os() {
        let told = name.to_str().is_some_and(|n| {
            ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|head| n.starts_with(head))
        });
        if told {
            command.env_remove(name);
        }
    }
    command
}

/// `cargo` with `arguments` in `root`; its standard output.
fn cargo(root: &Path, arguments: &[&str]) -> Result<Vec<u8>> {
    let mut command = Command::new(cargo_itself());
    said(called_plainly(&mut command).args(arguments).current_dir(root))
        .with_context(|| format!("cargo {}", arguments.join(" ")))
}

/// What a program writes to stdout; an error with its stderr where it fails.
fn said(command: &mut Command) -> Result<Vec<u8>> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("running {program}"))?;
    if !output.status.success() {
        bail!("{program} failed ({}):\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(output.stdout)
}

/// Builds programs as `cargo test --workspace` does, which then has them already: with less than the whole workspace, or without
/// what tests need, cargo would choose other features of what they stand on and compile it once more. Returns where they are.
fn built(root: &Path, targets: &[&str]) -> Result<PathBuf> {
    let build = ["build", "--quiet", "--workspace", "--example", "predictions"];
    cargo(root, &[&build[..], targets].concat())?;
    let metadata = metadata(root)?;
    let folder =
        metadata["target_directory"].as_str().context("metadata without a target folder")?;
    Ok(Path::new(folder).join("debug"))
}

/// What `cargo metadata` says of the workspace's own packages.
fn metadata(root: &Path) -> Result<serde_json::Value> {
    let json = cargo(root, &["metadata", "--no-deps", "--format-version", "1"])?;
    serde_json::from_slice(&json).context("reading the output of cargo metadata")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cargo_below_is_not_told_of_this_package() {
        // Tests are run by cargo too, which has told them.
        assert!(std::env::var_os("CARGO_PKG_NAME").is_some());
        let mut command = Command::new("cargo");
        let taken: Vec<String> = called_plainly(&mut command)
            .get_envs()
            .filter(|(_, value)| value.is_none())
            .map(|(name, _)| name.to_string_lossy().into_owned())
            .collect();
        for name in ["CARGO_PKG_NAME", "CARGO_PKG_VERSION_MAJOR", "CARGO_MANIFEST_DIR"] {
            assert!(taken.iter().any(|t| t == name), "{name} is not among {taken:?}");
        }
        assert!(!taken.iter().any(|t| t == "CARGO" || t == "CARGO_TARGET_DIR"), "{taken:?}");
    }
}
