//! Rows of long prompts, where `fast_prompt` was asked for: which rows of a step they are, and their products. It knows
//! no plan and no kernel.
//!
//! A sequence that brings at least [`LONG`] rows to a step is multiplied by the coarse forms of the weights; every other
//! row, decoding above all, by the exact ones. Which of the two a row takes depends on its sequence alone.

use std::ops::Range;

use fornax_plan::{Activation, Batch, Span};

use crate::compile::{Affine, COARSE_TILES, Coarse, Finish, Part, Tiles};
use crate::matrix::coarse::{CoarseKernels, CoarseRows, CoarseView, ROWS};
use crate::matrix::{Q8View, TILE};
use crate::ops::LongAttend;
use crate::pool::Team;
use crate::run::{Machine, Round, Worker};

/// Rows of a sequence in one step from which they are multiplied so.
const LONG: u32 = 32;
/// Columns of a coarse piece.
pub(crate) const COLUMNS: usize = COARSE_TILES * TILE;

/// The routines of the tier, and room for all rows of a step.
pub(crate) struct Prompt {
    pub(crate) kernels: &'static CoarseKernels,
    pub(crate) acts: CoarseRows,
    /// The same, made by the stage before.
    pub(crate) made: CoarseRows,
    /// Attention, where the tier has a form of its own.
    pub(crate) attend: Option<LongAttend>,
}

/// The rows of a round by how they are multiplied.
#[derive(Debug, Default)]
pub(crate) struct Cuts {
    /// By row.
    long: Vec<bool>,
    /// Blocks of rows of long prompts, each within [`ROWS`] rows of a multiple of them; of other rows.
    coarse: Vec<Range<usize>>,
    exact: Vec<Range<usize>>,
}

impl Cuts {
    /// Room for steps of `rows` rows.
    pub(crate) fn with_capacity(rows: usize) -> Cuts {
        Cuts {
            long: Vec::with_capacity(rows),
            // A sequence of the least length may lie across a multiple.
            coarse: Vec::with_capacity(2 * rows.div_ceil(LONG as usize) + 1),
            exact: Vec::with_capacity(rows.div_ceil(LONG as usize) + rows.div_ceil(ROWS) + 1),
        }
    }

    /// Takes the rows of a round.
    pub(crate) fn fill(&mut self, batch: &Batch) {
        self.long.clear();
        self.coarse.clear();
        self.exact.clear();
        for span in &batch.spans {
            self.long.extend((0..span.rows).map(|_| span.rows >= LONG));
        }
        let mut from = 0;
        while from < self.long.len() {
            let long = self.long[from];
            let run = self.long[from..].iter().take_while(|l| **l == long).count();
            let end = from + run;
            while from < end {
                let to = ((from / ROWS + 1) * ROWS).min(end);
                if long { &mut self.coarse } else { &mut self.exact }.push(from..to);
                from = to;
            }
        }
    }

    /// Whether a row is one of a long prompt.
    pub(crate) fn is_long(&self, row: usize) -> bool {
        self.long.get(row).is_some_and(|long| *long)
    }

    /// Whether all rows of a sequence are.
    pub(crate) fn is_long_span(&self, span: &Span) -> bool {
        self.is_long(span.start as usize)
    }

    /// Whether any is.
    pub(crate) fn any(&self) -> bool {
        !self.coarse.is_empty()
    }
}

/// The activations of a product: f32 rows, 8-bit blocks, and coarse.
#[derive(Clone, Copy)]
pub(crate) struct Acts {
    pub(crate) exact: (*const f32, Option<Q8View>),
    pub(crate) coarse: CoarseView,
}

