//! Recording and running: an encoder writes commands and barriers into a command buffer, the queue hands committed
//! ones to the device in order, and a wait tells how they ended. It knows no plan.

use std::collections::VecDeque;
use std::ops::{Range, RangeInclusive};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fornax_plan::{Error, Result};

use super::failure::{Cause, Failure};
use super::health::{Fault, Live};
use super::pace::Pace;
use super::recording::{Arg, Entry, Note, Open, Ran, Recording};
use super::{Backend, Code, Device, Grid, Pipeline, SLOTS, Slice, emulator, system};
use crate::hazard::Access;

/// Bytes of constants that one command may carry, as Metal has it.
const CONSTANT_BYTES_MAX: usize = 4096;
/// Failures whose command buffers somebody may still wait for.
const FAILURES_KEPT: usize = 8;

/// Committed work, run in order.
#[derive(Debug)]
pub struct Queue {
    device: Device,
    work: Arc<Mutex<Work>>,
    native: Option<system::Queue>,
    _live: Live,
}

/// Work on its way.
#[derive(Debug)]
enum Pending {
    /// For the stand-in, or to be timed command by command.
    Recorded(Recording),
    Native(system::Flight),
    Failed(Failure),
}

#[derive(Debug, Default)]
struct Work {
    committed: u64,
    finished: u64,
    waiting: VecDeque<Pending>,
    /// Memory of earlier recordings.
    spare: Vec<Recording>,
    /// What failed, and with it everything that was committed before that was known.
    failures: VecDeque<(RangeInclusive<u64>, String)>,
    /// After the last of them nothing works.
    lost: bool,
    /// Seconds by label, while somebody profiles.
    seconds: Vec<f64>,
    pace: Pace,
    device_seconds: f64,
    /// Entries of the first that waits which have run already.
    at: usize,
    /// What ran last, where the form notes it.
    ran: Vec<Ran>,
}

impl Queue {
    pub(super) fn new(device: Device) -> Result<Queue> {
        let native = match &device.backend {
            Backend::System(gpu) => Some(gpu.queue()?),
            _ => None,
        };
        let _live = Live::new(&device.health);
        let mut work = Work::default();
        work.pace.set(device.setup.budget_s);
        Ok(Queue { device, work: Arc::new(Mutex::new(work)), native, _live })
    }

    /// A command buffer of this queue.
    pub fn command_buffer(&self) -> CommandBuffer {
        CommandBuffer {
            recording: self.lock().spare.pop().unwrap_or_default(),
            device: self.device.clone(),
            work: Arc::clone(&self.work),
            native: self.native.clone(),
            _live: Live::new(&self.device.health),
        }
    }

    /// How long its command buffers may be.
    pub(crate) fn pace(&self) -> Pace {
        self.lock().pace
    }

    /// Seconds that the device has worked so far, as it tells them; those of a stand-in are the host's.
    pub fn device_seconds(&self) -> f64 {
        self.lock().device_seconds
    }

    /// Sums the seconds of the commands run from now on by label, for `labels` of them.
    pub fn start_times(&self, labels: usize) {
        self.lock().seconds = vec![0.0; labels];
    }

    /// What [`Queue::start_times`] summed; stops summing.
    pub fn take_times(&self) -> Vec<f64> {
        std::mem::take(&mut self.lock().seconds)
    }

    /// Looks at the commands of what was committed and ran last; none where the form notes none.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&[Ran]) -> T) -> T {
        look(&self.lock().ran)
    }

    fn lock(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Commands on their way to a commit.
#[derive(Debug)]
pub struct CommandBuffer {
    recording: Recording,
    device: Device,
    work: Arc<Mutex<Work>>,
    native: Option<system::Queue>,
    _live: Live,
}

impl CommandBuffer {
    /// A concurrent encoder: its commands may run in any order between barriers. It ends when it
    /// is dropped.
    pub fn encoder(&mut self) -> Encoder<'_> {
        Encoder { buffer: self, pipeline: None, open: Open::default() }
    }

    /// Hands the commands to the device: at once where there is one, which then runs them by itself.
    pub fn commit(mut self) -> Committed {
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        let mut cuts = std::mem::take(&mut self.recording.cuts);
        work.pace.cuts(self.recording.commands(), &mut cuts);
        let parts = cuts.len() as u64 + 1;
        self.recording.cuts = cuts;
        let fault = self.device.health.due(&[Fault::Failed, Fault::TimedOut, Fault::Ignored]);
        let pending = match (fault, &self.native) {
            (Some(fault), _) => Pending::Failed(injected(fault)),
            (None, Some(native)) if work.seconds.is_empty() => {
                let plain = self.recording.commands().map(|(_, seconds)| seconds).sum();
                let sent = native.commit(&self.device.lock(), &self.recording, plain);
                self.recording.clear();
                work.spare.push(self.recording);
                sent.map_or_else(Pending::Failed, Pending::Native)
            }
            (None, _) => Pending::Recorded(self.recording),
        };
        work.waiting.push_back(pending);
        work.committed += 1;
        let number = work.committed;
        drop(work);
        let (device, work, native) = (self.device, self.work, self.native);
        Committed { number, parts, device, work, native, _live: self._live }
    }
}

