//! The two products of a tile with rows of activations, written once for every tier. It must not
//! know which instructions it becomes.
//!
//! Bits do not depend on the tier nor on how many rows go together. Block formats: per weight row
//! an f32 starts at 0 and takes, for every block in order, `(exact integer sum) · (dw · dx)` and
//! then `min · sx` (two of each where halves of a block have their own), each product and each sum rounded. Float formats: [`PARTIALS`] sums, column
//! `c` going to `c % PARTIALS`, added in pairs at the end.
//!
//! Bytes moved per sixteen outputs: one tile, and 48 bytes of each row per block (4 a column for
//! float formats).

use super::activations::ActBlock;
use super::drive::Dest;
use super::format::{Decoded, Float, Format, Scales};
use super::lines;
use super::simd::{BLOCK, QUADS, Simd, TILE};

/// Interleaved sums of the float formats.
pub(super) const PARTIALS: usize = 4;

/// Where a kernel's results go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Out {
    /// From the first of the tile's outputs for the first row on.
    pub(super) to: Dest,
    /// Outputs that exist from there on: [`TILE`] or more, fewer in a last tile.
    pub(super) columns: usize,
    /// Weights that will be read after the tile; asked for while its last ones are used. Null where
    /// the tile was read for other rows just before, and nothing need be asked for.
    pub(super) then: *const u8,
}

/// How far ahead of their use weights are asked for. What a processor fetches by
/// itself ends at the page and starts anew with every tile.
pub(super) const AHEAD: usize = 1024;

impl Out {
    /// Where the outputs of row `row` go.
    #[inline(always)]
    pub(super) fn row(&self, row: usize) -> *mut f32 {
        self.to.at.wrapping_add(row * self.to.stride)
    }

    /// Stores the outputs of row `row` with what is to be added.
    ///
    /// # Safety
    /// The outputs reach row `row`, and the tier is available.
    #[inline(always)]
    pub(super) unsafe fn put<S: Simd>(&self, row: usize, v: S::Floats) {
        let (to, plus) = (self.row(row), self.to.plus.wrapping_add(row * self.to.stride));
        // SAFETY: the caller's word; a tile that is not whole goes through a buffer.
        unsafe {
            if self.columns >= TILE {
                let mut v = v;
                for (part, at) in [(self.to.bias, self.to.bias), (self.to.plus, plus)] {
                    if !part.is_null() {
                        v = S::add(v, S::from_f32(at.cast()));
                    }
                }
                S::store(v, to);
                return;
            }
            let mut all = [0.0f32; TILE];
            S::store(v, all.as_mut_ptr());
            for (o, v) in all[..self.columns].iter_mut().enumerate() {
                *v = self.with(row, o, *v);
            }
            std::ptr::copy_nonoverlapping(all.as_ptr(), to, self.columns);
        }
    }

    /// Output `o` of row `row` with what is to be added.
    ///
    /// # Safety
    /// Both exist.
    #[inline(always)]
    pub(super) unsafe fn with(&self, row: usize, o: usize, v: f32) -> f32 {
        let mut v = v;
        // SAFETY: the caller's word.
        unsafe {
            if !self.to.bias.is_null() {
                v += *self.to.bias.add(o);
            }
            if !self.to.plus.is_null() {
                v += *self.to.plus.add(row * self.to.stride + o);
            }
        }
        v
    }
}

/// A tile of a block format times `ROWS` rows whose records lie side by side. Weights are read in
/// one stream: several tiles at once, each a stream of its own, came to half the speed of memory.
///
/// # Safety
/// `tile` holds `blocks` blocks of format `F`; the records of the first row are at `acts`, `acts +
/// step`, …, those of the next rows one further; `out` reaches every row and column; the tier is
/// available.
#[inline(always)]
pub(super) unsafe fn quantised<S: Simd, F: Format, const ROWS: usize>(
    tile: *const u8,
    blocks: usize,
    acts: *const ActBlock,
    step: usize,
    out: Out,
) {
    // SAFETY: the caller's word.
    unsafe {
        let mut acc = [S::zero(); ROWS];
        let mut unit = tile;
        let mut acts = acts;
        let mut left = blocks;
        // Where the lines that are asked for lie: further on in the tile, at its end in what
        // follows.
        let ask = !out.then.is_null();
        let mut ahead = unit.wrapping_add(if ROWS > 4 { 2 * AHEAD } else { AHEAD });
        let end = tile.wrapping_add(F::tile_bytes(blocks));
        while left > 0 {
            if ahead >= end && ahead < end.wrapping_add(F::HEAD + F::UNIT * F::PLANES) {
                ahead = out.then.wrapping_add(ahead.addr() - end.addr());
            }
            for at in 0..left.min(F::UNIT) {
                if ask {
                    if at == 0 {
                        lines(ahead, F::HEAD);
                    }
                    lines(ahead.wrapping_add(F::HEAD + at * F::PLANES), F::PLANES);
                }
                if ROWS == 1 {
                    acc[0] = add_stored::<S, F>(acc[0], unit, at, acts);
                } else {
                    let block = F::decode::<S>(unit, at);
                    add_rows::<S, F, ROWS>(&mut acc, &block, acts);
                }
                acts = acts.wrapping_add(step);
            }
            left = left.saturating_sub(F::UNIT);
            unit = unit.wrapping_add(F::HEAD + F::UNIT * F::PLANES);
            ahead = ahead.wrapping_add(F::HEAD + F::UNIT * F::PLANES);
        }
        for (row, acc) in acc.iter().enumerate() {
            out.put::<S>(row, *acc);
        }
    }
}

