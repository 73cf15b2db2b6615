//! From a prompt's tokens to an answer's text, piece by piece, with the times it took.
//! Knows no command: who asks says where the pieces go and when to stop.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use anyhow::Result;
use fornax_engine::serve::Constraint;
use fornax_engine::{Event, Model, SampleParams, Session};
use fornax_text::{StopMatcher, StreamDecoder};

use crate::flags::high::{Config, Volume};
use crate::flags::low::Sampling;
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
    /// The whole sequence; what the session holds of it is not fed again.
    pub(crate) prompt: &'a [u32],
    /// At most so many new tokens.
    pub(crate) most: u32,
    pub(crate) sample: SampleParams,
    pub(crate) stops: &'a [String],
    /// Whether the answer goes on in the middle of a text, so that a space it begins with belongs to it.
    pub(crate) continues: bool,
    /// When the prompt was begun on another device, which handed it over; its tokens count as computed.
    pub(crate) begun: Option<Instant>,
}

/// What came of it.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) text: String,
    /// Without the token that ended it.
    pub(crate) ids: Vec<u32>,
    pub(crate) finish: Finish,
    /// Tokens of the prompt that were computed.
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
        (self.steps.count > 0).then(|| 1.0 / self.steps.mean_s().max(1e-9))
    }
}

/// How long each step of a generation took.
#[derive(Clone, Debug, Default)]
pub(crate) struct Steps {
    pub(crate) count: u32,
    sum: Duration,
    min: Option<Duration>,
    max: Duration,
}

impl Steps {
    fn add(&mut self, took: Duration) {
        self.count += 1;
        self.sum += took;
        self.min = Some(self.min.map_or(took, |m| m.min(took)));
        self.max = self.max.max(took);
    }

    pub(crate) fn mean_s(&self) -> f64 {
        self.sum.as_secs_f64() / f64::from(self.count.max(1))
    }

    pub(crate) fn min_ms(&self) -> f64 {
        self.min.unwrap_or_default().as_secs_f64() * 1e3
    }

    pub(crate) fn max_ms(&self) -> f64 {
        self.max.as_secs_f64() * 1e3
    }
}

/// Where an answer goes while it comes.
pub(crate) struct Listener<'a> {
    /// Takes each piece of certain text.
    pub(crate) piece: &'a mut dyn FnMut(&str) -> Result<()>,
    /// Asked after each token.
    pub(crate) cancelled: &'a dyn Fn() -> bool,
}

/// Generates until something ends it.
///
/// # Errors
/// When the prompt does not fit, the device fails, or `piece` does.
pub(crate) fn generate(
    config: &Config,
    session: &mut Session,
    model: &Model,
    request: &Request<'_>,
    listener: &mut Listener<'_>,
) -> Result<Answer> {
    generate_held(config, session, model, request, None, listener)
}

/// As [`generate`], held to a constraint if there is one.
///
/// # Errors
/// As [`generate`]; when nothing that is allowed can follow.
pub(crate) fn generate_held(
    config: &Config,
    session: &mut Session,
    model: &Model,
    request: &Request<'_>,
    constraint: Option<&mut dyn Constraint>,
    listener: &mut Listener<'_>,
) -> Result<Answer> {
    // What a grammar asks for is the text itself, a space at its start included.
    let decoder = if request.continues || constraint.is_some() {
        StreamDecoder::continuing
    } else {
        StreamDecoder::new
    };
    let mut writer = Writer {
        config,
        model,
        decoder: decoder(model.tokenizer().clone(), true),
        stops: StopMatcher::new(request.stops),
        text: String::new(),
        ids: Vec::new(),
        cached: 0,
        first: None,
        steps: Steps::default(),
        last: request.begun.unwrap_or_else(Instant::now),
        prompt: request.prompt.len(),
        handed: request.begun.is_some(),
    };
    let mut ended = Ok(None);
    let engine = fornax_engine::Request {
        prompt: request.prompt,
        sample: request.sample,
        max_new: request.most,
        stop: model.tokenizer().ends_of_generation(),
        sampler: None,
        logprobs: config.volume == Volume::Verbose,
    };
    let report = |event| {
        ended = writer.take(event, listener);
        if matches!(ended, Ok(None)) { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    };
    let finish = match constraint {
        None => session.generate(&engine, report)?,
        Some(constraint) => session.generate_held(&engine, constraint, report)?,
    };
    let finish = ended?.unwrap_or(match finish {
        fornax_engine::Finish::Stop => Finish::Stop,
        fornax_engine::Finish::Length => Finish::Length,
    });
    writer.finish(finish, listener)
}

/// What is known of an answer while it comes.
struct Writer<'a> {
    config: &'a Config,
    model: &'a Model,
    decoder: StreamDecoder,
    stops: StopMatcher,
    text: String,
    ids: Vec<u32>,
    cached: usize,
    first: Option<Duration>,
    steps: Steps,
    /// When the last event came, or the whole began.
    last: Instant,
    prompt: usize,
    /// Whether another device computed what is cached.
    handed: bool,
}

impl Writer<'_> {
    /// Takes one event; tells why the answer is to end.
    fn take(&mut self, event: Event, listener: &mut Listener<'_>) -> Result<Option<Finish>> {
        let (token, logprob) = match event {
            Event::Started { cached } => {
                self.cached = if self.handed { 0 } else { cached as usize };
                return Ok(None);
            }
            Event::Token { token, logprob } => (token, logprob),
        };
        let now = Instant::now();
        let took = now - self.last;
        self.last = now;
        self.log(token, logprob, took);
        match self.first {
            None => self.first = Some(took),
            Some(_) => self.steps.add(took),
        }
        self.ids.push(token);
        let certain = self.stops.push(self.decoder.push(token));
        let stopped = certain.stopped;
        show(&mut self.text, certain.text, listener)?;
        if stopped {
            return Ok(Some(Finish::Stop));
        }
        Ok((listener.cancelled)().then_some(Finish::Cancelled))
    }

    fn finish(mut self, finish: Finish, listener: &mut Listener<'_>) -> Result<Answer> {
        // Where the first choice ended the answer, no token was reported.
        let first = self.first.unwrap_or_else(|| self.last.elapsed());
        let certain = self.stops.push(self.decoder.finish());
        show(&mut self.text, certain.text, listener)?;
        show(&mut self.text, self.stops.finish(), listener)?;
        Ok(Answer {
            text: self.text,
            ids: self.ids,
            finish,
            prompt_tokens: self.prompt - self.cached,
            first_s: first.as_secs_f64(),
            steps: self.steps,
        })
    }

    /// One line for one step, under `--verbose`.
    fn log(&self, token: u32, logprob: f32, took: Duration) {
        if self.config.volume < Volume::Verbose {
            return;
        }
        let (phase, rows) = match self.first {
            None => ("prefill", self.prompt - self.cached),
            Some(_) => ("decode", 1),
        };
        let line = format!(
            "{phase:<7} {rows:>4} rows {:>8.2} ms  position {:>5}  token {token:>6} {:?}  p {:.4}",
            took.as_secs_f64() * 1e3,
            self.prompt + self.ids.len(),
            self.model.tokenizer().piece(token),
            logprob.exp()
        );
        output::detail(self.config, &line);
    }
}

fn show(all: &mut String, text: &str, listener: &mut Listener<'_>) -> Result<()> {
    if text.is_empty() {
        return Ok(());
    }
    all.push_str(text);
    (listener.piece)(text)
}

/// The flags as the engine takes them; without a seed, one of the clock's.
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
