//! The test models on the GPU: logits and greedy tokens against those of an independent
//! implementation, for every family whose plan the device takes. The first argument names the
//! folder of models (`testdata/models` where there is none). Prints `N passed,
//! N refused, N failed`.

#![allow(clippy::print_stdout, reason = "the report is the output")]

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use fornax_cuda::CudaDevice;
use fornax_engine::arch;
use fornax_gguf::Gguf;
use fornax_plan::reference::{Jitter, ReferenceDevice};
use fornax_plan::{
    ActMode, BlockId, Device, KvType, Limits, Plan, SeqStep, SlotId, StepOutput, TokenId, Tokens,
    Want,
};
use serde_json::Value;

/// Largest difference of a logit, as a share of one plus the largest expected one: f32 sums in
/// another order were 1.4e-6 apart at most on an H200.
const LOGITS: f32 = 1e-5;

fn ints(v: &Value) -> Vec<u32> {
    v.as_array().into_iter().flatten().filter_map(|x| Some(x.as_u64()? as u32)).collect()
}

fn floats(v: &Value) -> Vec<f32> {
    v.as_array().into_iter().flatten().filter_map(|x| Some(x.as_f64()? as f32)).collect()
}

/// Largest difference from the reference with 8-bit activations: a value on a rounding edge may fall to either side.
const ROUNDED: f32 = 2e-2;

/// Logits of a whole sequence, row by row, and where asked the tokens of a chain behind it.
fn run(
    device: &dyn Device,
    plan: &Plan,
    limits: &Limits,
    tokens: &[TokenId],
    more: u32,
) -> Result<(Vec<f32>, Vec<TokenId>), String> {
    let told = |e: fornax_plan::Error| e.to_string();
    let n = tokens.len() as u32;
    let mut program = device.prepare(plan, limits).map_err(told)?;
    let table: Vec<BlockId> = (0..limits.kv_blocks).rev().map(BlockId).collect();
    let tables = vec![&table[..]; plan.kv.len()];
    let every = [(0..n, Want::Logits)];
    let step = SeqStep {
        slot: SlotId(0),
        tokens: Tokens::Host(tokens),
        pos: 0,
        tables: &tables,
        wants: &every,
        sample: None,
        max_new: 1,
        stop: &[],
    };
    let mut out = StepOutput::default();
    let ticket = program.submit(std::slice::from_ref(&step)).map_err(told)?;
    program.wait(ticket, &mut out).map_err(told)?;
    let logits = std::mem::take(&mut out.logits);
    let mut chosen = Vec::new();
    if more > 0 {
        let last = [(n - 1..n, Want::Token { logprob: true })];
        let step = SeqStep { wants: &last, max_new: more, ..step };
        let ticket = program.submit(&[step]).map_err(told)?;
        program.wait(ticket, &mut out).map_err(told)?;
        if let Some(t) = out.tokens.iter().find(|t| t.logprob.is_nan() || t.logprob > 0.0) {
            return Err(format!("log-probability {} of a chosen token", t.logprob));
        }
        chosen.extend(out.tokens.iter().map(|t| t.token));
    }
    Ok((logits, chosen))
}

/// How much noise explains a rounding edge, as a share of a block's largest magnitude (f32 sums in two orders, and
/// reciprocals that are right to two units in the last place), how many noises are tried, and how near the logits must
/// be then.
const JITTER: f32 = 3e-7;
const TRIES: u64 = 256;
const MATCHED: f32 = 1e-4;

/// True where the reference gives these logits, row after row, once its activations are shaken by rounding noise: what
/// the CPU's tests ask of differences above the bound, too.
fn on_rounding_edges(
    have: &[f32],
    plan: &Plan,
    limits: &Limits,
    tokens: &[TokenId],
) -> Result<bool, String> {
    let vocab = plan.hyper.vocab as usize;
    let mut seeds = vec![0; tokens.len()];
    let mut from = 0;
    for _ in 0..TRIES {
        let jitter = Some(Jitter { seeds: seeds.clone(), size: JITTER });
        let device = ReferenceDevice { jitter, ..Default::default() };
        let (near, _) = run(&device, plan, limits, tokens, 0)?;
        let off = |(w, h): (&[f32], &[f32])| {
            let scale = 1.0 + w.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            w.iter().zip(h).any(|(w, h)| (w - h).abs().is_nan() || (w - h).abs() / scale > MATCHED)
        };
        let rows = near.chunks(vocab).zip(have.chunks(vocab));
        let Some(row) = rows.into_iter().position(off) else { return Ok(true) };
        // Rows before it are matched: their noise stays.
        from = from.max(row);
        seeds[from..].iter_mut().for_each(|s| *s += 1);
    }
    Ok(false)
}

