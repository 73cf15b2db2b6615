//! `fornax logits`: what the model thinks comes next, as numbers.

use std::fmt::Write;

use anyhow::{Result, bail};
use serde::Serialize;

use crate::flags::high::Config;
use crate::flags::low::Logits;
use crate::lane::{Lane, Room};
use crate::model::{self, Model};
use crate::{devices, output};

/// The one object of `--json`.
#[derive(Serialize)]
struct Report {
    positions: Vec<usize>,
    logits: Vec<Vec<f32>>,
}

/// Prints a line for each position: the position, a tab, and the logits with spaces between.
///
/// # Errors
/// When the model cannot run or has no such token.
pub(crate) fn logits(config: &Config, flags: &Logits) -> Result<()> {
    let model = Model::open(&model::file(config, Some(&flags.model.model))?)?;
    let vocab = model.plan.hyper.vocab;
    if let Some(id) = flags.tokens.iter().find(|&&id| id >= vocab) {
        bail!("there is no token {id}; the vocabulary has {vocab}");
    }
    let device = devices::open(config)?;
    let room = Room {
        context: flags.tokens.len(),
        wanted: if flags.all { flags.tokens.len() } else { 1 },
        kv: devices::kv_type(config, &*device),
        act: None,
        profile: config.profile,
    };
    let mut lane = Lane::prepare(&*device, &model.plan, room)?;
    let mut report = Report { positions: Vec::new(), logits: Vec::new() };
    lane.logits(&flags.tokens, flags.all, |position, row| {
        report.positions.push(position);
        report.logits.push(row.to_vec());
        Ok(())
    })?;
    super::profile(config, &lane);
    if flags.json {
        if report.logits.iter().flatten().any(|l| !l.is_finite()) {
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
