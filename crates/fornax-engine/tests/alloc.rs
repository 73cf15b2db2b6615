//! What a decoded token allocates in the engine: a counting allocator in a process of its own.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../fornax-plan/tests/counting/mod.rs"]
mod counting;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;

use fornax_cpu::{CpuDevice, CpuOptions};
use fornax_engine::serve::{Engine, Generation, ServeOptions, Update};
use fornax_engine::{Model, SampleParams};

use counting::allocations;

/// Sequences at once.
const SEQUENCES: u64 = 4;
/// Tokens of each that are counted.
const COUNTED: u64 = 320;

#[test]
fn a_decoded_token_allocates_its_own_update_alone() {
    let file =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models/llama3-q8_0/model.gguf");
    let model = Arc::new(Model::open(&file).unwrap());
    let options = CpuOptions { threads: Some(1), pin: Some(false), ..CpuOptions::default() };
    let device = CpuDevice::new(options).unwrap();
    let engine = Engine::start(model, &device, ServeOptions::default()).unwrap();
    let (tx, rx) = channel();
    let mut marks = [0, 0];
    for i in 0..SEQUENCES as u32 {
        let mut heard = 0;
        let tx = tx.clone();
        let publish = Box::new(move |update| {
            match update {
                // The last sequence counts, when all of them are long under way.
                Update::Tokens(_) if i == SEQUENCES as u32 - 1 => {
                    heard += 1;
                    if heard == 100 || heard == 100 + COUNTED {
                        marks[usize::from(heard > 100)] = allocations();
                    }
                }
                Update::Done(_) => tx.send((i, marks)).unwrap(),
                Update::Failed(e) => panic!("{e}"),
                _ => {}
            }
            ControlFlow::Continue(())
        });
        let mut g = Generation::new([3 + i, 5, 7], 600);
        // Drawn, so that no guess comes right and each step is one token.
        g.sample = SampleParams { temperature: 1.0, seed: u64::from(i), ..SampleParams::default() };
        engine.submit(g, publish).unwrap();
    }
    for _ in 0..SEQUENCES {
        let (i, [from, to]) = rx.recv().unwrap();
        if u64::from(i) == SEQUENCES - 1 {
            let tokens = SEQUENCES * COUNTED;
            let each = (to - from) as f64 / tokens as f64;
            println!("{each:.3} allocations for a token");
            // A list for each token's update, and a node of the prefix cache for every 32.
            assert!(each <= 1.2, "{each} allocations for a token, {} in all", to - from);
        }
    }
}
