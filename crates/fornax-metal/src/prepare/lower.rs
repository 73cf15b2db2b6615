//! A plan's ops as dispatches of the kernels under `kernels/`: one command for each range of rows
//! that has a kernel of its own, two ops in one where a kernel does both. It knows no emulator.

use std::ops::RangeInclusive;

use fornax_plan::{Activation, Error, KvRef, Linear, Op, Result, RopePairs, ValueId, WeightId};

use super::{Arg, Builder, KV_BLOCK};
use crate::api::Buffer;
use crate::args::{
    AttentionArgs, CopyArgs, EmbedArgs, GatedArgs, KvWriteArgs, MatmulArgs, NormArgs, PartsArgs,
    PickArgs, QkvArgs, RopeArgs, RopeWriteArgs, SelectArgs,
};
use crate::encode::{Axis, Command, Extent, Place, Span};
use crate::hazard::Access::{Read, Write};
use crate::library::entry;
use crate::policy::{self, MATVEC_ROWS, SMALL_ROWS, SPLIT_ROWS, Tile};

/// Elements of a head that a simdgroup holds.
pub(super) const HEAD_WIDTH_MAX: u32 = 256;

const ANY: RangeInclusive<u32> = 1..=u32::MAX;
const ONE: Axis = Axis::Fixed(1);
const ROWS: Axis = Axis::RowsBy(1);

/// A norm that its reader computes.
#[derive(Clone, Copy)]
struct Norm {
    x: ValueId,
    weight: WeightId,
    eps: f32,
}

/// A dispatch but for its arguments.
struct Entry<'a> {
    name: &'a str,
    /// Function constants.
    constants: Vec<u32>,
    when: RangeInclusive<u32>,
    axes: [Axis; 3],
    threads: u32,
}

