//! Runs commands: the dispatches between two barriers in a seeded order of their threadgroups, and each fault as an error that
//! names kernel, buffer and source line. It knows no kernel language.

use std::ptr::null_mut;
use std::sync::atomic::Ordering;

use crate::dispatch::{Bound, Dispatch};
use crate::error::{Fault, FaultKind};
use crate::ffi::{self, Binding, Launch, RawFault, Runtime};
use crate::library::BarrierId;
use crate::lines;
use crate::memory::{Buffer, GENERATION};
use crate::report::{DispatchReport, Report, Traffic};
use crate::{Error, inline};

/// A command of a concurrent encoder.
#[derive(Clone, Debug)]
pub enum Command {
    /// Runs a kernel.
    Dispatch(Dispatch),
    /// Orders everything before it against everything after it.
    Barrier,
}

/// In which order what is unordered runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// Dispatch after dispatch, threadgroup after threadgroup, thread after thread.
    #[default]
    InOrder,
    /// The dispatches of a span in any order, and the threadgroups and threads of each.
    Shuffled,
    /// As `Shuffled`, with the threadgroups of all dispatches of a span mixed.
    Interleaved,
}

/// How to run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Seed of the order.
    pub seed: u64,
    /// The order.
    pub order: Order,
    /// A barrier in a kernel that does nothing, to test that some test sees it.
    pub disabled_barrier: Option<BarrierId>,
}

/// Runs commands, one list after the other.
#[derive(Clone, Copy, Debug, Default)]
pub struct Queue {
    options: Options,
}

impl Queue {
    /// A queue that runs in the given way.
    pub fn new(options: Options) -> Queue {
        Queue { options }
    }

    /// Runs commands to their end.
    ///
    /// # Errors
    /// `is_arguments` when a dispatch does not fit its kernel's signature, before anything runs; a fault when a kernel commits
    /// one, with the effects of what ran before left in place; `is_host` when the system refuses memory.
    pub fn run(&self, commands: &[Command]) -> Result<Report, Error> {
        for command in commands {
            if let Command::Dispatch(d) = command {
                d.check()?;
            }
        }
        let mut runtime = Runtime::lock()?;
        let mut report = Report::default();
        let mut random = Random(self.options.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        for (n, part) in commands.split(|c| matches!(c, Command::Barrier)).enumerate() {
            report.barriers = n;
            let span: Vec<&Dispatch> = part
                .iter()
                .filter_map(|c| match c {
                    Command::Dispatch(d) => Some(d),
                    Command::Barrier => None,
                })
                .collect();
            let first = report.dispatches.len();
            let mut span = Span::new(&span, &self.options, first)?;
            span.run(&mut runtime, &mut random)?;
            report.dispatches.append(&mut span.finish());
        }
        Ok(report)
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, (self.next() >> 11) as usize % (i + 1));
        }
    }
}

/// A dispatch made ready.
struct Ready<'d> {
    dispatch: &'d Dispatch,
    launch: Launch,
    bindings: Box<[Binding]>,
    /// For each binding the bits of the bytes read and written.
    sets: Vec<[Vec<u64>; 2]>,
    labels: Vec<Option<&'d Buffer>>,
    group_bytes: u64,
    reached: [u64; ffi::SITES / 64],
}

/// The dispatches between two barriers.
struct Span<'d> {
    ready: Vec<Ready<'d>>,
    order: Order,
    first: usize,
    current: Option<usize>,
    /// Where the inline bytes are.
    _inline: inline::Arena,
}

