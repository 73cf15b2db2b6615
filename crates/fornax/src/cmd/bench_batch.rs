//! `fornax bench --batch` and `--trace`: many requests at once through the engine, with a checksum of everything that
//! each number of them generated. Prompts are tokens of no meaning, the same everywhere.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use fornax_engine::Model;
use fornax_engine::serve::{Engine, EngineHandle, Generation, ServeOptions, Update};
use serde::{Deserialize, Serialize};

use super::bench::{checksum, in_memory};
use super::pull::size;
use super::start;
use crate::devices::{self, Opened};
use crate::flags::high::Config;
use crate::flags::low::Bench;
use crate::{machine, output};

/// The one object of `--json`.
#[derive(Serialize)]
struct Report {
    model: String,
    device: &'static str,
    tier: String,
    threads: u32,
    runs: Vec<Run>,
    /// Whether a request got the same ids beside any number of others.
    same: bool,
    peak_bytes: Option<u64>,
}

/// One number of requests at once, or one trace.
#[derive(Serialize)]
struct Run {
    batch: usize,
    requests: usize,
    prompt_tokens: usize,
    generated_tokens: usize,
    /// All generated tokens by all the time, the best of the repeats.
    total_tok_s: f64,
    /// Generated tokens by the time in which every request decodes.
    decode_tok_s: Option<f64>,
    /// A request's tokens after its first by its own time, the median.
    request_tok_s: f64,
    ms_per_step: f64,
    steps: u64,
    /// From submission to the first token, milliseconds.
    ttft_p50_ms: f64,
    ttft_max_ms: f64,
    /// The longest that any request waited between two tokens, milliseconds.
    worst_gap_ms: f64,
    /// Prompt tokens that the cache had.
    prefix_hits: u64,
    preemptions: u64,
    drafted: u64,
    accepted: u64,
    kv_blocks_peak: u32,
    kv_blocks_total: u32,
    /// FNV-1a of all ids that the first round generated, request after request, in hexadecimal.
    checksum: String,
}

/// One line of a trace.
#[derive(Clone, Copy, Deserialize)]
struct Arrival {
    prompt_len: usize,
    gen_len: u32,
    /// Steps of the engine before it arrives; less than a line before counts as that line's.
    arrival_step: u64,
}

/// What one request saw.
struct Seen {
    sent: Instant,
    ids: Vec<u32>,
    at: Vec<Instant>,
}

/// Prints a table or one JSON object.
///
/// # Errors
/// When the model cannot run or a request fails.
pub(crate) fn bench(config: &Config, flags: &Bench) -> Result<()> {
    let opened = Opened::new(config)?;
    let (model, name) = load(config, flags)?;
    let jobs: Vec<(usize, Vec<Arrival>)> = match &flags.trace {
        Some(path) => vec![(flags.batch.first().copied().unwrap_or(32), trace(path)?)],
        None => {
            let one = at_once(flags)?;
            flags.batch.iter().map(|n| (*n, vec![one; *n])).collect()
        }
    };
    let info = opened.device().info();
    let mut runs = Vec::new();
    let mut answers: Vec<Vec<u32>> = Vec::new();
    let mut same = true;
    machine::forget_peak();
    for (batch, arrivals) in &jobs {
        let (run, ids) = repeat(config, &opened, &model, *batch, arrivals, flags)?;
        if !flags.json {
            output::note(config, &format!("{batch} at once: {:.1} tokens/s", run.total_tok_s));
        }
        same &= ids.iter().zip(&answers).all(|(a, b)| a == b);
        if ids.len() > answers.len() {
            answers = ids;
        }
        runs.push(run);
    }
    let report = Report {
        model: name,
        device: info.kind,
        tier: info.tier,
        threads: info.threads,
        runs,
        same,
        peak_bytes: machine::peak_bytes(),
    };
    if flags.json { output::json(&report) } else { output::product(report.text().as_bytes()) }
}

fn load(config: &Config, flags: &Bench) -> Result<(Arc<Model>, String)> {
    if let Some(synthetic) = &flags.synthetic {
        let (model, name) = in_memory(synthetic)?;
        return Ok((Arc::new(model), name));
    }
    let (path, model) = start::load(config, flags.model.model.as_deref())?;
    Ok((Arc::new(model), start::called(&path)))
}

fn at_once(flags: &Bench) -> Result<Arrival> {
    if flags.p == 0 || flags.n == 0 {
        return Err(super::Usage(
            "requests need a prompt and an answer: -p and -n of 1 or more".into(),
        )
        .into());
    }
    let gen_len = u32::try_from(flags.n).unwrap_or(u32::MAX - 1);
    Ok(Arrival { prompt_len: flags.p, gen_len, arrival_step: 0 })
}

