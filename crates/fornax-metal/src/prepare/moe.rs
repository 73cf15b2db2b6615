//! Mixtures of experts as dispatches: the scores, the choice, the chosen experts' two products. It
//! knows no dense layer.

use fornax_plan::{Gating, Op, Result};

use super::linear::variant;
use super::lower::{ANY, Entry, ONE, ROWS, whole};
use super::{Arg, Builder};
use crate::args::{DownArgs, ExpertArgs, RouteArgs};
use crate::encode::{Axis, Place};
use crate::hazard::Access::{Read, Write};
use crate::library::numbered;

/// Experts of a mixture, and of them chosen, that the kernel of the choice holds.
pub(super) const EXPERTS_MAX: u32 = 1024;
pub(super) const CHOSEN_MAX: u32 = 32;

impl Builder<'_> {
    pub(super) fn lower_route(&mut self, at: u32, op: &Op) -> Result<()> {
        let Op::MoeRoute { x, router, top_k, gating, ids, weights } = *op else { return Ok(()) };
        let experts = self.plan.weights[router.weight.ix()].rows;
        let scores = self.stage("scores of experts", self.rows_max * experts as usize)?;
        let scores = Place::Value(scores, experts as usize);
        let to = Some((scores.clone(), Write));
        self.product(at, ANY, x, router, None, to, (1.0, None))?;
        let args = vec![Some((scores, Read)), self.index(ids, Write), self.value(weights, Write)];
        let normalise = u32::from(gating != Gating::SoftmaxThenTopK { normalise: false });
        let constants = RouteArgs { rows: 0, experts, top_k, normalise }.words();
        let e = whole("moe_route", [ROWS, ONE, ONE], 32);
        self.dispatch(at, e, self.extent(x), (args, constants))
    }

    pub(super) fn lower_experts(&mut self, at: u32, op: &Op) -> Result<()> {
        let Op::MoeMlp { x, ids, weights, gate, up, down, act, residual, out } = *op else {
            return Ok(());
        };
        let extent = self.extent(x);
        let [wg, wu, wd] = [gate, up, down].map(|l| &self.plan.weights[l.weight.ix()]);
        let (experts, top_k) = (wg.experts, self.plan.width(ids));
        let inner = (top_k * wg.rows) as usize;
        let inner = Place::Value(self.stage("experts' inner rows", self.rows_max * inner)?, inner);
        let args: Vec<Arg> = vec![
            self.weight(gate.weight),
            self.weight(up.weight),
            self.value(x, Read),
            self.index(ids, Read),
            self.optional(gate.bias),
            self.optional(up.bias),
            Some((inner.clone(), Write)),
        ];
        let g = self.gated_args(gate, up, act, 0.0);
        let constants = ExpertArgs {
            rows: 0,
            cols: g.cols,
            outs: g.outs,
            bias: g.bias,
            act: g.act,
            alpha: g.alpha,
            limit: g.limit,
            eps: g.eps,
            top_k,
            experts,
        };
        let tile = self.policy.matvec_tile(wg.ty, wg.rows, wg.cols);
        let e = Entry {
            name: "moe_gated",
            constants: numbered(&[wg.ty, wu.ty], &variant(tile, 1, false)),
            when: ANY,
            axes: [Axis::Fixed(wg.rows.div_ceil(tile.outs)), Axis::RowsTimes(top_k), ONE],
            threads: 32 * tile.simds,
        };
        self.dispatch(at, e, extent, (args, constants.words()))?;
        let args = vec![
            self.weight(down.weight),
            Some((inner, Read)),
            self.index(ids, Read),
            self.value(weights, Read),
            self.optional(down.bias),
            residual.and_then(|r| self.value(r, Read)),
            self.value(out, Write),
        ];
        let constants = DownArgs {
            rows: 0,
            cols: wd.cols,
            outs: wd.rows,
            top_k,
            experts,
            bias: u32::from(down.bias.is_some()),
            residual: u32::from(residual.is_some()),
        };
        let tile = self.policy.matvec_tile(wd.ty, wd.rows, wd.cols);
        let e = Entry {
            name: "moe_down",
            constants: numbered(&[wd.ty], &variant(tile, 1, false)),
            when: ANY,
            axes: [Axis::Fixed(wd.rows.div_ceil(tile.outs)), ROWS, ONE],
            threads: 32 * tile.simds,
        };
        self.dispatch(at, e, extent, (args, constants.words()))
    }
}
