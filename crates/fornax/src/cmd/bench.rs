//! `fornax bench`: prompt and generation speed, repeated, with a checksum of everything that was generated.

use std::fs;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, bail};
use fornax_cpu::Stream;
use fornax_engine::{Event, Model, Request, SampleParams, Session};
use fornax_gguf::Gguf;
use serde::Serialize;
use serde_json::Value;

use super::against;
use super::start::Started;
use crate::devices::{Opened, ReadRate};
use crate::flags::high::Config;
use crate::flags::low::{Bench, Rival};
use crate::synth::Synthetic;
use crate::{machine, output};

/// The one object of `--json`.
#[derive(Serialize)]
struct Report {
    model: String,
    device: &'static str,
    tier: String,
    threads: u32,
    /// Prompt part; null where it was left out.
    pp: Option<Part>,
    /// Generation part; null where it was left out.
    tg: Option<Part>,
    /// FNV-1a of the generated ids of one repeat, in hexadecimal; all repeats agree.
    checksum: String,
    peak_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    step_report: Option<Value>,
}

/// Tokens a second.
#[derive(Serialize)]
struct Part {
    tokens: usize,
    depth: usize,
    median: f64,
    all: Vec<f64>,
    limit_percent: Option<f64>,
}

/// Prints a table or one JSON object.
///
/// # Errors
/// When the model cannot run, or repeats disagree.
pub(crate) fn bench(config: &Config, flags: &Bench) -> Result<()> {
    if let Some(url) = &flags.server.serve {
        return super::bench_serve::bench(flags, url);
    }
    if flags.against.is_none() && (!flags.batch.is_empty() || flags.trace.is_some()) {
        return super::bench_batch::bench(config, flags);
    }
    if flags.p == 0 && flags.n == 0 {
        return Err(super::Usage("there is nothing to measure: both -p and -n are 0".into()).into());
    }
    // Positions are 32 bits; the numbers are anybody's.
    let longest = flags.p.saturating_add(flags.n).max(flags.n.saturating_add(1));
    let context = flags.d.saturating_add(longest);
    if context > u32::MAX as usize {
        return Err(super::Usage(format!(
            "-d, -p and -n ask for {context} positions or more, expected at most {}",
            u32::MAX
        ))
        .into());
    }
    let started = start(config, flags)?;
    if let Some(Rival::LlamaCpp) = flags.against {
        return against::race(config, flags, &started, context);
    }
    if flags.step_report {
        return counted(config, flags, &started, context);
    }
    let limit = started.announce(config)?;
    // The buffer of that measurement, and the making of a synthetic model, are no part of running one.
    machine::forget_peak();
    let mut session = started.session(config, context)?;
    let mut run = Runner::new(&mut session, started.model.plan().hyper.vocab, flags.d);
    let (mut pp, mut tg) = (Vec::new(), Vec::new());
    let mut before: Option<Vec<u32>> = None;
    // The first round only warms caches and clocks.
    for round in 0..=flags.r {
        let pp_s = run.prompt(flags.p)?;
        let (tg_s, ids) = run.generate(flags.n)?;
        if before.as_ref().is_some_and(|before| *before != ids) {
            bail!("repeats generated different tokens: {before:?} and then {ids:?}");
        }
        before = Some(ids);
        if round > 0 {
            pp.push(flags.p as f64 / pp_s);
            tg.push(flags.n as f64 / tg_s);
        }
    }
    let peak_bytes = machine::peak_bytes();
    let share = run.share(flags.n, &started)?;
    let ids = before.unwrap_or_default();
    let prompt = run.tokens(flags.d + flags.p);
    let bytes = started.bytes();
    let info = started.device().info();
    let part = |all: Vec<f64>, tokens: usize, rows_per_read: usize| {
        (tokens > 0).then(|| Part::new(all, tokens, flags.d, limit, bytes, rows_per_read))
    };
    let report = Report {
        model: started.name.clone(),
        device: info.kind,
        tier: info.tier,
        threads: info.threads,
        // A prompt reads the weights once for many tokens: its share of the read rate says how far it is from
        // being bound by memory.
        pp: part(pp, flags.p, (info.step_rows as usize).min(flags.p)),
        tg: part(tg, flags.n, 1).map(|tg| Part { limit_percent: share, ..tg }),
        checksum: format!("{:016x}", checksum(&ids)),
        peak_bytes,
        step_report: None,
    };
    super::start::timing(config, &session);
    started.profile(config, &mut session, &prompt, &ids)?;
    if flags.json { output::json(&report) } else { output::product(report.text().as_bytes()) }
}

