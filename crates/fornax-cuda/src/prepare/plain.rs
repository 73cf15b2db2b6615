//! Ops as launches of the plain kernels, one or a few for each. It knows no fast path.

use fornax_plan::{
    Activation, KvRef, Linear, Op, Result, RopePairs, StateId, ValueId, WeightId, q8,
};

use super::{Builder, Extent, Grid, KV_BLOCK, Place, WARPS};
use crate::args::families::{ConvArgs, RoundedArgs};
use crate::args::{AttentionArgs, GatedArgs, KvWriteArgs, MatmulArgs, RopeArgs};
use crate::fast::Addresses;
use crate::kernels::entry;

impl Builder<'_> {
    pub(super) fn matmul(
        &mut self,
        at: u32,
        x: ValueId,
        linear: Linear,
        residual: Option<Place>,
        out: Place,
        (scale, softcap): (f32, Option<f32>),
    ) -> Result<()> {
        let x_at = self.seen_by(at, x, linear.weight)?;
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
            x_at,
            self.optional(linear.bias),
            residual.unwrap_or(Place::At(0)),
            out,
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
        let extent = self.extent(x);
        let (act, alpha, limit) = activation(act);
        if w.ty != self.plan.weights[up.weight.ix()].ty {
            let outs = w.rows;
            let places = [("gate", gate), ("up", up)].map(|(what, linear)| {
                let to = self.scratch(what, extent, outs)?;
                self.matmul(at, x, linear, None, to, (1.0, None))?;
                Ok(to)
            });
            let [g, u] = places;
            let constants = GatedArgs { rows: 0, cols: 0, outs, bias: 0, act, alpha, limit };
            let shape = (Grid::ByRow(outs.div_ceil(256)), 256, extent);
            let places = vec![g?, u?, self.value(out)];
            return self.push(at, ("convert", "activate_rows"), shape, constants.words(), places);
        }
        let x_at = self.seen_by(at, x, gate.weight)?;
        let bias = u32::from(gate.bias.is_some()) | u32::from(up.bias.is_some()) << 1;
        let (cols, outs) = (w.cols, w.rows);
        let constants = GatedArgs { rows: 0, cols, outs, bias, act, alpha, limit };
        let places = vec![
            self.weight(gate.weight),
            self.weight(up.weight),
            x_at,
            self.optional(gate.bias),
            self.optional(up.bias),
            self.value(out),
        ];
        let shape = (Grid::ByTile(outs.div_ceil(WARPS)), 32 * WARPS, extent);
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

    /// The value as a matrix of this weight's format sees it: rounded to 8-bit blocks where that is the mode.
    pub(super) fn seen_by(&mut self, at: u32, x: ValueId, weight: WeightId) -> Result<Place> {
        let (extent, width) = (self.extent(x), self.plan.width(x));
        if !self.sees_blocks(weight) {
            return Ok(self.value(x));
        }
        let to = self.scratch("rounded", extent, width)?;
        self.round(at, (self.value(x), to), (1, width), extent)?;
        Ok(to)
    }

    /// Whether a matrix's activations are rounded.
    pub(super) fn sees_blocks(&self, weight: WeightId) -> bool {
        self.rounds && q8::applies_to(self.plan.weights[weight.ix()].ty)
    }

    /// Rounds `each` rows of `width` for each row.
    pub(super) fn round(
        &mut self,
        at: u32,
        (from, to): (Place, Place),
        (each, width): (u32, u32),
        extent: Extent,
    ) -> Result<()> {
        let constants = RoundedArgs { rows: 0, width }.words();
        let grid = Grid::ByPick(width.div_ceil(32).div_ceil(WARPS), each);
        let shape = (grid, 32 * WARPS, extent);
        self.push(at, ("convert", "round_rows"), shape, constants, vec![from, to])
    }

    pub(super) fn short_conv(
        &mut self,
        at: u32,
        x: ValueId,
        kernel: WeightId,
        state: StateId,
        out: ValueId,
    ) -> Result<()> {
        let (width, taps) = (self.plan.width(out), self.plan.weights[kernel.ix()].cols);
        let constants = ConvArgs { rows: 0, width, taps, tile: CONV_TILE.max(taps) }.words();
        let state = Place::At(self.out.states[state.ix()].ptr);
        let places = vec![self.value(x), self.weight(kernel), Place::Rows, state, self.value(out)];
        let shape = (Grid::ByRow(width.div_ceil(256)), 256, Extent::Rows);
        self.push(at, ("conv", "short_conv"), shape, constants, places)
    }
}

/// Rows of a sequence that one thread of a convolution takes, where the taps are no more.
const CONV_TILE: u32 = 8;

/// The number of an activation, and its two constants.
pub(super) fn activation(act: Activation) -> (u32, f32, f32) {
    match act {
        Activation::Silu => (0, 0.0, 0.0),
        Activation::GeluTanh => (1, 0.0, 0.0),
        Activation::SwigluClamped { alpha, limit } => (2, alpha, limit),
    }
}
