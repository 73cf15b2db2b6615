//! One round of a step: what every thread does in every stage. It knows no plan; addresses and
//! weights come resolved.
//!
//! All threads walk the same list with a barrier after each stage. Which thread computes what is
//! decided by claims and never shows in a result: every element is computed by the same code from
//! the same inputs wherever it lands.

use std::time::Instant;

use fornax_gguf::blocks;
use fornax_plan::{Batch, RowSpace, SeqStep, Span};

use crate::compile::{
    Affine, Conv, Finish, Look, PIECE_TILES, Part, RowOp, Rows, Stage, Table, Tiles, Wide, Wire,
    Write,
};
use crate::kv::Cache;
use crate::matrix::{Acts, Kernels, Memory, Q8Rows, Q8View, TILE};
use crate::moe::Order;
use crate::ops::{Attend, BLOCK, QUERIES, Scratch, VectorOps, part_len, rows, splits};
use crate::pool::{Poisoned, Team};

/// Activation rows multiplied with a piece of weights at a time: both stay in the cache.
pub(crate) const ROW_BLOCK: usize = 64;
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
    /// The second matrix of a gated pair.
    pub(crate) up: Vec<f32>,
    pub(crate) scratch: Scratch,
    pub(crate) order: Order,
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
    /// Seconds by stage, written by thread 0; null where nobody asks.
    pub(crate) times: Times,
}

/// Where thread 0 adds the seconds of every stage; may be null.
#[derive(Clone, Copy)]
pub(crate) struct Times(pub(crate) *mut f64);

