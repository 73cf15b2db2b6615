//! Products as dispatches: vectors, then small matrices, then tiles. It knows no attention.

use std::ops::RangeInclusive;

use fornax_plan::{Activation, Linear, Op, Result, ValueId};

use super::lower::{Entry, Norm, ONE, elements, whole};
use super::{Arg, Builder};
use crate::args::QkvArgs;
use crate::encode::{Axis, Extent, Place};
use crate::hazard::Access::{Read, Write};
use crate::library::typed;
use crate::policy::{MANY_ROWS, MATVEC_ROWS, Tile};
use crate::work::Work;

impl Builder<'_> {
    /// A product, for the rows of `when`: vectors, then small matrices, then tiles.
    #[allow(clippy::too_many_arguments, reason = "an op's fields")]
    pub(super) fn product(
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
        let work = Some(Work::product(w.len_bytes()));
        let call = self.matmul_call(x, linear, residual, out, (scale, softcap));
        let extent = self.extent(x);
        let tile = self.policy.matvec_tile(ty, outs, cols);
        let groups = outs.div_ceil(tile.outs);
        let vector = |rows| typed("matvec", &[ty], &variant(tile, rows, false));
        for (rows, when) in self.vector_rows(*when.start()) {
            let (name, constants) = vector(rows);
            let e = vectors(&name, constants, tile, groups, rows);
            self.dispatch(at, Entry { when, work, ..e }, extent, call.clone())?;
        }
        if self.deterministic {
            return Ok(());
        }
        let small_rows = self.policy.small_rows(ty, outs, cols);
        let [small, tiled] = ["matmul_small", "matmul_tiled"].map(|name| typed(name, &[ty], &[]));
        let few = Entry {
            when: MATVEC_ROWS + 1..=small_rows,
            constants: small.1,
            work,
            ..whole(&small.0, [Axis::Fixed(outs.div_ceil(8)), Axis::RowsBy(16), ONE], 128)
        };
        let many = Entry {
            when: small_rows + 1..=u32::MAX,
            constants: tiled.1,
            work,
            parts: Some(MANY_ROWS),
            ..whole(&tiled.0, [Axis::Fixed(outs.div_ceil(64)), Axis::RowsBy(MANY_ROWS), ONE], 128)
        };
        for e in [few, many] {
            let when = e.when.clone();
            if !self.try_dispatch(at, e, extent, call.clone())? {
                // Slower, and it fits everywhere.
                let (name, constants) = vector(MATVEC_ROWS);
                let e = vectors(&name, constants, tile, groups, MATVEC_ROWS);
                self.dispatch(at, Entry { when, work, ..e }, extent, call.clone())?;
            }
        }
        Ok(())
    }

    /// How many rows, from `least` on, each variant of the matvec family takes together, and of which numbers of rows it
    /// is for; where they must not differ, the last one is for all.
    fn vector_rows(&self, least: u32) -> Vec<(u32, RangeInclusive<u32>)> {
        if self.deterministic {
            return vec![(MATVEC_ROWS, 1..=u32::MAX)];
        }
        (least..=MATVEC_ROWS).map(|rows| (rows, rows..=rows)).collect()
    }

    pub(super) fn lower_qkv(&mut self, at: u32, op: &Op, norm: Option<Norm>) -> Result<()> {
        let Op::Qkv { x, q, k, v, q_out, k_out, v_out } = *op else { return Ok(()) };
        let [wq, wk, wv] = [q, k, v].map(|l| &self.plan.weights[l.weight.ix()]);
        let types = [wq.ty, wk.ty, wv.ty];
        let (cols, outs) = (wq.cols, [wq.rows, wk.rows, wv.rows]);
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
        let constants = QkvArgs { rows: 0, cols, q_outs, k_outs, v_outs, bias, eps }.words();
        let tile = self.policy.matvec_tile(wq.ty, q_outs + k_outs + v_outs, cols);
        let groups = outs.iter().map(|o| o.div_ceil(tile.outs)).sum();
        for (rows, when) in self.vector_rows(1) {
            let (name, own) = typed("qkv", &types, &variant(tile, rows, norm.is_some()));
            let e = vectors(&name, own, tile, groups, rows);
            let e = Entry { when, ..e };
            self.dispatch(at, e, Extent::Rows, (args.clone(), constants.clone()))?;
        }
        if self.deterministic {
            return Ok(());
        }
        let when = MATVEC_ROWS + 1..=u32::MAX;
        for (linear, out) in [(q, q_out), (k, k_out), (v, v_out)] {
            let out = self.value(out, Write);
            self.product(at, when.clone(), x, linear, None, out, (1.0, None))?;
        }
        Ok(())
    }

    pub(super) fn lower_gated(
        &mut self,
        at: u32,
        (x, norm): (ValueId, Option<Norm>),
        [gate, up]: [Linear; 2],
        act: Activation,
        out: ValueId,
    ) -> Result<()> {
        let w = &self.plan.weights[gate.weight.ix()];
        let (ty, outs, cols) = (w.ty, w.rows, w.cols);
        let types = [ty, self.plan.weights[up.weight.ix()].ty];
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
        let constants = self.gated_args(gate, up, act, norm.map_or(0.0, |n| n.eps));
        let extent = self.extent(x);
        let tile = self.policy.matvec_tile(ty, outs, cols);
        let groups = outs.div_ceil(tile.outs);
        for (rows, when) in self.vector_rows(1) {
            let (name, own) = typed("gated_mlp", &types, &variant(tile, rows, norm.is_some()));
            let e = vectors(&name, own, tile, groups, rows);
            let call = (args(self, norm), constants.words());
            self.dispatch(at, Entry { when, ..e }, extent, call)?;
        }
        if self.deterministic {
            return Ok(());
        }
        // More rows are multiplied as matrices, normed before.
        let many = MATVEC_ROWS + 1..=u32::MAX;
        let up_out = self.stage("gated inner rows", self.rows_max * outs as usize)?;
        let up_out = Place::Value(up_out, outs as usize);
        let out = self.value(out, Write);
        self.product(at, many.clone(), x, gate, None, out.clone(), (1.0, None))?;
        let to = Some((up_out.clone(), Write));
        self.product(at, many.clone(), x, up, None, to, (1.0, None))?;
        let work = Some(Work::default());
        let e = Entry { when: many, work, ..whole("activate", elements(outs), 256) };
        self.dispatch(at, e, extent, (vec![Some((up_out, Read)), out], constants.words()))
    }
}

/// The constants of a kernel of the matvec family.
pub(super) fn variant(tile: Tile, rows: u32, normed: bool) -> [u32; 4] {
    [tile.outs, rows, tile.simds, u32::from(normed)]
}

/// A kernel of the matvec family for so many rows and no others.
fn vectors(name: &str, constants: Vec<u32>, tile: Tile, groups: u32, rows: u32) -> Entry<'_> {
    Entry {
        name,
        constants,
        when: rows..=rows,
        axes: [Axis::Fixed(groups), Axis::RowsBy(rows), ONE],
        threads: 32 * tile.simds,
        pools: None,
        work: None,
        parts: Some(rows),
    }
}