fn trace(path: &Path) -> Result<Vec<Arrival>> {
    let text =
        fs::read_to_string(path).with_context(|| format!("could not read {}", path.display()))?;
    let mut all = Vec::new();
    for (ix, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
        let arrival: Arrival = serde_json::from_str(line)
            .with_context(|| format!("{}, line {}", path.display(), ix + 1))?;
        if arrival.prompt_len == 0 {
            bail!("{}, line {}: prompt_len is 0, expected 1 or more", path.display(), ix + 1);
        }
        all.push(arrival);
    }
    if all.is_empty() {
        bail!("{} has no line", path.display());
    }
    Ok(all)
}

/// Runs requests of the same lengths several times and keeps the fastest round, and the ids of the first; other tokens
/// each time, so that nothing comes from the time before.
fn repeat(
    config: &Config,
    opened: &Opened,
    model: &Arc<Model>,
    batch: usize,
    arrivals: &[Arrival],
    flags: &Bench,
) -> Result<(Run, Vec<Vec<u32>>)> {
    let engine = engine(config, opened, model, batch, arrivals, !flags.no_speculation)?;
    let mut best: Option<Run> = None;
    let mut first: Vec<Vec<u32>> = Vec::new();
    for round in 0..flags.r {
        let before = engine.stats();
        let begin = Instant::now();
        let seen = play(&engine, arrivals, round as u32)?;
        let took = begin.elapsed().as_secs_f64();
        let run = Run::new(batch, arrivals, &seen, took, &before, &engine);
        if round == 0 {
            first = seen.into_iter().map(|s| s.ids).collect();
        }
        if best.as_ref().is_none_or(|b| run.total_tok_s > b.total_tok_s) {
            best = Some(run);
        }
    }
    engine.shutdown(Duration::ZERO);
    let run = best.context("no round was asked for")?;
    Ok((Run { checksum: format!("{:016x}", checksum(&first.concat())), ..run }, first))
}

/// Requests that decode in step, for a race.
pub(super) struct Together {
    engine: EngineHandle,
    arrivals: Vec<Arrival>,
    rounds: u32,
}

impl Together {
    /// So many sequences of a prompt and an answer of these lengths; nothing is guessed ahead.
    ///
    /// # Errors
    /// When the model cannot run.
    pub(super) fn new(
        config: &Config,
        opened: &Opened,
        model: Model,
        sequences: usize,
        (prompt_len, gen_len): (usize, u32),
    ) -> Result<Together> {
        let arrivals = vec![Arrival { prompt_len, gen_len, arrival_step: 0 }; sequences];
        let engine = engine(config, opened, &Arc::new(model), sequences, &arrivals, false)?;
        Ok(Together { engine, arrivals, rounds: 0 })
    }

    /// Tokens a second of all of them while all decode.
    ///
    /// # Errors
    /// When a request fails, or is over before the last has begun.
    pub(super) fn round(&mut self) -> Result<f64> {
        let seen = play(&self.engine, &self.arrivals, self.rounds)?;
        self.rounds += 1;
        decode_rate(&seen).context("there was no time in which all sequences decoded")
    }
}

/// An engine for so many of these requests at once.
fn engine(
    config: &Config,
    opened: &Opened,
    model: &Arc<Model>,
    batch: usize,
    arrivals: &[Arrival],
    speculate: bool,
) -> Result<EngineHandle> {
    let longest = arrivals.iter().map(|a| a.prompt_len.saturating_add(a.gen_len as usize)).max();
    let context = u32::try_from(longest.unwrap_or(1))
        .context("a request of more than 32 bits of positions")?;
    let other = opened.laid_out(config, context)?;
    let device = other.as_ref().unwrap_or(opened).device();
    let options = ServeOptions {
        max_running: batch,
        max_queue: arrivals.len(),
        context,
        kv_type: opened.kv_type(config),
        act: devices::act(config),
        speculate,
        deterministic: config.deterministic,
        ..ServeOptions::default()
    };
    Ok(Engine::start(model.clone(), device, options)?)
}

/// The prompt of a request: no two of one round begin alike, and none as in another round.
fn prompt(len: usize, request: usize, round: u32, vocab: u32) -> Vec<u32> {
    let salt = (request as u32)
        .wrapping_mul(7919)
        .wrapping_add(round.wrapping_mul(104_729))
        .wrapping_add(1);
    (0..len as u32)
        .map(|i| (i.wrapping_add(salt)).wrapping_mul(2_654_435_761).rotate_left(9) % vocab)
        .collect()
}

