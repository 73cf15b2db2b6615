//! The reference against an independent implementation, for every test model.

use fornax_plan::reference::ReferenceDevice;
use fornax_plan::{ActMode, KvType};

use crate::fixture::{Fixture, Runner, distance, models};

/// What the reference may differ from the expected logits; both compute in f32 or better.
const EXACT: f32 = 1e-4;

#[test]
fn the_reference_computes_the_expected_logits() {
    let names = models();
    assert!(names.len() >= 25, "only {} test models found", names.len());
    let mut failures = Vec::new();
    for name in names {
        let f = Fixture::load(&name);
        let vocab = f.plan.hyper.vocab as usize;
        for (at, prompt) in f.prompts.iter().enumerate() {
            let mut runner = Runner::new(
                &ReferenceDevice { kv_block: 16, ..Default::default() },
                &f.plan,
                ActMode::F32,
                KvType::F32,
                1,
                512,
            );
            let have = runner.logits(&prompt.tokens, 20, vocab);
            let (max, _) = distance(&have, prompt);
            if max > EXACT {
                failures.push(format!("{name}, prompt {at}: {max:.2e}"));
            }
        }
    }
    assert!(failures.is_empty(), "farther than {EXACT}:\n{}", failures.join("\n"));
}

#[test]
fn the_reference_continues_greedily_as_expected() {
    for name in models() {
        let f = Fixture::load(&name);
        for prompt in &f.prompts {
            let mut runner = Runner::new(
                &ReferenceDevice { kv_block: 16, ..Default::default() },
                &f.plan,
                ActMode::F32,
                KvType::F32,
                1,
                512,
            );
            let ids = runner.greedy(&prompt.tokens, prompt.greedy.len() as u32, 5);
            for (i, (have, want)) in ids.iter().zip(&prompt.greedy).enumerate() {
                let gap = prompt.gaps[i];
                assert!(
                    have == want || gap < 2.0 * EXACT,
                    "{name}: token {i} is {have}, expected {want}, gap {gap}"
                );
                if have != want {
                    break;
                }
            }
        }
    }
}
