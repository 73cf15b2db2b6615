//! What the families share: reading hyperparameters and tensors by name with checked shapes,
//! and one short method per op. It knows the naming of GGUF files, no family and no device.

mod ops;
mod tensors;

use std::collections::HashMap;

use fornax_gguf::{Gguf, PerLayer};
use fornax_plan::{Hyper, Plan, RopeId, RopePairs, WeightId};

use super::Family;
use super::rope::{self, Scaling, Yarn};
use crate::error::{Error, Result};

/// Most layers, heads and elements that a sane file names; a bound before anything is built.
const LAYERS_MAX: u32 = 4096;
const WIDTH_MAX: u32 = 1 << 20;

/// A plan under construction from a file.
pub(in crate::arch) struct Builder<'a> {
    gguf: &'a Gguf,
    architecture: &'static str,
    plan: Plan,
    weights: HashMap<String, WeightId>,
    layer: Option<u32>,
    shapes: HashMap<String, u32>,
    /// Layers of the model.
    pub(in crate::arch) layers: u32,
    /// Width of the residual stream.
    pub(in crate::arch) width: u32,
    /// Query heads.
    pub(in crate::arch) heads: u32,
    /// Epsilon of the RMS norms.
    pub(in crate::arch) eps: f32,
    kv_heads: PerLayer<u32>,
    ff: PerLayer<u32>,
    /// Elements of a key head.
    pub(in crate::arch) k_width: u32,
    v_width: u32,
}

/// One attention block's constants; families fill in what differs.
#[derive(Clone, Copy, Debug)]
pub(in crate::arch) struct Attention {
    /// Keys a row sees.
    pub(in crate::arch) window: Option<u32>,
    /// The rotary table.
    pub(in crate::arch) rope: Option<RopeId>,
    /// Whether q and k heads have a norm of their own.
    pub(in crate::arch) qk_norm: bool,
    /// Factor on the scores.
    pub(in crate::arch) scale: f32,
    /// Soft-cap of the scores.
    pub(in crate::arch) softcap: Option<f32>,
    /// Whether the layer has `attn_sinks`.
    pub(in crate::arch) sinks: bool,
}

impl<'a> Builder<'a> {
    pub(in crate::arch) fn new(gguf: &'a Gguf, family: &Family) -> Result<Builder<'a>> {
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
    pub(in crate::arch) fn finish(self) -> Plan {
        self.plan
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    /// An integer key below the architecture's prefix.
    pub(in crate::arch) fn u32(&self, name: &str) -> Result<Option<u32>> {
        Ok(self.gguf.metadata().u32(&self.key(name))?)
    }

    /// A float key below the architecture's prefix; must be finite.
    pub(in crate::arch) fn f32(&self, name: &str) -> Result<Option<f32>> {
        let key = self.key(name);
        match self.gguf.metadata().f32(&key)? {
            Some(v) if !v.is_finite() => Err(Error::malformed(format!(
                "loading the model: {key} is {v}, expected a finite number"
            ))),
            found => Ok(found),
        }
    }

    /// A positive float key, or its default.
    pub(in crate::arch) fn positive(&self, name: &str, default: f32) -> Result<f32> {
        let found = self.f32(name)?.unwrap_or(default);
        if found > 0.0 {
            return Ok(found);
        }
        let key = self.key(name);
        Err(Error::malformed(format!("loading the model: {key} is {found}, expected more than 0")))
    }

    /// A positive integer key that must be there.
    pub(in crate::arch) fn require(&self, name: &str) -> Result<u32> {
        let key = self.key(name);
        match self.gguf.metadata().require_u32(&key)? {
            0 => {
                Err(Error::malformed(format!("loading the model: {key} is 0, expected at least 1")))
            }
            found => Ok(found),
        }
    }

    /// Key/value heads of the current layer; 0 where it has no attention.
    pub(in crate::arch) fn kv_heads(&self) -> u32 {
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
    pub(in crate::arch) fn default_scale(&self) -> f32 {
        1.0 / (self.k_width as f32).sqrt()
    }

    /// The rotary table that the file's scaling keys describe, for base `base`.
    pub(in crate::arch) fn rope(&mut self, pairs: RopePairs) -> Result<RopeId> {
        let base = self.positive("rope.freq_base", 10_000.0)?;
        let scaling = self.rope_scaling()?;
        self.rope_with(pairs, base, &scaling)
    }

    /// A rotary table with a base and a scaling of the family's own.
    pub(in crate::arch) fn rope_with(
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
        if let Scaling::Factors(f) = scaling
            && (f.len() != dims as usize / 2 || f.iter().any(|v| !(v.is_finite() && *v > 0.0)))
        {
            let (n, want) = (f.len(), dims / 2);
            return Err(Error::malformed(format!(
                "loading the model: rope_freqs.weight has {n} elements, expected {want} positive numbers"
            )));
        }
        Ok(self.plan.rope(rope::table(pairs, dims, base, scaling)))
    }

    /// The scaling rule that the file names.
    pub(in crate::arch) fn rope_scaling(&self) -> Result<Scaling> {
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
}
