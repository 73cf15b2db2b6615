//! A plan's ops as dispatches of the kernels under `kernels/`: one command for each range of rows
//! that has a kernel of its own, two ops in one where a kernel does both. It knows no emulator.

use std::ops::RangeInclusive;

use fornax_plan::{Error, Op, Result, ValueId, WeightId};

use super::Builder;
use super::calls::Call;
use crate::api::Buffer;
use crate::encode::{Axis, Command, Extent, Place, Pools, Span};
use crate::hazard::Access::Write;
use crate::library::typed;
use crate::policy::{self, MATVEC_ROWS};
use crate::work::Work;

pub(super) const ANY: RangeInclusive<u32> = 1..=u32::MAX;
pub(super) const ONE: Axis = Axis::Fixed(1);
pub(super) const ROWS: Axis = Axis::RowsBy(1);

/// A norm that its reader computes.
#[derive(Clone, Copy)]
pub(super) struct Norm {
    pub(super) x: ValueId,
    pub(super) weight: WeightId,
    pub(super) eps: f32,
}

/// A dispatch but for its arguments.
pub(super) struct Entry<'a> {
    pub(super) name: &'a str,
    /// Function constants.
    pub(super) constants: Vec<u32>,
    pub(super) when: RangeInclusive<u32>,
    pub(super) axes: [Axis; 3],
    pub(super) threads: u32,
    pub(super) pools: Option<Pools>,
    /// What a row of it asks for, where that is not all of the op.
    pub(super) work: Option<Work>,
    /// As [`Command::parts`].
    pub(super) parts: Option<u32>,
}

