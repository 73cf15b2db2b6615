//! The list of cases: every op, its variants, odd sizes, ragged steps.

use std::sync::OnceLock;

use fornax_gguf::TensorType;

use super::Case;
use super::batches::batches;
use super::build::{hidden_seq, noise, one_op, simple, weight};
use super::proof::proof;
use crate::device::KvType;
use crate::ids::ValueId;
use crate::op::{Activation, Gating, Linear, Op};
use crate::plan::{KvGroup, Plan, RopePairs, RopeTable, WeightRef};

/// Types whose matmul is a case; every type of the direct list that has a quantiser.
const TYPES: [TensorType; 12] = [
    TensorType::F32,
    TensorType::F16,
    TensorType::BF16,
    TensorType::Q8_0,
    TensorType::Q4_0,
    TensorType::Q4_1,
    TensorType::Q5_0,
    TensorType::Q5_1,
    TensorType::Q4_K,
    TensorType::Q5_K,
    TensorType::Q6_K,
    TensorType::MXFP4,
];

/// Every case. They are made once; copies share their weights.
pub fn cases() -> Vec<Case> {
    static ALL: OnceLock<Vec<Case>> = OnceLock::new();
    ALL.get_or_init(made).clone()
}

fn made() -> Vec<Case> {
    let mut all = Vec::new();
    embed(&mut all);
    norm(&mut all);
    matmul(&mut all);
    mlp(&mut all);
    rope(&mut all);
    attention(&mut all);
    short_conv(&mut all);
    moe(&mut all);
    batches(&mut all);
    all.push(proof(TensorType::F32));
    all.push(proof(TensorType::Q8_0));
    all
}

fn matrix(plan: &mut Plan, name: &str, ty: TensorType, rows: u32, cols: u32, seed: u64) -> Linear {
    Linear { weight: plan.weight(weight(name, ty, 1, rows, cols, seed)), bias: None }
}

fn vector(plan: &mut Plan, name: &str, len: u32, seed: u64) -> crate::WeightId {
    let values: Vec<f32> = noise(seed, len as usize, 0.5).iter().map(|v| 1.0 + v).collect();
    plan.weight(WeightRef::from_f32(name, 1, len, &values))
}

fn embed(all: &mut Vec<Case>) {
    for ty in TYPES {
        let cols = 256;
        let mut plan = one_op(cols, 1, |_, x| x);
        plan.weights[0] = weight("table", ty, 1, 64, cols, 9);
        if let Op::Embed { scale, .. } = &mut plan.ops[0] {
            *scale = 3.5;
        }
        all.push(simple(format!("embed/{}", ty.name()), plan, 9, 1e-6));
    }
}

fn norm(all: &mut Vec<Case>) {
    for (width, rows) in [(32, 1), (96, 3), (576, 5), (130, 2)] {
        for residual in [false, true] {
            let plan = one_op(width, 2, |plan, x| {
                let w = vector(plan, "norm", width, 3);
                let out = plan.value("y", width);
                let residual = residual.then_some(x);
                plan.push(Op::RmsNorm { x, weight: w, eps: 1e-5, residual, out });
                out
            });
            let tail = if residual { "/residual" } else { "" };
            all.push(simple(format!("rms_norm/{rows}x{width}{tail}"), plan, rows, 1e-5));
        }
    }
}

fn matmul(all: &mut Vec<Case>) {
    for ty in TYPES {
        let unit = ty.block_len().max(32) as u32;
        for (out, blocks, rows) in [(1, 1, 1), (7, 2, 3), (33, 3, 9), (130, 1, 17), (64, 9, 33)] {
            let cols = unit * blocks;
            let plan = one_op(cols, 4, |plan, x| {
                let mut linear = matrix(plan, "w", ty, out, cols, 5);
                if out == 33 {
                    let bias = noise(6, out as usize, 1.0);
                    linear.bias = Some(plan.weight(WeightRef::from_f32("b", 1, out, &bias)));
                }
                let y = plan.value("y", out);
                plan.push(Op::MatMul { x, linear, residual: None, out: y });
                y
            });
            all.push(simple(format!("matmul/{}/{rows}x{out}x{cols}", ty.name()), plan, rows, 1e-5));
        }
    }
    for ty in [TensorType::F32, TensorType::F16] {
        let plan = one_op(7, 4, |plan, x| {
            let linear = matrix(plan, "w", ty, 7, 7, 5);
            let y = plan.value("y", 7);
            plan.push(Op::MatMul { x, linear, residual: Some(x), out: y });
            y
        });
        all.push(simple(format!("matmul/{}/odd+residual", ty.name()), plan, 5, 1e-5));
    }
}

