//! A note beside each model saying which bytes were checked, so that a start does not read the file again.
//! Knows files and digests; knows no network.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// What was true of the file when its digest was computed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Receipt {
    pub(crate) sha256: String,
    pub(crate) bytes: u64,
    /// Modification time in nanoseconds since 1970; a rename keeps it.
    mtime_ns: u64,
    /// Where the file came from, for people.
    pub(crate) source: String,
}

impl Receipt {
    /// Reads the whole file.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(crate) fn of(file: &Path, source: &str) -> Result<Receipt> {
        let (bytes, mtime_ns) = stamp(file)?;
        Ok(Receipt { sha256: sha256(file)?, bytes, mtime_ns, source: source.to_owned() })
    }

    /// The receipt of `file`, if there is one that can be read.
    pub(crate) fn load(file: &Path) -> Option<Receipt> {
        serde_json::from_slice(&fs::read(path(file)).ok()?).ok()
    }

    /// Whether `file` is still the one that was checked, by size and time.
    pub(crate) fn holds(&self, file: &Path) -> bool {
        stamp(file).is_ok_and(|(bytes, mtime_ns)| bytes == self.bytes && mtime_ns == self.mtime_ns)
    }

    /// Stores the receipt for `file`, whole or not at all.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub(crate) fn store(&self, file: &Path) -> Result<()> {
        let path = path(file);
        let fresh = path.with_extension("receipt.new");
        let text = serde_json::to_vec_pretty(self).context("could not write a receipt as JSON")?;
        let write = || -> std::io::Result<()> {
            let mut out = File::create(&fresh)?;
            out.write_all(&text)?;
            out.sync_all()?;
            fs::rename(&fresh, &path)
        };
        write().with_context(|| format!("could not write {}", path.display()))
    }

    /// Forgets that `file` was ever checked.
    pub(crate) fn remove(file: &Path) {
        let _ = fs::remove_file(path(file));
    }
}

fn path(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".receipt");
    PathBuf::from(name)
}

fn stamp(file: &Path) -> Result<(u64, u64)> {
    let look = || -> std::io::Result<(u64, u64)> {
        let meta = fs::metadata(file)?;
        let since = meta.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok((meta.len(), u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)))
    };
    look().with_context(|| format!("could not look at {}", file.display()))
}

/// The digest of a file's bytes in lowercase hexadecimal.
///
/// # Errors
/// When the file cannot be read.
pub(crate) fn sha256(file: &Path) -> Result<String> {
    let mut hasher = Sha256::new();
    let mut read = || -> std::io::Result<()> {
        let mut input = File::open(file)?;
        let mut buffer = vec![0_u8; 1 << 20];
        loop {
            match input.read(&mut buffer)? {
                0 => return Ok(()),
                n => hasher.update(&buffer[..n]),
            }
        }
    };
    read().with_context(|| format!("could not read {}", file.display()))?;
    Ok(hex(&hasher.finalize()))
}

/// Lowercase hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