impl Machine {
    /// The pieces of a product that this thread claims, where some rows are of long prompts.
    pub(crate) fn mixed_tiles(
        &self,
        tiles: &Tiles,
        coarse: &Coarse,
        acts: Acts,
        team: &Team<'_>,
        round: &Round<'_>,
        worker: &mut Worker,
    ) {
        let Cuts { exact, coarse: long, .. } = round.cuts;
        let rows = round.batch.rows.len();
        let few = exact.len() * tiles.pieces.len();
        // All blocks of rows meet a piece before the next, so that weights come from memory once.
        team.share(few + long.len() * coarse.pieces.len(), |item| match item.checked_sub(few) {
            None => {
                let these = exact[item / tiles.pieces.len()].clone();
                let piece = item % tiles.pieces.len();
                self.piece(tiles, piece, these, rows, acts.exact, std::ptr::null(), worker);
            }
            Some(item) => {
                let these = long[item % long.len()].clone();
                let (part, piece) = coarse.pieces[item / long.len()].clone();
                // SAFETY: these rows of these columns are this thread's alone; the activations were complete before
                // the last barrier.
                unsafe {
                    match &tiles.finish {
                        Finish::Gate { up, act } => {
                            let makes = coarse.makes;
                            let pair = (up, *act);
                            self.coarse_gate(tiles, makes, pair, piece, these, acts.coarse, worker);
                        }
                        _ => self.coarse_plain(tiles, part, piece, these, acts.coarse),
                    }
                }
            }
        });
    }

    /// A piece of a part, with what follows.
    ///
    /// # Safety
    /// Nobody else touches these columns of these rows meanwhile; the activations are complete.
    unsafe fn coarse_plain(
        &self,
        tiles: &Tiles,
        part: usize,
        piece: Range<usize>,
        these: Range<usize>,
        acts: CoarseView,
    ) {
        let part = &tiles.parts[part];
        let columns = piece.start * TILE..(piece.end * TILE).min(part.affine.matrix.rows());
        // SAFETY: the caller's word.
        unsafe {
            let out = part.out.ptr(these.start);
            self.coarse_product(&part.affine, acts, these.clone(), piece, out, part.out.width);
            self.add_residual(part, these, columns);
        }
    }

    /// A piece of a gated pair: both products, then the activation, in this thread's own memory; `makes` the coarse form
    /// of the result alone, or not.
    ///
    /// # Safety
    /// As for [`Machine::coarse_plain`].
    #[expect(clippy::too_many_arguments, reason = "the coordinates of one item")]
    unsafe fn coarse_gate(
        &self,
        tiles: &Tiles,
        makes: bool,
        (up, act): (&Affine, Activation),
        piece: Range<usize>,
        these: Range<usize>,
        acts: CoarseView,
        worker: &mut Worker,
    ) {
        let (part, prompt) = (&tiles.parts[0], self.prompt());
        let columns = piece.start * TILE..(piece.end * TILE).min(part.affine.matrix.rows());
        let [gate, second] = &mut worker.coarse;
        let rows = acts.rows();
        let made = makes.then(|| prompt.made.shaped(rows, part.out.width));
        let blocks = (tiles.makes && !makes).then(|| self.made.shaped(rows, part.out.width));
        // SAFETY: the caller's word; the thread's memory has as many rows and columns.
        unsafe {
            for (affine, to) in [(&part.affine, &mut *gate), (up, &mut *second)] {
                let to = to.as_mut_ptr().wrapping_sub(columns.start);
                self.coarse_product(affine, acts, these.clone(), piece.clone(), to, COLUMNS);
            }
            for (i, row) in these.enumerate() {
                let g = gate[i * COLUMNS..][..columns.len()].as_mut_ptr();
                let u = second[i * COLUMNS..][..columns.len()].as_ptr();
                (self.ops.gate)(g, u, g, columns.len(), act);
                let g = &gate[i * COLUMNS..][..columns.len()];
                if let Some(made) = made {
                    made.fill(prompt.kernels, row, g, columns.start / crate::matrix::coarse::SPAN);
                    continue;
                }
                let out = part.out.ptr(row).add(columns.start);
                std::ptr::copy_nonoverlapping(g.as_ptr(), out, g.len());
                if let Some(blocks) = blocks {
                    blocks.fill_part(self.kernels, row, g, columns.start / 32);
                }
            }
        }
    }

