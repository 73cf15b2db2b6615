//! Tokens that the device draws: those of the reference, in chains, ragged, with penalties and log-probabilities.

use fornax_gguf::TensorType;
use fornax_plan::conformance;
use fornax_plan::reference::ReferenceDevice;
use fornax_plan::{
    BlockId, Device, Limits, Result, SampleParams, SeqStep, SlotId, StepOutput, TokenOut, Tokens,
    Want,
};

/// What three sequences choose in one chain and in single steps after it.
fn chosen(device: &dyn Device, chain: u32) -> Result<Vec<Vec<TokenOut>>> {
    let case = conformance::proof(TensorType::F32);
    let block = device.info().kv_block;
    let per_seq = 64u32.div_ceil(block);
    let limits = Limits { kv_blocks: 3 * per_seq, ..conformance::limits_for(&case, device) };
    let mut program = device.prepare(&case.plan, &limits)?;
    let table = |slot: u32| (0..per_seq).map(|i| BlockId(i * 3 + slot)).collect::<Vec<_>>();
    let tables = [0, 1, 2].map(table);
    let base = SampleParams { temperature: 0.9, seed: 5, ..SampleParams::default() };
    let params = [
        SampleParams { top_k: 12, top_p: 0.9, repeat_penalty: 1.2, ..base },
        SampleParams { seed: 6, frequency_penalty: 0.5, penalty_window: u32::MAX, ..base },
        SampleParams { presence_penalty: 3.0, ..SampleParams::default() },
    ];
    let prompts: [&[u32]; 3] = [&[3, 9, 4], &[7], &[1, 2, 1, 2, 5]];
    let mut all = vec![Vec::new(); 3];
    let mut pos = prompts.map(|p| p.len() as u32);
    for step in 0..4 {
        let tables: Vec<[&[BlockId]; 1]> = tables.iter().map(|t| [&t[..]]).collect();
        let rows = prompts.map(|p| if step == 0 { p.len() as u32 } else { 1 });
        let wants = rows.map(|n| [(n - 1..n, Want::Token { logprob: true })]);
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
                sample: Some(params[i]),
                max_new: if step == 1 { chain } else { 1 },
                stop: &[],
            })
            .collect();
        let ticket = program.submit(&seqs)?;
        let mut out = StepOutput::default();
        program.wait(ticket, &mut out)?;
        for t in &out.tokens {
            all[t.seq as usize].push(*t);
            pos[t.seq as usize] = t.pos + 1;
        }
    }
    Ok(all)
}

#[test]
fn drawn_tokens_are_those_of_the_reference() {
    for (seed, chain) in [(0, 1), (1, 6), (2, 8)] {
        let device = crate::kernels(seed);
        let have = chosen(&device, chain).unwrap();
        let want = chosen(&ReferenceDevice::default(), chain).unwrap();
        for (h, w) in have.iter().flatten().zip(want.iter().flatten()) {
            assert_eq!((h.seq, h.pos, h.token), (w.seq, w.pos, w.token));
            assert!((h.logprob - w.logprob).abs() < 1e-3, "{h:?} for {w:?}");
        }
        assert_eq!(have.iter().map(Vec::len).sum::<usize>(), 3 * (3 + chain as usize));
        assert_eq!(device.journal().submissions(), 4, "a chain is one submission, drawn or not");
    }
}

#[cfg(not(target_os = "macos"))]
#[test]
fn no_barrier_of_a_draw_can_be_missing() {
    let device = fornax_metal::MetalDevice::emulated(4);
    chosen(&device, 1).unwrap();
    let barriers = device.journal().barriers();
    // Of the first step, which prefills, and of the last, which decodes.
    for missing in (0..14).chain(barriers - 14..barriers) {
        let without = fornax_metal::Barriers::AllBut(missing);
        let device = fornax_metal::MetalDevice::emulated(4).sabotaged(without);
        let e = chosen(&device, 1).unwrap_err();
        assert!(e.is_lost() && e.to_string().contains("op "), "{missing} of {barriers}: {e}");
    }
}
