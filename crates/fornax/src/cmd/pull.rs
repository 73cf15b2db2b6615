//! `fornax pull` and `fornax list`: the model cache from the command line.
//! Knows nothing of what is inside a model.

use std::fmt::Write;

use anyhow::Result;

use crate::flags::high::Config;
use crate::flags::low::Pull;
use crate::output;
use crate::store::{Store, alias};

/// Brings a model and prints where it is.
///
/// # Errors
/// When nothing is called that or no source could give it.
pub(crate) fn pull(config: &Config, flags: &Pull) -> Result<()> {
    let file = Store::open(config)?.pull(&flags.what)?;
    output::product(format!("{}\n", file.display()).as_bytes())
}

/// Prints what is in the cache and what could be.
///
/// # Errors
/// When there is no place for a cache.
pub(crate) fn list(config: &Config) -> Result<()> {
    let store = Store::open(config)?;
    let entries = store.entries();
    let mut text = String::new();
    for alias in alias::ALIASES {
        let here = entries.iter().any(|e| e.name == alias.file);
        let state = if here { "here" } else { "not pulled" };
        let _ = writeln!(
            text,
            "{:<28} {:>9}  {:<10}  {}",
            alias.name,
            size(alias.bytes),
            state,
            alias.licence
        );
    }
    for entry in entries.iter().filter(|e| alias::ALIASES.iter().all(|a| a.file != e.name)) {
        let name = entry.path.display();
        let _ = writeln!(
            text,
            "{:<28} {:>9}  {:<10}  {}",
            entry.source,
            size(entry.bytes),
            "here",
            name
        );
    }
    output::note(config, &format!("models in {}", store.folder().display()));
    output::product(text.as_bytes())
}

/// Bytes in decimal units, three digits.
pub(crate) fn size(bytes: u64) -> String {
    let bytes = bytes as f64;
    match bytes {
        1e9.. => format!("{:.2} GB", bytes / 1e9),
        1e6.. => format!("{:.1} MB", bytes / 1e6),
        _ => format!("{:.1} kB", bytes / 1e3),
    }
}
