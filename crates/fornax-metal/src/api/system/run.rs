//! Recorded commands to the GPU: one command buffer, or several where one would run too long, each with one
//! concurrent encoder; and what became of them. It knows no plan.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use fornax_plan::{Error, Result};
use objc2::available;
use objc2::rc::autoreleasepool;
use objc2::runtime::ProtocolObject;
use objc2_metal::{
    MTLBarrierScope, MTLBuffer, MTLCommandBuffer, MTLCommandBufferDescriptor,
    MTLCommandBufferErrorOption, MTLCommandBufferStatus, MTLCommandEncoder, MTLCommandQueue,
    MTLComputeCommandEncoder, MTLDevice, MTLDispatchType, MTLGPUFamily, MTLResidencySet,
    MTLResidencySetDescriptor, MTLSize,
};

use super::{Buffer, Gpu, Object, text};
use crate::api::failure::{Cause, Failure};
use crate::api::memory::{Memory, NOTHING_BYTES};
use crate::api::recording::{Dispatch, Entry, Ran, Recording};
use crate::api::{Code, Grid, SLOTS};

/// Command buffers under way before the next waits for one: a long prompt is cut into many.
const BUFFERS_MAX: usize = 256;

/// A queue and what is kept resident for it.
#[derive(Clone, Debug)]
pub(crate) struct Queue(Arc<Inner>);

struct Inner {
    queue: Object<dyn MTLCommandQueue>,
    resident: Mutex<Option<Resident>>,
    /// Stands for arguments that the constants say are not there, each in its slot's part; no kernel looks at it.
    nothing: Buffer,
}

/// The residency set and how many buffers of the device's memory are in it, of those that were there when so many had
/// been let go of.
struct Resident {
    set: Object<dyn MTLResidencySet>,
    known: usize,
    released: u64,
}

// SAFETY: the set is not safe to use from two threads at once, and is used under its lock alone.
unsafe impl Send for Resident {}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Inner")
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let resident = self.resident.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(Resident { set, .. }) = resident.take() {
            set.endResidency();
            set.removeAllAllocations();
            set.commit();
            self.queue.removeResidencySet(&set);
        }
    }
}

impl Gpu {
    /// # Errors
    /// `is_lost` where the system gives none; `is_out_of_memory`.
    pub(in crate::api) fn queue(&self) -> Result<Queue> {
        autoreleasepool(|_| {
            let queue = self.device.newCommandQueueWithMaxCommandBufferCount(BUFFERS_MAX);
            let queue = queue.ok_or_else(|| Error::lost("metal: the system gives no queue"))?;
            // The class itself is absent before macOS 15.
            let sets = available!(macos = 15.0) && self.device.supportsFamily(MTLGPUFamily::Apple6);
            let set = sets.then(|| {
                let descriptor = MTLResidencySetDescriptor::new();
                self.device.newResidencySetWithDescriptor_error(&descriptor).ok()
            });
            let resident = set.flatten().map(|set| {
                queue.addResidencySet(&set);
                Resident { set, known: 0, released: 0 }
            });
            let (resident, nothing) =
                (Mutex::new(resident), self.buffer("nothing", SLOTS * NOTHING_BYTES)?);
            Ok(Queue(Arc::new(Inner { queue, resident, nothing })))
        })
    }
}

/// Committed command buffers.
pub(crate) struct Flight {
    first: Object<dyn MTLCommandBuffer>,
    rest: Vec<Object<dyn MTLCommandBuffer>>,
    plain_s: f64,
}

// SAFETY: a committed command buffer is only waited for and asked how it ended, by one thread at a time.
unsafe impl Send for Flight {}

impl std::fmt::Debug for Flight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flight").field("parts", &(1 + self.rest.len())).finish_non_exhaustive()
    }
}

impl Flight {
    /// What was predicted of it.
    pub(in crate::api) fn plain_s(&self) -> f64 {
        self.plain_s
    }

    /// Whether a wait would not wait.
    pub(in crate::api) fn is_over(&self) -> bool {
        // A queue's command buffers end in their order.
        let last = self.rest.last().unwrap_or(&self.first);
        matches!(last.status(), MTLCommandBufferStatus::Completed | MTLCommandBufferStatus::Error)
    }

