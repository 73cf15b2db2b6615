//! One round of a step: what every thread does in every stage. It knows no plan; addresses and
//! weights come resolved.
//!
//! All threads walk the same list with a barrier after each stage. Which thread computes what is
//! decided by claims and never shows in a result: every element is computed by the same code from
//! the same inputs wherever it lands.

use std::time::Instant;

use fornax_gguf::blocks;
use fornax_plan::{Batch, RowSpace, SeqStep};

use crate::compile::{Conv, RowOp, Rows, Stage, Table, Tiles, Wide, Wire};
use crate::kv::Cache;
use crate::matrix::{Floats, GROUP, Kernels, Memory, Q8Rows, Q8View, prefetch};
use crate::moe::Order;
use crate::ops::{Scratch, TileScratch, VectorOps, rows};
use crate::pool::{Poisoned, Team};
use crate::prompt::{self, Cuts, Prompt};

/// Activation rows multiplied with a piece of weights at a time.
pub(crate) const ROW_BLOCK: usize = 256;
/// Channels of a convolution that one claim takes.
const CHANNELS: usize = 256;

/// Everything that threads share and that outlives a step.
pub(crate) struct Machine {
    pub(crate) stages: Vec<Stage>,
    pub(crate) kernels: &'static Kernels,
    pub(crate) ops: &'static VectorOps,
    pub(crate) cache: Cache,
    /// 8-bit activations of many rows.
    pub(crate) q8: Q8Rows,
    /// The same, made by the stage before.
    pub(crate) made: Q8Rows,
    /// Where prompts are multiplied in the form that rounds differently.
    pub(crate) prompt: Option<Prompt>,
    /// Angles of every row: all rotary tables side by side.
    pub(crate) angles: Rows,
    pub(crate) ropes: Vec<fornax_plan::RopeTable>,
    /// States of every slot.
    pub(crate) states: Rows,
    /// Mixtures: gathered inputs, gated products and outputs by (row, expert) pair.
    pub(crate) pairs: [Rows; 3],
    /// Attention split over threads: `[row][query head][split]` parts.
    pub(crate) parts: Parts,
    pub(crate) workers: Vec<Slot>,
}

/// Room for the parts of attention that threads compute for each other.
pub(crate) struct Parts {
    pub(crate) memory: Memory,
    /// Splits that a head has room for.
    pub(crate) splits: usize,
}

/// One thread's own memory, on its own cache lines.
#[repr(align(128))]
pub(crate) struct Slot(std::cell::UnsafeCell<Worker>);

// SAFETY: thread `i` of a region is the only one that touches slot `i`.
unsafe impl Sync for Slot {}

/// What a thread needs for itself.
pub(crate) struct Worker {
    /// The chain's values for a single row.
    pub(crate) slots: Memory,
    /// Elements from one of them to the next.
    pub(crate) slot_width: usize,
    /// One row of 8-bit activations.
    pub(crate) q8: Q8Rows,
    /// One row for each expert of a token.
    pub(crate) q8_pairs: Q8Rows,
    /// A piece of a gated pair, both of them.
    pub(crate) pair: [Floats; 2],
    /// A piece of a gated pair of coarse products, both of them.
    pub(crate) coarse: [Floats; 2],
    /// The heads of one call of attention.
    pub(crate) heads: Floats,
    pub(crate) tiles: TileScratch,
    pub(crate) scratch: Scratch,
    pub(crate) order: Order,
}

impl Worker {
    /// All its slots.
    fn own(&self) -> Slots {
        Slots { at: self.slots.as_ptr().cast(), width: self.slot_width, only: None }
    }
}

impl Slot {
    pub(crate) fn new(worker: Worker) -> Slot {
        Slot(std::cell::UnsafeCell::new(worker))
    }
}

/// The rows of a round and whom they belong to.
pub(crate) struct Round<'a> {
    pub(crate) step: &'a [SeqStep<'a>],
    pub(crate) batch: &'a Batch,
    /// How its rows are multiplied.
    pub(crate) cuts: &'a Cuts,
    /// Seconds by stage, written by thread 0; null where nobody asks.
    pub(crate) times: Times,
}

