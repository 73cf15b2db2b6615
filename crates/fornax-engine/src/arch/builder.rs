//! What the families share: reading hyperparameters and tensors by name with checked shapes,
//! and one short method per op. It knows the naming of GGUF files, no family and no device.

use std::collections::HashMap;

use fornax_gguf::{Gguf, PerLayer, TensorInfo};
use fornax_plan::{
    Activation, Gating, Hyper, KvGroup, KvRef, LayerSpan, Linear, Op, Plan, RopeId, RopePairs,
    ValueId, WeightId, WeightRef,
};

use super::Family;
use super::rope::{self, Scaling, Yarn};
use crate::error::{Error, Result};

/// Most layers, heads and elements that a sane file names; a bound before anything is built.
const LAYERS_MAX: u32 = 4096;
const WIDTH_MAX: u32 = 1 << 20;

/// A plan under construction from a file.
pub(super) struct Builder<'a> {
    gguf: &'a Gguf,
    architecture: &'static str,
    plan: Plan,
    weights: HashMap<String, WeightId>,
    layer: Option<u32>,
    shapes: HashMap<String, u32>,
    /// Layers of the model.
    pub(super) layers: u32,
    /// Width of the residual stream.
    pub(super) width: u32,
    /// Query heads.
    pub(super) heads: u32,
    /// Epsilon of the RMS norms.
    pub(super) eps: f32,
    kv_heads: PerLayer<u32>,
    ff: PerLayer<u32>,
    /// Elements of a key head.
    pub(super) k_width: u32,
    v_width: u32,
}

/// One attention block's constants; families fill in what differs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attention {
    /// Keys a row sees.
    pub(super) window: Option<u32>,
    /// The rotary table.
    pub(super) rope: Option<RopeId>,
    /// Whether q and k heads have a norm of their own.
    pub(super) qk_norm: bool,
    /// Factor on the scores.
    pub(super) scale: f32,
    /// Soft-cap of the scores.
    pub(super) softcap: Option<f32>,
    /// Whether the layer has `attn_sinks`.
    pub(super) sinks: bool,
}

