//! Every kernel, every variant forced, against plain loops in double precision: on a Mac on its GPU, elsewhere under the
//! emulator in shuffled order. It knows kernels and their constants, no plan.

mod any;
mod attention;
#[cfg(not(target_os = "macos"))]
mod barriers;
mod conv;
mod emulated;
#[cfg(target_os = "macos")]
mod gpu;
mod linear;
mod moe;
#[cfg(not(target_os = "macos"))]
mod names;
mod rows;
mod sample;
mod sweep;

use fornax_gguf::{TensorType, blocks};
use fornax_msl::Buffer;

use crate::pieces::PIECES_MAX;

#[cfg(not(target_os = "macos"))]
use emulated::{Run, WITHOUT, library};
#[cfg(target_os = "macos")]
use gpu::Either as Run;

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

impl Run {
    /// A pool of keys or values in its pieces, and nothing in the places of those that it does not have.
    fn pool(self, pieces: &[Buffer]) -> Run {
        let all = (0..PIECES_MAX).map(|n| pieces.get(n).cloned().unwrap_or_else(|| room(16)));
        all.fold(self, |run, piece| run.buffer(&piece))
    }
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