impl Builder<'_> {
    /// Resolves every op.
    pub(super) fn lower(&mut self) -> Result<()> {
        let plan = self.plan;
        let mut at = 0;
        while let Some(op) = plan.ops.get(at) {
            if !self.deterministic && self.appends(at)? {
                // The ops one by one, for rounds that the two dispatches above are not for.
                self.apart = Some(false);
                self.lower_pair(at)?;
                self.lower_op(at as u32 + 2, &plan.ops[at + 2])?;
                self.lower_op(at as u32 + 3, &plan.ops[at + 3])?;
                self.apart = None;
                at += 4;
                continue;
            }
            if let Op::RmsNorm { x, weight, eps, residual: None, out } = *op
                && let Some(next) = plan.ops.get(at + 1)
                && self.folds(x, out, next)
            {
                // Few rows are normed by the kernel that reads them, the norm is for the rest.
                if !self.deterministic {
                    self.lower_norm(at as u32, op, MATVEC_ROWS + 1..=u32::MAX)?;
                }
                self.lower_reader(at as u32 + 1, next, Some(Norm { x, weight, eps }))?;
                at += 2;
                continue;
            }
            if self.lower_pair(at)? {
                at += 2;
                continue;
            }
            self.lower_op(at as u32, op)?;
            at += 1;
        }
        Ok(())
    }

    /// Lowers the rotation and the append at `at` as one dispatch, where they are that.
    fn lower_pair(&mut self, at: usize) -> Result<bool> {
        let plan = self.plan;
        let pair = (plan.ops.get(at), plan.ops.get(at + 1));
        let (Some(op @ Op::QkNormRope { k_out, .. }), Some(Op::KvWrite { k, v, kv })) = pair else {
            return Ok(false);
        };
        if k != k_out || plan.uses(*k) != 1 {
            return Ok(false);
        }
        self.rope_write(at as u32, op, *v, *kv)?;
        Ok(true)
    }

    /// Whether the norm from `x` to `out` can be left to the next op.
    fn folds(&self, x: ValueId, out: ValueId, next: &Op) -> bool {
        let reads = match *next {
            Op::Qkv { x, .. } | Op::GatedMlp { x, .. } => x == out,
            _ => false,
        };
        // The next op then reads what the norm would have been the last to read, and may not
        // write its results there.
        let apart = |o: ValueId| self.values.ix(o) != self.values.ix(x);
        reads && self.plan.uses(out) == 1 && next.outputs().iter().all(apart)
    }

    fn lower_reader(&mut self, at: u32, op: &Op, norm: Option<Norm>) -> Result<()> {
        match *op {
            Op::GatedMlp { x, gate, up, act, out } => {
                self.lower_gated(at, (x, norm), [gate, up], act, out)
            }
            _ => self.lower_qkv(at, op, norm),
        }
    }

    fn lower_op(&mut self, at: u32, op: &Op) -> Result<()> {
        match *op {
            Op::Embed { table, scale, out } => {
                let w = &self.plan.weights[table.ix()];
                let (name, constants) = typed("embed", &[w.ty], &[]);
                let threads = policy::threads(w.cols, 8).min(256);
                let e = Entry { constants, ..whole(&name, [ROWS, ONE, ONE], threads) };
                self.dispatch(at, e, Extent::Rows, self.embed_call(table, scale, out))
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
                let e = whole("select_rows", elements(self.plan.width(x)), 256);
                self.dispatch(at, e, Extent::Wanted, self.select_call(x, out))
            }
            Op::Logits { x, linear, scale, softcap, out } => {
                let to = self.value(out, Write);
                self.product(at, ANY, x, linear, None, to, (scale, softcap))?;
                self.lower_copy(at, out, Place::Logits)
            }
            Op::Sample { logits } => self.lower_choice(at, logits),
            Op::HiddenOut { x } => self.lower_copy(at, x, Place::Hidden),
            Op::ShortConv { x, kernel, state, out } => self.lower_conv(at, x, kernel, state, out),
            Op::MoeRoute { .. } => self.lower_route(at, op),
            Op::MoeMlp { .. } => self.lower_experts(at, op),
        }
    }

    fn lower_norm(&mut self, at: u32, op: &Op, when: RangeInclusive<u32>) -> Result<()> {
        let Op::RmsNorm { x, weight, eps, residual, out } = *op else { return Ok(()) };
        let threads = policy::threads(self.plan.width(x), 4);
        let e = Entry { when, ..whole("rms_norm", [ROWS, ONE, ONE], threads) };
        self.dispatch(at, e, self.extent(x), self.norm_call(x, weight, eps, residual, out))
    }

    /// Records a command for the entry.
    ///
    /// # Errors
    /// `is_unsupported` by name where its pipeline takes fewer threads than it needs.
    pub(super) fn dispatch(
        &mut self,
        op: u32,
        e: Entry<'_>,
        extent: Extent,
        call: Call,
    ) -> Result<()> {
        let (name, threads) = (e.name.to_string(), e.threads);
        if self.try_dispatch(op, e, extent, call)? {
            return Ok(());
        }
        Err(Error::unsupported(format!(
            "metal: {name} needs {threads} threads in a threadgroup, its pipeline on this device takes fewer; use \
             --device cpu"
        )))
    }

    /// The same; false where it needs more threads than there are and has no narrower variant.
    pub(super) fn try_dispatch(
        &mut self,
        op: u32,
        mut e: Entry<'_>,
        extent: Extent,
        (args, constants): Call,
    ) -> Result<bool> {
        let pipeline = loop {
            let pipeline = self.device.pipeline(e.name, &e.constants)?;
            if e.threads <= pipeline.threads_max {
                break pipeline;
            }
            let Some(next) = policy::narrower(e.name, &e.constants, e.threads) else {
                // With fewer registers it may still fit, and is slower.
                let threads = Some(e.threads);
                let pipeline = self.device.pipeline_for(e.name, &e.constants, threads)?;
                if e.threads <= pipeline.threads_max {
                    break pipeline;
                }
                return Ok(false);
            };
            if let Axis::Fixed(x) = &mut e.axes[0] {
                *x *= next.groups;
            }
            (e.constants, e.threads) = (next.constants, next.threads);
        };
        let span = Span { axes: e.axes, threads: e.threads };
        let (when, base_at) = (e.when, None);
        let apart = self.apart;
        let (pools, parts) = (e.pools, e.parts);
        let work = e
            .work
            .unwrap_or_else(|| Work::of(self.plan, &self.plan.ops[op as usize], self.kv_type));
        self.out.commands.push(Command {
            op,
            pipeline,
            args,
            constants,
            base_at,
            extent,
            when,
            apart,
            span,
            pools,
            work,
            parts,
        });
        Ok(true)
    }

    fn lower_copy(&mut self, at: u32, x: ValueId, to: Place) -> Result<()> {
        let e = whole("copy", elements(self.plan.width(x)), 256);
        self.dispatch(at, e, Extent::FirstWanted, self.copy_call(x, to))
    }

    /// Memory between two stages, shared by all that need no more of it.
    pub(super) fn stage(&mut self, name: &'static str, words: usize) -> Result<Buffer> {
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

pub(super) fn whole(name: &str, axes: [Axis; 3], threads: u32) -> Entry<'_> {
    Entry {
        name,
        constants: Vec::new(),
        when: ANY,
        axes,
        threads,
        pools: None,
        work: None,
        parts: None,
    }
}

/// A thread an element of a row, 256 in a threadgroup.
pub(super) fn elements(width: u32) -> [Axis; 3] {
    [Axis::Fixed(width.div_ceil(256)), ROWS, ONE]
}
