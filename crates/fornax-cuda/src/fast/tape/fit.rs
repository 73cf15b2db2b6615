//! Whether a plan is of the kind that the kernel of tapes computes, or what it has that the kernel lacks: layers of norm,
//! QKV, positions, cache, attention, O, norm, gated pair, down, each the same as the last, told by the names of values.
//! It knows ops, and stages for the addresses in them.

use std::collections::HashMap;

use fornax_gguf::TensorType;
use fornax_plan::{Activation, KvRef, Linear, Op, Plan, RopeId, RopePairs, ValueId, WeightId};

use super::share::Geometry;
use crate::fast::planes;
use crate::fast::stage::{ATTEND, DENSE, NORM_ROWS, Stage};

/// Head sizes and query heads of a key/value head that the kernel is written for.
const DIMS: [u32; 2] = [64, 128];
const SHARE_MAX: u32 = 8;

/// What is the same in all layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Fit {
    pub(crate) geometry: Geometry,
    pub(crate) table: WeightId,
    pub(crate) scale: f32,
    pub(crate) head_scale: f32,
    pub(crate) head_softcap: f32,
    pub(crate) eps: f32,
    pub(crate) pairs: u32,
    pub(crate) halves: bool,
    /// The kernels' number of it.
    pub(crate) act: u32,
    pub(crate) head_norms: bool,
    pub(crate) biases: bool,
    pub(crate) capped: bool,
    /// Where the head's stage reads its norm.
    pub(crate) final_norm: WeightId,
}

impl Fit {
    /// What no GPU has been seen to compute right from tapes: such a plan takes them only where they are asked for. Every
    /// format of planes was, alone and beside a table of another, and every cache.
    pub(crate) fn unseen(&self, plan: &Plan, stages: &[Stage]) -> Option<&'static str> {
        let g = &self.geometry;
        let attends = |has: fn(&Stage) -> bool| stages.iter().any(|s| s.kind == ATTEND && has(s));
        let list = [
            (self.biases, "biases"),
            (self.capped || self.head_softcap != 0.0, "a cap"),
            (attends(|s| s.bias != 0), "attention sinks"),
            (attends(|s| s.window != 0), "a window"),
            (self.act != 0, "this activation"),
            (!(2..=4).contains(&g.share()), "so many query heads of a key head"),
            (2 * self.pairs != g.dim, "positions of a part of a head"),
            (plan.ropes.len() > 1 || plan.kv.len() > 1, "layers of several kinds"),
        ];
        list.into_iter().find_map(|(has, what)| has.then_some(what))
    }
}

/// A layer: its stages by their place in the list, and what is not in them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Layer {
    /// QKV, attention, O, gated, down.
    pub(crate) stages: [usize; 5],
    /// Of Q, K and V, which the kernel wants in another order.
    pub(crate) qkv: [Linear; 3],
}

/// What a plan's layers have in common; the first layer says, the others are held to it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Kind {
    heads: u32,
    kv_heads: u32,
    dim: u32,
    ff: u32,
    types: [TensorType; 4],
    pairs: u32,
    halves: bool,
    act: u32,
    eps: f32,
}

/// A plan that fits: what is the same everywhere, and its layers.
pub(crate) type Fitted = (Fit, Vec<Layer>);

/// Goes through a folded plan; `norms` are those of its ops' inputs, `stages` those of whole steps.
///
/// # Errors
/// What the plan has that the kernel lacks.
pub(crate) fn fit(
    plan: &Plan,
    norms: &HashMap<usize, (WeightId, f32)>,
    stages: &[Stage],
) -> Result<Fitted, String> {
    let mut reader = Reader { plan, norms, ops: plan.ops.iter().enumerate(), stages, at: 0 };
    let Some((_, Op::Embed { table, scale, out })) = reader.ops.next() else {
        return Err("a plan that begins with no embedding".into());
    };
    if planes::number(plan.weights[table.ix()].ty).is_none() {
        return Err(format!("an embedding of {}", plan.weights[table.ix()].ty));
    }
    let (mut x, mut kind, mut layers) = (*out, None::<Kind>, Vec::new());
    let (mut head_norms, mut biases, mut capped) = (false, false, false);
    let tail = loop {
        let (ix, op) = reader.next("a layer")?;
        if let Op::SelectRows { x: from, out } = op {
            same(*from == x, "rows of another value")?;
            break *out;
        }
        let (layer, out, this, has) = reader.layer(ix, op, x)?;
        let first = *kind.get_or_insert(this);
        same(first == this, "layers that are not alike")?;
        head_norms |= has.0;
        biases |= has.1;
        capped |= has.2;
        layers.push(layer);
        x = out;
    };
    let most = plan.ropes.iter().map(|r| r.inv_freq.len() as u32).max();
    same(kind.is_none_or(|k| most == Some(k.pairs)), "positions of several widths")?;
    let Some(kind) = kind else { return Err("no layers".into()) };
    let (head, eps) = reader.head(tail)?;
    same(eps == kind.eps, "norms of several epsilons")?;
    let Kind { heads, kv_heads, dim, ff, types, pairs, halves, act, eps } = kind;
    let w = &plan.weights[head.linear.weight.ix()];
    same(head.linear.bias.is_none(), "a bias of the head")?;
    same(w.cols == plan.width(x) && w.cols.is_multiple_of(32), "a width of no whole blocks")?;
    let [a, b, c, d] = types;
    let layer_count = layers.len() as u32;
    let geometry = Geometry {
        layers: layer_count,
        width: w.cols,
        heads,
        kv_heads,
        dim,
        ff,
        vocab: w.rows,
        types: [a, b, c, d, w.ty],
    };
    let fit = Fit {
        geometry,
        table: *table,
        scale: *scale,
        head_scale: head.scale,
        head_softcap: head.softcap,
        eps,
        pairs,
        halves,
        act,
        head_norms,
        biases,
        capped,
        final_norm: head.norm,
    };
    Ok((fit, layers))
}

