//! Mixtral (Jiang et al. 2024): Llama whose MLP is a mixture of experts; the softmax over all
//! experts is cut to the best k and renormalised.

use fornax_plan::{Activation, Gating, RopePairs};

use super::builder::{Attention, Builder};
use crate::error::Result;

/// Pushes the forward pass of a Llama with experts.
pub(super) fn build(b: &mut Builder<'_>) -> Result<()> {
    let window = b.u32("attention.sliding_window")?.filter(|w| *w > 0);
    let rope = Some(b.rope(RopePairs::Adjacent)?);
    let scale = b.default_scale();
    let attention = Attention { window, rope, qk_norm: false, scale, softcap: None, sinks: false };
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
