//! What each op computes, written the way a paper would. It knows no schedule and no cache
//! layout; sums are in f64 so that the order of summation is nobody's concern.

use std::borrow::Cow;

use super::Jitter;
use super::cache::Cache;
use crate::batch::Batch;
use crate::device::ActMode;
use crate::ids::{BlockId, TokenId};
use crate::op::{Activation, Gating, KvRef, Linear, Op};
use crate::plan::{KvGroup, Plan, RopePairs, RopeTable, WeightRef};
use crate::q8;
use crate::sample::uniform;
use fornax_gguf::blocks;

/// A matrix of activations, row after row.
#[derive(Clone, Debug, Default)]
pub(super) struct Mat {
    pub(super) width: usize,
    pub(super) data: Vec<f32>,
}

impl Mat {
    pub(super) fn zeros(rows: usize, width: usize) -> Mat {
        Mat { width, data: vec![0.0; rows * width] }
    }

    pub(super) fn rows(&self) -> usize {
        self.data.len() / self.width.max(1)
    }

    pub(super) fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.width..][..self.width]
    }

    pub(super) fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.data[row * self.width..][..self.width]
    }

    pub(super) fn rows_mut(&mut self) -> impl Iterator<Item = &mut [f32]> {
        self.data.chunks_mut(self.width.max(1))
    }

    /// This matrix plus another, where there is one.
    pub(super) fn plus(mut self, other: Option<&Mat>) -> Mat {
        for (a, b) in self.data.iter_mut().zip(other.map_or(&[][..], |m| &m.data)) {
            *a += b;
        }
        self
    }
}

/// Eight sums side by side, because one would wait for each of its additions.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    let (a, a_rest) = a.as_chunks::<8>();
    let (b, b_rest) = b.as_chunks::<8>();
    let mut sums = [0.0f64; 8];
    for (a, b) in a.iter().zip(b) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += f64::from(*a) * f64::from(*b);
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
    sums.iter().sum::<f64>() + rest
}

fn dequantize_row(w: &WeightRef, expert: usize, row: usize, out: &mut [f32]) {
    blocks::dequantize(w.ty, w.row(expert, row), out)
        .expect("invariant: a row is a whole number of blocks");
}

/// Rows of `table` for the tokens, times `scale`.
pub(super) fn embed(table: &WeightRef, tokens: &[TokenId], scale: f32) -> Mat {
    let mut out = Mat::zeros(tokens.len(), table.cols as usize);
    for (row, token) in out.rows_mut().zip(tokens) {
        dequantize_row(table, 0, *token as usize, row);
        row.iter_mut().for_each(|v| *v *= scale);
    }
    out
}

pub(super) fn rms_norm_row(x: &mut [f32], weight: &[f32], eps: f32) {
    let mean = dot(x, x) / x.len() as f64;
    let scale = 1.0 / (mean + f64::from(eps)).sqrt();
    for (x, w) in x.iter_mut().zip(weight) {
        *x = (f64::from(*x) * scale * f64::from(*w)) as f32;
    }
}

pub(super) fn rms_norm(x: &Mat, weight: &[f32], eps: f32) -> Mat {
    let mut y = x.clone();
    y.rows_mut().for_each(|row| rms_norm_row(row, weight, eps));
    y
}

/// In which form matrices see their activations.
pub(super) struct Activations {
    pub(super) mode: ActMode,
    pub(super) jitter: Option<Jitter>,
    /// Positions of the rows of the op at hand.
    pub(super) positions: Vec<u32>,
    /// The op at hand; no two ops share their noise.
    pub(super) op: u32,
}

impl Activations {
    /// Notes which rows the op works on; only jitter needs to know.
    pub(super) fn enter(&mut self, at: usize, op: &Op, batch: &Batch) {
        if self.jitter.is_none() {
            return;
        }
        self.op = at as u32;
        self.positions.clear();
        match op {
            Op::Logits { .. } => {
                let wanted = batch.wanted.iter().map(|w| batch.rows[w.row as usize].pos);
                self.positions.extend(wanted);
            }
            _ => self.positions.extend(batch.rows.iter().map(|r| r.pos)),
        }
    }