/// One decoded token at the depth, counted: nothing is timed, and what lies before it was never computed.
fn counted(config: &Config, flags: &Bench, started: &Started, context: usize) -> Result<()> {
    let mut session = started.session(config, context)?;
    let plan = started.model.plan();
    let run = Runner::new(&mut session, plan.hyper.vocab, flags.d);
    let (before, prompt) = (run.tokens(flags.d), run.tokens(flags.d + 1));
    if !before.is_empty() {
        session.pretend(plan, &before)?;
    }
    let mut ids = Vec::new();
    session.generate(&request(&prompt, 1), |event| {
        if let Event::Token { token, .. } = event {
            ids.push(token);
        }
        ControlFlow::Continue(())
    })?;
    let info = started.device().info();
    let counted = super::count::of(&session)?;
    let report = Report {
        model: started.name.clone(),
        device: info.kind,
        tier: info.tier,
        threads: info.threads,
        pp: None,
        tg: None,
        checksum: format!("{:016x}", checksum(&ids)),
        peak_bytes: machine::peak_bytes(),
        step_report: Some(super::count::json(&counted)),
    };
    if flags.json {
        return output::json(&report);
    }
    output::product(super::count::text(&counted).as_bytes())
}

fn start(config: &Config, flags: &Bench) -> Result<Started> {
    let Some(synthetic) = &flags.synthetic else {
        return Started::open(config, flags.model.model.as_deref());
    };
    if flags.against.is_some() {
        return Started::open(config, kept(config, synthetic)?.to_str());
    }
    let (model, name) = in_memory(synthetic)?;
    Ok(Started::new(Opened::new(config)?, model, name))
}

fn parsed(synthetic: &str) -> Result<Synthetic> {
    Synthetic::parse(synthetic).map_err(|e| super::usage(&e))
}

/// A synthetic model and its name.
///
/// # Errors
/// When nothing is called that.
pub(super) fn in_memory(synthetic: &str) -> Result<(Model, String)> {
    let synthetic = parsed(synthetic)?;
    let gguf = Gguf::from_bytes(synthetic.write(Vec::new())?)?;
    Ok((Model::from_gguf(gguf)?, synthetic.name()))
}

/// The synthetic model as a file in the cache folder, for an engine that reads nothing else.
fn kept(config: &Config, synthetic: &str) -> Result<PathBuf> {
    let synthetic = parsed(synthetic)?;
    let folder = config.home()?.join("synthetic");
    let path = folder.join(format!("{}.gguf", synthetic.name().replace(':', "-")));
    if !path.is_file() {
        fs::create_dir_all(&folder)?;
        super::synth::write(&synthetic, &path)?;
    }
    Ok(path)
}

/// Runs the parts on tokens of no meaning.
pub(super) struct Runner<'a> {
    session: &'a mut Session,
    vocab: u32,
    depth: usize,
}

/// Tokens, and as many passes of a read-only stream that took turns with them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Beside {
    pub(super) tokens: usize,
    pub(super) tokens_s: f64,
    /// Bytes of a pass.
    pub(super) pass: usize,
    pub(super) passes_s: f64,
}

impl Beside {
    /// Bytes of the stream a second.
    pub(super) fn rate(&self) -> f64 {
        (self.tokens * self.pass) as f64 / self.passes_s
    }

    /// The stream's time for the weights of a token, of so many bytes, over the token's.
    pub(super) fn share(&self, weights: u64) -> f64 {
        (self.tokens as u64 * weights) as f64 / self.tokens_s / self.rate()
    }
}

