//! `fornax synth`: a synthetic model as a file.

use std::fs::{self, File};
use std::io::BufWriter;
use std::path::Path;

use anyhow::{Context, Result};

use super::pull::size;
use crate::flags::high::Config;
use crate::flags::low::Synth;
use crate::output;
use crate::synth::Synthetic;

/// Writes the file, whole or not at all.
///
/// # Errors
/// For an unknown shape or type, or when the file cannot be written.
pub(crate) fn synth(config: &Config, flags: &Synth) -> Result<()> {
    let synthetic = Synthetic::parse(&flags.what).map_err(|e| super::usage(&e))?;
    write(&synthetic, &flags.output)?;
    let bytes = fs::metadata(&flags.output)?.len();
    output::note(
        config,
        &format!("{}: {}, {}", flags.output.display(), synthetic.name(), size(bytes)),
    );
    Ok(())
}

/// Writes the model to a file of that name.
///
/// # Errors
/// When the file cannot be written.
pub(super) fn write(synthetic: &Synthetic, path: &Path) -> Result<()> {
    super::whole_file(path, |part| {
        let file = File::create(part)?;
        let out = synthetic.write(BufWriter::with_capacity(4 << 20, file))?;
        out.into_inner().map_err(|e| e.into_error())?.sync_all()?;
        Ok(())
    })
    .with_context(|| format!("could not write {}", path.display()))
}
