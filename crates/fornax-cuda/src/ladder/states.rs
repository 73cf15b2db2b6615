//! States of sequences on the model with short convolutions: the same however a sequence is cut, and never those of a token
//! that was rejected, that came after a stop, or that another sequence left in the slot.

use std::path::PathBuf;

use fornax_gguf::Gguf;
use fornax_plan::reference::ReferenceDevice;
use fornax_plan::{
    ActMode, BlockId, Cmd, Device, KvType, Limits, Plan, Program, SeqStep, SlotId, StepOutput,
    TokenId, Tokens, Want,
};

use crate::CudaDevice;

const SLOT: SlotId = SlotId(1);
const PROMPT: [TokenId; 9] = [5, 17, 3, 99, 42, 7, 7, 80, 21];

fn plan() -> Plan {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models/lfm2");
    let gguf = Gguf::open(&folder.join("model.gguf")).unwrap();
    fornax_engine::arch::plan(&gguf).unwrap()
}

/// A program and what a sequence in it needs.
struct Run<'a> {
    plan: &'a Plan,
    program: Box<dyn Program>,
    table: Vec<BlockId>,
}

impl<'a> Run<'a> {
    fn new(device: &dyn Device, plan: &'a Plan) -> Run<'a> {
        let limits = Limits {
            slots: 2,
            rows: 16,
            wanted: 16,
            kv_blocks: 40,
            kv_type: KvType::F32,
            act: Some(ActMode::F32),
            ..Limits::default()
        };
        let program = device.prepare(plan, &limits).unwrap();
        Run { plan, program, table: (0..4).rev().map(BlockId).collect() }
    }

    /// Tokens from a position on, and what the last row gives: logits, or a chain of tokens.
    fn step(&mut self, pos: u32, tokens: &[TokenId], more: u32, stop: &[TokenId]) -> StepOutput {
        let n = tokens.len() as u32;
        let want = if more > 0 { Want::Token { logprob: false } } else { Want::Logits };
        let wants = [(n - 1..n, want)];
        let tables = vec![&self.table[..]; self.plan.kv.len()];
        let step = SeqStep {
            slot: SLOT,
            tokens: Tokens::Host(tokens),
            pos,
            tables: &tables,
            wants: &wants,
            sample: None,
            max_new: more.max(1),
            stop,
        };
        let mut out = StepOutput::default();
        let ticket = self.program.submit(&[step]).unwrap();
        self.program.wait(ticket, &mut out).unwrap();
        out
    }

    fn state(&mut self) -> Vec<f32> {
        let mut out = Vec::new();
        self.program.command(Cmd::ReadState { slot: SLOT, out: &mut out }).unwrap();
        out
    }
}

fn close(have: &[f32], want: &[f32], what: &str) {
    assert_eq!(have.len(), want.len(), "{what}");
    assert!(!have.is_empty() && have.iter().any(|v| *v != 0.0), "{what}");
    let scale = 1.0 + want.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    for (h, w) in have.iter().zip(want) {
        assert!((h - w).abs() / scale < 1e-5, "{what}: {h} for {w}");
    }
}

#[test]
fn states_are_those_of_the_reference_and_do_not_depend_on_how_a_sequence_is_cut() {
    let plan = plan();
    let (device, _) = CudaDevice::on_the_cpu();
    let mut whole = Run::new(&device, &plan);
    let logits = whole.step(0, &PROMPT, 0, &[]).logits;
    let state = whole.state();
    let mut reference = Run::new(&ReferenceDevice::default(), &plan);
    close(&logits, &reference.step(0, &PROMPT, 0, &[]).logits, "logits");
    close(&state, &reference.state(), "states");
    for cuts in [&[1, 8][..], &[4, 1, 4], &[8, 1], &[1; 9]] {
        let mut run = Run::new(&device, &plan);
        // What another sequence left in the slot must not be seen.
        run.step(0, &[9, 9, 9, 9], 0, &[]);
        let (mut pos, mut last) = (0, Vec::new());
        for n in cuts {
            last = run.step(pos as u32, &PROMPT[pos..pos + n], 0, &[]).logits;
            pos += n;
        }
        assert_eq!(last, logits, "{cuts:?}");
        assert_eq!(run.state(), state, "{cuts:?}");
    }
}

#[test]
fn a_rejected_draft_leaves_nothing_once_its_state_is_written_back() {
    let plan = plan();
    let (device, _) = CudaDevice::on_the_cpu();
    let mut straight = Run::new(&device, &plan);
    straight.step(0, &PROMPT[..6], 0, &[]);
    let before = straight.state();
    let want = straight.step(6, &PROMPT[6..], 0, &[]).logits;
    let mut run = Run::new(&device, &plan);
    run.step(0, &PROMPT[..6], 0, &[]);
    let saved = run.state();
    assert_eq!(saved, before);
    run.step(6, &[1, 2, 3], 0, &[]);
    assert_ne!(run.state(), saved, "a draft moves the state");
    run.program.command(Cmd::WriteState { slot: SLOT, data: &saved }).unwrap();
    assert_eq!(run.step(6, &PROMPT[6..], 0, &[]).logits, want);
    let e = run.program.command(Cmd::WriteState { slot: SLOT, data: &saved[1..] }).unwrap_err();
    assert!(e.is_malformed(), "{e}");
    let e = run.program.command(Cmd::ReadState { slot: SlotId(2), out: &mut Vec::new() });
    assert!(e.unwrap_err().is_malformed());
}

#[test]
fn a_chain_that_stops_leaves_the_state_of_the_tokens_that_it_ran() {
    let plan = plan();
    let (device, _) = CudaDevice::on_the_cpu();
    let mut free = Run::new(&device, &plan);
    let tokens: Vec<TokenId> =
        free.step(0, &PROMPT, 6, &[]).tokens.iter().map(|t| t.token).collect();
    assert_eq!(tokens.len(), 6);
    // The first token that was not there before it ends the chain with itself.
    let at = (1..6).find(|at| !tokens[..*at].contains(&tokens[*at])).unwrap();
    let mut run = Run::new(&device, &plan);
    let out = run.step(0, &PROMPT, 6, &[tokens[at]]);
    assert_eq!(out.tokens.len(), at + 1, "rows after the stop run over nothing");
    let mut other = Run::new(&device, &plan);
    other.step(0, &PROMPT, 0, &[]);
    for (n, token) in tokens[..at].iter().enumerate() {
        other.step(PROMPT.len() as u32 + n as u32, &[*token], 0, &[]);
    }
    close(&run.state(), &other.state(), "the state after a stop");
}
