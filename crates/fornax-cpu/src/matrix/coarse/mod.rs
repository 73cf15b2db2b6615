//! Products that round differently, for prompts on request: weights and activations in 8 bits with one scale for each
//! row and [`SPAN`] columns, so that integer sums run over a whole span before anything is scaled. It must not know
//! ops, models or threads.
//!
//! Numerics: a row of either kind is cut into spans; a span's largest magnitude `a` gives the scale `a / 127` and the
//! integers `round(v · (127 / a))`, ties to even. A product starts at 0 and takes, span after span in order, the exact
//! integer sum times (scale of the weights times scale of the activations), the inner product rounded, the outer one
//! fused with the sum. So the bits depend on nothing but the row, and are the same with tiles and with vectors.
//!
//! ```text
//! weights      [sixteen rows][64 columns]: 16 quads × 16 rows × 4 bytes, as a tile register takes them; scales [span][16]
//! activations  [sixteen rows][64 columns]: 16 rows × 64 bytes; scales [span][16], −128 · Σq as i32 [span][16]
//! ```
//! Columns past the end of a row are zeros. Memory: a byte for each weight beside the exact ones.

mod acts;
mod amx;
#[cfg(test)]
mod tests;
mod vnni;

use std::ops::Range;

use fornax_plan::Result;

use super::{Arena, Matrix, Share, TILE, each_once};
use crate::isa::Isa;
pub(crate) use acts::{CoarseRows, CoarseView};

/// Columns that share a scale.
pub(crate) const SPAN: usize = 256;
/// Columns that a tile register takes at once.
const STEP: usize = 64;
/// Bytes of a step of sixteen rows, of weights or of activations.
const STEP_BYTES: usize = TILE * STEP;
/// Steps of a whole span.
const STEPS: usize = SPAN / STEP;
/// Rows of activations of one call, at most; a call begins and ends within so many rows of a multiple of them.
pub(crate) const ROWS: usize = 128;

/// Quantises one span of a row, at most [`SPAN`] elements: `x`, then where its first step, its scale and its sum go; a
/// row's next step lies [`STEP_BYTES`] further.
type Quantize = unsafe fn(&[f32], *mut i8, *mut f32, *mut i32);

/// The routines of a tier.
pub(crate) struct CoarseKernels {
    /// As [`CoarseMatrix::multiply`].
    multiply: unsafe fn(&Job<'_>),
    quantize: Quantize,
    /// [`CoarseMatrix::fill_tile`], compiled for the tier.
    fill_tile: unsafe fn(&CoarseMatrix, &Matrix, usize, &mut [f32]),
}

impl Isa {
    /// The routines of the tier; none where it has nothing to gain from them.
    pub(crate) fn coarse(self) -> Option<&'static CoarseKernels> {
        match self {
            Isa::Amx => Some(&amx::KERNELS),
            Isa::Avx512Vnni => Some(&vnni::KERNELS),
            _ => None,
        }
    }
}

/// A matrix in 8 bits with a scale for each row and span.
pub(crate) struct CoarseMatrix {
    rows: usize,
    cols: usize,
    data: Share,
    scales: Share,
}

/// One call of [`CoarseMatrix::multiply`].
struct Job<'a> {
    matrix: &'a CoarseMatrix,
    acts: CoarseView,
    act_rows: Range<usize>,
    tiles: Range<usize>,
    out: *mut f32,
    stride: usize,
}

#[inline(always)]
fn steps(cols: usize) -> usize {
    cols.div_ceil(STEP)
}

#[inline(always)]
fn spans(cols: usize) -> usize {
    cols.div_ceil(SPAN)
}

impl CoarseMatrix {
    /// Whether a matrix can have this form: one that takes 8-bit activations, of no experts.
    pub(crate) fn fits(matrix: &Matrix) -> bool {
        matrix.takes_q8() && matrix.copied() && matrix.experts() == 1
    }

    /// Bytes that the form of `matrix` takes in an arena.
    pub(crate) fn room(matrix: &Matrix) -> usize {
        matrix.tiles() * (steps(matrix.cols()) * STEP_BYTES + spans(matrix.cols()) * TILE * 4)
    }

    /// The form of `matrix` in the next [`CoarseMatrix::room`] of `arena`, still to be filled by [`fill`].
    pub(crate) fn place(matrix: &Matrix, arena: &mut Arena) -> CoarseMatrix {
        let (rows, cols, tiles) = (matrix.rows(), matrix.cols(), matrix.tiles());
        let data = arena.take(tiles * steps(cols) * STEP_BYTES);
        let scales = arena.take(tiles * spans(cols) * TILE * 4);
        CoarseMatrix { rows, cols, data, scales }
    }

    /// Rows: elements of the product.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Tiles of [`TILE`] rows.
    pub(crate) fn tiles(&self) -> usize {
        self.rows.div_ceil(TILE)
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.data.len() + self.scales.len()
    }

