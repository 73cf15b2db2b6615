//! The receipt of a race: every repeat of both sides, so that whoever doubts a ratio can compute it again.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde::Serialize;

use crate::cmd::bench::{Beside, median};
use crate::machine;

/// Everything that was measured and on what.
#[derive(Debug, Serialize)]
pub(super) struct Receipt {
    pub(super) model: String,
    pub(super) weight_bytes_per_token: u64,
    pub(super) machine: Machine,
    pub(super) fornax: String,
    pub(super) peer: String,
    pub(super) threads: u32,
    pub(super) tests: Vec<Test>,
    #[serde(flatten)]
    pub(super) reading: Reading,
    /// The buffer fits the last-level cache, so that the rate is the cache's.
    pub(super) read_from_cache: bool,
    /// Multiplications and additions with weights that one prompt token costs.
    pub(super) ops_per_prompt_token: f64,
    /// What the same threads multiply and add of 8-bit integers in registers, 10¹² a second, before each round; empty
    /// where the processor has no such instructions.
    pub(super) vnni_tops: Vec<f64>,
    pub(super) amx_tops: Vec<f64>,
    /// Of the fornax process, the buffer of that stream included.
    pub(super) peak_bytes: Option<u64>,
}

/// A read-only stream over a buffer of the weights' size by the same threads, by round.
#[derive(Debug, Default, Serialize)]
pub(super) struct Reading {
    read_gb_per_s: Vec<f64>,
    /// What tokens take of that, a pass after each of them.
    read_share: Vec<f64>,
}

impl Reading {
    /// A round, whose tokens have `weights` bytes each.
    pub(super) fn push(&mut self, weights: u64, beside: Beside) {
        self.read_gb_per_s.push(beside.rate() / 1e9);
        self.read_share.push(beside.share(weights));
    }
}

#[derive(Debug, Serialize)]
pub(super) struct Machine {
    processor: String,
    cores: usize,
    unix_time_s: u64,
}

/// One part, both sides.
#[derive(Debug, Serialize)]
pub(super) struct Test {
    name: String,
    tokens: usize,
    depth: usize,
    /// Sequences that take a token in each step.
    sequences: usize,
    /// How fornax keeps keys and values where that is not f16, which the other side always has.
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_type: Option<&'static str>,
    /// Tokens a second of all sequences, in the order of the rounds.
    fornax: Vec<f64>,
    peer: Vec<f64>,
    fornax_median: f64,
    peer_median: f64,
    ratio: f64,
}

/// Rates of one part as they come.
#[derive(Debug, Default)]
pub(super) struct Side {
    ours: Vec<f64>,
    theirs: Vec<f64>,
}

impl Side {
    pub(super) fn push(&mut self, tokens: usize, ours_s: f64, theirs_s: Option<f64>) {
        self.ours.push(tokens as f64 / ours_s);
        self.theirs.extend(theirs_s.map(|s| tokens as f64 / s));
    }
}

impl Machine {
    pub(super) fn here() -> Machine {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Machine {
            processor: machine::processor(),
            cores: machine::cores(),
            unix_time_s: now.map_or(0, |d| d.as_secs()),
        }
    }
}

impl Test {
    pub(super) fn new(name: &str, tokens: usize, depth: usize, side: Side) -> Test {
        let (fornax_median, peer_median) = (median(&side.ours), median(&side.theirs));
        Test {
            name: name.to_owned(),
            tokens,
            depth,
            sequences: 1,
            kv_type: None,
            fornax_median,
            peer_median,
            ratio: fornax_median / peer_median,
            fornax: side.ours,
            peer: side.theirs,
        }
    }

    /// The same of so many sequences at once.
    pub(super) fn of_sequences(self, sequences: usize) -> Test {
        Test { sequences, ..self }
    }

    /// The same with fornax's keys and values kept in that way.
    pub(super) fn with_kv(self, kv_type: Option<&'static str>) -> Test {
        Test { kv_type, ..self }
    }

    fn text(&self) -> String {
        let spread = |all: &[f64]| {
            let low = all.iter().copied().fold(f64::INFINITY, f64::min);
            format!("{low:.1} to {:.1}", all.iter().copied().fold(0.0, f64::max))
        };
        let name = match self.sequences {
            1 => format!("{} {}", self.name, self.tokens),
            n => format!("{} {n} x {}", self.name, self.tokens),
        };
        format!(
            "{name:<16} {:>10.1} {:>10.1} {:>7.2}   {}; {}\n",
            self.fornax_median,
            self.peer_median,
            self.ratio,
            spread(&self.fornax),
            spread(&self.peer)
        )
    }
}

impl Receipt {
    /// # Errors
    /// When the file cannot be written.
    pub(super) fn write(&self, path: &Path) -> Result<()> {
        let mut text = serde_json::to_vec_pretty(self)?;
        text.push(b'\n');
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        super::super::whole_file(path, |part| Ok(fs::File::create(part)?.write_all(&text)?))
            .with_context(|| format!("could not write {}", path.display()))
    }

    pub(super) fn text(&self) -> String {
        let mut text = format!(
            "{}, {} threads of {}\n{} against {}\n",
            self.model, self.threads, self.machine.processor, self.fornax, self.peer
        );
        text += &format!(
            "{:<16} {:>10} {:>10} {:>7}   spread of tokens/s\n",
            "", "fornax", "llama.cpp", "ratio"
        );
        for test in &self.tests {
            text += &test.text();
        }
        let Reading { read_gb_per_s, read_share } = &self.reading;
        if !read_gb_per_s.is_empty() {
            let all: Vec<String> = read_share.iter().map(|s| format!("{:.0}", 100.0 * s)).collect();
            text += &format!(
                "a buffer of the weights' size is read at {:.1} GB/s{} between tokens; these reach {:.0} % of it ({})\n",
                median(read_gb_per_s),
                if self.read_from_cache { " from the last-level cache" } else { "" },
                100.0 * median(read_share),
                all.join(", ")
            );
        }
        for (name, tops) in [("VNNI", &self.vnni_tops), ("AMX", &self.amx_tops)] {
            if let (false, Some(prompt)) =
                (tops.is_empty(), self.tests.iter().find(|t| t.name == "prompt"))
            {
                let rate = median(tops);
                let share = prompt.fornax_median * self.ops_per_prompt_token / rate / 1e10;
                text += &format!(
                    "{name} multiplies and adds {rate:.2} TOPS in registers; the prompt is {share:.0} % of it\n"
                );
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_the_stream_is_that_of_its_time() {
        let mut reading = Reading::default();
        // 4 passes of 2 GB in 2 s; 4 tokens of 1 GB in 1.25 s.
        let beside = Beside { tokens: 4, tokens_s: 1.25, pass: 2_000_000_000, passes_s: 2.0 };
        reading.push(1_000_000_000, beside);
        assert_eq!((reading.read_gb_per_s, reading.read_share), (vec![4.0], vec![0.8]));
    }

    #[test]
    fn a_ratio_is_of_medians_and_every_repeat_is_kept() {
        let mut side = Side::default();
        for (ours, theirs) in [(1.0, 2.0), (2.0, 2.0), (4.0, 8.0)] {
            side.push(8, ours, Some(theirs));
        }
        let test = Test::new("prompt", 8, 0, side);
        assert_eq!((test.fornax_median, test.peer_median, test.ratio), (4.0, 4.0, 1.0));
        assert_eq!(test.fornax, [8.0, 4.0, 2.0]);
        assert_eq!(test.peer, [4.0, 4.0, 1.0]);
    }
}
