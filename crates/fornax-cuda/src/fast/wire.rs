//! Ops as stages: products for the list of plain launches and for whole decode steps, attention with what comes before
//! it for the latter alone. It knows addresses through [`Addresses`] and launches nothing.

use std::collections::HashMap;

use fornax_gguf::TensorType;
use fornax_plan::{
    Activation, Error, KvRef, Linear, Op, Plan, Result, RopePairs, ValueId, WeightId,
};

use super::planes::{Planes, number};
use super::stage::{ATTEND, DENSE, GATED, HEAD, MERGE, NORM, NORM_ROWS, ROUND, ROWS, Stage};

/// A product and what it is wired to.
#[derive(Debug)]
pub(crate) struct Dense<'a> {
    pub(crate) op: &'a Op,
    pub(crate) norm: Option<(WeightId, f32)>,
}

/// The shapes that attention is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Attended {
    pub(crate) dim: u32,
    pub(crate) share: u32,
}

/// Where values, vectors and caches are.
pub(crate) trait Addresses {
    fn value(&self, v: ValueId) -> u64;
    fn vector(&self, id: WeightId) -> u64;
    fn pool(&self, kv: KvRef) -> [u64; 2];
    /// Uploads floats.
    fn keep(&mut self, values: &[f32]) -> Result<u64>;
}

/// The stages of a whole decode step, as far as every op so far has one.
#[derive(Debug)]
pub(crate) struct Wire {
    /// Multiprocessors, each of which runs one block.
    blocks: u32,
    /// Where means and scales of parts of contexts go.
    merge: [u64; 2],
    pub(crate) stages: Vec<Stage>,
    /// Why there can be no whole steps.
    pub(crate) lacks: Option<String>,
    pub(crate) attended: Option<Attended>,
    /// Values that are others under another name.
    alias: HashMap<ValueId, ValueId>,
    turned: HashMap<ValueId, (ValueId, Op)>,
    written: HashMap<(u32, u32), (ValueId, ValueId)>,
    mixes: HashMap<ValueId, (u32, u32, u32, u32)>,
}

impl Wire {
    pub(crate) fn new(blocks: u32, merge: [u64; 2]) -> Wire {
        Wire {
            blocks,
            merge,
            stages: Vec::new(),
            lacks: None,
            attended: None,
            alias: HashMap::new(),
            turned: HashMap::new(),
            written: HashMap::new(),
            mixes: HashMap::new(),
        }
    }

    fn lack(&mut self, what: &str) {
        self.lacks.get_or_insert_with(|| what.to_string());
    }

    /// Takes in an op that is no product.
    pub(crate) fn other(&mut self, plan: &Plan, op: &Op, at: &dyn Addresses) {
        match *op {
            Op::Embed { .. } | Op::Sample { .. } | Op::HiddenOut { .. } => {}
            Op::SelectRows { x, out } => {
                let x = *self.alias.get(&x).unwrap_or(&x);
                self.alias.insert(out, x);
            }
            Op::QkNormRope { q, k, q_out, k_out, .. } => {
                self.turned.insert(q_out, (q, op.clone()));
                self.turned.insert(k_out, (k, op.clone()));
            }
            Op::KvWrite { k, v, kv } => {
                self.written.insert((kv.group, kv.layer), (k, v));
            }
            Op::Attention { .. } => self.attention(plan, op, at),
            Op::RmsNorm { x, weight, eps, residual, out } => {
                let stage = Stage {
                    kind: NORM_ROWS,
                    x: [self.at(x, at), 0, 0],
                    norm: [at.vector(weight), 0],
                    residual: residual.map_or(0, |r| self.at(r, at)),
                    y: [at.value(out); 3],
                    widths: [plan.width(x); 3],
                    eps,
                    ..Stage::default()
                };
                self.stages.push(stage);
            }
            _ => self.lack(op.name()),
        }
    }

    fn at(&self, v: ValueId, at: &dyn Addresses) -> u64 {
        at.value(*self.alias.get(&v).unwrap_or(&v))
    }