fn same(is: bool, what: &str) -> Result<(), String> {
    if is { Ok(()) } else { Err(what.to_string()) }
}

struct Head {
    linear: Linear,
    norm: WeightId,
    scale: f32,
    softcap: f32,
}

struct Reader<'a> {
    plan: &'a Plan,
    norms: &'a HashMap<usize, (WeightId, f32)>,
    ops: std::iter::Enumerate<std::slice::Iter<'a, Op>>,
    stages: &'a [Stage],
    /// The next stage.
    at: usize,
}

impl<'a> Reader<'a> {
    /// The next op that computes something.
    fn next(&mut self, of: &str) -> Result<(usize, &'a Op), String> {
        self.ops
            .find(|(_, op)| !matches!(op, Op::HiddenOut { .. }))
            .ok_or_else(|| format!("a plan that ends within {of}"))
    }

    /// The next stage, which must be of this kind.
    fn stage(&mut self, kind: u32) -> Result<usize, String> {
        let at = self.at;
        same(self.stages.get(at).is_some_and(|s| s.kind == kind), "stages in another order")?;
        self.at += 1;
        Ok(at)
    }

    /// A product's stage of one format; its format, and the epsilon of the norm that must be folded into it.
    fn product(&mut self, ix: usize, normed: bool) -> Result<(usize, TensorType, f32), String> {
        let at = self.stage(DENSE)?;
        let stage = &self.stages[at];
        same(stage.outs[1] == 0, "a product of two formats")?;
        let norm = self.norms.get(&ix);
        same(
            norm.is_some() == normed,
            if normed { "a product without its norm" } else { "a norm of a product's result" },
        )?;
        let ty = planes::PLANED.get(stage.types[0] as usize).copied();
        Ok((at, ty.ok_or("a format without planes")?, norm.map_or(0.0, |n| n.1)))
    }

    /// One layer, which begins with this op and value: what it is, what comes out, its kind, and whether it has head norms,
    /// biases and a cap on scores.
    #[allow(clippy::type_complexity, reason = "four things that belong together once")]
    fn layer(
        &mut self,
        ix: usize,
        op: &Op,
        x: ValueId,
    ) -> Result<(Layer, ValueId, Kind, (bool, bool, bool)), String> {
        let Op::Qkv { x: from, q, k, v, q_out, k_out, v_out } = *op else {
            return Err(format!("{} where a layer begins", op.name()));
        };
        same(from == x, "a layer that reads another value")?;
        let (qkv, qkv_type, eps) = self.product(ix, true)?;
        let (attend, mix, turned) = self.attention([q_out, k_out, v_out])?;
        let (o, o_type, x1, o_bias) = self.residual(mix, x)?;
        let (ix, op) = self.next("a layer")?;
        let Op::GatedMlp { x: from, gate, up, act, out } = *op else {
            return Err(format!("{} where a gated layer begins", op.name()));
        };
        same(from == x1, "a gated layer that reads another value")?;
        let (gated, gated_type, gated_eps) = self.product(ix, true)?;
        same(eps == gated_eps, "norms of several epsilons")?;
        let act = match act {
            Activation::Silu => 0,
            Activation::GeluTanh => 1,
            Activation::SwigluClamped { .. } => return Err("a clamped activation".into()),
        };
        let (down, down_type, x2, down_bias) = self.residual(out, x1)?;
        let rows = |l: &Linear| self.plan.weights[l.weight.ix()].rows;
        let ff = rows(&gate);
        same(ff.is_multiple_of(32), "gated outputs of no whole blocks")?;
        let Turned { heads, kv_heads, dim, pairs, halves, norms, capped, norm_eps } = turned;
        same(!norms || norm_eps == eps, "norms of several epsilons")?;
        same(
            rows(&q) == heads * dim && rows(&k) == kv_heads * dim && rows(&v) == kv_heads * dim,
            "heads of another width",
        )?;
        let biased = |l: &Linear| l.bias.is_some();
        let biases = [q, k, v, gate, up].iter().any(biased) || o_bias || down_bias;
        let types = [qkv_type, o_type, gated_type, down_type];
        let kind = Kind { heads, kv_heads, dim, ff, types, pairs, halves, act, eps };
        let layer = Layer { stages: [qkv, attend, o, gated, down], qkv: [q, k, v] };
        Ok((layer, x2, kind, (norms, biases, capped)))
    }

