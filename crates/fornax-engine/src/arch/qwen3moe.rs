//! Qwen3-MoE: Qwen3's attention, and a mixture whose chosen weights are renormalised.

use fornax_plan::{Activation, Gating};

use super::builder::Builder;
use super::qwen3;
use crate::error::Result;

/// Pushes the forward pass.
pub(super) fn build(b: &mut Builder<'_>) -> Result<()> {
    let attention = qwen3::attention(b)?;
    let x = b.embed(1.0)?;
    let x = b.each_layer(x, |b, _, x| {
        let h = b.norm(x, "attn_norm")?;
        let a = b.attend(h, &attention)?;
        let x = b.project(a, "attn_output", b.width, Some(x))?;
        let h = b.norm(x, "ffn_norm")?;
        b.experts(h, Gating::SoftmaxThenTopK { normalise: true }, Activation::Silu, Some(x))
    })?;
    b.head(x, "output_norm", None)
}
