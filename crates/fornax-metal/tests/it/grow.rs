//! A cache that grows under sequences at work: in pieces, with nothing copied, several times, to a refusal by name.

use fornax_gguf::TensorType;
use fornax_metal::{Fault, MetalDevice};
use fornax_plan::conformance;
use fornax_plan::{
    BlockId, Cmd, Device, KvType, Limits, Program, SeqStep, SlotId, StepOutput, Tokens, Want,
};

const WANT: [(std::ops::Range<u32>, Want); 1] = [(0..1, Want::Token { logprob: false })];

struct Scene {
    program: Box<dyn Program>,
    out: StepOutput,
}

impl Scene {
    fn new(device: &MetalDevice, blocks: u32, kv_type: KvType) -> Scene {
        let case = conformance::proof(TensorType::Q8_0);
        let limits = conformance::limits_for(&case, device);
        let limits = Limits { kv_blocks: blocks, kv_type, rows: 64, ..limits };
        let program = device.prepare(&case.plan, &limits).expect("the device runs the proof");
        Scene { program, out: StepOutput::default() }
    }

    fn submit(
        &mut self,
        tokens: Tokens<'_>,
        (pos, n): (u32, u32),
        table: &[BlockId],
    ) -> fornax_plan::Result<fornax_plan::Ticket> {
        let rows = if let Tokens::Host(all) = tokens { all.len() as u32 } else { 1 };
        let wants = [(rows - 1..rows, WANT[0].1)];
        self.program.submit(&[SeqStep {
            slot: SlotId(0),
            tokens,
            pos,
            tables: &[table],
            wants: &wants,
            sample: None,
            max_new: n,
            stop: &[],
        }])
    }

    fn tokens(&mut self, tokens: Tokens<'_>, at: (u32, u32), table: &[BlockId]) -> Vec<u32> {
        let ticket = self.submit(tokens, at, table).expect("the device runs the proof");
        self.program.wait(ticket, &mut self.out).expect("the device runs the proof");
        self.out.tokens.iter().map(|t| t.token).collect()
    }
}

fn blocks<const N: usize>(of: [u32; N]) -> [BlockId; N] {
    of.map(BlockId)
}

/// Twenty tokens in blocks of 32 fit one; forty more need two that were not there.
#[test]
fn a_cache_grows_under_a_sequence_and_keeps_what_it_holds() {
    for kv_type in [KvType::F32, KvType::F16, KvType::Q8_0] {
        let device = crate::kernels(8);
        let run = |at_first: u32, more: u32| {
            let mut scene = Scene::new(&device, at_first, kv_type);
            let table = blocks([1, 2, 4]);
            let ticket = scene.submit(Tokens::Host(&[7]), (0, 20), &table[..1]).unwrap();
            if more > 0 {
                let far = scene.submit(Tokens::Host(&[7]), (40, 1), &table);
                assert!(far.unwrap_err().is_malformed(), "no such block yet");
                let before = scene.program.memory().kv;
                scene.program.grow_kv(more).unwrap();
                let grown = u64::from(at_first + more) * before / u64::from(at_first);
                assert_eq!(scene.program.memory().kv, grown);
            }
            scene.program.wait(ticket, &mut scene.out).unwrap();
            let mut ids: Vec<u32> = scene.out.tokens.iter().map(|t| t.token).collect();
            ids.extend(scene.tokens(Tokens::Last { draft: &[] }, (20, 40), &table));
            ids
        };
        let all = run(6, 0);
        assert_eq!(all.len(), 60);
        assert_eq!(run(3, 3), all, "{kv_type:?}");
    }
}

