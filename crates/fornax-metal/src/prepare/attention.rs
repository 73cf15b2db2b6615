//! Rotation, the append and attention as dispatches. It knows no product.

use fornax_plan::{KvGroup, KvRef, Op, Result, RopePairs, ValueId, WeightId};

use super::lower::{Entry, ONE, ROWS, elements, whole};
use super::{Builder, KV_BLOCK};
use crate::args::RopeWriteArgs;
use crate::encode::{Axis, Extent, Place};
use crate::hazard::Access::{Read, Write};
use crate::library::{entry, pieced};
use crate::policy::{self, Heads, SPLIT_ROWS, Shares, TILE_ROWS};
use crate::work::Work;

/// Elements of a head that a simdgroup holds.
pub(super) const HEAD_WIDTH_MAX: u32 = 256;

/// A group's heads beside so many of queries.
pub(crate) fn heads_of(heads: u32, group: &KvGroup) -> Heads {
    let KvGroup { heads: kv_heads, k_width, v_width, .. } = *group;
    Heads { heads, kv_heads, k_width, v_width }
}

impl Builder<'_> {
    pub(super) fn lower_rope(
        &mut self,
        at: u32,
        op: &Op,
        x: ValueId,
        norm: Option<WeightId>,
        out: ValueId,
    ) -> Result<()> {
        let Op::QkNormRope { dim, .. } = *op else { return Ok(()) };
        let heads = self.plan.width(x) / dim;
        let e = whole("norm_rope", [Axis::Fixed(heads.div_ceil(4)), ROWS, ONE], 128);
        self.dispatch(at, e, Extent::Rows, self.rope_call(op, x, norm, out))
    }

    /// Norm, rotation and append at once.
    pub(super) fn rope_write(&mut self, at: u32, op: &Op, v: ValueId, kv: KvRef) -> Result<()> {
        let Op::QkNormRope { q, k, q_norm, k_norm, eps, rope, dim, q_out, .. } = *op else {
            return Ok(());
        };
        let table = rope.map(|r| &self.plan.ropes[r.ix()]);
        let group = &self.plan.kv[kv.group as usize];
        let mut args = vec![
            self.value(q, Read),
            self.value(k, Read),
            self.value(v, Read),
            self.optional(q_norm),
            self.optional(k_norm),
            rope.map(|r| (Place::Fixed(self.ropes[r.ix()].all()), Read)),
            Some((Place::Rows, Read)),
            Some((Place::Table(kv.group as usize), Read)),
            self.value(q_out, Write),
        ];
        let pools = self.pools(&mut args, kv, Write);
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
        let e = Entry {
            constants: pieced(&[], 1),
            pools: Some(pools),
            ..whole(&name, [Axis::Fixed(groups), ROWS, ONE], 128)
        };
        self.dispatch(at, e, Extent::Rows, (args, constants.words()))
    }

    pub(super) fn lower_kv_write(
        &mut self,
        at: u32,
        k: ValueId,
        v: ValueId,
        kv: KvRef,
    ) -> Result<()> {
        let width = self.plan.width(k).max(self.plan.width(v));
        let name = entry("kv_write", self.kv_type);
        let (call, pools) = self.kv_write_call(k, v, kv);
        let constants = pieced(&[], 1);
        let e = Entry { constants, pools: Some(pools), ..whole(&name, elements(width), 256) };
        self.dispatch(at, e, Extent::Rows, call)
    }

    pub(super) fn lower_attention(&mut self, at: u32, op: &Op) -> Result<()> {
        let Op::Attention { kv, heads, sinks, out, .. } = *op else {
            return Ok(());
        };
        let group = &self.plan.kv[kv.group as usize];
        // The shares of a row follow from its position alone where they may not follow from the pool.
        let of = heads_of(heads, group);
        let Shares { together, splits } =
            self.policy.split(self.kv_type, of, self.shape.stride as u32);
        let (splits, few) = match self.deterministic {
            true => (policy::SPLITS_FIXED, 1..=u32::MAX),
            false => (splits, 1..=SPLIT_ROWS),
        };
        let Some(((common, constants), pools)) = self.attention_call(op, splits) else {
            return Ok(());
        };
        let pools = Some(pools);
        let each = vec![together, group.k_width.div_ceil(32), group.v_width.div_ceil(32)];
        let part = (heads * splits * (group.v_width + 2)) as usize;
        let rows = self.rows_max.min(*few.end() as usize);
        let partials = self.stage("partial attention", rows * part)?;
        let name = entry("attention_split", self.kv_type);
        let axes = [Axis::Fixed(splits), Axis::Fixed(heads / together), ROWS];
        let mut args = common.clone();
        args.push(Some((Place::Value(partials, part), Write)));
        let own = pieced(&each, 1);
        let parts = Some(1);
        let e = Entry { constants: own, when: few.clone(), pools, parts, ..whole(&name, axes, 32) };
        self.dispatch(at, e, Extent::Rows, (args, constants.clone()))?;
        let args = vec![
            Some((Place::Value(partials, part), Read)),
            Some((Place::Rows, Read)),
            self.optional(sinks),
            self.value(out, Write),
        ];
        let axes = [Axis::Fixed(heads), ROWS, ONE];
        let name = "attention_reduce";
        let own = pieced(&each, 1);
        let work = Some(Work::default());
        let e = Entry { constants: own, when: few, work, ..whole(name, axes, 32) };
        self.dispatch(at, e, Extent::Rows, (args, constants.clone()))?;
        if self.deterministic {
            return Ok(());
        }
        let name = entry("attention_tiled", self.kv_type);
        let mut args = common;
        args.extend([self.optional(sinks), self.value(out, Write)]);
        let together = self.policy.tiled(self.kv_type, of);
        let axes = [Axis::Fixed(heads / together), Axis::RowsBy(TILE_ROWS), ONE];
        let own = pieced(&[together, each[1], each[2]], 1);
        let when = SPLIT_ROWS + 1..=u32::MAX;
        let parts = Some(TILE_ROWS);
        let work = Some(Work::of(self.plan, op, self.kv_type).shared_by(TILE_ROWS));
        let e = Entry { constants: own, when, pools, parts, work, ..whole(&name, axes, 256) };
        self.dispatch(at, e, Extent::Rows, (args, constants))
    }
}