/// Adds one more block to the sums of a tile for `ROWS` rows of activations.
///
/// # Safety
/// `x` are as many records, and the tier is available.
#[inline(always)]
pub(super) unsafe fn add_rows<S: Simd, F: Format, const ROWS: usize>(
    acc: &mut [S::Floats; ROWS],
    block: &Decoded<S>,
    x: *const ActBlock,
) {
    // Spelled out, so that the sums stay in registers: a loop that the compiler keeps takes them to
    // memory and back.
    macro_rules! pairs {
        ($($ix:literal)*) => { $(
            if $ix + 1 < ROWS {
                let pair = [acc[$ix % ROWS], acc[($ix + 1) % ROWS]];
                let pair = add_pair::<S, F>(pair, block, [x.add($ix), x.add($ix + 1)]);
                (acc[$ix % ROWS], acc[($ix + 1) % ROWS]) = (pair[0], pair[1]);
            }
        )* };
    }
    // SAFETY: the caller's word.
    unsafe {
        pairs!(0 2 4 6);
        if ROWS % 2 == 1 {
            acc[ROWS - 1] = add_block::<S, F>(acc[ROWS - 1], block, x.add(ROWS - 1));
        }
    }
}

/// The sums of a tile for its only row of activations after block `at` of the unit at `unit`.
///
/// # Safety
/// `x` is a record, and the tier is available.
#[inline(always)]
unsafe fn add_stored<S: Simd, F: Format>(
    acc: S::Floats,
    unit: *const u8,
    at: usize,
    x: *const ActBlock,
) -> S::Floats {
    // SAFETY: the caller's word.
    unsafe {
        let w = F::stored::<S>(unit.add(F::HEAD + at * F::PLANES));
        let (scale, min) = F::scales::<S>(unit, at);
        let sums = if F::HALVES {
            let first = S::dot_stored::<F, { QUADS / 2 }>(&w, 0, x);
            [first, S::dot_stored::<F, { QUADS / 2 }>(&w, QUADS / 2, x)]
        } else {
            [S::dot_stored::<F, QUADS>(&w, 0, x); 2]
        };
        scaled::<S, F>(acc, &Scales { scale, min }, sums, x)
    }
}

/// The sums of a tile for one row of activations after one more block.
///
/// # Safety
/// `x` is a record, and the tier is available.
#[inline(always)]
unsafe fn add_block<S: Simd, F: Format>(
    acc: S::Floats,
    block: &Decoded<S>,
    x: *const ActBlock,
) -> S::Floats {
    // SAFETY: the caller's word.
    unsafe {
        if F::HALVES {
            let first = S::dot::<F, { QUADS / 2 }>(&block.w, 0, x);
            let second = S::dot::<F, { QUADS / 2 }>(&block.w, QUADS / 2, x);
            scaled::<S, F>(acc, &block.scales, [first, second], x)
        } else {
            let sum = S::dot::<F, QUADS>(&block.w, 0, x);
            scaled::<S, F>(acc, &block.scales, [sum, sum], x)
        }
    }
}

/// [`add_block`] for two rows of activations.
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn add_pair<S: Simd, F: Format>(
    acc: [S::Floats; 2],
    block: &Decoded<S>,
    x: [*const ActBlock; 2],
) -> [S::Floats; 2] {
    // SAFETY: the caller's word.
    unsafe {
        let (first, second) = if F::HALVES {
            (
                S::dot_pair::<F, { QUADS / 2 }>(&block.w, 0, x),
                S::dot_pair::<F, { QUADS / 2 }>(&block.w, QUADS / 2, x),
            )
        } else {
            let sums = S::dot_pair::<F, QUADS>(&block.w, 0, x);
            (sums, sums)
        };
        [
            scaled::<S, F>(acc[0], &block.scales, [first[0], second[0]], x[0]),
            scaled::<S, F>(acc[1], &block.scales, [first[1], second[1]], x[1]),
        ]
    }
}

/// Adds a block's integer sums, the second of which counts where the format has two scales.
///
/// # Safety
/// `x` is a record, and the tier is available.
#[inline(always)]
pub(super) unsafe fn scaled<S: Simd, F: Format>(
    acc: S::Floats,
    block: &Scales<S>,
    sums: [S::Ints; 2],
    x: *const ActBlock,
) -> S::Floats {
    // SAFETY: the caller's word.
    unsafe {
        let dx = S::splat((*x).d);
        let mut acc = S::add(acc, S::mul(S::from_ints(sums[0]), S::mul(block.scale[0], dx)));
        if F::HALVES {
            acc = S::add(acc, S::mul(S::from_ints(sums[1]), S::mul(block.scale[1], dx)));
        }
        match (F::MINIMA, F::HALVES) {
            (false, _) => acc,
            (true, false) => S::add(acc, S::mul(block.min[0], S::splat((*x).sx))),
            (true, true) => {
                // The lifts are −128 times the sums; the division is exact.
                let first = (*x).d * ((*x).lift_first as f32 / -128.0);
                let second = (*x).d * (((*x).lift - (*x).lift_first) as f32 / -128.0);
                acc = S::add(acc, S::mul(block.min[0], S::splat(first)));
                S::add(acc, S::mul(block.min[1], S::splat(second)))
            }
        }
    }
}