fn mlp(all: &mut Vec<Case>) {
    let acts = [
        ("silu", Activation::Silu),
        ("gelu", Activation::GeluTanh),
        ("swiglu", Activation::SwigluClamped { alpha: 1.702, limit: 1.5 }),
    ];
    for (name, act) in acts {
        for ty in [TensorType::F32, TensorType::Q8_0] {
            let plan = one_op(64, 7, |plan, x| {
                let gate = matrix(plan, "gate", ty, 96, 64, 8);
                let up = matrix(plan, "up", ty, 96, 64, 9);
                let y = plan.value("y", 96);
                plan.push(Op::GatedMlp { x, gate, up, act, out: y });
                y
            });
            all.push(simple(format!("gated_mlp/{name}/{}", ty.name()), plan, 6, 2e-5));
        }
    }
}

fn rope(all: &mut Vec<Case>) {
    for pairs in [RopePairs::Adjacent, RopePairs::Halves] {
        for (dim, rotated, norms) in
            [(32, 32, false), (64, 64, true), (80, 40, true), (20, 20, false)]
        {
            let (heads, kv_heads) = (3, 1);
            let width = dim * (heads + kv_heads);
            let plan = one_op(width, 10, |plan, x| {
                let wq = matrix(plan, "q", TensorType::F32, dim * heads, width, 11);
                let wk = matrix(plan, "k", TensorType::F32, dim * kv_heads, width, 12);
                let wv = matrix(plan, "v", TensorType::F32, dim * kv_heads, width, 13);
                let [q, q2] = ["q", "q2"].map(|n| plan.value(n, dim * heads));
                let [k, k2, v] = ["k", "k2", "v"].map(|n| plan.value(n, dim * kv_heads));
                plan.push(Op::Qkv { x, q: wq, k: wk, v: wv, q_out: q, k_out: k, v_out: v });
                let inv_freq =
                    (0..rotated / 2).map(|i| 1e4f32.powf(-2.0 * i as f32 / rotated as f32));
                let table = RopeTable { pairs, inv_freq: inv_freq.collect(), magnitude: 1.1 };
                let rope = Some(plan.rope(table));
                let q_norm = norms.then(|| vector(plan, "qn", dim, 14));
                let k_norm = norms.then(|| vector(plan, "kn", dim, 15));
                let eps = 1e-6;
                plan.push(Op::QkNormRope {
                    q,
                    k,
                    q_norm,
                    k_norm,
                    eps,
                    rope,
                    dim,
                    q_out: q2,
                    k_out: k2,
                });
                // Both results in one hidden row: k2 through a square matrix onto q2's width.
                let join = matrix(plan, "join", TensorType::F32, dim * heads, dim * kv_heads, 16);
                let y = plan.value("y", dim * heads);
                plan.push(Op::MatMul { x: k2, linear: join, residual: Some(q2), out: y });
                y
            });
            let steps =
                vec![vec![hidden_seq(0, 0, 5)], vec![hidden_seq(0, 4_000, 3), hidden_seq(1, 0, 2)]];
            let name = format!("qk_norm_rope/{pairs:?}/{dim}of{rotated}");
            all.push(Case { name, plan, steps, kv_type: KvType::F32, tolerance: 1e-4 });
        }
    }
}

/// Attention over a cache that its own plan writes, with `heads` query heads.
pub(super) fn attend(
    plan: &mut Plan,
    x: ValueId,
    g: &KvGroup,
    heads: u32,
    sinks: bool,
    softcap: Option<f32>,
) -> ValueId {
    let width = plan.width(x);
    let (qw, kw, vw) = (heads * g.k_width, g.heads * g.k_width, g.heads * g.v_width);
    let linear =
        |plan: &mut Plan, n: &str, rows, seed| matrix(plan, n, TensorType::F32, rows, width, seed);
    let (wq, wk, wv) =
        (linear(plan, "q", qw, 21), linear(plan, "k", kw, 22), linear(plan, "v", vw, 23));
    let q = plan.value("q", qw);
    let k = plan.value("k", kw);
    let v = plan.value("v", vw);
    plan.push(Op::Qkv { x, q: wq, k: wk, v: wv, q_out: q, k_out: k, v_out: v });
    let kv = plan.kv_layer(0, g);
    plan.push(Op::KvWrite { k, v, kv });
    let sinks = sinks.then(|| {
        plan.weight(WeightRef::from_f32("sinks", 1, heads, &noise(24, heads as usize, 2.0)))
    });
    let out = plan.value("mix", heads * g.v_width);
    let scale = 1.5 / (g.k_width as f32).sqrt();
    plan.push(Op::Attention { q, kv, heads, scale, softcap, sinks, out });
    out
}

