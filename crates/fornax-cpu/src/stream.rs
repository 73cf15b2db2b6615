//! How fast the pool's threads can read memory and multiply in registers: the yardsticks that
//! decoding and prompts are held against. It knows no model.

use std::hint::black_box;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use fornax_plan::{Error, Result};

use crate::matrix::{Memory, Share};
use crate::pool::Pool;

/// Bytes that a thread takes at a time.
const PIECE: usize = 256 << 10;
/// Passes whose best counts; the first of them also maps the pages.
const PASSES: usize = 4;

/// A buffer that the threads of a pool read from end to end, as they read weights.
pub struct Stream {
    pool: Arc<Mutex<Pool>>,
    memory: Memory,
    bytes: usize,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Stream {
    pub(crate) fn new(pool: Arc<Mutex<Pool>>, bytes: usize) -> Result<Stream> {
        let bytes = bytes.max(PIECE).next_multiple_of(PIECE);
        let memory = Memory::large(bytes, "measuring the memory")?;
        // Untouched pages may all be one page of zeros: write them first.
        let at = Addr(memory.as_ptr());
        pool.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .run(&|team| {
                let at = &at;
                // SAFETY: every piece lies within the buffer and is one thread's.
                team.share(bytes / PIECE, |p| unsafe { at.0.add(p * PIECE).write_bytes(1, PIECE) });
                Ok(())
            })
            .map_err(|cause| lost(&cause))?;
        Ok(Stream { pool, memory, bytes })
    }

    /// Bytes of a pass.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Reads the buffer once with all threads; returns the seconds that this took.
    ///
    /// # Errors
    /// `is_lost` where a thread failed.
    pub fn pass(&self) -> Result<f64> {
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        let all = pool.threads();
        pass(&mut pool, all, &Addr(self.memory.as_ptr()), self.bytes)
    }

    /// Bytes a second of the best of a few passes.
    pub(crate) fn rate(&self) -> Result<f64> {
        let mut best = f64::INFINITY;
        for _ in 0..PASSES {
            best = best.min(self.pass()?);
        }
        Ok(self.bytes as f64 / best)
    }
}

fn lost(cause: &str) -> Error {
    Error::lost(format!("cpu: measuring the memory: {cause}"))
}

/// Seconds of a pass of `threads` threads over whole pieces, each a read-only sum.
fn pass(pool: &mut Pool, threads: usize, at: &Addr, bytes: usize) -> Result<f64> {
    pool.trust();
    let since = Instant::now();
    pool.run_on(threads, &|team| {
        team.share(bytes / PIECE, |p| {
            // SAFETY: within the buffer, which nobody writes any more.
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
    .map_err(|cause| lost(&cause))?;
    Ok(since.elapsed().as_secs_f64())
}

/// How many threads a single row's weights are read with: no more than make the memory faster,
/// tried on the weights themselves. A few threads are not worth asking.
pub(crate) fn reading_threads(pool: &mut Pool, weights: &Share) -> Result<usize> {
    /// Beyond this the answer would not change.
    const ENOUGH: usize = 256 << 20;
    /// Fewer are all used; less memory is in a cache and tells nothing.
    const FEW: usize = 4;
    const SMALL: usize = 64 << 20;
    let (all, bytes) = (pool.threads(), weights.len().min(ENOUGH) / PIECE * PIECE);
    if all <= FEW || bytes < SMALL {
        return Ok(all);
    }
    let at = Addr(weights.as_ptr());
    let mut rates = Vec::new();
    for threads in [all / 4, all / 2, all * 3 / 4, all] {
        let mut best = f64::INFINITY;
        for _ in 0..PASSES {
            best = best.min(pass(pool, threads, &at, bytes)?);
        }
        rates.push((threads, bytes as f64 / best));
    }
    Ok(fewest(&rates))
}

/// The fewest threads that come within a few per cent of the best rate.
fn fewest(rates: &[(usize, f64)]) -> usize {
    let best = rates.iter().fold(0.0, |best: f64, (_, rate)| best.max(*rate));
    rates.iter().find(|(_, rate)| *rate >= 0.97 * best).map_or(1, |(threads, _)| (*threads).max(1))
}

/// Multiplications and additions a second of all threads together, the best of a few short runs
/// of `busy`, which takes a number of rounds and returns how many operations they were.
#[cfg(target_arch = "x86_64")]
pub(crate) fn op_rate(pool: &Mutex<Pool>, busy: impl Fn(usize) -> usize + Sync) -> Result<f64> {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let mut pool = pool.lock().unwrap_or_else(PoisonError::into_inner);
    /// About a millisecond or two.
    const ROUNDS: usize = 1 << 18;
    const RUNS: usize = 12;
    let done = AtomicUsize::new(0);
    let mut best = 0f64;
    for _ in 0..RUNS {
        pool.trust();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_bring_nothing_are_left_out() {
        assert_eq!(fewest(&[(16, 80.0), (32, 99.0), (48, 101.0), (64, 90.0)]), 32);
        assert_eq!(fewest(&[(2, 10.0), (4, 20.0), (6, 30.0), (8, 40.0)]), 8);
    }

    #[test]
    fn weights_are_read_by_all_of_a_few_threads() {
        let mut pool = Pool::new(3, &[]).unwrap();
        let mut arena = crate::matrix::Arena::new(1 << 20, "a test").unwrap();
        assert_eq!(reading_threads(&mut pool, &arena.take(1 << 20)).unwrap(), 3);
        let stream = Stream::new(Arc::new(Mutex::new(pool)), (1 << 20) + 1).unwrap();
        assert_eq!(stream.bytes(), (1 << 20) + PIECE);
        assert!(stream.pass().unwrap() > 0.0 && stream.rate().unwrap() > 0.0);
    }
}