/// A thread's own slots for a row.
#[derive(Clone, Copy)]
pub(crate) struct Slots {
    pub(crate) at: *mut f32,
    /// Elements from one to the next.
    pub(crate) width: usize,
    /// The one that is used, where the others are shared.
    pub(crate) only: Option<usize>,
}

/// Where a row's values go; none for the thread that writes the shared buffers.
pub(crate) type Private = Option<Slots>;

/// Where thread 0 adds the seconds of every stage; may be null.
#[derive(Clone, Copy)]
pub(crate) struct Times(pub(crate) *mut f64);

// SAFETY: only thread 0 writes through it.
unsafe impl Send for Times {}
// SAFETY: as above.
unsafe impl Sync for Times {}

/// Rows from what is asked for to what is being written.
pub(crate) const SOON_ROWS: usize = 4;
/// Weight bytes that a thread asks for while it waits at a barrier.
const SOON: usize = 32 << 10;

/// Weights that are asked for before they are needed: they depend on nothing.
struct Soon {
    at: *const u8,
    left: usize,
}

impl Soon {
    /// Asks for a few cache lines more.
    fn ask(&mut self) {
        const TOGETHER: usize = 256;
        if self.left > 0 {
            for line in (0..TOGETHER).step_by(64) {
                prefetch(self.at.wrapping_add(line));
            }
            self.at = self.at.wrapping_add(TOGETHER);
            self.left -= TOGETHER;
        }
    }
}

impl Machine {
    /// A thread's part of a round.
    pub(crate) fn round(&self, team: &Team<'_>, round: &Round<'_>) -> Result<(), Poisoned> {
        // SAFETY: this thread's own slot.
        let worker = unsafe { &mut *self.workers[team.ix].0.get() };
        let mut since = Instant::now();
        for (ix, stage) in self.stages.iter().enumerate() {
            let rows = match stage.space {
                RowSpace::Tokens => round.batch.rows.len(),
                RowSpace::Wanted => round.batch.wanted.len(),
            };
            if rows == 0 {
                continue;
            }
            self.stage(ix, stage, rows, team, round, worker)?;
            let mut soon = self.soon(ix, team);
            team.barrier_with(|| soon.ask())?;
            if team.ix == 0 && !round.times.0.is_null() {
                let now = Instant::now();
                // SAFETY: one element for each stage, this thread's alone.
                unsafe { *round.times.0.add(ix) += (now - since).as_secs_f64() };
                since = now;
            }
        }
        Ok(())
    }

    fn stage(
        &self,
        ix: usize,
        stage: &Stage,
        rows: usize,
        team: &Team<'_>,
        round: &Round<'_>,
        worker: &mut Worker,
    ) -> Result<(), Poisoned> {
        let tiles = match &stage.wide {
            Wide::Tiles(tiles) => Some(tiles),
            _ => None,
        };
        if let (1, Some(tiles)) = (rows, tiles) {
            // SAFETY: thread 0 writes the shared row, the others their own; it is read by others
            // only after the barrier.
            let acts = unsafe { self.chain_alone(ix, stage, tiles, team.ix == 0, round, worker) };
            self.tiles(ix, tiles, rows, acts, team, worker);
            return Ok(());
        }
        if let (1, Wide::Moe(moe)) = (rows, &stage.wide) {
            let private = (team.ix > 0).then_some(worker.own());
            // SAFETY: as above.
            unsafe { self.chain_row(ix, stage, 0, private, round) };
            return self.moe_alone(moe, team, worker, private);
        }
        // Rows of long prompts have a form of their own.
        let coarse = tiles.and_then(|t| t.coarse.as_ref()).filter(|_| round.cuts.any());
        let q8 = tiles.filter(|t| t.q8 && !t.ready);
        if !stage.chain.is_empty() || q8.is_some() || coarse.is_some_and(|c| !c.ready) {
            let view = q8.map(|t| self.q8.shaped(rows, t.x.rows.width));
            let long = coarse.filter(|c| !c.ready).zip(tiles).map(|(_, t)| {
                let prompt = self.prompt();
                (prompt.kernels, prompt.acts.shaped(rows, t.x.rows.width))
            });
            let own = Slots { only: stage.alone, ..worker.own() };
            team.share(rows, |row| {
                let is_long = coarse.is_some() && round.cuts.is_long(row);
                // Nobody takes the f32 of a row that is made into another form here.
                let made = is_long || tiles.is_some_and(|t| !t.floats);
                let private = (made && stage.alone.is_some()).then_some(own);
                // SAFETY: this row is this thread's alone until the barrier, and so is its own memory.
                unsafe {
                    self.chain_row(ix, stage, row, private, round);
                    let Some(tiles) = tiles else { return };
                    match (is_long, view, long) {
                        (true, _, Some((kernels, long))) => {
                            let x = at(tiles.x, row, private).cast_const();
                            let x = std::slice::from_raw_parts(x, tiles.x.rows.width);
                            long.fill(kernels, row, x, 0);
                        }
                        (false, Some(view), _) => {
                            let x = at(tiles.x, row, private).cast_const();
                            let x = std::slice::from_raw_parts(x, tiles.x.rows.width);
                            view.fill(self.kernels, row, x, 0..view.blocks());
                        }
                        _ => {}
                    }
                }
            });
            team.barrier()?;
        }
        match &stage.wide {
            Wide::None => {}
            Wide::Tiles(tiles) => {
                let store = if tiles.ready { &self.made } else { &self.q8 };
                let view = tiles.q8.then(|| store.shaped(rows, tiles.x.rows.width));
                let exact = (tiles.x.rows.at.cast_const(), view);
                match coarse {
                    None => self.tiles(ix, tiles, rows, exact, team, worker),
                    Some(coarse) => {
                        let prompt = self.prompt();
                        let store = if coarse.ready { &prompt.made } else { &prompt.acts };
                        let acts =
                            prompt::Acts { exact, coarse: store.shaped(rows, tiles.x.rows.width) };
                        self.mixed_tiles(tiles, coarse, acts, team, round, worker);
                    }
                }
            }
            Wide::Heads { .. } => self.heads(&stage.wide, team, round, worker)?,
            Wide::Moe(moe) => self.moe(moe, rows, team, worker)?,
            Wide::Conv(conv) => self.conv(conv, team, round),
        }
        Ok(())
    }

