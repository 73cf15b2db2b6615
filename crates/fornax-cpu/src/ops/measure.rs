//! How fast attention runs on this machine: a key head's cache of no meaning, looked at over and
//! over. For examples and reports; it must not be used by programs that compute.

use std::time::Instant;

use fornax_plan::{Error, KvType, Result};

use super::attend::{Attend, BLOCK, QUERIES, Scratch};
use super::{Cell, VectorOps};
use crate::isa::Isa;
use crate::matrix::Memory;

/// What to look at.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// The tier.
    pub isa: Isa,
    /// How keys and values are stored.
    pub kv: KvType,
    /// Rows at consecutive positions; with `heads` at most 24 queries.
    pub rows: usize,
    /// Query heads of the key head.
    pub heads: usize,
    /// Width of a head, a multiple of 32.
    pub width: usize,
    /// Position of the first row.
    pub pos: usize,
    /// Key heads and layers whose caches lie between two blocks of one, as in a model: each look
    /// is at the next of them.
    pub apart: usize,
    /// Times that count; the 10th percentile of them does.
    pub runs: usize,
}

/// Seconds of a call.
///
/// # Errors
/// `is_unsupported` where the tier is not there or the sizes are not as said above.
pub fn attention(look: &Look) -> Result<f64> {
    let Look { isa, kv, rows, heads, width, pos, apart, runs } = *look;
    if !isa.is_available()
        || !width.is_multiple_of(32)
        || rows * heads > QUERIES
        || rows * apart == 0
    {
        return Err(Error::unsupported(format!("measuring attention: {look:?}")));
    }
    let (cell, element) = match kv {
        KvType::F32 => (Cell::F32, 4),
        KvType::F16 => (Cell::F16, 2),
        KvType::Q8_0 => (Cell::Q8, 1),
    };
    // Elements, then what scales of 8-bit cells take.
    let run = width * BLOCK * element + width / 32 * BLOCK * 2;
    let blocks = (pos + rows).div_ceil(BLOCK);
    let memory = Memory::large(2 * run * blocks * apart, "measuring attention")?;
    // Halves and floats near one, bytes of a usual size, in every type.
    // SAFETY: within the memory just made.
    unsafe { memory.as_ptr().write_bytes(0x3B, memory.len()) };
    let q: Vec<f32> = (0..rows * heads * width).map(|i| (i % 13) as f32 * 0.01).collect();
    let mut out = vec![0.0f32; rows * heads * width];
    let mut scratch = Scratch::new(width);
    let which = std::cell::Cell::new(0);
    let block = |i: usize| {
        let keys = memory.as_ptr().wrapping_add(2 * run * (i * apart + which.get())).cast_const();
        (keys, keys.wrapping_add(run))
    };
    let call = Attend {
        q: q.as_ptr(),
        q_stride: heads * width,
        out: out.as_mut_ptr(),
        out_stride: heads * width,
        rows,
        heads,
        pos,
        window: usize::MAX,
        k_width: width,
        v_width: width,
        v_stride: width,
        scale: 0.125,
        cap: 0.0,
        sinks: &[],
        cell,
        block: &block,
    };
    let mut times = Vec::new();
    for look in 0..runs.max(1) {
        which.set(look % apart);
        let since = Instant::now();
        // SAFETY: the tier is available, and every size is that of the memory.
        unsafe { (VectorOps::of(isa).attend)(&call, &mut scratch) };
        times.push(since.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 10])
}