    /// Seconds that the GPU worked. Waits for all parts, and tells the first error: those of later parts are echoes.
    pub(in crate::api) fn wait(self) -> std::result::Result<f64, Failure> {
        autoreleasepool(|_| {
            let mut told = Ok(0.0);
            for part in [&self.first].into_iter().chain(&self.rest) {
                part.waitUntilCompleted();
                told = match (told, ended(part)) {
                    (Ok(sum), Ok(s)) => Ok(sum + s),
                    (Err(first), _) | (Ok(_), Err(first)) => Err(first),
                };
            }
            told
        })
    }
}

/// How a completed command buffer ended.
fn ended(commands: &ProtocolObject<dyn MTLCommandBuffer>) -> std::result::Result<f64, Failure> {
    match (commands.status(), commands.error()) {
        (MTLCommandBufferStatus::Completed, None) => {
            Ok((commands.GPUEndTime() - commands.GPUStartTime()).max(0.0))
        }
        (_, Some(error)) => {
            // The dictionary says how far each encoder came.
            let text = format!("{}; {}", text(&error), error.userInfo().description());
            Err(Failure { cause: Cause::of(error.code(), &text), text })
        }
        (status, None) => Err(other(format!("status {} and no error", status.0))),
    }
}

fn other(text: String) -> Failure {
    Failure { cause: Cause::Other, text }
}

/// Ends the encoder however its scope is left: Metal aborts the process where one is dropped open.
struct Ending<'a>(&'a ProtocolObject<dyn MTLComputeCommandEncoder>);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.endEncoding();
    }
}

/// What an encoder has bound: it stays bound from dispatch to dispatch.
#[derive(Default)]
struct Bound([Option<(usize, usize)>; SLOTS]);

impl Bound {
    /// Notes a buffer and an offset; false where they are there already.
    fn changes(&mut self, slot: usize, buffer: &Buffer, at: usize) -> bool {
        let object: *const ProtocolObject<dyn MTLBuffer> = &raw const **buffer.object();
        let now = Some((object.addr(), at));
        std::mem::replace(&mut self.0[slot], now) != now
    }
}

impl Queue {
    /// Encodes and commits all parts.
    pub(in crate::api) fn commit(
        &self,
        memory: &Memory,
        recording: &Recording,
        plain_s: f64,
    ) -> std::result::Result<Flight, Failure> {
        autoreleasepool(|_| {
            self.reside(memory);
            let mut parts = recording.parts();
            let first = self.part(memory, recording, parts.next().unwrap_or_default())?;
            let mut flight = Flight { first, rest: Vec::new(), plain_s };
            for part in parts {
                match self.part(memory, recording, part) {
                    Ok(commands) => flight.rest.push(commands),
                    Err(failure) => {
                        // What is under way must not outlive what it works on.
                        return Err(flight.wait().err().unwrap_or(failure));
                    }
                }
            }
            Ok(flight)
        })
    }

    /// Runs command after command, each in a command buffer of its own, adds up the GPU's seconds by label, and
    /// notes them by command.
    pub(in crate::api) fn run_each(
        &self,
        memory: &Memory,
        recording: &Recording,
        seconds: &mut [f64],
        ran: &mut Vec<Ran>,
    ) -> std::result::Result<f64, Failure> {
        self.reside(memory);
        let (mut all, mut barrier) = (0.0, false);
        for (at, entry) in recording.entries.iter().enumerate() {
            let Entry::Dispatch(d) = entry else {
                barrier = true;
                continue;
            };
            let took = autoreleasepool(|_| {
                let commands = self.part(memory, recording, std::slice::from_ref(entry))?;
                commands.waitUntilCompleted();
                ended(&commands)
            })?;
            all += took;
            if let Some(s) = seconds.get_mut(d.note.label as usize) {
                *s += took;
            }
            ran.push(Ran {
                label: d.note.label,
                kernel: Arc::clone(&d.pipeline.name),
                barrier: std::mem::take(&mut barrier),
                begins: at == 0 || recording.marks.contains(&at),
                seconds: took,
                bytes: d.note.bytes,
                counts: None,
            });
        }
        Ok(all)
    }

