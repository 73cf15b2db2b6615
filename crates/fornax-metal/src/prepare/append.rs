//! Decode attention in two dispatches: one rotates, appends and attends in shares of the keys, the
//! product that follows joins them. It knows no other step than one of few rows, each of a sequence
//! of its own.

use fornax_plan::{KvRef, Linear, Op, Result, RopePairs, ValueId};

use super::attention::heads_of;
use super::lower::{Entry, ONE, ROWS};
use super::{Builder, KV_BLOCK};
use crate::args::{AppendArgs, JoinedArgs};
use crate::encode::{Axis, Extent, Place};
use crate::hazard::Access::{Read, Write};
use crate::library::{entry, pieced, typed};
use crate::policy::{self, APPEND_SIMDS, MATVEC_ROWS, Shares};

/// The four ops that become two dispatches.
struct Found<'a> {
    rope: &'a Op,
    attention: &'a Op,
    v: ValueId,
    kv: KvRef,
    linear: Linear,
    residual: Option<ValueId>,
    out: ValueId,
}

impl Builder<'_> {
    /// Lowers the rotation, append, attention and product that begin at `at`, for rounds of few
    /// rows apart; false where they are not that, or a pipeline has too few threads for it.
    pub(super) fn appends(&mut self, at: usize) -> Result<bool> {
        let plan = self.plan;
        let [rope, append, attention, product] = [0, 1, 2, 3].map(|n| plan.ops.get(at + n));
        let (Some(rope @ Op::QkNormRope { q_out, k_out, dim, .. }), Some(append)) = (rope, append)
        else {
            return Ok(false);
        };
        let (
            Op::KvWrite { k, v, kv },
            Some(attention @ Op::Attention { q, kv: read, out: mixed, .. }),
        ) = (append, attention)
        else {
            return Ok(false);
        };
        let Some(&Op::MatMul { x, linear, residual, out }) = product else { return Ok(false) };
        let group = &plan.kv[kv.group as usize];
        let wired = q == q_out && k == k_out && kv == read && x == *mixed;
        let alone = [q_out, k_out, v, mixed].iter().all(|v| plan.uses(**v) == 1);
        if !wired || !alone || *dim != group.k_width || !group.v_width.is_multiple_of(16) {
            return Ok(false);
        }
        let found = Found { rope, attention, v: *v, kv: *kv, linear, residual, out };
        self.apart = Some(true);
        let done = self.append(at as u32 + 2, &found);
        self.apart = None;
        done
    }

    fn append(&mut self, at: u32, found: &Found<'_>) -> Result<bool> {
        let Op::QkNormRope { q, k, q_norm, k_norm, eps, rope, .. } = *found.rope else {
            return Ok(false);
        };
        let Op::Attention { heads, scale, softcap, sinks, .. } = *found.attention else {
            return Ok(false);
        };
        let group = &self.plan.kv[found.kv.group as usize];
        let shares = self.policy.append(self.kv_type, heads_of(heads, group));
        let Shares { together, splits } = shares;
        // Rows begin on sixteen bytes.
        let part = (heads * splits * (group.v_width + 2)).next_multiple_of(4);
        let parts = self.stage("shares of attention", MATVEC_ROWS as usize * part as usize)?;
        let parts = Place::Value(parts, part as usize);
        let table = rope.map(|r| &self.plan.ropes[r.ix()]);
        let constants = AppendArgs {
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
            splits,
            part,
            q_norm: u32::from(q_norm.is_some()),
            k_norm: u32::from(k_norm.is_some()),
            eps,
            pairs: table.map_or(0, |t| t.inv_freq.len() as u32),
            halves: u32::from(table.is_some_and(|t| t.pairs == RopePairs::Halves)),
            magnitude: table.map_or(1.0, |t| t.magnitude),
        };
        let mut args = vec![
            self.value(q, Read),
            self.value(k, Read),
            self.value(found.v, Read),
            self.optional(q_norm),
            self.optional(k_norm),
            rope.map(|r| (Place::Fixed(self.ropes[r.ix()].all()), Read)),
            Some((Place::Rows, Read)),
            Some((Place::Table(found.kv.group as usize), Read)),
        ];
        let pools = self.pools(&mut args, found.kv, Write);
        args.push(Some((parts.clone(), Write)));
        let e = Entry {
            name: &entry("attention_append", self.kv_type),
            constants: pieced(
                &[together, group.k_width.div_ceil(32), group.v_width.div_ceil(32), APPEND_SIMDS],
                1,
            ),
            pools: Some(pools),
            work: None,
            parts: None,
            when: 1..=MATVEC_ROWS,
            axes: [Axis::Fixed(splits), Axis::Fixed(heads / together), ROWS],
            threads: 32 * APPEND_SIMDS,
        };
        if !self.try_dispatch(at, e, Extent::Rows, (args, constants.words()))? {
            return Ok(false);
        }
        let w = &self.plan.weights[found.linear.weight.ix()];
        let (ty, outs, cols) = (w.ty, w.rows, w.cols);
        let constants = JoinedArgs {
            rows: 0,
            cols,
            outs,
            bias: u32::from(found.linear.bias.is_some()),
            residual: u32::from(found.residual.is_some()),
            heads,
            width: group.v_width,
            splits,
            part,
            sinks: u32::from(sinks.is_some()),
        };
        let args = vec![
            self.weight(found.linear.weight),
            Some((parts, Read)),
            Some((Place::Rows, Read)),
            self.optional(sinks),
            self.optional(found.linear.bias),
            found.residual.and_then(|r| self.value(r, Read)),
            self.value(found.out, Write),
        ];
        for rows in 1..=MATVEC_ROWS {
            let tile = policy::joined_tile(outs, cols, rows);
            let own = [tile.outs, rows, tile.simds, 0];
            let (name, constants_of) = typed("matvec_joined", &[ty], &own);
            let e = Entry {
                name: &name,
                constants: constants_of,
                when: rows..=rows,
                axes: [Axis::Fixed(outs.div_ceil(tile.outs)), Axis::RowsBy(rows), ONE],
                threads: 32 * tile.simds,
                pools: None,
                work: None,
                parts: None,
            };
            self.dispatch(at + 1, e, Extent::Rows, (args.clone(), constants.words()))?;
        }
        Ok(true)
    }
}
