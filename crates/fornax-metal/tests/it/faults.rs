//! What fails is told by name, none of its tokens is given out, and what comes after works or is refused; and
//! nothing is left behind.

use std::ops::Range;

use fornax_gguf::TensorType;
use fornax_metal::{Fault, MetalDevice};
use fornax_plan::conformance;
use fornax_plan::{
    BlockId, Device, Error, Limits, Program, SeqStep, SlotId, StepOutput, Ticket, Tokens, Want,
};

const WANT: [(Range<u32>, Want); 1] = [(0..1, Want::Token { logprob: false })];

/// A program for the proof plan with a table of blocks for each of two slots.
struct Scene {
    device: MetalDevice,
    program: Box<dyn Program>,
    tables: [Vec<BlockId>; 2],
    out: StepOutput,
}

fn prepare(device: &MetalDevice) -> Result<Box<dyn Program>, Error> {
    let case = conformance::proof(TensorType::F32);
    let limits = Limits { kv_blocks: 4, ..conformance::limits_for(&case, device) };
    device.prepare(&case.plan, &limits)
}

impl Scene {
    fn new(device: MetalDevice) -> Scene {
        let program = prepare(&device).expect("the device runs the proof");
        let tables = [[0, 1], [2, 3]].map(|t| t.map(BlockId).to_vec());
        Scene { device, program, tables, out: StepOutput::default() }
    }

    fn submit(&mut self, slot: u32, tokens: Tokens<'_>, pos: u32) -> Ticket {
        let table: [&[BlockId]; 1] = [&self.tables[slot as usize]];
        let step = SeqStep {
            slot: SlotId(slot),
            tokens,
            pos,
            tables: &table,
            wants: &WANT,
            sample: None,
            max_new: 1,
            stop: &[],
        };
        self.program.submit(&[step]).expect("a step that fits")
    }

    /// The tokens of a prompt of one and `n` more.
    fn generate(&mut self, slot: u32, prompt: u32, n: u32) -> Result<Vec<u32>, Error> {
        let mut ids = Vec::new();
        for pos in 0..=n {
            let first = [prompt];
            let tokens = if pos == 0 { Tokens::Host(&first) } else { Tokens::Last { draft: &[] } };
            let ticket = self.submit(slot, tokens, pos);
            self.program.wait(ticket, &mut self.out)?;
            ids.push(self.out.tokens[0].token);
        }
        Ok(ids)
    }
}

#[test]
fn a_command_buffer_that_fails_ends_its_step_and_no_other() {
    let device = crate::kernels(1);
    let mut scene = Scene::new(device);
    let right = scene.generate(0, 7, 3).unwrap();
    for (fault, name) in
        [(Fault::Failed, "memory that is not there"), (Fault::TimedOut, "ran too long")]
    {
        for after in 0..4 {
            scene.device.fail(fault, after);
            let e = scene.generate(0, 7, 3).unwrap_err();
            assert!(e.is_failed() && e.to_string().contains(name), "{after}: {e}");
            assert!(scene.out.tokens.is_empty(), "a token of a failed step");
            assert_eq!(scene.generate(0, 7, 3).unwrap(), right, "the next request");
        }
    }
}

#[test]
fn a_step_behind_a_failed_one_fails_too_and_the_first_error_is_told() {
    let device = crate::kernels(1);
    let mut scene = Scene::new(device);
    scene.device.fail(Fault::Failed, 0);
    let first = scene.submit(0, Tokens::Host(&[7]), 0);
    let second = scene.submit(0, Tokens::Last { draft: &[] }, 1);
    let e = scene.program.wait(second, &mut scene.out).unwrap_err();
    assert!(e.is_failed() && e.to_string().contains("an earlier step failed"), "{e}");
    let e = scene.program.wait(first, &mut scene.out).unwrap_err();
    assert!(e.is_failed() && !e.to_string().contains("earlier"), "{e}");
    assert!(scene.out.tokens.is_empty());
    // The slot has no token to go on with, and says so.
    let table: [&[BlockId]; 1] = [&scene.tables[0]];
    let tokens = Tokens::Last { draft: &[] };
    let step = SeqStep {
        slot: SlotId(0),
        tokens,
        pos: 2,
        tables: &table,
        wants: &WANT,
        sample: None,
        max_new: 1,
        stop: &[],
    };
    let e = scene.program.submit(&[step]).unwrap_err();
    assert!(e.is_malformed() && e.to_string().contains("chosen no token"), "{e}");
}

#[test]
fn a_process_that_is_ignored_says_so_from_then_on() {
    let device = crate::kernels(1);
    let mut scene = Scene::new(device);
    scene.generate(1, 3, 1).unwrap();
    scene.device.fail(Fault::Ignored, 1);
    let e = scene.generate(0, 7, 3).unwrap_err();
    assert!(e.is_lost() && e.to_string().contains("ignores this process"), "{e}");
    let e = scene.generate(1, 3, 0).unwrap_err();
    assert!(e.is_lost() && e.to_string().contains("ignores this process"), "{e}");
    let e = prepare(&scene.device).err().unwrap();
    assert!(e.is_lost() && e.to_string().contains("start the program again"), "{e}");
}

