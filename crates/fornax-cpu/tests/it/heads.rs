//! Shapes of attention that no usual model has: many query heads on one key head, odd widths.

use fornax_cpu::Isa;
use fornax_plan::conformance::{Case, Seq, check};
use fornax_plan::sample::uniform;
use fornax_plan::{Hyper, KvGroup, KvType, Op, Plan, Want, WeightRef};

use crate::invariance::device;

/// Queries, keys and values straight from embedding tables, so that nothing but attention is left.
fn case(heads: u32, kv_heads: u32, k_width: u32, v_width: u32, window: Option<u32>) -> Case {
    let hyper = Hyper { family: "heads".into(), vocab: 64, width: 8, context: 1024 };
    let mut plan = Plan::new(hyper);
    let embed = |plan: &mut Plan, name: &str, width: u32, seed: u64| {
        let noise: Vec<f32> = (0..64 * width).map(|i| 2.0 * uniform(seed, i) - 1.0).collect();
        let table = plan.weight(WeightRef::from_f32(name, 64, width, &noise));
        let out = plan.value(name, width);
        plan.push(Op::Embed { table, scale: 1.0, out });
        out
    };
    let q = embed(&mut plan, "q", heads * k_width, 1);
    let k = embed(&mut plan, "k", kv_heads * k_width, 2);
    let v = embed(&mut plan, "v", kv_heads * v_width, 3);
    let group = KvGroup { layers: vec![], window, heads: kv_heads, k_width, v_width };
    let kv = plan.kv_layer(0, &group);
    plan.push(Op::KvWrite { k, v, kv });
    let out = plan.value("mix", heads * v_width);
    plan.push(Op::Attention { q, kv, heads, scale: 0.7, softcap: Some(4.0), sinks: None, out });
    let wanted = plan.wanted_value("wanted", heads * v_width);
    plan.push(Op::SelectRows { x: out, out: wanted });
    plan.push(Op::HiddenOut { x: wanted });
    let seq = |slot: u32, pos: u32, n: u32| {
        let tokens = (0..n).map(|i| (uniform(9, pos + i) * 64.0) as u32).collect();
        Seq { slot, pos, tokens, wants: vec![(0..n, Want::Hidden)], max_new: 1 }
    };
    let steps = vec![vec![seq(0, 0, 70), seq(1, 0, 3)], vec![seq(1, 3, 1), seq(0, 70, 1)]];
    let name = format!("{heads} heads on {kv_heads}, {k_width}/{v_width}, window {window:?}");
    Case { name, plan, steps, kv_type: KvType::F16, tolerance: 2e-6 }
}

#[test]
fn many_query_heads_and_odd_widths() {
    let device = device(Isa::best(), 3);
    for (heads, kv_heads) in [(40, 1), (25, 1), (24, 1), (49, 7), (3, 3)] {
        for (k, v) in [(8, 24), (20, 5), (48, 80)] {
            for window in [None, Some(9), Some(64)] {
                check(&device, &case(heads, kv_heads, k, v, window)).unwrap();
            }
        }
    }
}
