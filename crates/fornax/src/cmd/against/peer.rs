//! The other engine as a process: one line on its stdin asks for a round, one line of JSON answers.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::flags::high::Config;

/// The driver, given to Python as it is.
const DRIVER: &str = include_str!("peer.py");

/// What one round does; a part of size 0 is left out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    pub(super) prompt: usize,
    pub(super) generate: usize,
    pub(super) depth: usize,
    /// Sequences of the part that decodes many at once, their prompts' tokens and what each generates.
    pub(super) batch: Option<Together>,
}

/// Sequences that decode in step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Together {
    pub(super) sequences: usize,
    pub(super) prompt: usize,
    pub(super) generate: usize,
}

/// Seconds of each part.
#[derive(Debug, Deserialize)]
pub(super) struct Round {
    pub(super) prompt_s: Option<f64>,
    pub(super) generate_s: Option<f64>,
    /// For as many steps as each sequence generates tokens.
    pub(super) batch_s: Option<f64>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Line<T> {
    Failed { error: String },
    Told(T),
}

#[derive(Deserialize)]
struct Hello {
    version: String,
}

/// A loaded model in the other engine. Dropping it ends the process.
pub(super) struct Peer {
    child: Child,
    asks: ChildStdin,
    answers: BufReader<ChildStdout>,
    version: String,
}

impl Peer {
    /// # Errors
    /// When there is no such Python, or the engine is not installed there, or it cannot load the model.
    pub(super) fn start(
        config: &Config,
        python: Option<&Path>,
        model: &Path,
        work: Work,
        threads: u32,
    ) -> Result<Peer> {
        let python = match python {
            Some(python) => python.to_owned(),
            None => usual_python(config)?,
        };
        let batch = work.batch.map_or([0; 3], |b| [b.sequences, b.prompt, b.generate]);
        let numbers =
            [work.prompt, work.generate, work.depth, threads as usize].into_iter().chain(batch);
        let mut child = Command::new(&python)
            .args(["-c", DRIVER])
            .arg(model)
            .args(numbers.map(|n| n.to_string()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| missing(&python))?;
        let (Some(asks), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("no pipes to {}", python.display());
        };
        let mut peer =
            Peer { child, asks, answers: BufReader::new(answers), version: String::new() };
        let hello: Hello = peer.line().with_context(|| missing(&python))?;
        peer.version = hello.version;
        Ok(peer)
    }

    pub(super) fn version(&self) -> &str {
        &self.version
    }

    /// # Errors
    /// When the engine fails or ends.
    pub(super) fn round(&mut self) -> Result<Round> {
        self.asks.write_all(b"\n").context("llama.cpp ended")?;
        self.line().context("llama.cpp ran no round")
    }

    fn line<T: for<'a> Deserialize<'a>>(&mut self) -> Result<T> {
        let mut text = String::new();
        if self.answers.read_line(&mut text)? == 0 {
            bail!("the process ended without an answer; its complaint is above");
        }
        match serde_json::from_str(&text).with_context(|| format!("not an answer: {text:?}"))? {
            Line::Told(told) => Ok(told),
            Line::Failed { error } => bail!("{error}"),
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It holds a model's memory and nothing that could be lost.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Where `scripts/peer.sh` puts it.
fn usual_python(config: &Config) -> Result<PathBuf> {
    Ok(config.home()?.join("peer").join("bin").join("python"))
}

fn missing(python: &Path) -> String {
    format!(
        "llama.cpp could not be started by {}; scripts/peer.sh builds it there, or name another Python that has \
         llama-cpp-python with --peer-python",
        python.display()
    )
}