    /// The activations as a matrix of this type sees them; `first` is the row of the op that the
    /// first row of `x` is.
    fn seen_by<'a>(&self, x: &'a Mat, w: &WeightRef, first: usize) -> Cow<'a, Mat> {
        if self.mode == ActMode::F32 || !q8::applies_to(w.ty) {
            return Cow::Borrowed(x);
        }
        let mut x = x.clone();
        for (at, row) in x.rows_mut().enumerate() {
            if let Some(jitter) = &self.jitter {
                self.shake(row, jitter, self.positions[first + at]);
            }
            q8::round_row(row);
        }
        Cow::Owned(x)
    }

    fn shake(&self, row: &mut [f32], jitter: &Jitter, pos: u32) {
        let seed = jitter.seeds[(pos as usize).min(jitter.seeds.len() - 1)];
        let stream = seed << 40 | u64::from(pos) << 16 | u64::from(self.op);
        let mut drawn = 0;
        for block in row.chunks_mut(q8::BLOCK) {
            let amax = block.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            for v in block {
                let noise = 2.0 * uniform(stream, drawn) - 1.0;
                *v += noise * jitter.size * amax;
                drawn += 1;
            }
        }
    }
}

/// `W·x + b` for every row of `x`.
pub(super) fn matmul(x: &Mat, plan: &Plan, linear: Linear, act: &Activations) -> Mat {
    expert_matmul(x, plan, linear, (0, 0), act)
}

/// As [`matmul`] for one expert; `first` is the row of the op that the first row of `x` is.
fn expert_matmul(
    x: &Mat,
    plan: &Plan,
    linear: Linear,
    (expert, first): (usize, usize),
    act: &Activations,
) -> Mat {
    let w = &plan.weights[linear.weight.ix()];
    let bias = linear.bias.map(|b| plan.weight_f32(b));
    let x = act.seen_by(x, w, first);
    let rows = w.rows as usize;
    let mut y = Mat::zeros(x.rows(), rows);
    let mut weights = vec![0.0; w.cols as usize];
    for o in 0..rows {
        dequantize_row(w, expert, o, &mut weights);
        let bias = bias.as_ref().map_or(0.0, |b| f64::from(b[expert * rows + o]));
        for r in 0..x.rows() {
            y.data[r * rows + o] = (dot(&weights, x.row(r)) + bias) as f32;
        }
    }
    y
}

/// Rotates one head to position `pos`.
pub(super) fn rope(head: &mut [f32], table: &RopeTable, pos: u32) {
    let n = table.inv_freq.len();
    for (i, freq) in table.inv_freq.iter().enumerate() {
        let (a, b) = match table.pairs {
            RopePairs::Adjacent => (2 * i, 2 * i + 1),
            RopePairs::Halves => (i, i + n),
        };
        // The angle is an f32 product, as in the models' own training code.
        let angle = f64::from(pos as f32 * freq);
        let (sin, cos) = angle.sin_cos();
        let m = f64::from(table.magnitude);
        let (x, y) = (f64::from(head[a]), f64::from(head[b]));
        head[a] = (m * (x * cos - y * sin)) as f32;
        head[b] = (m * (x * sin + y * cos)) as f32;
    }
}

/// The keys that a row sees.
pub(super) struct Keys<'a> {
    pub(super) cache: &'a Cache,
    pub(super) kv: KvRef,
    pub(super) table: &'a [BlockId],
    pub(super) range: std::ops::Range<u32>,
}

/// How scores become weights.
pub(super) struct HeadRule<'a> {
    pub(super) heads: u32,
    pub(super) group: &'a KvGroup,
    pub(super) scale: f32,
    pub(super) softcap: Option<f32>,
    pub(super) sinks: Option<&'a [f32]>,
}

/// Attention of one row over its keys: softmax of scaled (and capped) scores, then the mean of
/// the values.
pub(super) fn attention(q: &[f32], keys: &Keys<'_>, rule: &HeadRule<'_>, out: &mut [f32]) {
    let (kw, vw) = (rule.group.k_width as usize, rule.group.v_width as usize);
    let share = rule.heads / rule.group.heads;
    for head in 0..rule.heads {
        let q = &q[head as usize * kw..][..kw];
        let read = |pos| keys.cache.read(keys.kv, keys.table, pos, head / share);
        let scores: Vec<f64> = keys
            .range
            .clone()
            .map(|pos| {
                let score = dot(q, read(pos).0) * f64::from(rule.scale);
                rule.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
            })
            .collect();
        let sink = rule.sinks.map_or(f64::NEG_INFINITY, |s| f64::from(s[head as usize]));
        let max = scores.iter().copied().fold(sink, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum::<f64>() + (sink - max).exp();
        let mut mean = vec![0.0f64; vw];
        for (score, pos) in scores.iter().zip(keys.range.clone()) {
            let weight = (score - max).exp() / sum;
            for (m, v) in mean.iter_mut().zip(read(pos).1) {
                *m += weight * f64::from(*v);
            }
        }
        for (o, m) in out[head as usize * vw..][..vw].iter_mut().zip(mean) {
            *o = m as f32;
        }
    }
}

fn activate(gate: f32, up: f32, act: Activation) -> f32 {
    let (g, u) = (f64::from(gate), f64::from(up));
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let y = match act {
        Activation::Silu => g * sigmoid(g) * u,
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g * g * g);
            0.5 * g * (1.0 + inner.tanh()) * u
        }
        Activation::SwigluClamped { alpha, limit } => {
            let limit = f64::from(limit);
            let (g, u) = (g.min(limit), u.clamp(-limit, limit));
            g * sigmoid(f64::from(alpha) * g) * (u + 1.0)
        }
    };
    y as f32
}