/// A tile of a float format times `ROWS` rows.
///
/// # Safety
/// `tile` holds `cols` columns of format `F`; row `r` of the activations starts at `x + r · cols`;
/// `out` reaches every row and column; the tier is available.
#[inline(always)]
pub(super) unsafe fn floats<S: Simd, F: Float, const ROWS: usize>(
    tile: *const u8,
    cols: usize,
    x: *const f32,
    out: Out,
) {
    // SAFETY: the caller's word.
    unsafe {
        let mut acc = [[S::zero(); PARTIALS]; ROWS];
        let whole = cols / PARTIALS * PARTIALS;
        let mut col = 0;
        while col < whole {
            let weights = tile.add(col * TILE * F::BYTES);
            lines(weights.wrapping_add(AHEAD), PARTIALS * TILE * F::BYTES);
            for partial in 0..PARTIALS {
                let w = F::load::<S>(weights.add(partial * TILE * F::BYTES));
                for (row, acc) in acc.iter_mut().enumerate() {
                    let x = S::splat(*x.add(row * cols + col + partial));
                    acc[partial] = S::add(acc[partial], S::mul(w, x));
                }
            }
            col += PARTIALS;
        }
        for col in whole..cols {
            let w = F::load::<S>(tile.add(col * TILE * F::BYTES));
            for (row, acc) in acc.iter_mut().enumerate() {
                let x = S::splat(*x.add(row * cols + col));
                let acc = &mut acc[col - whole];
                *acc = S::add(*acc, S::mul(w, x));
            }
        }
        for (row, acc) in acc.iter().enumerate() {
            let sum = S::add(S::add(acc[0], acc[1]), S::add(acc[2], acc[3]));
            out.put::<S>(row, sum);
        }
    }
}

/// The weights of row `row` of a tile of a block format, as f32; `S` is a tier that is available.
///
/// # Safety
/// `tile` holds `out.len() / 32` blocks of format `F`.
pub(super) unsafe fn unpack_row<S: Simd<Bytes = [u8; 64], Floats = [f32; 16]>, F: Format>(
    tile: *const u8,
    row: usize,
    out: &mut [f32],
) {
    for (ix, out) in out.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
        let (unit, at) = (ix / F::UNIT, ix % F::UNIT);
        // SAFETY: the caller's word.
        let block = unsafe { F::decode::<S>(tile.add(unit * (F::HEAD + F::UNIT * F::PLANES)), at) };
        plain_row::<S, F>(&block, row, out);
    }
}

/// [`unpack_row`] of all sixteen rows, one after the other.
///
/// # Safety
/// `tile` holds `out.len() / (16 · 32)` blocks of format `F`.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) unsafe fn unpack_tile<S: Simd<Bytes = [u8; 64], Floats = [f32; 16]>, F: Format>(
    tile: *const u8,
    out: &mut [f32],
) {
    let cols = out.len() / TILE;
    for ix in 0..cols / BLOCK {
        let (unit, at) = (ix / F::UNIT, ix % F::UNIT);
        // SAFETY: the caller's word.
        let block = unsafe { F::decode::<S>(tile.add(unit * (F::HEAD + F::UNIT * F::PLANES)), at) };
        for row in 0..TILE {
            let out = &mut out[row * cols + ix * BLOCK..][..BLOCK];
            plain_row::<S, F>(&block, row, out);
        }
    }
}

/// The weights of row `row` of a decoded block, as f32.
#[inline(always)]
fn plain_row<S: Simd<Bytes = [u8; 64], Floats = [f32; 16]>, F: Format>(
    block: &Decoded<S>,
    row: usize,
    out: &mut [f32],
) {
    for (col, out) in out.iter_mut().enumerate() {
        let q = block.w[col / 4][row * 4 + col % 4] as i8;
        let half = usize::from(F::HALVES && col >= 16);
        let plain = block.scales.scale[half][row] * f32::from(q);
        *out = if F::MINIMA { plain + block.scales.min[half][row] } else { plain };
    }
}

/// Row `row` of a tile of a float format, as f32.
///
/// # Safety
/// `tile` holds `out.len()` columns of format `F`.
pub(super) unsafe fn widen_row<S: Simd<Floats = [f32; 16]>, F: Float>(
    tile: *const u8,
    row: usize,
    out: &mut [f32],
) {
    for (col, out) in out.iter_mut().enumerate() {
        // SAFETY: the caller's word.
        *out = unsafe { F::load::<S>(tile.add(col * TILE * F::BYTES)) }[row];
    }
}
