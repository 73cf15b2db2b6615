//! What a decoded token costs, asserted from the counts that the emulator takes; and a ticket that is looked at, stopped and
//! followed while it is under way.

use fornax_gguf::TensorType;
use fornax_metal::MetalDevice;
use fornax_plan::conformance;
use fornax_plan::{
    BlockId, Device, KvType, Limits, Program, Progress, SeqStep, SlotId, StepOutput, StepReport,
    Tokens, Want,
};

/// The proof's plan prepared for three sequences, and a block table for each.
fn program(device: &MetalDevice, kv_type: KvType) -> (Box<dyn Program>, Vec<Vec<BlockId>>) {
    let case = conformance::proof(TensorType::Q8_0);
    let limits = Limits { kv_blocks: 24, kv_type, ..conformance::limits_for(&case, device) };
    let tables = (0..3).map(|s| (0..8).map(|i| BlockId(i * 3 + s)).collect()).collect();
    (device.prepare(&case.plan, &limits).expect("the device runs the proof"), tables)
}

fn seq<'a>(
    slot: u32,
    tokens: Tokens<'a>,
    pos: u32,
    tables: &'a [&'a [BlockId]],
    wants: &'a [(std::ops::Range<u32>, Want)],
) -> SeqStep<'a> {
    SeqStep { slot: SlotId(slot), tokens, pos, tables, wants, sample: None, max_new: 1, stop: &[] }
}

/// A prompt of 40 tokens for `seqs` sequences, then one decoded token of each: its counts.
fn decoded(kv_type: KvType, seqs: u32, logprob: bool) -> StepReport {
    let device = MetalDevice::emulated(5);
    let (mut program, tables) = program(&device, kv_type);
    let tables: Vec<[&[BlockId]; 1]> = tables.iter().map(|t| [&t[..]]).collect();
    let prompt: Vec<u32> = (0..40).collect();
    let mut out = StepOutput::default();
    let last = [(39..40, Want::Token { logprob })];
    for s in 0..seqs {
        let step = seq(s, Tokens::Host(&prompt), 0, &tables[s as usize], &last);
        let ticket = program.submit(&[step]).expect("a step that fits");
        program.wait(ticket, &mut out).expect("a step that fits");
    }
    let first = [(0..1, Want::Token { logprob })];
    let next = |s: u32| seq(s, Tokens::Last { draft: &[] }, 40, &tables[s as usize], &first);
    let steps: Vec<SeqStep<'_>> = (0..seqs).map(next).collect();
    let ticket = program.submit(&steps).expect("a step that fits");
    program.wait(ticket, &mut out).expect("a step that fits");
    assert_eq!(out.tokens.len(), seqs as usize);
    program.step_report().expect("the emulator counts")
}

#[test]
fn a_token_is_one_command_buffer_and_five_dispatches_a_layer() {
    for kv_type in [KvType::F32, KvType::F16, KvType::Q8_0] {
        let r = decoded(kv_type, 1, false);
        assert_eq!((r.command_buffers, r.encoders, r.waits), (1, 1, 1));
        assert_eq!((r.layers, r.layer_dispatches, r.layer_barriers), (1, 5, 5), "{kv_type:?}");
        assert_eq!((r.dispatches, r.allocations), (5 + 6, 0));
        assert!(r.barriers < r.dispatches);
        assert_eq!(r.readback_bytes, 4);
        let sum: u64 = r.kernels.iter().map(|k| k.bytes_read).sum();
        assert_eq!(sum, r.bytes_read, "the kernels are all of it");
        assert_eq!(r.kernels.iter().map(|k| k.barriers).sum::<u64>(), r.barriers);
        assert!(r.bytes_weights < r.bytes_read && r.bytes_loaded > r.bytes_read);
    }
}

#[test]
fn every_weight_and_every_live_key_is_read_once() {
    let r = decoded(KvType::F32, 1, false);
    let plan = conformance::proof_plan(TensorType::Q8_0);
    // The row's own key and value are not read back.
    let kv = 40 * 2 * (32 + 32) * 4;
    assert_eq!(r.bytes_kv, kv);
    assert_eq!(r.bytes_needed, plan.bytes_per_token() + kv + 2 * 64 * 4);
    assert_eq!(r.bytes_weights, plan.bytes_per_token());
    // Sequences share the weights, and the cache of none is read twice.
    let three = decoded(KvType::F32, 3, false);
    assert_eq!(three.bytes_kv, 3 * kv);
    // All three continue one prompt, so that the embedding's row is one too.
    assert_eq!(three.bytes_weights, r.bytes_weights);
}

#[test]
fn four_bytes_come_back_for_a_token_and_eight_with_its_probability() {
    assert_eq!(decoded(KvType::F16, 3, false).readback_bytes, 3 * 4);
    assert_eq!(decoded(KvType::F16, 3, true).readback_bytes, 3 * 8);
}

#[test]
fn a_ticket_is_seen_half_done_and_can_be_stopped_there() {
    {
        let device = MetalDevice::emulated(6);
        let run = |looks: usize, stop: bool| {
            let (mut program, tables) = program(&device, KvType::F32);
            let table: [&[BlockId]; 1] = [&tables[1]];
            let want = [(0..1, Want::Token { logprob: true })];
            let step = SeqStep { max_new: 8, ..seq(1, Tokens::Host(&[7]), 0, &table, &want) };
            let ticket = program.submit(&[step]).unwrap();
            let mut out = StepOutput::default();
            let mut seen = Vec::new();
            for n in 1..=looks {
                let progress = program.poll(&ticket, &mut out).unwrap();
                let done = if n < 8 { Progress::Running } else { Progress::Done };
                assert_eq!((progress, out.tokens.len()), (done, n.min(8)));
                seen = out.tokens.clone();
            }
            if stop {
                program.stop(SlotId(1));
            }
            program.wait(ticket, &mut out).unwrap();
            let same =
                seen.iter().zip(&out.tokens).all(|(a, b)| (a.token, a.pos) == (b.token, b.pos));
            assert!(same, "what was seen stays");
            out.tokens.iter().map(|t| (t.pos, t.token)).collect::<Vec<_>>()
        };
        let all = run(0, false);
        assert_eq!(all.len(), 8);
        assert_eq!(run(3, false), all);
        assert_eq!(run(9, false), all);
        // The round under way when it was asked is the last.
        assert_eq!(run(3, true), all[..4]);
    }
}
