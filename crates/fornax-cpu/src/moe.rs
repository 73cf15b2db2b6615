//! A mixture's MLPs: rows are gathered by expert, so that an expert's weights are read once for
//! all of its rows, and summed row by row in the order of the router's choice. It knows no plan.
//!
//! A row's sum is taken in its own order of experts, whoever else chose them: the gathering shows
//! in no result.

use std::ops::Range;

use crate::compile::{Affine, Moe, PIECE_TILES, Rows};
use crate::matrix::{Dest, Q8View, TILE};
use crate::ops::rows;
use crate::pool::{Poisoned, Team};
use crate::run::{Machine, Private, ROW_BLOCK, Worker, at};

/// What is read next is what follows in memory.
const NEXT: *const u8 = std::ptr::null();

/// Pairs of row and choice, sorted by expert; every thread keeps its own.
#[derive(Debug, Default)]
pub(crate) struct Order {
    /// The pair (`row · top_k + choice`) at each place.
    pair: Vec<u32>,
    /// The place of each pair.
    place: Vec<u32>,
    /// The experts that have rows, and their places.
    runs: Vec<(usize, Range<usize>)>,
    /// Counts, then starts, by expert.
    starts: Vec<u32>,
}

impl Order {
    /// Room for so many pairs and experts.
    pub(crate) fn with_capacity(pairs: usize, experts: usize) -> Order {
        Order {
            pair: Vec::with_capacity(pairs),
            place: Vec::with_capacity(pairs),
            runs: Vec::with_capacity(experts),
            starts: Vec::with_capacity(experts),
        }
    }

    /// Sorts pairs by expert; within one, rows keep their order.
    fn sort(&mut self, ids: &[u32], experts: usize) {
        self.starts.clear();
        self.starts.resize(experts, 0);
        for id in ids {
            self.starts[*id as usize] += 1;
        }
        self.runs.clear();
        let mut at = 0;
        for (expert, start) in self.starts.iter_mut().enumerate() {
            let n = *start as usize;
            if n > 0 {
                self.runs.push((expert, at..at + n));
            }
            *start = at as u32;
            at += n;
        }
        self.pair.clear();
        self.pair.resize(ids.len(), 0);
        self.place.clear();
        self.place.resize(ids.len(), 0);
        for (pair, id) in ids.iter().enumerate() {
            let place = &mut self.starts[*id as usize];
            self.place[pair] = *place;
            self.pair[*place as usize] = pair as u32;
            *place += 1;
        }
    }
}

impl Machine {
    /// A mixture for a single row: what is small, every thread does for itself, so that one
    /// barrier is left, between the gated products and the way down.
    pub(crate) fn moe_alone(
        &self,
        m: &Moe,
        team: &Team<'_>,
        worker: &mut Worker,
        private: Private,
    ) -> Result<(), Poisoned> {
        let top_k = m.ids.rows.width;
        let (cols, ff) = (m.x.rows.width, m.gate.matrix.rows());
        let gated = Rows { at: self.pairs[1].at, width: ff };
        // SAFETY: row 0 of the wires is complete, in this thread's slots or since the last
        // barrier; pieces are claimed by one thread each.
        unsafe {
            let ids = std::slice::from_raw_parts(at(m.ids, 0, private).cast::<u32>(), top_k);
            let weights = std::slice::from_raw_parts(at(m.weights, 0, private), top_k);
            let x = std::slice::from_raw_parts(at(m.x, 0, private), cols);
            let q8 = m.gate.matrix.takes_q8() || m.up.matrix.takes_q8();
            let view = q8.then(|| worker.q8.shaped(1, cols));
            if let Some(view) = view {
                view.fill(self.kernels, 0, x, 0..view.blocks());
            }
            let tiles = m.gate.matrix.tiles();
            let pieces = tiles.div_ceil(m.gate_tiles);
            team.share(top_k * pieces, |item| {
                let (choice, from) = (item / pieces, item % pieces * m.gate_tiles);
                let piece = from..(from + m.gate_tiles).min(tiles);
                let x = (x.as_ptr(), cols, 1);
                self.gate_piece(
                    m,
                    ids[choice] as usize,
                    x,
                    view,
                    0..1,
                    piece,
                    (gated, choice),
                    worker,
                );
            });
            team.barrier()?;
            let view = m.down.matrix.takes_q8().then(|| worker.q8_pairs.shaped(top_k, ff));
            if let Some(view) = view {
                for choice in 0..top_k {
                    view.fill(self.kernels, choice, gated.row(choice), 0..view.blocks());
                }
            }
            let tiles = m.down.matrix.tiles();
            team.share(tiles.div_ceil(m.down_tiles), |item| {
                let from = item * m.down_tiles;
                let piece = from..(from + m.down_tiles).min(tiles);
                let columns = piece.start * TILE..(piece.end * TILE).min(m.out.width);
                let out = m.out.ptr(0).add(columns.start);
                let out = std::slice::from_raw_parts_mut(out, columns.len());
                out.fill(0.0);
                let x = (gated.at.cast_const(), ff, top_k);
                for (choice, weight) in weights.iter().enumerate() {
                    let (id, row) = (ids[choice] as usize, choice..choice + 1);
                    let to = worker.pair[1].as_mut_ptr().wrapping_sub(columns.start);
                    let to = Dest::plain(to, 0);
                    self.product(&m.down, id, x, view, row, piece.clone(), to, NEXT);
                    for (y, d) in out.iter_mut().zip(worker.pair[1].iter()) {
                        *y += weight * d;
                    }
                }
                if let Some(residual) = m.residual {
                    rows::add(out, &residual.row(0)[columns]);
                }
            });
        }
        Ok(())
    }

