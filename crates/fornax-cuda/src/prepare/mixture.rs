//! Mixtures of experts as launches of the plain kernels: the choice, then the chosen experts' layers pick by pick. It knows
//! no step.

use fornax_plan::{Gating, Op, Result, WeightId};

use super::plain::activation;
use super::{Builder, Extent, Grid, Place, WARPS};
use crate::args::families::{ExpertArgs, MoeActArgs, MoeSumArgs, RouteArgs};
use crate::kernels::entry;

/// What a product of picks reads and writes; `each` picks read one row.
struct Product {
    weight: WeightId,
    x: Place,
    ids: Place,
    out: Place,
    top_k: u32,
    each: u32,
}

impl Builder<'_> {
    pub(super) fn moe_route(&mut self, at: u32, op: &Op) -> Result<()> {
        let Op::MoeRoute { x, router, top_k, gating, ids, weights } = *op else { return Ok(()) };
        let experts = self.plan.weights[router.weight.ix()].rows;
        let scores = self.scratch("scores", Extent::Rows, experts)?;
        self.matmul(at, x, router, None, scores, (1.0, None))?;
        // The softmax of the best few is that of all, divided by what they have of it.
        let normalise = u32::from(gating != Gating::SoftmaxThenTopK { normalise: false });
        let constants = RouteArgs { rows: 0, experts, top_k, normalise }.words();
        let places = vec![scores, self.value(ids), self.value(weights)];
        self.push(at, ("moe", "moe_route"), (Grid::Rows, 32, Extent::Rows), constants, places)
    }

    pub(super) fn moe(&mut self, at: u32, op: &Op) -> Result<()> {
        let Op::MoeMlp { x, ids, weights, gate, up, down, act, residual, out } = *op else {
            return Ok(());
        };
        let top_k = self.plan.width(ids);
        let w = &self.plan.weights[gate.weight.ix()];
        let (ff, experts, width) = (w.rows, w.experts, self.plan.width(out));
        let ids = self.value(ids);
        let mut parts = [Place::At(0); 2];
        for (ix, (what, linear)) in [("gate", gate), ("up", up)].into_iter().enumerate() {
            let x = self.seen_by(at, x, linear.weight)?;
            parts[ix] = self.scratch(what, Extent::Rows, top_k * ff)?;
            let (weight, out) = (linear.weight, parts[ix]);
            self.product(at, &Product { weight, x, ids, out, top_k, each: top_k })?;
        }
        let [inner, other] = parts;
        let (act, alpha, limit) = activation(act);
        let bias = u32::from(gate.bias.is_some()) | u32::from(up.bias.is_some()) << 1;
        let constants = MoeActArgs { rows: 0, outs: ff, experts, bias, act, alpha, limit }.words();
        let places = vec![inner, other, ids, self.optional(gate.bias), self.optional(up.bias)];
        let shape = (Grid::ByPick(ff.div_ceil(256), top_k), 256, Extent::Rows);
        self.push(at, ("moe", "moe_act"), shape, constants, places)?;
        if self.sees_blocks(down.weight) {
            self.round(at, (inner, inner), (top_k, ff), Extent::Rows)?;
        }
        let sums = self.scratch("down", Extent::Rows, top_k * width)?;
        let (weight, x, out_at) = (down.weight, inner, sums);
        self.product(at, &Product { weight, x, ids, out: out_at, top_k, each: 1 })?;
        let constants = MoeSumArgs {
            rows: 0,
            outs: width,
            top_k,
            experts,
            bias: u32::from(down.bias.is_some()),
            residual: u32::from(residual.is_some()),
        };
        let places = vec![
            sums,
            ids,
            self.value(weights),
            self.optional(down.bias),
            self.optional_value(residual),
            self.value(out),
        ];
        let shape = (Grid::ByRow(width.div_ceil(256)), 256, Extent::Rows);
        self.push(at, ("moe", "moe_sum"), shape, constants.words(), places)
    }

    fn product(&mut self, at: u32, p: &Product) -> Result<()> {
        let w = &self.plan.weights[p.weight.ix()];
        let (cols, outs, experts) = (w.cols, w.rows, w.experts);
        let name = entry("moe_product", w.ty);
        let constants = ExpertArgs { rows: 0, cols, outs, experts, each: p.each }.words();
        let places = vec![self.weight(p.weight), p.x, p.ids, p.out];
        let shape = (Grid::ByPick(outs.div_ceil(WARPS), p.top_k), 32 * WARPS, Extent::Rows);
        self.push(at, ("moe", &name), shape, constants, places)
    }
}
