//! The shapes of known models, as their files state them. Only numbers.

/// The sizes of one dense transformer.
#[derive(Debug)]
pub(crate) struct Shape {
    pub(crate) name: &'static str,
    /// `general.architecture`, and the prefix of its keys.
    pub(crate) family: &'static str,
    pub(crate) layers: u32,
    pub(crate) width: u32,
    pub(crate) ff_width: u32,
    pub(crate) heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) head_width: u32,
    pub(crate) vocab: u32,
    pub(crate) context: u32,
    pub(crate) rope_base: f32,
    pub(crate) norm_epsilon: f32,
    /// Whether the embedding makes the logits too.
    pub(crate) tied: bool,
    /// Whether queries and keys are normed head by head.
    pub(crate) head_norms: bool,
    /// Whether the results of attention and of the MLP are normed before they are added.
    pub(crate) result_norms: bool,
    /// Positions that windowed layers look back on; which layers these are is the family's.
    pub(crate) window: Option<u32>,
    /// Llama 3's stretched frequencies: the factor, of a training context of 8192.
    pub(crate) rope_stretch: Option<f32>,
    /// `tokenizer.ggml.pre`.
    pub(crate) pre: &'static str,
}

const SMOLLM2: Shape = Shape {
    name: "smollm2-135m",
    family: "llama",
    layers: 30,
    width: 576,
    ff_width: 1536,
    heads: 9,
    kv_heads: 3,
    head_width: 64,
    vocab: 49_152,
    context: 8192,
    rope_base: 100_000.0,
    norm_epsilon: 1e-5,
    tied: true,
    head_norms: false,
    result_norms: false,
    window: None,
    rope_stretch: None,
    pre: "smollm",
};

const LLAMA_1B: Shape = Shape {
    name: "llama-1b",
    layers: 16,
    width: 2048,
    ff_width: 8192,
    heads: 32,
    kv_heads: 8,
    head_width: 64,
    vocab: 128_256,
    context: 131_072,
    rope_base: 500_000.0,
    rope_stretch: Some(32.0),
    pre: "llama-bpe",
    ..SMOLLM2
};

/// Every shape that has a name.
pub(crate) static SHAPES: &[Shape] = &[
    SMOLLM2,
    Shape {
        name: "smollm2-360m",
        layers: 32,
        width: 960,
        ff_width: 2560,
        heads: 15,
        kv_heads: 5,
        ..SMOLLM2
    },
    Shape {
        name: "qwen3-0.6b",
        family: "qwen3",
        layers: 28,
        width: 1024,
        ff_width: 3072,
        heads: 16,
        kv_heads: 8,
        head_width: 128,
        vocab: 151_936,
        context: 40_960,
        rope_base: 1_000_000.0,
        norm_epsilon: 1e-6,
        head_norms: true,
        pre: "qwen2",
        ..SMOLLM2
    },
    Shape {
        name: "qwen2.5-0.5b",
        family: "qwen2",
        layers: 24,
        width: 896,
        ff_width: 4864,
        heads: 14,
        kv_heads: 2,
        vocab: 151_936,
        context: 32_768,
        rope_base: 1_000_000.0,
        norm_epsilon: 1e-6,
        pre: "qwen2",
        ..SMOLLM2
    },
    Shape {
        name: "gemma-3-270m",
        family: "gemma3",
        layers: 18,
        width: 640,
        ff_width: 2048,
        heads: 4,
        kv_heads: 1,
        head_width: 256,
        vocab: 262_144,
        context: 32_768,
        rope_base: 1_000_000.0,
        norm_epsilon: 1e-6,
        head_norms: true,
        result_norms: true,
        window: Some(512),
        // The vocabulary here is no Gemma's either.
        pre: "gpt-2",
        ..SMOLLM2
    },
    LLAMA_1B,
    Shape {
        name: "llama-8b",
        layers: 32,
        width: 4096,
        ff_width: 14_336,
        head_width: 128,
        tied: false,
        rope_stretch: Some(8.0),
        ..LLAMA_1B
    },
];