impl<'d> Span<'d> {
    fn new(span: &[&'d Dispatch], options: &Options, first: usize) -> Result<Span<'d>, Error> {
        let written: Vec<(usize, usize, usize)> = span
            .iter()
            .flat_map(|d| d.ranges())
            .filter(|&(.., writes)| writes)
            .map(|(_, b, at, len, _)| (b.id(), at, at + len))
            .collect();
        let count =
            |d: &&&Dispatch| d.bound.iter().filter(|(_, b)| matches!(b, Bound::Bytes(_))).count();
        let mut inline = inline::Arena::new(span.iter().map(|d| count(&d)).sum())?;
        let mut ready = Vec::new();
        for (n, dispatch) in span.iter().enumerate() {
            ready.push(Ready::new(dispatch, first + n, options, &written, &mut inline)?);
        }
        Ok(Span { ready, order: options.order, first, current: None, _inline: inline })
    }

    /// Runs every threadgroup of the span.
    fn run(&mut self, runtime: &mut Runtime, random: &mut Random) -> Result<(), Error> {
        runtime.begin_span();
        let groups = |d: &Dispatch| d.grid.iter().map(|&g| u64::from(g)).product::<u64>();
        let mut turn: Vec<usize> = (0..self.ready.len()).collect();
        if self.order == Order::Interleaved {
            let mut all: Vec<(usize, u64)> = turn
                .iter()
                .flat_map(|&k| (0..groups(self.ready[k].dispatch)).map(move |g| (k, g)))
                .collect();
            random.shuffle(&mut all);
            return all.into_iter().try_for_each(|(k, g)| self.group(runtime, random, k, g));
        }
        if self.order == Order::InOrder {
            return turn.into_iter().try_for_each(|k| {
                let n = groups(self.ready[k].dispatch);
                (0..n).try_for_each(|g| self.group(runtime, random, k, g))
            });
        }
        random.shuffle(&mut turn);
        for k in turn {
            let mut list: Vec<u64> = (0..groups(self.ready[k].dispatch)).collect();
            random.shuffle(&mut list);
            list.into_iter().try_for_each(|g| self.group(runtime, random, k, g))?;
        }
        Ok(())
    }

    fn group(
        &mut self,
        runtime: &mut Runtime,
        random: &mut Random,
        k: usize,
        g: u64,
    ) -> Result<(), Error> {
        if runtime.clock_is_low() {
            GENERATION.fetch_add(1, Ordering::Relaxed);
            runtime.reset_clock();
            self.refresh_cells()?;
        }
        let ready = &mut self.ready[k];
        if self.current != Some(k) {
            // SAFETY: the caller holds the run-time library, so no kernel runs.
            unsafe { ready.dispatch.pipeline.specialise() };
            self.current = Some(k);
        }
        let [x, y, _] = ready.dispatch.grid.map(u64::from);
        let group = [g % x, g / x % y, g / x / y].map(|v| v as u32);
        let mut fault = RawFault::new();
        // SAFETY: the launch points at the bindings, windows and bit sets of this span, all alive; the kernel table belongs to
        // the library that the pipeline keeps loaded.
        let bad = unsafe { runtime.run_group(&ready.launch, group, random.next(), &mut fault) };
        ready.reached.iter_mut().zip(runtime.reached()).for_each(|(all, of)| *all |= of);
        ready.group_bytes = ready.group_bytes.max(runtime.group_bytes());
        if bad { Err(ready.fault(&fault, self.first + k)) } else { Ok(()) }
    }

    fn refresh_cells(&mut self) -> Result<(), Error> {
        for ready in &mut self.ready {
            for (b, label) in ready.bindings.iter_mut().zip(&ready.labels) {
                if let Some(buffer) = label.filter(|_| !b.cells.is_null()) {
                    b.cells = buffer.cells()?;
                }
            }
        }
        Ok(())
    }

    fn finish(self) -> Vec<DispatchReport> {
        self.ready.into_iter().map(Ready::report).collect()
    }
}

impl<'d> Ready<'d> {
    fn new(
        dispatch: &'d Dispatch,
        place: usize,
        options: &Options,
        written: &[(usize, usize, usize)],
        inline: &mut inline::Arena,
    ) -> Result<Ready<'d>, Error> {
        let library = dispatch.pipeline.library();
        let (desc, table) = (dispatch.pipeline.desc(), library.table());
        let mut launch = Launch {
            thunk: desc.thunk,
            args: desc.args,
            nargs: desc.nargs,
            nbindings: dispatch.bound.len() as u32,
            bindings: null_mut(),
            buffer: [null_mut(); ffi::SLOTS],
            group_bytes: dispatch.group_bytes(),
            grid: dispatch.grid,
            size: dispatch.threads,
            image_low: table.image_low,
            image_high: table.image_high,
            disabled_barrier: options
                .disabled_barrier
                .and_then(|b| library.index_of(b))
                .map_or(-1, |index| index as i64),
            order: u32::from(options.order != Order::InOrder),
            checks: u32::from(library.is_checked()),
            name: desc.name,
            dispatch: place as u64,
        };
        let (mut bindings, mut sets, mut labels) = (Vec::new(), Vec::new(), Vec::new());
        let writes =
            |index: u32| dispatch.ranges().iter().any(|&(i, _, _, _, writes)| i == index && writes);
        for (index, bound) in &dispatch.bound {
            let mut b = match bound {
                Bound::Bytes(bytes) => inline.add(bytes),
                Bound::Buffer { buffer, offset, length } => {
                    let before = labels.iter().flatten();
                    let nth = before.filter(|o: &&&Buffer| o.id() == buffer.id()).count();
                    bind(buffer, *offset, *length, nth, written)?
                }
            };
            let mut set = [bits(b.len), bits(b.len)];
            (b.read_set, b.write_set) = (set[0].as_mut_ptr(), set[1].as_mut_ptr());
            (b.index, b.writable) = (*index, u32::from(writes(*index)));
            launch.buffer[*index as usize] = b.low as *mut std::ffi::c_void;
            labels.push(match bound {
                Bound::Bytes(_) => None,
                Bound::Buffer { buffer, .. } => Some(buffer),
            });
            bindings.push(b);
            sets.push(set);
        }
        let mut bindings = bindings.into_boxed_slice();
        launch.bindings = bindings.as_mut_ptr();
        Ok(Ready {
            dispatch,
            launch,
            bindings,
            sets,
            labels,
            group_bytes: 0,
            reached: [0; ffi::SITES / 64],
        })
    }

    fn report(self) -> DispatchReport {
        let counted = |set: &[u64]| set.iter().map(|w| u64::from(w.count_ones())).sum::<u64>();
        let traffic = self.bindings.iter().zip(&self.sets).zip(&self.labels);
        let traffic = traffic.map(|((b, set), buffer)| Traffic {
            index: b.index,
            label: buffer.map(|b| b.label().to_owned()),
            loads: b.loads,
            bytes_loaded: b.load_bytes,
            bytes_read: counted(&set[0]),
            stores: b.stores,
            bytes_stored: b.store_bytes,
            bytes_written: counted(&set[1]),
        });
        DispatchReport {
            kernel: self.dispatch.pipeline.info().name.clone(),
            threadgroups: self.dispatch.grid.iter().map(|&g| u64::from(g)).product(),
            threads: self.dispatch.threads.iter().product(),
            threadgroup_memory: self.group_bytes,
            barriers: (0..ffi::SITES)
                .filter(|b| self.reached[b / 64] >> (b % 64) & 1 == 1)
                .collect(),
            traffic: traffic.collect(),
        }
    }

    fn fault(&self, raw: &RawFault, dispatch: usize) -> Error {
        let kind = match raw.kind {
            1 => FaultKind::OutOfBounds,
            2 => FaultKind::Unwritten,
            3 => FaultKind::Divergent,
            4 => FaultKind::Misaligned,
            5 => FaultKind::Race,
            6 => FaultKind::Conflict,
            7 => FaultKind::ThreadgroupMemory,
            8 => FaultKind::ReadOnlyWrite,
            9 => FaultKind::ArrayIndex,
            _ => FaultKind::Division,
        };
        let library = self.dispatch.pipeline.library();
        let text = |bytes: &[u8]| {
            let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
            String::from_utf8_lossy(&bytes[..end]).into_owned()
        };
        let place = if raw.line > 0 {
            Some((text(&raw.file), raw.line as u32)).filter(|(file, _)| !lines::is_own(file))
        } else {
            None
        };
        let address = raw.pc.wrapping_sub(library.table().image_low).wrapping_sub(1);
        let place =
            place.or_else(|| (raw.pc != 0).then(|| lines::of(library.path(), address)).flatten());
        let at = usize::try_from(raw.binding).ok();
        Error::fault(Fault {
            kind,
            kernel: self.dispatch.pipeline.info().name.clone(),
            dispatch,
            threadgroup: raw.group,
            thread: raw.thread,
            buffer: at.and_then(|k| self.labels[k]).map(|b| b.label().to_owned()),
            argument: at.map(|k| self.bindings[k].index),
            offset: raw.offset,
            place,
            text: text(&raw.text),
        })
    }
}

fn bits(len: u64) -> Vec<u64> {
    vec![0; len as usize / 64 + 1]
}

fn bind(
    buffer: &Buffer,
    offset: usize,
    length: usize,
    nth: usize,
    written: &[(usize, usize, usize)],
) -> Result<Binding, Error> {
    let window = buffer.window(nth)?;
    let disputed = written
        .iter()
        .any(|&(id, from, to)| id == buffer.id() && offset < to && from < offset + length);
    Ok(Binding {
        window: window.start,
        window_len: window.len as u64,
        low: window.data + offset,
        len: length as u64,
        in_buffer: offset as u64,
        written: buffer.written_bits(),
        // Bytes that nothing in the span may write cannot be disputed.
        cells: if disputed { buffer.cells()? } else { null_mut() },
        read_set: null_mut(),
        write_set: null_mut(),
        writable: 0,
        index: 0,
        loads: 0,
        load_bytes: 0,
        stores: 0,
        store_bytes: 0,
    })
}