fn attention(all: &mut Vec<Case>) {
    let group = |window, heads, width| KvGroup {
        layers: vec![],
        window,
        heads,
        k_width: width,
        v_width: width,
    };
    let variants = [
        ("mha", group(None, 4, 32), 4, false, None, KvType::F32),
        ("gqa", group(None, 2, 64), 6, false, None, KvType::F32),
        ("mqa/odd", group(None, 1, 80), 5, false, None, KvType::F32),
        ("head256", group(None, 1, 256), 4, false, None, KvType::F32),
        ("wide-k", KvGroup { v_width: 32, ..group(None, 2, 96) }, 4, false, None, KvType::F32),
        ("window", group(Some(9), 2, 32), 4, false, None, KvType::F32),
        ("window1", group(Some(1), 2, 32), 4, false, None, KvType::F32),
        ("softcap", group(None, 2, 32), 4, false, Some(2.0), KvType::F32),
        ("sinks", group(Some(20), 2, 32), 4, true, None, KvType::F32),
        ("f16", group(None, 2, 64), 4, false, None, KvType::F16),
        ("q8_0", group(None, 2, 64), 4, false, None, KvType::Q8_0),
    ];
    for (name, g, heads, sinks, softcap, kv_type) in variants {
        let plan = one_op(48, 20, |plan, x| attend(plan, x, &g, heads, sinks, softcap));
        // Prefill, then a ragged mix of decode rows and a chunk, then one long chunk.
        let steps = vec![
            vec![hidden_seq(0, 0, 37)],
            vec![hidden_seq(1, 0, 1), hidden_seq(0, 37, 1), hidden_seq(2, 0, 10)],
            vec![hidden_seq(2, 10, 30), hidden_seq(1, 1, 1), hidden_seq(0, 38, 290)],
            vec![hidden_seq(0, 328, 1), hidden_seq(2, 40, 1)],
        ];
        // Quantised KV: a key on a rounding edge may fall to either side.
        let tolerance = if kv_type == KvType::F32 { 1e-4 } else { 5e-3 };
        all.push(Case { name: format!("attention/{name}"), plan, steps, kv_type, tolerance });
    }
}

fn short_conv(all: &mut Vec<Case>) {
    for (width, taps) in [(32, 3), (40, 4), (32, 1)] {
        let plan = one_op(3 * width, 30, |plan, x| {
            let kernel = noise(31, (width * taps) as usize, 1.0);
            let kernel = plan.weight(WeightRef::from_f32("conv", width, taps, &kernel));
            let state = plan.state("conv", (taps - 1) * width);
            let out = plan.value("y", width);
            plan.push(Op::ShortConv { x, kernel, state, out });
            out
        });
        let steps = vec![
            vec![hidden_seq(0, 0, 1), hidden_seq(1, 0, 6)],
            vec![hidden_seq(1, 6, 2), hidden_seq(0, 1, 5)],
            vec![hidden_seq(0, 0, 2)],
        ];
        let name = format!("short_conv/{width}x{taps}");
        all.push(Case { name, plan, steps, kv_type: KvType::F32, tolerance: 1e-5 });
    }
}

fn moe(all: &mut Vec<Case>) {
    let gatings = [
        ("softmax", Gating::SoftmaxThenTopK { normalise: false }),
        ("normalised", Gating::SoftmaxThenTopK { normalise: true }),
        ("topk-first", Gating::TopKThenSoftmax),
    ];
    for (name, gating) in gatings {
        for ty in [TensorType::F32, TensorType::Q8_0] {
            let (width, ff, experts, top_k) = (64, 96, 5, 2);
            let plan = one_op(width, 40, |plan, x| {
                let router = matrix(plan, "router", TensorType::F32, experts, width, 41);
                let ids = plan.index_value("ids", top_k);
                let weights = plan.value("weights", top_k);
                plan.push(Op::MoeRoute { x, router, top_k, gating, ids, weights });
                let mut stack = |n: &str, rows, cols, seed| {
                    let bias = noise(seed + 10, (experts * rows) as usize, 0.2);
                    Linear {
                        weight: plan.weight(weight(n, ty, experts, rows, cols, seed)),
                        bias: Some(plan.weight(WeightRef::from_f32("b", experts, rows, &bias))),
                    }
                };
                let (gate, up, down) = (
                    stack("gate", ff, width, 42),
                    stack("up", ff, width, 43),
                    stack("down", width, ff, 44),
                );
                let out = plan.value("y", width);
                let act = Activation::Silu;
                plan.push(Op::MoeMlp {
                    x,
                    ids,
                    weights,
                    gate,
                    up,
                    down,
                    act,
                    residual: Some(x),
                    out,
                });
                out
            });
            // In 8-bit mode the inner activations may round to either side.
            let tolerance = if ty == TensorType::F32 { 1e-4 } else { 5e-3 };
            all.push(simple(format!("moe/{name}/{}", ty.name()), plan, 7, tolerance));
        }
    }
}
