//! Cases of many rows: products of several tiles, what gated pairs and attention hand on to the next product, prompts
//! and decoding in one step.

use fornax_gguf::TensorType;

use super::build::{hidden_seq, noise, one_op, simple, tokens, weight};
use super::proof::proof_plan;
use super::{Case, Seq};
use crate::device::KvType;
use crate::op::{Activation, Linear, Op};
use crate::plan::{KvGroup, Plan, WeightRef};
use crate::step::Want;

const TYPES: [TensorType; 10] = [
    TensorType::F16,
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

/// Adds them.
pub(super) fn batches(all: &mut Vec<Case>) {
    for ty in TYPES {
        // More outputs than a tile, more rows than a tile, columns of several steps.
        all.push(product(ty, 40, 512, 70, true));
    }
    // Columns in parts; many outputs; an odd number of blocks.
    all.push(product(TensorType::Q8_0, 40, 2048, 20, false));
    all.push(product(TensorType::Q4_K, 36, 2304, 12, true));
    all.push(product(TensorType::Q8_0, 8200, 32, 18, false));
    all.push(product(TensorType::Q5_0, 34, 352, 130, true));
    for (name, act) in [
        ("silu", Activation::Silu),
        ("gelu", Activation::GeluTanh),
        ("swiglu", Activation::SwigluClamped { alpha: 1.702, limit: 1.5 }),
    ] {
        for (ty, ff) in [(TensorType::Q8_0, 96), (TensorType::Q4_K, 256)] {
            all.push(mlp(name, act, ty, ff));
        }
    }
    all.push(deep_mlp());
    for kv_type in [KvType::F32, KvType::F16, KvType::Q8_0] {
        all.push(layer(kv_type));
    }
    for (heads, kv_heads, dim) in [(6, 2, 64), (7, 1, 32), (9, 1, 64), (4, 4, 80)] {
        all.push(attend(heads, kv_heads, dim));
    }
}

fn linear(plan: &mut Plan, name: &str, ty: TensorType, rows: u32, cols: u32, seed: u64) -> Linear {
    Linear { weight: plan.weight(weight(name, ty, 1, rows, cols, seed)), bias: None }
}

fn product(ty: TensorType, outs: u32, cols: u32, rows: u32, bias: bool) -> Case {
    let plan = one_op(cols, 4, |plan, x| {
        let mut w = linear(plan, "w", ty, outs, cols, 5);
        if bias {
            let values = noise(6, outs as usize, 1.0);
            w.bias = Some(plan.weight(WeightRef::from_f32("b", 1, outs, &values)));
        }
        let y = plan.value("y", outs);
        plan.push(Op::MatMul { x, linear: w, residual: None, out: y });
        y
    });
    simple(format!("batch/{}/{rows}x{outs}x{cols}", ty.name()), plan, rows, 1e-5)
}

/// Gated pairs and the product behind them.
fn mlp(name: &str, act: Activation, ty: TensorType, ff: u32) -> Case {
    let width = if ty == TensorType::Q8_0 { 64 } else { 256 };
    let plan = one_op(width, 7, |plan, x| {
        let gate = linear(plan, "gate", ty, ff, width, 8);
        let up = linear(plan, "up", ty, ff, width, 9);
        let m = plan.value("m", ff);
        plan.push(Op::GatedMlp { x, gate, up, act, out: m });
        let down = linear(plan, "down", ty, width, ff, 10);
        let y = plan.value("y", width);
        plan.push(Op::MatMul { x: m, linear: down, residual: Some(x), out: y });
        y
    });
    let steps = vec![vec![hidden_seq(0, 0, 40)], vec![hidden_seq(0, 40, 3), hidden_seq(1, 0, 9)]];
    // The inner activations may round to either side.
    let name = format!("batch/mlp/{name}/{}", ty.name());
    Case { name, plan, steps, kv_type: KvType::F32, tolerance: 5e-3 }
}

/// Gated pairs whose columns are cut into parts, of rows that are no whole steps.
fn deep_mlp() -> Case {
    let (ty, width, ff) = (TensorType::Q8_0, 992, 64);
    let plan = one_op(width, 7, |plan, x| {
        let gate = linear(plan, "gate", ty, ff, width, 8);
        let up = linear(plan, "up", ty, ff, width, 9);
        let m = plan.value("m", ff);
        plan.push(Op::GatedMlp { x, gate, up, act: Activation::Silu, out: m });
        let down = linear(plan, "down", ty, 32, ff, 10);
        let y = plan.value("y", 32);
        plan.push(Op::MatMul { x: m, linear: down, residual: None, out: y });
        y
    });
    simple("batch/mlp/deep".into(), plan, 21, 5e-3)
}

/// Query heads that share keys in numbers that fill no tile, over a 16-bit cache.
fn attend(heads: u32, kv_heads: u32, dim: u32) -> Case {
    let g = KvGroup { layers: vec![], window: None, heads: kv_heads, k_width: dim, v_width: dim };
    let plan = one_op(48, 20, |plan, x| super::cases::attend(plan, x, &g, heads, false, None));
    let steps = vec![
        vec![hidden_seq(0, 0, 70)],
        vec![hidden_seq(1, 0, 1), hidden_seq(0, 70, 1), hidden_seq(2, 0, 10), hidden_seq(3, 0, 2)],
        vec![hidden_seq(2, 10, 3), hidden_seq(1, 1, 1), hidden_seq(0, 71, 61), hidden_seq(3, 2, 7)],
        vec![hidden_seq(0, 132, 1), hidden_seq(2, 13, 1)],
    ];
    let name = format!("batch/attention/{heads}of{kv_heads}x{dim}");
    Case { name, plan, steps, kv_type: KvType::F16, tolerance: 5e-3 }
}

/// A whole layer: a prompt, then decoding beside prompts, then decoding alone.
fn layer(kv_type: KvType) -> Case {
    let seq = |slot: u32, pos: u32, n: u32| Seq {
        slot,
        pos,
        tokens: tokens(u64::from(slot) << 32 | u64::from(pos), n),
        wants: vec![(0..n, Want::Logits)],
        max_new: 1,
    };
    let steps = vec![
        vec![seq(0, 0, 100)],
        vec![seq(1, 0, 1), seq(0, 100, 1), seq(2, 0, 30), seq(3, 0, 5)],
        vec![seq(2, 30, 40), seq(0, 101, 1), seq(1, 1, 12)],
        vec![seq(0, 102, 1), seq(1, 13, 1), seq(2, 70, 1), seq(3, 5, 1)],
    ];
    // Several roundings in a row, each to either side.
    let (name, plan) = (format!("batch/layer/{kv_type:?}"), proof_plan(TensorType::Q8_0));
    Case { name, plan, steps, kv_type, tolerance: 2e-2 }
}
