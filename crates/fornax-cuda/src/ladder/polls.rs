//! What can be had of a ticket before it ends, and what a timing of the ways to decode leaves behind.

use fornax_gguf::TensorType;
use fornax_plan::{
    BlockId, Cmd, Limits, Program, Progress, SeqStep, SlotId, StepOutput, Tokens, Want, conformance,
};

use crate::CudaDevice;
use crate::driver::host::Control;
use crate::fast::drive::{Drive, Way};
use crate::feed::Shape;
use crate::prepare::{self, Asked};
use crate::program::CudaProgram;

const WANTS: &[(std::ops::Range<u32>, Want)] = &[(0..1, Want::Token { logprob: false })];
const TABLES: [&[&[BlockId]]; 2] = [&[&[BlockId(0), BlockId(1)]], &[&[BlockId(2), BlockId(3)]]];
const ROUNDS: u32 = 6;

fn step(slot: u32, pos: u32, tokens: Tokens<'static>, max_new: u32) -> SeqStep<'static> {
    let (tables, slot) = (TABLES[slot as usize], SlotId(slot));
    SeqStep { slot, tokens, pos, tables, wants: WANTS, sample: None, max_new, stop: &[] }
}

struct Ready {
    program: CudaProgram,
    control: Control,
}

fn ready() -> Ready {
    let case = conformance::proof(TensorType::F32);
    let (device, control) = CudaDevice::on_the_cpu();
    let limits = Limits { slots: 2, kv_blocks: 4, ..conformance::limits_for(&case, &device) };
    let shape = Shape::new(&case.plan, &limits);
    let (gpu, compiler) = device.parts();
    let prepared = {
        let asked = Asked { long_from: None, drive: Drive::Either };
        prepare::prepare(gpu, compiler, &case.plan, &limits, &shape, asked).unwrap()
    };
    let gpu = std::sync::Arc::clone(gpu);
    let program = CudaProgram::new(gpu, &case.plan, &limits, shape, prepared).unwrap();
    Ready { program, control }
}

fn ids(out: &StepOutput) -> Vec<(u32, u32, u32)> {
    out.tokens.iter().map(|t| (t.seq, t.pos, t.token)).collect()
}

#[test]
fn tokens_of_a_chain_can_be_read_before_it_ends() {
    let Ready { mut program, control } = ready();
    let steps =
        [step(0, 0, Tokens::Host(&[3]), ROUNDS), step(1, 0, Tokens::Host(&[5]), ROUNDS - 1)];
    let mut out = StepOutput::default();
    let ticket = program.submit(&steps).unwrap();
    program.wait(ticket, &mut out).unwrap();
    let all = ids(&out);
    assert_eq!(all.len(), 2 * ROUNDS as usize - 1);

    control.hold();
    let ticket = program.submit(&steps).unwrap();
    let mut counts = Vec::new();
    while control.go_on(1) > 0 {
        assert_eq!(program.poll(&ticket, &mut out).unwrap(), Progress::Running);
        // What was written since the look before is believed at the next one.
        let first = out.tokens.len();
        assert_eq!(first, counts.last().copied().unwrap_or(0));
        assert_eq!(program.poll(&ticket, &mut out).unwrap(), Progress::Running);
        let have = ids(&out);
        // Of each sequence the first so many, and in the order of the whole.
        for seq in 0..2 {
            let of = |list: &[(u32, u32, u32)]| {
                list.iter().filter(|t| t.0 == seq).copied().collect::<Vec<_>>()
            };
            let (have, all) = (of(&have), of(&all));
            assert_eq!(have, all[..have.len()]);
        }
        assert!(have.is_sorted());
        counts.push(have.len());
    }
    assert!(counts.is_sorted() && counts[0] == 0, "{counts:?}");
    let seen: Vec<usize> = counts.chunk_by(|a, b| a == b).map(|c| c[0]).collect();
    assert!(seen.len() > ROUNDS as usize - 2, "round by round: {seen:?}");
    // What is behind the last launch has run as well.
    assert_eq!(program.poll(&ticket, &mut out).unwrap(), Progress::Done);
    assert_eq!(ids(&out), all);
    program.wait(ticket, &mut out).unwrap();
    assert_eq!(ids(&out), all);
}

#[test]
fn a_chain_can_be_stopped_at_a_token_that_was_read_and_the_next_ticket_is_not_mistaken_for_it() {
    let Ready { mut program, control } = ready();
    let first = step(0, 0, Tokens::Host(&[3]), ROUNDS);
    let mut out = StepOutput::default();
    control.hold();
    let ticket = program.submit(std::slice::from_ref(&first)).unwrap();
    let next = step(1, 0, Tokens::Host(&[5]), ROUNDS);
    let second = program.submit(&[next]).unwrap();
    while control.go_on(1) > 0 {
        program.poll(&ticket, &mut out).unwrap();
        program.poll(&ticket, &mut out).unwrap();
        if out.tokens.len() == 2 {
            break;
        }
    }
    let seen = ids(&out);
    program.stop(SlotId(0));
    assert_eq!(program.poll(&second, &mut out).unwrap(), Progress::Running);
    assert_eq!(out.tokens, [], "the other ticket's are not its own");
    program.wait(ticket, &mut out).unwrap();
    let have = ids(&out);
    assert_eq!(have[..2], seen[..]);
    assert!(have.len() < ROUNDS as usize, "{have:?}");
    program.wait(second, &mut out).unwrap();
    assert_eq!(
        out.tokens.len(),
        ROUNDS as usize,
        "stopping counts for what was submitted to its slot"
    );
}

#[test]
fn a_timing_leaves_nothing_behind() {
    let Ready { mut program, .. } = ready();
    let kv = |program: &mut CudaProgram| {
        let table = [0, 1, 2, 3].map(BlockId);
        let mut out = Vec::new();
        let tokens = 0..4 * prepare::KV_BLOCK;
        program.command(Cmd::ReadKv { group: 0, table: &table, tokens, out: &mut out }).unwrap();
        out
    };
    for rows in [1, 2] {
        let seconds = program.trial(Way::Graph, rows).unwrap();
        assert!(seconds > 0.0);
    }
    assert!(kv(&mut program).iter().any(|v| *v != 0.0), "it wrote keys and values");
    program.forget().unwrap();
    assert!(kv(&mut program).iter().all(|v| *v == 0.0));
    let last = step(0, 1, Tokens::Last { draft: &[] }, 1);
    let e = program.submit(&[last]).map(|_| ()).unwrap_err();
    assert!(e.is_malformed(), "no token was chosen: {e}");
    // And the steps after it give what they give without it.
    let given = |mut program: CudaProgram| {
        let mut out = StepOutput::default();
        let ticket = program.submit(&[step(1, 0, Tokens::Host(&[7]), ROUNDS)]).unwrap();
        program.wait(ticket, &mut out).unwrap();
        ids(&out)
    };
    assert_eq!(given(program), given(ready().program));
}
