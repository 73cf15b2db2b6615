//! Graphs of many sequences: few of them for all numbers of sequences, and rows beyond the last sequence do nothing.

use std::path::PathBuf;

use fornax_gguf::Gguf;
use fornax_plan::{
    ActMode, BlockId, Device, KvType, Limits, Plan, Program, SeqStep, SlotId, StepOutput, TokenId,
    Tokens, Want,
};

use crate::CudaDevice;

const SLOTS: u32 = 12;
const MORE: u32 = 4;

fn program(device: &CudaDevice, plan: &Plan) -> Box<dyn Program> {
    let limits = Limits {
        slots: SLOTS,
        rows: SLOTS,
        wanted: SLOTS,
        kv_blocks: SLOTS,
        kv_type: KvType::F32,
        act: Some(ActMode::F32),
        ..Limits::default()
    };
    device.prepare(plan, &limits).unwrap()
}

/// The token that a slot begins with.
fn first(slot: u32) -> TokenId {
    5 + 7 * slot
}

/// What each of these slots gives after its first token: several tokens of one ticket, then one of another.
fn tokens(program: &mut dyn Program, plan: &Plan, slots: &[u32]) -> Vec<Vec<TokenId>> {
    let blocks: Vec<[BlockId; 1]> = slots.iter().map(|s| [BlockId(*s)]).collect();
    let tables: Vec<Vec<&[BlockId]>> = blocks.iter().map(|b| vec![&b[..]; plan.kv.len()]).collect();
    let want = [(0..1, Want::Token { logprob: false })];
    let mut all = vec![Vec::new(); slots.len()];
    for (pos, max_new) in [(0, MORE), (MORE, 1)] {
        let starts: Vec<[TokenId; 1]> = slots.iter().map(|s| [first(*s)]).collect();
        let steps: Vec<SeqStep<'_>> = (0..slots.len())
            .map(|ix| SeqStep {
                slot: SlotId(slots[ix]),
                tokens: if pos == 0 {
                    Tokens::Host(&starts[ix])
                } else {
                    Tokens::Last { draft: &[] }
                },
                pos,
                tables: &tables[ix],
                wants: &want,
                sample: None,
                max_new,
                stop: &[],
            })
            .collect();
        let mut out = StepOutput::default();
        let ticket = program.submit(&steps).unwrap();
        program.wait(ticket, &mut out).unwrap();
        out.tokens.iter().for_each(|t| all[t.seq as usize].push(t.token));
    }
    all
}

#[test]
fn a_few_graphs_serve_every_number_of_sequences_and_masked_rows_touch_nothing() {
    // The model with short convolutions has a state in every slot, which a row too many would change.
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models/lfm2");
    let gguf = Gguf::open(&folder.join("model.gguf")).unwrap();
    let plan = fornax_engine::arch::plan(&gguf).unwrap();
    let (device, control) = CudaDevice::on_the_cpu();
    let alone: Vec<Vec<TokenId>> = (0..SLOTS)
        .map(|slot| tokens(&mut *program(&device, &plan), &plan, &[slot]).remove(0))
        .collect();
    assert!(alone.iter().all(|t| t.len() == MORE as usize + 1));
    assert!(alone.iter().any(|t| *t != alone[0]), "sequences that differ");
    let before = control.graphs();
    let mut together = program(&device, &plan);
    // From many to few, so that what earlier sequences left lies in the masked rows' places; slots from behind, so that slot
    // 0, which masked rows name, is at rest most of the time.
    for n in (1..=SLOTS).rev() {
        let slots: Vec<u32> = (SLOTS - n..SLOTS).collect();
        let have = tokens(&mut *together, &plan, &slots);
        for (slot, have) in slots.iter().zip(&have) {
            assert_eq!(have, &alone[*slot as usize], "slot {slot} among {n}");
        }
    }
    // 1, 2, 4, 8 and 12 rows, each as the first round of a ticket and as a later one.
    assert_eq!(control.graphs() - before, 10);
}
