//! A ladder's dispatch under the emulator, in shuffled order. It knows no kernel.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use fornax_msl::{BarrierId, Buffer, Command, Dispatch, Library, Options, Order, Queue, Value};

#[cfg(not(target_os = "macos"))]
use super::{floats, words};
use crate::library::{FAMILIES, family_of};

thread_local! {
    /// A barrier of the kernel library that does nothing, for the test of the tests.
    pub(super) static WITHOUT: Cell<Option<BarrierId>> = const { Cell::new(None) };
}

/// The compiled family that holds `entry`; each is compiled once.
pub(super) fn library(entry: &str) -> Library {
    static ALL: Mutex<Option<HashMap<usize, Library>>> = Mutex::new(None);
    let at = family_of(entry).unwrap_or_else(|| panic!("no family holds {entry}"));
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let all = all.get_or_insert_default();
    all.entry(at)
        .or_insert_with(|| {
            let family = &FAMILIES[at];
            Library::compile(family.sources).unwrap_or_else(|e| panic!("{}: {e}", family.name))
        })
        .clone()
}

/// A dispatch under way: buffers in the order of their slots, then the constants.
pub(super) struct Run {
    dispatch: Dispatch,
    slot: u32,
}

impl Run {
    pub(super) fn new(entry: &str, constants: &[u32], grid: [u32; 3], threads: [u32; 3]) -> Run {
        // Constants that the kernel does not use are those of its relatives.
        let library = library(entry);
        let info = library.kernels().iter().find(|k| k.name == entry).expect(entry);
        let uses = |i: u32| info.constants.iter().any(|c| c.index == i);
        let all = (0u32..).zip(constants).filter(|(i, _)| uses(*i));
        let values: Vec<(u32, Value)> = all.map(|(i, v)| (i, Value::Uint(*v))).collect();
        let pipeline = library.pipeline(entry, &values);
        let pipeline = pipeline.unwrap_or_else(|e| panic!("{entry}: {e}"));
        Run { dispatch: Dispatch::new(&pipeline, grid, threads), slot: 0 }
    }

    pub(super) fn buffer(mut self, buffer: &Buffer) -> Run {
        self.dispatch = self.dispatch.buffer(self.slot, buffer);
        self.slot += 1;
        self
    }

    #[cfg(not(target_os = "macos"))]
    pub(super) fn floats(self, values: &[f32]) -> Run {
        self.buffer(&floats(values))
    }

    #[cfg(not(target_os = "macos"))]
    pub(super) fn words(self, values: &[u32]) -> Run {
        self.buffer(&words(values))
    }

    /// Binds the constants and runs.
    pub(super) fn go(self, constants: &[u32]) {
        let bytes: Vec<u8> = constants.iter().flat_map(|w| w.to_ne_bytes()).collect();
        let dispatch = self.dispatch.bytes(self.slot, &bytes);
        let seed = u64::from(dispatch.grid[0]);
        let queue =
            Queue::new(Options { seed, order: Order::Shuffled, disabled_barrier: WITHOUT.get() });
        let name = dispatch.pipeline.info().name.clone();
        queue
            .run(&[Command::Dispatch(dispatch)])
            .unwrap_or_else(|e| panic!("{name} with {constants:?}: {e}"));
    }
}
