//! Gemma 2 (Gemma Team 2024): embeddings scaled by √width, norms before and after each block,
//! soft-capped scores and logits, a window on every other layer, GELU gate.

use fornax_plan::{Activation, RopePairs};

use super::builder::{Attention, Builder};
use crate::error::Result;

/// Layers of the 27B model, which scales its scores by the width of an even share of the stream
/// instead of the head's.
const LAYERS_27B: u32 = 46;

/// Pushes the forward pass.
pub(super) fn build(b: &mut Builder<'_>) -> Result<()> {
    let window = b.u32("attention.sliding_window")?.filter(|w| *w > 0);
    let rope = Some(b.rope(RopePairs::Halves)?);
    let scale = if b.layers == LAYERS_27B {
        1.0 / ((b.width / b.heads) as f32).sqrt()
    } else {
        b.default_scale()
    };
    let softcap = b.f32("attn_logit_softcapping")?.filter(|c| *c > 0.0);
    let full = Attention { window: None, rope, qk_norm: false, scale, softcap, sinks: false };
    let x = b.embed((b.width as f32).sqrt())?;
    let x = b.each_layer(x, |b, layer, x| {
        let attention = if layer % 2 == 0 { Attention { window, ..full } } else { full };
        let h = b.norm(x, "attn_norm")?;
        let a = b.attend(h, &attention)?;
        let a = b.project(a, "attn_output", b.width, None)?;
        let x = b.norm_plus(a, "post_attention_norm", Some(x))?;
        let h = b.norm(x, "ffn_norm")?;
        let m = b.gated_mlp(h, Activation::GeluTanh)?;
        let m = b.project(m, "ffn_down", b.width, None)?;
        b.norm_plus(m, "post_ffw_norm", Some(x))
    })?;
    let softcap = b.f32("final_logit_softcapping")?.filter(|c| *c > 0.0);
    b.head(x, "output_norm", softcap)
}
