//! The host allocates nothing per decoded token, neither memory nor device buffers: a counting allocator in a process of its
//! own.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use fornax_gguf::TensorType;
use fornax_metal::MetalDevice;
use fornax_plan::conformance::proof_plan;
use fornax_plan::{
    BlockId, Device, KvType, Limits, Progress, SeqStep, SlotId, StepOutput, Tokens, Want,
};

static COUNT: AtomicU64 = AtomicU64::new(0);

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's word.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's word.
        unsafe { System.dealloc(at, layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's word.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Submitting a step and taking what came of it. What the stand-in does to run it is not the host's: it runs in the look
/// between the two.
#[test]
fn forty_tokens_of_three_sequences_allocate_nothing() {
    let plan = proof_plan(TensorType::Q8_0);
    let device = MetalDevice::recorded(1);
    let limits = Limits {
        slots: 3,
        rows: 8,
        wanted: 8,
        kv_blocks: 6,
        kv_type: KvType::F32,
        act: None,
        ..Limits::default()
    };
    let mut program = device.prepare(&plan, &limits).unwrap();
    let tables: Vec<Vec<BlockId>> =
        (0..3).map(|s| (0..2).map(|i| BlockId(3 * i + s)).collect()).collect();
    let tables: Vec<[&[BlockId]; 1]> = tables.iter().map(|t| [t.as_slice()]).collect();
    let wants = [(0..1, Want::Token { logprob: true })];
    let mut out = StepOutput::default();
    let mut counted = 0;
    for pos in 0..40u32 {
        let step = [0, 1, 2].map(|s: u32| SeqStep {
            slot: SlotId(s),
            tokens: if pos == 0 { Tokens::Host(&[7]) } else { Tokens::Last { draft: &[] } },
            pos,
            tables: &tables[s as usize],
            wants: &wants,
            sample: None,
            max_new: 1,
            stop: &[],
        });
        let before = COUNT.load(Ordering::Relaxed);
        let ticket = program.submit(&step).unwrap();
        let submitted = COUNT.load(Ordering::Relaxed);
        assert_eq!(program.poll(&ticket, &mut out).unwrap(), Progress::Done);
        let polled = COUNT.load(Ordering::Relaxed);
        program.wait(ticket, &mut out).unwrap();
        let now = COUNT.load(Ordering::Relaxed);
        assert_eq!(out.tokens.len(), 3);
        // The first steps may still grow lists that are kept from then on.
        if pos > 6 {
            counted += (submitted - before) + (now - polled);
        }
    }
    assert_eq!(counted, 0);
}