/// Largest difference that the edges of an F16 cache make with f32 activations.
const HALVES: f32 = 2e-3;

/// The logits of as many rows as there are tokens.
fn rows_of<'a>(logits: &'a [f32], tokens: &[TokenId], vocab: usize) -> &'a [f32] {
    &logits[..tokens.len() * vocab]
}

/// The largest difference of two lists of logits, as a share of one plus the largest that is wanted in its row.
fn distance(want: &[f32], have: &[f32], vocab: usize) -> f32 {
    let mut worst = 0.0f32;
    for (w, h) in want.chunks(vocab).zip(have.chunks(vocab)) {
        let scale = 1.0 + w.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        for (w, h) in w.iter().zip(h) {
            let off = (w - h).abs() / scale;
            worst = if off.is_nan() { f32::INFINITY } else { worst.max(off) };
        }
    }
    worst
}

/// How far logits are from the reference's.
fn apart(have: &[f32], plan: &Plan, limits: &Limits, tokens: &[TokenId]) -> Result<f32, String> {
    let (want, _) = run(&ReferenceDevice::default(), plan, limits, tokens, 0)?;
    let vocab = plan.hyper.vocab as usize;
    Ok(distance(&want, have, vocab))
}

/// The device with 8-bit activations against the reference in that mode: the logits of the prompt, then, along the
/// tokens that the device chose, how far each was below the reference's best; both 0 where rounding edges explain more.
fn rounded(
    device: &dyn Device,
    plan: &Plan,
    p: &Value,
    kv_type: KvType,
) -> Result<(f32, f32), String> {
    let mut tokens: Vec<TokenId> = ints(&p["tokens"]);
    let n = tokens.len();
    let more = 24;
    let limits = Limits {
        slots: 1,
        rows: n as u32 + more,
        wanted: n as u32 + more,
        kv_blocks: (n as u32 + more).div_ceil(16) + 1,
        kv_type,
        act: Some(ActMode::Q8),
        ..Limits::default()
    };
    let vocab = plan.hyper.vocab as usize;
    let (have, chosen) = run(device, plan, &limits, &tokens, more)?;
    tokens.extend(&chosen);
    let (want, _) =
        run(&ReferenceDevice::default(), plan, &limits, &tokens[..tokens.len() - 1], 0)?;
    let worst = distance(&want, &have, vocab);
    let mut below = 0.0f32;
    for (row, token) in want.chunks(vocab).skip(n - 1).zip(&chosen) {
        let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let scale = 1.0 + row.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        below = below.max((best - row[*token as usize]) / scale);
    }
    if chosen.len() != more as usize {
        return Err(format!("{} tokens, expected {more}", chosen.len()));
    }
    if worst > ROUNDED || below > ROUNDED {
        let n = n as u32;
        let rows = &have[..];
        if on_rounding_edges(rows, plan, &limits, &tokens[..n as usize])? {
            return Ok((0.0, 0.0));
        }
        if kv_type == KvType::F16 {
            // The cache's rounding has edges of its own, which the noise above does not meet. Either rounding alone is as
            // the reference's (an F32 cache above, f32 activations here), and then both together are apart by no more
            // than what 8 bits change at all.
            let tokens = &tokens[..n as usize];
            let exact = Limits { act: Some(ActMode::F32), ..limits.clone() };
            let halves = apart(&run(device, plan, &exact, tokens, 0)?.0, plan, &exact, tokens)?;
            let noise = apart(rows_of(&want, tokens, vocab), plan, &exact, tokens)?;
            if halves < HALVES && worst < noise && below < noise {
                return Ok((worst, below));
            }
        }
        return Err(format!(
            "8-bit, {kv_type:?}: logits off by {worst:.1e}, choices below by {below:.1e}"
        ));
    }
    Ok((worst, below))
}

