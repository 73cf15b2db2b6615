//! The launches of one step with many rows. It knows kernels and addresses, no sequence.

use std::sync::Arc;

use fornax_plan::{Error, Limits, Plan, Result};

use super::item::{Attend, From, Item, Matrix, Onward, Product, Turn};
use super::kernels::{
    Cut, EAGER, HALF, Kernels, LONG, TILE_ROWS, TILES, cut, few_bytes, long_bytes, many_bytes,
    product_bytes,
};
use super::scratch::{AT_ONCE, Input, SLOTS, Scratch, each_at_once};
use crate::args::{AttendArgs, ExpandArgs, GemmArgs, ProductArgs, RoundArgs, TurnArgs};
use crate::compiler::Compiler;
use crate::driver::Gpu;
use crate::fast::stage::{GATED, NORM};
use crate::feed::Shape;
use crate::prepare::{Extent, KV_BLOCK};

/// In which form results go on: rows of f32, 8-bit blocks, tiles of halves.
const TO_ROWS: u32 = 0;
const TO_ROUND: u32 = 1;
const TO_TILES: u32 = 2;
/// What becomes of a product's sums: outputs as they are, gated pairs, gated pairs in the form of the next input, outputs and
/// beside them their norm in that form.
const AS_ROWS: u32 = 0;
const AS_PAIRS: u32 = 1;
const AS_INPUT: u32 = 2;
const AS_NORM: u32 = 3;

/// Which sequences a step has: such that give it few rows, such that give it many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Kinds {
    pub(crate) few: bool,
    pub(crate) many: bool,
    /// Every sequence has one row.
    pub(crate) lone: bool,
    /// Parts of the longest context of the former.
    pub(crate) parts: u32,
}

/// One round: how many rows, and where their words are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) rows: u32,
    pub(crate) wanted: u32,
    pub(crate) rows_at: u64,
    /// Block tables of the first group, bytes of a group's, entries of a sequence's.
    pub(crate) tables: (u64, u64, u32),
    pub(crate) kinds: Kinds,
}

/// A plan made ready for steps of many rows.
#[derive(Debug)]
pub(crate) struct Rows {
    pub(crate) items: Vec<Item>,
    kernels: Kernels,
    scratch: Scratch,
    /// Rows from which activations are halves; none where they never are.
    long_from: Option<u32>,
    /// Attention takes every row by itself, and so many at once.
    each: Option<u32>,
    /// Tokens of a pool.
    tokens: u32,
    units: u32,
}

/// Rows from which expanding every matrix costs less than the slower products.
const LONG_FROM: u32 = 257;