/// A table through all four pieces: prompts of many rows and of few, chains, commands on blocks of different pieces.
#[test]
fn a_cache_in_four_pieces_is_one_to_whoever_uses_it() {
    let device = crate::kernels(9);
    let run = |grown: bool| {
        let mut scene = Scene::new(&device, if grown { 2 } else { 9 }, KvType::F16);
        for more in [1, 2, 4].into_iter().filter(|_| grown) {
            scene.program.grow_kv(more).unwrap();
        }
        // Blocks 0 and 1, then 2, then 3 and 4, then 5 to 8 are pieces.
        let table = blocks([8, 0, 3, 2, 6]);
        let prompt: Vec<u32> = (0..60).map(|i| i % 50).collect();
        let mut ids = scene.tokens(Tokens::Host(&prompt), (0, 1), &table);
        ids.extend(scene.tokens(Tokens::Last { draft: &[3, 4, 5, 6, 7, 8] }, (60, 1), &table));
        ids.extend(scene.tokens(Tokens::Last { draft: &[] }, (67, 40), &table));
        let mut kv = Vec::new();
        let tokens = 0..100;
        let read = Cmd::ReadKv { group: 0, table: &table, tokens: tokens.clone(), out: &mut kv };
        scene.program.command(read).unwrap();
        for (from, to) in [(8, 1), (0, 4), (3, 5), (2, 7), (6, 8)] {
            let [from, to] = [from, to].map(BlockId);
            scene.program.command(Cmd::CopyBlock { group: 0, from, to }).unwrap();
        }
        let copied = blocks([1, 4, 5, 7, 8]);
        let mut again = Vec::new();
        let read = Cmd::ReadKv { group: 0, table: &copied, tokens, out: &mut again };
        scene.program.command(read).unwrap();
        assert_eq!(kv, again, "what was copied from piece to piece");
        ids.extend(scene.tokens(Tokens::Last { draft: &[] }, (107, 8), &copied));
        (ids, kv)
    };
    let (ids, kv) = run(true);
    let (one, plain) = run(false);
    assert_eq!((ids.len(), ids), (1 + 1 + 40 + 8, one));
    assert_eq!(kv, plain);
}

/// Small steps take room ahead, so that there are few pieces; a fifth is refused, and everything goes on.
#[test]
fn growth_takes_room_ahead_and_ends_in_a_refusal_by_name() {
    let device = crate::kernels(10);
    let mut scene = Scene::new(&device, 8, KvType::F16);
    let first = scene.tokens(Tokens::Host(&[7]), (0, 8), &blocks([7]));
    let held = device.live_objects();
    scene.program.grow_kv(1).unwrap();
    let more = device.live_objects();
    assert!(more > held, "a piece for keys and one for values");
    // Half of what was there is room for three more.
    (0..3).for_each(|_| scene.program.grow_kv(1).unwrap());
    assert_eq!(device.live_objects(), more);
    scene.program.grow_kv(10).unwrap();
    scene.program.grow_kv(20).unwrap();
    let e = scene.program.grow_kv(100).unwrap_err();
    assert!(e.is_unsupported() && e.to_string().contains("--ctx"), "{e}");
    assert_eq!(scene.tokens(Tokens::Host(&[7]), (0, 8), &blocks([41])), first);
}

/// Nothing of a growth that fails stays, and what was there goes on.
#[test]
fn a_growth_that_fails_changes_nothing() {
    let device = crate::kernels(11);
    let mut scene = Scene::new(&device, 4, KvType::F16);
    let first = scene.tokens(Tokens::Host(&[7]), (0, 8), &blocks([2]));
    let (held, kv) = (device.live_objects(), scene.program.memory().kv);
    let (mut failures, mut faults) = (0, [(Fault::NoMemory, 0), (Fault::NoPipeline, 0)]);
    for (fault, after) in &mut faults {
        loop {
            device.fail(*fault, *after);
            let e = match scene.program.grow_kv(3) {
                Err(e) => e,
                Ok(()) => break,
            };
            assert_eq!(e.is_out_of_memory(), *fault == Fault::NoMemory, "{e}");
            if scene.program.memory().kv == kv {
                assert_eq!(device.live_objects(), held, "{fault:?} after {after}");
            }
            assert_eq!(scene.tokens(Tokens::Host(&[7]), (0, 8), &blocks([2])), first);
            (failures, *after) = (failures + 1, *after + 1);
        }
        device.fail(*fault, u64::MAX);
    }
    assert!(failures > 4, "{failures}");
    assert_eq!(scene.tokens(Tokens::Host(&[7]), (0, 8), &blocks([6])), first);
}
