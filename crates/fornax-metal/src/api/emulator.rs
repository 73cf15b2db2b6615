//! The form that runs the kernel sources themselves: pipelines from compiled families, and command
//! buffers as the emulator's commands. It knows no plan.

use std::collections::HashMap;
use std::mem;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use fornax_msl::{Command, Library, Options, Order, Queue, Value};
use fornax_plan::{Error, Result};

use super::memory::{Memory, NOTHING_BYTES};
use super::recording::{Dispatch, Entry, Ran, Recording};
use super::{Code, Device, SLOTS};
use crate::library::{FAMILIES, Family, family_of};

/// The kernel `name` with its function constants. A family is compiled when the first of its
/// kernels is asked for, once in a process.
pub(super) fn pipeline(name: &str, constants: &[u32]) -> Result<Code> {
    static COMPILED: Mutex<Option<HashMap<usize, Library>>> = Mutex::new(None);
    let family = family_of(name).ok_or_else(|| {
        Error::unsupported(format!("metal: the kernel library has no function {name}"))
    })?;
    let mut compiled = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    let compiled = compiled.get_or_insert_default();
    let library = match compiled.get(&family) {
        Some(library) => library.clone(),
        None => {
            let Family { name, sources, .. } = &FAMILIES[family];
            let library = Library::compile(sources).map_err(|e| {
                Error::unsupported(format!("metal emulator: compiling the {name} kernels: {e}"))
            })?;
            compiled.insert(family, library.clone());
            library
        }
    };
    // Constants that a kernel does not use are no fault, here as on a device.
    let known = library.kernels().iter().find(|k| k.name == name);
    let uses = |i: u32| known.is_some_and(|k| k.constants.iter().any(|c| c.index == i));
    let all = (0u32..).zip(constants).filter(|(i, _)| uses(*i));
    let values: Vec<(u32, Value)> = all.map(|(i, v)| (i, Value::Uint(*v))).collect();
    let pipeline = library.pipeline(name, &values);
    let pipeline = pipeline.map_err(|e| Error::unsupported(format!("metal emulator: {e}")))?;
    Ok(Code::Emulated(pipeline))
}

/// Runs a part of a command buffer in an order that the seed shuffles, or, while somebody measures,
/// one command at a time; notes what every command did.
pub(super) fn run(
    device: &Device,
    recording: &Recording,
    part: Range<usize>,
    seed: u64,
    seconds: &mut [f64],
    ran: &mut Vec<Ran>,
) -> std::result::Result<(), String> {
    let memory = device.lock();
    let nothing = nothing()?;
    let mut commands = Vec::with_capacity(part.len() + recording.cuts.len());
    let first = ran.len();
    let (mut barrier, mut begins) = (false, part.start == 0);
    for at in part {
        // A new command buffer begins when the one before it is done.
        if recording.is_fence(at) {
            commands.push(Command::Barrier);
        }
        barrier |= matches!(recording.entries[at], Entry::Barrier);
        begins |= recording.marks.contains(&at);
        if let Entry::Dispatch(d) = &recording.entries[at] {
            commands.push(Command::Dispatch(bound(&memory, nothing, recording, d)?));
            let (barrier, begins) = (mem::take(&mut barrier), mem::take(&mut begins));
            let (label, kernel) = (d.note.label, Arc::clone(&d.pipeline.name));
            let bytes = d.note.bytes;
            ran.push(Ran { label, kernel, barrier, begins, seconds: 0.0, bytes, counts: None });
        }
    }
    let ran = &mut ran[first..];
    let queue = Queue::new(Options { seed, order: Order::Interleaved, disabled_barrier: None });
    if seconds.is_empty() {
        let report = queue.run(&commands).map_err(|e| {
            let at = e.as_fault().and_then(|f| ran.get(f.dispatch));
            at.map_or_else(|| e.to_string(), |ran| format!("{e} (op {})", ran.label))
        })?;
        ran.iter_mut().zip(report.dispatches).for_each(|(ran, c)| ran.counts = Some(c));
        return Ok(());
    }
    let dispatches = commands.iter().filter(|c| matches!(c, Command::Dispatch(_)));
    for (command, ran) in dispatches.zip(ran) {
        let started = Instant::now();
        let report = queue.run(std::slice::from_ref(command));
        let report = report.map_err(|e| format!("{e} (op {})", ran.label))?;
        ran.seconds = started.elapsed().as_secs_f64();
        ran.counts = report.dispatches.into_iter().next();
        if let Some(s) = seconds.get_mut(ran.label as usize) {
            *s += ran.seconds;
        }
    }
    Ok(())
}

/// Stands for arguments that the constants say are not there; no kernel may look at it.
fn nothing() -> std::result::Result<&'static fornax_msl::Buffer, String> {
    static NOTHING: OnceLock<std::result::Result<fornax_msl::Buffer, String>> = OnceLock::new();
    let made = || {
        let made = fornax_msl::Buffer::new("nothing", SLOTS * NOTHING_BYTES);
        made.map_err(|e| e.to_string())
    };
    NOTHING.get_or_init(made).as_ref().map_err(Clone::clone)
}

fn bound(
    memory: &Memory,
    nothing: &fornax_msl::Buffer,
    recording: &Recording,
    d: &Dispatch,
) -> std::result::Result<fornax_msl::Dispatch, String> {
    let Code::Emulated(pipeline) = &d.pipeline.code else {
        return Err(format!("{} is no kernel of the emulator's", d.pipeline.name));
    };
    let threads = [d.grid.threads, 1, 1];
    let mut out = fornax_msl::Dispatch::new(pipeline, d.grid.groups, threads);
    let args = recording.args(d);
    for (slot, arg) in args.iter().enumerate() {
        out = match arg {
            None => out.range(slot as u32, nothing, slot * NOTHING_BYTES, NOTHING_BYTES),
            Some((slice, _)) => {
                let found = memory.emulated(slice);
                let (buffer, at) = found
                    .ok_or_else(|| format!("argument {slot} is no memory of the emulator's"))?;
                out.range(slot as u32, buffer, at, slice.bytes.len())
            }
        };
    }
    let words = recording.words(d);
    let constants: Arc<[u8]> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
    Ok(out.bytes(args.len() as u32, &constants))
}
