//! Whether the ways to decode compute the same: `alike [SHAPE:TYPE[:DEPTH[:KV]]]...`, shapes of `pace`. Each way is given the same
//! prompt and then the same tokens one by one, once for their logits and once for the choices of one ticket; shapes of a few
//! layers are compared with the reference as well. Prints the largest difference of logits, as a share of one plus the
//! largest, and `N passed, N failed`. In models of many layers, random weights let a rounding edge of the first grow without
//! end: there, tapes may be as far from whole steps as the graph is.

#![allow(clippy::print_stdout, reason = "the report is the output")]

use std::process::ExitCode;

use fornax_cuda::CudaDevice;
use fornax_gguf::TensorType;
use fornax_plan::reference::ReferenceDevice;
use fornax_plan::{
    ActMode, BlockId, Device, KvType, Limits, Plan, SeqStep, SlotId, StepOutput, TokenId, Tokens,
    Want,
};

#[allow(dead_code, reason = "a program of its own")]
#[path = "pace.rs"]
mod pace;

/// Tokens that are decoded.
const MORE: u32 = 24;
/// How far logits may be apart in 8 bits.
const APART: f32 = 2e-2;

/// What a device gave: logits of every token, and the tokens and log-probabilities of a chain.
struct Given {
    logits: Vec<Vec<f32>>,
    chain: Vec<(TokenId, f32)>,
}

fn run(device: &dyn Device, plan: &Plan, depth: u32, kv_type: KvType) -> Result<Given, String> {
    let told = |e: fornax_plan::Error| e.to_string();
    let blocks = (depth + MORE + 1).div_ceil(device.info().kv_block) + 1;
    let limits = Limits {
        slots: 1,
        rows: depth.max(1),
        wanted: 1,
        kv_blocks: blocks,
        kv_type,
        act: Some(ActMode::Q8),
        ..Limits::default()
    };
    let mut program = device.prepare(plan, &limits).map_err(told)?;
    let table: Vec<BlockId> = (0..blocks).rev().map(BlockId).collect();
    let tables = vec![&table[..]; plan.kv.len()];
    let token = |i: u32| i.wrapping_mul(2_654_435_761) % plan.hyper.vocab;
    let mut out = StepOutput::default();
    let mut step = |tokens: &[TokenId], pos: u32, want: Want, max_new: u32| {
        let n = tokens.len() as u32;
        let step = SeqStep {
            slot: SlotId(0),
            tokens: Tokens::Host(tokens),
            pos,
            tables: &tables,
            wants: &[(n - 1..n, want)],
            sample: None,
            max_new,
            stop: &[],
        };
        let ticket = program.submit(&[step]).map_err(told)?;
        program.wait(ticket, &mut out).map_err(told)?;
        Ok::<_, String>(out.clone())
    };
    let prompt: Vec<TokenId> = (0..depth).map(token).collect();
    step(&prompt, 0, Want::Logits, 1)?;
    let mut logits = Vec::new();
    for i in 0..MORE {
        logits.push(step(&[token(depth + i)], depth + i, Want::Logits, 1)?.logits);
    }
    let chain = step(&[token(depth)], depth, Want::Token { logprob: true }, MORE)?;
    let chain = chain.tokens.iter().map(|t| (t.token, t.logprob)).collect();
    Ok(Given { logits, chain })
}

/// The largest difference, as a share of one plus the largest logit of its row, and the row.
fn apart(a: &Given, b: &Given) -> (f32, usize) {
    let mut worst = (0.0f32, 0);
    for (at, (a, b)) in a.logits.iter().zip(&b.logits).enumerate() {
        let scale = 1.0 + a.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        for (a, b) in a.iter().zip(b) {
            let off = (a - b).abs() / scale;
            if off.is_nan() || off > worst.0 {
                worst = (if off.is_nan() { f32::INFINITY } else { off }, at);
            }
        }
    }
    worst
}

/// Where two chains part, and by how much the first token that differs was behind; log-probabilities up to there.
fn parted(a: &Given, b: &Given) -> (usize, f32) {
    let same = a.chain.iter().zip(&b.chain).take_while(|(a, b)| a.0 == b.0).count();
    let off = |(a, b): (&(u32, f32), &(u32, f32))| (a.1 - b.1).abs();
    (same, a.chain.iter().zip(&b.chain).take(same).map(off).fold(0.0, f32::max))
}

fn one(text: &str) -> Result<(u32, u32), String> {
    let mut parts = text.split(':');
    let name = parts.next().unwrap_or_default();
    let ty = TensorType::parse(parts.next().unwrap_or("q8_0")).ok_or("no such type")?;
    let depth = parts.next().filter(|p| !p.is_empty()).map_or(Ok(100), str::parse);
    let depth: u32 = depth.map_err(|e| format!("{e}"))?;
    let kv_type = match parts.next() {
        Some("q8_0") => KvType::Q8_0,
        Some("f32") => KvType::F32,
        _ => KvType::F16,
    };
    let shape = pace::SHAPES.iter().find(|s| s.name == name).ok_or("no such shape")?;
    let plan = pace::plan(shape, &mut pace::Pool::new(ty)?);
    let told = |e: fornax_plan::Error| e.to_string();
    let way = |way: &str| {
        let device = CudaDevice::open(0).and_then(|d| d.with_driver(way)).map_err(told)?;
        run(&device, &plan, depth, kv_type)
    };
    let whole = way("persistent")?;
    let mut others =
        vec![("tape", way("tape")), ("tape again", way("tape")), ("graph", way("graph"))];
    // The wide ones would take it minutes.
    if ["few-64", "few-128"].contains(&shape.name) {
        others.push(("reference", run(&ReferenceDevice::default(), &plan, depth, kv_type)));
    }
    let (mut passed, mut failed) = (0, 0);
    let deep = !shape.name.starts_with("few");
    let graph = others.iter().find_map(|(n, g)| if *n == "graph" { g.as_ref().ok() } else { None });
    let most = graph.filter(|_| deep).map_or(APART, |g| apart(&whole, g).0.max(APART));
    for (name, given) in others {
        match given {
            Err(why) => {
                failed += 1;
                println!("FAIL  {text} {name}: {why}");
            }
            Ok(given) => {
                let ((off, at), (same, logprob)) = (apart(&whole, &given), parted(&whole, &given));
                let fine = off <= most && given.chain.len() == MORE as usize;
                if fine {
                    passed += 1
                } else {
                    failed += 1
                }
                println!(
                    "{}  {text} persistent and {name}: logits {off:.1e} apart (token {at}), {same} of {} tokens of a chain, log-probabilities {logprob:.1e}",
                    if fine { "ok  " } else { "FAIL" },
                    given.chain.len(),
                );
            }
        }
    }
    Ok((passed, failed))
}

fn main() -> ExitCode {
    let (mut passed, mut failed) = (0, 0);
    for text in std::env::args().skip(1) {
        match one(&text) {
            Ok((p, f)) => (passed, failed) = (passed + p, failed + f),
            Err(why) => {
                failed += 1;
                println!("FAIL  {text}: {why}");
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    if failed == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