    /// `W·x + b` by the coarse form for some rows and tiles.
    ///
    /// # Safety
    /// As `CoarseMatrix::multiply`.
    unsafe fn coarse_product(
        &self,
        affine: &Affine,
        acts: CoarseView,
        rows: Range<usize>,
        tiles: Range<usize>,
        out: *mut f32,
        stride: usize,
    ) {
        let matrix = affine.coarse.as_ref().expect("invariant: a coarse stage has coarse parts");
        let columns = tiles.start * TILE..(tiles.end * TILE).min(matrix.rows());
        let n = rows.len();
        // SAFETY: the caller's word.
        unsafe {
            matrix.multiply(self.prompt().kernels, acts, rows, tiles, out, stride);
            self.add_bias(affine, n, columns, out, stride);
        }
    }

    /// What coarse stages need.
    pub(crate) fn prompt(&self) -> &Prompt {
        self.prompt
            .as_ref()
            .expect("invariant: stages have coarse parts only where it was asked for")
    }

    /// `y += b` over some columns of `n` rows at `out`.
    ///
    /// # Safety
    /// `out` reaches these columns of these rows, and nobody else touches them meanwhile.
    unsafe fn add_bias(
        &self,
        affine: &Affine,
        n: usize,
        columns: Range<usize>,
        out: *mut f32,
        stride: usize,
    ) {
        let Some(bias) = &affine.bias else { return };
        let bias = &bias[columns.clone()];
        for i in 0..n {
            let y = out.wrapping_add(i * stride + columns.start);
            // SAFETY: the caller's word.
            unsafe { (self.ops.add)(y, bias.as_ptr(), bias.len()) };
        }
    }

    /// `y += residual` over some rows and columns of a part.
    ///
    /// # Safety
    /// Nobody else touches these columns of these rows meanwhile.
    unsafe fn add_residual(&self, part: &Part, these: Range<usize>, columns: Range<usize>) {
        let Some(residual) = part.residual else { return };
        for row in these {
            // SAFETY: the caller's word; both have these columns.
            unsafe {
                let y = part.out.ptr(row).add(columns.start);
                (self.ops.add)(y, residual.ptr(row).add(columns.start), columns.len());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use fornax_plan::SlotId;

    use super::*;

    #[test]
    fn rows_go_by_the_length_of_their_sequence() {
        let mut batch = Batch::default();
        let mut start = 0;
        for (seq, rows) in [1, 31, 40, 100, 2, 32].into_iter().enumerate() {
            batch.spans.push(Span {
                seq: seq as u32,
                slot: SlotId(seq as u32),
                start,
                rows,
                pos: 0,
            });
            start += rows;
        }
        let mut cuts = Cuts::with_capacity(start as usize);
        let capacity = (cuts.coarse.capacity(), cuts.exact.capacity());
        cuts.fill(&batch);
        assert_eq!(cuts.exact, [0..32, 172..174]);
        assert_eq!(cuts.coarse, [32..128, 128..172, 174..206]);
        for row in 0..206 {
            let long = cuts.coarse.iter().any(|r| r.contains(&row));
            assert_eq!(cuts.is_long(row), long);
            assert!(long || cuts.exact.iter().any(|r| r.contains(&row)));
        }
        assert!(cuts.any() && !cuts.is_long(206));
        assert_eq!(capacity, (cuts.coarse.capacity(), cuts.exact.capacity()));
    }

    #[test]
    fn no_step_needs_more_room_than_was_set_aside() {
        for rows in [1u32, 33, 512] {
            for each in [1, 32, 33, 65] {
                let mut batch = Batch::default();
                for start in (0..rows).step_by(each as usize + 1) {
                    for (start, n) in [(start, each), (start + each, 1)] {
                        let n = n.min(rows.saturating_sub(start));
                        let seq = batch.spans.len() as u32;
                        let span = Span { seq, slot: SlotId(seq), start, rows: n, pos: 0 };
                        batch.spans.extend((n > 0).then_some(span));
                    }
                }
                let mut cuts = Cuts::with_capacity(rows as usize);
                let capacity = (cuts.coarse.capacity(), cuts.exact.capacity());
                cuts.fill(&batch);
                assert_eq!(capacity, (cuts.coarse.capacity(), cuts.exact.capacity()));
            }
        }
    }
}
