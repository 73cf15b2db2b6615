//! Which plans are decoded from tapes, and what is said of the others.

use std::sync::Arc;

use fornax_gguf::{Mapping, TensorType};
use fornax_plan::{
    Activation, Hyper, KvGroup, KvRef, Linear, Op, Plan, RopePairs, RopeTable, ValueId, WeightId,
    WeightRef,
};

use crate::driver::host;
use crate::fast::fold;
use crate::fast::planes::Planes;
use crate::fast::stage::{ATTEND, Stage};
use crate::fast::tape::fit::{Fit, Fitted, fit};
use crate::fast::tape::share::Geometry;
use crate::fast::{Addresses, Dense, Wire};

/// What a plan of two layers has that is not plain.
#[derive(Clone, Copy, Default)]
struct Odd {
    dim: Option<u32>,
    /// The second layer's down projection has another format.
    mixed: bool,
    /// Rows of O are normed before they are added.
    post_norm: bool,
    /// Down adds to what the layer began with.
    residual: bool,
    /// The second layer's norms have another epsilon.
    eps: bool,
    bias: bool,
    softcap: bool,
    clamped: bool,
    /// The head's input can be had.
    hidden: bool,
    no_positions: bool,
}

fn plan(odd: Odd) -> Plan {
    let (width, ff, dim) = (512, 512, odd.dim.unwrap_or(64));
    let hyper = Hyper { family: "fits".into(), vocab: 64, width, context: 64 };
    let mut p = Plan::new(hyper);
    let matrix = |p: &mut Plan, ty: TensorType, rows: u32, cols: u32| {
        let len = (rows * cols) as usize / ty.block_len() * ty.block_bytes();
        let data = Arc::new(Mapping::from_vec(vec![0; len]));
        let experts = 1;
        p.weight(WeightRef { name: "w".into(), ty, cols, rows, experts, data, offset: 0 })
    };
    let vector =
        |p: &mut Plan, n: u32| p.weight(WeightRef::from_f32("v", 1, n, &vec![1.0; n as usize]));
    let q8 = TensorType::Q8_0;
    let table = matrix(&mut p, q8, 64, width);
    let mut x = p.value("x", width);
    p.push(Op::Embed { table, scale: 2.0, out: x });
    let rope = RopeTable {
        pairs: RopePairs::Halves,
        inv_freq: vec![1.0; dim as usize / 2],
        magnitude: 1.0,
    };
    let rope = Some(p.rope(rope));
    let group = KvGroup { layers: vec![], window: None, heads: 2, k_width: dim, v_width: dim };
    for layer in 0..2 {
        let eps = if odd.eps && layer == 1 { 1e-5 } else { 1e-6 };
        let norm = |p: &mut Plan, x: ValueId| {
            let (weight, out) = (vector(p, width), p.value("h", width));
            p.push(Op::RmsNorm { x, weight, eps, residual: None, out });
            out
        };
        let linear = |p: &mut Plan, ty, rows, cols| Linear {
            weight: matrix(p, ty, rows, cols),
            bias: odd.bias.then(|| vector(p, rows)),
        };
        let h = norm(&mut p, x);
        let [q0, k0, v] = [4, 2, 2].map(|n| p.value("qkv", n * dim));
        let [q, k] = [4, 2].map(|n| p.value("turned", n * dim));
        let [wq, wk, wv] = [4, 2, 2].map(|n| linear(&mut p, q8, n * dim, width));
        p.push(Op::Qkv { x: h, q: wq, k: wk, v: wv, q_out: q0, k_out: k0, v_out: v });
        let (q_norm, k_norm) = (None, None);
        let rope = rope.filter(|_| !odd.no_positions);
        p.push(Op::QkNormRope { q: q0, k: k0, q_norm, k_norm, eps, rope, dim, q_out: q, k_out: k });
        let kv = p.kv_layer(layer, &group);
        p.push(Op::KvWrite { k, v, kv });
        let mix = p.value("mix", 4 * dim);
        let softcap = odd.softcap.then_some(30.0);
        p.push(Op::Attention { q, kv, heads: 4, scale: 0.125, softcap, sinks: None, out: mix });
        let o = linear(&mut p, q8, width, 4 * dim);
        let mut x1 = p.value("x1", width);
        let residual = (!odd.post_norm).then_some(x);
        p.push(Op::MatMul { x: mix, linear: o, residual, out: x1 });
        if odd.post_norm {
            let (weight, out) = (vector(&mut p, width), p.value("x1", width));
            p.push(Op::RmsNorm { x: x1, weight, eps, residual: Some(x), out });
            x1 = out;
        }
        let h1 = norm(&mut p, x1);
        let (gate, up) = (linear(&mut p, q8, ff, width), linear(&mut p, q8, ff, width));
        let m = p.value("m", ff);
        let act = if odd.clamped {
            Activation::SwigluClamped { alpha: 1.7, limit: 7.0 }
        } else {
            Activation::Silu
        };
        p.push(Op::GatedMlp { x: h1, gate, up, act, out: m });
        let ty = if odd.mixed && layer == 1 { TensorType::Q6_K } else { q8 };
        let down = linear(&mut p, ty, width, ff);
        let x2 = p.value("x2", width);
        let residual = Some(if odd.residual { x } else { x1 });
        p.push(Op::MatMul { x: m, linear: down, residual, out: x2 });
        x = x2;
    }
    let last = p.wanted_value("last", width);
    p.push(Op::SelectRows { x, out: last });
    let (weight, normed) = (vector(&mut p, width), p.wanted_value("normed", width));
    let eps = if odd.eps { 1e-5 } else { 1e-6 };
    p.push(Op::RmsNorm { x: last, weight, eps, residual: None, out: normed });
    if odd.hidden {
        p.push(Op::HiddenOut { x: normed });
    }
    let logits = p.wanted_value("logits", 64);
    let linear = Linear { weight: table, bias: None };
    p.push(Op::Logits { x: normed, linear, scale: 0.5, softcap: Some(20.0), out: logits });
    p.push(Op::Sample { logits });
    p
}