/// A failure that nobody had.
fn injected(fault: Fault) -> Failure {
    let cause = match fault {
        Fault::Ignored => Cause::Ignored,
        Fault::TimedOut => Cause::TimedOut,
        _ => Cause::PageFault,
    };
    Failure { cause, text: "a fault that a test asked for".to_string() }
}

/// Writes commands into a command buffer.
#[derive(Debug)]
pub struct Encoder<'a> {
    buffer: &'a mut CommandBuffer,
    pipeline: Option<Pipeline>,
    open: Open,
}

impl Encoder<'_> {
    /// The kernel of the command that follows; forgets all arguments.
    pub fn set_pipeline(&mut self, pipeline: &Pipeline) {
        self.pipeline = Some(pipeline.clone());
        self.buffer.recording.begin(&mut self.open);
    }

    /// An argument at a slot and how the kernel uses it.
    pub fn set_buffer(&mut self, slot: usize, slice: Slice, access: Access) {
        self.buffer.recording.bind(&self.open, slot, Some((slice, access)));
    }

    /// An argument that the constants say is not there.
    pub fn set_nothing(&mut self, slot: usize) {
        self.buffer.recording.bind(&self.open, slot, None);
    }

    /// The constants, copied into the command.
    pub fn set_constants(&mut self, words: &[u32]) {
        self.buffer.recording.constants(&self.open, words);
    }

    /// Records one command over a grid; the constants are its last argument.
    ///
    /// # Errors
    /// `is_malformed`, naming the kernel and the argument, where Metal's rules are broken: slots,
    /// constants, ranges outside their buffer, a written argument that overlaps another, a grid of
    /// nothing, more threads than the pipeline has.
    pub fn dispatch(&mut self, note: Note, grid: Grid) -> Result<()> {
        let pipeline = self
            .pipeline
            .take()
            .ok_or_else(|| Error::malformed("metal: a dispatch without a pipeline".to_string()))?;
        let recording = &mut self.buffer.recording;
        let (args, words) = recording.bound(&self.open);
        check(&pipeline, args, words, grid)
            .map_err(|what| Error::malformed(format!("metal: {}: {what}", pipeline.name)))?;
        recording.take(&mut self.open, pipeline, note, grid);
        Ok(())
    }

    /// Ends a round: [`Committed::advance`] may stop here.
    pub fn mark(&mut self) {
        let at = self.buffer.recording.entries.len();
        self.buffer.recording.marks.push(at);
    }

    /// What is recorded after it runs after everything recorded before it.
    pub fn barrier(&mut self) {
        self.buffer.recording.entries.push(Entry::Barrier);
    }
}

/// Metal's rules, which break silently on a device.
fn check(
    pipeline: &Pipeline,
    args: &[Arg],
    words: &[u32],
    grid: Grid,
) -> std::result::Result<(), String> {
    if args.len() >= SLOTS || 4 * words.len() > CONSTANT_BYTES_MAX {
        return Err("more arguments or constants than a command holds".into());
    }
    if grid.groups.contains(&0) || grid.threads == 0 {
        return Err(format!("a grid of nothing, {grid:?}"));
    }
    if grid.threads > pipeline.threads_max {
        let (threads, max) = (grid.threads, pipeline.threads_max);
        return Err(format!("{threads} threads in a threadgroup, its pipeline has at most {max}"));
    }
    if !grid.threads.is_multiple_of(32) {
        return Err(format!("{} threads, no whole simdgroups", grid.threads));
    }
    for (slot, (slice, access)) in all(args) {
        let Slice { buffer, bytes } = slice;
        if bytes.start > bytes.end || bytes.end > buffer.len_bytes || bytes.start % 4 != 0 {
            let len = buffer.len_bytes;
            return Err(format!("argument {slot}: bytes {bytes:?} of a buffer of {len}"));
        }
        let meets = |o: &Slice| {
            o.buffer == *buffer && o.bytes.start < bytes.end && bytes.start < o.bytes.end
        };
        let other = all(args).find(|(s, (o, _))| *s != slot && meets(o));
        if let (Access::Write, Some((other, _))) = (access, other) {
            return Err(format!("argument {slot} is written and overlaps argument {other}"));
        }
    }
    if let Code::Emulated(kernel) = &pipeline.code {
        for (slot, (_, access)) in all(args) {
            let writes = |a: &&fornax_msl::Argument| a.index as usize == slot && !a.read_only;
            let written = kernel.arguments().iter().any(|a| writes(&a));
            if written != (*access == Access::Write) {
                return Err(format!("argument {slot} is bound for {access:?}"));
            }
        }
    }
    Ok(())
}

