//! Tokens that the kernels draw: those of the reference, in chains, ragged, with penalties and log-probabilities.

use fornax_gguf::TensorType;
use fornax_plan::reference::ReferenceDevice;
use fornax_plan::{
    BlockId, Device, Limits, SampleParams, SeqStep, SlotId, StepOutput, TokenOut, Tokens, Want,
    conformance,
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
