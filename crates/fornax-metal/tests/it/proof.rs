//! The same ids as the reference, in any order of commands, with one submission and one wait.

use fornax_gguf::TensorType;
use fornax_metal::MetalDevice;
use fornax_plan::conformance;
use fornax_plan::{
    BlockId, Device, Limits, Program, Progress, SeqStep, SlotId, StepOutput, Tokens, Want,
};

/// A program for the proof plan, its limits, and one block table a slot.
fn program(device: &MetalDevice) -> (Box<dyn Program>, Vec<Vec<BlockId>>) {
    let case = conformance::proof(TensorType::Q8_0);
    let limits = Limits { kv_blocks: 24, ..conformance::limits_for(&case, device) };
    let tables = (0..3).map(|s| (0..8).map(|i| BlockId(i * 3 + s)).collect()).collect();
    (device.prepare(&case.plan, &limits).expect("the device runs the proof"), tables)
}

fn seq<'a>(slot: u32, tokens: Tokens<'a>, pos: u32, tables: &'a [&'a [BlockId]]) -> SeqStep<'a> {
    const WANT: [(std::ops::Range<u32>, Want); 1] = [(0..1, Want::Token { logprob: true })];
    SeqStep {
        slot: SlotId(slot),
        tokens,
        pos,
        tables,
        wants: &WANT,
        sample: None,
        max_new: 1,
        stop: &[],
    }
}

#[test]
fn a_step_with_eight_tokens_is_one_submission_and_one_wait() {
    let device = crate::kernels(1);
    let case = conformance::proof(TensorType::F32);
    let limits = conformance::limits_for(&case, &device);
    let outs = conformance::run(&device, &case, &limits, 0).unwrap();
    assert_eq!(outs[0].tokens.len(), 3 * 8);
    let journal = device.journal();
    assert_eq!((journal.submissions(), journal.waits()), (2, 2), "two steps");
    assert!(journal.barriers() > 0 && journal.barriers() < journal.commands());
}