/// Submits every request when its time has come and waits for all of them.
fn play(engine: &EngineHandle, arrivals: &[Arrival], round: u32) -> Result<Vec<Seen>> {
    let vocab = engine.model().plan().hyper.vocab;
    let from = engine.stats().steps;
    let mut open: Vec<(Instant, Receiver<(Instant, Update)>)> = Vec::new();
    for (ix, arrival) in arrivals.iter().enumerate() {
        loop {
            let stats = engine.stats();
            // Where nothing runs no step will ever come: then it is time.
            let idle = stats.running + stats.waiting == 0 && ended(&open);
            if stats.steps - from >= arrival.arrival_step || idle {
                break;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        let (tx, rx): (Sender<(Instant, Update)>, _) = channel();
        let publish = Box::new(move |update| match tx.send((Instant::now(), update)) {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        });
        let g = Generation::new(prompt(arrival.prompt_len, ix, round, vocab), arrival.gen_len);
        open.push((Instant::now(), rx));
        engine.submit(g, publish).with_context(|| format!("request {ix}"))?;
    }
    open.into_iter().map(|(sent, rx)| hear(sent, &rx)).collect()
}

/// Whether every request so far has been let in: an engine that has not looked yet is not idle.
fn ended(open: &[(Instant, Receiver<(Instant, Update)>)]) -> bool {
    open.last().is_none_or(|(sent, _)| sent.elapsed() > Duration::from_millis(50))
}

fn hear(sent: Instant, updates: &Receiver<(Instant, Update)>) -> Result<Seen> {
    let mut seen = Seen { sent, ids: Vec::new(), at: Vec::new() };
    while let Ok((at, update)) = updates.recv() {
        match update {
            Update::Tokens(tokens) => {
                seen.at.extend(tokens.iter().map(|_| at));
                seen.ids.extend(tokens.iter().map(|t| t.id));
            }
            Update::Failed(e) => return Err(e.into()),
            Update::Done(_) => return Ok(seen),
            Update::Started { .. } | Update::Prompt(_) => {}
        }
    }
    bail!("the engine ended before a request did")
}

fn middle(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(0.0)
}

impl Run {
    fn new(
        batch: usize,
        arrivals: &[Arrival],
        seen: &[Seen],
        took: f64,
        before: &fornax_engine::serve::Stats,
        engine: &EngineHandle,
    ) -> Run {
        let after = engine.stats();
        let generated: usize = seen.iter().map(|s| s.ids.len()).sum();
        let steps = after.steps - before.steps;
        let ttft: Vec<f64> = seen
            .iter()
            .filter_map(|s| s.at.first().map(|at| at.duration_since(s.sent).as_secs_f64() * 1e3))
            .collect();
        let gaps =
            seen.iter().flat_map(|s| s.at.windows(2).map(|w| (w[1] - w[0]).as_secs_f64() * 1e3));
        let own = |s: &Seen| {
            let span = s.at.last()?.duration_since(*s.at.first()?).as_secs_f64();
            (span > 0.0).then(|| (s.ids.len() - 1) as f64 / span)
        };
        Run {
            batch,
            requests: arrivals.len(),
            prompt_tokens: arrivals.iter().map(|a| a.prompt_len).sum(),
            generated_tokens: generated,
            total_tok_s: generated as f64 / took,
            decode_tok_s: decode_rate(seen),
            request_tok_s: middle(seen.iter().filter_map(own).collect()),
            ms_per_step: took * 1e3 / steps.max(1) as f64,
            steps,
            ttft_max_ms: ttft.iter().copied().fold(0.0, f64::max),
            ttft_p50_ms: middle(ttft),
            worst_gap_ms: gaps.fold(0.0, f64::max),
            prefix_hits: after.prefix_hits - before.prefix_hits,
            preemptions: after.preemptions - before.preemptions,
            drafted: after.drafted - before.drafted,
            accepted: after.accepted - before.accepted,
            kv_blocks_peak: after.kv_blocks_peak,
            kv_blocks_total: after.kv_blocks_total,
            checksum: String::new(),
        }
    }
}

/// Tokens a second between the last request's first token and the first request's last.
fn decode_rate(seen: &[Seen]) -> Option<f64> {
    let from = seen.iter().filter_map(|s| s.at.first()).max()?;
    let to = seen.iter().filter_map(|s| s.at.last()).min()?;
    let span = to.checked_duration_since(*from)?.as_secs_f64();
    let tokens = seen.iter().flat_map(|s| &s.at).filter(|at| *at > from && *at <= to).count();
    (span > 0.0).then(|| tokens as f64 / span)
}

impl Report {
    fn text(&self) -> String {
        let mut text = String::from(
            "batch  total tok/s  decode  each  ms/step  first p50/max ms  worst gap ms  cached  blocks  checksum\n",
        );
        for r in &self.runs {
            let decode = r.decode_tok_s.map_or("-".into(), |d| format!("{d:.1}"));
            text.push_str(&format!(
                "{:>5}  {:>11.1}  {decode:>6}  {:>4.0}  {:>7.2}  {:>7.0} {:>8.0}  {:>12.0}  {:>6}  {:>3}/{:<3} {}\n",
                r.batch,
                r.total_tok_s,
                r.request_tok_s,
                r.ms_per_step,
                r.ttft_p50_ms,
                r.ttft_max_ms,
                r.worst_gap_ms,
                r.prefix_hits,
                r.kv_blocks_peak,
                r.kv_blocks_total,
                r.checksum
            ));
        }
        let peak = self.peak_bytes.map_or("unknown".into(), size);
        let same = if self.same {
            "the same ids whatever runs beside a request"
        } else {
            "ids differ between batches"
        };
        text.push_str(&format!("{same}; peak memory {peak}\n"));
        text
    }
}
