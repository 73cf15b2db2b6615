//! What a decoded token cost, from what the emulator noted of each command. It knows no kernel.

use std::collections::HashMap;

use fornax_plan::{KernelCount, OpTime, Plan, StepReport};

use crate::api::Ran;

/// Labels by which buffers say what they hold.
pub(crate) const WEIGHTS: &str = "weights";
pub(crate) const KEYS: &str = "keys";
pub(crate) const VALUES: &str = "values";

/// Counts the commands of the last round; `None` where nothing was noted.
pub(crate) fn count(plan: &Plan, ran: &[Ran]) -> Option<StepReport> {
    let first = ran.iter().rposition(|r| r.begins)?;
    let mut report = StepReport { layers: plan.layers.len() as u32, ..StepReport::default() };
    let mut kinds: HashMap<(&str, &str, u64), usize> = HashMap::new();
    for ran in &ran[first..] {
        let counts = ran.counts.as_ref()?;
        let one = one(plan, ran, counts);
        let in_layer = plan.layers.iter().any(|l| (l.start..l.end).contains(&ran.label));
        report.dispatches += 1;
        report.barriers += one.barriers;
        report.layer_dispatches += u64::from(in_layer);
        report.layer_barriers += if in_layer { one.barriers } else { 0 };
        report.threadgroups += one.threadgroups;
        report.bytes_read += one.bytes_read;
        report.bytes_loaded += one.bytes_loaded;
        report.bytes_written += one.bytes_written;
        report.bytes_weights += one.bytes_weights;
        report.bytes_kv += one.bytes_kv;
        let next = report.kernels.len();
        let at = *kinds.entry((one.op, &ran.kernel, one.threadgroups)).or_insert(next);
        match report.kernels.get_mut(at) {
            None => report.kernels.push(one),
            Some(sum) => {
                sum.dispatches += 1;
                sum.barriers += one.barriers;
                sum.bytes_read += one.bytes_read;
                sum.bytes_loaded += one.bytes_loaded;
                sum.bytes_written += one.bytes_written;
                sum.bytes_weights += one.bytes_weights;
                sum.bytes_kv += one.bytes_kv;
            }
        }
    }
    Some(report)
}

fn one(plan: &Plan, ran: &Ran, counts: &fornax_msl::DispatchReport) -> KernelCount {
    let buffers = || counts.traffic.iter().filter(|t| t.label.is_some());
    let of = |names: &[&str]| {
        let named = buffers().filter(|t| t.label.as_deref().is_some_and(|l| names.contains(&l)));
        named.map(|t| t.bytes_read).sum()
    };
    KernelCount {
        op: plan.ops.get(ran.label as usize).map_or("", |op| op.name()),
        kernel: ran.kernel.to_string(),
        dispatches: 1,
        barriers: u64::from(ran.barrier),
        threadgroups: counts.threadgroups,
        threads: counts.threads,
        bytes_read: buffers().map(|t| t.bytes_read).sum(),
        bytes_loaded: buffers().map(|t| t.bytes_loaded).sum(),
        bytes_written: buffers().map(|t| t.bytes_written).sum(),
        bytes_weights: of(&[WEIGHTS]),
        bytes_kv: of(&[KEYS, VALUES]),
    }
}

/// Times of commands that ran one by one, kernel by kernel, the longest first.
pub(crate) fn times(ran: &[Ran]) -> Vec<OpTime> {
    let mut all: Vec<OpTime> = Vec::new();
    for ran in ran {
        let buffers = |c: &fornax_msl::DispatchReport| {
            let read = c.traffic.iter().filter(|t| t.label.is_some());
            read.map(|t| t.bytes_read).sum()
        };
        let bytes = ran.counts.as_ref().map_or(ran.bytes, buffers);
        match all.iter_mut().find(|t| *t.name == *ran.kernel) {
            Some(t) => {
                t.calls += 1;
                t.seconds += ran.seconds;
                t.bytes += bytes;
            }
            None => all.push(OpTime {
                name: ran.kernel.to_string(),
                calls: 1,
                seconds: ran.seconds,
                bytes,
            }),
        }
    }
    all.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernels_times_add_up_where_nobody_counts() {
        let ran = |kernel: &str, seconds, bytes| Ran {
            label: 0,
            kernel: kernel.into(),
            barrier: true,
            begins: false,
            seconds,
            bytes,
            counts: None,
        };
        let times = times(&[ran("a", 0.5, 10), ran("b", 2.0, 30), ran("a", 0.25, 10)]);
        let of = |n: usize| (times[n].name.as_str(), times[n].calls, times[n].bytes);
        assert_eq!((times.len(), of(0), of(1)), (2, ("b", 1, 30), ("a", 2, 20)));
        assert!((times[1].seconds - 0.75).abs() < 1e-12);
    }
}
