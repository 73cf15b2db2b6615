//! `fornax logits`: what the model thinks comes next, as numbers.

use std::fmt::Write;

use anyhow::{Result, bail};
use serde::Serialize;

use super::start::Started;
use crate::flags::high::Config;
use crate::flags::low::Logits;
use crate::output;

/// The one object of `--json`.
#[derive(Serialize)]
struct Report<'a> {
    positions: Vec<usize>,
    logits: Vec<&'a [f32]>,
}

/// Prints a line for each position: the position, a tab, and the logits with spaces between.
///
/// # Errors
/// When the model cannot run or has no such token.
pub(crate) fn logits(config: &Config, flags: &Logits) -> Result<()> {
    let started = Started::open(config, Some(&flags.model.model))?;
    let vocab = started.model.plan().hyper.vocab;
    if let Some(id) = flags.tokens.iter().find(|&&id| id >= vocab) {
        bail!("there is no token {id}; the vocabulary has {vocab}");
    }
    let mut session = started.session(config, flags.tokens.len())?;
    let rows = session.logits(&flags.tokens, flags.all)?;
    let first = if flags.all { 0 } else { flags.tokens.len() - 1 };
    let report = Report {
        positions: (first..flags.tokens.len()).collect(),
        logits: rows.chunks_exact(vocab as usize).collect(),
    };
    started.profile(config, &mut session, &flags.tokens, &[])?;
    if flags.json {
        if rows.iter().any(|l| !l.is_finite()) {
            // JSON has no such numbers; null would hide them.
            bail!("the model gave logits that are not finite");
        }
        return output::json(&report);
    }
    let mut text = String::new();
    for (position, row) in report.positions.iter().zip(&report.logits) {
        let _ = write!(text, "{position}\t");
        let row: Vec<String> = row.iter().map(f32::to_string).collect();
        let _ = writeln!(text, "{}", row.join(" "));
    }
    output::product(text.as_bytes())
}