fn all(args: &[Arg]) -> impl Iterator<Item = (usize, &(Slice, Access))> {
    args.iter().enumerate().filter_map(|(slot, arg)| Some((slot, arg.as_ref()?)))
}

/// What was committed at once: a command buffer, or several where one would run too long.
#[derive(Debug)]
pub struct Committed {
    number: u64,
    parts: u64,
    device: Device,
    work: Arc<Mutex<Work>>,
    native: Option<system::Queue>,
    _live: Live,
}

impl Committed {
    /// Command buffers that it was cut into.
    pub fn parts(&self) -> u64 {
        self.parts
    }

    /// Returns when the commands and all before them have run.
    ///
    /// # Errors
    /// `is_failed` when they did not, or depended on others that did not; `is_lost` when nothing
    /// that follows will either.
    pub fn wait(&self) -> Result<()> {
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        while work.finished < self.number {
            let Some(pending) = work.waiting.pop_front() else { break };
            work.finished += 1;
            work.settle(&self.device, self.native.as_ref(), pending);
        }
        work.told(self.number)
    }

    /// Lets a stand-in go on with these commands to the end of a round, and with all before them
    /// to their ends: it has no device that runs by itself, so that to look is to let it run. True
    /// when nothing is left.
    ///
    /// # Errors
    /// As [`Committed::wait`].
    pub fn advance(&self) -> Result<bool> {
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        while work.finished < self.number {
            let mine = work.finished + 1 == self.number;
            let Some(pending) = work.waiting.pop_front() else { break };
            let pending = match pending {
                Pending::Recorded(r) if mine && self.native.is_none() => {
                    match work.part(&self.device, r) {
                        Some(rest) => {
                            work.waiting.push_front(Pending::Recorded(rest));
                            return Ok(false);
                        }
                        None => continue,
                    }
                }
                other => other,
            };
            work.finished += 1;
            work.settle(&self.device, self.native.as_ref(), pending);
        }
        work.told(self.number).map(|()| true)
    }

    /// Whether its results so far may be looked at without a wait: a device's memory is only what it says once its
    /// command buffers have ended.
    pub fn is_ready(&self) -> bool {
        let work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        let ahead = self.number.saturating_sub(work.finished) as usize;
        work.waiting.iter().take(ahead).all(|pending| match pending {
            Pending::Native(flight) => flight.is_over(),
            _ => true,
        })
    }

    /// Whether there is nothing left to wait for.
    pub fn is_done(&self) -> bool {
        self.work.lock().unwrap_or_else(PoisonError::into_inner).finished >= self.number
    }
}

impl Work {
    /// Runs one round of a recording; gives it back unless that was its last, or failed.
    fn part(&mut self, device: &Device, recording: Recording) -> Option<Recording> {
        let next = recording.marks.iter().copied().find(|m| *m > self.at);
        let Some(to) = next.filter(|to| *to < recording.entries.len()) else {
            self.finished += 1;
            self.settle(device, None, Pending::Recorded(recording));
            return None;
        };
        self.finished += 1;
        let started = Instant::now();
        let ran = self.stand_in(device, &recording, self.at..to);
        if let Err(text) = ran {
            self.at = 0;
            self.fail(device, &Failure { cause: Cause::Kernel, text });
            return None;
        }
        self.finished -= 1;
        self.device_seconds += started.elapsed().as_secs_f64();
        self.at = to;
        Some(recording)
    }

    fn stand_in(
        &mut self,
        device: &Device,
        recording: &Recording,
        part: Range<usize>,
    ) -> std::result::Result<(), String> {
        if part.start == 0 {
            self.ran.clear();
        }
        let seed = device.setup.seed.wrapping_add(self.finished - 1);
        let (seconds, ran) = (&mut self.seconds, &mut self.ran);
        emulator::run(device, recording, part, seed, seconds, ran)
    }

