//! What this machine can do at most: cores, the last-level cache, how fast it reads memory, how much this process took.
//! Knows no model; everything here is a measurement or a hint, nothing fails.

use std::fs;
use std::hint::black_box;
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Reading more than this tells nothing new and costs the start time.
const READ_BYTES_MAX: u64 = 512 << 20;
/// The best of so many passes is the rate.
const PASSES: usize = 4;

/// How fast a buffer can be read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadRate {
    pub(crate) bytes_per_s: f64,
    /// The buffer fits the last-level cache, so the rate is that cache's.
    pub(crate) cache_resident: bool,
}

impl ReadRate {
    /// Reads a buffer of `bytes` with `threads` threads, each its own part, and takes the best pass.
    pub(crate) fn measure(bytes: u64, threads: usize) -> ReadRate {
        let threads = threads.max(1);
        let words = (bytes.clamp(1 << 16, READ_BYTES_MAX) / 8) as usize / threads;
        let barrier = Barrier::new(threads);
        let times = Mutex::new([Duration::ZERO; PASSES]);
        thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    // Not zero: pages of zeros may all be one page.
                    let buffer = vec![1_u64; words];
                    for pass in 0..PASSES {
                        barrier.wait();
                        let begin = Instant::now();
                        black_box(sum(&buffer));
                        let took = begin.elapsed();
                        if let Ok(mut times) = times.lock() {
                            times[pass] = times[pass].max(took);
                        }
                    }
                });
            }
        });
        let times = times.into_inner().unwrap_or([Duration::ZERO; PASSES]);
        let best = times.iter().min().copied().unwrap_or_default().as_secs_f64();
        ReadRate {
            bytes_per_s: (words * 8 * threads) as f64 / best.max(1e-9),
            cache_resident: last_level_cache().is_some_and(|cache| bytes <= cache),
        }
    }

    /// Which share of the rate `bytes` in `seconds` is, in percent.
    pub(crate) fn percent(&self, bytes: u64, seconds: f64) -> f64 {
        100.0 * bytes as f64 / seconds.max(1e-12) / self.bytes_per_s
    }
}

/// Eight independent sums, so that reading and not adding is the limit.
fn sum(words: &[u64]) -> u64 {
    let mut sums = [0_u64; 8];
    let (chunks, rest) = words.as_chunks::<8>();
    for chunk in chunks {
        for (sum, word) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.iter().chain(rest).fold(0, |a, b| a.wrapping_add(*b))
}

/// Bytes of the largest cache that the first core sees, where the system tells.
pub(crate) fn last_level_cache() -> Option<u64> {
    let caches = fs::read_dir("/sys/devices/system/cpu/cpu0/cache").ok()?;
    caches
        .filter_map(|entry| {
            let text = fs::read_to_string(entry.ok()?.path().join("size")).ok()?;
            let text = text.trim();
            let kib = text.strip_suffix('K').and_then(|n| n.parse::<u64>().ok());
            let mib = text.strip_suffix('M').and_then(|n| n.parse::<u64>().ok());
            kib.map(|n| n << 10).or(mib.map(|n| n << 20))
        })
        .max()
}

/// The most memory that this process had resident so far, in bytes, where the system tells.
pub(crate) fn peak_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok();
    if let Some(line) = status.as_ref().and_then(|s| s.lines().find(|l| l.starts_with("VmHWM:"))) {
        return line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib << 10);
    }
    #[cfg(unix)]
    {
        use nix::sys::resource::{UsageWho, getrusage};
        let most = u64::try_from(getrusage(UsageWho::RUSAGE_SELF).ok()?.max_rss()).ok()?;
        // macOS counts bytes, the others KiB.
        Some(if cfg!(target_os = "macos") { most } else { most << 10 })
    }
    #[cfg(not(unix))]
    None
}

/// Cores that this process may use.
pub(crate) fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_measured_whatever_is_asked() {
        for (bytes, threads) in [(0, 1), (1 << 20, 2), (3_000_001, 3)] {
            let rate = ReadRate::measure(bytes, threads);
            assert!(rate.bytes_per_s > 1e6 && rate.bytes_per_s.is_finite(), "{rate:?}");
        }
    }

    #[test]
    fn a_share_of_the_rate_is_in_percent() {
        let rate = ReadRate { bytes_per_s: 1e9, cache_resident: false };
        assert!((rate.percent(50_000_000, 0.1) - 50.0).abs() < 1e-9);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_peak_covers_what_was_touched() {
        let before = peak_bytes().unwrap();
        let ballast = black_box(vec![1_u8; 64 << 20]);
        assert!(peak_bytes().unwrap() >= before.max(ballast.len() as u64));
    }
}