/// `act(gate) * up`, element by element.
pub(super) fn gated(gate: &Mat, up: &Mat, act: Activation) -> Mat {
    let data = gate.data.iter().zip(&up.data).map(|(g, u)| activate(*g, *u, act)).collect();
    Mat { width: gate.width, data }
}

/// One row of LFM2's gated short convolution; `state` holds the last `taps − 1` products B·X,
/// oldest first, one tap after the other.
pub(super) fn short_conv(
    x: &[f32],
    kernel: &[f32],
    taps: usize,
    state: &mut [f32],
    out: &mut [f32],
) {
    let width = out.len();
    let (b, rest) = x.split_at(width);
    let (c, x) = rest.split_at(width);
    for i in 0..width {
        let now = b[i] * x[i];
        let mut sum = f64::from(kernel[i * taps + taps - 1]) * f64::from(now);
        for t in 0..taps - 1 {
            sum += f64::from(kernel[i * taps + t]) * f64::from(state[t * width + i]);
        }
        out[i] = (f64::from(c[i]) * sum) as f32;
        for t in 1..taps - 1 {
            state[(t - 1) * width + i] = state[t * width + i];
        }
        if taps > 1 {
            state[(taps - 2) * width + i] = now;
        }
    }
}

/// The best experts of every row (as f32 ids) and their weights.
pub(super) fn route(scores: &Mat, k: usize, gating: Gating) -> (Mat, Mat) {
    let (mut ids, mut weights) = (Mat::zeros(scores.rows(), k), Mat::zeros(scores.rows(), k));
    for r in 0..scores.rows() {
        let row = scores.row(r);
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|a, b| row[*b].total_cmp(&row[*a]).then(a.cmp(b)));
        let max = f64::from(row[order[0]]);
        let exp = |i: &usize| (f64::from(row[*i]) - max).exp();
        let chosen: f64 = order[..k].iter().map(exp).sum();
        let all: f64 = order.iter().map(exp).sum();
        let sum = match gating {
            Gating::SoftmaxThenTopK { normalise: false } => all,
            Gating::SoftmaxThenTopK { normalise: true } | Gating::TopKThenSoftmax => chosen,
        };
        for (j, i) in order[..k].iter().enumerate() {
            ids.row_mut(r)[j] = *i as f32;
            weights.row_mut(r)[j] = (exp(i) / sum) as f32;
        }
    }
    (ids, weights)
}

/// The matrices of a mixture.
pub(super) struct Experts {
    pub(super) gate: Linear,
    pub(super) up: Linear,
    pub(super) down: Linear,
    pub(super) act: Activation,
}

/// The weighted sum of the chosen experts' MLPs, row by row.
pub(super) fn moe(
    x: &Mat,
    ids: &Mat,
    weights: &Mat,
    plan: &Plan,
    m: &Experts,
    act: &Activations,
) -> Mat {
    let mut y = Mat::zeros(x.rows(), plan.weights[m.down.weight.ix()].rows as usize);
    for r in 0..x.rows() {
        let row = Mat { width: x.width, data: x.row(r).to_vec() };
        for (id, weight) in ids.row(r).iter().zip(weights.row(r)) {
            let expert = *id as usize;
            let g = expert_matmul(&row, plan, m.gate, (expert, r), act);
            let u = expert_matmul(&row, plan, m.up, (expert, r), act);
            let d = expert_matmul(&gated(&g, &u, m.act), plan, m.down, (expert, r), act);
            for (y, d) in y.row_mut(r).iter_mut().zip(&d.data) {
                *y += weight * d;
            }
        }
    }
    y
}