    /// All phases of a mixture, with barriers between.
    pub(crate) fn moe(
        &self,
        m: &Moe,
        n: usize,
        team: &Team<'_>,
        worker: &mut Worker,
    ) -> Result<(), Poisoned> {
        let top_k = m.ids.rows.width;
        let pairs = n * top_k;
        let (cols, ff) = (m.x.rows.width, m.gate.matrix.rows());
        let shaped = |rows: Rows, width: usize| Rows { at: rows.at, width };
        let inputs = shaped(self.pairs[0], cols);
        let gated = shaped(self.pairs[1], ff);
        let outs = shaped(self.pairs[2], m.out.width);
        // SAFETY: the ids were complete before the last barrier.
        let ids = unsafe { std::slice::from_raw_parts(m.ids.rows.at.cast::<u32>(), pairs) };
        worker.order.sort(ids, m.gate.matrix.experts());
        self.gather(m, inputs, pairs, team, &worker.order);
        team.barrier()?;
        self.gate(m, inputs, gated, pairs, team, worker);
        team.barrier()?;
        if m.down.matrix.takes_q8() {
            let view = self.q8.shaped(pairs, ff);
            team.share(pairs, |pair| {
                // SAFETY: this row is this thread's alone.
                unsafe { view.fill(self.kernels, pair, gated.row(pair), 0..view.blocks()) };
            });
            team.barrier()?;
        }
        self.down(m, gated, outs, pairs, team, &worker.order);
        team.barrier()?;
        let order = &worker.order;
        team.share(n, |row| {
            // SAFETY: this row is this thread's alone, and the outputs are complete.
            unsafe {
                let out = m.out.row_mut(row);
                out.fill(0.0);
                let weights = m.weights.rows.row(row);
                for (choice, weight) in weights.iter().enumerate() {
                    let from = outs.row(order.place[row * top_k + choice] as usize);
                    for (y, d) in out.iter_mut().zip(from) {
                        *y += weight * d;
                    }
                }
                if let Some(residual) = m.residual {
                    rows::add(out, residual.row(row));
                }
            }
        });
        Ok(())
    }

    /// The inputs of every pair, in order: as 8-bit rows, as floats, or both.
    fn gather(&self, m: &Moe, to: Rows, pairs: usize, team: &Team<'_>, order: &Order) {
        let q8 = |a: &Affine| a.matrix.takes_q8();
        let view = (q8(&m.gate) || q8(&m.up)).then(|| self.q8.shaped(pairs, m.x.rows.width));
        let floats = !q8(&m.gate) || !q8(&m.up);
        team.share(pairs, |place| {
            let row = order.pair[place] as usize / m.ids.rows.width;
            // SAFETY: this place is this thread's alone, and the inputs are complete.
            unsafe {
                let x = m.x.rows.row(row);
                if let Some(view) = view {
                    view.fill(self.kernels, place, x, 0..view.blocks());
                }
                if floats {
                    to.row_mut(place).copy_from_slice(x);
                }
            }
        });
    }

