//! Rows of activations in 8 bits with a scale for each span. It must not know weights.

use fornax_plan::Result;

use super::super::Memory;
use super::{CoarseKernels, SPAN, STEP_BYTES, STEPS, TILE, spans, steps};

/// Room for rows of such activations.
#[derive(Debug)]
pub(crate) struct CoarseRows {
    memory: Memory,
}

/// Bytes of sixteen rows: their steps, then scales and sums.
#[inline(always)]
fn group_bytes(cols: usize) -> usize {
    steps(cols) * STEP_BYTES + spans(cols) * TILE * 8
}

impl CoarseRows {
    /// Room for `rows` rows of `cols` columns, or any other shape that needs no more.
    ///
    /// # Errors
    /// `is_out_of_memory`.
    pub(crate) fn new(rows: usize, cols: usize) -> Result<CoarseRows> {
        let len = rows.div_ceil(TILE) * group_bytes(cols);
        Ok(CoarseRows { memory: Memory::large(len, "activations of --fast-prompt")? })
    }

    /// The room as `rows` × `cols`; what was in it under another shape is lost.
    ///
    /// # Panics
    /// Where the shape does not fit.
    pub(crate) fn shaped(&self, rows: usize, cols: usize) -> CoarseView {
        let need = rows.div_ceil(TILE) * group_bytes(cols);
        assert!(need <= self.memory.len(), "{rows} x {cols} does not fit");
        CoarseView { at: self.memory.as_ptr(), rows, cols }
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.memory.len()
    }
}

/// Rows in a [`CoarseRows`], which must outlive it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CoarseView {
    at: *mut u8,
    rows: usize,
    cols: usize,
}

// SAFETY: a view is an address and a shape; whoever writes through it answers for the races.
unsafe impl Send for CoarseView {}
// SAFETY: as above.
unsafe impl Sync for CoarseView {}

impl CoarseView {
    /// Rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// The steps of a group of sixteen rows.
    #[inline(always)]
    pub(super) fn group(&self, group: usize) -> *mut u8 {
        self.at.wrapping_add(group * group_bytes(self.cols))
    }

    /// The scales of a group's span.
    #[inline(always)]
    pub(super) fn scale(&self, group: usize, span: usize) -> *mut f32 {
        let at = steps(self.cols) * STEP_BYTES + span * TILE * 8;
        self.group(group).wrapping_add(at).cast()
    }

    /// −128 · Σq of a group's span: what makes up for weights that are taken 128 too high.
    #[inline(always)]
    pub(super) fn lift(&self, group: usize, span: usize) -> *mut i32 {
        self.scale(group, span).wrapping_add(TILE).cast()
    }

    /// Quantises a part of row `row`, which begins with span `first` and ends with one, or with the row.
    ///
    /// # Safety
    /// The [`CoarseRows`] is alive, the kernels' tier is available, and no other thread reads or writes these spans
    /// of this row meanwhile.
    ///
    /// # Panics
    /// Where there is no such row, or the part does not end as it should.
    pub(crate) unsafe fn fill(
        &self,
        kernels: &CoarseKernels,
        row: usize,
        part: &[f32],
        first: usize,
    ) {
        let end = first * SPAN + part.len();
        assert!(
            row < self.rows && (end == self.cols || end < self.cols && end.is_multiple_of(SPAN))
        );
        let (group, at) = (row / TILE, row % TILE);
        for (ix, x) in part.chunks(SPAN).enumerate() {
            let span = first + ix;
            // SAFETY: row and span are within the view; the rest is the caller's word.
            unsafe {
                let q = self.group(group).add(span * STEPS * STEP_BYTES + at * super::STEP);
                let (scale, lift) =
                    (self.scale(group, span).add(at), self.lift(group, span).add(at));
                (kernels.quantize)(x, q.cast(), scale, lift);
            }
        }
    }
}
