//! One short method per op, in the vocabulary that the families' files are written in.

use fornax_plan::{Activation, Gating, KvGroup, KvRef, LayerSpan, Linear, Op, ValueId};

use super::{Attention, Builder, WIDTH_MAX};
use crate::error::{Error, Result};

impl<'a> Builder<'a> {
    /// Runs `body` once per layer, with tensors named within it, and notes the layer's span.
    pub(in crate::arch) fn each_layer(
        &mut self,
        mut x: ValueId,
        mut body: impl FnMut(&mut Builder<'a>, u32, ValueId) -> Result<ValueId>,
    ) -> Result<ValueId> {
        for layer in 0..self.layers {
            self.layer = Some(layer);
            let start = self.plan.ops.len();
            x = body(self, layer, x)?;
            let end = self.plan.ops.len();
            let signature = self.signature(start, end);
            let next = self.shapes.len() as u32;
            let shape = *self.shapes.entry(signature).or_insert(next);
            self.plan.layers.push(LayerSpan { start: start as u32, end: end as u32, shape });
        }
        self.layer = None;
        Ok(x)
    }

    /// What two layers must share to be run by one loop: ops, constants, weight types and shapes.
    fn signature(&self, start: usize, end: usize) -> String {
        let mut s = String::new();
        for op in &self.plan.ops[start..end] {
            let mut op = op.clone();
            // Which layer of its group a cache belongs to is what a loop over layers counts.
            if let Op::KvWrite { kv, .. } | Op::Attention { kv, .. } = &mut op {
                kv.layer = 0;
            }
            s += op.name();
            s += &op.constants();
            for w in op.weights() {
                let w = &self.plan.weights[w.ix()];
                s += &format!(" {}:{}x{}x{}", w.ty.name(), w.experts, w.rows, w.cols);
            }
            s.push('\n');
        }
        s
    }

    /// Token embeddings times `scale`.
    pub(in crate::arch) fn embed(&mut self, scale: f32) -> Result<ValueId> {
        let table = self.weight("token_embd.weight", self.plan.hyper.vocab, self.width, 1)?;
        let out = self.plan.value("x", self.width);
        self.plan.push(Op::Embed { table, scale, out });
        Ok(out)
    }

    /// RMS norm with `{name}.weight`.
    pub(in crate::arch) fn norm(&mut self, x: ValueId, name: &str) -> Result<ValueId> {
        self.norm_plus(x, name, None)
    }

    /// RMS norm with `{name}.weight`, plus a residual.
    pub(in crate::arch) fn norm_plus(
        &mut self,
        x: ValueId,
        name: &str,
        residual: Option<ValueId>,
    ) -> Result<ValueId> {
        let width = self.plan.width(x);
        let weight = self.vector(name, width)?;
        let out = self.like(name, x);
        let eps = self.eps;
        self.plan.push(Op::RmsNorm { x, weight, eps, residual, out });
        Ok(out)
    }

    fn like(&mut self, name: &str, x: ValueId) -> ValueId {
        let spec = &self.plan.values[x.ix()];
        let (rows, width) = (spec.rows, spec.width);
        match rows {
            fornax_plan::RowSpace::Tokens => self.plan.value(name, width),
            fornax_plan::RowSpace::Wanted => self.plan.wanted_value(name, width),
        }
    }

    /// `{name}` as a projection to `rows`, plus a residual.
    pub(in crate::arch) fn project(
        &mut self,
        x: ValueId,
        name: &str,
        rows: u32,
        residual: Option<ValueId>,
    ) -> Result<ValueId> {
        let linear = self.linear(name, rows, self.plan.width(x))?;
        let out = self.plan.value(name, rows);
        self.plan.push(Op::MatMul { x, linear, residual, out });
        Ok(out)
    }

    /// Q, K, V, their norms and positions, the cache, and attention; before the output projection.
    pub(in crate::arch) fn attend(&mut self, x: ValueId, a: &Attention) -> Result<ValueId> {
        let (kv_heads, dim) = (self.kv_heads(), self.k_width);
        if kv_heads == 0 || !self.heads.is_multiple_of(kv_heads) {
            return Err(Error::malformed(format!(
                "loading the model: {} query heads over {kv_heads} key/value heads, expected a multiple",
                self.heads
            )));
        }
        let width_of = |heads: u32, width: u32| {
            heads.checked_mul(width).filter(|w| *w <= WIDTH_MAX).ok_or_else(|| {
                Error::malformed(format!(
                    "loading the model: {heads} heads of width {width} are too wide"
                ))
            })
        };
        let (qw, kw, vw, ow) = (
            width_of(self.heads, dim)?,
            width_of(kv_heads, dim)?,
            width_of(kv_heads, self.v_width)?,
            width_of(self.heads, self.v_width)?,
        );
        let cols = self.plan.width(x);
        let wq = self.linear("attn_q", qw, cols)?;
        let wk = self.linear("attn_k", kw, cols)?;
        let wv = self.linear("attn_v", vw, cols)?;
        let q_out = self.plan.value("q_raw", qw);
        let k_out = self.plan.value("k_raw", kw);
        let v = self.plan.value("v", vw);
        self.plan.push(Op::Qkv { x, q: wq, k: wk, v: wv, q_out, k_out, v_out: v });
        let (q, k) = self.norm_and_rotate(q_out, k_out, a)?;
        let kv = self.cache(a.window);
        self.plan.push(Op::KvWrite { k, v, kv });
        let sinks = if a.sinks { Some(self.vector("attn_sinks", self.heads)?) } else { None };
        let out = self.plan.value("attn", ow);
        let Attention { scale, softcap, .. } = *a;
        self.plan.push(Op::Attention { q, kv, heads: self.heads, scale, softcap, sinks, out });
        Ok(out)
    }

    fn norm_and_rotate(
        &mut self,
        q: ValueId,
        k: ValueId,
        a: &Attention,
    ) -> Result<(ValueId, ValueId)> {
        if a.rope.is_none() && !a.qk_norm {
            return Ok((q, k));
        }
        let (dim, eps) = (self.k_width, self.eps);
        let q_norm = if a.qk_norm { Some(self.vector("attn_q_norm", dim)?) } else { None };
        let k_norm = if a.qk_norm { Some(self.vector("attn_k_norm", dim)?) } else { None };
        let q_out = self.plan.value("q", self.plan.width(q));
        let k_out = self.plan.value("k", self.plan.width(k));
        self.plan.push(Op::QkNormRope {
            q,
            k,
            q_norm,
            k_norm,
            eps,
            rope: a.rope,
            dim,
            q_out,
            k_out,
        });
        Ok((q_out, k_out))
    }

    fn cache(&mut self, window: Option<u32>) -> KvRef {
        let geometry = KvGroup {
            layers: Vec::new(),
            window,
            heads: self.kv_heads(),
            k_width: self.k_width,
            v_width: self.v_width,
        };
        self.plan.kv_layer(self.layer.unwrap_or(0), &geometry)
    }

    /// `act(ffn_gate·x) * (ffn_up·x)`, before the down projection.
    pub(in crate::arch) fn gated_mlp(&mut self, x: ValueId, act: Activation) -> Result<ValueId> {
        let (ff, cols) = (self.ff()?, self.plan.width(x));
        let gate = self.linear("ffn_gate", ff, cols)?;
        let up = self.linear("ffn_up", ff, cols)?;
        let out = self.plan.value("ffn", ff);
        self.plan.push(Op::GatedMlp { x, gate, up, act, out });
        Ok(out)
    }

    /// The router and the chosen experts' MLPs, plus a residual.
    pub(in crate::arch) fn experts(
        &mut self,
        x: ValueId,
        gating: Gating,
        act: Activation,
        residual: Option<ValueId>,
    ) -> Result<ValueId> {
        let (experts, top_k) = (self.require("expert_count")?, self.require("expert_used_count")?);
        if top_k > experts {
            return Err(Error::malformed(format!(
                "loading the model: {top_k} of {experts} experts per token"
            )));
        }
        if !self.has("ffn_gate_exps.weight") {
            return Err(Error::unsupported(
                "loading the model: its experts are separate tensors (an old layout); \
                 convert it again with a current converter",
            ));
        }
        let ff = match self.u32("expert_feed_forward_length")? {
            Some(ff) if ff > 0 && ff <= WIDTH_MAX => ff,
            _ => self.ff()?,
        };
        let cols = self.plan.width(x);
        let router = self.linear("ffn_gate_inp", experts, cols)?;
        let ids = self.plan.index_value("experts", top_k);
        let weights = self.plan.value("shares", top_k);
        self.plan.push(Op::MoeRoute { x, router, top_k, gating, ids, weights });
        let gate = self.expert_linear("ffn_gate_exps", ff, cols, experts)?;
        let up = self.expert_linear("ffn_up_exps", ff, cols, experts)?;
        let down = self.expert_linear("ffn_down_exps", cols, ff, experts)?;
        let out = self.plan.value("moe", cols);
        self.plan.push(Op::MoeMlp { x, ids, weights, gate, up, down, act, residual, out });
        Ok(out)
    }

    /// LFM2's short convolution between its two projections.
    pub(in crate::arch) fn short_conv(&mut self, x: ValueId, taps: u32) -> Result<ValueId> {
        let width = self.plan.width(x) / 3;
        let kernel = self.weight("shortconv.conv.weight", width, taps, 1)?;
        let len = (taps - 1).checked_mul(width).ok_or_else(|| {
            Error::malformed(format!(
                "loading the model: a convolution of {taps} taps over {width} channels is too large"
            ))
        })?;
        let state = self.plan.state(&self.tensor_name("conv"), len);
        let out = self.plan.value("conv", width);
        self.plan.push(Op::ShortConv { x, kernel, state, out });
        Ok(out)
    }

    /// The wanted rows, the final norm, the head (tied where the file has no `output.weight`),
    /// and the choice of tokens.
    pub(in crate::arch) fn head(
        &mut self,
        x: ValueId,
        norm: &str,
        softcap: Option<f32>,
    ) -> Result<()> {
        let last = self.plan.wanted_value("last", self.width);
        self.plan.push(Op::SelectRows { x, out: last });
        let normed = self.norm(last, norm)?;
        self.plan.push(Op::HiddenOut { x: normed });
        let vocab = self.plan.hyper.vocab;
        let linear = if self.has("output.weight") {
            self.linear("output", vocab, self.width)?
        } else {
            Linear { weight: self.weight("token_embd.weight", vocab, self.width, 1)?, bias: None }
        };
        let logits = self.plan.wanted_value("logits", vocab);
        self.plan.push(Op::Logits { x: normed, linear, scale: 1.0, softcap, out: logits });
        self.plan.push(Op::Sample { logits });
        Ok(())
    }
}
