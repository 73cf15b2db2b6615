//! What a row computes depends on its own sequence alone: random ragged schedules, chunkings,
//! tiers, thread counts and KV types of one model, bit for bit.

use std::collections::BTreeMap;

use fornax_cpu::{CpuDevice, CpuOptions, Isa};
use fornax_gguf::TensorType;
use fornax_plan::conformance::{Case, Seq, cases, limits_for, proof_plan, run as run_case};
use fornax_plan::{
    BlockId, Device, KvType, Limits, Plan, Program, SeqStep, SlotId, StepOutput, TokenId, Tokens,
    Want,
};

const SLOTS: u32 = 5;
const BLOCKS_EACH: u32 = 12;

pub(crate) fn device(isa: Isa, threads: usize) -> CpuDevice {
    let options = CpuOptions {
        threads: Some(threads),
        isa: Some(isa),
        pin: Some(false),
        ..CpuOptions::default()
    };
    CpuDevice::new(options).unwrap()
}

pub(crate) fn limits(kv_type: KvType) -> Limits {
    let kv_blocks = SLOTS * BLOCKS_EACH;
    Limits {
        slots: SLOTS,
        rows: 400,
        wanted: 400,
        kv_blocks,
        kv_type,
        act: None,
        ..Limits::default()
    }
}

/// Scattered blocks: no two neighbours of a sequence lie side by side.
pub(crate) fn table(slot: u32) -> Vec<BlockId> {
    (0..BLOCKS_EACH).map(|i| BlockId(i * SLOTS + (slot + i) % SLOTS)).collect()
}

/// A small generator of numbers, so that a failure can be run again.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, n: u32) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % u64::from(n)) as u32
    }
}

pub(crate) fn prompt(seq: u32, len: u32) -> Vec<TokenId> {
    let mut dice = Dice(u64::from(seq) + 77);
    (0..len).map(|_| dice.roll(64)).collect()
}

/// The logits of every row of a sequence run alone in chunks of `chunk`.
pub(crate) fn alone(
    program: &mut dyn Program,
    slot: u32,
    tokens: &[TokenId],
    chunk: usize,
) -> Vec<f32> {
    let table = table(slot);
    let mut all = Vec::new();
    let mut out = StepOutput::default();
    let mut pos = 0;
    for part in tokens.chunks(chunk) {
        let n = part.len() as u32;
        let step = SeqStep {
            slot: SlotId(slot),
            tokens: Tokens::Host(part),
            pos,
            tables: &[&table],
            wants: &[(0..n, Want::Logits)],
            sample: None,
            max_new: 1,
            stop: &[],
        };
        let ticket = program.submit(&[step]).unwrap();
        program.wait(ticket, &mut out).unwrap();
        all.extend_from_slice(&out.logits);
        pos += n;
    }
    all
}

fn run(plan: &Plan, isa: Isa, threads: usize, kv: KvType, len: u32, chunk: usize) -> Vec<f32> {
    let mut program = device(isa, threads).prepare(plan, &limits(kv)).unwrap();
    alone(program.as_mut(), 1, &prompt(9, len), chunk)
}

#[test]
fn chunks_tiers_and_threads_leave_every_bit_alone() {
    for ty in [TensorType::Q8_0, TensorType::F16, TensorType::Q4_0] {
        let plan = proof_plan(ty);
        for kv in [KvType::F32, KvType::F16, KvType::Q8_0] {
            // Past the first split of 256 keys, and not a whole number of anything.
            let len = 333;
            let want = run(&plan, Isa::Scalar, 1, kv, len, 333);
            assert!(want.iter().all(|v| v.is_finite()));
            for isa in Isa::available() {
                for (threads, chunk) in [(1, 1), (2, 2), (3, 7), (2, 64), (2, 333)] {
                    let have = run(&plan, isa, threads, kv, len, chunk);
                    assert!(
                        want == have,
                        "{ty} {kv:?} {isa}, {threads} threads, chunks of {chunk}"
                    );
                }
            }
        }
    }
}

/// Five sequences in a random ragged schedule: mixed prefill chunks and single tokens.
fn ragged(program: &mut dyn Program, prompts: &[Vec<TokenId>], seed: u64) -> Vec<Vec<f32>> {
    let mut dice = Dice(seed);
    let tables: Vec<Vec<BlockId>> = (0..SLOTS).map(table).collect();
    let tables: Vec<[&[BlockId]; 1]> = tables.iter().map(|t| [t.as_slice()]).collect();
    let mut logits: Vec<Vec<f32>> = vec![Vec::new(); prompts.len()];
    let mut pos = vec![0usize; prompts.len()];
    let mut out = StepOutput::default();
    while pos.iter().zip(prompts).any(|(p, t)| *p < t.len()) {
        let mut step = Vec::new();
        let mut who = Vec::new();
        let mut wants = Vec::new();
        let order = dice.roll(5) as usize;
        for i in (0..prompts.len()).map(|i| (i + order) % prompts.len()) {
            let left = prompts[i].len() - pos[i];
            if left == 0 || dice.roll(3) == 0 {
                continue;
            }
            let most = [1, 1, 5, 70][dice.roll(4) as usize];
            who.push((i, left.min(most)));
            wants.push([(0..left.min(most) as u32, Want::Logits)]);
        }
        for ((i, n), wants) in who.iter().zip(&wants) {
            step.push(SeqStep {
                slot: SlotId(*i as u32),
                tokens: Tokens::Host(&prompts[*i][pos[*i]..pos[*i] + n]),
                pos: pos[*i] as u32,
                tables: &tables[*i],
                wants,
                sample: None,
                max_new: 1,
                stop: &[],
            });
        }
        if step.is_empty() {
            continue;
        }
        let ticket = program.submit(&step).unwrap();
        program.wait(ticket, &mut out).unwrap();
        let mut at = 0;
        for (i, n) in who {
            let len = n * 64;
            logits[i].extend_from_slice(&out.logits[at..at + len]);
            at += len;
            pos[i] += n;
        }
    }
    logits
}