/// Addresses that are numbers alone.
struct Anywhere;

impl Addresses for Anywhere {
    fn value(&self, v: ValueId) -> u64 {
        u64::from(v.0) + 1
    }
    fn vector(&self, id: WeightId) -> u64 {
        u64::from(id.0) + 1
    }
    fn pool(&self, _: KvRef) -> [u64; 2] {
        [1, 2]
    }
    fn keep(&mut self, _: &[f32]) -> fornax_plan::Result<u64> {
        Ok(1)
    }
}

/// Whether a plan is decoded from tapes, or why not.
fn fitted(plan: &Plan) -> Result<Fitted, String> {
    let gpu = host::blank(90, 132, 232_448);
    let mut planes = Planes::new(&gpu, gpu.module(&[]).unwrap()).unwrap();
    let folded = fold::fold(plan);
    let mut wire = Wire::new(132, [1, 2]);
    for (ix, op) in folded.plan.ops.iter().enumerate() {
        if fold::planed(&folded.plan, op) {
            let norm = folded.norms.get(&ix).copied();
            let dense = Dense { op, norm };
            wire.dense(&folded.plan, &dense, &mut Anywhere, &mut planes).unwrap();
        } else {
            wire.other(&folded.plan, op, &Anywhere);
        }
    }
    match wire.lacks {
        Some(what) => Err(what),
        None => fit(&folded.plan, &folded.norms, &wire.stages),
    }
}

#[test]
fn a_plain_decoder_fits_with_and_without_a_way_to_its_hidden_rows() {
    for hidden in [false, true] {
        let (fit, layers) = fitted(&plan(Odd { hidden, ..Odd::default() })).unwrap();
        let g = fit.geometry;
        assert_eq!((g.layers, g.width, g.ff, g.vocab), (2, 512, 512, 64));
        assert_eq!((g.heads, g.kv_heads, g.dim), (4, 2, 64));
        assert_eq!(g.types, [TensorType::Q8_0; 5]);
        assert_eq!((fit.scale, fit.head_scale, fit.head_softcap), (2.0, 0.5, 20.0));
        assert_eq!((fit.eps, fit.pairs, fit.halves), (1e-6, 32, true));
        assert!(!fit.head_norms && !fit.biases && !fit.capped);
        assert_eq!(layers[1].stages, [5, 6, 7, 8, 9]);
        assert!(fit.final_norm.0 > layers[1].qkv[2].weight.0);
    }
    let odd = Odd { bias: true, softcap: true, ..Odd::default() };
    let (fit, _) = fitted(&plan(odd)).unwrap();
    assert!(fit.biases && fit.capped);
}

#[test]
fn what_no_gpu_has_computed_from_tapes_is_told() {
    let plain = plan(Odd::default());
    let (fit, _) = fitted(&plain).unwrap();
    let unseen = |fit: &Fit| fit.unseen(&plain, &[]);
    assert_eq!(unseen(&fit), Some("a cap"));
    let fit = Fit { head_softcap: 0.0, ..fit };
    assert_eq!(unseen(&fit), None);
    assert_eq!(unseen(&Fit { biases: true, ..fit }), Some("biases"));
    let many = Geometry { heads: 14, ..fit.geometry };
    let what = Some("so many query heads of a key head");
    assert_eq!(unseen(&Fit { geometry: many, ..fit }), what);
    let attends = Stage { kind: ATTEND, window: 8, ..Stage::default() };
    assert_eq!(fit.unseen(&plain, &[attends]), Some("a window"));
}

#[test]
fn what_the_kernel_lacks_is_told() {
    let plain = Odd::default;
    for (odd, why) in [
        (Odd { dim: Some(32), ..plain() }, "heads of 32"),
        (Odd { mixed: true, ..plain() }, "layers that are not alike"),
        (Odd { post_norm: true, ..plain() }, "another residual"),
        (Odd { residual: true, ..plain() }, "another residual"),
        (Odd { eps: true, ..plain() }, "layers that are not alike"),
        (Odd { clamped: true, ..plain() }, "a clamped activation"),
        (Odd { no_positions: true, ..plain() }, "layers without positions"),
    ] {
        assert_eq!(fitted(&plan(odd)).unwrap_err(), why);
    }
}

#[test]
fn models_fit_or_say_what_they_have_that_the_kernel_lacks() {
    let folder = std::path::PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models");
    let mut told = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if !path.join("model.gguf").exists() {
            continue;
        }
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let gguf = fornax_gguf::Gguf::open(&path.join("model.gguf")).unwrap();
        let plan = fornax_engine::arch::plan(&gguf).unwrap();
        let said = match fitted(&plan) {
            Ok((fit, layers)) => format!("{} layers of {:?}", layers.len(), fit.geometry.types),
            Err(why) => why,
        };
        told.push(format!("{name}: {said}"));
    }
    told.sort();
    // Small heads, or formats without planes: the GPU's own tests of tapes have models made up for them.
    let lacks = |part: &str| told.iter().filter(|t| t.ends_with(part)).count();
    assert_eq!(
        lacks(": heads of 32")
            + lacks(": attention of this width")
            + lacks(": qkv")
            + lacks(": matmul"),
        told.len(),
        "{told:#?}"
    );
    assert!(told.contains(&"qwen3-q8_0: heads of 32".to_string()), "{told:#?}");
}
