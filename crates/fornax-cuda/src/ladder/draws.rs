//! Tokens that the kernels draw: those of the reference, in chains, ragged, with penalties and log-probabilities.

use fornax_gguf::TensorType;
use fornax_plan::reference::ReferenceDevice;
use fornax_plan::sample::uniform;
use fornax_plan::{
    BlockId, Device, Hyper, Limits, Linear, Op, Plan, SampleParams, SeqStep, SlotId, StepOutput,
    TokenId, TokenOut, Tokens, Want, WeightRef, conformance,
};

use crate::CudaDevice;

/// What three sequences choose in five steps: prompts (without a word of how tokens are chosen where `late`), a chain, single
/// steps with one more of them under way each time where `ahead`.
fn chosen(
    device: &dyn Device,
    params: &[SampleParams; 3],
    (chain, late, ahead): (u32, bool, bool),
) -> Vec<TokenOut> {
    let case = conformance::proof(TensorType::F32);
    let per_seq = 64u32.div_ceil(device.info().kv_block);
    let limits = Limits { kv_blocks: 3 * per_seq, ..conformance::limits_for(&case, device) };
    let mut program = device.prepare(&case.plan, &limits).unwrap();
    let table = |slot: u32| (0..per_seq).map(|i| BlockId(i * 3 + slot)).collect::<Vec<_>>();
    let tables = [0, 1, 2].map(table);
    let prompts: [&[u32]; 3] = [&[3, 9, 4], &[7], &[1, 2, 1, 2, 5]];
    let mut all = Vec::new();
    let mut pos = prompts.map(|p| p.len() as u32);
    let mut under_way = None;
    for step in 0..5 {
        let tables: Vec<[&[BlockId]; 1]> = tables.iter().map(|t| [&t[..]]).collect();
        let rows = prompts.map(|p| if step == 0 { p.len() as u32 } else { 1 });
        let wants = rows.map(|n| [(n - 1..n, Want::Token { logprob: true })]);
        let max_new = if step == 1 { chain } else { 1 };
        let seqs: Vec<SeqStep<'_>> = (0..3)
            .map(|i| SeqStep {
                slot: SlotId(i as u32),
                tokens: match step {
                    0 => Tokens::Host(prompts[i]),
                    _ => Tokens::Last { draft: &[] },
                },
                pos: if step == 0 { 0 } else { pos[i] - 1 },
                tables: &tables[i],
                wants: &wants[i],
                sample: (step > 0 || !late).then_some(params[i]),
                max_new,
                stop: &[],
            })
            .collect();
        let ticket = program.submit(&seqs).unwrap();
        pos.iter_mut().for_each(|p| *p += max_new);
        let mut out = StepOutput::default();
        if let Some(before) = under_way.replace(ticket)
            && ahead
        {
            program.wait(before, &mut out).unwrap();
        }
        if !ahead && let Some(ticket) = under_way.take() {
            program.wait(ticket, &mut out).unwrap();
        }
        all.extend(out.tokens.iter().copied());
    }
    if let Some(ticket) = under_way {
        let mut out = StepOutput::default();
        program.wait(ticket, &mut out).unwrap();
        all.extend(out.tokens);
    }
    all.sort_by_key(|t| (t.seq, t.pos));
    all
}

fn compare(params: &[SampleParams; 3]) {
    let (device, _) = CudaDevice::on_the_cpu();
    for way in [(1, false, false), (6, false, true), (8, true, false), (3, true, true)] {
        let have = chosen(&device, params, way);
        let want = chosen(&ReferenceDevice::default(), params, (way.0, way.1, false));
        assert_eq!(have.len(), 3 * (4 + way.0 as usize));
        for (h, w) in have.iter().zip(&want) {
            assert_eq!((h.seq, h.pos, h.token), (w.seq, w.pos, w.token), "{way:?} {params:?}");
            assert!((h.logprob - w.logprob).abs() < 1e-3, "{h:?} for {w:?}");
        }
        assert_eq!(have.len(), want.len());
    }
}

#[test]
fn drawn_tokens_are_those_of_the_reference() {
    let base = SampleParams { temperature: 0.9, seed: 5, ..SampleParams::default() };
    compare(&[
        SampleParams { top_k: 12, top_p: 0.9, repeat_penalty: 1.2, ..base },
        SampleParams { seed: 6, frequency_penalty: 0.5, penalty_window: u32::MAX, ..base },
        SampleParams { presence_penalty: 3.0, ..SampleParams::default() },
    ]);
}