    /// `act(gate · x) · (up · x)` for every pair.
    fn gate(
        &self,
        m: &Moe,
        inputs: Rows,
        gated: Rows,
        pairs: usize,
        team: &Team<'_>,
        worker: &mut Worker,
    ) {
        let q8 = m.gate.matrix.takes_q8() || m.up.matrix.takes_q8();
        let view = q8.then(|| self.q8.shaped(pairs, m.x.rows.width));
        let x = (inputs.at.cast_const(), m.x.rows.width, pairs);
        let order = std::mem::take(&mut worker.order);
        each_piece(team, &order, m.gate.matrix.tiles(), m.gate_tiles, |expert, run, piece| {
            for from in run.clone().step_by(ROW_BLOCK) {
                let these = from..(from + ROW_BLOCK).min(run.end);
                let piece = piece.clone();
                // SAFETY: these rows of these columns are this thread's alone.
                unsafe { self.gate_piece(m, expert, x, view, these, piece, (gated, from), worker) };
            }
        });
        worker.order = order;
    }

    /// `act(gate · x) · (up · x)` for some rows, at most [`ROW_BLOCK`], and some tiles, to the
    /// rows from `to.1` on.
    ///
    /// # Safety
    /// As [`Machine::product`].
    #[expect(clippy::too_many_arguments, reason = "the coordinates of one piece")]
    unsafe fn gate_piece(
        &self,
        m: &Moe,
        expert: usize,
        x: (*const f32, usize, usize),
        view: Option<Q8View>,
        these: Range<usize>,
        piece: Range<usize>,
        to: (Rows, usize),
        worker: &mut Worker,
    ) {
        let columns = piece.start * TILE..(piece.end * TILE).min(m.gate.matrix.rows());
        let stride = PIECE_TILES * TILE;
        let second = worker.pair[1].as_mut_ptr().wrapping_sub(columns.start);
        let (first, again, n) = (these.clone(), piece.clone(), these.len());
        // SAFETY: the caller's word.
        unsafe {
            let out = to.0.ptr(to.1);
            let then = m.up.matrix.start(expert, piece.start);
            let out = Dest::plain(out, to.0.width);
            self.product(&m.gate, expert, x, view, first, again, out, then);
            let second = Dest::plain(second, stride);
            self.product(&m.up, expert, x, view, these, piece, second, NEXT);
            for i in 0..n {
                let g = to.0.ptr(to.1 + i).add(columns.start);
                let u = worker.pair[1].as_ptr().add(i * stride);
                (self.ops.gate)(g, u, g, columns.len(), m.act);
            }
        }
    }

    /// `down ·` what [`Machine::gate`] made.
    fn down(&self, m: &Moe, gated: Rows, outs: Rows, pairs: usize, team: &Team<'_>, order: &Order) {
        let q8 = m.down.matrix.takes_q8();
        let view = q8.then(|| self.q8.shaped(pairs, gated.width));
        let x = (gated.at.cast_const(), gated.width, pairs);
        each_piece(team, order, m.down.matrix.tiles(), m.down_tiles, |expert, run, piece| {
            let out = Dest::plain(outs.ptr(run.start), outs.width);
            // SAFETY: these rows of these columns are this thread's alone.
            unsafe { self.product(&m.down, expert, x, view, run, piece, out, NEXT) };
        });
    }
}

/// Calls `f` with expert, places and tiles of every piece that this thread claims.
fn each_piece(
    team: &Team<'_>,
    order: &Order,
    tiles: usize,
    step: usize,
    mut f: impl FnMut(usize, Range<usize>, Range<usize>),
) {
    let pieces = tiles.div_ceil(step);
    team.share(order.runs.len() * pieces, |item| {
        let (expert, run) = &order.runs[item / pieces];
        let from = item % pieces * step;
        f(*expert, run.clone(), from..(from + step).min(tiles));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_sorted_by_expert_and_keep_the_order_of_rows() {
        let mut order = Order::default();
        order.sort(&[3, 1, 1, 0, 3, 1], 5);
        assert_eq!(order.pair, [3, 1, 2, 5, 0, 4]);
        assert_eq!(order.runs, [(0, 0..1), (1, 1..4), (3, 4..6)]);
        for (pair, place) in order.place.iter().enumerate() {
            assert_eq!(order.pair[*place as usize], pair as u32);
        }
    }
}