    /// The steps of a tile.
    #[inline(always)]
    fn tile(&self, tile: usize) -> *const u8 {
        self.data.as_ptr().wrapping_add(tile * steps(self.cols) * STEP_BYTES)
    }

    /// The scales of a tile's span.
    #[inline(always)]
    fn scale(&self, tile: usize, span: usize) -> *const f32 {
        let at = (tile * spans(self.cols) + span) * TILE;
        self.scales.as_ptr().cast::<f32>().wrapping_add(at)
    }

    /// Makes a tile from the exact one, with room for sixteen rows.
    ///
    /// # Safety
    /// Nobody else reads or writes the tile meanwhile; `quantize` may be called.
    #[inline(always)]
    unsafe fn fill_tile(&self, from: &Matrix, tile: usize, room: &mut [f32], quantize: Quantize) {
        let (cols, rows) = (self.cols, TILE.min(self.rows - tile * TILE));
        from.tile_to_f32(tile, room);
        for row in 0..rows {
            for (span, x) in room[row * cols..][..cols].chunks(SPAN).enumerate() {
                // Steps of one row, as far apart as those of activations are.
                let mut q = [0i8; (STEPS - 1) * STEP_BYTES + STEP];
                let mut lift = 0;
                // SAFETY: the tile has a place for each of these; the caller's word.
                unsafe {
                    let scale = self.scale(tile, span).cast_mut().add(row);
                    quantize(x, q.as_mut_ptr(), scale, &raw mut lift);
                    let at = self.tile(tile).cast_mut().add(span * STEPS * STEP_BYTES);
                    for step in 0..steps(x.len()) {
                        let from = q.as_ptr().add(step * STEP_BYTES).cast::<[u8; 4]>();
                        let to = at.add(step * STEP_BYTES + row * 4).cast::<[u8; 4]>();
                        for quad in 0..STEP / 4 {
                            *to.add(quad * TILE) = *from.add(quad);
                        }
                    }
                }
            }
        }
    }

    /// Multiplies the rows `act_rows` of `acts` with the tiles `tiles`: output `o` of row `act_rows.start + i` goes to
    /// `out[i · stride + o]`, none past [`CoarseMatrix::rows`].
    ///
    /// # Safety
    /// `out` reaches all of these outputs, nobody else reads or writes them meanwhile, the activations are alive and
    /// these rows of them filled, and the kernels' tier is available.
    ///
    /// # Panics
    /// Where tiles, rows or the width of the activations do not fit.
    pub(crate) unsafe fn multiply(
        &self,
        kernels: &CoarseKernels,
        acts: CoarseView,
        act_rows: Range<usize>,
        tiles: Range<usize>,
        out: *mut f32,
        stride: usize,
    ) {
        assert!(tiles.end <= self.tiles() && act_rows.end <= acts.rows());
        assert!(act_rows.is_empty() || act_rows.start / ROWS == (act_rows.end - 1) / ROWS);
        assert_eq!(acts.cols(), self.cols, "width of the activations");
        if !act_rows.is_empty() {
            // SAFETY: shapes were checked above; the rest is the caller's word.
            unsafe {
                (kernels.multiply)(&Job { matrix: self, acts, act_rows, tiles, out, stride });
            }
        }
    }
}

/// The scale of a span with nothing to quantise, given its largest magnitude as bits and the inverse of a step.
fn flat(largest: u32, inverse: f32) -> Option<f32> {
    if largest >= 0x7F80_0000 {
        return Some(f32::NAN);
    }
    (largest == 0 || !inverse.is_finite()).then_some(0.0)
}

/// Fills forms that were placed, each from its exact matrix, tile by tile to whichever of `threads` threads is free.
pub(crate) fn fill(forms: &[(&CoarseMatrix, &Matrix)], kernels: &CoarseKernels, threads: usize) {
    /// Tiles that one thread fills at a time.
    const PIECE: usize = 8;
    let mut pieces = Vec::new();
    for (form, exact) in forms {
        pieces.extend((0..form.tiles()).step_by(PIECE).map(|from| (*form, *exact, from)));
    }
    each_once(&pieces, threads, |(form, exact, from), room: &mut Vec<f32>| {
        room.resize(TILE * form.cols, 0.0);
        for tile in *from..(from + PIECE).min(form.tiles()) {
            // SAFETY: every piece is taken once, by one thread; kernels are handed out only where their tier is
            // available.
            unsafe { (kernels.fill_tile)(form, exact, tile, room) };
        }
    });
}

/// Room for the coarse forms of these matrices, in their order.
///
/// # Errors
/// `is_out_of_memory`.
pub(crate) fn arena(matrices: &[&Matrix]) -> Result<Arena> {
    // Two pieces for each, whole cache lines.
    let room = matrices.iter().map(|m| CoarseMatrix::room(m).saturating_add(128));
    Arena::new(room.fold(0usize, usize::saturating_add), "the weights of --fast-prompt")
}