// SAFETY: only thread 0 writes through it.
unsafe impl Send for Times {}
// SAFETY: as above.
unsafe impl Sync for Times {}

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
            team.barrier()?;
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
            self.tiles(tiles, rows, acts, team, worker);
            return Ok(());
        }
        if !stage.chain.is_empty() || tiles.is_some_and(|t| t.q8) {
            let view = tiles.filter(|t| t.q8).map(|t| self.q8.shaped(rows, t.x.rows.width));
            team.share(rows, |row| {
                // SAFETY: this row is this thread's alone until the barrier.
                unsafe {
                    self.chain_row(ix, stage, row, None, round);
                    if let (Some(view), Some(tiles)) = (view, tiles) {
                        let x = tiles.x.rows.row(row);
                        view.fill(self.kernels, row, x, 0..view.blocks());
                    }
                }
            });
            team.barrier()?;
        }
        match &stage.wide {
            Wide::None => {}
            Wide::Tiles(tiles) => {
                let view = tiles.q8.then(|| self.q8.shaped(rows, tiles.x.rows.width));
                let x = tiles.x.rows.at.cast_const();
                self.tiles(tiles, rows, (x, view), team, worker);
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
        let own = (worker.slots.as_ptr().cast::<f32>(), worker.slot_width);
        let private = (!shared).then_some(own);
        // SAFETY: the caller's word.
        unsafe {
            self.chain_row(ix, stage, 0, private, round);
            let x = at(tiles.x, 0, private);
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
        private: Option<(*mut f32, usize)>,
        round: &Round<'_>,
    ) {
        // SAFETY: the caller's word; widths are those of the values.
        unsafe {
            if ix == 0 && private.is_none() && self.angles.width > 0 {
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

    /// The pieces of a product that this thread claims.
    fn tiles(
        &self,
        tiles: &Tiles,
        rows: usize,
        acts: (*const f32, Option<Q8View>),
        team: &Team<'_>,
        worker: &mut Worker,
    ) {
        let blocks = rows.div_ceil(ROW_BLOCK);
        team.share(tiles.pieces.len() * blocks, |item| {
            let (part, piece) = &tiles.pieces[item / blocks];
            let part = &tiles.parts[*part];
            let from = item % blocks * ROW_BLOCK;
            let these = from..(from + ROW_BLOCK).min(rows);
            let columns = piece.start * TILE..(piece.end * TILE).min(part.affine.matrix.rows());
            let width = part.out.width;
            // SAFETY: these rows of these columns are this thread's alone; the inputs were
            // complete before the last barrier or are this thread's own.
            unsafe {
                let out = part.out.ptr(these.start);
                let x = (acts.0, tiles.x.rows.width, rows);
                self.product(&part.affine, 0, x, acts.1, these.clone(), piece.clone(), out, width);
                match &tiles.finish {
                    Finish::Plain => {}
                    Finish::Gate { up, act } => {
                        let stride = PIECE_TILES * TILE;
                        let second = worker.up.as_mut_ptr().wrapping_sub(columns.start);
                        let (r, p) = (these.clone(), piece.clone());
                        self.product(up, 0, x, acts.1, r, p, second, stride);
                        for i in 0..these.len() {
                            let g = out.add(i * width + columns.start);
                            let u = worker.up.as_ptr().add(i * stride);
                            (self.ops.gate)(g, u, g, columns.len(), *act);
                        }
                    }
                    Finish::Logits { scale, cap } => {
                        if *scale != 1.0 || *cap != 0.0 {
                            for i in 0..these.len() {
                                let v = out.add(i * width + columns.start);
                                (self.ops.scale_and_cap)(v, columns.len(), *scale, *cap);
                            }
                        }
                    }
                }
                add_residual(part, these, columns);
            }
        });
    }

    /// `W·x + b` for some rows and tiles.
    ///
    /// # Safety
    /// As `Matrix::multiply`; `x` is the address, width and number of the f32 rows.
    #[expect(clippy::too_many_arguments, reason = "one call of the innermost operation")]
    pub(crate) unsafe fn product(
        &self,
        affine: &Affine,
        expert: usize,
        x: (*const f32, usize, usize),
        view: Option<Q8View>,
        rows: std::ops::Range<usize>,
        tiles: std::ops::Range<usize>,
        out: *mut f32,
        stride: usize,
    ) {
        let matrix = &affine.matrix;
        let columns = tiles.start * TILE..(tiles.end * TILE).min(matrix.rows());
        // SAFETY: the caller's word.
        unsafe {
            let acts = match view {
                Some(view) if matrix.takes_q8() => Acts::Q8(view),
                _ => {
                    let (at, cols, rows) = x;
                    Acts::F32 { x: std::slice::from_raw_parts(at, rows * cols), cols }
                }
            };
            let n = rows.len();
            matrix.multiply(self.kernels, expert, &acts, rows, tiles, out, stride);
            if let Some(bias) = &affine.bias {
                let bias = &bias[expert * matrix.rows()..][columns.clone()];
                for i in 0..n {
                    let y = out.wrapping_add(i * stride + columns.start);
                    rows::add(std::slice::from_raw_parts_mut(y, bias.len()), bias);
                }
            }
        }
    }

    /// Head norms, rotation, the write to the cache and attention.
    fn heads(
        &self,
        wide: &Wide,
        team: &Team<'_>,
        round: &Round<'_>,
        worker: &mut Worker,
    ) -> Result<(), Poisoned> {
        let Wide::Heads { rotate, write, look } = wide else { return Ok(()) };
        let batch = round.batch;
        let n = batch.rows.len();
        // Without the cache there is no key head to go by: a row is one item.
        let kv = write.as_ref().map(|w| w.kv).or(look.as_ref().map(|l| l.kv));
        let heads = kv.map_or(1, |kv| self.cache.pool(kv.group as usize).run.heads);
        let prepare = |row: usize, head: usize| {
            // SAFETY: this head of this row is this thread's alone until the barrier.
            unsafe {
                if let Some(rotate) = rotate {
                    self.rotate(rotate, row, head, heads);
                }
                if let Some(write) = write {
                    self.write(write, row, head, round);
                }
            }
        };
        let Some(look) = look else {
            team.share(n * heads, |item| prepare(item / heads, item % heads));
            return Ok(());
        };
        let share = look.heads / heads;
        let single = batch.spans.len() == n && share <= QUERIES;
        let longest = batch.rows.iter().map(|r| splits(r.pos as usize, look.window).len()).max();
        if single && n * heads < 2 * team.threads && team.threads > 1 && longest > Some(2) {
            if rotate.is_some() || write.is_some() {
                team.share(n * heads, |item| prepare(item / heads, item % heads));
                team.barrier()?;
            }
            return self.look_together(look, longest.unwrap_or(1), team, round, worker);
        }
        if single {
            // One row for each sequence: whoever wrote a key head is the one to read it.
            team.share(n * heads, |item| {
                let (row, head) = (item / heads, item % heads);
                prepare(row, head);
                let span = &batch.spans[row];
                self.look(look, span, 0..1, head, 0..share, round, worker);
            });
            return Ok(());
        }
        if rotate.is_some() || write.is_some() {
            team.share(n * heads, |item| prepare(item / heads, item % heads));
            team.barrier()?;
        }
        let per_call = share.min(QUERIES);
        let calls = share.div_ceil(per_call);
        let step = (QUERIES / per_call).max(1);
        let blocks: usize = batch.spans.iter().map(|s| (s.rows as usize).div_ceil(step)).sum();
        team.share(blocks * heads * calls, |item| {
            let (head, call) = (item / calls % heads, item % calls);
            // Last rows first: they see most keys, and the short ones fill the gaps.
            let mut block = blocks - 1 - item / (calls * heads);
            for span in &batch.spans {
                let here = (span.rows as usize).div_ceil(step);
                if block < here {
                    let rows = block * step..((block + 1) * step).min(span.rows as usize);
                    let of_group = call * per_call..((call + 1) * per_call).min(share);
                    self.look(look, span, rows, head, of_group, round, worker);
                    return;
                }
                block -= here;
            }
        });
        Ok(())
    }

    /// Norms and rotates key head `head` of `heads` and its share of the query heads.
    ///
    /// # Safety
    /// Nobody else touches these heads of this row meanwhile.
    unsafe fn rotate(&self, r: &crate::compile::Rotate, row: usize, head: usize, heads: usize) {
        for (x, out, norm) in [(r.q, r.q_out, &r.q_norm), (r.k, r.k_out, &r.k_norm)] {
            let len = x.width / heads;
            for at in (head * len..(head + 1) * len).step_by(r.dim) {
                // SAFETY: `at` is the start of a head of this row.
                unsafe {
                    let (from, to) = (x.ptr(row).add(at), out.ptr(row).add(at));
                    match norm {
                        Some(w) => {
                            let none = std::ptr::null();
                            (self.ops.norm)(from, w.as_ptr(), none, r.eps, to, r.dim);
                        }
                        None => std::ptr::copy_nonoverlapping(from, to, r.dim),
                    }
                    if let Some((range, pairs)) = &r.angles {
                        let head = std::slice::from_raw_parts_mut(to, r.dim);
                        rows::rotate(head, &self.angles.row(row)[range.clone()], *pairs);
                    }
                }
            }
        }
    }

    /// Stores one key head of a row.
    ///
    /// # Safety
    /// Nobody else touches this head of this row's token meanwhile.
    unsafe fn write(&self, w: &Write, row: usize, head: usize, round: &Round<'_>) {
        let at = round.batch.rows[row];
        let table = round.step[at.seq as usize].tables[w.kv.group as usize];
        let pool = self.cache.pool(w.kv.group as usize);
        let pos = at.pos as usize;
        let place = (table[pos / BLOCK], w.kv.layer as usize, head, pos % BLOCK);
        let run = pool.run;
        // SAFETY: the caller's word; the row holds all heads.
        unsafe {
            let k = &w.k.row(row)[head * run.k_width..][..run.k_width];
            let v = &w.v.row(row)[head * run.v_width..][..run.v_width];
            pool.write(self.ops, place, k, v);
        }
    }

    /// Attention of few long rows: threads share the splits of every key head, then its merges.
    fn look_together(
        &self,
        l: &Look,
        longest: usize,
        team: &Team<'_>,
        round: &Round<'_>,
        worker: &mut Worker,
    ) -> Result<(), Poisoned> {
        let run = self.cache.pool(l.kv.group as usize).run;
        let (heads, share) = (run.heads, l.heads / run.heads);
        let len = part_len(run.v_stride);
        let stride = self.parts.splits * len;
        let n = round.batch.spans.len();
        let parts = |row: usize, head: usize| {
            let at = (row * l.heads + head * share) * stride;
            debug_assert!(4 * (at + share * stride) <= self.parts.memory.len());
            self.parts.memory.as_ptr().cast::<f32>().wrapping_add(at)
        };
        team.share(n * heads * longest, |item| {
            let (row, head, split) =
                (item / longest / heads, item / longest % heads, item % longest);
            let span = &round.batch.spans[row];
            let all = splits(span.pos as usize, l.window);
            if split < all.len() {
                self.call(l, span, 0..1, head, 0..share, round, |call| {
                    let to = parts(row, head).wrapping_add(split * len);
                    // SAFETY: as for a whole call; these parts are this thread's alone.
                    unsafe {
                        let scratch = &mut worker.scratch;
                        (self.ops.attend_part)(call, scratch, all.start + split, to, stride);
                    }
                });
            }
        });
        team.barrier()?;
        team.share(n * heads, |item| {
            let (row, head) = (item / heads, item % heads);
            let span = &round.batch.spans[row];
            self.call(l, span, 0..1, head, 0..share, round, |call| {
                let from = parts(row, head).cast_const();
                // SAFETY: all parts were complete before the barrier.
                unsafe { (self.ops.attend_merge)(call, &mut worker.scratch, from, stride) }
            });
        });
        Ok(())
    }

    /// Attention of some rows of a span for some query heads of a key head.
    #[expect(clippy::too_many_arguments, reason = "the coordinates of one item")]
    fn look(
        &self,
        l: &Look,
        span: &Span,
        rows: std::ops::Range<usize>,
        head: usize,
        of_group: std::ops::Range<usize>,
        round: &Round<'_>,
        worker: &mut Worker,
    ) {
        self.call(l, span, rows, head, of_group, round, |call| {
            // SAFETY: the tier was checked when the machine was made; keys up to these rows were
            // written before the last barrier or by this thread; these heads of `out` are this
            // thread's alone.
            unsafe { (self.ops.attend)(call, &mut worker.scratch) }
        });
    }

    /// Puts a call of attention together.
    #[expect(clippy::too_many_arguments, reason = "the coordinates of one item")]
    fn call(
        &self,
        l: &Look,
        span: &Span,
        rows: std::ops::Range<usize>,
        head: usize,
        of_group: std::ops::Range<usize>,
        round: &Round<'_>,
        go: impl FnOnce(&Attend<'_>),
    ) {
        let pool = self.cache.pool(l.kv.group as usize);
        let run = pool.run;
        let table = round.step[span.seq as usize].tables[l.kv.group as usize];
        let layer = l.kv.layer as usize;
        let block = |i: usize| {
            let (k, v) = pool.run(table[i], layer, head);
            (k.cast_const(), v.cast_const())
        };
        let first = head * (l.heads / run.heads) + of_group.start;
        let row = span.start as usize + rows.start;
        let sinks = l.sinks.as_ref().map_or(&[][..], |s| &s[first..first + of_group.len()]);
        let call = Attend {
            q: l.q.ptr(row).wrapping_add(first * run.k_width),
            q_stride: l.q.width,
            out: l.out.ptr(row).wrapping_add(first * run.v_width),
            out_stride: l.out.width,
            rows: rows.len(),
            heads: of_group.len(),
            pos: span.pos as usize + rows.start,
            window: l.window,
            k_width: run.k_width,
            v_width: run.v_width,
            v_stride: run.v_stride,
            scale: l.scale,
            cap: l.cap,
            sinks,
            cell: run.cell,
            block: &block,
        };
        go(&call);
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

/// `y += residual` over some rows and columns of a part.
///
/// # Safety
/// Nobody else touches these columns of these rows meanwhile.
unsafe fn add_residual(
    part: &Part,
    these: std::ops::Range<usize>,
    columns: std::ops::Range<usize>,
) {
    let Some(residual) = part.residual else { return };
    for row in these {
        // SAFETY: the caller's word.
        unsafe {
            let y = part.out.ptr(row).add(columns.start);
            let y = std::slice::from_raw_parts_mut(y, columns.len());
            rows::add(y, &residual.row(row)[columns.clone()]);
        }
    }
}

/// Where a value's row is: in the thread's own slot or in the shared buffer.
fn at(wire: Wire, row: usize, private: Option<(*mut f32, usize)>) -> *mut f32 {
    match (wire.slot, private) {
        (Some(slot), Some((base, width))) => base.wrapping_add(slot * width),
        _ => wire.rows.ptr(row),
    }
}

/// The same as a slice.
///
/// # Safety
/// Nobody else touches the row meanwhile.
unsafe fn slice<'a>(wire: Wire, row: usize, private: Option<(*mut f32, usize)>) -> &'a mut [f32] {
    // SAFETY: the caller's word.
    unsafe { std::slice::from_raw_parts_mut(at(wire, row, private), wire.rows.width) }
}