    /// Ends the one of number `finished`.
    fn settle(&mut self, device: &Device, native: Option<&system::Queue>, pending: Pending) {
        let number = self.finished;
        // What follows a failure works on what is not there: a stand-in leaves it out, a device
        // has done it all the same.
        let moot = self.failures.iter().any(|(range, _)| range.contains(&number));
        let ran = match pending {
            Pending::Failed(failure) => Err(failure),
            Pending::Native(flight) => {
                let plain = flight.plain_s();
                flight.wait().inspect(|s| self.pace.learn(plain, *s))
            }
            Pending::Recorded(mut recording) => {
                let ran = if moot { Ok(0.0) } else { self.run(device, native, &recording) };
                recording.clear();
                self.spare.push(recording);
                ran
            }
        };
        match ran {
            Ok(seconds) => self.device_seconds += seconds,
            Err(failure) if !moot => self.fail(device, &failure),
            Err(_) => {}
        }
    }

    /// Seconds that it took.
    fn run(
        &mut self,
        device: &Device,
        native: Option<&system::Queue>,
        recording: &Recording,
    ) -> std::result::Result<f64, Failure> {
        if let Some(native) = native {
            self.ran.clear();
            return native.run_each(&device.lock(), recording, &mut self.seconds, &mut self.ran);
        }
        let started = Instant::now();
        let part = std::mem::take(&mut self.at)..recording.entries.len();
        let ran = self.stand_in(device, recording, part);
        ran.map_err(|text| Failure { cause: Cause::Kernel, text })?;
        Ok(started.elapsed().as_secs_f64())
    }

    fn fail(&mut self, device: &Device, failure: &Failure) {
        let (number, text) = (self.finished, failure.to_string());
        let last = if failure.cause.is_final() { u64::MAX } else { self.committed };
        self.lost |= failure.cause.is_final();
        if failure.cause.is_final() && failure.cause != Cause::Kernel {
            device.health.lose(&text);
        }
        if self.failures.len() == FAILURES_KEPT {
            self.failures.pop_front();
        }
        self.failures.push_back((number..=last, text));
    }

    fn told(&self, number: u64) -> Result<()> {
        let Some((range, text)) = self.failures.iter().find(|(range, _)| range.contains(&number))
        else {
            return Ok(());
        };
        let which = if number == *range.start() { "" } else { "an earlier step failed: " };
        if *range.end() == u64::MAX {
            return Err(Error::lost(format!("metal: {which}{text}")));
        }
        Err(Error::failed(format!("metal: the step was not done: {which}{text}")))
    }
}

#[cfg(all(test, not(target_os = "macos")))]
mod tests {
    use super::super::Setup;
    use super::*;

    /// What Metal would do silently, or not at all.
    #[test]
    fn a_command_that_breaks_a_rule_is_refused_when_it_is_written() {
        let setup = Setup { seed: 0, threads_max: 256, budget_s: None };
        let device = Device::new(setup, Backend::Emulated, Arc::default());
        let queue = device.queue().expect("a stand-in has one");
        let copy = device.pipeline("copy", &[]).expect("in the library");
        let buffer = device.buffer("x", 64).expect("memory");
        let grid = Grid { groups: [1, 1, 1], threads: 32 };
        let refused = |a: Slice, b: Slice, words: &[u32], grid: Grid| {
            let mut commands = queue.command_buffer();
            let mut encoder = commands.encoder();
            encoder.set_pipeline(&copy);
            encoder.set_buffer(0, a, Access::Read);
            encoder.set_buffer(1, b, Access::Write);
            encoder.set_constants(words);
            encoder.dispatch(Note::default(), grid).err().map(|e| e.to_string()).unwrap_or_default()
        };
        let (low, high) = (buffer.words(0..32), buffer.words(32..64));
        assert_eq!(refused(low.clone(), high.clone(), &[1, 32], grid), "");
        for (what, said) in [
            (refused(low.clone(), buffer.words(31..64), &[1, 32], grid), "overlaps argument 0"),
            (refused(low.clone(), buffer.words(32..65), &[1, 32], grid), "of a buffer of 256"),
            (refused(low.clone(), high.clone(), &[0; 1025], grid), "more arguments or constants"),
            (
                refused(low.clone(), high.clone(), &[1, 32], Grid { groups: [1, 0, 1], ..grid }),
                "a grid of nothing",
            ),
            (
                refused(low, high, &[1, 32], Grid { threads: 288, ..grid }),
                "288 threads in a threadgroup, its pipeline has at most 256",
            ),
        ] {
            assert!(what.contains("copy") && what.contains(said), "{what:?}, not {said:?}");
        }
    }
}
