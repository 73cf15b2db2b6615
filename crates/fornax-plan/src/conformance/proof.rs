//! The proof that the boundary was frozen on: one layer, language-model head, argmax and eight
//! tokens fed back on the device, three sequences of different length at once.

use fornax_gguf::TensorType;

use super::build::{VOCAB, noise, tokens, weight};
use super::{Case, Seq};
use crate::device::KvType;
use crate::op::{Activation, Linear, Op};
use crate::plan::{Hyper, KvGroup, LayerSpan, Plan, RopePairs, RopeTable, WeightRef};
use crate::step::Want;

/// A one-layer Llama with random weights of this type.
pub fn proof_plan(ty: TensorType) -> Plan {
    let (width, ff, heads, kv_heads, dim, eps) = (64, 96, 4, 2, 32, 1e-5);
    let hyper = Hyper { family: "proof".into(), vocab: VOCAB, width, context: 256 };
    let mut plan = Plan::new(hyper);
    let mut seed = 100;
    let mut linear = |plan: &mut Plan, name: &str, rows, cols| {
        seed += 1;
        Linear { weight: plan.weight(weight(name, ty, 1, rows, cols, seed)), bias: None }
    };
    let norm = |plan: &mut Plan, name: &str, seed| {
        let values: Vec<f32> = noise(seed, width as usize, 0.3).iter().map(|v| 1.0 + v).collect();
        plan.weight(WeightRef::from_f32(name, 1, width, &values))
    };
    let table = linear(&mut plan, "embd", VOCAB, width).weight;
    let x = plan.value("x", width);
    plan.push(Op::Embed { table, scale: 0.5, out: x });

    let start = plan.ops.len() as u32;
    let h = plan.value("h", width);
    let w = norm(&mut plan, "attn_norm", 90);
    plan.push(Op::RmsNorm { x, weight: w, eps, residual: None, out: h });
    let (qw, kw) = (heads * dim, kv_heads * dim);
    let [q_out, q] = ["q0", "q"].map(|n| plan.value(n, qw));
    let [k_out, k, v] = ["k0", "k", "v"].map(|n| plan.value(n, kw));
    let wq = linear(&mut plan, "attn_q", qw, width);
    let wk = linear(&mut plan, "attn_k", kw, width);
    let wv = linear(&mut plan, "attn_v", kw, width);
    plan.push(Op::Qkv { x: h, q: wq, k: wk, v: wv, q_out, k_out, v_out: v });
    let inv_freq = (0..dim / 2).map(|i| 1e4f32.powf(-2.0 * i as f32 / dim as f32)).collect();
    let rope = Some(plan.rope(RopeTable { pairs: RopePairs::Adjacent, inv_freq, magnitude: 1.0 }));
    let none = None;
    plan.push(Op::QkNormRope {
        q: q_out,
        k: k_out,
        q_norm: none,
        k_norm: none,
        eps,
        rope,
        dim,
        q_out: q,
        k_out: k,
    });
    let group =
        KvGroup { layers: vec![], window: None, heads: kv_heads, k_width: dim, v_width: dim };
    let kv = plan.kv_layer(0, &group);
    plan.push(Op::KvWrite { k, v, kv });
    let mix = plan.value("mix", qw);
    let scale = 1.0 / (dim as f32).sqrt();
    plan.push(Op::Attention { q, kv, heads, scale, softcap: None, sinks: None, out: mix });
    let o = linear(&mut plan, "attn_output", width, qw);
    let x1 = plan.value("x1", width);
    plan.push(Op::MatMul { x: mix, linear: o, residual: Some(x), out: x1 });
    let h1 = plan.value("h1", width);
    let w = norm(&mut plan, "ffn_norm", 91);
    plan.push(Op::RmsNorm { x: x1, weight: w, eps, residual: None, out: h1 });
    let gate = linear(&mut plan, "ffn_gate", ff, width);
    let up = linear(&mut plan, "ffn_up", ff, width);
    let m = plan.value("m", ff);
    plan.push(Op::GatedMlp { x: h1, gate, up, act: Activation::Silu, out: m });
    let down = linear(&mut plan, "ffn_down", width, ff);
    let x2 = plan.value("x2", width);
    plan.push(Op::MatMul { x: m, linear: down, residual: Some(x1), out: x2 });
    plan.layers.push(LayerSpan { start, end: plan.ops.len() as u32, shape: 0 });

    let last = plan.wanted_value("last", width);
    plan.push(Op::SelectRows { x: x2, out: last });
    let normed = plan.wanted_value("normed", width);
    let w = norm(&mut plan, "output_norm", 92);
    plan.push(Op::RmsNorm { x: last, weight: w, eps, residual: None, out: normed });
    let head = linear(&mut plan, "output", VOCAB, width);
    let logits = plan.wanted_value("logits", VOCAB);
    plan.push(Op::Logits { x: normed, linear: head, scale: 1.0, softcap: None, out: logits });
    plan.push(Op::Sample { logits });
    plan
}

/// The case: prompts of 3, 11 and 40 tokens in one step, eight tokens each on one ticket, then
/// four more from the device's own last token.
pub fn proof(ty: TensorType) -> Case {
    let seq = |slot: u32, n: u32| Seq {
        slot,
        pos: 0,
        tokens: tokens(u64::from(slot) + 500, n),
        wants: vec![(n - 1..n, Want::Token { logprob: false })],
        max_new: 8,
    };
    // The first step ends with the eighth chosen token, which has no KV entry yet.
    let more = |slot: u32, n: u32| Seq {
        slot,
        pos: n + 7,
        tokens: vec![],
        wants: vec![(0..1, Want::Token { logprob: false })],
        max_new: 4,
    };
    let steps =
        vec![vec![seq(2, 3), seq(0, 11), seq(1, 40)], vec![more(1, 40), more(2, 3), more(0, 11)]];
    Case {
        name: format!("proof/{}", ty.name()),
        plan: proof_plan(ty),
        steps,
        kv_type: KvType::F32,
        tolerance: 0.0,
    }
}