#[test]
fn every_cut_gives_the_tokens_of_the_reference_and_greedy_rows_run_beside() {
    let base = SampleParams { temperature: 1.3, seed: 1 << 40, ..SampleParams::default() };
    compare(&[
        SampleParams { min_p: 0.05, ..base },
        SampleParams::default(),
        SampleParams { top_p: 0.4, min_p: 0.2, seed: 77, ..base },
    ]);
    compare(&[
        SampleParams { top_k: 1, ..base },
        SampleParams { top_k: 1_000_000, seed: 3, ..base },
        SampleParams { top_p: 0.0, seed: 4, ..base },
    ]);
}

/// Logits of a vocabulary of several parts, straight from the embedding: all much alike for even tokens, few that count for
/// odd ones.
fn large() -> Plan {
    let (vocab, width) = (9_001u32, 8u32);
    let hyper = Hyper { family: "draws".into(), vocab, width, context: 64 };
    let mut p = Plan::new(hyper);
    let value = |seed, i| 2.0 * uniform(seed, i) - 1.0;
    let scale = |i: u32| if (i / width).is_multiple_of(2) { 0.3 } else { 6.0 };
    let table: Vec<f32> = (0..vocab * width).map(|i| scale(i) * value(1, i)).collect();
    let head: Vec<f32> = (0..vocab * width).map(|i| value(2, i)).collect();
    let table = p.weight(WeightRef::from_f32("table", vocab, width, &table));
    let weight = p.weight(WeightRef::from_f32("head", vocab, width, &head));
    let x = p.value("x", width);
    p.push(Op::Embed { table, scale: 1.0, out: x });
    let last = p.wanted_value("last", width);
    p.push(Op::SelectRows { x, out: last });
    let logits = p.wanted_value("logits", vocab);
    let linear = Linear { weight, bias: None };
    p.push(Op::Logits { x: last, linear, scale: 1.0, softcap: None, out: logits });
    p.push(Op::Sample { logits });
    p
}

/// The token after each of these, by each of these parameters: every one a sequence.
fn after(device: &dyn Device, plan: &Plan, all: &[(TokenId, SampleParams)]) -> Vec<TokenId> {
    let n = all.len() as u32;
    let limits = Limits { slots: n, rows: n, wanted: n, ..Limits::default() };
    let mut program = device.prepare(plan, &limits).unwrap();
    let tokens: Vec<[TokenId; 1]> = all.iter().map(|a| [a.0]).collect();
    let steps: Vec<SeqStep<'_>> = (0..all.len())
        .map(|i| SeqStep {
            slot: SlotId(i as u32),
            tokens: Tokens::Host(&tokens[i]),
            pos: 0,
            tables: &[],
            wants: &[(0..1, Want::Token { logprob: false })],
            sample: Some(all[i].1),
            max_new: 1,
            stop: &[],
        })
        .collect();
    let mut out = StepOutput::default();
    let ticket = program.submit(&steps).unwrap();
    program.wait(ticket, &mut out).unwrap();
    out.tokens.iter().map(|t| t.token).collect()
}

#[test]
fn flat_and_steep_rows_of_a_large_vocabulary_are_drawn_alike() {
    let plan = large();
    let mut all = Vec::new();
    for (top_k, top_p, min_p) in [
        (0, 1.0, 0.0),
        (40, 1.0, 0.0),
        (40, 0.95, 0.05),
        (0, 0.3, 0.0),
        (0, 0.97, 0.0),
        (0, 1.0, 0.6),
        (700, 0.5, 0.0),
        (5_000, 1.0, 0.0),
    ] {
        for seed in 0..4 {
            let base = SampleParams { temperature: 0.9, seed, ..SampleParams::default() };
            let token = 10 + (all.len() as u32 + seed as u32) % 7;
            all.push((token, SampleParams { top_k, top_p, min_p, ..base }));
        }
    }
    let (device, _) = CudaDevice::on_the_cpu();
    let have = after(&device, &plan, &all);
    let want = after(&ReferenceDevice::default(), &plan, &all);
    for ((h, w), asked) in have.iter().zip(&want).zip(&all) {
        assert_eq!(h, w, "{asked:?}");
    }
    let best = after(
        &device,
        &plan,
        &all.iter().map(|a| (a.0, SampleParams::default())).collect::<Vec<_>>(),
    );
    assert!(have.iter().zip(&best).filter(|(h, b)| h != b).count() > 16, "most are not the best");
}
