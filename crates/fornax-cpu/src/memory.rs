//! How much memory the system has left for this process. A hint: where the system does not tell, there is no answer. It
//! knows no model.

/// Of what is available, the share that is taken unasked: the machine is not this program's alone.
const UNASKED: u64 = 4;

/// Bytes that could be allocated now without pushing others out: what the system calls available, within the limit of
/// the control group.
pub(crate) fn free() -> Option<u64> {
    #[cfg(target_os = "linux")]
    {
        let told = std::fs::read_to_string("/proc/meminfo").ok()?;
        let system = available(&told)?;
        let group = |name: &str| std::fs::read_to_string(format!("/sys/fs/cgroup/memory.{name}"));
        let within = match (group("max"), group("current"), group("stat")) {
            (Ok(max), Ok(current), Ok(stat)) => in_group(&max, &current, &stat),
            _ => None,
        };
        Some(system.min(within.unwrap_or(u64::MAX)))
    }
    #[cfg(not(target_os = "linux"))]
    None
}

/// How much of that is taken where nobody gave a size.
pub(crate) fn unasked() -> Option<u64> {
    free().map(|bytes| bytes / UNASKED)
}

/// Bytes of `MemAvailable` in the text of `/proc/meminfo`.
#[cfg(target_os = "linux")]
fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Bytes that a control group has left, cached files not counted; none where it has no limit.
#[cfg(target_os = "linux")]
fn in_group(max: &str, current: &str, stat: &str) -> Option<u64> {
    let (max, current) = (max.trim().parse::<u64>().ok()?, current.trim().parse::<u64>().ok()?);
    let cached = stat.lines().find_map(|l| l.strip_prefix("inactive_file "));
    let cached = cached.and_then(|n| n.trim().parse::<u64>().ok()).unwrap_or(0);
    Some(max.saturating_sub(current.saturating_sub(cached)))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_says_is_read() {
        let told = "MemTotal:       16 kB\nMemFree: 2 kB\nMemAvailable:    8 kB\n";
        assert_eq!(available(told), Some(8192));
        assert_eq!(available("MemTotal: 16 kB\n"), None);
        assert_eq!(in_group("1000\n", "700\n", "anon 1\ninactive_file 200\n"), Some(500));
        assert_eq!(in_group("1000", "1700", ""), Some(0));
        assert_eq!(in_group("max\n", "700\n", ""), None);
        assert!(unasked() < free());
    }
}