    fn attention(&mut self, plan: &Plan, op: &Op, at: &dyn Addresses) {
        let Op::Attention { q, kv, heads, scale, softcap, sinks, out } = *op else { return };
        let g = &plan.kv[kv.group as usize];
        let Some((k, v)) = self.written.get(&(kv.group, kv.layer)).copied() else {
            return self.lack("attention without its own keys");
        };
        let shape = Attended { dim: g.k_width, share: heads / g.heads };
        if !matches!(g.k_width, 32 | 64 | 128 | 256) || g.k_width != g.v_width || shape.share > 8 {
            return self.lack("attention of this width");
        }
        if self.attended.is_some_and(|a| a != shape) {
            return self.lack("attention of several widths");
        }
        self.attended = Some(shape);
        let mut stage = Stage {
            kind: ATTEND,
            w: at.pool(kv),
            bias: sinks.map_or(0, |s| at.vector(s)),
            heads,
            kv_heads: g.heads,
            dim: g.k_width,
            window: g.window.unwrap_or(0),
            group: kv.group,
            scale,
            softcap: softcap.unwrap_or(0.0),
            ..Stage::default()
        };
        let raw = |v: ValueId| self.turned.get(&v).map_or(v, |t| t.0);
        stage.x = [raw(q), raw(k), v].map(|v| self.at(v, at));
        match (self.turned.get(&q), self.turned.get(&k)) {
            (Some((_, Op::QkNormRope { q_norm, k_norm, eps, rope, .. })), Some(_)) => {
                stage.norm = [*q_norm, *k_norm].map(|n| n.map_or(0, |n| at.vector(n)));
                stage.eps = *eps;
                if let Some(rope) = rope {
                    let table = &plan.ropes[rope.ix()];
                    stage.rope = rope.0;
                    stage.pairs = table.inv_freq.len() as u32;
                    stage.halves = u32::from(table.pairs == RopePairs::Halves);
                }
            }
            (None, None) => {}
            _ => return self.lack("positions of queries or keys alone"),
        }
        self.mixes.insert(out, (heads, g.heads, g.k_width, g.window.unwrap_or(0)));
        self.stages.push(stage);
    }

    /// Takes in a product; returns its stages for any number of rows.
    pub(crate) fn dense(
        &mut self,
        plan: &Plan,
        dense: &Dense<'_>,
        at: &mut dyn Addresses,
        planes: &mut Planes,
    ) -> Result<Vec<Stage>> {
        let made = self.make(plan, dense, at, planes)?;
        let mut made: Vec<Stage> = made.into_iter().map(|s| s.shared_out(self.blocks)).collect();
        let base = self.stages.len();
        self.stages.extend(made.iter().copied());
        for stage in &mut made {
            stage.epi = if stage.epi == HEAD { ROWS } else { stage.epi };
        }
        // In a whole step, the input may be another value's, or parts of one.
        if let Some(x) = dense.op.inputs().iter().next() {
            let real = *self.alias.get(&x).unwrap_or(&x);
            for stage in &mut self.stages[base..] {
                stage.x[0] = at.value(real);
                if let Some((heads, kv_heads, dim, window)) = self.mixes.get(&real) {
                    stage.pro = MERGE;
                    stage.x = [self.merge[0], self.merge[1], 0];
                    (stage.heads, stage.kv_heads) = (*heads, *kv_heads);
                    (stage.dim, stage.window) = (*dim, *window);
                }
            }
        }
        if self.stages[base..].iter().any(|s| s.pro == MERGE) && dense.norm.is_some() {
            self.lack("a norm of attention");
        }
        Ok(made)
    }

