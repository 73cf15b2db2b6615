//! Commands, growth, chains, profiles, errors: the program beside its arithmetic.

use fornax_cpu::{CpuDevice, CpuOptions, Isa};
use fornax_gguf::TensorType;
use fornax_plan::conformance::proof_plan;
use fornax_plan::{
    ActMode, BlockId, Cmd, Device, KvType, Limits, Program, SeqStep, SlotId, StepOutput, TokenId,
    Tokens, Want,
};

use crate::invariance::{device, limits, table};

const TOKEN: [(std::ops::Range<u32>, Want); 1] = [(0..1, Want::Token { logprob: false })];

fn prefill(program: &mut dyn Program, slot: u32, tokens: &[TokenId], out: &mut StepOutput) {
    let table = table(slot);
    let n = tokens.len() as u32;
    let step = SeqStep {
        slot: SlotId(slot),
        tokens: Tokens::Host(tokens),
        pos: 0,
        tables: &[&table],
        wants: &[(n - 1..n, Want::Token { logprob: false })],
        sample: None,
        max_new: 1,
        stop: &[],
    };
    let ticket = program.submit(&[step]).unwrap();
    program.wait(ticket, out).unwrap();
}

/// Decodes `n` tokens from `pos` on, `at_once` on each ticket.
fn decode(
    program: &mut dyn Program,
    (slot, first): (u32, Option<TokenId>),
    table: &[BlockId],
    pos: u32,
    n: u32,
    at_once: u32,
) -> Vec<TokenId> {
    let mut ids = Vec::new();
    let mut out = StepOutput::default();
    let first = first.as_slice();
    while (ids.len() as u32) < n {
        let fresh = ids.is_empty() && !first.is_empty();
        let step = SeqStep {
            slot: SlotId(slot),
            tokens: if fresh { Tokens::Host(first) } else { Tokens::Last { draft: &[] } },
            pos: pos + ids.len() as u32,
            tables: &[table],
            wants: &TOKEN,
            sample: None,
            max_new: at_once,
            stop: &[],
        };
        let ticket = program.submit(&[step]).unwrap();
        program.wait(ticket, &mut out).unwrap();
        ids.extend(out.tokens.iter().map(|t| t.token));
    }
    ids
}

fn prompt() -> Vec<TokenId> {
    (0..70).map(|i| (i * 29 + 3) % 64).collect()
}

#[test]
fn keys_and_values_move_to_another_program_and_another_tier() {
    let plan = proof_plan(TensorType::Q8_0);
    for kv in [KvType::F32, KvType::F16, KvType::Q8_0] {
        let mut from = device(Isa::best(), 2).prepare(&plan, &limits(kv)).unwrap();
        let mut to = device(Isa::Scalar, 1).prepare(&plan, &limits(kv)).unwrap();
        let mut out = StepOutput::default();
        prefill(from.as_mut(), 0, &prompt(), &mut out);
        let first = out.tokens[0].token;
        let mut data = Vec::new();
        let (a, b) = (table(0), table(3));
        let read = Cmd::ReadKv { group: 0, table: &a, tokens: 0..70, out: &mut data };
        from.command(read).unwrap();
        assert_eq!(data.len(), 70 * 2 * (32 + 32));
        to.command(Cmd::WriteKv { group: 0, table: &b, tokens: 0..70, data: &data }).unwrap();
        let mut again = Vec::new();
        to.command(Cmd::ReadKv { group: 0, table: &b, tokens: 0..70, out: &mut again }).unwrap();
        if kv == KvType::Q8_0 {
            // The scale of a second rounding may differ in its last bit.
            for (x, y) in data.iter().zip(&again) {
                assert!((x - y).abs() <= 2e-3 * x.abs().max(0.1), "{x} {y}");
            }
        } else {
            assert_eq!(data, again);
        }
        let here = decode(from.as_mut(), (0, Some(first)), &a, 70, 20, 1);
        let there = decode(to.as_mut(), (3, Some(first)), &b, 70, 20, 1);
        if kv != KvType::Q8_0 {
            assert_eq!(here, there, "{kv:?}");
        }
    }
}

#[test]
fn a_copied_block_is_read_like_its_original() {
    let plan = proof_plan(TensorType::Q8_0);
    let mut program = device(Isa::best(), 2).prepare(&plan, &limits(KvType::F16)).unwrap();
    let mut out = StepOutput::default();
    prefill(program.as_mut(), 0, &prompt(), &mut out);
    let first = out.tokens[0].token;
    let (a, mut b) = (table(0), table(0));
    b[..3].copy_from_slice(&table(1)[..3]);
    for i in 0..3 {
        program.command(Cmd::CopyBlock { group: 0, from: a[i], to: b[i] }).unwrap();
    }
    let original = decode(program.as_mut(), (0, Some(first)), &a, 70, 12, 1);
    let copy = decode(program.as_mut(), (4, Some(first)), &b, 70, 12, 1);
    assert_eq!(original, copy);
}

