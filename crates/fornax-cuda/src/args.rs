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

/// A field as the words that carry it.
pub(crate) trait Words {
    fn put(self, to: &mut Vec<u32>);
}

impl<T: Word> Words for T {
    fn put(self, to: &mut Vec<u32>) {
        to.push(self.word());
    }
}

impl<const N: usize> Words for [u32; N] {
    fn put(self, to: &mut Vec<u32>) {
        to.extend(self);
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
                let mut words = Vec::with_capacity(size_of::<$name>() / 4);
                $(self.$field.put(&mut words);)*
                words
            }
        }
    )*};
}

pub(crate) mod families;

// `rows` comes first everywhere: it is the one constant that changes from step to step.
args! {
    /// `embed_*`.
    EmbedArgs { rows: u32, width: u32, vocab: u32, scale: f32, }
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
    GatedArgs { rows: u32, cols: u32, outs: u32, bias: u32, act: u32, alpha: f32, limit: f32, }
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
    /// `kv_write`; widths are those of all heads together, `stride` of one block table, `tokens` those of a pool.
    KvWriteArgs {
        rows: u32,
        k_width: u32,
        v_width: u32,
        block: u32,
        stride: u32,
        tokens: u32,
    }
    /// `attention`; `window` is 0 for none, `softcap` 0 for none, `sinks` 0 or 1.
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
        tokens: u32,
    }
    /// `retile_*`: row i goes to row `base + i · step` of a matrix of `all` rows of `nb` blocks.
    RetileArgs { rows: u32, nb: u32, base: u32, step: u32, all: u32, }
    /// `lay_*`: a matrix of `rows` rows of `nb` blocks, `units` of 32 of them a row.
    LayArgs { rows: u32, nb: u32, units: u32, span: u32, wide: u32, }
    /// `tape_decode`.
    TapeArgs {
        rounds: u32,
        base: u32,
        group_words: u32,
        stride: u32,
        out_first: u32,
        out_next: u32,
        tokens_low: u32,
        tokens_high: u32,
        scale: f32,
        head_scale: f32,
        head_softcap: f32,
        eps: f32,
    }
    /// `embed_rows`; `ty` is the kernels' number of the format.
    EmbedRowsArgs { rows: u32, width: u32, vocab: u32, ty: u32, scale: f32, }
    /// `decode`: sizes, then where things lie in shared memory.
    DecodeArgs {
        rows: u32,
        stages: u32,
        rounds: u32,
        base: u32,
        turn_rows: u32,
        turn_pairs: u32,
        ropes: u32,
        group_words: u32,
        stride: u32,
        vocab: u32,
        width: u32,
        table_type: u32,
        out_first: u32,
        out_next: u32,
        ring_at: u32,
        x_at: u32,
        part_at: u32,
        norms_at: u32,
        slots: u32,
        stage_at: u32,
        tokens_low: u32,
        tokens_high: u32,
        starts: u32,
        scale: f32,
    }
    /// `round_rows` and `halve_rows`; `norm` is 0 or 1, `stride` that of scales and sums.
    RoundArgs { rows: u32, width: u32, stride: u32, norm: u32, eps: f32, }
    /// `product_*`: the rows of one launch begin at `base`, its outputs, in biases and places, at `before`; `normed` is 1 where
    /// the factor of a norm with `eps` is still to come.
    ProductArgs {
        rows: u32,
        base: u32,
        stride: u32,
        nb: u32,
        outs: u32,
        ty: u32,
        splits: u32,
        epi: u32,
        act: u32,
        before: u32,
        cuts: [u32; 2],
        widths: [u32; 3],
        to_stride: u32,
        alpha: f32,
        limit: f32,
        scale: f32,
        softcap: f32,
        normed: u32,
        eps: f32,
    }
    /// `turn_*`.
    TurnArgs {
        rows: u32,
        heads: u32,
        kv_heads: u32,
        dim: u32,
        v_dim: u32,
        pairs: u32,
        halves: u32,
        stride: u32,
        tokens: u32,
        eps: f32,
        magnitude: f32,
    }
    /// `few` and, as far as `parts`, `many`; `to` says in which form the results go on, and what is behind `parts` is for norms
    /// and positions.
    AttendArgs {
        rows: u32,
        heads: u32,
        kv_heads: u32,
        stride: u32,
        window: u32,
        tokens: u32,
        to: u32,
        to_stride: u32,
        scale: f32,
        softcap: f32,
        parts: u32,
        base: u32,
        each: u32,
        pairs: u32,
        halves: u32,
        eps: f32,
        magnitude: f32,
    }
    /// `gemm`: `steps` of 64 columns; `to_tiles` are the column tiles of what the next product reads.
    GemmArgs {
        rows: u32,
        outs: u32,
        steps: u32,
        epi: u32,
        act: u32,
        before: u32,
        cuts: [u32; 2],
        widths: [u32; 3],
        to_tiles: u32,
        alpha: f32,
        limit: f32,
        scale: f32,
        softcap: f32,
    }
    /// `expand_*`.
    ExpandArgs { nb: u32, outs: u32, }
    /// `select_rows`.
    SelectArgs { rows: u32, width: u32, }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_fields_agree() {
        let a = SelectArgs { rows: 3, width: 64 };
        assert_eq!(a.words(), [3, 64]);
        let a = EmbedArgs { rows: 1, width: 2, vocab: 3, scale: 2.5 };
        assert_eq!(a.words(), [1, 2, 3, 2.5f32.to_bits()]);
        assert_eq!(size_of::<AttentionArgs>(), 4 * 12);
    }
}
