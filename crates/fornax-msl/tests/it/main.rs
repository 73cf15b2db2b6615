//! The emulator's tests: kernels against plain loops, each report against a kernel that commits the fault, and every barrier
//! of the demo kernels against its removal.

mod demos;
mod faults;
mod language;
mod signature;

use fornax_msl::{Buffer, Command, Dispatch, Error, Library, Options, Order, Queue, Report};

/// Numbers in [-1, 1) from a seed.
fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

/// A buffer with the given contents.
fn filled(label: &str, bytes: &[u8]) -> Buffer {
    let buffer = Buffer::new(label, bytes.len()).expect("memory");
    buffer.write(0, bytes).expect("a range inside");
    buffer
}

fn read_floats(buffer: &Buffer) -> Vec<f32> {
    read_words(buffer).into_iter().map(f32::from_bits).collect()
}

fn read_words(buffer: &Buffer) -> Vec<u32> {
    let mut bytes = vec![0; buffer.len()];
    buffer.read(0, &mut bytes).expect("a range inside");
    bytes.chunks_exact(4).map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Every order that a kernel has to be right in.
fn orders() -> Vec<Options> {
    let mut all = vec![Options::default()];
    for seed in 0..3 {
        for order in [Order::Shuffled, Order::Interleaved] {
            all.push(Options { seed, order, disabled_barrier: None });
        }
    }
    all
}

fn run(dispatch: Dispatch, options: Options) -> Result<Report, Error> {
    Queue::new(options).run(&[Command::Dispatch(dispatch)])
}

fn compile(name: &str, text: &str) -> Library {
    Library::compile(&[(name, text)]).unwrap_or_else(|e| panic!("{name}: {e}"))
}