    /// The chain of a single row, computed by every thread for itself, and its 8-bit form.
    ///
    /// # Safety
    /// At most one thread is `shared`; it writes row 0 of the chain's values.
    unsafe fn chain_alone(
        &self,
        ix: usize,
        stage: &Stage,
        tiles: &Tiles,
        shared: bool,
        round: &Round<'_>,
        worker: &mut Worker,
    ) -> (*const f32, Option<Q8View>) {
        let private = (!shared).then_some(worker.own());
        // SAFETY: the caller's word.
        unsafe {
            self.chain_row(ix, stage, 0, private, round);
            let x = at(tiles.x, 0, private);
            if tiles.ready {
                return (x, Some(self.made.shaped(1, tiles.x.rows.width)));
            }
            let view = tiles.q8.then(|| {
                let view = worker.q8.shaped(1, tiles.x.rows.width);
                let row = std::slice::from_raw_parts(x, tiles.x.rows.width);
                view.fill(self.kernels, 0, row, 0..view.blocks());
                view
            });
            (x.cast_const(), view)
        }
    }

    /// All row-wise ops of a stage for one row.
    ///
    /// # Safety
    /// Nobody else touches this row of the chain's values (or it is `private`), and what the
    /// chain reads is complete.
    unsafe fn chain_row(
        &self,
        ix: usize,
        stage: &Stage,
        row: usize,
        private: Private,
        round: &Round<'_>,
    ) {
        // SAFETY: the caller's word; widths are those of the values.
        unsafe {
            let shared = private.is_none_or(|own| own.only.is_some());
            if ix == 0 && shared && self.angles.width > 0 {
                let mut out = self.angles.row_mut(row);
                for table in &self.ropes {
                    let (head, rest) = out.split_at_mut(2 * table.inv_freq.len());
                    rows::angles(table, round.batch.rows[row].pos, head);
                    out = rest;
                }
            }
            for op in &stage.chain {
                match op {
                    RowOp::Embed { table, scale, out } => {
                        let token = round.batch.rows[row].token as usize;
                        let out = slice(*out, row, private);
                        match table {
                            Table::Packed(matrix) => matrix.row_to_f32(token, out),
                            Table::File(w) => blocks::dequantize(w.ty, w.row(0, token), out)
                                .expect("invariant: the table's type was tried at prepare"),
                        }
                        if *scale != 1.0 {
                            out.iter_mut().for_each(|v| *v *= scale);
                        }
                    }
                    RowOp::Norm { x, weight, eps, residual, out } => {
                        let residual = residual.map(|r| at(r, row, private).cast_const());
                        let residual = residual.unwrap_or(std::ptr::null());
                        let (x, out) = (at(*x, row, private), at(*out, row, private));
                        (self.ops.norm)(x, weight.as_ptr(), residual, *eps, out, weight.len());
                    }
                    RowOp::Select { x, out } => {
                        let from = round.batch.wanted[row].row as usize;
                        slice(*out, row, private).copy_from_slice(x.row(from));
                    }
                    RowOp::Route { scores, gating, ids, weights } => {
                        let ids = slice(*ids, row, private);
                        let ids =
                            std::slice::from_raw_parts_mut(ids.as_mut_ptr().cast(), ids.len());
                        let weights = slice(*weights, row, private);
                        rows::route(scores.row(row), *gating, ids, weights);
                    }
                }
            }
        }
    }

