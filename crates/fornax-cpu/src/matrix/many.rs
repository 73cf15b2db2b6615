//! A tile times many rows of 8-bit activations: some blocks of its weights are spelled out once,
//! in the form that the tier multiplies, and then meet all the rows before the next blocks. It
//! must not know which instructions it becomes.
//!
//! The blocks are added in the order, and by the code, of [`super::kernel`]: sums wait in memory
//! between one chunk of blocks and the next, which changes none of their bits.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::activations::{GROUP, Q8View, record_bytes};
use super::format::{Decoded, Format};
use super::kernel::{Out, add_rows};
use super::simd::Simd;
use super::{lines, prefetch, prefetch_to_write};

/// Rows of one call, at most: their sums are 16 KB.
const MOST: usize = 256;
/// Blocks spelled out at a time, at most: half of the nearest cache.
const CHUNK: usize = 20;

/// Rows of the next call where a row is `blocks` long and `left` remain, a multiple of `rows`: their activations stay in
/// the second cache while tile after tile meets them.
pub(super) fn rows_at_once(blocks: usize, left: usize, rows: usize) -> usize {
    const ROOM: usize = 512 << 10;
    let most = ROOM / record_bytes(blocks).max(1) / GROUP * GROUP;
    let calls = left.div_ceil(most.clamp(2 * GROUP, MOST));
    left.div_ceil(calls).next_multiple_of(GROUP).min(left / rows * rows)
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
    let mut sums = [const { MaybeUninit::<[S::Floats; ROWS]>::uninit() }; MOST];
    let groups = rows.len() / ROWS;
    let chunk = blocks.div_ceil(blocks.div_ceil(CHUNK).max(1));
    // SAFETY: the caller's word; sums are written by the first chunk before the next reads them.
    unsafe {
        for from in (0..blocks).step_by(chunk.max(1)) {
            let n = chunk.min(blocks - from);
            let last = from + n == blocks;
            for (ix, to) in spelled.iter_mut().enumerate().take(n) {
                let (unit, at) = place::<F>(tile, from + ix);
                to.write(F::decode::<S>(unit, at));
            }
            let mut asked = 0;
            for (ix, sums) in sums.iter_mut().enumerate().take(groups) {
                // Bit by bit, so that nothing waits for all of them: the blocks that come after these, of this tile or
                // the one behind it.
                while asked * groups < n * (ix + 1) {
                    let block = from + chunk + asked;
                    let (unit, at) = match block < blocks {
                        true => place::<F>(tile, block),
                        false => place::<F>(out.then, block - blocks),
                    };
                    if at == 0 {
                        lines(unit, F::HEAD);
                    }
                    lines(unit.wrapping_add(F::HEAD + at * F::PLANES), F::PLANES);
                    asked += 1;
                }
                let mut acc = match from {
                    0 => [S::zero(); ROWS],
                    _ => sums.assume_init(),
                };
                // Results lie a row apart, each in a line that is somewhere else.
                if last {
                    for row in 0..ROWS {
                        prefetch_to_write(out.row(ix * ROWS + row));
                        if !out.to.plus.is_null() {
                            let row = (ix * ROWS + row) * out.to.stride;
                            prefetch(out.to.plus.wrapping_add(row).cast());
                        }
                    }
                }
                let mut x = acts.block(rows.start + ix * ROWS, from).cast_const();
                for block in &spelled[..n] {
                    add_rows::<S, F, ROWS>(&mut acc, block.assume_init_ref(), x);
                    x = x.wrapping_add(acts.step());
                }
                if last {
                    for (row, acc) in acc.iter().enumerate() {
                        out.put::<S>(ix * ROWS + row, *acc);
                    }
                } else {
                    sums.write(acc);
                }
            }
        }
    }
}

/// The unit that holds block `block` of a tile, and which of its blocks it is.
#[inline(always)]
fn place<F: Format>(tile: *const u8, block: usize) -> (*const u8, usize) {
    let bytes = F::HEAD + F::UNIT * F::PLANES;
    (tile.wrapping_add(block / F::UNIT * bytes), block % F::UNIT)
}
