//! The constant arguments of every kernel, field by field as its source declares them: 4-byte
//! scalars only, so that both sides agree without padding. It knows no buffer.

/// A 4-byte scalar as the word that carries it.
pub(crate) trait Word: Copy {
    fn word(self) -> u32;
}

impl Word for u32 {
    fn word(self) -> u32 {
        self
    }
}

impl Word for f32 {
    fn word(self) -> u32 {
        self.to_bits()
    }
}

macro_rules! args {
    ($($(#[$doc:meta])* $name:ident { $($(#[$fdoc:meta])* $field:ident: $ty:ty,)* })*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub(crate) struct $name { $($(#[$fdoc])* pub(crate) $field: $ty,)* }

        impl $name {
            pub(crate) fn words(self) -> Vec<u32> {
                vec![$(self.$field.word()),*]
            }
        }
    )*};
}

// `rows` comes first everywhere: it is the one constant that changes from step to step.
args! {
    /// `embed_*`; `stride` is the positions of a slot in the history.
    EmbedArgs { rows: u32, width: u32, vocab: u32, scale: f32, stride: u32, }
    /// `rms_norm`; `residual` is 0 or 1.
    NormArgs { rows: u32, width: u32, eps: f32, residual: u32, }
    /// `matmul_*`; `softcap` is 0 for none, `bias` and `residual` are 0 or 1.
    MatmulArgs {
        rows: u32,
        cols: u32,
        outs: u32,
        bias: u32,
        residual: u32,
        scale: f32,
        softcap: f32,
    }
    /// `gated_mlp_*`; `act` numbers [`fornax_plan::Activation`] in its order.
    GatedArgs {
        rows: u32,
        cols: u32,
        outs: u32,
        bias: u32,
        act: u32,
        alpha: f32,
        limit: f32,
        eps: f32,
    }
    /// `norm_rope`; `halves` is 1 for the NeoX order, `pairs` 0 where nothing is rotated.
    RopeArgs {
        rows: u32,
        heads: u32,
        dim: u32,
        norm: u32,
        eps: f32,
        pairs: u32,
        halves: u32,
        magnitude: f32,
    }
    /// `kv_write`; widths are those of all heads together, `stride` of one block table.
    KvWriteArgs { rows: u32, k_width: u32, v_width: u32, block: u32, stride: u32, }
    /// `attention*`; `window` is 0 for none, `softcap` 0 for none, `sinks` 0 or 1, `splits` the
    /// shares of the keys.
    AttentionArgs {
        rows: u32,
        heads: u32,
        kv_heads: u32,
        k_width: u32,
        v_width: u32,
        block: u32,
        stride: u32,
        window: u32,
        scale: f32,
        softcap: f32,
        sinks: u32,
        splits: u32,
    }
    /// `qkv_*`; `bias` has a bit for each of q, k and v, `eps` is of the norm before, if any.
    QkvArgs {
        rows: u32,
        cols: u32,
        q_outs: u32,
        k_outs: u32,
        v_outs: u32,
        bias: u32,
        eps: f32,
    }
    /// `rope_write_*`: [`RopeArgs`] for both q and k, and [`KvWriteArgs`]; `v_width` of one head.
    RopeWriteArgs {
        rows: u32,
        heads: u32,
        kv_heads: u32,
        dim: u32,
        v_width: u32,
        q_norm: u32,
        k_norm: u32,
        eps: f32,
        pairs: u32,
        halves: u32,
        magnitude: f32,
        block: u32,
        stride: u32,
    }
    /// `short_conv`; `tile` is the rows of a sequence that one thread takes.
    ConvArgs { rows: u32, width: u32, taps: u32, tile: u32, }
    /// `moe_route`; `normalise` is 1 where the chosen weights add up to one.
    RouteArgs { rows: u32, experts: u32, top_k: u32, normalise: u32, }
    /// `moe_gated`: [`GatedArgs`], where biases are of all experts, and two more.
    ExpertArgs {
        rows: u32,
        cols: u32,
        outs: u32,
        bias: u32,
        act: u32,
        alpha: f32,
        limit: f32,
        eps: f32,
        top_k: u32,
        experts: u32,
    }
    /// `moe_group`; `tiles` is the most that there can be.
    GroupArgs { rows: u32, experts: u32, top_k: u32, tiles: u32, }
    /// `grouped_gated`: [`ExpertArgs`] and the tiles.
    GroupedArgs {
        rows: u32,
        cols: u32,
        outs: u32,
        bias: u32,
        act: u32,
        alpha: f32,
        limit: f32,
        eps: f32,
        top_k: u32,
        experts: u32,
        tiles: u32,
    }
    /// `grouped_down` and `grouped_sum`: [`DownArgs`] and the tiles.
    GroupedDownArgs {
        rows: u32,
        cols: u32,
        outs: u32,
        top_k: u32,
        experts: u32,
        bias: u32,
        residual: u32,
        tiles: u32,
    }
    /// `moe_down`; `bias` and `residual` are 0 or 1.
    DownArgs {
        rows: u32,
        cols: u32,
        outs: u32,
        top_k: u32,
        experts: u32,
        bias: u32,
        residual: u32,
    }
    /// `attention_append_*`: [`RopeArgs`] and [`AttentionArgs`]; `part` is the floats of a row's
    /// shares.
    AppendArgs {
        rows: u32,
        heads: u32,
        kv_heads: u32,
        k_width: u32,
        v_width: u32,
        block: u32,
        stride: u32,
        window: u32,
        scale: f32,
        softcap: f32,
        splits: u32,
        part: u32,
        q_norm: u32,
        k_norm: u32,
        eps: f32,
        pairs: u32,
        halves: u32,
        magnitude: f32,
    }
    /// `matvec_joined_*`: of shares of attention, `heads` of `width`.
    JoinedArgs {
        rows: u32,
        cols: u32,
        outs: u32,
        bias: u32,
        residual: u32,
        heads: u32,
        width: u32,
        splits: u32,
        part: u32,
        sinks: u32,
    }
    /// `argmax_parts`.
    PartsArgs { rows: u32, vocab: u32, parts: u32, }
    /// `argmax_pick`: `base` is where this round's rows begin among all rows, `out_first` and
    /// `out_next` are the choices of the first round and of each later one, `choices` all of a
    /// ticket.
    PickArgs {
        rows: u32,
        base: u32,
        out_first: u32,
        out_next: u32,
        choices: u32,
        parts: u32,
        vocab: u32,
        stride: u32,
    }
    /// `penalise`; `stride` is the positions of a slot in the history.
    PenaltyArgs { rows: u32, base: u32, vocab: u32, stride: u32, }
    /// `gather` and `draw_token`.
    DrawArgs { rows: u32, base: u32, vocab: u32, parts: u32, }
    /// `select_rows`.
    SelectArgs { rows: u32, width: u32, }
    /// `copy`; `rows` words.
    CopyArgs { rows: u32, width: u32, }
}

/// Where the constants of a kernel say how long a block table is; none where it reads none.
pub(crate) fn stride_at(kernel: &str) -> Option<usize> {
    let starts = |names: &[&str]| names.iter().any(|n| kernel.starts_with(n));
    if starts(&["kv_write"]) {
        Some(4)
    } else if starts(&["attention"]) {
        Some(6)
    } else if starts(&["rope_write"]) {
        Some(12)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_fields_agree() {
        let a = SelectArgs { rows: 3, width: 64 };
        assert_eq!(a.words(), [3, 64]);
        let embed = EmbedArgs { rows: 1, width: 2, vocab: 3, scale: 2.5, stride: 7 };
        assert_eq!(embed.words(), [1, 2, 3, 2.5f32.to_bits(), 7]);
        assert_eq!(size_of::<AttentionArgs>(), 4 * 12);
        use std::mem::offset_of;
        for (kernel, at) in [
            ("kv_write_f16", offset_of!(KvWriteArgs, stride)),
            ("attention_reduce", offset_of!(AttentionArgs, stride)),
            ("attention_append_f16", offset_of!(AppendArgs, stride)),
            ("rope_write_f32", offset_of!(RopeWriteArgs, stride)),
        ] {
            assert_eq!(stride_at(kernel), Some(at / 4), "{kernel}");
        }
        assert_eq!(stride_at("matvec_f32"), None);
    }
}