    /// The weights that this thread will read first after stage `ix`.
    fn soon(&self, ix: usize, team: &Team<'_>) -> Soon {
        let next = self.stages[ix + 1..].iter().take(2).find_map(|s| match &s.wide {
            Wide::Tiles(tiles) => Some(tiles),
            _ => None,
        });
        let start = |t: &Tiles| t.start(team.own(team.ix, t.pieces.len()).start);
        let at = next.map_or(std::ptr::null(), start);
        Soon { at, left: if at.is_null() { 0 } else { SOON } }
    }

    /// The pieces of a product that this thread claims.
    fn tiles(
        &self,
        ix: usize,
        tiles: &Tiles,
        rows: usize,
        acts: (*const f32, Option<Q8View>),
        team: &Team<'_>,
        worker: &mut Worker,
    ) {
        let (blocks, pieces) = (rows.div_ceil(ROW_BLOCK), tiles.pieces.len());
        // As good as equal, and whole groups.
        let tall = rows.div_ceil(blocks).next_multiple_of(GROUP);
        let last = team.own(team.ix, pieces * blocks).end;
        // Piece after piece meets a block of rows, which stays in the second cache meanwhile.
        team.share(pieces * blocks, |item| {
            let then = match item + 1 == last {
                true => self.soon(ix, team).at,
                false => tiles.start((item + 1) % pieces),
            };
            let from = (item / pieces * tall).min(rows);
            let these = from..(from + tall).min(rows);
            self.piece(tiles, item % pieces, these, rows, acts, then, worker);
        });
    }

    /// Convolution: channels are independent, rows of a sequence follow each other.
    fn conv(&self, c: &Conv, team: &Team<'_>, round: &Round<'_>) {
        let width = c.out.width;
        let parts = width.div_ceil(CHANNELS);
        team.share(round.batch.spans.len() * parts, |item| {
            let span = &round.batch.spans[item / parts];
            let from = item % parts * CHANNELS;
            let n = CHANNELS.min(width - from);
            // SAFETY: these channels of this sequence are this thread's alone. The state is
            // handed over as raw memory, because other channels of it are in other hands.
            unsafe {
                let state = self.states.ptr(span.slot.ix()).add(c.state.start);
                for row in span.start as usize..(span.start + span.rows) as usize {
                    let out = std::slice::from_raw_parts_mut(c.out.ptr(row).add(from), n);
                    rows::short_conv(c.x.row(row), &c.kernel, c.taps, from, state, width, out);
                }
            }
        });
    }
}

/// Where a value's row is: in the thread's own slot or in the shared buffer.
pub(crate) fn at(wire: Wire, row: usize, private: Private) -> *mut f32 {
    match (wire.slot, private) {
        (Some(slot), Some(own)) if own.only.is_none_or(|only| only == slot) => {
            own.at.wrapping_add(slot * own.width)
        }
        _ => wire.rows.ptr(row),
    }
}

/// The same as a slice.
///
/// # Safety
/// Nobody else touches the row meanwhile.
unsafe fn slice<'a>(wire: Wire, row: usize, private: Private) -> &'a mut [f32] {
    // SAFETY: the caller's word.
    unsafe { std::slice::from_raw_parts_mut(at(wire, row, private), wire.rows.width) }
}
