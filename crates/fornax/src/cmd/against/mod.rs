//! `fornax bench --against`: the same file on fornax and on another engine, in turns within one sitting, and the receipt
//! of it. Knows how the other engine is asked (a line in, a line out), not how it computes.

mod peer;
mod receipt;

use anyhow::{Context, Result};

use self::peer::{Peer, Work};
use self::receipt::{Machine, Receipt, Side, Test};
use super::bench::Runner;
use super::start::Started;
use crate::flags::high::Config;
use crate::flags::low::Bench;
use crate::output;

/// Rounds in turns; the first one warms both sides and is not counted.
///
/// # Errors
/// When the other engine is not there, cannot load the model, or either side fails.
pub(super) fn race(
    config: &Config,
    flags: &Bench,
    started: &Started,
    context: usize,
) -> Result<()> {
    let work = Work { prompt: flags.p, generate: flags.n, depth: flags.d };
    let threads = started.device().info().threads;
    let mut session = started.session(config, context)?;
    let mut ours = Runner::new(&mut session, started.model.plan().hyper.vocab, flags.d);
    let file = started.path.as_deref().context("llama.cpp needs the model as a file")?;
    let mut peer = Peer::start(config, flags.peer_python.as_deref(), file, work, threads)?;
    let (mut prompt, mut generate, mut read) = (Side::default(), Side::default(), Vec::new());
    for round in 0..=flags.r {
        let rate = started.opened().read_rate(started.bytes())?;
        let seconds = (ours.prompt(flags.p)?, ours.generate(flags.n)?.0);
        let theirs = peer.round()?;
        if round == 0 {
            continue;
        }
        read.extend(rate.map(|r| r.bytes_per_s / 1e9));
        prompt.push(flags.p, seconds.0, theirs.prompt_s);
        generate.push(flags.n, seconds.1, theirs.generate_s);
    }
    let test = |name: &str, tokens: usize, side: Side| {
        (tokens > 0).then(|| Test::new(name, tokens, flags.d, side))
    };
    let receipt = Receipt {
        model: started.name.clone(),
        weight_bytes_per_token: started.bytes(),
        machine: Machine::here(),
        fornax: format!("fornax {} on {}", env!("CARGO_PKG_VERSION"), started.device().info().tier),
        peer: format!("llama.cpp of llama-cpp-python {}", peer.version()),
        threads,
        tests: [test("prompt", flags.p, prompt), test("generation", flags.n, generate)]
            .into_iter()
            .flatten()
            .collect(),
        read_gb_per_s: read,
        peak_bytes: crate::machine::peak_bytes(),
    };
    if let Some(path) = &flags.receipt {
        receipt.write(path)?;
    }
    if flags.json { output::json(&receipt) } else { output::product(receipt.text().as_bytes()) }
}
