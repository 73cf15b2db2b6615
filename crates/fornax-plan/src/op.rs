//! The fused operations that a model is made of, named as the field names them. Plain data: this
//! file knows how an op is wired, not how any device computes it.

use crate::ids::{RopeId, StateId, ValueId, WeightId};

/// A matrix with an optional bias: `y = W·x + b`, `W` stored as rows × cols.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Linear {
    /// The matrix; one output per row.
    pub weight: WeightId,
    /// One f32 per output row.
    pub bias: Option<WeightId>,
}

/// Which layer of which KV group an op reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvRef {
    /// Index into [`crate::Plan::kv`].
    pub group: u32,
    /// Index into that group's `layers`.
    pub layer: u32,
}

/// The non-linearity of a gated MLP: `out = act(gate) * up`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// The tanh form of GELU, computed exactly (no table).
    GeluTanh,
    /// gpt-oss: gate clamped above, up clamped on both sides,
    /// `gate · sigmoid(alpha · gate) · (up + 1)`.
    SwigluClamped {
        /// Factor inside the sigmoid (1.702).
        alpha: f32,
        /// The clamp (7.0).
        limit: f32,
    },
}

/// How a router's scores become weights of the chosen experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gating {
    /// Softmax over all experts, then the top k; renormalised to sum 1 where `normalise`.
    SoftmaxThenTopK {
        /// Divide the chosen weights by their sum.
        normalise: bool,
    },
    /// The top k scores, then a softmax over those k alone (gpt-oss).
    TopKThenSoftmax,
}