    fn make(
        &self,
        plan: &Plan,
        dense: &Dense<'_>,
        at: &mut dyn Addresses,
        planes: &mut Planes,
    ) -> Result<Vec<Stage>> {
        let mut stage = Stage { kind: DENSE, pro: ROUND, scale: 1.0, ..Stage::default() };
        if let Some((norm, eps)) = dense.norm {
            stage.pro = NORM;
            stage.norm[0] = at.vector(norm);
            stage.eps = eps;
        }
        match *dense.op {
            Op::MatMul { x, linear, residual, out } => {
                stage.residual = residual.map_or(0, |r| at.value(r));
                self.rows(plan, stage, x, &[(linear, out)], at, planes)
            }
            Op::Logits { x, linear, scale, softcap, out } => {
                (stage.epi, stage.scale, stage.softcap) = (HEAD, scale, softcap.unwrap_or(0.0));
                self.rows(plan, stage, x, &[(linear, out)], at, planes)
            }
            Op::Qkv { x, q, k, v, q_out, k_out, v_out } => {
                self.rows(plan, stage, x, &[(q, q_out), (k, k_out), (v, v_out)], at, planes)
            }
            Op::GatedMlp { x, gate, up, act, out } => {
                let w = [gate, up].map(|l| &plan.weights[l.weight.ix()]);
                (stage.act, stage.alpha, stage.limit) = match act {
                    Activation::Silu => (0, 0.0, 0.0),
                    Activation::GeluTanh => (1, 0.0, 0.0),
                    Activation::SwigluClamped { alpha, limit } => (2, alpha, limit),
                };
                stage.epi = GATED;
                stage.nb = w[0].cols / 32;
                stage.x[0] = at.value(x);
                stage.outs = [2 * w[0].rows, 0];
                stage.blocks0 = self.blocks;
                stage.types = [code(w[0].ty)?; 2];
                stage.w[0] = planes.of(&w, true)?;
                stage.y = [at.value(out); 3];
                stage.widths = [w[0].rows; 3];
                stage.cuts = [u32::MAX; 2];
                if gate.bias.is_some() || up.bias.is_some() {
                    let both = [bias(plan, gate), bias(plan, up)];
                    let turn = (0..both[0].len()).flat_map(|i| [both[0][i], both[1][i]]);
                    stage.bias = at.keep(&turn.collect::<Vec<_>>())?;
                }
                Ok(vec![stage])
            }
            _ => Err(Error::malformed(format!("cuda: {} is no product", dense.op.name()))),
        }
    }

    /// Products of one input: together where at most two formats follow one another.
    fn rows(
        &self,
        plan: &Plan,
        stage: Stage,
        x: ValueId,
        parts: &[(Linear, ValueId)],
        at: &mut dyn Addresses,
        planes: &mut Planes,
    ) -> Result<Vec<Stage>> {
        let weight = |l: &Linear| &plan.weights[l.weight.ix()];
        let runs: Vec<&[(Linear, ValueId)]> =
            parts.chunk_by(|a, b| weight(&a.0).ty == weight(&b.0).ty).collect();
        if runs.len() > 2 {
            let each = parts.iter().map(|p| self.rows(plan, stage, x, &[*p], at, planes));
            return Ok(each.collect::<Result<Vec<_>>>()?.concat());
        }
        let mut stage = stage;
        stage.nb = weight(&parts[0].0).cols / 32;
        stage.x[0] = at.value(x);
        let mut bytes = [0u64; 2];
        for (ix, run) in runs.iter().enumerate() {
            let w: Vec<_> = run.iter().map(|p| weight(&p.0)).collect();
            stage.w[ix] = planes.of(&w, false)?;
            stage.types[ix] = code(w[0].ty)?;
            stage.outs[ix] = w.iter().map(|w| w.rows).sum();
            bytes[ix] = w.iter().map(|w| w.len_bytes() as u64).sum();
        }
        let share = u64::from(self.blocks) * bytes[0] / (bytes[0] + bytes[1]);
        stage.blocks0 =
            if runs.len() == 1 { self.blocks } else { (share as u32).clamp(1, self.blocks - 1) };
        stage.cuts = [u32::MAX; 2];
        let mut before = 0;
        for (ix, (linear, out)) in parts.iter().enumerate() {
            stage.y[ix] = at.value(*out);
            stage.widths[ix] = weight(linear).rows;
            before += weight(linear).rows;
            if ix + 1 < parts.len() {
                stage.cuts[ix] = before;
            }
        }
        if parts.iter().any(|p| p.0.bias.is_some()) {
            let all: Vec<f32> = parts.iter().flat_map(|p| bias(plan, p.0)).collect();
            stage.bias = at.keep(&all)?;
        }
        Ok(vec![stage])
    }
}

fn code(ty: TensorType) -> Result<u32> {
    number(ty).ok_or_else(|| Error::unsupported(format!("cuda: {ty} has no planes")))
}

/// The bias of a product; zeroes where it has none.
fn bias(plan: &Plan, linear: Linear) -> Vec<f32> {
    let rows = plan.weights[linear.weight.ix()].rows as usize;
    linear.bias.map_or_else(|| vec![0.0; rows], |b| plan.weight_f32(b))
}
