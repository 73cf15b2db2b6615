//! A missing barrier must show: as a conflict that the check names, and as wrong tokens where
//! nothing checks.

use fornax_gguf::TensorType;
use fornax_metal::{Barriers, MetalDevice};
use fornax_plan::Op;
use fornax_plan::conformance::{self, Case};

fn tokens(device: &MetalDevice, case: &Case) -> fornax_plan::Result<Vec<u32>> {
    let limits = conformance::limits_for(case, device);
    let outs = conformance::run(device, case, &limits, 0)?;
    Ok(outs.iter().flat_map(|o| &o.tokens).map(|t| t.token).collect())
}

#[test]
fn without_any_one_barrier_a_conflict_is_named() {
    let case = conformance::proof(TensorType::F32);
    let device = MetalDevice::recorded(1);
    tokens(&device, &case).unwrap();
    let barriers = device.journal().barriers();
    assert!(barriers > 50, "{barriers}");
    for missing in 0..barriers {
        let device = MetalDevice::recorded(1).sabotaged(Barriers::AllBut(missing), true);
        let e = tokens(&device, &case).unwrap_err();
        assert!(e.is_lost() && e.to_string().contains("side by side"), "{missing}: {e}");
    }
}

#[test]
fn without_barriers_and_without_the_check_the_tokens_are_wrong() {
    let case = conformance::proof(TensorType::F32);
    let right = tokens(&MetalDevice::recorded(0), &case).unwrap();
    for seed in 0..20 {
        let device = MetalDevice::recorded(seed).sabotaged(Barriers::None, false);
        // Tokens of nowhere are caught by the embedding kernel; all else is wrong silently.
        let wrong = tokens(&device, &case).map_or(true, |have| have != right);
        assert!(wrong, "seed {seed} gave the right tokens without any barrier");
    }
}

#[test]
fn any_single_missing_barrier_gives_wrong_tokens_in_some_order() {
    let mut case = conformance::proof(TensorType::F32);
    // A quieter residual stream, so that attention decides tokens too.
    if let Op::Embed { scale, .. } = &mut case.plan.ops[0] {
        *scale = 0.5;
    }
    let device = MetalDevice::recorded(0);
    let right = tokens(&device, &case).unwrap();
    // The first dozen lie within the first round; the rounds of the chain repeat them.
    for missing in 0..12.min(device.journal().barriers()) {
        let wrong = |seed| {
            let device = MetalDevice::recorded(seed).sabotaged(Barriers::AllBut(missing), false);
            tokens(&device, &case).map_or(true, |have| have != right)
        };
        assert!((0..12).any(wrong), "barrier {missing} can be missing unseen");
    }
}
