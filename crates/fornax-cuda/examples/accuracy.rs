//! How far 8-bit activations on the GPU are from exact logits, beside llama.cpp on the same files, prompts and cache:
//! `accuracy [TESTDATA]`, whose `peer-accuracy.json` has llama.cpp's distances prompt by prompt (`scripts/peer-accuracy.sh`
//! records them). Exact is what the GPU gives in f32, which `golden` holds to expected logits. No model may be farther than
//! llama.cpp by more than two standard errors. Prints `N passed, N failed`.

#![allow(clippy::print_stdout, reason = "the report is the output")]

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use fornax_cuda::CudaDevice;
use fornax_engine::arch;
use fornax_gguf::Gguf;
use fornax_plan::accuracy::{self, mean_gap, prompts, standard_errors};
use fornax_plan::{
    ActMode, BlockId, Device, KvType, Limits, Plan, SeqStep, SlotId, StepOutput, TokenId, Tokens,
    Want,
};
use serde_json::Value;

/// Logits of every token of each prompt, one prompt after the other.
fn logits(
    device: &dyn Device,
    plan: &Plan,
    (act, kv_type): (ActMode, KvType),
    prompts: &[Vec<TokenId>],
) -> Result<Vec<Vec<f32>>, String> {
    /// Of each prompt.
    const TOKENS: u32 = accuracy::TOKENS as u32;
    let told = |e: fornax_plan::Error| e.to_string();
    let limits = Limits {
        slots: 1,
        rows: TOKENS,
        wanted: TOKENS,
        kv_blocks: TOKENS.div_ceil(device.info().kv_block),
        kv_type,
        act: Some(act),
        ..Limits::default()
    };
    let mut program = device.prepare(plan, &limits).map_err(told)?;
    let table: Vec<BlockId> = (0..limits.kv_blocks).map(BlockId).collect();
    let tables = vec![&table[..]; plan.kv.len()];
    let mut all = Vec::new();
    for tokens in prompts {
        let step = SeqStep {
            slot: SlotId(0),
            tokens: Tokens::Host(tokens),
            pos: 0,
            tables: &tables,
            wants: &[(0..TOKENS, Want::Logits)],
            sample: None,
            max_new: 1,
            stop: &[],
        };
        let mut out = StepOutput::default();
        let ticket = program.submit(&[step]).map_err(told)?;
        program.wait(ticket, &mut out).map_err(told)?;
        all.push(out.logits);
    }
    Ok(all)
}

/// The mean distance of each prompt's logits from the exact ones.
fn distances(device: &dyn Device, plan: &Plan, n: usize) -> Result<Vec<f64>, String> {
    let prompts = prompts(plan.hyper.vocab, n);
    let exact = logits(device, plan, (ActMode::F32, KvType::F32), &prompts)?;
    let have = logits(device, plan, (ActMode::Q8, KvType::F16), &prompts)?;
    Ok(exact.iter().zip(&have).map(|(want, have)| mean_gap(want, have)).collect())
}

/// One model's line, an error where it is farther.
fn model(device: &dyn Device, folder: &Path, name: &str, theirs: &Value) -> Result<String, String> {
    let theirs: Vec<f64> =
        theirs.as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
    if theirs.len() < 8 {
        return Err(format!("{} prompts of llama.cpp, expected 8 or more", theirs.len()));
    }
    let file = folder.join("models").join(name).join("model.gguf");
    let gguf = Gguf::open(&file).map_err(|e| e.to_string())?;
    let plan = arch::plan(&gguf).map_err(|e| e.to_string())?;
    let ours = distances(device, &plan, theirs.len())?;
    let share = ours.iter().sum::<f64>() / theirs.iter().sum::<f64>();
    let beyond = standard_errors(&ours, &theirs);
    let told = format!("{share:.4} of llama.cpp's distance, {beyond:+.1} standard errors");
    if beyond.is_nan() || beyond > 2.0 { Err(told) } else { Ok(told) }
}

fn main() -> ExitCode {
    let folder = PathBuf::from(std::env::args().nth(1).unwrap_or_else(|| "testdata".into()));
    let opened = CudaDevice::open(0).map_err(|e| e.to_string());
    let read = std::fs::read_to_string(folder.join("peer-accuracy.json"))
        .map_err(|e| e.to_string())
        .and_then(|text| serde_json::from_str::<Value>(&text).map_err(|e| e.to_string()));
    let (device, peer) = match (opened, read) {
        (Ok(device), Ok(peer)) => (device, peer),
        (Err(e), _) | (_, Err(e)) => {
            println!("{e}");
            return ExitCode::FAILURE;
        }
    };
    let (mut passed, mut failed) = (0, 0);
    for (name, theirs) in peer["models"].as_object().into_iter().flatten() {
        match model(&device, &folder, name, theirs) {
            Ok(told) => {
                passed += 1;
                println!("ok    {name}: {told}");
            }
            Err(told) => {
                failed += 1;
                println!("FAIL  {name}: {told}");
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    if failed > 0 || passed == 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
