//! `cargo xtask tidy`: the rules of CONTRIBUTING.md that no compiler knows. This file finds the files and reports; what
//! each rule looks at is handed to it, so that rules are plain functions of text.

mod arrows;
mod files;
mod pages;
mod source;
mod text;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use files::File;

/// Something that breaks a rule.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Complaint {
    path: String,
    /// Counted from one; zero is the whole file.
    line: usize,
    message: String,
}

impl Complaint {
    fn new(path: &str, line: usize, message: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, message: message.into() }
    }
}

/// Applies every rule to the repository at `root`, prints what breaks one and the sizes, and fails if any did.
pub(crate) fn run(root: &Path) -> Result<()> {
    let files = files::find(root)?;
    let mut complaints = Vec::new();
    let mut warnings = Vec::new();
    for file in &files {
        complaints.extend(text::check(file));
        warnings.extend(text::warn(file));
    }
    complaints.extend(arrows::check(&crate::metadata(root)?)?);
    complaints.extend(pages::check(&read(root, "README.md")?, &read(root, ".ci/run")?));
    complaints.extend(pages::check_dependencies(&read(root, "docs/deps.md")?, &manifests(&files)));
    complaints.extend(files::check_testdata(root)?);

    print!("{}", sizes(&files));
    for warning in &warnings {
        println!("warning: {}", show(warning));
    }
    complaints.sort();
    for complaint in &complaints {
        println!("error: {}", show(complaint));
    }
    if !complaints.is_empty() {
        bail!("{} breaches of the rules in CONTRIBUTING.md", complaints.len());
    }
    println!("tidy: {} files, nothing to complain of", files.len());
    Ok(())
}

fn read(root: &Path, path: &str) -> Result<String> {
    fs::read_to_string(root.join(path)).with_context(|| format!("reading {path}"))
}

fn show(complaint: &Complaint) -> String {
    let Complaint { path, line, message } = complaint;
    if *line == 0 { format!("{path}: {message}") } else { format!("{path}:{line}: {message}") }
}

/// The manifests of the workspace, with their paths.
fn manifests(files: &[File]) -> Vec<(&str, &str)> {
    files
        .iter()
        .filter(|file| file.path.ends_with("Cargo.toml") && !file.path.starts_with("fuzz/"))
        .map(|file| (file.path.as_str(), file.text.as_str()))
        .collect()
}

/// A table of the lines of code by part: how many files, how many lines, the longest file.
fn sizes(files: &[File]) -> String {
    let mut parts: BTreeMap<&str, (usize, usize, &str, usize)> = BTreeMap::new();
    for file in files.iter().filter(|file| file.is_code()) {
        let lines = file.text.lines().count();
        let part = parts.entry(file.part()).or_default();
        part.0 += 1;
        part.1 += lines;
        if lines > part.3 {
            (part.2, part.3) = (&file.path, lines);
        }
    }
    let total: usize = parts.values().map(|part| part.1).sum();
    let mut table = format!("{:<22} {:>6} {:>7}  longest\n", "part", "files", "lines");
    for (name, (count, lines, longest, length)) in parts {
        table += &format!("{name:<22} {count:>6} {lines:>7}  {longest} ({length})\n");
    }
    table += &format!("{:<22} {:>6} {total:>7}\n", "total", "");
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_go_by_part_and_count_code_only() {
        let file = |path: &str, lines| File { path: path.to_owned(), text: "x\n".repeat(lines) };
        let files = [
            file("crates/a/src/lib.rs", 3),
            file("crates/a/kernels/k.cu", 5),
            file("crates/a/README.md", 90),
            file("xtask/src/main.rs", 2),
        ];
        let table = sizes(&files);
        let row = |name: &str| {
            let line = table.lines().find(|line| line.starts_with(name)).expect(name);
            line.split_whitespace().skip(1).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(row("crates/a"), ["2", "8", "crates/a/kernels/k.cu", "(5)"]);
        assert_eq!(row("total"), ["10"]);
    }

    #[test]
    fn complaints_point_at_their_line() {
        assert_eq!(show(&Complaint::new("a.rs", 7, "bad")), "a.rs:7: bad");
        assert_eq!(show(&Complaint::new("a.rs", 0, "bad")), "a.rs: bad");
    }
}
