//! A tile times many rows of 8-bit activations: some blocks of its weights are spelled out once,
//! in the form that the tier multiplies, and then meet all the rows before the next blocks. It
//! must not know which instructions it becomes.
//!
//! The blocks are added in the order, and by the code, of [`super::kernel`]: sums wait in memory
//! between one chunk of blocks and the next, which changes none of their bits.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::activations::{ActBlock, Q8View};
use super::format::{Decoded, Format};
use super::kernel::{Out, add_rows};
use super::lines;
use super::simd::Simd;

/// Rows of one call, at most: their sums are 8 KB.
const MOST: usize = 128;
/// Blocks spelled out at a time: a multiple of every format's unit, and half of the nearest cache.
const CHUNK: usize = 16;

/// Rows of one call where a row is `blocks` long: their activations stay in the second cache while
/// tile after tile meets them.
pub(super) fn rows_at_once(blocks: usize) -> usize {
    const ROOM: usize = 512 << 10;
    let rows = ROOM / (blocks * size_of::<ActBlock>()).max(1);
    (rows / 16 * 16).clamp(32, MOST)
}

/// A tile of a block format times `rows`, a multiple of `ROWS` and at most [`rows_at_once`].
///
/// # Safety
/// `tile` holds `blocks` blocks of format `F`; the rows are within `acts`, which is alive and
/// filled, and begin a group of them; `out` begins with the first of
/// them and reaches every row and column; the tier is available.
#[inline(always)]
pub(super) unsafe fn many<S: Simd, F: Format, const ROWS: usize>(
    tile: *const u8,
    blocks: usize,
    acts: &Q8View,
    rows: Range<usize>,
    out: Out,
) {
    debug_assert!(rows.len().is_multiple_of(ROWS) && rows.len() <= MOST);
    let mut spelled = [const { MaybeUninit::<Decoded<S>>::uninit() }; CHUNK];
    let unit_bytes = F::HEAD + F::UNIT * F::PLANES;
    let end = tile.wrapping_add(F::tile_bytes(blocks));
    // SAFETY: the caller's word.
    unsafe {
        let mut sums = [S::zero(); MOST];
        let (sums, _) = sums[..rows.len()].as_chunks_mut::<ROWS>();
        for from in (0..blocks).step_by(CHUNK) {
            let n = CHUNK.min(blocks - from);
            for (ix, to) in spelled.iter_mut().enumerate().take(n) {
                let (unit, at) = ((from + ix) / F::UNIT, (from + ix) % F::UNIT);
                let unit = tile.add(unit * unit_bytes);
                // The same block of the next chunk, of this tile or the one behind it.
                let mut ahead = unit.wrapping_add(CHUNK / F::UNIT * unit_bytes);
                if ahead >= end {
                    ahead = out.then.wrapping_add(ix / F::UNIT * unit_bytes);
                }
                if at == 0 {
                    lines(ahead, F::HEAD);
                }
                lines(ahead.wrapping_add(F::HEAD + at * F::PLANES), F::PLANES);
                to.write(F::decode::<S>(unit, at));
            }
            for (ix, sums) in sums.iter_mut().enumerate() {
                let mut x = acts.block(rows.start + ix * ROWS, from).cast_const();
                let mut acc = *sums;
                for block in &spelled[..n] {
                    add_rows::<S, F, ROWS>(&mut acc, block.assume_init_ref(), x);
                    x = x.wrapping_add(acts.step());
                }
                *sums = acc;
            }
        }
        for (row, sum) in sums.as_flattened().iter().enumerate() {
            out.put::<S>(row, *sum);
        }
    }
}
