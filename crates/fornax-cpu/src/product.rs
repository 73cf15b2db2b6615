//! One piece of a product with what follows it: bias, residual, the other half of a gated pair, caps. It knows no threads
//! and no kernel.

use fornax_plan::Activation;

use crate::compile::{Affine, Finish, Tiles};
use crate::matrix::{Acts, Dest, Q8View, TILE};
use crate::run::{Machine, SOON_ROWS, Worker};

impl Machine {
    /// A piece of a product for at most [`crate::run::ROW_BLOCK`] of `rows` rows, with what follows it. These rows of its columns
    /// are this thread's alone; the inputs were complete before the last barrier or are this thread's own. `then` is
    /// what will be read next.
    #[expect(clippy::too_many_arguments, reason = "the coordinates of one item")]
    pub(crate) fn piece(
        &self,
        tiles: &Tiles,
        piece: usize,
        these: std::ops::Range<usize>,
        rows: usize,
        acts: (*const f32, Option<Q8View>),
        then: *const u8,
        worker: &mut Worker,
    ) {
        let (part, piece) = &tiles.pieces[piece];
        let part = &tiles.parts[*part];
        let columns = piece.start * TILE..(piece.end * TILE).min(part.affine.matrix.rows());
        let width = part.out.width;
        // SAFETY: as said above.
        unsafe {
            let x = (acts.0, tiles.x.rows.width, rows);
            if let Finish::Gate { up, act } = &tiles.finish {
                let affine = [&part.affine, up];
                self.gated_pair(tiles, affine, *act, piece.clone(), these, x, acts.1, then, worker);
                return;
            }
            let out = part.out.ptr(these.start);
            let (r, p) = (these.clone(), piece.clone());
            let mut to = Dest::plain(out, width);
            if let Some(residual) = part.residual {
                debug_assert_eq!(residual.width, width);
                to.plus = residual.ptr(these.start);
            }
            self.product(&part.affine, 0, x, acts.1, r, p, to, then);
            if let Finish::Logits { scale, cap } = tiles.finish
                && (scale != 1.0 || cap != 0.0)
            {
                for i in 0..these.len() {
                    let v = out.add(i * width + columns.start);
                    (self.ops.scale_and_cap)(v, columns.len(), scale, cap);
                }
            }
        }
    }

    /// A piece of a gated pair for some rows: both products in this thread's own memory, then the activation; its 8-bit
    /// form where the next stage takes that, and f32 where anybody does.
    ///
    /// # Safety
    /// As for [`Machine::product`].
    #[expect(clippy::too_many_arguments, reason = "the coordinates of one item")]
    unsafe fn gated_pair(
        &self,
        tiles: &Tiles,
        affine: [&Affine; 2],
        act: Activation,
        piece: std::ops::Range<usize>,
        these: std::ops::Range<usize>,
        x: (*const f32, usize, usize),
        view: Option<Q8View>,
        then: *const u8,
        worker: &mut Worker,
    ) {
        let to = tiles.parts[0].out;
        let made = tiles.makes.then(|| self.made.shaped(x.2, to.width));
        let columns = piece.start * TILE..(piece.end * TILE).min(affine[0].matrix.rows());
        let stride = piece.len() * TILE;
        let behind = [affine[1].matrix.start(0, piece.start), then];
        // SAFETY: the caller's word; the thread's memory has as many rows and columns.
        unsafe {
            for ((affine, own), then) in affine.into_iter().zip(&mut worker.pair).zip(behind) {
                let own = own.as_mut_ptr().wrapping_sub(columns.start);
                let (r, p) = (these.clone(), piece.clone());
                self.product(affine, 0, x, view, r, p, Dest::plain(own, stride), then);
            }
            let [gate, up] = &mut worker.pair;
            for (i, row) in these.enumerate() {
                if let Some(made) = made {
                    made.ask(row + SOON_ROWS, columns.start / 32..columns.end.div_ceil(32));
                }
                let g = gate[i * stride..][..columns.len()].as_mut_ptr();
                let u = up[i * stride..][..columns.len()].as_ptr();
                let out = match made {
                    Some(_) if !tiles.keeps => g,
                    _ => to.ptr(row).add(columns.start),
                };
                (self.ops.gate)(g, u, out, columns.len(), act);
                if let Some(made) = made {
                    let part = std::slice::from_raw_parts(out, columns.len());
                    made.fill_part(self.kernels, row, part, columns.start / 32);
                }
            }
        }
    }

    /// `W·x + b` for some rows and tiles.
    ///
    /// # Safety
    /// As `Matrix::multiply`; `x` is the address, width and number of the f32 rows, and `then` what
    /// will be read next.
    #[expect(clippy::too_many_arguments, reason = "one call of the innermost operation")]
    pub(crate) unsafe fn product(
        &self,
        affine: &Affine,
        expert: usize,
        x: (*const f32, usize, usize),
        view: Option<Q8View>,
        rows: std::ops::Range<usize>,
        tiles: std::ops::Range<usize>,
        mut out: Dest,
        then: *const u8,
    ) {
        let matrix = &affine.matrix;
        if let Some(bias) = &affine.bias {
            out.bias = bias[expert * matrix.rows()..][..matrix.rows()].as_ptr();
        }
        // SAFETY: the caller's word.
        unsafe {
            let acts = match view {
                Some(view) if matrix.takes_q8() => Acts::Q8(view),
                _ => {
                    let (at, cols, rows) = x;
                    Acts::F32 { x: std::slice::from_raw_parts(at, rows * cols), cols }
                }
            };
            matrix.multiply(self.kernels, expert, &acts, rows, tiles, out, then);
        }
    }
}
