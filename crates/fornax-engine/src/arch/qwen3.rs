//! Qwen3 (Yang et al. 2025): every head of Q and K has an RMS norm before its rotation; no biases.

use fornax_plan::{Activation, RopePairs};

use super::builder::{Attention, Builder};
use crate::error::Result;

/// Pushes the forward pass.
pub(super) fn build(b: &mut Builder<'_>) -> Result<()> {
    let attention = attention(b)?;
    let x = b.embed(1.0)?;
    let x = b.each_layer(x, |b, _, x| {
        let h = b.norm(x, "attn_norm")?;
        let a = b.attend(h, &attention)?;
        let x = b.project(a, "attn_output", b.width, Some(x))?;
        let h = b.norm(x, "ffn_norm")?;
        let m = b.gated_mlp(h, Activation::Silu)?;
        b.project(m, "ffn_down", b.width, Some(x))
    })?;
    b.head(x, "output_norm", None)
}

/// Qwen3's attention, shared with its mixtures.
pub(super) fn attention(b: &mut Builder<'_>) -> Result<Attention> {
    let rope = Some(b.rope(RopePairs::Halves)?);
    let scale = b.default_scale();
    Ok(Attention { window: None, rope, qk_norm: true, scale, softcap: None, sinks: false })
}
