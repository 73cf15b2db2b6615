//! Recording and running: an encoder writes commands and barriers into a command buffer, the
//! queue runs committed buffers in order. It knows no plan.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use fornax_plan::{Error, Result};

use super::memory::View;
use super::{Code, Device, Form, Grid, Pipeline, Slice, emulator};
use crate::hazard::{Access, Touch};
use crate::stub::Call;

/// Argument slots of one kernel, as Metal has them.
const SLOTS: usize = 31;
/// Bytes of constants that one command may carry, as Metal has it.
const CONSTANT_BYTES_MAX: usize = 4096;

#[derive(Debug)]
pub(super) struct Dispatch {
    pub(super) pipeline: Pipeline,
    /// What the command was made for, for errors and times.
    pub(super) label: u32,
    pub(super) args: Vec<Option<(Slice, Access)>>,
    pub(super) constants: Vec<u32>,
    pub(super) grid: Grid,
}

impl Dispatch {
    fn touches(&self) -> impl Iterator<Item = Touch> + '_ {
        self.args.iter().flatten().map(|(slice, access)| Touch {
            buffer: slice.buffer.id,
            bytes: slice.bytes.clone(),
            access: *access,
        })
    }
}

#[derive(Debug)]
pub(super) enum Entry {
    Dispatch(Dispatch),
    Barrier,
}

/// Committed work, run in order.
#[derive(Debug)]
pub struct Queue {
    device: Device,
    work: Arc<Mutex<Work>>,
}

#[derive(Debug, Default)]
struct Work {
    committed: u64,
    finished: u64,
    waiting: VecDeque<Vec<Entry>>,
    /// The first failure; nothing runs after it.
    failed: Option<String>,
    /// Seconds by label, while somebody profiles.
    seconds: Vec<f64>,
}

impl Queue {
    pub(super) fn new(device: Device) -> Queue {
        Queue { device, work: Arc::default() }
    }

    /// A command buffer of this queue.
    pub fn command_buffer(&self) -> CommandBuffer {
        CommandBuffer {
            entries: Vec::new(),
            device: self.device.clone(),
            work: Arc::clone(&self.work),
        }
    }

    /// Sums the seconds of the commands run from now on by label, for `labels` of them.
    pub fn start_times(&self, labels: usize) {
        self.work.lock().unwrap_or_else(PoisonError::into_inner).seconds = vec![0.0; labels];
    }

    /// What [`Queue::start_times`] summed; stops summing.
    pub fn take_times(&self) -> Vec<f64> {
        std::mem::take(&mut self.work.lock().unwrap_or_else(PoisonError::into_inner).seconds)
    }
}

/// Commands on their way to a commit.
#[derive(Debug)]
pub struct CommandBuffer {
    entries: Vec<Entry>,
    device: Device,
    work: Arc<Mutex<Work>>,
}

impl CommandBuffer {
    /// A concurrent encoder: its commands may run in any order between barriers. It ends when it
    /// is dropped.
    pub fn encoder(&mut self) -> Encoder<'_> {
        Encoder { buffer: self, pipeline: None, args: Vec::new(), constants: Vec::new() }
    }

    /// Hands the commands to the device.
    pub fn commit(self) -> Committed {
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        work.waiting.push_back(self.entries);
        work.committed += 1;
        let number = work.committed;
        drop(work);
        Committed { number, device: self.device, work: self.work }
    }
}

/// Writes commands into a command buffer.
#[derive(Debug)]
pub struct Encoder<'a> {
    buffer: &'a mut CommandBuffer,
    pipeline: Option<Pipeline>,
    args: Vec<Option<(Slice, Access)>>,
    constants: Vec<u32>,
}

