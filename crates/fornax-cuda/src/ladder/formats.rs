//! Every weight format through every kernel that reads weights, against the reference: the list of cases has the common ones.

use std::sync::Arc;

use fornax_gguf::{Mapping, TensorType, blocks};
use fornax_plan::reference::ReferenceDevice;
use fornax_plan::sample::uniform;
use fornax_plan::{
    ActMode, Activation, BlockId, Device, Gating, Hyper, Limits, Linear, Op, Plan, SeqStep, SlotId,
    StepOutput, Tokens, ValueId, Want, WeightRef,
};

use crate::CudaDevice;
use crate::kernels::WEIGHT_TYPES;

const WIDTH: u32 = 256;
const VOCAB: u32 = 5;
const EXPERTS: u32 = 3;

/// Blocks of random bytes, each drawn until its weights are ordinary numbers: every bit of a format means something.
fn weight(name: &str, ty: TensorType, experts: u32, rows: u32, seed: u64) -> WeightRef {
    let n = (experts * rows * WIDTH) as usize / ty.block_len();
    let mut data = Vec::with_capacity(n * ty.block_bytes());
    let mut drawn = 0;
    for _ in 0..n {
        loop {
            let mut byte = || {
                drawn += 1;
                (uniform(seed, drawn) * 256.0) as u8
            };
            let block: Vec<u8> = (0..ty.block_bytes()).map(|_| byte()).collect();
            let mut w = vec![0.0f32; ty.block_len()];
            blocks::dequantize(ty, &block, &mut w).unwrap();
            let top =
                w.iter().fold(0.0f32, |m, v| if v.is_finite() { m.max(v.abs()) } else { 1e9 });
            if top < 40.0 && (top > 1e-3 || ty.block_len() == 1) {
                data.extend(block);
                break;
            }
        }
    }
    let data = Arc::new(Mapping::from_vec(data));
    WeightRef { name: name.into(), ty, cols: WIDTH, rows, experts, data, offset: 0 }
}

/// Embedding, product, gated layers of one and of two formats, a mixture; each result normed.
fn plan(ty: TensorType) -> Plan {
    let hyper = Hyper { family: "formats".into(), vocab: VOCAB, width: WIDTH, context: 64 };
    let mut p = Plan::new(hyper);
    let ones = p.weight(WeightRef::from_f32("ones", 1, WIDTH, &[1.0; WIDTH as usize]));
    let mut seed = 0;
    let mut matrix = |p: &mut Plan, ty, experts, rows| {
        seed += 1;
        let weight = p.weight(weight(&format!("w{seed}"), ty, experts, rows, seed));
        Linear { weight, bias: None }
    };
    let norm = |p: &mut Plan, x: ValueId| {
        let out = p.value("normed", WIDTH);
        p.push(Op::RmsNorm { x, weight: ones, eps: 1e-6, residual: None, out });
        out
    };
    let table = matrix(&mut p, ty, 1, VOCAB).weight;
    let x = p.value("x", WIDTH);
    p.push(Op::Embed { table, scale: 1.0, out: x });
    let x = norm(&mut p, x);
    let linear = matrix(&mut p, ty, 1, WIDTH);
    let y = p.value("y", WIDTH);
    p.push(Op::MatMul { x, linear, residual: Some(x), out: y });
    let mut y = norm(&mut p, y);
    let silu = Activation::Silu;
    for (gate, up) in [(ty, ty), (ty, TensorType::F16)] {
        let (gate, up) = (matrix(&mut p, gate, 1, WIDTH), matrix(&mut p, up, 1, WIDTH));
        let out = p.value("gated", WIDTH);
        p.push(Op::GatedMlp { x: y, gate, up, act: silu, out });
        y = norm(&mut p, out);
    }
    let router = matrix(&mut p, TensorType::F32, 1, EXPERTS);
    let (ids, weights) = (p.index_value("ids", 2), p.value("weights", 2));
    let gating = Gating::TopKThenSoftmax;
    p.push(Op::MoeRoute { x: y, router, top_k: 2, gating, ids, weights });
    let [gate, up, down] = [0; 3].map(|_| matrix(&mut p, ty, EXPERTS, WIDTH));
    let out = p.value("mixed", WIDTH);
    let residual = Some(y);
    p.push(Op::MoeMlp { x: y, ids, weights, gate, up, down, act: silu, residual, out });
    let z = norm(&mut p, out);
    let wanted = p.wanted_value("wanted", WIDTH);
    p.push(Op::SelectRows { x: z, out: wanted });
    p.push(Op::HiddenOut { x: wanted });
    p
}

fn hidden(device: &dyn Device, plan: &Plan) -> Vec<f32> {
    let limits =
        Limits { rows: VOCAB, wanted: VOCAB, act: Some(ActMode::F32), ..Limits::default() };
    assert_eq!(device.supports(plan, &limits), []);
    let mut program = device.prepare(plan, &limits).unwrap();
    let blocks = [BlockId(0)];
    let tables: Vec<&[BlockId]> = plan.kv.iter().map(|_| &blocks[..]).collect();
    let step = SeqStep {
        slot: SlotId(0),
        tokens: Tokens::Host(&[4, 0, 3, 1, 2]),
        pos: 0,
        tables: &tables,
        wants: &[(0..VOCAB, Want::Hidden)],
        sample: None,
        max_new: 1,
        stop: &[],
    };
    let mut out = StepOutput::default();
    let ticket = program.submit(&[step]).unwrap();
    program.wait(ticket, &mut out).unwrap();
    out.hidden
}

#[test]
fn every_format_is_read_as_the_decoder_reads_it() {
    let (device, _) = CudaDevice::on_the_cpu();
    for ty in WEIGHT_TYPES {
        let plan = plan(*ty);
        let (want, have) = (hidden(&ReferenceDevice::default(), &plan), hidden(&device, &plan));
        assert!(want.iter().any(|v| v.abs() > 0.1), "{ty}: something to compare");
        for (at, (w, h)) in want.iter().zip(&have).enumerate() {
            let off = (w - h).abs() / (1.0 + w.abs());
            assert!(off < 2e-4, "{ty}: element {at} is {h}, expected {w}");
        }
        assert_eq!(want.len(), have.len());
    }
}

#[test]
fn every_format_that_files_may_have_is_read_but_for_those_of_activations_and_whole_numbers() {
    use TensorType::{F64, I8, I16, I32, I64, Q8_1, Q8_K};
    let left_out = [Q8_1, Q8_K, I8, I16, I32, I64, F64];
    for ty in (0..64).filter_map(TensorType::from_id) {
        assert_ne!(WEIGHT_TYPES.contains(&ty), left_out.contains(&ty), "{ty}");
    }
}
