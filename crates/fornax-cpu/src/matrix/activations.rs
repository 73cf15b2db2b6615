//! Activations in the form that matrices take them: plain f32 rows, or 8-bit blocks of 32. It
//! must not know weights.
//!
//! The 8-bit rows lie in groups of sixteen (one where there is a single row): block 0 of every row
//! of the group, then block 1, and so on, so that a kernel for several rows walks one stream.

use std::ops::Range;

use fornax_plan::{Result, q8};

use super::Kernels;
use super::memory::{Arena, Share};
use super::prefetch_to_write;
use super::simd::Simd;

/// Rows that lie side by side.
pub(crate) const GROUP: usize = 16;

/// A block of 32 activations with what kernels need about it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct ActBlock {
    /// The activations, −127 to 127.
    pub(super) q: [i8; q8::BLOCK],
    /// What one step of `q` stands for.
    pub(super) d: f32,
    /// `d · Σq`.
    pub(super) sx: f32,
    /// −128 · Σq: what makes up for weights stored 128 too high.
    pub(super) lift: i32,
    /// The same over the first 16.
    pub(super) lift_first: i32,
}

/// Bytes of so many blocks.
pub(super) fn record_bytes(blocks: usize) -> usize {
    blocks * size_of::<ActBlock>()
}

/// Room for rows of 8-bit activations.
#[derive(Debug)]
pub(crate) struct Q8Rows {
    memory: Share,
}

impl Q8Rows {
    /// Room for `rows` rows of `cols` columns, or any other shape that needs no more blocks.
    ///
    /// # Errors
    /// `is_out_of_memory`.
    pub(crate) fn new(rows: usize, cols: usize) -> Result<Q8Rows> {
        let mut arena = Arena::new(Q8Rows::room((rows, cols)), "8-bit activations")?;
        Ok(Q8Rows::placed(&mut arena, (rows, cols)))
    }

    /// The same in the next [`Q8Rows::room`] of `arena`.
    pub(crate) fn placed(arena: &mut Arena, shape: (usize, usize)) -> Q8Rows {
        Q8Rows { memory: arena.take(Q8Rows::room(shape)) }
    }

    /// Bytes that rows and columns take, whole cache lines.
    pub(crate) fn room((rows, cols): (usize, usize)) -> usize {
        record_bytes(rows.next_multiple_of(GROUP) * cols.div_ceil(q8::BLOCK)).next_multiple_of(64)
    }

    /// The room as `rows` × `cols`; what was in it under another shape is lost.
    ///
    /// # Panics
    /// Where the shape does not fit.
    pub(crate) fn shaped(&self, rows: usize, cols: usize) -> Q8View {
        let group = if rows == 1 { 1 } else { GROUP };
        let view = Q8View {
            at: self.memory.as_ptr().cast(),
            rows,
            blocks: cols.div_ceil(q8::BLOCK),
            group,
        };
        let need = record_bytes(rows.next_multiple_of(group) * view.blocks);
        assert!(need <= self.memory.len(), "8-bit activations: {rows} x {cols} does not fit");
        view
    }
}

/// Rows of 8-bit activations in a [`Q8Rows`], which must outlive it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Q8View {
    at: *mut ActBlock,
    rows: usize,
    blocks: usize,
    group: usize,
}

// SAFETY: a view is an address and a shape; whoever writes through it answers for the races.
unsafe impl Send for Q8View {}
// SAFETY: as above.
unsafe impl Sync for Q8View {}

impl Q8View {
    /// Rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Blocks of one row.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Quantises the blocks `blocks` of row `row`; `x` is the whole row.
    ///
    /// # Safety
    /// The [`Q8Rows`] is alive, the kernels' tier is available, and no other thread reads or
    /// writes these blocks of this row meanwhile.
    pub(crate) unsafe fn fill(
        &self,
        kernels: &Kernels,
        row: usize,
        x: &[f32],
        blocks: Range<usize>,
    ) {
        assert!(row < self.rows && blocks.end <= self.blocks);
        assert!(x.len().div_ceil(q8::BLOCK) == self.blocks);
        let end = (blocks.end * q8::BLOCK).min(x.len());
        // SAFETY: row and blocks are within the view; the rest is the caller's word.
        unsafe {
            let at = self.block(row, blocks.start);
            (kernels.quantize)(&x[blocks.start * q8::BLOCK..end], at, self.group);
        }
    }

