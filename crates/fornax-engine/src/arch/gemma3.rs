//! Gemma 3 (Gemma Team 2025): Gemma 2 without soft-caps, with QK norms, a window on five layers of
//! six, and a rotary base of its own for the windowed layers.

use fornax_plan::{Activation, RopePairs};

use super::builder::{Attention, Builder};
use super::rope::Scaling;
use crate::error::Result;

/// Layers of the 27B model; see Gemma 2.
const LAYERS_27B: u32 = 62;

/// Pushes the forward pass.
pub(super) fn build(b: &mut Builder<'_>) -> Result<()> {
    let window = b.u32("attention.sliding_window")?.filter(|w| *w > 0);
    let pattern = b.u32("attention.sliding_window_pattern")?.filter(|p| *p > 0).unwrap_or(6);
    let global = Some(b.rope(RopePairs::Halves)?);
    let local_base = b.positive("rope.freq_base_swa", 10_000.0)?;
    let local = Some(b.rope_with(RopePairs::Halves, local_base, &Scaling::None)?);
    let scale = if b.layers == LAYERS_27B {
        1.0 / ((b.width / b.heads) as f32).sqrt()
    } else {
        b.default_scale()
    };
    let softcap = b.f32("attn_logit_softcapping")?.filter(|c| *c > 0.0);
    let full =
        Attention { window: None, rope: global, qk_norm: true, scale, softcap, sinks: false };
    let x = b.embed((b.width as f32).sqrt())?;
    let x = b.each_layer(x, |b, layer, x| {
        let windowed = layer % pattern < pattern - 1;
        let attention = if windowed { Attention { window, rope: local, ..full } } else { full };
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