#[test]
fn every_allocation_and_every_pipeline_may_fail_at_load() {
    let device = crate::kernels(1);
    let mut failures = [0, 0];
    for (n, (fault, name)) in
        [(Fault::NoMemory, "no memory for"), (Fault::NoPipeline, "building the pipeline")]
            .into_iter()
            .enumerate()
    {
        for after in 0.. {
            device.fail(fault, after);
            match prepare(&device) {
                // Fewer of the kind than that: the fault is still to come.
                Ok(_) => break,
                Err(e) => {
                    assert!(e.is_out_of_memory() == (n == 0), "{e}");
                    assert!(e.to_string().contains(name), "{e}");
                    failures[n] += 1;
                }
            }
            assert_eq!(device.live_objects(), 0, "{fault:?} after {after} leaves something");
        }
    }
    assert!(failures[0] > 20 && failures[1] > 10, "{failures:?}");
    device.fail(Fault::NoMemory, u64::MAX);
    assert!(Scene::new(device).generate(0, 7, 2).is_ok(), "the next load works");
}

/// So many generations, some of which fail at one step or the other.
fn generations(device: MetalDevice, n: u64) {
    let mut scene = Scene::new(device);
    let right = scene.generate(0, 7, 1).expect("two steps");
    let held = scene.device.live_objects();
    assert!(held > 20, "{held}");
    for n in 0..n {
        if n % 7 == 3 {
            scene.device.fail([Fault::Failed, Fault::TimedOut][(n % 2) as usize], n % 2);
            assert!(scene.generate(0, 7, 1).is_err(), "{n}");
        } else {
            assert_eq!(scene.generate(0, 7, 1).expect("two steps"), right, "{n}");
        }
        assert_eq!(scene.device.live_objects(), held, "after {n} generations");
    }
    let Scene { device, program, .. } = scene;
    drop(program);
    assert_eq!(device.live_objects(), 0);
}

#[test]
fn generations_of_the_kernels_leave_nothing_behind() {
    generations(crate::kernels(5), 50);
}

#[test]
#[ignore = "a minute of the emulator: cargo xtask deep"]
fn two_thousand_generations_of_the_kernels_leave_nothing_behind() {
    generations(crate::kernels(5), 2000);
}

#[test]
fn a_step_that_would_run_too_long_is_cut_and_gives_the_same_tokens() {
    let device = crate::kernels(1);
    let right = Scene::new(device.clone()).generate(0, 7, 3).unwrap();
    let whole = device.journal().submissions();
    let mut hurried = Scene::new(device.hurried(0.0));
    assert_eq!(hurried.generate(0, 7, 3).unwrap(), right);
    let cut = hurried.device.journal().submissions() - whole;
    assert!(whole == 4 && cut > 4 * 5, "{whole} and {cut} command buffers");
}

/// Attention and products of a prompt, parted by rows, give what they give at once, number by number.
#[test]
fn a_dispatch_that_would_run_too_long_is_parted_and_gives_the_same_logits() {
    // Six rows: attention in shares, row by row. Fifty: attention of many in seven times eight rows, and two parts of each of
    // the seven products of many.
    for (rows, parts) in [(6, 5), (50, 6 + 7)] {
        let (whole, commands, one) = prompt(&crate::kernels(1), rows);
        assert_eq!(one, 1);
        let (parted, more, buffers) = prompt(&crate::kernels(1).hurried(0.0), rows);
        assert_eq!(parted, whole, "{rows} rows");
        assert_eq!(more - commands, parts, "{rows} rows");
        assert!(buffers > 7, "{buffers} command buffers");
    }
}

/// The last logits of a prompt of so many tokens, and how many commands and command buffers it took.
fn prompt(device: &MetalDevice, rows: u32) -> (Vec<f32>, u64, u64) {
    let prompt: Vec<u32> = (0..rows).map(|i| i * 7 % 60).collect();
    let case = conformance::proof(TensorType::F32);
    let limits = Limits { kv_blocks: 4, ..conformance::limits_for(&case, device) };
    let mut program = device.prepare(&case.plan, &limits).expect("the device runs the proof");
    let table: [&[BlockId]; 1] = [&[BlockId(1), BlockId(3)]];
    let step = SeqStep {
        slot: SlotId(0),
        tokens: Tokens::Host(&prompt),
        pos: 0,
        tables: &table,
        wants: &[(rows - 1..rows, Want::Logits)],
        sample: None,
        max_new: 1,
        stop: &[],
    };
    let mut out = StepOutput::default();
    let ticket = program.submit(&[step]).expect("a step that fits");
    program.wait(ticket, &mut out).expect("a step that fits");
    (out.logits, device.journal().commands(), device.journal().submissions())
}
