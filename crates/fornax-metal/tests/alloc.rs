//! The host allocates nothing per decoded token, neither memory nor device buffers: a counting allocator in a process of its
//! own.

#[path = "../../fornax-plan/tests/counting/mod.rs"]
mod counting;

use fornax_gguf::TensorType;
use fornax_metal::MetalDevice;
use fornax_plan::conformance::proof_plan;
use fornax_plan::{
    BlockId, Device, KvType, Limits, Progress, SeqStep, SlotId, StepOutput, Tokens, Want,
};

use counting::allocations;

/// Submitting a step and taking what came of it. What the stand-in does to run it is not the host's: it runs in the look
/// between the two.
#[test]
fn forty_tokens_of_three_sequences_allocate_nothing() {
    let plan = proof_plan(TensorType::Q8_0);
    let device = if cfg!(target_os = "macos") {
        MetalDevice::system().unwrap_or_else(|why| {
            println!("not run on a GPU, there is none: {why}");
            MetalDevice::emulated(1)
        })
    } else {
        MetalDevice::emulated(1)
    };
    let limits = Limits {
        slots: 3,
        rows: 8,
        wanted: 8,
        kv_blocks: 6,
        kv_type: KvType::F32,
        act: None,
        ..Limits::default()
    };
    let mut program = device.prepare(&plan, &limits).unwrap();
    let tables: Vec<Vec<BlockId>> =
        (0..3).map(|s| (0..2).map(|i| BlockId(3 * i + s)).collect()).collect();
    let tables: Vec<[&[BlockId]; 1]> = tables.iter().map(|t| [t.as_slice()]).collect();
    let wants = [(0..1, Want::Token { logprob: true })];
    let mut out = StepOutput::default();
    let mut counted = 0;
    for pos in 0..40u32 {
        let step = [0, 1, 2].map(|s: u32| SeqStep {
            slot: SlotId(s),
            tokens: if pos == 0 { Tokens::Host(&[7]) } else { Tokens::Last { draft: &[] } },
            pos,
            tables: &tables[s as usize],
            wants: &wants,
            sample: None,
            max_new: 1,
            stop: &[],
        });
        let before = allocations();
        let ticket = program.submit(&step).unwrap();
        let submitted = allocations();
        while program.poll(&ticket, &mut out).unwrap() == Progress::Running {}
        let polled = allocations();
        program.wait(ticket, &mut out).unwrap();
        let now = allocations();
        assert_eq!(out.tokens.len(), 3);
        // The first steps may still grow lists that are kept from then on.
        if pos > 6 {
            counted += (submitted - before) + (now - polled);
        }
    }
    assert_eq!(counted, 0);
}