    /// A product that adds what its layer began with: its stage, format, value, and whether it has a bias.
    fn residual(
        &mut self,
        x: ValueId,
        onto: ValueId,
    ) -> Result<(usize, TensorType, ValueId, bool), String> {
        let (ix, op) = self.next("a layer")?;
        let Op::MatMul { x: from, linear, residual, out } = *op else {
            return Err(format!("{} where a product is added", op.name()));
        };
        same(from == x && residual == Some(onto), "another residual")?;
        let (at, ty, _) = self.product(ix, false)?;
        Ok((at, ty, out, linear.bias.is_some()))
    }

    /// Positions, cache and attention of these queries, keys and values.
    fn attention(&mut self, qkv: [ValueId; 3]) -> Result<(usize, ValueId, Turned), String> {
        let [q0, k0, v0] = qkv;
        let (_, op) = self.next("a layer")?;
        let Op::QkNormRope { q, k, q_norm, k_norm, eps, rope, dim, q_out, k_out } = *op else {
            return Err("attention without positions".into());
        };
        same(q == q0 && k == k0, "positions of other values")?;
        let (_, op) = self.next("a layer")?;
        let Op::KvWrite { k, v, kv } = *op else {
            return Err(format!("{} before the cache", op.name()));
        };
        same(k == k_out && v == v0, "other keys or values")?;
        let (_, op) = self.next("a layer")?;
        let Op::Attention { q, kv: from, heads, softcap, out, .. } = *op else {
            return Err(format!("{} in place of attention", op.name()));
        };
        same(q == q_out && from == kv, "attention of other queries or keys")?;
        let at = self.stage(ATTEND)?;
        let (pairs, halves) = self.rope(rope)?;
        let KvRef { group, .. } = kv;
        let g = &self.plan.kv[group as usize];
        same(g.k_width == dim && g.v_width == dim, "heads of another width")?;
        same(DIMS.contains(&dim), &format!("heads of {dim}"))?;
        let share = heads / g.heads.max(1);
        same(
            g.heads * share == heads && (1..=SHARE_MAX).contains(&share),
            &format!("{heads} query heads of {} key heads", g.heads),
        )?;
        let turned = Turned {
            heads,
            kv_heads: g.heads,
            dim,
            pairs,
            halves,
            norms: q_norm.is_some() || k_norm.is_some(),
            capped: softcap.is_some(),
            norm_eps: eps,
        };
        Ok((at, out, turned))
    }

    fn rope(&self, rope: Option<RopeId>) -> Result<(u32, bool), String> {
        let table = rope.map(|r| &self.plan.ropes[r.ix()]).ok_or("layers without positions")?;
        Ok((table.inv_freq.len() as u32, table.pairs == RopePairs::Halves))
    }

    /// Norm and head of the wanted rows; the norm's epsilon.
    fn head(&mut self, x: ValueId) -> Result<(Head, f32), String> {
        let (mut ix, mut op) = self.next("the head")?;
        let (mut input, mut apart) = (x, None);
        if let Op::RmsNorm { x: from, weight, eps, residual: None, out } = *op {
            same(from == x, "a norm of another value")?;
            self.stage(NORM_ROWS)?;
            (input, apart) = (out, Some((weight, eps)));
            (ix, op) = self.next("the head")?;
        }
        let Op::Logits { x: from, linear, scale, softcap, .. } = *op else {
            return Err(format!("{} in place of the head", op.name()));
        };
        same(from == input, "a head of another value")?;
        self.product(ix, apart.is_none())?;
        same(self.at == self.stages.len(), "stages behind the head")?;
        same(
            matches!(self.next("the head")?.1, Op::Sample { .. }),
            "something between the head and the choice",
        )?;
        let (norm, eps) = match apart {
            Some(norm) => norm,
            None => *self.norms.get(&ix).ok_or("a head without a norm")?,
        };
        Ok((Head { linear, norm, scale, softcap: softcap.unwrap_or(0.0) }, eps))
    }
}

/// What positions, norms of heads and attention are like.
struct Turned {
    heads: u32,
    kv_heads: u32,
    dim: u32,
    pairs: u32,
    halves: bool,
    norms: bool,
    capped: bool,
    norm_eps: f32,
}
