//! From a prompt's tokens to an answer's text, piece by piece, with the times it took.
//! Knows no command: who asks says where the pieces go and when to stop.

use std::time::Instant;

use anyhow::{Result, bail};
use fornax_plan::{SampleParams, TokenOut};
use fornax_text::{StopMatcher, StreamDecoder};

use crate::flags::high::{Config, Volume};
use crate::flags::low::Sampling;
use crate::lane::{Lane, Steps};
use crate::model::Text;
use crate::output;

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    /// The model ended it, or a stop string came.
    Stop,
    /// The asked number of tokens, or the end of the context.
    Length,
    /// The user had enough.
    Cancelled,
}

impl Finish {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::Cancelled => "cancelled",
        }
    }
}

/// What to generate.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    /// Tokens that are fed now.
    pub(crate) prompt: &'a [u32],
    /// At most so many new tokens.
    pub(crate) most: usize,
    pub(crate) sample: SampleParams,
    pub(crate) stops: &'a [String],
}

/// What came of it.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) text: String,
    /// Without the token that ended it.
    pub(crate) ids: Vec<u32>,
    pub(crate) finish: Finish,
    pub(crate) prompt_tokens: usize,
    /// From the request to its first token.
    pub(crate) first_s: f64,
    /// The steps after the first token.
    pub(crate) steps: Steps,
}

impl Answer {
    pub(crate) fn prompt_tokens_per_s(&self) -> f64 {
        self.prompt_tokens as f64 / self.first_s.max(1e-9)
    }

    /// Of the steps after the first token; none where there was only one.
    pub(crate) fn tokens_per_s(&self) -> Option<f64> {
        (self.steps.count() > 0).then(|| 1.0 / self.steps.mean_s().max(1e-9))
    }
}

/// Where an answer goes while it comes.
pub(crate) struct Listener<'a> {
    /// Takes each piece of certain text.
    pub(crate) piece: &'a mut dyn FnMut(&str) -> Result<()>,
    /// Asked before each step.
    pub(crate) cancelled: &'a dyn Fn() -> bool,
}

/// Generates until something ends it.
///
/// # Errors
/// When the prompt does not fit, the device fails, or `piece` does.
pub(crate) fn generate(
    config: &Config,
    lane: &mut Lane,
    text: &Text,
    request: &Request<'_>,
    listener: &mut Listener<'_>,
) -> Result<Answer> {
    let n = request.prompt.len();
    if n == 0 {
        bail!("there is nothing to answer: the prompt has no tokens");
    }
    if n > lane.left() {
        let room = lane.left();
        bail!("the prompt has {n} tokens and the context has room for {room}; give a larger --ctx");
    }
    let mut reader = Reader {
        decoder: StreamDecoder::new(text.tokenizer.clone(), true),
        stops: StopMatcher::new(request.stops),
        text: String::new(),
    };
    let logprob = config.volume == Volume::Verbose;
    let mut ids = Vec::new();
    let mut steps = Steps::default();
    let begin = Instant::now();
    let mut token = lane.prompt(request.prompt, request.sample, logprob)?;
    let first_s = begin.elapsed().as_secs_f64();
    log(config, text, "prefill", n, &token, first_s);
    let finish = loop {
        if request.most == 0 {
            break Finish::Length;
        }
        if text.tokenizer.is_end_of_generation(token.token) {
            break Finish::Stop;
        }
        ids.push(token.token);
        if reader.push(token.token, listener.piece)? {
            break Finish::Stop;
        }
        if ids.len() >= request.most || lane.left() == 0 {
            break Finish::Length;
        }
        if (listener.cancelled)() {
            break Finish::Cancelled;
        }
        let before = steps.clone();
        token = steps.time(|| lane.next(request.sample, logprob))?;
        let took =
            steps.mean_s() * f64::from(steps.count()) - before.mean_s() * f64::from(before.count());
        log(config, text, "decode", 1, &token, took);
    };
    reader.finish(listener.piece)?;
    Ok(Answer { text: reader.text, ids, finish, prompt_tokens: n, first_s, steps })
}

/// Tokens to text that can be shown.
struct Reader {
    decoder: StreamDecoder,
    stops: StopMatcher,
    text: String,
}

impl Reader {
    /// True if a stop string has come.
    fn push(&mut self, token: u32, piece: &mut dyn FnMut(&str) -> Result<()>) -> Result<bool> {
        let certain = self.stops.push(self.decoder.push(token));
        let stopped = certain.stopped;
        show(&mut self.text, certain.text, piece)?;
        Ok(stopped)
    }

    fn finish(&mut self, piece: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
        let certain = self.stops.push(self.decoder.finish());
        show(&mut self.text, certain.text, piece)?;
        show(&mut self.text, self.stops.finish(), piece)
    }
}

fn show(all: &mut String, text: &str, piece: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
    if text.is_empty() {
        return Ok(());
    }
    all.push_str(text);
    piece(text)
}

/// One line for one step, under `--verbose`.
fn log(config: &Config, text: &Text, phase: &str, rows: usize, token: &TokenOut, seconds: f64) {
    if config.volume == Volume::Verbose {
        let line = format!(
            "{phase:<7} {rows:>4} rows {:>8.2} ms  position {:>5}  token {:>6} {:?}  p {:.4}",
            seconds * 1e3,
            token.pos,
            token.token,
            text.tokenizer.piece(token.token),
            token.logprob.exp()
        );
        output::detail(config, &line);
    }
}

/// The flags as the boundary takes them; without a seed, one of the clock's.
pub(crate) fn sample_params(flags: &Sampling) -> SampleParams {
    let clock = || {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(0, |d| d.as_nanos() as u64)
    };
    SampleParams {
        temperature: flags.temp,
        top_k: flags.top_k,
        top_p: flags.top_p,
        min_p: flags.min_p,
        seed: flags.seed.unwrap_or_else(clock),
        ..SampleParams::default()
    }
}
