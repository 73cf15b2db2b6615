//! Whether anything leaks over many generations: `leaks [SHAPE:TYPE [GENERATIONS]]`, shapes of `pace`. Generations of all kinds
//! (chains, draws, logits, some read before their end, some stopped) run one after the other in changing slots; the number of
//! the driver's objects and the free memory must not change after the first hundred, and be as before when the program is
//! gone. Prints `N passed, N failed`.

#![allow(clippy::print_stdout, reason = "the report is the output")]

use std::process::ExitCode;
use std::time::Instant;

use fornax_cuda::CudaDevice;
use fornax_gguf::TensorType;
use fornax_plan::{
    BlockId, Device, Limits, Plan, Program, Progress, SampleParams, SeqStep, SlotId, StepOutput,
    Tokens, Want,
};

#[allow(dead_code, reason = "a program of its own")]
#[path = "pace.rs"]
mod pace;

const SLOTS: u32 = 4;
const CHAIN: u32 = 16;
/// Generations after which every kind of step has been met.
const WARM: u32 = 100;

fn limits() -> Limits {
    Limits { slots: SLOTS, rows: 64, wanted: 64, kv_blocks: 2 * SLOTS, ..Limits::default() }
}

/// Generation number `n`: a prompt of some length and a chain behind it.
fn generate(program: &mut dyn Program, plan: &Plan, n: u32) -> Result<(), String> {
    let told = |e: fornax_plan::Error| e.to_string();
    let slot = n % SLOTS;
    let table = [2 * slot, 2 * slot + 1].map(BlockId);
    let tables = vec![&table[..]; plan.kv.len()];
    let tokens: Vec<u32> = (0..1 + n % 20).map(|i| (n + i) % plan.hyper.vocab).collect();
    let rows = tokens.len() as u32;
    let want = if n % 7 == 3 { Want::Logits } else { Want::Token { logprob: n.is_multiple_of(5) } };
    let drawn =
        SampleParams { temperature: 0.8, top_k: 40, seed: n.into(), ..SampleParams::default() };
    let step = SeqStep {
        slot: SlotId(slot),
        tokens: Tokens::Host(&tokens),
        pos: 0,
        tables: &tables,
        wants: &[(rows - 1..rows, want)],
        sample: (n % 6 == 1).then_some(drawn),
        max_new: if want == Want::Logits { 1 } else { CHAIN },
        stop: &[1, 2],
    };
    let mut out = StepOutput::default();
    let ticket = program.submit(&[step]).map_err(told)?;
    if n % 4 == 2 {
        while program.poll(&ticket, &mut out).map_err(told)? == Progress::Running {
            if n % 8 == 2 && out.tokens.len() > 3 {
                program.stop(SlotId(slot));
            }
        }
    }
    program.wait(ticket, &mut out).map_err(told)?;
    let count = if want == Want::Logits { out.logits.len() } else { out.tokens.len() };
    if count == 0 { Err(format!("generation {n} gave nothing")) } else { Ok(()) }
}

fn measured(device: &CudaDevice) -> (usize, u64) {
    (device.objects(), device.memory_free().unwrap_or(0))
}

fn all(text: &str, generations: u32) -> Result<(), String> {
    let told = |e: fornax_plan::Error| e.to_string();
    let (name, ty) = text.split_once(':').unwrap_or((text, "q8_0"));
    let ty = TensorType::parse(ty).ok_or("no such type")?;
    let shape = pace::SHAPES.iter().find(|s| s.name == name).ok_or("no such shape")?;
    let plan = pace::plan(shape, &mut pace::Pool::new(ty)?);
    let device = CudaDevice::open(0).map_err(told)?;
    // What the driver takes once and keeps, it has taken after this.
    drop(device.prepare(&plan, &limits()).map_err(told)?);
    let before = measured(&device);
    let mut program = device.prepare(&plan, &limits()).map_err(told)?;
    let (began, mut warm) = (Instant::now(), before);
    for n in 0..generations {
        generate(program.as_mut(), &plan, n)?;
        if n == WARM {
            warm = measured(&device);
        }
        let now = measured(&device);
        if n > WARM && now != warm {
            return Err(format!(
                "after {n} generations: (objects, bytes free) {now:?}, expected {warm:?}"
            ));
        }
    }
    drop(program);
    let after = measured(&device);
    println!(
        "{text}: {generations} generations in {:.1} s; (objects, bytes free) {before:?}, {warm:?} at work, {after:?}",
        began.elapsed().as_secs_f64()
    );
    if after == before { Ok(()) } else { Err("not everything was given back".into()) }
}

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let text = args.next().unwrap_or_else(|| "few-128:q8_0".into());
    let generations = args.next().and_then(|n| n.parse().ok()).unwrap_or(2000);
    match all(&text, generations) {
        Ok(()) => {
            println!("1 passed, 0 failed");
            ExitCode::SUCCESS
        }
        Err(why) => {
            println!("FAIL  {text}: {why}\n0 passed, 1 failed");
            ExitCode::FAILURE
        }
    }
}