#[test]
fn a_sequence_computes_the_same_whoever_shares_its_steps() {
    let plan = proof_plan(TensorType::Q8_0);
    let device = device(Isa::best(), 2);
    let prompts: Vec<Vec<TokenId>> =
        [300, 5, 97, 33, 64].iter().enumerate().map(|(i, n)| prompt(i as u32, *n)).collect();
    let mut program = device.prepare(&plan, &limits(KvType::F16)).unwrap();
    let want: Vec<Vec<f32>> = (0..prompts.len())
        .map(|i| alone(program.as_mut(), (i as u32 + 2) % SLOTS, &prompts[i], 400))
        .collect();
    for seed in 0..12 {
        let have = ragged(program.as_mut(), &prompts, seed);
        assert!(have == want, "seed {seed}");
    }
}

/// The ids of a chain of `n` tokens after a prompt of 800.
fn long_chain(plan: &Plan, isa: Isa, threads: usize, n: u32) -> Vec<(TokenId, u32)> {
    let limits = Limits { kv_blocks: 30, rows: 800, ..limits(KvType::F16) };
    let mut program = device(isa, threads).prepare(plan, &limits).unwrap();
    let tokens = prompt(4, 800);
    let table: Vec<BlockId> = (0..30).rev().map(BlockId).collect();
    let step = SeqStep {
        slot: SlotId(0),
        tokens: Tokens::Host(&tokens),
        pos: 0,
        tables: &[&table],
        wants: &[(799..800, Want::Token { logprob: true })],
        sample: None,
        max_new: n,
        stop: &[],
    };
    let ticket = program.submit(&[step]).unwrap();
    let mut out = StepOutput::default();
    program.wait(ticket, &mut out).unwrap();
    out.tokens.iter().map(|t| (t.token, t.logprob.to_bits())).collect()
}

#[test]
fn long_rows_are_split_over_threads_without_a_trace() {
    // Two key heads and four splits: more threads than heads share the splits of each.
    let plan = proof_plan(TensorType::Q8_0);
    let want = long_chain(&plan, Isa::Scalar, 1, 40);
    assert_eq!(want.len(), 40);
    for isa in Isa::available() {
        for threads in [2, 3, 6] {
            assert_eq!(want, long_chain(&plan, isa, threads, 40), "{isa}, {threads} threads");
        }
    }
}

/// The hidden rows of a case, by slot and position, as bits.
fn hidden_rows(device: &CpuDevice, case: &Case) -> BTreeMap<(usize, u32, u32), Vec<u32>> {
    let limits = limits_for(case, device);
    let outs = run_case(device, case, &limits, 1).unwrap();
    let mut all = BTreeMap::new();
    let mut times = BTreeMap::new();
    for (step, out) in case.steps.iter().zip(&outs) {
        let width = out.hidden.len() / out.hidden_rows.len().max(1);
        for (row, at) in out.hidden.chunks(width.max(1)).zip(&out.hidden_rows) {
            // A sequence may start over: the same position is then seen again.
            let slot = step[at.seq as usize].slot;
            let time = times.entry((slot, at.pos)).or_insert(0);
            *time += 1;
            all.insert((*time, slot, at.pos), row.iter().map(|v| v.to_bits()).collect());
        }
    }
    all
}

#[test]
fn every_op_computes_a_row_alone_as_it_does_in_company() {
    let mut seen = 0;
    for case in cases() {
        let plain = |s: &Seq| {
            s.max_new == 1 && !s.tokens.is_empty() && s.wants.iter().all(|w| w.1 == Want::Hidden)
        };
        if !case.steps.iter().flatten().all(plain) {
            continue;
        }
        seen += 1;
        // Every token in a step of its own.
        let mut split = case.clone();
        split.steps = Vec::new();
        for seq in case.steps.iter().flatten() {
            for (at, token) in seq.tokens.iter().enumerate() {
                split.steps.push(vec![Seq {
                    slot: seq.slot,
                    pos: seq.pos + at as u32,
                    tokens: vec![*token],
                    wants: vec![(0..1, Want::Hidden)],
                    max_new: 1,
                }]);
            }
        }
        for threads in [1, 3] {
            let device = device(Isa::best(), threads);
            let want = hidden_rows(&device, &case);
            assert!(!want.is_empty(), "{}", case.name);
            assert_eq!(want, hidden_rows(&device, &split), "{}, {threads} threads", case.name);
        }
    }
    assert!(seen > 40, "only {seen} cases");
}