impl<'a> Runner<'a> {
    pub(super) fn new(session: &'a mut Session, vocab: u32, depth: usize) -> Runner<'a> {
        Runner { session, vocab, depth }
    }

    /// The first `n` tokens of an endless text that is the same everywhere.
    fn tokens(&self, n: usize) -> Vec<u32> {
        (0..n).map(|i| (i as u32).wrapping_mul(2_654_435_761) % self.vocab).collect()
    }

    /// Brings the sequence to the depth, untimed.
    fn dive(&mut self) -> Result<()> {
        if self.depth == 0 {
            self.session.reset();
            return Ok(());
        }
        let tokens = self.tokens(self.depth);
        Ok(self.session.prefill(&tokens)?)
    }

    /// Seconds for `n` prompt tokens, up to the choice of the token that follows.
    pub(super) fn prompt(&mut self, n: usize) -> Result<f64> {
        if n == 0 {
            return Ok(1.0);
        }
        self.dive()?;
        let tokens = self.tokens(self.depth + n);
        let begin = Instant::now();
        self.session.generate(&request(&tokens, 1), |_| ControlFlow::Continue(()))?;
        Ok(begin.elapsed().as_secs_f64())
    }

    /// How near `n` tokens come to a stream that takes turns with them, in percent; none where there is no such stream.
    fn share(&mut self, n: usize, started: &Started) -> Result<Option<f64>> {
        let bytes = started.bytes();
        let stream = if n > 0 { started.opened().stream(bytes)? } else { None };
        let Some(stream) = stream else { return Ok(None) };
        Ok(Some(100.0 * self.beside(n, &stream)?.share(bytes)))
    }

    /// `n` tokens one by one, and as many passes of `stream`, one after each of them: what else the machine does meets
    /// both alike.
    pub(super) fn beside(&mut self, n: usize, stream: &Stream) -> Result<Beside> {
        self.dive()?;
        let tokens = self.tokens(self.depth + n + 1);
        let mut beside = Beside { tokens: n, tokens_s: 0.0, pass: stream.bytes(), passes_s: 0.0 };
        for i in 0..=n {
            let begin = Instant::now();
            let so_far = request(&tokens[..=self.depth + i], 1);
            self.session.generate(&so_far, |_| ControlFlow::Continue(()))?;
            let token_s = begin.elapsed().as_secs_f64();
            let pass_s = stream.pass()?;
            if i > 0 {
                beside.tokens_s += token_s;
                beside.passes_s += pass_s;
            }
        }
        Ok(beside)
    }

    /// Seconds for `n` generated tokens, each from the one before, and their ids.
    pub(super) fn generate(&mut self, n: usize) -> Result<(f64, Vec<u32>)> {
        let mut ids = Vec::with_capacity(n);
        if n == 0 {
            return Ok((1.0, ids));
        }
        self.dive()?;
        let tokens = self.tokens(self.depth + 1);
        let (mut begin, mut end) = (None, Instant::now());
        self.session.generate(&request(&tokens, n as u32 + 1), |event| {
            if let Event::Token { token, .. } = event {
                end = Instant::now();
                match begin {
                    // The token after the prompt; the timed steps follow it.
                    None => begin = Some(end),
                    Some(_) => ids.push(token),
                }
            }
            ControlFlow::Continue(())
        })?;
        Ok((end.duration_since(begin.unwrap_or(end)).as_secs_f64(), ids))
    }
}

/// Greedy, and never ended by a token.
fn request(prompt: &[u32], max_new: u32) -> Request<'_> {
    Request {
        prompt,
        sample: SampleParams::default(),
        sampler: None,
        max_new,
        stop: &[],
        logprobs: false,
    }
}

/// FNV-1a (64 bits) of ids as little-endian bytes.
pub(super) fn checksum(ids: &[u32]) -> u64 {
    let bytes = ids.iter().flat_map(|id| id.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |sum, b| (sum ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

/// NaN of nothing.
pub(super) fn median(all: &[f64]) -> f64 {
    let mut sorted = all.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

impl Part {
    fn new(
        all: Vec<f64>,
        tokens: usize,
        depth: usize,
        limit: Option<ReadRate>,
        bytes: u64,
        rows_per_read: usize,
    ) -> Part {
        let median = median(&all);
        let limit_percent = limit.map(|l| l.percent(bytes, rows_per_read as f64 / median));
        Part { tokens, depth, median, all, limit_percent }
    }

    fn text(&self, name: &str) -> String {
        let low = self.all.iter().copied().fold(f64::INFINITY, f64::min);
        let high = self.all.iter().copied().fold(0.0, f64::max);
        let share =
            self.limit_percent.map_or(String::new(), |p| format!(", {p:.0}% of the read rate"));
        format!(
            "{name} {} tokens at depth {}: {:.2} tokens/s ({low:.2} to {high:.2}{share})\n",
            self.tokens, self.depth, self.median
        )
    }
}

impl Report {
    fn text(&self) -> String {
        let pp = self.pp.as_ref().map_or(String::new(), |p| p.text("prompt    "));
        let tg = self.tg.as_ref().map_or(String::new(), |p| p.text("generation"));
        let peak = self.peak_bytes.map_or("unknown".into(), super::pull::size);
        format!("{pp}{tg}peak memory {peak}, checksum {}\n", self.checksum)
    }
}