impl Builder<'_> {
    /// Resolves every op.
    pub(super) fn lower(&mut self) -> Result<()> {
        let plan = self.plan;
        let mut at = 0;
        while let Some(op) = plan.ops.get(at) {
            if let Op::RmsNorm { x, weight, eps, residual: None, out } = *op
                && let Some(next) = plan.ops.get(at + 1)
                && self.folds(x, out, next)
            {
                // Few rows are normed by the kernel that reads them, the norm is for the rest.
                self.lower_norm(at as u32, op, MATVEC_ROWS + 1..=u32::MAX)?;
                self.lower_reader(at as u32 + 1, next, Some(Norm { x, weight, eps }))?;
                at += 2;
                continue;
            }
            if let Some(Op::KvWrite { k, v, kv }) = plan.ops.get(at + 1)
                && let Op::QkNormRope { k_out, .. } = op
                && k == k_out
                && self.readers(*k) == 1
            {
                self.rope_write(at as u32, op, *v, *kv)?;
                at += 2;
                continue;
            }
            self.lower_op(at as u32, op)?;
            at += 1;
        }
        Ok(())
    }

    /// Whether the norm from `x` to `out` can be left to the next op.
    fn folds(&self, x: ValueId, out: ValueId, next: &Op) -> bool {
        let reads = match *next {
            Op::Qkv { x, q, k, v, .. } => {
                let [q, k, v] = [q, k, v].map(|l| self.plan.weights[l.weight.ix()].ty);
                x == out && q == k && q == v
            }
            Op::GatedMlp { x, .. } => x == out,
            _ => false,
        };
        // The next op then reads what the norm would have been the last to read, and may not
        // write its results there.
        let apart = |o: ValueId| self.values.ix(o) != self.values.ix(x);
        reads && self.readers(out) == 1 && next.outputs().iter().all(apart)
    }

    fn lower_reader(&mut self, at: u32, op: &Op, norm: Option<Norm>) -> Result<()> {
        match *op {
            Op::GatedMlp { x, gate, up, act, out } => {
                self.lower_gated(at, (x, norm), [gate, up], act, out)
            }
            _ => self.lower_qkv(at, op, norm),
        }
    }

    fn readers(&self, v: ValueId) -> usize {
        self.plan.ops.iter().map(|op| op.inputs().iter().filter(|i| *i == v).count()).sum()
    }

    fn lower_op(&mut self, at: u32, op: &Op) -> Result<()> {
        match *op {
            Op::Embed { table, scale, out } => {
                let w = &self.plan.weights[table.ix()];
                let args = vec![
                    self.weight(table),
                    Some((Place::Rows, Read)),
                    Some((Place::Fixed(self.out.last.all()), Read)),
                    self.value(out, Write),
                ];
                let constants = EmbedArgs { rows: 0, width: w.cols, vocab: w.rows, scale }.words();
                let name = entry("embed", w.ty);
                let threads = policy::threads(w.cols, 8).min(256);
                let e = whole(&name, [ROWS, ONE, ONE], threads);
                self.dispatch(at, e, Extent::Rows, args, constants)
            }
            Op::RmsNorm { .. } => self.lower_norm(at, op, ANY),
            Op::MatMul { x, linear, residual, out } => {
                let out = self.value(out, Write);
                self.product(at, ANY, x, linear, residual, out, (1.0, None))
            }
            Op::Qkv { .. } | Op::GatedMlp { .. } => self.lower_reader(at, op, None),
            Op::QkNormRope { q, k, q_norm, k_norm, q_out, k_out, .. } => {
                self.lower_rope(at, op, q, q_norm, q_out)?;
                self.lower_rope(at, op, k, k_norm, k_out)
            }
            Op::KvWrite { k, v, kv } => self.lower_kv_write(at, k, v, kv),
            Op::Attention { .. } => self.lower_attention(at, op),
            Op::SelectRows { x, out } => {
                // Any row may be chosen, so the whole buffer is read.
                let all = self.buffers[self.values.ix(x)].all();
                let args = vec![
                    Some((Place::Fixed(all), Read)),
                    Some((Place::Wanted, Read)),
                    self.value(out, Write),
                ];
                let width = self.plan.width(x);
                let constants = SelectArgs { rows: 0, width }.words();
                let e = whole("select_rows", elements(width), 256);
                self.dispatch(at, e, Extent::Wanted, args, constants)
            }
            Op::Logits { x, linear, scale, softcap, out } => {
                let to = self.value(out, Write);
                self.product(at, ANY, x, linear, None, to, (scale, softcap))?;
                self.lower_copy(at, out, Place::Logits)
            }
            Op::Sample { logits } => self.lower_choice(at, logits),
            Op::HiddenOut { x } => self.lower_copy(at, x, Place::Hidden),
            Op::ShortConv { .. } | Op::MoeRoute { .. } | Op::MoeMlp { .. } => {
                Err(Error::unsupported(format!("metal: no kernel for {}", op.name())))
            }
        }
    }

    fn lower_norm(&mut self, at: u32, op: &Op, when: RangeInclusive<u32>) -> Result<()> {
        let Op::RmsNorm { x, weight, eps, residual, out } = *op else { return Ok(()) };
        let args = vec![
            self.value(x, Read),
            self.weight(weight),
            residual.and_then(|r| self.value(r, Read)),
            self.value(out, Write),
        ];
        let (width, residual) = (self.plan.width(x), u32::from(residual.is_some()));
        let constants = NormArgs { rows: 0, width, eps, residual }.words();
        let e = whole("rms_norm", [ROWS, ONE, ONE], policy::threads(width, 4));
        self.dispatch(at, Entry { when, ..e }, self.extent(x), args, constants)
    }

    fn dispatch(
        &mut self,
        op: u32,
        e: Entry<'_>,
        extent: Extent,
        args: Vec<Arg>,
        constants: Vec<u32>,
    ) -> Result<()> {
        let pipeline = self.device.pipeline(e.name, &e.constants)?;
        let span = Span { axes: e.axes, threads: e.threads };
        let (when, base_at) = (e.when, None);
        let command = Command { op, pipeline, args, constants, base_at, extent, when, span };
        self.out.commands.push(command);
        Ok(())
    }

    /// A product, for the rows of `when`: vectors, then small matrices, then tiles.
    #[allow(clippy::too_many_arguments, reason = "an op's fields")]
    fn product(
        &mut self,
        at: u32,
        when: RangeInclusive<u32>,
        x: ValueId,
        linear: Linear,
        residual: Option<ValueId>,
        out: Arg,
        (scale, softcap): (f32, Option<f32>),
    ) -> Result<()> {
        let w = &self.plan.weights[linear.weight.ix()];
        let (ty, outs, cols) = (w.ty, w.rows, w.cols);
        let args = vec![
            self.weight(linear.weight),
            self.value(x, Read),
            self.optional(linear.bias),
            residual.and_then(|r| self.value(r, Read)),
            out,
        ];
        let constants = MatmulArgs {
            rows: 0,
            cols,
            outs,
            bias: u32::from(linear.bias.is_some()),
            residual: u32::from(residual.is_some()),
            scale,
            softcap: softcap.unwrap_or(0.0),
        };
        let extent = self.extent(x);
        let mut all = |e: Entry<'_>| self.dispatch(at, e, extent, args.clone(), constants.words());
        let name = entry("matvec", ty);
        let tile = policy::matvec_tile(ty, outs, cols);
        for rows in *when.start()..=MATVEC_ROWS {
            all(vectors(&name, tile, outs.div_ceil(tile.outs), rows, false))?;
        }
        let name = entry("matmul_small", ty);
        let axes = [Axis::Fixed(outs.div_ceil(8)), Axis::RowsBy(16), ONE];
        let when = MATVEC_ROWS + 1..=SMALL_ROWS;
        all(Entry { when, ..whole(&name, axes, 128) })?;
        let name = entry("matmul_tiled", ty);
        let axes = [Axis::Fixed(outs.div_ceil(64)), Axis::RowsBy(32), ONE];
        all(Entry { when: SMALL_ROWS + 1..=u32::MAX, ..whole(&name, axes, 128) })
    }

    fn lower_qkv(&mut self, at: u32, op: &Op, norm: Option<Norm>) -> Result<()> {
        let Op::Qkv { x, q, k, v, q_out, k_out, v_out } = *op else { return Ok(()) };
        let [wq, wk, wv] = [q, k, v].map(|l| &self.plan.weights[l.weight.ix()]);
        let one = wq.ty == wk.ty && wq.ty == wv.ty;
        let (ty, cols, outs) = (wq.ty, wq.cols, [wq.rows, wk.rows, wv.rows]);
        if one {
            let args = vec![
                self.weight(q.weight),
                self.weight(k.weight),
                self.weight(v.weight),
                self.value(norm.map_or(x, |n| n.x), Read),
                self.optional(norm.map(|n| n.weight)),
                self.optional(q.bias),
                self.optional(k.bias),
                self.optional(v.bias),
                self.value(q_out, Write),
                self.value(k_out, Write),
                self.value(v_out, Write),
            ];
            let bit = |l: Linear, n: u32| u32::from(l.bias.is_some()) << n;
            let bias = bit(q, 0) | bit(k, 1) | bit(v, 2);
            let [q_outs, k_outs, v_outs] = outs;
            let eps = norm.map_or(0.0, |n| n.eps);
            let constants = QkvArgs { rows: 0, cols, q_outs, k_outs, v_outs, bias, eps };
            let (name, total) = (entry("qkv", ty), q_outs + k_outs + v_outs);
            let tile = policy::matvec_tile(ty, total, cols);
            let groups = outs.iter().map(|o| o.div_ceil(tile.outs)).sum();
            for rows in 1..=MATVEC_ROWS {
                let e = vectors(&name, tile, groups, rows, norm.is_some());
                self.dispatch(at, e, Extent::Rows, args.clone(), constants.words())?;
            }
        }
        let when = if one { MATVEC_ROWS + 1..=u32::MAX } else { ANY };
        for (linear, out) in [(q, q_out), (k, k_out), (v, v_out)] {
            let out = self.value(out, Write);
            self.product(at, when.clone(), x, linear, None, out, (1.0, None))?;
        }
        Ok(())
    }

    fn lower_gated(
        &mut self,
        at: u32,
        (x, norm): (ValueId, Option<Norm>),
        [gate, up]: [Linear; 2],
        act: Activation,
        out: ValueId,
    ) -> Result<()> {
        let w = &self.plan.weights[gate.weight.ix()];
        let (ty, outs, cols) = (w.ty, w.rows, w.cols);
        let args = |b: &Self, norm: Option<Norm>| {
            vec![
                b.weight(gate.weight),
                b.weight(up.weight),
                b.value(norm.map_or(x, |n| n.x), Read),
                b.optional(norm.map(|n| n.weight)),
                b.optional(gate.bias),
                b.optional(up.bias),
                b.value(out, Write),
            ]
        };
        let (act, alpha, limit) = match act {
            Activation::Silu => (0, 0.0, 0.0),
            Activation::GeluTanh => (1, 0.0, 0.0),
            Activation::SwigluClamped { alpha, limit } => (2, alpha, limit),
        };
        let bias = u32::from(gate.bias.is_some()) | u32::from(up.bias.is_some()) << 1;
        let eps = norm.map_or(0.0, |n| n.eps);
        let constants = GatedArgs { rows: 0, cols, outs, bias, act, alpha, limit, eps };
        let (name, extent) = (entry("gated_mlp", ty), self.extent(x));
        let tile = policy::matvec_tile(ty, outs, cols);
        let groups = outs.div_ceil(tile.outs);
        for rows in 1..=MATVEC_ROWS {
            let e = vectors(&name, tile, groups, rows, norm.is_some());
            self.dispatch(at, e, extent, args(self, norm), constants.words())?;
        }
        // More rows are multiplied as matrices, normed before.
        let many = MATVEC_ROWS + 1..=u32::MAX;
        let up_out = self.stage("gated inner rows", self.rows_max * outs as usize)?;
        let up_out = Place::Value(up_out, outs as usize);
        let out = self.value(out, Write);
        self.product(at, many.clone(), x, gate, None, out.clone(), (1.0, None))?;
        let to = Some((up_out.clone(), Write));
        self.product(at, many.clone(), x, up, None, to, (1.0, None))?;
        let e = Entry { when: many, ..whole("activate", elements(outs), 256) };
        self.dispatch(at, e, extent, vec![Some((up_out, Read)), out], constants.words())
    }

    fn lower_rope(
        &mut self,
        at: u32,
        op: &Op,
        x: ValueId,
        norm: Option<WeightId>,
        out: ValueId,
    ) -> Result<()> {
        let Op::QkNormRope { eps, rope, dim, .. } = *op else { return Ok(()) };
        let table = rope.map(|r| &self.plan.ropes[r.ix()]);
        let args = vec![
            self.value(x, Read),
            self.optional(norm),
            rope.map(|r| (Place::Fixed(self.ropes[r.ix()].all()), Read)),
            Some((Place::Rows, Read)),
            self.value(out, Write),
        ];
        let heads = self.plan.width(x) / dim;
        let constants = RopeArgs {
            rows: 0,
            heads,
            dim,
            norm: u32::from(norm.is_some()),
            eps,
            pairs: table.map_or(0, |t| t.inv_freq.len() as u32),
            halves: u32::from(table.is_some_and(|t| t.pairs == RopePairs::Halves)),
            magnitude: table.map_or(1.0, |t| t.magnitude),
        };
        let e = whole("norm_rope", [Axis::Fixed(heads.div_ceil(4)), ROWS, ONE], 128);
        self.dispatch(at, e, Extent::Rows, args, constants.words())
    }

    /// Norm, rotation and append at once.
    fn rope_write(&mut self, at: u32, op: &Op, v: ValueId, kv: KvRef) -> Result<()> {
        let Op::QkNormRope { q, k, q_norm, k_norm, eps, rope, dim, q_out, .. } = *op else {
            return Ok(());
        };
        let table = rope.map(|r| &self.plan.ropes[r.ix()]);
        let group = &self.plan.kv[kv.group as usize];
        let (keys, values) = self.out.pools[kv.group as usize][kv.layer as usize];
        let args = vec![
            self.value(q, Read),
            self.value(k, Read),
            self.value(v, Read),
            self.optional(q_norm),
            self.optional(k_norm),
            rope.map(|r| (Place::Fixed(self.ropes[r.ix()].all()), Read)),
            Some((Place::Rows, Read)),
            Some((Place::Table(kv.group as usize), Read)),
            self.value(q_out, Write),
            Some((Place::Fixed(keys.all()), Write)),
            Some((Place::Fixed(values.all()), Write)),
        ];
        let heads = self.plan.width(q) / dim;
        let constants = RopeWriteArgs {
            rows: 0,
            heads,
            kv_heads: group.heads,
            dim,
            v_width: group.v_width,
            q_norm: u32::from(q_norm.is_some()),
            k_norm: u32::from(k_norm.is_some()),
            eps,
            pairs: table.map_or(0, |t| t.inv_freq.len() as u32),
            halves: u32::from(table.is_some_and(|t| t.pairs == RopePairs::Halves)),
            magnitude: table.map_or(1.0, |t| t.magnitude),
            block: KV_BLOCK,
            stride: self.shape.stride as u32,
        };
        let groups = (heads + 2 * group.heads).div_ceil(4);
        let name = entry("rope_write", self.kv_type);
        let e = whole(&name, [Axis::Fixed(groups), ROWS, ONE], 128);
        self.dispatch(at, e, Extent::Rows, args, constants.words())
    }

    fn lower_kv_write(&mut self, at: u32, k: ValueId, v: ValueId, kv: KvRef) -> Result<()> {
        let (keys, values) = self.out.pools[kv.group as usize][kv.layer as usize];
        let args = vec![
            self.value(k, Read),
            self.value(v, Read),
            Some((Place::Rows, Read)),
            Some((Place::Table(kv.group as usize), Read)),
            Some((Place::Fixed(keys.all()), Write)),
            Some((Place::Fixed(values.all()), Write)),
        ];
        let (k_width, v_width) = (self.plan.width(k), self.plan.width(v));
        let stride = self.shape.stride as u32;
        let constants = KvWriteArgs { rows: 0, k_width, v_width, block: KV_BLOCK, stride };
        let name = entry("kv_write", self.kv_type);
        let e = whole(&name, elements(k_width.max(v_width)), 256);
        self.dispatch(at, e, Extent::Rows, args, constants.words())
    }

    fn lower_attention(&mut self, at: u32, op: &Op) -> Result<()> {
        let Op::Attention { q, kv, heads, scale, softcap, sinks, out } = *op else {
            return Ok(());
        };
        let group = &self.plan.kv[kv.group as usize];
        let (keys, values) = self.out.pools[kv.group as usize][kv.layer as usize];
        let splits = policy::splits(self.shape.stride as u32);
        let constants = AttentionArgs {
            rows: 0,
            heads,
            kv_heads: group.heads,
            k_width: group.k_width,
            v_width: group.v_width,
            block: KV_BLOCK,
            stride: self.shape.stride as u32,
            window: group.window.unwrap_or(0),
            scale,
            softcap: softcap.unwrap_or(0.0),
            sinks: u32::from(sinks.is_some()),
            splits,
        };
        let together = policy::heads_together(heads / group.heads);
        let each = vec![together, group.k_width.div_ceil(32), group.v_width.div_ceil(32)];
        let part = (heads * splits * (group.v_width + 2)) as usize;
        let rows = self.rows_max.min(SPLIT_ROWS as usize);
        let partials = self.stage("partial attention", rows * part)?;
        let rows = Some((Place::Rows, Read));
        let common = vec![
            self.value(q, Read),
            rows.clone(),
            Some((Place::Table(kv.group as usize), Read)),
            Some((Place::Fixed(keys.all()), Read)),
            Some((Place::Fixed(values.all()), Read)),
        ];
        let few = 1..=SPLIT_ROWS;
        let name = entry("attention_split", self.kv_type);
        let axes = [Axis::Fixed(splits), Axis::Fixed(heads / together), ROWS];
        let mut args = common.clone();
        args.push(Some((Place::Value(partials, part), Write)));
        let e =
            Entry { name: &name, constants: each.clone(), when: few.clone(), axes, threads: 32 };
        self.dispatch(at, e, Extent::Rows, args, constants.words())?;
        let args = vec![
            Some((Place::Value(partials, part), Read)),
            rows,
            self.optional(sinks),
            self.value(out, Write),
        ];
        let axes = [Axis::Fixed(heads), ROWS, ONE];
        let name = "attention_reduce";
        let e = Entry { name, constants: each.clone(), when: few, axes, threads: 32 };
        self.dispatch(at, e, Extent::Rows, args, constants.words())?;
        let name = entry("attention_tiled", self.kv_type);
        let mut args = common;
        args.extend([self.optional(sinks), self.value(out, Write)]);
        let (axes, when) = ([Axis::Fixed(heads), Axis::RowsBy(8), ONE], SPLIT_ROWS + 1..=u32::MAX);
        let e = Entry { name: &name, constants: each, when, axes, threads: 256 };
        self.dispatch(at, e, Extent::Rows, args, constants.words())
    }

    fn lower_choice(&mut self, at: u32, logits: ValueId) -> Result<()> {
        let vocab = self.plan.width(logits);
        let parts = policy::argmax_parts(vocab);
        let stage = self.stage("parts of a choice", self.rows_max * parts as usize * 4)?;
        let place = Place::Value(stage, parts as usize * 4);
        let args = vec![self.value(logits, Read), Some((place.clone(), Write))];
        let constants = PartsArgs { rows: 0, vocab, parts }.words();
        let e = whole("argmax_parts", [Axis::Fixed(parts), ROWS, ONE], 256);
        self.dispatch(at, e, Extent::Wanted, args, constants)?;
        let args = vec![
            Some((place, Read)),
            Some((Place::Wanted, Read)),
            Some((Place::AllRows, Write)),
            Some((Place::Fixed(self.out.last.all()), Write)),
            Some((Place::Stops, Read)),
            Some((Place::Fixed(self.out.stop.all()), Read)),
            Some((Place::Out, Write)),
        ];
        let (first, next) = self.shape.out_counts();
        let (out_first, out_next) = (first as u32, next as u32);
        let constants = PickArgs { rows: 0, base: 0, out_first, out_next, parts }.words();
        let e = whole("argmax_pick", [ROWS, ONE, ONE], 32);
        self.dispatch(at, e, Extent::Wanted, args, constants)?;
        if let Some(command) = self.out.commands.last_mut() {
            command.base_at = Some(1);
        }
        Ok(())
    }

    fn lower_copy(&mut self, at: u32, x: ValueId, to: Place) -> Result<()> {
        let args = vec![self.value(x, Read), Some((to, Write))];
        let width = self.plan.width(x);
        let constants = CopyArgs { rows: 0, width }.words();
        let e = whole("copy", elements(width), 256);
        self.dispatch(at, e, Extent::FirstWanted, args, constants)
    }

    /// Memory between two stages, shared by all that need no more of it.
    fn stage(&mut self, name: &'static str, words: usize) -> Result<Buffer> {
        let fits = |(n, b): &&(&str, Buffer)| *n == name && b.len_bytes >= 4 * words;
        if let Some((_, buffer)) = self.stages.iter().find(fits) {
            return Ok(*buffer);
        }
        let buffer = self.device.buffer(name, words)?;
        self.out.scratch_bytes += 4 * words as u64;
        self.stages.push((name, buffer));
        Ok(buffer)
    }
}

fn whole(name: &str, axes: [Axis; 3], threads: u32) -> Entry<'_> {
    Entry { name, constants: Vec::new(), when: ANY, axes, threads }
}

/// A kernel of the matvec family for so many rows and no others.
fn vectors(name: &str, tile: Tile, groups: u32, rows: u32, normed: bool) -> Entry<'_> {
    Entry {
        name,
        constants: vec![tile.outs, rows, tile.simds, u32::from(normed)],
        when: rows..=rows,
        axes: [Axis::Fixed(groups), Axis::RowsBy(rows), ONE],
        threads: 32 * tile.simds,
    }
}

/// A thread an element of a row, 256 in a threadgroup.
fn elements(width: u32) -> [Axis; 3] {
    [Axis::Fixed(width.div_ceil(256)), ROWS, ONE]
}
