//! What the machine looks like: cores that this process may use, cache sizes, pinning. It knows
//! nothing of pools or models. Everything here is a hint: where the system does not tell, the
//! answer is a plain guess and nothing fails.

#[cfg(target_os = "linux")]
use std::fs;

/// Hardware threads that this process may use, quotas included.
pub(crate) fn usable_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// One CPU number for each physical core that this process may use; empty where pinning is
/// unknown to the system.
pub(crate) fn physical_cores() -> Vec<usize> {
    #[cfg(target_os = "linux")]
    {
        let mut cores: Vec<usize> = Vec::new();
        let mut taken: Vec<String> = Vec::new();
        for cpu in allowed_cpus() {
            let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
            let siblings = fs::read_to_string(path).unwrap_or_else(|_| cpu.to_string());
            if !taken.contains(&siblings) {
                taken.push(siblings);
                cores.push(cpu);
            }
        }
        cores
    }
    #[cfg(not(target_os = "linux"))]
    Vec::new()
}

/// How many threads a pool has by default: one for each physical (on Apple silicon:
/// performance) core, within the process's quota.
pub(crate) fn default_threads() -> usize {
    let cores = match performance_cores() {
        Some(n) => n,
        None => physical_cores().len(),
    };
    if cores == 0 { usable_threads() } else { cores.min(usable_threads()) }
}

#[cfg(target_os = "linux")]
fn allowed_cpus() -> Vec<usize> {
    // SAFETY: a CPU set is plain bits, for which zero is a value.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is as large as told, and 0 is the calling thread.
    let rc = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) };
    if rc != 0 {
        return Vec::new();
    }
    // SAFETY: the index stays below the number of bits of the set.
    (0..8 * size_of::<libc::cpu_set_t>()).filter(|c| unsafe { libc::CPU_ISSET(*c, &set) }).collect()
}

/// Binds the calling thread to one CPU. A refusal (a cgroup that changed) costs speed only.
pub(crate) fn pin_to(cpu: usize) {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: a CPU set is plain bits, for which zero is a value.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        if cpu < 8 * size_of::<libc::cpu_set_t>() {
            // SAFETY: the index is within the set.
            unsafe { libc::CPU_SET(cpu, &mut set) };
            // SAFETY: `set` is as large as told, and 0 is the calling thread.
            let _ = unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = cpu;
}

/// Bytes of the last-level cache that one core sees, where the system tells.
pub fn last_level_cache() -> Option<u64> {
    #[cfg(target_os = "linux")]
    {
        let mut best: Option<(u32, u64)> = None;
        for ix in 0..8 {
            let dir = format!("/sys/devices/system/cpu/cpu0/cache/index{ix}");
            let read = |name: &str| fs::read_to_string(format!("{dir}/{name}")).ok();
            let (Some(level), Some(size)) = (read("level"), read("size")) else { continue };
            let (Ok(level), Some(size)) = (level.trim().parse(), parse_size(size.trim())) else {
                continue;
            };
            if best.is_none_or(|(l, _)| level > l) {
                best = Some((level, size));
            }
        }
        best.map(|(_, size)| size)
    }
    #[cfg(target_vendor = "apple")]
    {
        sysctl(c"hw.perflevel0.l2cachesize").or_else(|| sysctl(c"hw.l2cachesize"))
    }
    #[cfg(not(any(target_os = "linux", target_vendor = "apple")))]
    None
}

/// `32768K` and the like, as sysfs writes sizes.
#[cfg(target_os = "linux")]
fn parse_size(text: &str) -> Option<u64> {
    let (digits, unit) = match text.strip_suffix('K') {
        Some(digits) => (digits, 1 << 10),
        None => match text.strip_suffix('M') {
            Some(digits) => (digits, 1 << 20),
            None => (text, 1),
        },
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(target_vendor = "apple")]
fn performance_cores() -> Option<usize> {
    sysctl(c"hw.perflevel0.physicalcpu").map(|n| n as usize)
}

#[cfg(not(target_vendor = "apple"))]
fn performance_cores() -> Option<usize> {
    None
}

#[cfg(target_vendor = "apple")]
fn sysctl(name: &std::ffi::CStr) -> Option<u64> {
    let mut value = 0u64;
    let mut len = size_of::<u64>();
    // SAFETY: `value` has room for `len` bytes; a shorter (32-bit) answer fills its low half,
    // little-endian as every Apple target is.
    let rc = unsafe {
        libc::sysctlbyname(
            name.as_ptr(),
            (&raw mut value).cast(),
            &mut len,
            std::ptr::null_mut(),
            0,
        )
    };
    (rc == 0 && value > 0).then_some(value)
}

/// The processor's product name, where the system tells.
pub(crate) fn processor_name() -> String {
    #[cfg(target_os = "linux")]
    {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let line = info.lines().find(|l| l.starts_with("model name") || l.starts_with("Model"));
        if let Some((_, name)) = line.and_then(|l| l.split_once(':')) {
            return name.trim().to_string();
        }
    }
    std::env::consts::ARCH.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_at_least_one_thread_and_no_more_than_the_machine_has() {
        assert!((1..=usable_threads()).contains(&default_threads()));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn cache_sizes_are_read_as_sysfs_writes_them() {
        assert_eq!(parse_size("32768K"), Some(32 << 20));
        assert_eq!(parse_size("2M"), Some(2 << 20));
        assert_eq!(parse_size("x"), None);
    }
}