impl Rows {
    /// # Errors
    /// As `prepare`.
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        compiler: &Compiler,
        plan: &Plan,
        limits: &Limits,
        items: Vec<Item>,
        long_from: Option<u32>,
    ) -> Result<Rows> {
        let from = long_from.unwrap_or(LONG_FROM);
        let long = gpu.arch == 90 && limits.rows >= from && !limits.deterministic;
        let most = limits.rows.max(limits.wanted).max(limits.slots);
        let kernels = Kernels::new(
            gpu,
            compiler,
            &items,
            limits.kv_type,
            (most, long, limits.deterministic),
        )?;
        let scratch = Scratch::new(gpu, plan, limits, &items, long)?;
        let tokens = limits.kv_blocks * KV_BLOCK;
        let long_from = long.then_some(from);
        let each = limits.deterministic.then(|| each_at_once(limits));
        Ok(Rows { items, kernels, scratch, long_from, each, tokens, units: gpu.units })
    }

    pub(crate) fn scratch_bytes(&self) -> u64 {
        self.scratch.bytes
    }

    /// Whether attention takes every row by itself, so that none depends on those beside it.
    pub(crate) fn by_row(&self) -> bool {
        self.each.is_some()
    }

    /// Query heads and rows that the kernel for few rows takes together: what a sequence's rows are counted against.
    pub(crate) fn few_rows(&self) -> u32 {
        let share = |i: &Item| match i {
            Item::Attend(a) => Some(a.heads / a.kv_heads),
            _ => None,
        };
        SLOTS / self.items.iter().filter_map(share).max().unwrap_or(SLOTS)
    }

    /// Queues item `at`, which is no plain action; returns its op.
    pub(crate) fn launch(&self, gpu: &Gpu, item: &Item, step: &Step) -> Result<u32> {
        match item {
            Item::Action(_) => {
                Err(Error::malformed("cuda: a plain action has no kernel of its own"))
            }
            Item::Product(p) => self.product(gpu, p, step).map(|()| p.op),
            Item::Turn(t) => self.turn(gpu, t, step).map(|()| t.op),
            Item::Attend(a) => self.attend(gpu, a, step).map(|()| a.op),
        }
    }

    fn long(&self, step: &Step) -> bool {
        self.long_from.is_some_and(|from| step.rows >= from)
    }

    fn product(&self, gpu: &Gpu, p: &Product, step: &Step) -> Result<()> {
        let rows = if p.extent == Extent::Rows { step.rows } else { step.wanted };
        if rows == 0 {
            return Ok(());
        }
        let inputs = self.scratch.inputs;
        let (from, to) = (inputs[p.reads], inputs[1 - p.reads]);
        // By its own rows: a head of few is not worth expanding, and one of many must not round more than what it reads.
        if self.long_from.is_some_and(|from| rows >= from) && p.by_fours() {
            self.long_product(gpu, p, rows, from, to)
        } else {
            self.short_product(gpu, p, rows, from, to)
        }
    }

    fn round(&self, gpu: &Gpu, p: &Product, rows: u32, to: Input, long: bool) -> Result<()> {
        let s = &p.stage;
        let norm = u32::from(s.pro == NORM);
        let args = RoundArgs {
            rows,
            width: s.nb * 32,
            stride: rows.next_multiple_of(64),
            norm,
            eps: s.eps,
        };
        if long {
            let pointers = [s.x[0], s.norm[0], to.bytes];
            return gpu.launch_early(
                &self.kernels.halve,
                (rows, 1),
                256,
                0,
                &args.words(),
                &pointers,
            );
        }
        let pointers = [s.x[0], s.norm[0], to.bytes, to.scales, to.sums];
        gpu.launch_early(&self.kernels.round, (rows, 1), 256, s.nb * 8, &args.words(), &pointers)
    }

    fn short_product(
        &self,
        gpu: &Gpu,
        p: &Product,
        rows: u32,
        from: Input,
        to: Input,
    ) -> Result<()> {
        if p.from == From::Rows {
            self.round(gpu, p, rows, from, false)?;
        }
        let s = &p.stage;
        let stride = rows.next_multiple_of(64);
        let norm = if let Onward::Normed(weights) = p.onward { weights } else { 0 };
        for m in &p.matrices {
            let gated = s.epi == GATED;
            let cut = cut(s.nb, m.outs, gated);
            let Cut { wide, splits, threads } = cut;
            let mut tile = TILES.into_iter().find(|t| rows <= t.rows).unwrap_or(TILES[2]);
            // Where a multiprocessor has one small block, two of half the rows hide more; sums are the same.
            let blocks = m.outs.div_ceil(32 * wide) * splits * rows.div_ceil(tile.rows);
            if tile == TILES[2] && wide == 1 && blocks <= self.units {
                tile = HALF;
            }
            let function =
                self.kernels.products.get(&(m.ty, tile, wide, threads)).ok_or_else(|| {
                    Error::malformed(format!("cuda: no product of {} for {rows} rows", m.ty))
                })?;
            for base in (0..rows).step_by(AT_ONCE as usize) {
                let rows = (rows - base).min(AT_ONCE);
                let args = ProductArgs {
                    rows,
                    base,
                    stride,
                    nb: s.nb,
                    outs: m.outs,
                    ty: 0,
                    splits,
                    epi: to_form(p, false),
                    act: s.act,
                    before: m.before,
                    cuts: s.cuts,
                    widths: s.widths,
                    to_stride: stride,
                    alpha: s.alpha,
                    limit: s.limit,
                    scale: s.scale,
                    softcap: s.softcap,
                    normed: u32::from(p.from == From::Normed),
                    eps: s.eps,
                };
                let pointers = [
                    m.w,
                    from.bytes,
                    from.scales,
                    from.sums,
                    from.squares,
                    s.bias,
                    s.residual,
                    norm,
                    s.y[0],
                    s.y[1],
                    s.y[2],
                    to.bytes,
                    to.scales,
                    to.sums,
                    to.squares,
                    self.scratch.partial,
                    self.scratch.arrived,
                ];
                let grid = (m.outs.div_ceil(32 * wide) * splits, rows.div_ceil(tile.rows));
                let grid = (grid, if tile.eager { splits } else { 1 });
                let (shared, words) = (product_bytes(m.ty, tile, cut), args.words());
                gpu.launch_early_clusters(function, grid, threads, shared, &words, &pointers)?;
            }
        }
        Ok(())
    }

    /// Columns of a tile: the wider does less copying, the narrower keeps more multiprocessors busy.
    fn columns(&self, rows: u32, outs: u32) -> usize {
        let cost = |(columns, ..): (u32, u32, u32)| {
            let tiles = rows.div_ceil(TILE_ROWS) * outs.div_ceil(columns);
            u64::from(tiles.div_ceil(self.units) * columns)
        };
        // What the narrower costs more, found by trying.
        usize::from(cost(LONG[1]) * 9 <= cost(LONG[0]) * 10)
    }

    fn long_product(
        &self,
        gpu: &Gpu,
        p: &Product,
        rows: u32,
        from: Input,
        to: Input,
    ) -> Result<()> {
        if matches!(p.from, From::Rows | From::Normed) {
            self.round(gpu, p, rows, from, true)?;
        }
        let s = &p.stage;
        for m in &p.matrices {
            let Matrix { w, ty, outs, before } = *m;
            let steps = s.nb.div_ceil(2);
            let expand = self
                .kernels
                .expand
                .get(&ty)
                .ok_or_else(|| Error::malformed(format!("cuda: no way to expand {ty}")))?;
            let grid = ((2 * steps).div_ceil(8), outs.div_ceil(32));
            let args = ExpandArgs { nb: s.nb, outs };
            gpu.launch_early(expand, grid, 256, 0, &args.words(), &[w, self.scratch.matrix])?;
            let which = self.columns(rows, outs);
            let args = GemmArgs {
                rows,
                outs,
                steps,
                epi: to_form(p, true),
                act: s.act,
                before,
                cuts: s.cuts,
                widths: s.widths,
                to_tiles: s.widths[0].div_ceil(64),
                alpha: s.alpha,
                limit: s.limit,
                scale: s.scale,
                softcap: s.softcap,
            };
            let pointers = [
                from.bytes,
                self.scratch.matrix,
                s.bias,
                s.residual,
                s.y[0],
                s.y[1],
                s.y[2],
                to.bytes,
            ];
            let grid = (rows.div_ceil(TILE_ROWS) * outs.div_ceil(LONG[which].0), 1);
            let shared = long_bytes(LONG[which]);
            gpu.launch_early(
                &self.kernels.long[which],
                grid,
                288,
                shared,
                &args.words(),
                &pointers,
            )?;
        }
        Ok(())
    }

    /// Whether attention makes norms and positions, too.
    fn turns(&self, dim: u32, step: &Step) -> bool {
        let key = (dim, step.rows <= EAGER);
        step.kinds.lone && !step.kinds.many && self.kernels.few_turned.contains_key(&key)
    }

    fn turn(&self, gpu: &Gpu, t: &Turn, step: &Step) -> Result<()> {
        if t.joined && self.turns(t.dim, step) {
            return Ok(());
        }
        let (tables, of_group, stride) = step.tables;
        let args = TurnArgs {
            rows: step.rows,
            heads: t.heads,
            kv_heads: t.kv_heads,
            dim: t.dim,
            v_dim: t.v_dim,
            pairs: t.pairs,
            halves: u32::from(t.halves),
            stride,
            tokens: self.tokens,
            eps: t.eps,
            magnitude: t.magnitude,
        };
        let [q, k, v, q_norm, k_norm, freqs] = t.from;
        let tables = tables + of_group * t.group as u64;
        let [keys, values] = t.pool;
        let pointers =
            [q, k, v, q_norm, k_norm, freqs, step.rows_at, tables, t.q_out, keys, values];
        // Few rows fill the GPU by their heads.
        let heads = if step.rows <= 512 { (t.heads + 2 * t.kv_heads).div_ceil(8) } else { 1 };
        gpu.launch_early(&self.kernels.turn, (step.rows, heads), 256, 0, &args.words(), &pointers)
    }

    fn attend(&self, gpu: &Gpu, a: &Attend, step: &Step) -> Result<()> {
        let (tables, of_group, stride) = step.tables;
        let share = a.heads / a.kv_heads;
        let to = match (a.onward, self.long(step)) {
            (false, _) => TO_ROWS,
            (true, false) => TO_ROUND,
            (true, true) => TO_TILES,
        };
        let args = AttendArgs {
            rows: step.rows,
            heads: a.heads,
            kv_heads: a.kv_heads,
            stride,
            window: a.window,
            tokens: self.tokens,
            to,
            to_stride: step.rows.next_multiple_of(64),
            scale: a.scale,
            softcap: a.softcap,
            parts: step.kinds.parts.max(1),
            base: 0,
            each: 0,
            pairs: a.turn.as_ref().map_or(0, |t| t.pairs),
            halves: a.turn.as_ref().map_or(0, |t| u32::from(t.halves)),
            eps: a.turn.as_ref().map_or(0.0, |t| t.eps),
            magnitude: a.turn.as_ref().map_or(0.0, |t| t.magnitude),
        };
        let tables = tables + of_group * a.group as u64;
        let [keys, values] = a.pool;
        let input = self.scratch.inputs[0];
        let s = &self.scratch;
        let pointers = [
            a.q,
            step.rows_at,
            tables,
            keys,
            values,
            a.sinks,
            a.out,
            input.bytes,
            input.scales,
            input.sums,
            s.means,
            s.marks,
            s.counts,
        ];
        let grid = (a.kv_heads * args.parts, step.rows);
        let of_few = (a.dim, step.rows <= EAGER);
        if let (true, Some(t), Some(few)) =
            (self.turns(a.dim, step), &a.turn, self.kernels.few_turned.get(&of_few))
        {
            let pointers = [&t.from[..], &pointers[1..]].concat();
            let bytes = few_bytes(a.dim);
            return gpu.launch_early(few, grid, 128, bytes, &args.words(), &pointers);
        }
        if let (Some(most), Some(few)) = (self.each, self.kernels.few.get(&of_few)) {
            for base in (0..step.rows).step_by(most as usize) {
                let grid = (grid.0, (step.rows - base).min(most));
                let words = AttendArgs { base, each: 1, ..args }.words();
                gpu.launch_early(few, grid, 128, few_bytes(a.dim), &words, &pointers)?;
            }
            return Ok(());
        }
        if let (true, Some(few)) = (step.kinds.few, self.kernels.few.get(&of_few)) {
            gpu.launch_early(few, grid, 128, few_bytes(a.dim), &args.words(), &pointers)?;
        }
        let which = (a.dim, share, !self.long(step));
        if let (true, Some(many)) = (step.kinds.many, self.kernels.many.get(&which)) {
            let grid = (a.kv_heads, step.rows.div_ceil(64 / share));
            gpu.launch_early(many, grid, 128, many_bytes(a.dim), &args.words(), &pointers[..10])?;
        }
        Ok(())
    }
}

/// In which form a product leaves what it gives, as its kernels number them. Where activations are halves, norms wait for
/// the rounding that follows.
fn to_form(p: &Product, long: bool) -> u32 {
    match (p.stage.epi == GATED, p.onward) {
        (true, Onward::Pairs) => AS_INPUT,
        (true, _) => AS_PAIRS,
        (false, Onward::Normed(_)) if !long => AS_NORM,
        (false, _) => AS_ROWS,
    }
}

/// Where a group's block tables are, for [`Step::tables`].
pub(crate) fn tables(feed: u64, shape: &Shape) -> (u64, u64, u32) {
    let first = shape.tables(0);
    (feed + 4 * first.start as u64, 4 * first.len() as u64, shape.stride as u32)
}
