//! A thread's memory for attention with tiles. It knows no instruction.

use fornax_plan::Result;

use super::{SPLIT, TILE_QUERIES};
use crate::matrix::Memory;

/// Queries whose scores are there at a time.
pub(super) const TOGETHER: usize = 32;

/// Memory of one thread for attention with tiles.
pub(crate) struct TileScratch {
    memory: Memory,
    k_width: usize,
    v_width: usize,
    pub(super) max: [f32; TILE_QUERIES],
    pub(super) total: [f32; TILE_QUERIES],
}

/// Where its parts are.
#[derive(Clone, Copy)]
pub(super) struct Places {
    /// First and second parts of queries; of keys.
    pub(super) queries: [*mut u16; 2],
    pub(super) keys: [*mut u16; 2],
    pub(super) values: *mut u16,
    pub(super) scores: *mut f32,
    pub(super) weights: *mut u16,
    pub(super) sums: *mut f32,
}

impl TileScratch {
    /// Room for heads of these widths.
    ///
    /// # Errors
    /// `is_out_of_memory`.
    pub(crate) fn new(k_width: usize, v_width: usize) -> Result<TileScratch> {
        let bytes = 4 * k_width * (TILE_QUERIES + SPLIT)
            + 2 * SPLIT * v_width
            + 6 * TOGETHER * SPLIT
            + 4 * TILE_QUERIES * v_width;
        let memory = Memory::zeroed(bytes, "a thread's attention with tiles")?;
        let none = [0.0; TILE_QUERIES];
        Ok(TileScratch { memory, k_width, v_width, max: none, total: none })
    }

    pub(super) fn places(&self, k: usize, v: usize) -> Places {
        assert!(k <= self.k_width && v <= self.v_width);
        let mut at = self.memory.as_ptr();
        let mut take = |bytes: usize| {
            let from = at;
            at = at.wrapping_add(bytes);
            from
        };
        let (q, k) = (2 * k * TILE_QUERIES, 2 * k * SPLIT);
        Places {
            queries: [take(q).cast(), take(q).cast()],
            keys: [take(k).cast(), take(k).cast()],
            values: take(2 * SPLIT * v).cast(),
            scores: take(4 * TOGETHER * SPLIT).cast(),
            weights: take(2 * TOGETHER * SPLIT).cast(),
            sums: take(4 * TILE_QUERIES * v).cast(),
        }
    }
}
