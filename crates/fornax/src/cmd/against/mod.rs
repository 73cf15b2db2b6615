//! `fornax bench --against`: the same file on fornax and on another engine, in turns within one sitting, and the receipt
//! of it. Knows how the other engine is asked (a line in, a line out), not how it computes.

mod peer;
mod receipt;

use anyhow::{Context, Result};
use fornax_plan::{KvType, Op, Plan};

use self::peer::{Peer, Together, Work};
use self::receipt::{Machine, Reading, Receipt, Side, Test};
use super::bench::Runner;
use super::bench_batch;
use super::start::{self, Started};
use crate::flags::high::Config;
use crate::flags::low::Bench;
use crate::output;

/// Tokens of a round, at most, that are set against passes of a read-only stream.
const BESIDE: usize = 32;

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
    let batch =
        flags.batch.first().map(|&sequences| Together { sequences, prompt: 16, generate: 32 });
    let work = Work { prompt: flags.p, generate: flags.n, depth: flags.d, batch };
    let threads = started.device().info().threads;
    let mut session = started.session(config, context)?;
    let mut ours = Runner::new(&mut session, started.model.plan().hyper.vocab, flags.d);
    let file = started.path.as_deref().context("llama.cpp needs the model as a file")?;
    let mut peer = Peer::start(config, flags.peer_python.as_deref(), file, work, threads)?;
    let mut many = match batch {
        None => None,
        Some(b) => {
            let model = start::load(config, file.to_str())?.1;
            // Long enough that the first of them is still at it when the last begins.
            let (n, lengths) = (b.sequences, (b.prompt, 3 * b.generate as u32));
            Some(bench_batch::Together::new(config, started.opened(), model, n, lengths)?)
        }
    };
    let (mut prompt, mut generate, mut together) = <(Side, Side, Side)>::default();
    let (mut reading, mut vnni, mut amx) = <(Reading, Vec<f64>, Vec<f64>)>::default();
    let (mut stream, mut peak_bytes) = (None, None);
    for round in 0..=flags.r {
        let ops = started.opened().op_rates()?;
        let seconds = (ours.prompt(flags.p)?, ours.generate(flags.n)?.0);
        let beside = stream.as_ref().map(|s| ours.beside(flags.n.min(BESIDE), s)).transpose()?;
        let decoded = many.as_mut().map(bench_batch::Together::round).transpose()?;
        let theirs = peer.round()?;
        if round == 0 {
            // The stream's buffer is none of the engine's memory.
            peak_bytes = crate::machine::peak_bytes();
            if flags.n > 0 {
                stream = started.opened().stream(started.bytes())?;
            }
            continue;
        }
        if let Some(beside) = beside {
            reading.push(started.bytes(), beside);
        }
        vnni.extend(ops.vnni.map(|rate| rate / 1e12));
        amx.extend(ops.amx.map(|rate| rate / 1e12));
        prompt.push(flags.p, seconds.0, theirs.prompt_s);
        generate.push(flags.n, seconds.1, theirs.generate_s);
        if let (Some(b), Some(rate)) = (batch, decoded) {
            let tokens = b.sequences * b.generate;
            together.push(tokens, tokens as f64 / rate, theirs.batch_s);
        }
    }
    let kv = (started.opened().kv_type(config) == KvType::Q8_0).then_some("q8_0");
    let test = |name: &str, tokens: usize, depth: usize, side: Side| {
        (tokens > 0).then(|| Test::new(name, tokens, depth, side).with_kv(kv))
    };
    let together = batch
        .and_then(|b| Some(test("decoding", b.generate, 0, together)?.of_sequences(b.sequences)));
    let receipt = Receipt {
        model: started.name.clone(),
        weight_bytes_per_token: started.bytes(),
        machine: Machine::here(),
        fornax: format!("fornax {} on {}", env!("CARGO_PKG_VERSION"), started.device().info().tier),
        peer: format!("llama.cpp of llama-cpp-python {}", peer.version()),
        threads,
        tests: [
            test("prompt", flags.p, flags.d, prompt),
            test("generation", flags.n, flags.d, generate),
            together,
        ]
        .into_iter()
        .flatten()
        .collect(),
        read_from_cache: started.opened().cache_resident(started.bytes()),
        reading,
        ops_per_prompt_token: ops_per_prompt_token(started.model.plan()),
        vnni_tops: vnni,
        amx_tops: amx,
        peak_bytes,
    };
    if let Some(path) = &flags.receipt {
        receipt.write(path)?;
    }
    if flags.json { output::json(&receipt) } else { output::product(receipt.text().as_bytes()) }
}

/// Multiplications and additions with weights that a prompt token costs: those of the head are not among them, since it
/// is wanted of the last token alone.
fn ops_per_prompt_token(plan: &Plan) -> f64 {
    let of = |op: &Op| {
        let times = match *op {
            Op::Logits { .. } => 0,
            Op::MoeMlp { ids, .. } => plan.width(ids),
            _ => 1,
        };
        let matrices = op.linears();
        let weights = matrices.iter().map(|l| &plan.weights[l.weight.ix()]);
        let each: f64 = weights.map(|w| f64::from(w.rows) * f64::from(w.cols)).sum();
        2.0 * f64::from(times) * each
    };
    plan.ops.iter().map(of).sum()
}
