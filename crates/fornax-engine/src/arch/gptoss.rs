//! gpt-oss (OpenAI 2025): attention sinks, a window on every other layer, yarn, biases
//! throughout, and a mixture whose softmax is over the chosen experts alone.

use fornax_plan::{Activation, Gating, RopePairs};

use super::builder::{Attention, Builder};
use crate::error::Result;

/// Pushes the forward pass.
pub(super) fn build(b: &mut Builder<'_>) -> Result<()> {
    let window = b.u32("attention.sliding_window")?.filter(|w| *w > 0);
    let rope = Some(b.rope(RopePairs::Halves)?);
    let scale = b.default_scale();
    let full = Attention { window: None, rope, qk_norm: false, scale, softcap: None, sinks: true };
    let act = Activation::SwigluClamped { alpha: 1.702, limit: 7.0 };
    let x = b.embed(1.0)?;
    let x = b.each_layer(x, |b, layer, x| {
        let attention = if layer % 2 == 0 { Attention { window, ..full } } else { full };
        let h = b.norm(x, "attn_norm")?;
        let a = b.attend(h, &attention)?;
        let x = b.project(a, "attn_output", b.width, Some(x))?;
        // Named after the attention, it is the norm before the experts.
        let h = b.norm(x, "post_attention_norm")?;
        b.experts(h, Gating::TopKThenSoftmax, act, Some(x))
    })?;
    b.head(x, "output_norm", None)
}
