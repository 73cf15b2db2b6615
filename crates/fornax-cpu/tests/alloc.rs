//! Nothing is allocated per decoded token: a counting allocator in a process of its own.

#[path = "../../fornax-plan/tests/counting/mod.rs"]
mod counting;

use fornax_cpu::{CpuDevice, CpuOptions};
use fornax_gguf::TensorType;
use fornax_plan::conformance::proof_plan;
use fornax_plan::{
    BlockId, Device, KvType, Limits, SampleParams, SeqStep, SlotId, StepOutput, Tokens, Want,
};

use counting::allocations;

#[test]
fn sixty_four_tokens_of_three_sequences_allocate_nothing() {
    let plan = proof_plan(TensorType::Q8_0);
    let options =
        CpuOptions { threads: Some(2), isa: None, pin: Some(false), ..CpuOptions::default() };
    let device = CpuDevice::new(options).unwrap();
    let limits = Limits {
        slots: 3,
        rows: 8,
        wanted: 8,
        kv_blocks: 12,
        kv_type: KvType::F16,
        act: None,
        ..Limits::default()
    };
    let mut program = device.prepare(&plan, &limits).unwrap();
    let tables: Vec<Vec<BlockId>> =
        (0..3).map(|s| (0..4).map(|i| BlockId(3 * i + s)).collect()).collect();
    let tables: Vec<[&[BlockId]; 1]> = tables.iter().map(|t| [t.as_slice()]).collect();
    let wants = [(0..1, Want::Token { logprob: true })];
    let warm = SampleParams { temperature: 0.8, top_k: 40, top_p: 0.9, ..SampleParams::default() };
    let mut out = StepOutput::default();
    let mut before = 0;
    for pos in 0..70u32 {
        let step = [0, 1, 2].map(|s: u32| SeqStep {
            slot: SlotId(s),
            tokens: if pos == 0 { Tokens::Host(&[7]) } else { Tokens::Last { draft: &[] } },
            pos,
            tables: &tables[s as usize],
            wants: &wants,
            sample: (s > 0).then_some(warm),
            max_new: 1,
            stop: &[],
        });
        // The first steps may still grow lists that are kept from then on.
        if pos == 6 {
            before = allocations();
        }
        let ticket = program.submit(&step).unwrap();
        program.wait(ticket, &mut out).unwrap();
        assert_eq!(out.tokens.len(), 3);
    }
    assert_eq!(allocations() - before, 0);
}
