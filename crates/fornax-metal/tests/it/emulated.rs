//! The kernel sources themselves, through the whole program: the conformance list and the proof.

use fornax_gguf::TensorType;
use fornax_metal::MetalDevice;
use fornax_plan::conformance::{self, Case};
use fornax_plan::{Device, KvType, Limits};

/// Holds the cases of the list that `wanted` takes to the reference. None is refused.
fn held(wanted: impl Fn(&str) -> bool, least: usize) {
    let device = crate::kernels(11);
    let mut passed = 0;
    for case in conformance::cases().iter().filter(|c| wanted(&c.name)) {
        conformance::check(&device, case).unwrap_or_else(|e| panic!("{e}"));
        passed += 1;
    }
    assert!(passed >= least, "{passed} cases");
}

#[test]
fn rows_and_products_are_those_of_the_reference() {
    let families = ["embed/", "rms_norm/", "matmul/", "gated_mlp/", "qk_norm_rope/"];
    held(|name| families.iter().any(|f| name.starts_with(f)), 90);
}

#[test]
fn everything_else_is_that_of_the_reference() {
    let families = ["embed/", "rms_norm/", "matmul/", "gated_mlp/", "qk_norm_rope/"];
    held(|name| !families.iter().any(|f| name.starts_with(f)), 20);
}

#[test]
fn what_no_kernel_does_is_refused_by_name() {
    let device = crate::kernels(1);
    let all = conformance::cases();
    let case = all.iter().find(|c| c.name == "attention/mqa/odd").unwrap();
    let limits = conformance::limits_for(case, &device);
    let limits = Limits { kv_type: KvType::Q8_0, ..limits };
    let refusals = device.supports(&case.plan, &limits);
    assert_eq!(refusals[0].what, "kv type q8_0");
    let long = Limits { chain: 65, kv_type: KvType::F16, ..limits };
    assert_eq!(device.supports(&case.plan, &long)[0].what, "tickets of 65 tokens, 15 stop tokens");
    let mut case = all.into_iter().find(|c| c.name.starts_with("moe/")).unwrap();
    let weight = &mut case.plan.weights[2];
    (weight.ty, weight.cols) = (TensorType::Q8_1, 32);
    let refusals = device.supports(&case.plan, &conformance::limits_for(&case, &device));
    assert_eq!(refusals[0].what, "moe_mlp of Q8_1");
}

fn tokens(device: &MetalDevice, case: &Case) -> fornax_plan::Result<Vec<u32>> {
    let limits = conformance::limits_for(case, device);
    let outs = conformance::run(device, case, &limits, 0)?;
    Ok(outs.iter().flat_map(|o| &o.tokens).map(|t| t.token).collect())
}

#[test]
fn the_proof_gives_the_ids_of_the_reference_in_any_order() {
    for (ty, seed) in [(TensorType::F32, 0), (TensorType::Q8_0, 1), (TensorType::F16, 2)] {
        let device = crate::kernels(seed);
        conformance::check(&device, &conformance::proof(ty)).unwrap();
        let journal = device.journal();
        assert_eq!((journal.submissions(), journal.waits()), (2, 2), "two steps");
        assert!(journal.barriers() < journal.commands());
    }
}

#[cfg(not(target_os = "macos"))]
#[test]
fn without_one_barrier_the_emulator_names_the_conflict() {
    // A few of the first round, of one of the chain's and of the last.
    sweep(|n, of| [0, 1, 4, 7, 9, of / 2, of / 2 + 1, of / 2 + 2, of - 1].contains(&n));
}

#[cfg(not(target_os = "macos"))]
#[test]
#[ignore = "every barrier: cargo xtask deep"]
fn without_any_one_barrier_the_emulator_names_the_conflict() {
    sweep(|_, _| true);
}

/// Leaves out those barriers that `take` takes, by their number and how many there are.
#[cfg(not(target_os = "macos"))]
fn sweep(take: impl Fn(u64, u64) -> bool) {
    let case = conformance::proof(TensorType::F32);
    let device = MetalDevice::emulated(3);
    tokens(&device, &case).expect("the case runs");
    let barriers = device.journal().barriers();
    for missing in (0..barriers).filter(|n| take(*n, barriers)) {
        let device = MetalDevice::emulated(3).sabotaged(fornax_metal::Barriers::AllBut(missing));
        let e = tokens(&device, &case).expect_err("a barrier is missing");
        assert!(e.is_lost() && e.to_string().contains("op "), "{missing} of {barriers}: {e}");
    }
}

/// The steps of the ops that the proof has not, few rows and many: without any one barrier a
/// conflict is named.
#[cfg(not(target_os = "macos"))]
#[test]
fn no_barrier_of_the_other_ops_can_be_missing() {
    let all = conformance::cases();
    for name in ["short_conv/40x4", "moe/normalised/F32", "moe/topk-first/Q8_0", "attention/q8_0"] {
        let mut case = all.iter().find(|c| c.name == name).unwrap().clone();
        // Later steps go on where the first, cut short below, has not been.
        case.steps.truncate(1);
        for few in [false, true] {
            if few {
                case.steps.iter_mut().flatten().for_each(|s| s.tokens.truncate(2));
                case.steps
                    .iter_mut()
                    .flatten()
                    .for_each(|s| s.wants[0].0.end = s.tokens.len() as u32);
            }
            let device = MetalDevice::emulated(5);
            tokens(&device, &case).unwrap();
            let barriers = device.journal().barriers();
            assert!(barriers > 2, "{name}: {barriers} barriers");
            for missing in 0..barriers {
                let without = fornax_metal::Barriers::AllBut(missing);
                let device = MetalDevice::emulated(5).sabotaged(without);
                let e = tokens(&device, &case).expect_err(name);
                assert!(e.is_lost() && e.to_string().contains("op "), "{name}, {missing}: {e}");
            }
        }
    }
}

/// Commands and barriers of one more decoded token.
#[test]
fn a_layer_takes_few_commands_and_barriers() {
    let mut case = conformance::proof(TensorType::Q8_0);
    let counts = |case: &Case| {
        let device = crate::kernels(4);
        tokens(&device, case).unwrap();
        let journal = device.journal();
        [journal.commands(), journal.barriers()]
    };
    let before = counts(&case);
    case.steps[1].iter_mut().for_each(|s| s.max_new += 1);
    let after = counts(&case);
    // The layer: norm with qkv; rotation, append and shares of attention; the output matrix that
    // joins them; norm with the gated pair; the last matrix. Beside it: embedding, selection, norm,
    // logits, and the two stages of the choice.
    assert_eq!([after[0] - before[0], after[1] - before[1]], [5 + 6, 5 + 6]);
}
