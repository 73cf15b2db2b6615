//! Mixtures of experts as dispatches: the scores, the choice, the chosen experts' two products. It
//! knows no dense layer.

use std::ops::RangeInclusive;

use fornax_gguf::TensorType;
use fornax_plan::{Gating, Op, Result};

use super::linear::variant;
use super::lower::{ANY, Entry, ONE, ROWS, elements, whole};
use super::{Arg, Builder};
use crate::args::{
    DownArgs, ExpertArgs, GatedArgs, GroupArgs, GroupedArgs, GroupedDownArgs, RouteArgs,
};
use crate::encode::{Axis, Extent, Place};
use crate::hazard::Access::{Read, Write};
use crate::library::numbered;
use crate::policy::MATVEC_ROWS;

/// Experts of a mixture, and of them chosen, that the kernel of the choice holds.
pub(super) const EXPERTS_MAX: u32 = 1024;
pub(super) const CHOSEN_MAX: u32 = 32;
/// Rows of one expert that are multiplied together.
const PICKS: u32 = 16;

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
        let Op::MoeMlp { x, ids, gate, up, down, .. } = *op else { return Ok(()) };
        let [wg, wu, wd] = [gate, up, down].map(|l| &self.plan.weights[l.weight.ix()]);
        let m = Mixture {
            types: [wg.ty, wu.ty, wd.ty],
            experts: wg.experts,
            top_k: self.plan.width(ids),
            inner: wg.rows,
            cols: wg.cols,
            outs: wd.rows,
            extent: self.extent(x),
        };
        let from = grouped_from(m.experts, m.top_k);
        let few = if !self.deterministic && self.rows_max >= from as usize && self.groups_fit(&m)? {
            self.grouped(at, op, &m, from..=u32::MAX)?;
            1..=from - 1
        } else {
            ANY
        };
        self.chosen(at, op, &m, few)
    }

    /// Each row by its experts' matrices, as vectors are multiplied.
    fn chosen(&mut self, at: u32, op: &Op, m: &Mixture, when: RangeInclusive<u32>) -> Result<()> {
        let Op::MoeMlp { x, ids, weights, gate, up, down, act, residual, out } = *op else {
            return Ok(());
        };
        let inner = self.experts_inner(m)?;
        let args: Vec<Arg> = vec![
            self.weight(gate.weight),
            self.weight(up.weight),
            self.value(x, Read),
            self.index(ids, Read),
            self.optional(gate.bias),
            self.optional(up.bias),
            Some((inner.clone(), Write)),
        ];
        let GatedArgs { rows, cols, outs, bias, act, alpha, limit, eps } =
            self.gated_args(gate, up, act, 0.0);
        let (top_k, experts) = (m.top_k, m.experts);
        let constants =
            ExpertArgs { rows, cols, outs, bias, act, alpha, limit, eps, top_k, experts }.words();
        let tile = self.policy.matvec_tile(m.types[0], m.inner, m.cols);
        let e = Entry {
            name: "moe_gated",
            constants: numbered(&m.types[..2], &variant(tile, 1, false)),
            when: when.clone(),
            axes: [Axis::Fixed(m.inner.div_ceil(tile.outs)), Axis::RowsTimes(m.top_k), ONE],
            threads: 32 * tile.simds,
            pools: None,
            work: None,
            parts: None,
        };
        self.dispatch(at, e, m.extent, (args, constants))?;
        let args = vec![
            self.weight(down.weight),
            Some((inner, Read)),
            self.index(ids, Read),
            self.value(weights, Read),
            self.optional(down.bias),
            residual.and_then(|r| self.value(r, Read)),
            self.value(out, Write),
        ];
        let constants = down_args(m, down.bias.is_some(), residual.is_some());
        let tile = self.policy.matvec_tile(m.types[2], m.outs, m.inner);
        let e = Entry {
            name: "moe_down",
            constants: numbered(&m.types[2..], &variant(tile, 1, false)),
            when,
            axes: [Axis::Fixed(m.outs.div_ceil(tile.outs)), ROWS, ONE],
            threads: 32 * tile.simds,
            pools: None,
            work: None,
            parts: None,
        };
        self.dispatch(at, e, m.extent, (args, constants.words()))
    }

    /// The rows of each expert together, as matrices are multiplied.
    fn grouped(&mut self, at: u32, op: &Op, m: &Mixture, when: RangeInclusive<u32>) -> Result<()> {
        let Op::MoeMlp { x, ids, weights, gate, up, down, act, residual, out } = *op else {
            return Ok(());
        };
        let picks = self.rows_max * m.top_k as usize;
        let tiles = picks as u32 / PICKS + m.experts;
        let groups = self.stage("picks by expert", 1 + 3 * tiles as usize + picks)?;
        let groups = Place::Fixed(groups.all());
        let args = vec![self.index(ids, Read), Some((groups.clone(), Write))];
        let (experts, top_k) = (m.experts, m.top_k);
        let constants = GroupArgs { rows: 0, experts, top_k, tiles }.words();
        let e = whole("moe_group", [ONE; 3], experts.next_multiple_of(32));
        self.dispatch(at, Entry { when: when.clone(), ..e }, m.extent, (args, constants))?;

        let inner = self.experts_inner(m)?;
        let args = vec![
            self.weight(gate.weight),
            self.weight(up.weight),
            self.value(x, Read),
            Some((groups.clone(), Read)),
            self.optional(gate.bias),
            self.optional(up.bias),
            Some((inner.clone(), Write)),
        ];
        let GatedArgs { rows, cols, outs, bias, act, alpha, limit, eps } =
            self.gated_args(gate, up, act, 0.0);
        let constants =
            GroupedArgs { rows, cols, outs, bias, act, alpha, limit, eps, top_k, experts, tiles }
                .words();
        let of_tiles = Axis::Tiles { times: top_k, by: PICKS, plus: experts };
        let e = Entry {
            name: "grouped_gated",
            constants: numbered(&m.types[..2], &[]),
            when: when.clone(),
            axes: [Axis::Fixed(m.inner.div_ceil(64)), of_tiles, ONE],
            threads: 128,
            pools: None,
            work: None,
            parts: None,
        };
        self.dispatch(at, e, m.extent, (args, constants))?;

        let width = (m.top_k * m.outs) as usize;
        let parts = self.stage("experts' parts", self.rows_max * width)?;
        let parts = Place::Value(parts, width);
        let args = vec![
            self.weight(down.weight),
            Some((inner, Read)),
            Some((groups, Read)),
            self.optional(down.bias),
            Some((parts.clone(), Write)),
        ];
        let DownArgs { rows, cols, outs, bias, residual: added, .. } =
            down_args(m, down.bias.is_some(), residual.is_some());
        let constants =
            GroupedDownArgs { rows, cols, outs, top_k, experts, bias, residual: added, tiles }
                .words();
        let e = Entry {
            name: "grouped_down",
            constants: numbered(&m.types[2..], &[]),
            when: when.clone(),
            axes: [Axis::Fixed(m.outs.div_ceil(64)), of_tiles, ONE],
            threads: 128,
            pools: None,
            work: None,
            parts: None,
        };
        self.dispatch(at, e, m.extent, (args, constants.clone()))?;

        let args = vec![
            Some((parts, Read)),
            self.value(weights, Read),
            residual.and_then(|r| self.value(r, Read)),
            self.value(out, Write),
        ];
        let e = Entry { when, ..whole("grouped_sum", elements(m.outs), 256) };
        self.dispatch(at, e, m.extent, (args, constants))
    }

    /// Whether this device's pipelines take the threads that the grouping needs.
    fn groups_fit(&self, m: &Mixture) -> Result<bool> {
        let fits = |name, constants: &[u32], threads| {
            Ok(self.device.pipeline(name, constants)?.threads_max >= threads)
        };
        Ok(fits("moe_group", &[], m.experts.next_multiple_of(32))?
            && fits("grouped_gated", &numbered(&m.types[..2], &[]), 128)?
            && fits("grouped_down", &numbered(&m.types[2..], &[]), 128)?)
    }

    /// A row of the gated layer for every chosen expert of every row.
    fn experts_inner(&mut self, m: &Mixture) -> Result<Place> {
        let width = (m.top_k * m.inner) as usize;
        Ok(Place::Value(self.stage("experts' inner rows", self.rows_max * width)?, width))
    }
}

