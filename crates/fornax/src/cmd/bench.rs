//! `fornax bench`: prompt and generation speed, repeated, with a checksum of everything that was generated.

use std::time::Instant;

use anyhow::{Result, bail};
use fornax_gguf::Gguf;
use fornax_plan::SampleParams;
use serde::Serialize;

use super::start::Started;
use crate::flags::high::Config;
use crate::flags::low::Bench;
use crate::lane::Lane;
use crate::machine::{self, ReadRate};
use crate::model::Model;
use crate::synth::Synthetic;
use crate::{devices, output};

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
    if flags.p == 0 && flags.n == 0 {
        return Err(super::Usage("there is nothing to measure: both -p and -n are 0".into()).into());
    }
    let started = start(config, flags)?;
    let context = flags.d + flags.p.max(flags.n + 1);
    let mut lane = started.lane(config, context)?;
    let limit = started.announce(config, &lane.info);
    let run = Runner { vocab: started.model.plan.hyper.vocab, depth: flags.d };
    let (mut pp, mut tg) = (Vec::new(), Vec::new());
    let mut checksum: Option<u64> = None;
    // The first round only warms caches and clocks.
    for round in 0..=flags.r {
        let pp_s = run.prompt(&mut lane, flags.p)?;
        let (tg_s, sum) = run.generate(&mut lane, flags.n)?;
        if checksum.is_some_and(|before| before != sum) {
            bail!("repeats generated different tokens: {checksum:x?} and then {sum:x}");
        }
        checksum = Some(sum);
        if round > 0 {
            pp.push(flags.p as f64 / pp_s);
            tg.push(flags.n as f64 / tg_s);
        }
    }
    let bytes = started.model.plan.bytes_per_token();
    let part = |all: Vec<f64>, tokens: usize, rows_per_read: usize| {
        (tokens > 0).then(|| Part::new(all, tokens, flags.d, limit, bytes, rows_per_read))
    };
    let report = Report {
        model: started.model.name.clone(),
        device: lane.info.kind,
        tier: lane.info.tier.clone(),
        threads: lane.info.threads,
        // A prompt reads the weights once for many tokens: its share of the read rate says how far it is from
        // being bound by memory.
        pp: part(pp, flags.p, Lane::CHUNK.min(flags.p)),
        tg: part(tg, flags.n, 1),
        checksum: format!("{:016x}", checksum.unwrap_or_default()),
        peak_bytes: machine::peak_bytes(),
    };
    super::profile(config, &lane);
    if flags.json { output::json(&report) } else { output::product(report.text().as_bytes()) }
}

fn start(config: &Config, flags: &Bench) -> Result<Started> {
    let Some(synthetic) = &flags.synthetic else {
        return Started::open(config, flags.model.model.as_deref());
    };
    let synthetic = Synthetic::parse(synthetic).map_err(|e| super::usage(&e))?;
    let gguf = Gguf::from_bytes(synthetic.write(Vec::new())?)?;
    Ok(Started { device: devices::open(config)?, model: Model::of(gguf, synthetic.name())? })
}

/// Runs the parts on tokens of no meaning.
struct Runner {
    vocab: u32,
    depth: usize,
}

impl Runner {
    /// Token `i` of an endless text; the same everywhere.
    fn token(&self, i: usize) -> u32 {
        (i as u32).wrapping_mul(2_654_435_761) % self.vocab
    }

    fn tokens(&self, n: usize) -> Vec<u32> {
        (0..n).map(|i| self.token(i)).collect()
    }

    /// Brings the sequence to the depth, untimed.
    fn dive(&self, lane: &mut Lane) -> Result<()> {
        let have = lane.rewind(self.depth);
        lane.fill(&self.tokens(self.depth)[have..])
    }

    /// Seconds for `n` prompt tokens.
    fn prompt(&self, lane: &mut Lane, n: usize) -> Result<f64> {
        if n == 0 {
            return Ok(1.0);
        }
        self.dive(lane)?;
        let tokens = self.tokens(n);
        let begin = Instant::now();
        lane.prompt(&tokens, SampleParams::default(), false)?;
        Ok(begin.elapsed().as_secs_f64())
    }

    /// Seconds for `n` generated tokens, and the checksum of their ids.
    fn generate(&self, lane: &mut Lane, n: usize) -> Result<(f64, u64)> {
        let mut sum = 0xcbf2_9ce4_8422_2325_u64;
        if n == 0 {
            return Ok((1.0, sum));
        }
        self.dive(lane)?;
        lane.prompt(&[self.token(self.depth)], SampleParams::default(), false)?;
        let begin = Instant::now();
        for _ in 0..n {
            let token = lane.next(SampleParams::default(), false)?.token;
            for byte in token.to_le_bytes() {
                sum = (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
            }
        }
        Ok((begin.elapsed().as_secs_f64(), sum))
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
        let mut sorted = all.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 {
            sorted[middle]
        } else {
            (sorted[middle - 1] + sorted[middle]) / 2.0
        };
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