/// One fused operation. Every value is written by exactly one op; all values are f32 unless said.
///
/// Row spaces: most ops map the token rows of a step one to one; [`Op::SelectRows`] passes from
/// token rows to the rows whose result somebody wants.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// Rows of the table chosen by the step's token ids, times `scale`.
    Embed {
        /// vocab × width, any type.
        table: WeightId,
        /// Factor on every element (√width in the Gemma family, else 1).
        scale: f32,
        /// tokens × width.
        out: ValueId,
    },
    /// `x / sqrt(mean(x²) + eps) · weight`, plus `residual` where given.
    RmsNorm {
        /// rows × width.
        x: ValueId,
        /// width f32.
        weight: WeightId,
        /// Added to the mean square.
        eps: f32,
        /// Added after the norm (post-norm families).
        residual: Option<ValueId>,
        /// rows × width.
        out: ValueId,
    },
    /// `W·x + b`, plus `residual` where given.
    MatMul {
        /// rows × cols(W).
        x: ValueId,
        /// The matrix and its bias.
        linear: Linear,
        /// rows × rows(W), added to the product.
        residual: Option<ValueId>,
        /// rows × rows(W).
        out: ValueId,
    },
    /// The three projections of attention, which share their input.
    Qkv {
        /// rows × width.
        x: ValueId,
        /// Query projection.
        q: Linear,
        /// Key projection.
        k: Linear,
        /// Value projection.
        v: Linear,
        /// rows × (heads · k_width).
        q_out: ValueId,
        /// rows × (kv_heads · k_width).
        k_out: ValueId,
        /// rows × (kv_heads · v_width).
        v_out: ValueId,
    },
    /// RMS norm of every head of q and k (where weights are given), then rotary positions.
    QkNormRope {
        /// rows × (heads · dim).
        q: ValueId,
        /// rows × (kv_heads · dim).
        k: ValueId,
        /// dim f32, shared by the query heads.
        q_norm: Option<WeightId>,
        /// dim f32, shared by the key heads.
        k_norm: Option<WeightId>,
        /// Epsilon of those norms.
        eps: f32,
        /// The rotary table; none where a layer uses no positions.
        rope: Option<RopeId>,
        /// Elements of one head.
        dim: u32,
        /// As `q`.
        q_out: ValueId,
        /// As `k`.
        k_out: ValueId,
    },
    /// Appends this step's keys and values to the cache, at the rows' positions.
    KvWrite {
        /// rows × (kv_heads · k_width).
        k: ValueId,
        /// rows × (kv_heads · v_width).
        v: ValueId,
        /// Where they go.
        kv: KvRef,
    },
    /// Causal attention over the cache, the rows of this step included.
    ///
    /// A row at position p sees keys max(0, p − window + 1) ..= p of its own sequence.
    Attention {
        /// rows × (heads · k_width).
        q: ValueId,
        /// The cache read; its group gives window and widths.
        kv: KvRef,
        /// Query heads; a multiple of the group's kv_heads.
        heads: u32,
        /// Factor on q·k.
        scale: f32,
        /// `cap · tanh(score / cap)` where given.
        softcap: Option<f32>,
        /// One f32 per head: an extra logit of the softmax that contributes no value.
        sinks: Option<WeightId>,
        /// rows × (heads · v_width).
        out: ValueId,
    },
    /// `act(gate·x) * (up·x)`.
    GatedMlp {
        /// rows × width.
        x: ValueId,
        /// Gate projection.
        gate: Linear,
        /// Up projection.
        up: Linear,
        /// The non-linearity.
        act: Activation,
        /// rows × rows(gate).
        out: ValueId,
    },
    /// LFM2's gated short convolution: `x` holds B, C and X side by side;
    /// `out = C * conv(B * X)`, causal over the sequence, with the last taps kept as state.
    ShortConv {
        /// rows × 3·width: B, C, X.
        x: ValueId,
        /// width × taps f32, oldest tap first.
        kernel: WeightId,
        /// (taps − 1) · width f32 per sequence.
        state: StateId,
        /// rows × width.
        out: ValueId,
    },
    /// Chooses experts: ids and weights of the best `top_k`, best first, ties to the lowest id.
    MoeRoute {
        /// rows × width.
        x: ValueId,
        /// experts × width, with bias.
        router: Linear,
        /// Experts per row.
        top_k: u32,
        /// How scores become weights.
        gating: Gating,
        /// rows × top_k, u32.
        ids: ValueId,
        /// rows × top_k.
        weights: ValueId,
    },
    /// The chosen experts' gated MLPs, summed by weight, plus `residual`.
    MoeMlp {
        /// rows × width.
        x: ValueId,
        /// rows × top_k, u32.
        ids: ValueId,
        /// rows × top_k.
        weights: ValueId,
        /// experts × ff × width; bias experts × ff.
        gate: Linear,
        /// experts × ff × width; bias experts × ff.
        up: Linear,
        /// experts × width × ff; bias experts × width.
        down: Linear,
        /// The non-linearity.
        act: Activation,
        /// rows × width, added to the sum.
        residual: Option<ValueId>,
        /// rows × width.
        out: ValueId,
    },
    /// Token rows to wanted rows, in the order of the step's wants.
    SelectRows {
        /// tokens × width.
        x: ValueId,
        /// wanted × width.
        out: ValueId,
    },
    /// The language-model head over the wanted rows.
    Logits {
        /// wanted × width.
        x: ValueId,
        /// vocab × width.
        linear: Linear,
        /// Factor on every logit.
        scale: f32,
        /// `cap · tanh(logit / cap)` where given, after the scale.
        softcap: Option<f32>,
        /// wanted × vocab.
        out: ValueId,
    },
    /// Chooses tokens, or hands logits out, as each wanted row asks.
    Sample {
        /// wanted × vocab.
        logits: ValueId,
    },
    /// Hands rows to the host for those that want their hidden state.
    HiddenOut {
        /// wanted × width.
        x: ValueId,
    },
}

/// A short list of what one op is wired to (values, matrices): at most five, so no allocation.
#[derive(Clone, Copy, Debug)]
pub struct Wires<T> {
    items: [Option<T>; 5],
}

impl<T: Copy> Wires<T> {
    fn new<const N: usize>(given: [Option<T>; N]) -> Wires<T> {
        let mut items = [None; 5];
        items[..N].copy_from_slice(&given);
        Wires { items }
    }

    /// The wires that are there, in the op's field order.
    pub fn iter(&self) -> impl Iterator<Item = T> + '_ {
        self.items.iter().filter_map(|x| *x)
    }
}

