//! `fornax run`: one prompt, one answer.

use std::io::IsTerminal;

use anyhow::Result;
use serde::Serialize;

use super::start::Started;
use crate::answer::{self, Answer, Listener, Request};
use crate::flags::high::Config;
use crate::flags::low::Run;
use crate::model::message;
use crate::output;

/// The one object of `--json`.
#[derive(Serialize)]
struct Report<'a> {
    text: &'a str,
    ids: &'a [u32],
    prompt_tokens: usize,
    finish: &'static str,
    ttft_ms: f64,
    pp_tok_s: f64,
    /// Null where one token was all.
    tg_tok_s: Option<f64>,
    limit_percent: Option<f64>,
    step_ms: Option<StepMs>,
}

#[derive(Serialize)]
struct StepMs {
    min: f64,
    mean: f64,
    max: f64,
}

/// Streams the answer to stdout.
///
/// # Errors
/// When the model cannot be had or run, or the prompt does not fit.
pub(crate) fn run(config: &Config, flags: &Run) -> Result<()> {
    let prompt = match &flags.prompt {
        Some(prompt) => prompt.clone(),
        None => output::stdin_text("PROMPT")?.trim_end_matches(['\r', '\n']).to_owned(),
    };
    let started = Started::open(config, flags.model.model.as_deref())?;
    let text = started.model.text()?;
    let tokens = if flags.raw {
        text.raw(&prompt)
    } else {
        let system = flags.system.iter().map(|s| message("system", s));
        text.chat(&system.chain([message("user", &prompt)]).collect::<Vec<_>>())?
    };
    let context = started.context(flags.ctx, flags.n.map(|n| tokens.len() + n as usize));
    let mut lane = started.lane(config, context)?;
    let limit = started.announce(config, &lane.info);
    let request = Request {
        prompt: &tokens,
        most: flags.n.map_or(usize::MAX, |n| n as usize),
        sample: answer::sample_params(&flags.sampling),
        stops: &flags.stop,
    };
    let stream = !flags.json;
    let mut listener = Listener {
        piece: &mut |piece| if stream { output::product(piece.as_bytes()) } else { Ok(()) },
        cancelled: &|| false,
    };
    let answer = answer::generate(config, &mut lane, &text, &request, &mut listener)?;
    if stream && std::io::stdout().is_terminal() {
        output::product(b"\n")?;
    }
    let percent = limit
        .zip(answer.tokens_per_s())
        .map(|(limit, rate)| limit.percent(started.model.plan.bytes_per_token(), 1.0 / rate));
    super::start::conclude(config, &answer, percent);
    super::profile(config, &lane);
    if flags.json { output::json(&report(&answer, percent)) } else { Ok(()) }
}

fn report(answer: &Answer, limit_percent: Option<f64>) -> Report<'_> {
    let steps = &answer.steps;
    Report {
        text: &answer.text,
        ids: &answer.ids,
        prompt_tokens: answer.prompt_tokens,
        finish: answer.finish.name(),
        ttft_ms: answer.first_s * 1e3,
        pp_tok_s: answer.prompt_tokens_per_s(),
        tg_tok_s: answer.tokens_per_s(),
        limit_percent,
        step_ms: (steps.count() > 0).then(|| StepMs {
            min: steps.min_ms(),
            mean: steps.mean_s() * 1e3,
            max: steps.max_ms(),
        }),
    }
}
