//! `fornax run`: one prompt, one answer.

use std::io::IsTerminal;
use std::time::Instant;

use anyhow::Result;
use fornax_engine::Session;
use fornax_engine::constrain::Constrainer;
use fornax_engine::serve::Constraint;
use serde::Serialize;

use super::start::{self, Started, chat_tokens, conclude, message};
use crate::answer::{self, Answer, Listener, Request};
use crate::devices::Opened;
use crate::flags::high::Config;
use crate::flags::low::{DeviceName, Run};
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
    #[serde(skip_serializing_if = "Option::is_none")]
    step_report: Option<serde_json::Value>,
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
    if prompt.is_empty() {
        return Err(super::Usage("there is nothing to answer: the prompt is empty".into()).into());
    }
    let grammar = flags.held.grammar()?;
    let split = Split::of(config, flags)?;
    let config = &config.on(flags.decode_device.unwrap_or(config.device));
    let started = Started::open(config, flags.model.model.as_deref())?;
    let model = &started.model;
    let mut constraint = match &grammar {
        Some(grammar) => Some(Constrainer::new(model.tokenizer()).compile(grammar)?.start()),
        None => None,
    };
    let tokens = if flags.raw {
        model.encode(&prompt)
    } else {
        let system = flags.system.iter().map(|s| message("system", s));
        chat_tokens(model, &system.chain([message("user", &prompt)]).collect::<Vec<_>>())?
    };
    let context = started.context(flags.ctx, flags.n.map(|n| tokens.len() + n as usize));
    let mut session = started.session(config, context)?;
    let limit = started.announce(config)?;
    let begun = match split {
        Some(split) => split.prefill(&started, &mut session, &tokens, context)?,
        None => None,
    };
    let request = Request {
        prompt: &tokens,
        most: flags.n.unwrap_or(u32::MAX),
        sample: answer::sample_params(&flags.sampling),
        stops: &flags.stop,
        continues: flags.raw,
        begun,
    };
    let stream = !flags.json;
    let mut listener = Listener {
        piece: &mut |piece| if stream { output::product(piece.as_bytes()) } else { Ok(()) },
        cancelled: &|| false,
    };
    let held = constraint.as_mut().map(|c| &mut **c as &mut dyn Constraint);
    let answer = answer::generate_held(config, &mut session, model, &request, held, &mut listener)?;
    if stream && std::io::stdout().is_terminal() {
        output::product(b"\n")?;
    }
    let rate = limit.zip(answer.tokens_per_s());
    let percent = rate.map(|(limit, rate)| limit.percent(started.bytes(), 1.0 / rate));
    conclude(config, &answer, percent);
    start::timing(config, &session);
    started.profile(config, &mut session, &tokens, &answer.ids)?;
    if flags.step_report && !flags.json {
        let text = super::count::text(&super::count::of(&session)?);
        text.lines().for_each(|line| output::note(config, line));
    }
    if !flags.json {
        return Ok(());
    }
    let counted = flags.step_report.then(|| super::count::of(&session)).transpose()?;
    let step_report = counted.as_ref().map(super::count::json);
    output::json(&Report { step_report, ..report(&answer, percent) })
}

/// The prompt on one device, the answer on another.
struct Split {
    config: Config,
    opened: Opened,
}

impl Split {
    /// `None` where one device does both.
    ///
    /// # Errors
    /// When the device of the prompt is not there.
    fn of(config: &Config, flags: &Run) -> Result<Option<Split>> {
        let prefill = flags.prefill_device.unwrap_or(config.device);
        if prefill == flags.decode_device.unwrap_or(config.device) {
            return Ok(None);
        }
        let config = config.on(prefill);
        Ok(Some(Split { opened: Opened::new(&config)?, config }))
    }

    /// Computes all of the prompt but its last token, whose logits the other session needs, and hands it over. Tells
    /// when that began; `None` where the other session is to compute all of it: a prompt of one token, or a GPU of
    /// `auto` that is the same one or refuses the model.
    ///
    /// # Errors
    /// When the prompt does not fit, the model cannot run there, or a device cannot hand over.
    fn prefill(
        &self,
        started: &Started,
        to: &mut Session,
        tokens: &[u32],
        context: usize,
    ) -> Result<Option<Instant>> {
        let info = self.opened.device().info();
        let Some((_, first)) = tokens.split_last().filter(|(_, first)| !first.is_empty()) else {
            return Ok(None);
        };
        if info.kind == started.device().info().kind {
            // `auto` is what the answer runs on anyway.
            return Ok(None);
        }
        let options = start::options(&self.config, &self.opened, context);
        let mut session = match started.session_on(&self.opened, &self.config, &options) {
            Ok(session) => session,
            Err(refused) if self.config.device == DeviceName::Auto => {
                let line = format!(
                    "the prompt runs where the answer does instead of on the GPU: {}",
                    start::causes(&refused)
                );
                output::note(&self.config, &line);
                return Ok(None);
            }
            Err(refused) => return Err(refused),
        };
        output::note(&self.config, &format!("the prompt runs on {} {}", info.kind, info.tier));
        let begun = Instant::now();
        session.prefill(first)?;
        session.hand_over(to)?;
        Ok(Some(begun))
    }
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
        step_ms: (steps.count > 0).then(|| StepMs {
            min: steps.min_ms(),
            mean: steps.mean_s() * 1e3,
            max: steps.max_ms(),
        }),
        step_report: None,
    }
}

#[cfg(test)]
mod tests {
    use super::start::tests::{refusing, started};
    use super::*;

    #[test]
    fn a_prompt_whose_gpu_refuses_runs_with_the_answer_unless_it_was_named() {
        for (device, refused) in [(DeviceName::Auto, false), (DeviceName::Cuda, true)] {
            // The fallback of this one stands for a device of the answer.
            let (auto, started) = started("auto");
            let mut session = started.session(&auto, 16).unwrap();
            let config = auto.on(device);
            let split = Split { config, opened: refusing() };
            let begun = split.prefill(&started, &mut session, &[1, 2, 3], 16);
            assert_eq!(begun.is_err(), refused, "{device:?}");
            if let Ok(begun) = begun {
                assert_eq!(begun, None, "{device:?}");
            }
        }
    }
}