impl<'a> Builder<'a> {
    pub(super) fn new(gguf: &'a Gguf, family: &Family) -> Result<Builder<'a>> {
        let arch = family.architecture;
        let table = gguf.tensor("token_embd.weight").ok_or_else(|| {
            Error::malformed("loading the model: tensor token_embd.weight is missing")
        })?;
        let vocab = u32::try_from(table.rows()).unwrap_or(0);
        let key = |name: &str| format!("{arch}.{name}");
        let meta = gguf.metadata();
        let bounded = |name: &str, most: u32| -> Result<u32> {
            let found = meta.require_u32(&key(name))?;
            if found == 0 || found > most {
                let key = key(name);
                return Err(Error::malformed(format!(
                    "loading the model: {key} is {found}, expected 1 to {most}"
                )));
            }
            Ok(found)
        };
        let layers = bounded("block_count", LAYERS_MAX)?;
        let width = bounded("embedding_length", WIDTH_MAX)?;
        let heads = bounded("attention.head_count", WIDTH_MAX)?;
        let per_layer = |name: &str| meta.per_layer_u32(&key(name), layers as usize);
        let kv_heads = per_layer("attention.head_count_kv")?.unwrap_or(PerLayer::Same(heads));
        let ff = per_layer("feed_forward_length")?.unwrap_or(PerLayer::Same(0));
        let k_width = meta.u32(&key("attention.key_length"))?.unwrap_or(width / heads);
        let v_width = meta.u32(&key("attention.value_length"))?.unwrap_or(k_width);
        let eps = meta.require_f32(&key("attention.layer_norm_rms_epsilon"))?;
        let context = bounded("context_length", u32::MAX)?;
        if !(eps.is_finite() && eps > 0.0) {
            return Err(Error::malformed(format!(
                "loading the model: {} is {eps}, expected a small positive number",
                key("attention.layer_norm_rms_epsilon")
            )));
        }
        if vocab == 0 || k_width == 0 || v_width == 0 || k_width > WIDTH_MAX || v_width > WIDTH_MAX
        {
            return Err(Error::malformed(format!(
                "loading the model: vocabulary {vocab}, key width {k_width}, value width {v_width}; \
                 each must be at least 1"
            )));
        }
        let hyper = Hyper { family: family.name.to_string(), vocab, width, context };
        Ok(Builder {
            gguf,
            architecture: arch,
            plan: Plan::new(hyper),
            weights: HashMap::new(),
            layer: None,
            shapes: HashMap::new(),
            layers,
            width,
            heads,
            eps,
            kv_heads,
            ff,
            k_width,
            v_width,
        })
    }

    /// The finished plan.
    pub(super) fn finish(self) -> Plan {
        self.plan
    }

    // ---- hyperparameters ----

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    /// An integer key below the architecture's prefix.
    pub(super) fn u32(&self, name: &str) -> Result<Option<u32>> {
        Ok(self.gguf.metadata().u32(&self.key(name))?)
    }

    /// A float key below the architecture's prefix; must be finite.
    pub(super) fn f32(&self, name: &str) -> Result<Option<f32>> {
        let key = self.key(name);
        match self.gguf.metadata().f32(&key)? {
            Some(v) if !v.is_finite() => Err(Error::malformed(format!(
                "loading the model: {key} is {v}, expected a finite number"
            ))),
            found => Ok(found),
        }
    }

    /// A positive float key, or its default.
    pub(super) fn positive(&self, name: &str, default: f32) -> Result<f32> {
        let found = self.f32(name)?.unwrap_or(default);
        if found > 0.0 {
            return Ok(found);
        }
        let key = self.key(name);
        Err(Error::malformed(format!("loading the model: {key} is {found}, expected more than 0")))
    }

    /// A positive integer key that must be there.
    pub(super) fn require(&self, name: &str) -> Result<u32> {
        let key = self.key(name);
        match self.gguf.metadata().require_u32(&key)? {
            0 => {
                Err(Error::malformed(format!("loading the model: {key} is 0, expected at least 1")))
            }
            found => Ok(found),
        }
    }

    /// Key/value heads of the current layer; 0 where it has no attention.
    pub(super) fn kv_heads(&self) -> u32 {
        self.kv_heads.get(self.layer.unwrap_or(0) as usize)
    }

    fn ff(&self) -> Result<u32> {
        match self.ff.get(self.layer.unwrap_or(0) as usize) {
            0 => {
                let key = self.key("feed_forward_length");
                Err(Error::malformed(format!("loading the model: {key} is missing or 0")))
            }
            n if n > WIDTH_MAX => Err(Error::malformed(format!(
                "loading the model: feed-forward width {n} is too large"
            ))),
            n => Ok(n),
        }
    }

    /// `1 / sqrt(k_width)`, the usual factor on attention scores.
    pub(super) fn default_scale(&self) -> f32 {
        1.0 / (self.k_width as f32).sqrt()
    }

    /// The rotary table that the file's scaling keys describe, for base `base`.
    pub(super) fn rope(&mut self, pairs: RopePairs) -> Result<RopeId> {
        let base = self.positive("rope.freq_base", 10_000.0)?;
        let scaling = self.rope_scaling()?;
        self.rope_with(pairs, base, &scaling)
    }

    /// A rotary table with a base and a scaling of the family's own.
    pub(super) fn rope_with(
        &mut self,
        pairs: RopePairs,
        base: f32,
        scaling: &Scaling,
    ) -> Result<RopeId> {
        let dims = self.u32("rope.dimension_count")?.unwrap_or(self.k_width);
        if dims == 0 || dims % 2 != 0 || dims > self.k_width {
            let key = self.key("rope.dimension_count");
            let most = self.k_width;
            return Err(Error::malformed(format!(
                "loading the model: {key} is {dims}, expected even and at most {most}"
            )));
        }
        if base <= 1.0 {
            return Err(Error::malformed(format!(
                "loading the model: rope base {base}, expected more than 1"
            )));
        }
        if let Scaling::Factors(f) = scaling {
            if f.len() != dims as usize / 2 || f.iter().any(|v| !(v.is_finite() && *v > 0.0)) {
                let n = f.len();
                let want = dims / 2;
                return Err(Error::malformed(format!(
                    "loading the model: rope_freqs.weight has {n} elements, expected {want} positive numbers"
                )));
            }
        }
        Ok(self.plan.rope(rope::table(pairs, dims, base, scaling)))
    }

    /// The scaling rule that the file names.
    pub(super) fn rope_scaling(&self) -> Result<Scaling> {
        if let Some(t) = self.gguf.tensor("rope_freqs.weight") {
            let n = t.n_elements() as u32;
            return Ok(Scaling::Factors(self.weight_ref(t, 1, n, 1)?.to_f32()));
        }
        let kind = self.gguf.metadata().str(&self.key("rope.scaling.type"))?;
        let factor = || self.positive("rope.scaling.factor", 1.0);
        match kind {
            None => match self.f32("rope.scale_linear")? {
                Some(f) if f > 0.0 && f != 1.0 => Ok(Scaling::Linear(f)),
                _ => Ok(Scaling::None),
            },
            Some("none") => Ok(Scaling::None),
            Some("linear") => Ok(Scaling::Linear(factor()?)),
            Some("yarn") => Ok(Scaling::Yarn(Yarn {
                factor: factor()?,
                original_context: self
                    .u32("rope.scaling.original_context_length")?
                    .unwrap_or(self.plan.hyper.context),
                beta_fast: self.positive("rope.scaling.yarn_beta_fast", 32.0)?,
                beta_slow: self.positive("rope.scaling.yarn_beta_slow", 1.0)?,
            })),
            Some(other) => Err(Error::unsupported(format!(
                "loading the model: rope scaling {other:?} is not supported; supported: none, linear, yarn, \
                 llama-3 factors"
            ))),
        }
    }

    // ---- tensors ----

    fn tensor_name(&self, name: &str) -> String {
        match self.layer {
            Some(l) => format!("blk.{l}.{name}"),
            None => name.to_string(),
        }
    }

    /// Whether the current layer (or the file, outside layers) has this tensor.
    pub(super) fn has(&self, name: &str) -> bool {
        self.gguf.tensor(&self.tensor_name(name)).is_some()
    }

    fn weight_ref(&self, t: &TensorInfo, rows: u32, cols: u32, experts: u32) -> Result<WeightRef> {
        let d = |i: usize| t.dims.get(i).copied().unwrap_or(1);
        let found = (d(0), d(1), d(2));
        let want = (u64::from(cols), u64::from(rows), u64::from(experts));
        if found != want || t.dims.get(3).is_some_and(|d| *d != 1) {
            return Err(Error::malformed(format!(
                "loading the model: tensor {} has shape {:?}, expected [{cols}, {rows}, {experts}]",
                t.name, t.dims
            )));
        }
        if !(cols as usize).is_multiple_of(t.ty.block_len()) {
            return Err(Error::malformed(format!(
                "loading the model: tensor {} of type {} has rows of {cols} elements, no multiple of {}",
                t.name,
                t.ty.name(),
                t.ty.block_len()
            )));
        }
        Ok(WeightRef {
            name: t.name.clone(),
            ty: t.ty,
            cols,
            rows,
            experts,
            data: self.gguf.mapping(t).clone(),
            offset: usize::try_from(t.offset)
                .map_err(|_| Error::malformed(format!("tensor {}: offset {}", t.name, t.offset)))?,
        })
    }

    /// A tensor of the current layer as `experts` matrices of rows × cols; the same tensor asked
    /// for twice is one weight.
    pub(super) fn weight(
        &mut self,
        name: &str,
        rows: u32,
        cols: u32,
        experts: u32,
    ) -> Result<WeightId> {
        let name = self.tensor_name(name);
        if let Some(id) = self.weights.get(&name) {
            return Ok(*id);
        }
        let tensor = self.gguf.tensor(&name).ok_or_else(|| {
            Error::malformed(format!("loading the model: tensor {name} is missing"))
        })?;
        let weight = self.weight_ref(tensor, rows, cols, experts)?;
        let id = self.plan.weight(weight);
        self.weights.insert(name, id);
        Ok(id)
    }

    /// A vector of f32, `{name}.weight`.
    pub(super) fn vector(&mut self, name: &str, len: u32) -> Result<WeightId> {
        self.weight(&format!("{name}.weight"), 1, len, 1)
    }

    /// `{name}.weight` with `{name}.bias` where the file has one.
    pub(super) fn linear(&mut self, name: &str, rows: u32, cols: u32) -> Result<Linear> {
        self.expert_linear(name, rows, cols, 1)
    }

    /// As [`Builder::linear`], for a stack of experts.
    pub(super) fn expert_linear(
        &mut self,
        name: &str,
        rows: u32,
        cols: u32,
        experts: u32,
    ) -> Result<Linear> {
        let weight = self.weight(&format!("{name}.weight"), rows, cols, experts)?;
        let bias = format!("{name}.bias");
        let bias = if self.has(&bias) {
            let (r, c) = if experts > 1 { (experts, rows) } else { (1, rows) };
            Some(self.weight(&bias, r, c, 1)?)
        } else {
            None
        };
        Ok(Linear { weight, bias })
    }

    // ---- ops ----

    /// Runs `body` once per layer, with tensors named within it, and notes the layer's span.
    pub(super) fn each_layer(
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
    pub(super) fn embed(&mut self, scale: f32) -> Result<ValueId> {
        let table = self.weight("token_embd.weight", self.plan.hyper.vocab, self.width, 1)?;
        let out = self.plan.value("x", self.width);
        self.plan.push(Op::Embed { table, scale, out });
        Ok(out)
    }

    /// RMS norm with `{name}.weight`.
    pub(super) fn norm(&mut self, x: ValueId, name: &str) -> Result<ValueId> {
        self.norm_plus(x, name, None)
    }

    /// RMS norm with `{name}.weight`, plus a residual.
    pub(super) fn norm_plus(
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
    pub(super) fn project(
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
    pub(super) fn attend(&mut self, x: ValueId, a: &Attention) -> Result<ValueId> {
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
        let (qw, kw, vw) = (
            width_of(self.heads, dim)?,
            width_of(kv_heads, dim)?,
            width_of(kv_heads, self.v_width)?,
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
        let out = self.plan.value("attn", self.heads * self.v_width);
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
    pub(super) fn gated_mlp(&mut self, x: ValueId, act: Activation) -> Result<ValueId> {
        let (ff, cols) = (self.ff()?, self.plan.width(x));
        let gate = self.linear("ffn_gate", ff, cols)?;
        let up = self.linear("ffn_up", ff, cols)?;
        let out = self.plan.value("ffn", ff);
        self.plan.push(Op::GatedMlp { x, gate, up, act, out });
        Ok(out)
    }

    /// The router and the chosen experts' MLPs, plus a residual.
    pub(super) fn experts(
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
    pub(super) fn short_conv(&mut self, x: ValueId, taps: u32) -> Result<ValueId> {
        let width = self.plan.width(x) / 3;
        let kernel = self.weight("shortconv.conv.weight", width, taps, 1)?;
        let state = self.plan.state(&self.tensor_name("conv"), (taps - 1) * width);
        let out = self.plan.value("conv", width);
        self.plan.push(Op::ShortConv { x, kernel, state, out });
        Ok(out)
    }

    /// The wanted rows, the final norm, the head (tied where the file has no `output.weight`),
    /// and the choice of tokens.
    pub(super) fn head(&mut self, x: ValueId, norm: &str, softcap: Option<f32>) -> Result<()> {
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
