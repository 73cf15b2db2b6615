//! Qwen2 and Qwen2.5 (Yang et al. 2024): biases on Q, K and V, rotary positions on halves, yarn
//! for long contexts.

use fornax_plan::{Activation, RopePairs};

use super::builder::{Attention, Builder};
use crate::error::Result;

/// Pushes the forward pass.
pub(super) fn build(b: &mut Builder<'_>) -> Result<()> {
    let rope = Some(b.rope(RopePairs::Halves)?);
    let scale = b.default_scale();
    let attention =
        Attention { window: None, rope, qk_norm: false, scale, softcap: None, sinks: false };
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
