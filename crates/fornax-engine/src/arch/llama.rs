//! Llama (Touvron et al. 2023; Dubey et al. 2024): pre-norm decoder, grouped-query attention,
//! rotary positions on adjacent pairs, SwiGLU. Biases are taken where a file has them.

use fornax_plan::{Activation, RopePairs};

use super::builder::{Attention, Builder};
use crate::error::Result;

/// Pushes the forward pass of a dense Llama.
pub(super) fn build(b: &mut Builder<'_>) -> Result<()> {
    decoder(b, None)
}

/// The same decoder with a sliding window on every layer.
pub(super) fn decoder(b: &mut Builder<'_>, window: Option<u32>) -> Result<()> {
    let rope = Some(b.rope(RopePairs::Adjacent)?);
    let scale = b.default_scale();
    let attention = Attention { window, rope, qk_norm: false, scale, softcap: None, sinks: false };
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