    /// Keeps everything resident that has come into the memory since.
    fn reside(&self, memory: &Memory) {
        let mut resident = self.0.resident.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Resident { set, known, released }) = &mut *resident else { return };
        if *known == memory.count() && *released == memory.released() {
            return;
        }
        if *released != memory.released() {
            // What is gone may not stay in the set, which would keep it.
            set.removeAllAllocations();
            *known = 0;
        }
        for buffer in memory.system_buffers(*known) {
            set.addAllocation(ProtocolObject::from_ref(&**buffer.object()));
        }
        (*known, *released) = (memory.count(), memory.released());
        // Nothing counts before this.
        set.commit();
        set.requestResidency();
    }

    fn part(
        &self,
        memory: &Memory,
        recording: &Recording,
        entries: &[Entry],
    ) -> std::result::Result<Object<dyn MTLCommandBuffer>, Failure> {
        let descriptor = MTLCommandBufferDescriptor::new();
        // Which encoder failed; the kernels' names come from their pipelines.
        descriptor.setErrorOptions(MTLCommandBufferErrorOption::EncoderExecutionStatus);
        let commands = self.0.queue.commandBufferWithDescriptor(&descriptor);
        let commands =
            commands.ok_or_else(|| other("the system gives no command buffer".into()))?;
        let encoder = commands.computeCommandEncoderWithDispatchType(MTLDispatchType::Concurrent);
        let encoder = encoder.ok_or_else(|| other("the system gives no encoder".into()))?;
        {
            let ending = Ending(&encoder);
            let mut there = Bound::default();
            // A command buffer begins behind the one before it.
            let begun = entries.iter().skip_while(|e| matches!(e, Entry::Barrier));
            for entry in begun {
                match entry {
                    Entry::Barrier => ending.0.memoryBarrierWithScope(MTLBarrierScope::Buffers),
                    Entry::Dispatch(d) => {
                        self.dispatch(ending.0, &mut there, memory, recording, d)?;
                    }
                }
            }
        }
        commands.commit();
        Ok(commands)
    }

    fn dispatch(
        &self,
        encoder: &ProtocolObject<dyn MTLComputeCommandEncoder>,
        there: &mut Bound,
        memory: &Memory,
        recording: &Recording,
        d: &Dispatch,
    ) -> std::result::Result<(), Failure> {
        let Code::System(pipeline) = &d.pipeline.code else {
            return Err(other(format!("{} is no kernel of the system's", d.pipeline.name)));
        };
        encoder.setComputePipelineState(&pipeline.0);
        let args = recording.args(d);
        for (slot, arg) in args.iter().enumerate() {
            let bound = arg.as_ref().map(|(slice, _)| memory.system(slice));
            let (buffer, at) = match bound {
                None => (&self.0.nothing, slot * NOTHING_BYTES),
                Some(Some(found)) => found,
                Some(None) => {
                    return Err(other(format!("argument {slot} is no memory of the system's")));
                }
            };
            // Most that is not there stays so from dispatch to dispatch.
            if !there.changes(slot, buffer, at) {
                continue;
            }
            // SAFETY: the recording has checked slot and range; the memory outlives the commands, which are waited for
            // before it goes, and command buffers retain what they bind.
            unsafe { encoder.setBuffer_offset_atIndex(Some(buffer.object()), at, slot) };
        }
        let words = recording.words(d);
        if let Some(first) = words.first() {
            there.0[args.len()] = None;
            // SAFETY: the words are copied before the call returns, and are at most 4 KiB.
            unsafe {
                encoder.setBytes_length_atIndex(
                    NonNull::from(first).cast(),
                    size_of_val(words),
                    args.len(),
                );
            }
        }
        let Grid { groups: [x, y, z], threads } = d.grid;
        let size = |w: u32, h: u32, d: u32| MTLSize {
            width: w as usize,
            height: h as usize,
            depth: d as usize,
        };
        encoder.dispatchThreadgroups_threadsPerThreadgroup(size(x, y, z), size(threads, 1, 1));
        Ok(())
    }
}