impl Op {
    /// The op's name as reports, refusals and profiles print it.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Embed { .. } => "embed",
            Op::RmsNorm { .. } => "rms_norm",
            Op::MatMul { .. } => "matmul",
            Op::Qkv { .. } => "qkv",
            Op::QkNormRope { .. } => "qk_norm_rope",
            Op::KvWrite { .. } => "kv_write",
            Op::Attention { .. } => "attention",
            Op::GatedMlp { .. } => "gated_mlp",
            Op::ShortConv { .. } => "short_conv",
            Op::MoeRoute { .. } => "moe_route",
            Op::MoeMlp { .. } => "moe_mlp",
            Op::SelectRows { .. } => "select_rows",
            Op::Logits { .. } => "logits",
            Op::Sample { .. } => "sample",
            Op::HiddenOut { .. } => "hidden_out",
        }
    }

    /// The values that the op reads.
    pub fn inputs(&self) -> Wires<ValueId> {
        match *self {
            Op::Embed { .. } => Wires::new([]),
            Op::RmsNorm { x, residual, .. } | Op::MatMul { x, residual, .. } => {
                Wires::new([Some(x), residual])
            }
            Op::Qkv { x, .. }
            | Op::GatedMlp { x, .. }
            | Op::ShortConv { x, .. }
            | Op::MoeRoute { x, .. }
            | Op::SelectRows { x, .. }
            | Op::Logits { x, .. }
            | Op::HiddenOut { x } => Wires::new([Some(x)]),
            Op::QkNormRope { q, k, .. } => Wires::new([Some(q), Some(k)]),
            Op::KvWrite { k, v, .. } => Wires::new([Some(k), Some(v)]),
            Op::Attention { q, .. } => Wires::new([Some(q)]),
            Op::MoeMlp { x, ids, weights, residual, .. } => {
                Wires::new([Some(x), Some(ids), Some(weights), residual])
            }
            Op::Sample { logits } => Wires::new([Some(logits)]),
        }
    }

    /// The values that the op writes.
    pub fn outputs(&self) -> Wires<ValueId> {
        match *self {
            Op::Embed { out, .. }
            | Op::RmsNorm { out, .. }
            | Op::MatMul { out, .. }
            | Op::Attention { out, .. }
            | Op::GatedMlp { out, .. }
            | Op::ShortConv { out, .. }
            | Op::MoeMlp { out, .. }
            | Op::SelectRows { out, .. }
            | Op::Logits { out, .. } => Wires::new([Some(out)]),
            Op::Qkv { q_out, k_out, v_out, .. } => {
                Wires::new([Some(q_out), Some(k_out), Some(v_out)])
            }
            Op::QkNormRope { q_out, k_out, .. } => Wires::new([Some(q_out), Some(k_out)]),
            Op::MoeRoute { ids, weights, .. } => Wires::new([Some(ids), Some(weights)]),
            Op::KvWrite { .. } | Op::Sample { .. } | Op::HiddenOut { .. } => Wires::new([]),
        }
    }

    /// The matrices that the op multiplies by, with their biases; what a type check goes over.
    pub fn linears(&self) -> Wires<Linear> {
        match *self {
            Op::MatMul { linear, .. } | Op::Logits { linear, .. } => Wires::new([Some(linear)]),
            Op::Qkv { q, k, v, .. } => Wires::new([Some(q), Some(k), Some(v)]),
            Op::GatedMlp { gate, up, .. } => Wires::new([Some(gate), Some(up)]),
            Op::MoeRoute { router, .. } => Wires::new([Some(router)]),
            Op::MoeMlp { gate, up, down, .. } => Wires::new([Some(gate), Some(up), Some(down)]),
            _ => Wires::new([]),
        }
    }

    /// Every weight that the op reads, matrices, biases, norms and tables alike.
    pub fn weights(&self) -> Vec<WeightId> {
        let mut all: Vec<WeightId> = Vec::new();
        for linear in self.linears().iter() {
            all.push(linear.weight);
            all.extend(linear.bias);
        }
        match *self {
            Op::Embed { table, .. } => all.push(table),
            Op::RmsNorm { weight, .. } => all.push(weight),
            Op::QkNormRope { q_norm, k_norm, .. } => all.extend(q_norm.into_iter().chain(k_norm)),
            Op::Attention { sinks, .. } => all.extend(sinks),
            Op::ShortConv { kernel, .. } => all.push(kernel),
            _ => {}
        }
        all
    }
}
