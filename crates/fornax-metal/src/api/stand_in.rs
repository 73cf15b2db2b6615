//! The form that runs scalar kernels on the host: what no barrier orders in an order that a seed shuffles, each
//! command seeing a copy of its arguments and nothing else. It knows no plan.

use std::ops::Range;
use std::time::Instant;

use super::memory::View;
use super::recording::{Dispatch, Entry, Recording};
use super::{Code, Device};
use crate::hazard::Access;
use crate::stub::Call;

/// Runs a part of a command buffer: group after group, each in a shuffled order.
pub(super) fn run(
    device: &Device,
    recording: &Recording,
    part: Range<usize>,
    seed: u64,
    seconds: &mut [f64],
) -> Result<(), String> {
    let mut group: Vec<&Dispatch> = Vec::new();
    let mut groups = 0;
    let mut flush = |group: &mut Vec<&Dispatch>| {
        if device.setup.order.check_conflicts {
            conflict(recording, group)?;
        }
        shuffle(group, seed.wrapping_mul(1 << 20).wrapping_add(groups));
        groups += 1;
        for command in group.drain(..) {
            let started = Instant::now();
            execute(device, recording, command)?;
            if let Some(s) = seconds.get_mut(command.label as usize) {
                *s += started.elapsed().as_secs_f64();
            }
        }
        Ok::<_, String>(())
    };
    for at in part {
        let entry = &recording.entries[at];
        if recording.is_fence(at) {
            flush(&mut group)?;
        }
        if let Entry::Dispatch(d) = entry {
            group.push(d);
        }
    }
    flush(&mut group)
}

/// Names the first two commands of a group that may not run side by side.
fn conflict(recording: &Recording, commands: &[&Dispatch]) -> Result<(), String> {
    for (at, a) in commands.iter().enumerate() {
        for b in &commands[at + 1..] {
            let meet = recording.touches(a).find(|t| recording.touches(b).any(|o| o.conflicts(t)));
            if let Some(t) = meet {
                return Err(format!(
                    "{} (op {}) and {} (op {}) run side by side and both use buffer {}, bytes {:?}",
                    a.pipeline.name, a.label, b.pipeline.name, b.label, t.buffer, t.bytes
                ));
            }
        }
    }
    Ok(())
}

fn execute(device: &Device, recording: &Recording, command: &Dispatch) -> Result<(), String> {
    let mut memory = device.lock();
    let args = recording.args(command);
    let views = args.iter().map(|a| a.as_ref().map(|(slice, _)| memory.view(slice)));
    let mut call = Call::new(views.collect(), recording.words(command));
    let Code::Scalar(kernel) = command.pipeline.code else {
        return Err(format!("{} is no scalar kernel", command.pipeline.name));
    };
    kernel(&mut call)
        .map_err(|e| format!("{} (op {}): {e}", command.pipeline.name, command.label))?;
    for (arg, view) in args.iter().zip(call.views()) {
        let (Some((slice, Access::Write)), Some(View::Words(words))) = (arg, view) else {
            continue;
        };
        memory.store(slice, words);
    }
    Ok(())
}

/// Fisher–Yates over SplitMix64.
fn shuffle<T>(items: &mut [T], seed: u64) {
    let mut state = seed;
    for i in (1..items.len()).rev() {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        items.swap(i, ((z ^ (z >> 31)) % (i as u64 + 1)) as usize);
    }
}