/// Runs one prompt; the worst difference of its logits and of how many greedy tokens agreed.
fn prompt(device: &dyn Device, plan: &Plan, p: &Value) -> Result<(f32, usize), String> {
    let told = |e: fornax_plan::Error| e.to_string();
    let tokens: Vec<TokenId> = ints(&p["tokens"]);
    let n = tokens.len() as u32;
    let greedy = ints(&p["greedy"]["tokens"]);
    let (gaps, positions) = (floats(&p["greedy"]["top2_gap"]), ints(&p["logits_positions"]));
    let more = greedy.len() as u32;
    let blocks = (n + more).div_ceil(device.info().kv_block) + 1;
    let limits = Limits {
        slots: 1,
        rows: n,
        wanted: n,
        kv_blocks: blocks,
        kv_type: KvType::F32,
        act: Some(ActMode::F32),
        ..Limits::default()
    };
    let mut program = device.prepare(plan, &limits).map_err(told)?;
    let table: Vec<BlockId> = (0..blocks).rev().map(BlockId).collect();
    let tables = vec![&table[..]; plan.kv.len()];
    let every = [(0..n, Want::Logits)];
    let last = [(n - 1..n, Want::Token { logprob: false })];
    let step = SeqStep {
        slot: SlotId(0),
        tokens: Tokens::Host(&tokens),
        pos: 0,
        tables: &tables,
        wants: &every,
        sample: None,
        max_new: 1,
        stop: &[],
    };
    let mut out = StepOutput::default();
    let ticket = program.submit(std::slice::from_ref(&step)).map_err(told)?;
    program.wait(ticket, &mut out).map_err(told)?;
    let vocab = plan.hyper.vocab as usize;
    let mut worst = 0.0f32;
    for (pos, want) in positions.iter().zip(p["logits"].as_array().into_iter().flatten()) {
        let (want, have) = (floats(want), &out.logits[*pos as usize * vocab..][..vocab]);
        let scale = 1.0 + want.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        for (w, h) in want.iter().zip(have) {
            let off = (w - h).abs() / scale;
            worst = if off.is_nan() { f32::INFINITY } else { worst.max(off) };
        }
    }
    let step = SeqStep { wants: &last, max_new: more, ..step };
    let ticket = program.submit(&[step]).map_err(told)?;
    program.wait(ticket, &mut out).map_err(told)?;
    for (at, (have, want)) in out.tokens.iter().zip(&greedy).enumerate() {
        if have.token != *want {
            let (have, gap) = (have.token, gaps[at]);
            // Where the two best are this close, either is right and all after it differs.
            if gap < 10.0 * LOGITS {
                return Ok((worst, at));
            }
            return Err(format!("greedy token {at} is {have}, expected {want}, gap {gap}"));
        }
    }
    Ok((worst, out.tokens.len()))
}

/// The rows of a prompt when `--deterministic` is asked for: the same bits from one step, from a step for every token, and
/// beside another sequence that is a token ahead; from prompts of two tokens and more.
fn invariant(device: &dyn Device, plan: &Plan, tokens: &[TokenId]) -> Result<(), String> {
    let told = |e: fornax_plan::Error| e.to_string();
    let n = tokens.len() as u32;
    if n < 2 {
        return Err("no prompt long enough to be cut".into());
    }
    let each = (n + 1).div_ceil(device.info().kv_block) + 1;
    let limits = Limits {
        slots: 2,
        rows: 2 * n + 1,
        wanted: 2 * n + 1,
        kv_blocks: 2 * each,
        deterministic: true,
        ..Limits::default()
    };
    let mut rows: Vec<Vec<f32>> = Vec::new();
    for (at_once, beside) in [(n, false), (1, false), (1, true), (n, true)] {
        let mut program = device.prepare(plan, &limits).map_err(told)?;
        let blocks = |slot: u32| (0..each).map(|b| BlockId(2 * b + slot)).collect::<Vec<_>>();
        let (mine, other) = (blocks(u32::from(beside)), blocks(u32::from(!beside)));
        let (mine, other) = (vec![&mine[..]; plan.kv.len()], vec![&other[..]; plan.kv.len()]);
        let mut logits = Vec::new();
        if beside {
            // The other's first token, alone.
            let step = step(1, &tokens[..1], 0, &other, &[]);
            let ticket = program.submit(&[step]).map_err(told)?;
            program.wait(ticket, &mut StepOutput::default()).map_err(told)?;
        }
        for pos in (0..n).step_by(at_once as usize) {
            let tokens = &tokens[pos as usize..(pos + at_once) as usize];
            let every = [(0..at_once, Want::Logits)];
            let mut steps = vec![step(0, tokens, pos, &mine, &every)];
            if beside {
                steps.insert(0, step(1, tokens, pos + 1, &other, &[]));
            }
            let mut out = StepOutput::default();
            let ticket = program.submit(&steps).map_err(told)?;
            program.wait(ticket, &mut out).map_err(told)?;
            logits.extend(out.logits);
        }
        rows.push(logits);
    }
    for (way, have) in rows.iter().enumerate().skip(1) {
        let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
        if have.len() != rows[0].len() || !rows[0].iter().zip(have).all(same) {
            return Err(format!("deterministic: other logits the way of number {way}"));
        }
    }
    Ok(())
}

