//! LFM2 (Liquid AI 2025): most layers mix tokens by a gated short convolution with a state of a
//! few taps, some by attention with QK norms; a layer without key/value heads is a convolution.

use fornax_plan::{Activation, RopePairs};

use super::builder::{Attention, Builder};
use crate::error::Result;

/// Pushes the forward pass.
pub(super) fn build(b: &mut Builder<'_>) -> Result<()> {
    let taps = b.require("shortconv.l_cache")?;
    let rope = Some(b.rope(RopePairs::Halves)?);
    let scale = b.default_scale();
    let attention =
        Attention { window: None, rope, qk_norm: true, scale, softcap: None, sinks: false };
    let x = b.embed(1.0)?;
    let x = b.each_layer(x, |b, _, x| {
        let h = b.norm(x, "attn_norm")?;
        let x = if b.kv_heads() == 0 {
            let bcx = b.project(h, "shortconv.in_proj", 3 * b.width, None)?;
            let c = b.short_conv(bcx, taps)?;
            b.project(c, "shortconv.out_proj", b.width, Some(x))?
        } else {
            let a = b.attend(h, &attention)?;
            b.project(a, "attn_output", b.width, Some(x))?
        };
        let h = b.norm(x, "ffn_norm")?;
        let m = b.gated_mlp(h, Activation::Silu)?;
        b.project(m, "ffn_down", b.width, Some(x))
    })?;
    // The file calls the final norm after the embedding.
    b.head(x, "token_embd_norm", None)
}
