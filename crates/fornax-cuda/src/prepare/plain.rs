//! Ops as launches of the plain kernels, one or a few for each. It knows no fast path.

use fornax_plan::{Activation, KvRef, Linear, Op, Result, RopePairs, ValueId, WeightId};

use super::{Action, Builder, Extent, Grid, KV_BLOCK, Place, WARPS};
use crate::args::{ArgmaxArgs, AttentionArgs, GatedArgs, KvWriteArgs, MatmulArgs, RopeArgs};
use crate::fast::Addresses;
use crate::kernels::entry;

impl Builder<'_> {
    pub(super) fn matmul(
        &mut self,
        at: u32,
        x: ValueId,
        linear: Linear,
        residual: Option<ValueId>,
        out: ValueId,
        (scale, softcap): (f32, Option<f32>),
    ) -> Result<()> {
        let w = &self.plan.weights[linear.weight.ix()];
        let constants = MatmulArgs {
            rows: 0,
            cols: w.cols,
            outs: w.rows,
            bias: u32::from(linear.bias.is_some()),
            residual: u32::from(residual.is_some()),
            scale,
            softcap: softcap.unwrap_or(0.0),
        };
        let places = vec![
            self.weight(linear.weight),
            self.value(x),
            self.optional(linear.bias),
            self.optional_value(residual),
            self.value(out),
        ];
        let shape = (Grid::ByTile(w.rows.div_ceil(WARPS)), 32 * WARPS, self.extent(x));
        let name = entry("matmul", w.ty);
        self.push(at, ("matmul", &name), shape, constants.words(), places)
    }

    pub(super) fn gated(
        &mut self,
        at: u32,
        x: ValueId,
        [gate, up]: [Linear; 2],
        act: Activation,
        out: ValueId,
    ) -> Result<()> {
        let w = &self.plan.weights[gate.weight.ix()];
        let (act, alpha, limit) = match act {
            Activation::Silu => (0, 0.0, 0.0),
            Activation::GeluTanh => (1, 0.0, 0.0),
            Activation::SwigluClamped { alpha, limit } => (2, alpha, limit),
        };
        let bias = u32::from(gate.bias.is_some()) | u32::from(up.bias.is_some()) << 1;
        let (cols, outs) = (w.cols, w.rows);
        let constants = GatedArgs { rows: 0, cols, outs, bias, act, alpha, limit };
        let places = vec![
            self.weight(gate.weight),
            self.weight(up.weight),
            self.value(x),
            self.optional(gate.bias),
            self.optional(up.bias),
            self.value(out),
        ];
        let shape = (Grid::ByTile(outs.div_ceil(WARPS)), 32 * WARPS, self.extent(x));
        let name = entry("gated_mlp", w.ty);
        self.push(at, ("gated_mlp", &name), shape, constants.words(), places)
    }

    pub(super) fn norm_rope(
        &mut self,
        at: u32,
        op: &Op,
        x: ValueId,
        norm: Option<WeightId>,
        out: ValueId,
    ) -> Result<()> {
        let Op::QkNormRope { eps, rope, dim, .. } = *op else { return Ok(()) };
        let table = rope.map(|r| &self.plan.ropes[r.ix()]);
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
        let places = vec![
            self.value(x),
            self.optional(norm),
            Place::At(rope.map_or(0, |r| self.places.ropes[r.ix()])),
            Place::Rows,
            self.value(out),
        ];
        let shape = (Grid::ByRow(heads.div_ceil(WARPS)), 32 * WARPS, Extent::Rows);
        self.push(at, ("norm", "norm_rope"), shape, constants.words(), places)
    }

    pub(super) fn pool(&self, kv: KvRef) -> [Place; 2] {
        self.places.pool(kv).map(Place::At)
    }

    pub(super) fn kv_write(&mut self, at: u32, k: ValueId, v: ValueId, kv: KvRef) -> Result<()> {
        let [keys, values] = self.pool(kv);
        let constants = KvWriteArgs {
            rows: 0,
            k_width: self.plan.width(k),
            v_width: self.plan.width(v),
            block: KV_BLOCK,
            stride: self.shape.stride as u32,
            tokens: self.limits.kv_blocks * KV_BLOCK,
        };
        let tables = self.words(self.shape.tables(kv.group as usize));
        let places = vec![self.value(k), self.value(v), Place::Rows, tables, keys, values];
        let name = entry("kv_write", self.kv_type);
        let shape = (Grid::Rows, 128, Extent::Rows);
        self.push(at, ("attention", &name), shape, constants.words(), places)
    }

    pub(super) fn attention(&mut self, at: u32, op: &Op) -> Result<()> {
        let Op::Attention { q, kv, heads, scale, softcap, sinks, out } = *op else {
            return Ok(());
        };
        let group = &self.plan.kv[kv.group as usize];
        let [keys, values] = self.pool(kv);
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
            tokens: self.limits.kv_blocks * KV_BLOCK,
        };
        let tables = self.words(self.shape.tables(kv.group as usize));
        let places = vec![
            self.value(q),
            Place::Rows,
            tables,
            keys,
            values,
            self.optional(sinks),
            self.value(out),
        ];
        let name = entry("attention", self.kv_type);
        let shape = (Grid::ByRow(heads), 128, Extent::Rows);
        self.push(at, ("attention", &name), shape, constants.words(), places)
    }

    pub(super) fn argmax(&mut self, at: u32, logits: ValueId) -> Result<()> {
        let (first, next) = self.shape.out_counts();
        let constants = ArgmaxArgs {
            rows: 0,
            vocab: self.plan.width(logits),
            base: 0,
            out_first: first as u32,
            out_next: next as u32,
        };
        let places = vec![
            self.value(logits),
            Place::Wanted,
            self.words(self.shape.all_rows()),
            Place::At(self.out.last),
            self.words(self.shape.stops()),
            Place::At(self.out.stop.ptr),
            Place::At(self.out.out.ptr),
        ];
        let from = self.places.value(logits);
        self.out.actions.push(Action::CopyLogits { from });
        let shape = (Grid::Rows, 1024, Extent::Wanted);
        self.push(at, ("choose", "argmax"), shape, constants.words(), places)?;
        if let Some(Action::Launch { base_at, .. }) = self.out.actions.last_mut() {
            *base_at = Some(2);
        }
        Ok(())
    }
}
