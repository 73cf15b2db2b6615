//! What the system tells of this process and this machine. Knows no model; everything here is a hint, nothing fails.

use std::fs;
use std::thread;

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

/// Counts the peak from now on, where the system can: after something large that is gone again.
pub(crate) fn forget_peak() {
    #[cfg(target_os = "linux")]
    // See proc(5): 5 resets the high-water mark of the resident size.
    let _ = fs::write("/proc/self/clear_refs", "5");
}

/// Cores that this process may use.
pub(crate) fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// What the processor calls itself.
pub(crate) fn processor() -> String {
    let told = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = told.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::hint::black_box;

    use super::*;

    #[test]
    fn the_peak_covers_what_was_touched() {
        let before = peak_bytes().unwrap();
        let ballast = black_box(vec![1_u8; 64 << 20]);
        assert!(peak_bytes().unwrap() >= before.max(ballast.len() as u64));
    }
}
