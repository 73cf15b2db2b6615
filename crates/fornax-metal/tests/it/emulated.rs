//! The kernel sources themselves, through the whole program: the conformance list and the proof.

use fornax_gguf::TensorType;
use fornax_metal::{Barriers, MetalDevice};
use fornax_plan::conformance::{self, Case};
use fornax_plan::{Device, KvType, Limits};

/// The cases of the list that `wanted` takes, each held to the reference or refused by name.
fn held(wanted: impl Fn(&str) -> bool, passes: usize) {
    let device = MetalDevice::emulated(11);
    let mut passed = 0;
    for case in conformance::cases().iter().filter(|c| wanted(&c.name)) {
        let limits = conformance::limits_for(case, &device);
        let why = device.supports(&case.plan, &limits);
        if why.is_empty() {
            conformance::check(&device, case).unwrap_or_else(|e| panic!("{e}"));
            passed += 1;
        } else {
            let e = device.prepare(&case.plan, &limits).err().expect("a refusal");
            assert!(e.is_unsupported() && e.to_string().contains(&why[0].what), "{e}");
        }
    }
    assert_eq!(passed, passes);
}

#[test]
fn rows_and_products_are_those_of_the_reference() {
    // Twelve types of embedding, eight norms, five shapes of products in twelve types and two
    // odd ones, six gated layers, eight rotations.
    let families = ["embed/", "rms_norm/", "matmul/", "gated_mlp/", "qk_norm_rope/"];
    held(|name| families.iter().any(|f| name.starts_with(f)), 12 + 8 + 62 + 6 + 8);
}

#[test]
fn attention_is_that_of_the_reference() {
    held(|name| name.starts_with("attention/"), 11);
}

#[test]
fn what_has_no_kernel_is_refused_by_name() {
    held(|name| name.starts_with("short_conv/") || name.starts_with("moe/"), 0);
    let device = MetalDevice::emulated(1);
    let all = conformance::cases();
    let case = all.iter().find(|c| c.name == "attention/mqa/odd").unwrap();
    let limits = conformance::limits_for(case, &device);
    let refusals = device.supports(&case.plan, &Limits { kv_type: KvType::Q8_0, ..limits });
    assert_eq!(refusals[0].what, "kv type q8_0");
}

fn tokens(device: &MetalDevice, case: &Case) -> fornax_plan::Result<Vec<u32>> {
    let limits = conformance::limits_for(case, device);
    let outs = conformance::run(device, case, &limits, 0)?;
    Ok(outs.iter().flat_map(|o| &o.tokens).map(|t| t.token).collect())
}

#[test]
fn the_proof_gives_the_ids_of_the_reference_in_any_order() {
    for (ty, seed) in [(TensorType::F32, 0), (TensorType::Q8_0, 1), (TensorType::F16, 2)] {
        let device = MetalDevice::emulated(seed);
        conformance::check(&device, &conformance::proof(ty)).unwrap();
        let journal = device.journal();
        assert_eq!((journal.submissions(), journal.waits()), (2, 2), "two steps");
        assert!(journal.barriers() < journal.commands());
    }
}

#[test]
fn without_one_barrier_the_emulator_names_the_conflict() {
    let case = conformance::proof(TensorType::F32);
    let device = MetalDevice::emulated(3);
    tokens(&device, &case).unwrap();
    let barriers = device.journal().barriers();
    // The first round, one of the chain's and the last.
    let sample = (0..16).chain(barriers / 2..barriers / 2 + 4).chain(barriers - 4..barriers);
    for missing in sample {
        let device = MetalDevice::emulated(3).sabotaged(Barriers::AllBut(missing), false);
        let e = tokens(&device, &case).unwrap_err();
        assert!(e.is_lost() && e.to_string().contains("op "), "{missing} of {barriers}: {e}");
    }
}

/// Commands and barriers of one more decoded token.
#[test]
fn a_layer_takes_few_commands_and_barriers() {
    let mut case = conformance::proof(TensorType::Q8_0);
    let counts = |case: &Case| {
        let device = MetalDevice::emulated(4);
        tokens(&device, case).unwrap();
        let journal = device.journal();
        [journal.commands(), journal.barriers()]
    };
    let before = counts(&case);
    case.steps[1].iter_mut().for_each(|s| s.max_new += 1);
    let after = counts(&case);
    // The layer: norm with qkv, rotation with the append, attention and its second stage, the
    // output matrix, norm with the gated pair, the last matrix. Beside it: embedding, selection,
    // norm, logits, and the two stages of the choice.
    assert_eq!([after[0] - before[0], after[1] - before[1]], [7 + 6, 7 + 6]);
}