#[test]
fn longer_blocks_hold_copy_and_grow_the_same_tokens() {
    let plan = proof_plan(TensorType::Q8_0);
    let cpu = device(Isa::best(), 2);
    let mut small = cpu.prepare(&plan, &limits(KvType::F16)).unwrap();
    let few = Limits { kv_blocks: 3, ..limits(KvType::F16) };
    let mut long = cpu.with_kv_block(33).prepare(&plan, &few).unwrap();
    assert_eq!(long.memory().kv, small.memory().kv / 60 * 6);
    let [a, b, c, d] = [1, 0, 2, 3].map(BlockId);
    let expected = decode(small.as_mut(), (0, Some(5)), &table(0), 0, 90, 1);
    assert_eq!(decode(long.as_mut(), (0, Some(5)), &[a, b], 0, 90, 1), expected);
    let read = |program: &mut dyn Program, table: &[BlockId]| {
        let mut out = Vec::new();
        program.command(Cmd::ReadKv { group: 0, table, tokens: 0..90, out: &mut out }).unwrap();
        out
    };
    let data = read(small.as_mut(), &table(0));
    assert_eq!(read(long.as_mut(), &[a, b]), data);
    for to in [d, BlockId(u32::MAX)] {
        let refused = long.command(Cmd::CopyBlock { group: 0, from: a, to });
        assert!(refused.unwrap_err().is_malformed());
    }
    long.grow_kv(1).unwrap();
    for (from, to) in [(a, c), (b, d)] {
        long.command(Cmd::CopyBlock { group: 0, from, to }).unwrap();
    }
    assert_eq!(read(long.as_mut(), &[c, d]), data);
    let original = decode(long.as_mut(), (0, Some(7)), &[a, b], 90, 20, 5);
    assert_eq!(decode(long.as_mut(), (1, Some(7)), &[c, d], 90, 20, 5), original);
}

#[test]
fn growth_moves_nothing_and_chains_equal_single_tokens() {
    let plan = proof_plan(TensorType::Q8_0);
    let mut program = device(Isa::best(), 2).prepare(&plan, &limits(KvType::F16)).unwrap();
    let before = program.memory();
    let mut out = StepOutput::default();
    prefill(program.as_mut(), 0, &prompt(), &mut out);
    let first = out.tokens[0].token;
    let mut far = table(0);
    far.push(BlockId(60));
    let refused = program.command(Cmd::CopyBlock { group: 0, from: BlockId(60), to: BlockId(0) });
    assert!(refused.unwrap_err().is_malformed());
    program.grow_kv(4).unwrap();
    assert_eq!(program.memory().kv, before.kv / 60 * 64);
    far[3] = BlockId(63);
    let single = decode(program.as_mut(), (0, Some(first)), &far, 70, 60, 1);
    let chained = decode(program.as_mut(), (0, Some(first)), &far, 70, 60, 12);
    assert_eq!(single, chained);
}

#[test]
fn a_profile_names_the_fused_stages_and_their_bytes() {
    let plan = proof_plan(TensorType::Q8_0);
    let mut program = device(Isa::best(), 2).prepare(&plan, &limits(KvType::F16)).unwrap();
    let table = table(0);
    let step = SeqStep {
        slot: SlotId(0),
        tokens: Tokens::Host(&[5]),
        pos: 0,
        tables: &[&table],
        wants: &TOKEN,
        sample: None,
        max_new: 3,
        stop: &[],
    };
    let mut out = StepOutput::default();
    let times = program.profile(&[step], &mut out).unwrap();
    assert_eq!(out.tokens.len(), 3);
    let mut names: Vec<&str> = times.iter().map(|t| t.name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "embed+rms_norm+qkv",
            "matmul",
            "qk_norm_rope+kv_write+attention",
            "rms_norm+gated_mlp",
            "sample",
            "select_rows+rms_norm+logits"
        ]
    );
    let bytes: u64 = times.iter().map(|t| t.bytes).sum();
    assert_eq!(bytes, plan.bytes_per_token());
    assert!(times.iter().all(|t| t.seconds > 0.0));
}

#[test]
fn what_it_does_not_do_is_refused_at_load_by_name() {
    let plan = proof_plan(TensorType::Q8_0);
    let device = device(Isa::best(), 1);
    let f32 = Limits { act: Some(ActMode::F32), ..limits(KvType::F16) };
    let refusals = device.supports(&plan, &f32);
    assert_eq!(refusals.len(), 1);
    let e = device.prepare(&plan, &f32).err().unwrap();
    assert!(e.is_unsupported() && e.to_string().contains("f32 activations"), "{e}");
    let missing = Isa::ALL.iter().copied().find(|isa| !isa.is_available()).unwrap();
    let options = CpuOptions { isa: Some(missing), ..CpuOptions::default() };
    let e = CpuDevice::new(options).unwrap_err();
    assert!(e.is_unsupported() && e.to_string().contains(missing.name()), "{e}");
}

#[test]
fn a_bad_step_does_nothing_and_the_next_one_runs() {
    let plan = proof_plan(TensorType::Q8_0);
    let mut program = device(Isa::best(), 2).prepare(&plan, &limits(KvType::F16)).unwrap();
    let table = table(0);
    let step = SeqStep {
        slot: SlotId(0),
        tokens: Tokens::Host(&[64]),
        pos: 0,
        tables: &[&table],
        wants: &TOKEN,
        sample: None,
        max_new: 1,
        stop: &[],
    };
    let e = program.submit(&[step]).unwrap_err();
    assert!(e.is_malformed() && e.to_string().contains("token 64"), "{e}");
    let mut out = StepOutput::default();
    prefill(program.as_mut(), 0, &prompt(), &mut out);
    assert_eq!(out.tokens.len(), 1);
}

#[test]
fn memory_rate_is_measured() {
    let rate = device(Isa::best(), 2).read_rate(8 << 20).unwrap();
    assert!(rate > 1e8 && rate < 1e13, "{rate}");
}
