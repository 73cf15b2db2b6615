//! Prompts in the form that rounds differently: near the exact one, the same on any number of threads, and nothing to
//! those who decode beside it.

use fornax_cpu::{CpuDevice, CpuOptions, Isa};
use fornax_gguf::TensorType;
use fornax_plan::conformance::proof_plan;
use fornax_plan::{
    Device, KvType, Limits, Plan, Program, SeqStep, SlotId, StepOutput, TokenId, Tokens, Want,
};

use crate::invariance::{alone, limits, prompt, table};

/// The tiers of this machine that have such a form.
fn fast_tiers() -> Vec<Isa> {
    let all = Isa::available().into_iter();
    all.filter(|isa| matches!(isa, Isa::Avx512Vnni | Isa::Amx)).collect()
}

fn device(threads: usize, fast_prompt: bool) -> Option<CpuDevice> {
    let isa = *fast_tiers().last()?;
    let options =
        CpuOptions { threads: Some(threads), isa: Some(isa), pin: Some(false), fast_prompt };
    Some(CpuDevice::new(options).unwrap())
}

/// What two sequences give in one step: `few` tokens of the first and a prompt of the second.
fn together(program: &mut dyn Program, few: &[TokenId], long: &[TokenId]) -> [Vec<f32>; 2] {
    let tables = [table(1), table(2)];
    let wants = [few, long].map(|t| [(0..t.len() as u32, Want::Logits)]);
    let tables = [[tables[0].as_slice()], [tables[1].as_slice()]];
    let step = |ix: usize, tokens| SeqStep {
        slot: SlotId(1 + ix as u32),
        tokens: Tokens::Host(tokens),
        pos: 0,
        tables: &tables[ix],
        wants: &wants[ix],
        sample: None,
        max_new: 1,
        stop: &[],
    };
    let mut out = StepOutput::default();
    let ticket = program.submit(&[step(0, few), step(1, long)]).unwrap();
    program.wait(ticket, &mut out).unwrap();
    let width = out.logits.len() / (few.len() + long.len());
    let (a, b) = out.logits.split_at(few.len() * width);
    [a.to_vec(), b.to_vec()]
}

fn program(plan: &Plan, threads: usize, fast_prompt: bool, kv: KvType) -> Option<Box<dyn Program>> {
    Some(device(threads, fast_prompt)?.prepare(plan, &limits(kv)).unwrap())
}

#[test]
#[allow(clippy::print_stderr, reason = "a tier that is not there is not passed over in silence")]
fn a_long_prompt_is_near_the_exact_one_and_short_rows_beside_it_are_exact() {
    for (ty, kv) in [
        (TensorType::Q8_0, KvType::F16),
        (TensorType::Q4_0, KvType::Q8_0),
        // Nothing of it has such a form.
        (TensorType::F16, KvType::F16),
    ] {
        let plan = proof_plan(ty);
        let Some(mut exact) = program(&plan, 2, false, kv) else {
            eprintln!("no tier of this machine has a fast form of prompts");
            assert!(fast_tiers().is_empty());
            return;
        };
        let mut fast = program(&plan, 2, true, kv).unwrap();
        let (few, long) = (prompt(3, 31), prompt(4, 250));
        let want = together(exact.as_mut(), &few, &long);
        let have = together(fast.as_mut(), &few, &long);
        assert!(want[0] == have[0], "{ty}: those of few rows are not exact");
        let largest = want[1].iter().fold(0.0f32, |a, v| a.max(v.abs()));
        let apart = want[1].iter().zip(&have[1]).fold(0.0f32, |a, (x, y)| a.max((x - y).abs()));
        if ty == TensorType::F16 {
            assert!(want[1] == have[1]);
        } else {
            assert!(want[1] != have[1], "{ty}: nothing was rounded differently");
            assert!(apart < 0.05 * largest, "{ty}: {apart} of {largest}");
        }
        // Alone or beside others, on one thread or three.
        let mut three = program(&plan, 3, true, kv).unwrap();
        assert!(alone(three.as_mut(), 0, &long, 250) == have[1]);
        let mut one = program(&plan, 1, true, kv).unwrap();
        assert!(alone(one.as_mut(), 0, &few, 31) == want[0]);
        // A row knows nothing of those behind it.
        let begin = alone(one.as_mut(), 3, &long[..200], 200);
        assert!(begin == have[1][..begin.len()]);
    }
}

#[test]
fn what_the_fast_form_cannot_be_is_refused_by_name() {
    let options = CpuOptions { isa: Some(Isa::Scalar), fast_prompt: true, ..CpuOptions::default() };
    let e = CpuDevice::new(options).unwrap_err();
    assert!(
        e.is_unsupported() && e.to_string().contains("the tier scalar has no fast form"),
        "{e}"
    );
    let Some(device) = device(1, true) else { return };
    let plan = proof_plan(TensorType::Q8_0);
    let limits = Limits { deterministic: true, ..limits(KvType::F16) };
    let e = device.prepare(&plan, &limits).err().unwrap();
    assert!(e.is_unsupported() && e.to_string().contains("leave out --deterministic"), "{e}");
}

/// The coarse forms are counted as what they are: a byte for each weight of the layers, and scales.
#[test]
fn memory_tells_of_the_second_form() {
    let plan = proof_plan(TensorType::Q8_0);
    let (Some(exact), Some(fast)) =
        (program(&plan, 1, false, KvType::F16), program(&plan, 1, true, KvType::F16))
    else {
        return;
    };
    let more = fast.memory().weights - exact.memory().weights;
    let layers: u64 = plan
        .ops
        .iter()
        .filter(|op| !matches!(op, fornax_plan::Op::Logits { .. }))
        .flat_map(|op| op.linears().iter().collect::<Vec<_>>())
        .map(|l| &plan.weights[l.weight.ix()])
        .map(|w| u64::from(w.rows) * u64::from(w.cols))
        .sum();
    assert!(more >= layers && more < 2 * layers, "{more} for {layers} weights");
}