    /// Quantises a part of row `row`, which begins with block `first`.
    ///
    /// # Safety
    /// As [`Q8View::fill`].
    pub(crate) unsafe fn fill_part(
        &self,
        kernels: &Kernels,
        row: usize,
        part: &[f32],
        first: usize,
    ) {
        assert!(row < self.rows && first + part.len().div_ceil(q8::BLOCK) <= self.blocks);
        // SAFETY: row and blocks are within the view; the rest is the caller's word.
        unsafe { (kernels.quantize)(part, self.block(row, first), self.group) };
    }

    /// Asks for the records of some blocks of row `row`, which may be past the end, to fill them soon.
    #[inline]
    pub(crate) fn ask(&self, row: usize, blocks: Range<usize>) {
        for block in blocks {
            let at = (row / self.group * self.blocks + block) * self.group + row % self.group;
            prefetch_to_write(self.at.wrapping_add(at));
        }
    }

    /// The record of block `block` of row `row`.
    ///
    /// # Safety
    /// Both are within the view, and its [`Q8Rows`] is alive.
    pub(super) unsafe fn block(&self, row: usize, block: usize) -> *mut ActBlock {
        let at = (row / self.group * self.blocks + block) * self.group + row % self.group;
        // SAFETY: within the allocation by the caller's word.
        unsafe { self.at.add(at) }
    }

    /// Rows that lie side by side from `row` on.
    pub(super) fn side_by_side(&self, row: usize) -> usize {
        self.group - row % self.group
    }

    /// Records from one block of a row to its next.
    pub(super) fn step(&self) -> usize {
        self.group
    }
}

/// The rows that a matrix is multiplied with.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Acts<'a> {
    /// Plain rows of `cols` elements, one after the other.
    F32 {
        /// rows × cols.
        x: &'a [f32],
        /// Elements of one row.
        cols: usize,
    },
    /// 8-bit blocks.
    Q8(Q8View),
}

/// Quantises `x` block by block, each record `step` after the one before. Compiled once per tier,
/// which only changes how fast it is; bit for bit it is [`q8::quantize_block`].
///
/// # Safety
/// There is room for all the records, and the tier is available.
#[inline(always)]
pub(super) unsafe fn quantize<S: Simd>(x: &[f32], at: *mut ActBlock, step: usize) {
    let (whole, rest) = x.as_chunks::<{ q8::BLOCK }>();
    for (ix, x) in whole.iter().enumerate() {
        // SAFETY: the caller's word.
        unsafe { *at.add(ix * step) = S::quantized(x) };
    }
    if !rest.is_empty() {
        let mut padded = [0.0; q8::BLOCK];
        padded[..rest.len()].copy_from_slice(rest);
        // SAFETY: the caller's word.
        unsafe { *at.add(whole.len() * step) = S::quantized(&padded) };
    }
}

/// A block of zeros; of NaN where something was not finite. None for other magnitudes, given as
/// bits, with the inverse of a step.
#[inline(always)]
pub(super) fn flat(largest: u32, inverse: f32) -> Option<ActBlock> {
    if largest < 0x7F80_0000 && largest != 0 && inverse.is_finite() {
        return None;
    }
    let d = if largest >= 0x7F80_0000 { f32::NAN } else { 0.0 };
    Some(ActBlock { q: [0; q8::BLOCK], d, sx: d, lift: 0, lift_first: 0 })
}

#[inline(always)]
pub(super) fn quantized(x: &[f32; q8::BLOCK]) -> ActBlock {
    // Magnitudes compare as integers in the same order as floats, and whatever is not finite is
    // above all of them.
    let mut largest = 0u32;
    for v in x {
        largest = largest.max(v.to_bits() & 0x7FFF_FFFF);
    }
    let a = f32::from_bits(largest);
    let inverse = 127.0 / a;
    if let Some(flat) = flat(largest, inverse) {
        return flat;
    }
    let mut whole = [0i32; q8::BLOCK];
    for (w, v) in whole.iter_mut().zip(x) {
        // SAFETY: |v| ≤ a, so the product rounds to at most 127 in magnitude.
        *w = unsafe { (v * inverse).round_ties_even().to_int_unchecked::<i32>() };
    }
    let mut q = [0i8; q8::BLOCK];
    for (q, w) in q.iter_mut().zip(&whole) {
        *q = *w as i8;
    }
    let first: i32 = whole[..16].iter().sum();
    let sum = first + whole[16..].iter().sum::<i32>();
    let d = a / 127.0;
    ActBlock { q, d, sx: d * sum as f32, lift: -128 * sum, lift_first: -128 * first }
}