impl Encoder<'_> {
    /// The kernel of the commands that follow; forgets all arguments.
    pub fn set_pipeline(&mut self, pipeline: &Pipeline) {
        self.pipeline = Some(pipeline.clone());
        self.args.clear();
        self.constants.clear();
    }

    /// An argument at a slot and how the kernel uses it.
    pub fn set_buffer(&mut self, slot: usize, slice: Slice, access: Access) {
        if self.args.len() <= slot {
            self.args.resize(slot + 1, None);
        }
        self.args[slot] = Some((slice, access));
    }

    /// The constants, copied into the command.
    pub fn set_constants(&mut self, words: &[u32]) {
        self.constants.clear();
        self.constants.extend_from_slice(words);
    }

    /// Records one command over a grid; the constants are its last argument.
    ///
    /// # Errors
    /// `is_malformed`, naming the kernel and the argument, where Metal's rules are broken: slots,
    /// constants, ranges outside their buffer, a written argument that overlaps another.
    pub fn dispatch(&mut self, label: u32, grid: Grid) -> Result<()> {
        let pipeline = self
            .pipeline
            .clone()
            .ok_or_else(|| Error::malformed("metal: a dispatch without a pipeline".to_string()))?;
        let bad = |what: String| Err(Error::malformed(format!("metal: {}: {what}", pipeline.name)));
        if self.args.len() > SLOTS || 4 * self.constants.len() > CONSTANT_BYTES_MAX {
            return bad("more arguments or constants than a command holds".into());
        }
        for (slot, (slice, access)) in all(&self.args) {
            let Slice { buffer, bytes } = slice;
            if bytes.start > bytes.end || bytes.end > buffer.len_bytes || bytes.start % 4 != 0 {
                let len = buffer.len_bytes;
                return bad(format!("argument {slot}: bytes {bytes:?} of a buffer of {len}"));
            }
            let meets = |o: &Slice| {
                o.buffer == *buffer && o.bytes.start < bytes.end && bytes.start < o.bytes.end
            };
            let other = all(&self.args).find(|(s, (o, _))| *s != slot && meets(o));
            if let (Access::Write, Some((other, _))) = (access, other) {
                return bad(format!("argument {slot} is written and overlaps argument {other}"));
            }
        }
        if let Code::Emulated(kernel) = &pipeline.code {
            for (slot, (_, access)) in all(&self.args) {
                let writes = |a: &&fornax_msl::Argument| a.index as usize == slot && !a.read_only;
                let written = kernel.arguments().iter().any(|a| writes(&a));
                if written != (*access == Access::Write) {
                    return bad(format!("argument {slot} is bound for {access:?}"));
                }
            }
        }
        self.buffer.entries.push(Entry::Dispatch(Dispatch {
            pipeline,
            label,
            grid,
            args: self.args.clone(),
            constants: self.constants.clone(),
        }));
        Ok(())
    }

    /// What is recorded after it runs after everything recorded before it.
    pub fn barrier(&mut self) {
        self.buffer.entries.push(Entry::Barrier);
    }
}

fn all(args: &[Option<(Slice, Access)>]) -> impl Iterator<Item = (usize, &(Slice, Access))> {
    args.iter().enumerate().filter_map(|(slot, arg)| Some((slot, arg.as_ref()?)))
}

/// A committed command buffer.
#[derive(Debug)]
pub struct Committed {
    number: u64,
    device: Device,
    work: Arc<Mutex<Work>>,
}

impl Committed {
    /// Returns when the buffer and all before it have run.
    ///
    /// # Errors
    /// `is_lost` naming the kernel that failed, for this buffer and for every later one.
    pub fn wait(&self) -> Result<()> {
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        while work.finished < self.number && work.failed.is_none() {
            let Some(entries) = work.waiting.pop_front() else { break };
            let seed = self.device.order.seed.wrapping_add(work.finished);
            let ran = match self.device.form {
                Form::Recorded => run(&self.device, &entries, seed, &mut work.seconds),
                Form::Emulated => emulator::run(&self.device, &entries, seed, &mut work.seconds),
            };
            match ran {
                Ok(()) => work.finished += 1,
                Err(what) => work.failed = Some(what),
            }
        }
        match &work.failed {
            Some(what) => Err(Error::lost(format!("metal: {what}"))),
            None => Ok(()),
        }
    }
}

/// Runs one command buffer: group after group, each in a shuffled order.
fn run(
    device: &Device,
    entries: &[Entry],
    seed: u64,
    seconds: &mut [f64],
) -> std::result::Result<(), String> {
    let groups = entries.split(|e| matches!(e, Entry::Barrier));
    for (at, group) in groups.enumerate() {
        let mut commands: Vec<&Dispatch> = group
            .iter()
            .filter_map(|e| if let Entry::Dispatch(d) = e { Some(d) } else { None })
            .collect();
        if device.order.check_conflicts {
            conflict(&commands)?;
        }
        shuffle(&mut commands, seed.wrapping_mul(1 << 20).wrapping_add(at as u64));
        for command in commands {
            let started = Instant::now();
            execute(device, command)?;
            if let Some(s) = seconds.get_mut(command.label as usize) {
                *s += started.elapsed().as_secs_f64();
            }
        }
    }
    Ok(())
}

/// Names the first two commands of a group that may not run side by side.
fn conflict(commands: &[&Dispatch]) -> std::result::Result<(), String> {
    for (at, a) in commands.iter().enumerate() {
        for b in &commands[at + 1..] {
            let meet = a.touches().find(|t| b.touches().any(|o| o.conflicts(t)));
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

fn execute(device: &Device, command: &Dispatch) -> std::result::Result<(), String> {
    let mut memory = device.lock();
    let views = command.args.iter().map(|a| a.as_ref().map(|(slice, _)| memory.view(slice)));
    let mut call = Call::new(views.collect(), &command.constants);
    let Code::Scalar(kernel) = command.pipeline.code else {
        return Err(format!("{} is no scalar kernel", command.pipeline.name));
    };
    kernel(&mut call)
        .map_err(|e| format!("{} (op {}): {e}", command.pipeline.name, command.label))?;
    for (arg, view) in command.args.iter().zip(call.views()) {
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
