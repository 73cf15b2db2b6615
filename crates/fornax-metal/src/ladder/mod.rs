//! Every kernel, every variant forced, against plain loops in double precision, under the
//! emulator in shuffled order. It knows kernels and their constants, no plan.

mod any;
mod attention;
mod barriers;
mod conv;
mod linear;
mod moe;
mod names;
mod rows;

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use fornax_gguf::{TensorType, blocks};
use fornax_msl::{BarrierId, Buffer, Command, Dispatch, Library, Options, Order, Queue, Value};

use crate::library::{FAMILIES, family_of};

thread_local! {
    /// A barrier of the kernel library that does nothing, for the test of the tests.
    static WITHOUT: Cell<Option<BarrierId>> = const { Cell::new(None) };
}

/// The compiled family that holds `entry`; each is compiled once.
fn library(entry: &str) -> Library {
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
struct Run {
    dispatch: Dispatch,
    slot: u32,
}

impl Run {
    fn new(entry: &str, constants: &[u32], grid: [u32; 3], threads: [u32; 3]) -> Run {
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

    fn buffer(mut self, buffer: &Buffer) -> Run {
        self.dispatch = self.dispatch.buffer(self.slot, buffer);
        self.slot += 1;
        self
    }

    fn floats(self, values: &[f32]) -> Run {
        self.buffer(&floats(values))
    }

    fn words(self, values: &[u32]) -> Run {
        self.buffer(&words(values))
    }

    /// Binds the constants and runs.
    fn go(self, constants: &[u32]) {
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

fn bytes(data: &[u8]) -> Buffer {
    // Sixteen at least: an argument of any type is that long.
    let buffer = Buffer::new("input", data.len().max(16)).expect("memory");
    buffer.write(0, data).expect("a range inside");
    buffer
}

fn words(values: &[u32]) -> Buffer {
    bytes(&values.iter().flat_map(|w| w.to_ne_bytes()).collect::<Vec<u8>>())
}

fn floats(values: &[f32]) -> Buffer {
    words(&values.iter().map(|v| v.to_bits()).collect::<Vec<u32>>())
}

/// Memory for `n` words that nobody has written.
fn room(n: usize) -> Buffer {
    Buffer::new("output", (4 * n).max(16)).expect("memory")
}

fn read_words(buffer: &Buffer, n: usize) -> Vec<u32> {
    assert_eq!(buffer.first_unwritten(0, 4 * n), None, "a kernel left outputs unwritten");
    let mut data = vec![0; 4 * n];
    buffer.read(0, &mut data).expect("a range inside");
    data.chunks_exact(4).map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn read_floats(buffer: &Buffer, n: usize) -> Vec<f32> {
    read_words(buffer, n).into_iter().map(f32::from_bits).collect()
}

/// `n` elements of a pool of keys or values, from element `at` on.
fn pool_row(pool: &Buffer, ty: TensorType, at: usize, n: usize) -> Vec<f32> {
    let bytes = |elements: usize| elements / ty.block_len() * ty.block_bytes();
    assert_eq!(pool.first_unwritten(bytes(at), bytes(n)), None, "a row was not written");
    let (mut data, mut out) = (vec![0; bytes(n)], vec![0.0; n]);
    pool.read(bytes(at), &mut data).expect("a range inside");
    blocks::dequantize(ty, &data, &mut out).expect("plain numbers");
    out
}


/// Numbers in (−1, 1), a function of the seed.
fn noise(seed: u64, n: usize) -> Vec<f32> {
    (0..n as u32).map(|i| 2.0 * fornax_plan::sample::uniform(seed, i) - 1.0).collect()
}

/// Holds every element to the right one, within `bound` of one plus its size.
fn close(what: &str, have: &[f32], want: &[f64], bound: f64) {
    assert_eq!(have.len(), want.len(), "{what}");
    for (i, (h, w)) in have.iter().zip(want).enumerate() {
        let off = (f64::from(*h) - w).abs();
        assert!(off <= bound * (1.0 + w.abs()), "{what}: element {i} is {h}, expected {w}");
    }
}
