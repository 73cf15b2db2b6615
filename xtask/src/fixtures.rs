//! `cargo xtask fixtures FROM`: copies the test models again from the folder they were made in. Knows their names by
//! what lies in `testdata/` and in its ignore list, never what is in them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Which models to copy.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// Those that are committed.
    Kept,
    /// Also those that are left out of the repository for their size.
    All,
}

/// Brings every data file of `testdata/` to the state of `from`, and says which ones changed.
pub(crate) fn run(root: &Path, from: &Path, extent: Extent) -> Result<()> {
    let testdata = root.join("testdata");
    let mut wanted = present(&testdata)?;
    if extent == Extent::All {
        let ignored = fs::read_to_string(testdata.join(".gitignore"))
            .context("reading testdata/.gitignore, which lists the models left out")?;
        for model in left_out(&ignored) {
            for file in ["model.gguf", "expected.json"] {
                wanted.insert(model.join(file));
            }
        }
    }

    let (mut changed, mut missing) = (0, Vec::new());
    for file in &wanted {
        let source = from.join(in_the_set(file));
        if !source.is_file() {
            missing.push(source);
            continue;
        }
        let new = fs::read(&source).with_context(|| format!("reading {}", source.display()))?;
        let target = testdata.join(file);
        if fs::read(&target).is_ok_and(|old| old == new) {
            continue;
        }
        if let Some(folder) = target.parent() {
            fs::create_dir_all(folder)
                .with_context(|| format!("making the folder {}", folder.display()))?;
        }
        fs::write(&target, new).with_context(|| format!("writing {}", target.display()))?;
        println!("changed {}", target.display());
        changed += 1;
    }
    println!("{} files, {changed} changed", wanted.len() - missing.len());
    if let Some(first) = missing.first() {
        bail!(
            "{} of {} files are not in {} (the first: {}); is it the unpacked set?",
            missing.len(),
            wanted.len(),
            from.display(),
            first.display()
        );
    }
    Ok(())
}

/// Every data file under `testdata`, by its path in there.
fn present(testdata: &Path) -> Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    let mut folders = vec![testdata.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let entries =
            fs::read_dir(&folder).with_context(|| format!("listing {}", folder.display()))?;
        for entry in entries {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let relative = path.strip_prefix(testdata)?.to_path_buf();
            // The set's tests come from elsewhere; texts about them are the project's own.
            let ours = relative.extension().is_some_and(|e| e == "md")
                || relative.file_name().is_some_and(|n| n == ".gitignore");
            if !ours && belongs_to_the_set(&relative) {
                found.insert(relative);
            }
        }
    }
    Ok(found)
}

/// Whether a file of `testdata` came with the set of models at all; other data has other makers.
fn belongs_to_the_set(relative: &Path) -> bool {
    ["models", "real", "quant-blocks", "tokenizers", "verification.json"]
        .iter()
        .any(|top| relative.starts_with(top))
}

/// Where the set keeps a file of `testdata`: it has its models at the top.
fn in_the_set(relative: &Path) -> &Path {
    relative.strip_prefix("models").unwrap_or(relative)
}

/// The models that an ignore list of lines like `/models/NAME/` names, as paths in `testdata`.
fn left_out(ignored: &str) -> impl Iterator<Item = PathBuf> {
    ignored
        .lines()
        .filter_map(|line| line.strip_prefix("/models/")?.strip_suffix('/'))
        .map(|name| Path::new("models").join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ignore_list_names_models_only() {
        let list = "# comment\n/models/llama-kq-q6_k/\n/other/\n/models/gemma3/\n";
        let names: Vec<PathBuf> = left_out(list).collect();
        assert_eq!(names, ["models/llama-kq-q6_k", "models/gemma3"].map(PathBuf::from));
    }

    #[test]
    fn models_lie_at_the_top_of_the_set_and_the_rest_where_it_is_here() {
        assert_eq!(in_the_set("models/qwen3/model.gguf".as_ref()), Path::new("qwen3/model.gguf"));
        assert_eq!(in_the_set("real/a.json".as_ref()), Path::new("real/a.json"));
    }

    #[test]
    fn a_copy_follows_its_source_and_a_wrong_source_is_an_error() -> Result<()> {
        let place = std::env::temp_dir().join(format!("fornax-fixtures-{}", std::process::id()));
        let (root, set) = (place.join("root"), place.join("set"));
        let write = |path: PathBuf, text: &str| -> Result<()> {
            fs::create_dir_all(path.parent().context("a file has a folder")?)?;
            Ok(fs::write(path, text)?)
        };
        write(root.join("testdata/models/a/model.gguf"), "old")?;
        write(root.join("testdata/README.md"), "words")?;
        write(root.join("testdata/.gitignore"), "/models/b/\n")?;
        for file in ["a/model.gguf", "a/expected.json", "b/model.gguf", "b/expected.json"] {
            write(set.join(file), file)?;
        }

        run(&root, &set, Extent::Kept)?;
        assert_eq!(fs::read_to_string(root.join("testdata/models/a/model.gguf"))?, "a/model.gguf");
        assert!(!root.join("testdata/models/b").exists());
        run(&root, &set, Extent::All)?;
        assert_eq!(
            fs::read_to_string(root.join("testdata/models/b/expected.json"))?,
            "b/expected.json"
        );
        assert_eq!(fs::read_to_string(root.join("testdata/README.md"))?, "words");

        let error = run(&root, &place, Extent::Kept).expect_err("nothing of the set is there");
        assert!(error.to_string().contains("is it the unpacked set?"), "{error}");
        fs::remove_dir_all(place)?;
        Ok(())
    }
}