/// One sequence's part of a step.
fn step<'a>(
    slot: u32,
    tokens: &'a [TokenId],
    pos: u32,
    tables: &'a [&'a [BlockId]],
    wants: &'a [(std::ops::Range<u32>, Want)],
) -> SeqStep<'a> {
    let (slot, tokens) = (SlotId(slot), Tokens::Host(tokens));
    SeqStep { slot, tokens, pos, tables, wants, sample: None, max_new: 1, stop: &[] }
}

/// How a model fared.
pub(crate) enum Outcome {
    Agreed(String),
    Refused(String),
}

/// One model's prompts of at most so many tokens, in f32 and in 8 bits.
pub(crate) fn model(device: &dyn Device, folder: &Path, most: usize) -> Result<Outcome, String> {
    let gguf = Gguf::open(&folder.join("model.gguf")).map_err(|e| e.to_string())?;
    let plan = arch::plan(&gguf).map_err(|e| e.to_string())?;
    let limits = Limits {
        slots: 1,
        rows: 1,
        wanted: 1,
        kv_blocks: 1,
        kv_type: KvType::F32,
        act: Some(ActMode::F32),
        ..Limits::default()
    };
    if let Some(r) = device.supports(&plan, &limits).first() {
        return Ok(Outcome::Refused(format!("{}: {}", r.what, r.why)));
    }
    let text = std::fs::read_to_string(folder.join("expected.json")).map_err(|e| e.to_string())?;
    let json: Value = serde_json::from_str(&text).map_err(|e| e.to_string())?;
    let (mut worst, mut tokens, mut prompts) = (0.0f32, 0, 0);
    let (mut far, mut under) = (0.0f32, 0.0f32);
    let all = json["prompts"].as_array().into_iter().flatten();
    let mut longest = Vec::new();
    for p in all.filter(|p| ints(&p["tokens"]).len() <= most) {
        let given = ints(&p["tokens"]);
        longest = if given.len() > longest.len() { given } else { longest };
        let (off, same) = prompt(device, &plan, p)?;
        (worst, tokens, prompts) = (worst.max(off), tokens + same, prompts + 1);
        for kv_type in [KvType::F32, KvType::F16] {
            let (off, below) = rounded(device, &plan, p, kv_type)?;
            (far, under) = (far.max(off), under.max(below));
        }
    }
    if prompts == 0 {
        return Err("no prompts".into());
    }
    invariant(device, &plan, &longest)?;
    if worst > LOGITS {
        return Err(format!("logits off by {worst:.1e}, expected within {LOGITS}"));
    }
    let told = format!(
        "{prompts} prompts, logits within {worst:.1e}, {tokens} greedy tokens; 8-bit {far:.1e}, {under:.1e}"
    );
    Ok(Outcome::Agreed(told))
}

fn main() -> ExitCode {
    let folder = std::env::args().nth(1).unwrap_or_else(|| "testdata/models".into());
    let device = match CudaDevice::open(0) {
        Ok(device) => device,
        Err(e) => {
            println!("{e}");
            return ExitCode::FAILURE;
        }
    };
    let entries = std::fs::read_dir(&folder);
    let mut models: Vec<PathBuf> =
        entries.into_iter().flatten().flatten().map(|e| e.path()).collect();
    models.retain(|m| m.join("model.gguf").exists());
    models.sort();
    let (mut passed, mut refused, mut failed) = (0, 0, u32::from(models.is_empty()));
    for path in &models {
        let name = path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
        match model(&device, path, usize::MAX) {
            Ok(Outcome::Agreed(told)) => {
                passed += 1;
                println!("ok    {name}: {told}");
            }
            Ok(Outcome::Refused(why)) => {
                refused += 1;
                println!("      {name} refused: {why}");
            }
            Err(why) => {
                failed += 1;
                println!("FAIL  {name}: {why}");
            }
        }
    }
    println!("{passed} passed, {refused} refused, {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
