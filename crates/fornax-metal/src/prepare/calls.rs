//! Arguments and constants of kernels, as their sources declare them. It knows no grid.

use fornax_plan::{Activation, KvRef, Linear, Op, RopePairs, ValueId, WeightId};

use super::{Arg, Builder, KV_BLOCK};
use crate::args::{
    AttentionArgs, CopyArgs, EmbedArgs, GatedArgs, KvWriteArgs, MatmulArgs, NormArgs, RopeArgs,
    SelectArgs,
};
use crate::encode::{Place, Pools};
use crate::hazard::Access::{self, Read, Write};
use crate::pieces::PIECES_MAX;

/// Arguments by slot, and constants.
pub(super) type Call = (Vec<Arg>, Vec<u32>);

impl Builder<'_> {
    pub(super) fn embed_call(&self, table: WeightId, scale: f32, out: ValueId) -> Call {
        let w = &self.plan.weights[table.ix()];
        let args = vec![
            self.weight(table),
            Some((Place::Rows, Read)),
            Some((Place::Fixed(self.out.last.all()), Read)),
            self.value(out, Write),
            Some((Place::Fixed(self.history.all()), Write)),
        ];
        let stride = self.shape.remembered as u32;
        (args, EmbedArgs { rows: 0, width: w.cols, vocab: w.rows, scale, stride }.words())
    }

    pub(super) fn norm_call(
        &self,
        x: ValueId,
        weight: WeightId,
        eps: f32,
        residual: Option<ValueId>,
        out: ValueId,
    ) -> Call {
        let args = vec![
            self.value(x, Read),
            self.weight(weight),
            residual.and_then(|r| self.value(r, Read)),
            self.value(out, Write),
        ];
        let (width, residual) = (self.plan.width(x), u32::from(residual.is_some()));
        (args, NormArgs { rows: 0, width, eps, residual }.words())
    }

    pub(super) fn matmul_call(
        &self,
        x: ValueId,
        linear: Linear,
        residual: Option<ValueId>,
        out: Arg,
        (scale, softcap): (f32, Option<f32>),
    ) -> Call {
        let w = &self.plan.weights[linear.weight.ix()];
        let args = vec![
            self.weight(linear.weight),
            self.value(x, Read),
            self.optional(linear.bias),
            residual.and_then(|r| self.value(r, Read)),
            out,
        ];
        let constants = MatmulArgs {
            rows: 0,
            cols: w.cols,
            outs: w.rows,
            bias: u32::from(linear.bias.is_some()),
            residual: u32::from(residual.is_some()),
            scale,
            softcap: softcap.unwrap_or(0.0),
        };
        (args, constants.words())
    }

    pub(super) fn gated_args(
        &self,
        gate: Linear,
        up: Linear,
        act: Activation,
        eps: f32,
    ) -> GatedArgs {
        let w = &self.plan.weights[gate.weight.ix()];
        let (act, alpha, limit) = match act {
            Activation::Silu => (0, 0.0, 0.0),
            Activation::GeluTanh => (1, 0.0, 0.0),
            Activation::SwigluClamped { alpha, limit } => (2, alpha, limit),
        };
        let bias = u32::from(gate.bias.is_some()) | u32::from(up.bias.is_some()) << 1;
        GatedArgs { rows: 0, cols: w.cols, outs: w.rows, bias, act, alpha, limit, eps }
    }

    /// `op` is a [`Op::QkNormRope`], `x` its queries or keys.
    pub(super) fn rope_call(
        &self,
        op: &Op,
        x: ValueId,
        norm: Option<WeightId>,
        out: ValueId,
    ) -> Call {
        let Op::QkNormRope { eps, rope, dim, .. } = *op else { return (Vec::new(), Vec::new()) };
        let table = rope.map(|r| &self.plan.ropes[r.ix()]);
        let args = vec![
            self.value(x, Read),
            self.optional(norm),
            rope.map(|r| (Place::Fixed(self.ropes[r.ix()].all()), Read)),
            Some((Place::Rows, Read)),
            self.value(out, Write),
        ];
        let constants = RopeArgs {
            rows: 0,
            heads: self.plan.width(x) / dim,
            dim,
            norm: u32::from(norm.is_some()),
            eps,
            pairs: table.map_or(0, |t| t.inv_freq.len() as u32),
            halves: u32::from(table.is_some_and(|t| t.pairs == RopePairs::Halves)),
            magnitude: table.map_or(1.0, |t| t.magnitude),
        };
        (args, constants.words())
    }

    pub(super) fn kv_write_call(&self, k: ValueId, v: ValueId, kv: KvRef) -> (Call, Pools) {
        let mut args = vec![
            self.value(k, Read),
            self.value(v, Read),
            Some((Place::Rows, Read)),
            Some((Place::Table(kv.group as usize), Read)),
        ];
        let pools = self.pools(&mut args, kv, Write);
        let (k_width, v_width) = (self.plan.width(k), self.plan.width(v));
        let stride = self.shape.stride as u32;
        let constants = KvWriteArgs { rows: 0, k_width, v_width, block: KV_BLOCK, stride };
        ((args, constants.words()), pools)
    }

    /// Appends a layer's pools to the arguments, in all the pieces that they can have.
    pub(super) fn pools(&self, args: &mut Vec<Arg>, kv: KvRef, access: Access) -> Pools {
        let at = [args.len(), args.len() + PIECES_MAX];
        for pool in &self.out.pools[kv.group as usize][kv.layer as usize] {
            let start = args.len();
            args.extend(pool.pieces.iter().map(|b| Some((Place::Fixed(b.all()), access))));
            args.resize(start + PIECES_MAX, None);
        }
        Pools { group: kv.group, layer: kv.layer, keys: at[0], values: at[1] }
    }

    /// What attention reads, and its constants for so many shares of the keys.
    pub(super) fn attention_call(&self, op: &Op, splits: u32) -> Option<(Call, Pools)> {
        let Op::Attention { q, kv, heads, scale, softcap, sinks, .. } = *op else { return None };
        let group = &self.plan.kv[kv.group as usize];
        let mut args = vec![
            self.value(q, Read),
            Some((Place::Rows, Read)),
            Some((Place::Table(kv.group as usize), Read)),
        ];
        let pools = self.pools(&mut args, kv, Read);
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
        Some(((args, constants.words()), pools))
    }

    pub(super) fn select_call(&self, x: ValueId, out: ValueId) -> Call {
        // Any row may be chosen, so the whole buffer is read.
        let all = self.buffers[self.values.ix(x)].all();
        let args = vec![
            Some((Place::Fixed(all), Read)),
            Some((Place::Wanted, Read)),
            self.value(out, Write),
        ];
        (args, SelectArgs { rows: 0, width: self.plan.width(x) }.words())
    }

    pub(super) fn copy_call(&self, x: ValueId, to: Place) -> Call {
        let args = vec![self.value(x, Read), Some((to, Write))];
        (args, CopyArgs { rows: 0, width: self.plan.width(x) }.words())
    }

    /// What chooses a token and feeds it back, after the logits or what was made of them.
    pub(super) fn choice_args(&self, from: Arg) -> Vec<Arg> {
        vec![
            from,
            Some((Place::Wanted, Read)),
            Some((Place::AllRows, Write)),
            Some((Place::Fixed(self.out.last.all()), Write)),
            Some((Place::Stops, Read)),
            Some((Place::Fixed(self.out.stop.all()), Read)),
            Some((Place::Out, Write)),
        ]
    }
}