/// The sizes of a mixture's layer.
struct Mixture {
    /// Of gate, up and down.
    types: [TensorType; 3],
    experts: u32,
    top_k: u32,
    /// Outputs of gate and up.
    inner: u32,
    cols: u32,
    outs: u32,
    extent: Extent,
}

/// Rows from which an expert has two of them on average, so that its weights are read once for
/// several.
fn grouped_from(experts: u32, top_k: u32) -> u32 {
    (2 * experts / top_k).max(MATVEC_ROWS + 1)
}

fn down_args(m: &Mixture, bias: bool, residual: bool) -> DownArgs {
    DownArgs {
        rows: 0,
        cols: m.inner,
        outs: m.outs,
        top_k: m.top_k,
        experts: m.experts,
        bias: u32::from(bias),
        residual: u32::from(residual),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_grouped_where_an_expert_has_several() {
        for (experts, top_k, from) in [(8, 2, 8), (32, 4, 16), (128, 8, 32), (4, 4, 5), (1, 1, 5)] {
            assert_eq!(grouped_from(experts, top_k), from, "{top_k} of {experts}");
        }
    }

    #[test]
    fn the_grid_holds_every_tile() {
        // All picks of one expert, or as few of each as make a tile of their own.
        for (rows, top_k, experts) in [(5u32, 1u32, 1u32), (17, 2, 8), (512, 8, 128), (33, 4, 32)] {
            let picks = rows * top_k;
            let spread: u32 = (0..experts).map(|e| ((picks + e) / experts).div_ceil(PICKS)).sum();
            let worst = spread.max(picks.div_ceil(PICKS)).max(experts.min(picks));
            assert!(worst <= picks / PICKS + experts, "{rows} rows, {top_k} of {experts}");
        }
    }
}
