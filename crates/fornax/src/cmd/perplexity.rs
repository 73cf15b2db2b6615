//! `fornax perplexity`: how well a model predicts a text, with the error of the measurement.
//! What is measured is the engine's; this reads the text and prints.

use std::fs;

use anyhow::{Context, Result, bail};
use fornax_plan::ActMode;
use fornax_text::EncodeOptions;
use serde::Serialize;

use super::start::Started;
use crate::flags::high::Config;
use crate::flags::low::Perplexity;
use crate::{devices, output};

const WINDOW_DEFAULT: usize = 512;

/// The one object of `--json`.
#[derive(Serialize)]
struct Report {
    perplexity: f64,
    standard_error: f64,
    /// That counted.
    tokens: usize,
    window: usize,
    device: &'static str,
    tier: String,
    act: &'static str,
}

/// Prints a line or one JSON object.
///
/// # Errors
/// When the text cannot be read or is too short, the window is longer than the model's context, or the model cannot
/// run.
pub(crate) fn perplexity(config: &Config, flags: &Perplexity) -> Result<()> {
    // Before a download: a file that is not there is known at once.
    let text = fs::read(&flags.text)
        .with_context(|| format!("could not read {}", flags.text.display()))?;
    let started = Started::open(config, flags.model.model.as_deref())?;
    let tokenizer = started.model.tokenizer();
    let tokens = tokenizer.encode_bytes(&text, EncodeOptions { special: false, bos: false });
    let first = tokenizer.bos().filter(|_| tokenizer.adds_bos());
    let lead = usize::from(first.is_some());
    let most = (started.model.plan().hyper.context as usize).saturating_sub(lead);
    let window = flags.window.unwrap_or(most.min(WINDOW_DEFAULT));
    if window > most {
        let line = format!("--window {window}: the model's context has room for at most {most}");
        return Err(super::Usage(line).into());
    }
    let mut session = started.session(config, window + lead)?;
    started.announce(config)?;
    let total = tokens.len();
    let found = fornax_engine::perplexity(&mut session, &tokens, window, first, |counted| {
        output::detail(config, &format!("{counted} of {total} tokens"));
    })?;
    if !found.value.is_finite() || !found.standard_error.is_finite() {
        bail!("the model gave probabilities that are not numbers: perplexity {}", found.value);
    }
    let info = started.device().info();
    let report = Report {
        perplexity: found.value,
        standard_error: found.standard_error,
        tokens: found.tokens,
        window,
        device: info.kind,
        tier: info.tier,
        act: match devices::act(config).unwrap_or(info.act) {
            ActMode::F32 => "f32",
            ActMode::Q8 => "q8",
        },
    };
    if flags.json { output::json(&report) } else { output::product(report.text().as_bytes()) }
}

impl Report {
    fn text(&self) -> String {
        format!(
            "perplexity {:.4} ± {:.4} over {} tokens in windows of {} on {} {} with {} activations\n",
            self.perplexity,
            self.standard_error,
            self.tokens,
            self.window,
            self.device,
            self.tier,
            self.act
        )
    }
}
