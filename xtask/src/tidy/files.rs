//! Which files of the repository are looked at, and how large the test data may be. Knows paths, no rules about text.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::Complaint;

/// The most bytes that `testdata/` may hold, so that a checkout stays quick.
const TESTDATA_BYTES_MAX: u64 = 25_000_000;

/// Folders that hold nothing written by hand.
const SKIPPED: [&str; 6] = [".git", "target", "corpus", "artifacts", "coverage", "node_modules"];

/// Endings of the files that are read; files without an ending are scripts and are read too.
const READ: [&str; 13] =
    ["rs", "metal", "cu", "cuh", "h", "cpp", "c", "md", "toml", "sh", "py", "yml", "yaml"];

/// A text file of the repository.
#[derive(Debug)]
pub(super) struct File {
    /// From the root, with `/` between the folders.
    pub(super) path: String,
    /// The whole text.
    pub(super) text: String,
}

impl File {
    /// What follows the last dot of the name; nothing where there is none.
    pub(super) fn ending(&self) -> &str {
        let name = self.path.rsplit('/').next().unwrap_or(&self.path);
        match name.rsplit_once('.') {
            Some((stem, ending)) if !stem.is_empty() => ending,
            _ => "",
        }
    }

    pub(super) fn is_rust(&self) -> bool {
        self.ending() == "rs"
    }

    /// Kernels for GPUs and what they include.
    pub(super) fn is_kernel(&self) -> bool {
        matches!(self.ending(), "metal" | "cu" | "cuh" | "h" | "cpp" | "c")
    }

    pub(super) fn is_code(&self) -> bool {
        self.is_rust() || self.is_kernel() || matches!(self.ending(), "sh" | "py")
    }

    /// The part that it belongs to: a crate, or a folder at the top.
    pub(super) fn part(&self) -> &str {
        let depth = if self.path.starts_with("crates/") { 2 } else { 1 };
        match self.path.match_indices('/').nth(depth - 1) {
            Some((end, _)) => &self.path[..end],
            None => &self.path,
        }
    }
}

/// Every text file under `root` that somebody wrote, in the order of the paths.
pub(super) fn find(root: &Path) -> Result<Vec<File>> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let entries =
            fs::read_dir(&folder).with_context(|| format!("listing {}", folder.display()))?;
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = entry.path();
            // Links are looked at where they lead, if that is in here at all.
            let kind = entry.file_type()?;
            if kind.is_dir() {
                if !SKIPPED.contains(&name.as_str()) {
                    folders.push(path);
                }
            } else if kind.is_file() && is_read(&path) {
                // What is not UTF-8 is data without an ending.
                if let Ok(text) = fs::read_to_string(&path) {
                    let relative = path.strip_prefix(root)?.to_string_lossy().replace('\\', "/");
                    found.push(File { path: relative, text });
                }
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

fn is_read(path: &Path) -> bool {
    let in_testdata = path.components().any(|part| part.as_os_str() == "testdata");
    match path.extension().and_then(|ending| ending.to_str()) {
        Some(ending) => READ.contains(&ending),
        None => !in_testdata,
    }
}

/// Complains where the committed test data are larger than agreed.
pub(super) fn check_testdata(root: &Path) -> Result<Option<Complaint>> {
    let folder = root.join("testdata");
    let ignored = fs::read_to_string(folder.join(".gitignore")).unwrap_or_default();
    let ignored: Vec<_> = ignored
        .lines()
        .filter_map(|line| line.strip_prefix('/'))
        .map(|line| folder.join(line.trim_end_matches('/')))
        .collect();
    let mut bytes = 0;
    let mut folders = vec![folder];
    while let Some(folder) = folders.pop() {
        let entries =
            fs::read_dir(&folder).with_context(|| format!("listing {}", folder.display()))?;
        for entry in entries {
            let entry = entry?;
            if ignored.contains(&entry.path()) {
                continue;
            }
            if entry.file_type()?.is_dir() {
                folders.push(entry.path());
            } else {
                bytes += entry.metadata()?.len();
            }
        }
    }
    Ok((bytes > TESTDATA_BYTES_MAX).then(|| {
        Complaint::new("testdata", 0, format!("{bytes} bytes, more than {TESTDATA_BYTES_MAX}"))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str) -> File {
        File { path: path.to_owned(), text: String::new() }
    }

    #[test]
    fn a_path_says_what_a_file_is() {
        assert!(file("crates/a/src/lib.rs").is_rust());
        assert!(file("crates/a/src/k.metal").is_kernel());
        assert!(!file("docs/a.md").is_code());
        assert_eq!(file(".ci/run").ending(), "");
        assert_eq!(file(".gitignore").ending(), "");
        assert_eq!(file("crates/a/src/lib.rs").part(), "crates/a");
        assert_eq!(file("xtask/src/main.rs").part(), "xtask");
        assert_eq!(file("README.md").part(), "README.md");
    }

    #[test]
    fn scripts_are_read_and_data_are_not() {
        for path in [".ci/run", "scripts/a.sh", "crates/a/src/lib.rs", "testdata/README.md"] {
            assert!(is_read(path.as_ref()), "{path}");
        }
        for path in ["testdata/models/a/model.gguf", "testdata/x", "a.json", "Cargo.lock"] {
            assert!(!is_read(path.as_ref()), "{path}");
        }
    }

    #[test]
    fn the_limit_on_test_data_leaves_out_what_git_ignores() -> Result<()> {
        let root = std::env::temp_dir().join(format!("fornax-tidy-{}", std::process::id()));
        for (path, bytes) in [("kept/a", 20_000_000), ("ignored/b", 20_000_000)] {
            let path = root.join("testdata/models").join(path);
            fs::create_dir_all(path.parent().context("a file has a folder")?)?;
            // A hole: the length is there, the bytes take no room.
            fs::File::create(path)?.set_len(bytes)?;
        }
        assert!(check_testdata(&root)?.is_some());
        fs::write(root.join("testdata/.gitignore"), "/models/ignored/\n")?;
        assert_eq!(check_testdata(&root)?, None);
        fs::remove_dir_all(root)?;
        Ok(())
    }
}
