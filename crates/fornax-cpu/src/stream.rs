//! How fast the pool's threads can read memory and multiply in registers: the yardsticks that
//! decoding and prompts are held against. It knows no model.

use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use fornax_plan::{Error, Result};

use crate::matrix::Memory;
use crate::pool::Pool;

/// Bytes that a thread takes at a time.
const PIECE: usize = 256 << 10;
/// Passes whose best counts; the first of them also maps the pages.
const PASSES: usize = 4;

/// Bytes a second of the best of a few passes of read-only sums over a buffer of `bytes`.
pub(crate) fn read_rate(pool: &mut Pool, bytes: usize) -> Result<f64> {
    let bytes = bytes.max(PIECE).next_multiple_of(PIECE);
    let memory = Memory::zeroed(bytes, "measuring the memory")?;
    // Untouched pages may all be one page of zeros: write them first.
    let at = Addr(memory.as_ptr());
    let lost = |cause: String| Error::lost(format!("cpu: measuring the memory: {cause}"));
    pool.run(&|team| {
        let at = &at;
        // SAFETY: every piece lies within the buffer and is one thread's.
        team.share(bytes / PIECE, |p| unsafe { at.0.add(p * PIECE).write_bytes(1, PIECE) });
        Ok(())
    })
    .map_err(lost)?;
    let mut best = f64::INFINITY;
    for _ in 0..PASSES {
        let since = Instant::now();
        pool.run(&|team| {
            let at = &at;
            team.share(bytes / PIECE, |p| {
                // SAFETY: as above, and nobody writes any more.
                let piece = unsafe {
                    std::slice::from_raw_parts(at.0.add(p * PIECE).cast::<[u64; 16]>(), PIECE / 128)
                };
                let mut sums = [0u64; 16];
                for line in piece {
                    for (sum, v) in sums.iter_mut().zip(line) {
                        *sum = sum.wrapping_add(*v);
                    }
                }
                black_box(sums);
            });
            Ok(())
        })
        .map_err(lost)?;
        best = best.min(since.elapsed().as_secs_f64());
    }
    Ok(bytes as f64 / best)
}

/// Multiplications and additions a second of all threads together, the best of a few short runs
/// of `busy`, which takes a number of rounds and returns how many operations they were.
pub(crate) fn op_rate(pool: &mut Pool, busy: impl Fn(usize) -> usize + Sync) -> Result<f64> {
    /// About a millisecond or two.
    const ROUNDS: usize = 1 << 18;
    const RUNS: usize = 12;
    let done = AtomicUsize::new(0);
    let mut best = 0f64;
    for _ in 0..RUNS {
        done.store(0, Ordering::Relaxed);
        let since = Instant::now();
        pool.run(&|_| {
            done.fetch_add(busy(ROUNDS), Ordering::Relaxed);
            Ok(())
        })
        .map_err(|cause| Error::lost(format!("cpu: measuring the processor: {cause}")))?;
        best = best.max(done.load(Ordering::Relaxed) as f64 / since.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// The buffer's address.
struct Addr(*mut u8);

// SAFETY: threads touch disjoint pieces, or only read.
unsafe impl Sync for Addr {}