#[test]
fn steps_follow_each_other_without_a_wait_between_them() {
    let device = crate::kernels(2);
    let run = |ahead: bool| {
        let (mut program, tables) = program(&device);
        let table: [&[BlockId]; 1] = [&tables[0]];
        let mut out = StepOutput::default();
        let mut ids = Vec::new();
        let first = program.submit(&[seq(0, Tokens::Host(&[5]), 0, &table)]).unwrap();
        if !ahead {
            program.wait(first, &mut out).unwrap();
            ids.push(out.tokens[0].token);
        }
        let second = program.submit(&[seq(0, Tokens::Last { draft: &[] }, 1, &table)]).unwrap();
        if ahead {
            let third = program.submit(&[seq(0, Tokens::Host(&[1]), 2, &table)]);
            assert!(third.unwrap_err().is_malformed(), "two steps under way are the most");
            program.wait(first, &mut out).unwrap();
            ids.push(out.tokens[0].token);
        }
        while program.poll(&second, &mut out).unwrap() == Progress::Running {}
        program.wait(second, &mut out).unwrap();
        ids.push(out.tokens[0].token);
        assert!(out.tokens[0].logprob < 0.0);
        assert!(program.wait(second, &mut out).unwrap_err().is_malformed(), "waited twice");
        ids
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn chains_end_at_stop_tokens_and_when_asked_to() {
    let device = crate::kernels(3);
    let run = |stop: &[u32], ask: bool| {
        let (mut program, tables) = program(&device);
        let table: [&[BlockId]; 1] = [&tables[1]];
        let mut out = StepOutput::default();
        let step = SeqStep { max_new: 8, stop, ..seq(1, Tokens::Host(&[7]), 0, &table) };
        program.stop(SlotId(1));
        let ticket = program.submit(&[step]).unwrap();
        if ask {
            program.stop(SlotId(1));
        }
        program.wait(ticket, &mut out).unwrap();
        out.tokens.iter().map(|t| t.token).collect::<Vec<_>>()
    };
    let all = run(&[], false);
    assert_eq!(all.len(), 8, "a stop before the step began does not count");
    let third = all.iter().position(|t| *t == all[2]).unwrap() + 1;
    assert_eq!(run(&[all[2]], false), all[..third], "the stop token itself is reported");
    assert_eq!(run(&[], true), all[..1], "asked before the device began");
}

#[test]
fn what_a_step_asks_in_vain_is_named() {
    let device = crate::kernels(4);
    let (mut program, tables) = program(&device);
    let table: [&[BlockId]; 1] = [&tables[0]];
    let base = || seq(0, Tokens::Host(&[1]), 0, &table);
    let e = program.submit(&[SeqStep { max_new: 65, ..base() }]).unwrap_err();
    assert!(e.is_malformed() && e.to_string().contains("at most 64"), "{e}");
    let e = program.submit(&[seq(0, Tokens::Last { draft: &[] }, 0, &table)]).unwrap_err();
    assert!(e.is_malformed() && e.to_string().contains("chosen no token"), "{e}");
    let mut out = StepOutput::default();
    let ticket = program.submit(&[base()]).unwrap();
    program.wait(ticket, &mut out).unwrap();
    assert_eq!(out.tokens.len(), 1, "a refused step leaves no trace");
}

#[test]
fn cache_commands_move_what_steps_wrote() {
    use fornax_plan::Cmd;
    let device = crate::kernels(5);
    let (mut program, tables) = program(&device);
    let table: [&[BlockId]; 1] = [&tables[0]];
    let mut out = StepOutput::default();
    let ticket = program.submit(&[seq(0, Tokens::Host(&[9]), 0, &table)]).unwrap();
    // No wait: a command takes its place behind the step.
    let mut kv = Vec::new();
    fn read<'a>(table: &'a [BlockId], out: &'a mut Vec<f32>) -> Cmd<'a> {
        Cmd::ReadKv { group: 0, table, tokens: 0..1, out }
    }
    program.command(read(&tables[0], &mut kv)).unwrap();
    program.wait(ticket, &mut out).unwrap();
    assert_eq!(kv.len(), 128);
    assert!(kv.iter().any(|v| *v != 0.0));
    let (from, to) = (tables[0][0], tables[2][0]);
    program.command(Cmd::CopyBlock { group: 0, from, to }).unwrap();
    let mut copied = Vec::new();
    program.command(read(&tables[2], &mut copied)).unwrap();
    assert_eq!(copied, kv);
    let data = vec![1.5; 128];
    let cmd = Cmd::WriteKv { group: 0, table: &tables[0], tokens: 0..1, data: &data };
    program.command(cmd).unwrap();
    program.command(read(&tables[0], &mut kv)).unwrap();
    assert_eq!(kv, data);
    let cmd = Cmd::WriteKv { group: 0, table: &tables[0], tokens: 0..2, data: &data };
    assert!(program.command(cmd).unwrap_err().is_malformed());
}

#[test]
fn steps_in_flight_feed_each_other_on_the_device() {
    let device = crate::kernels(7);
    let (mut program, tables) = program(&device);
    let table: [&[BlockId]; 1] = [&tables[0]];
    let mut out = StepOutput::default();
    let mut ids = Vec::new();
    let mut before = program.submit(&[seq(0, Tokens::Host(&[5]), 0, &table)]).unwrap();
    // One step is always under way while the next is written.
    for pos in 1..6 {
        let next = seq(0, Tokens::Last { draft: &[] }, pos, &table);
        let ticket = program.submit(&[next]).unwrap();
        program.wait(std::mem::replace(&mut before, ticket), &mut out).unwrap();
        ids.push(out.tokens[0].token);
    }
    program.wait(before, &mut out).unwrap();
    ids.push(out.tokens[0].token);
    let chained = SeqStep { max_new: 6, ..seq(1, Tokens::Host(&[5]), 0, &table) };
    let ticket = program.submit(&[chained]).unwrap();
    program.wait(ticket, &mut out).unwrap();
    assert_eq!(out.tokens.iter().map(|t| t.token).collect::<Vec<_>>(), ids);
}
