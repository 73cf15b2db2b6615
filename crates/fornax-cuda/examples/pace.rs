//! How fast the GPU decodes models of random weights in the shapes of known ones: `pace [SHAPE:TYPE[:DEPTH[:KV[:ROWS[:HOW]]]]]...`.
//! HOW is `deterministic`, `drawn` (temperature 0.8, top-k 40, top-p 0.95, min-p 0.05) or `penalised` (that and penalties).
//! Prints tokens a second, weights read a second, and the first tokens, which tell whether two runs agree.
//!
//! `FORNAX_KERNELS` names a folder whose files stand for kernel sources, so that variants are tried without a build.

#![allow(clippy::print_stdout, reason = "the report is the output")]

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use fornax_cuda::CudaDevice;
use fornax_gguf::{Mapping, TensorType, blocks};
use fornax_plan::sample::uniform;
use fornax_plan::{
    Activation, BlockId, Device, Hyper, KvGroup, KvType, LayerSpan, Limits, Linear, Op, Plan,
    Program, RopePairs, RopeTable, SampleParams, SeqStep, SlotId, StepOutput, Tokens, Want,
    WeightRef,
};

pub(crate) struct Shape {
    pub(crate) name: &'static str,
    layers: u32,
    width: u32,
    ff: u32,
    heads: u32,
    kv_heads: u32,
    dim: u32,
    pub(crate) vocab: u32,
    tied: bool,
    norms: bool,
}

const fn shape(
    name: &'static str,
    [layers, width, ff, heads, kv_heads, dim, vocab]: [u32; 7],
    tied: bool,
    norms: bool,
) -> Shape {
    Shape { name, layers, width, ff, heads, kv_heads, dim, vocab, tied, norms }
}

pub(crate) const SHAPES: &[Shape] = &[
    shape("smollm2-135m", [30, 576, 1536, 9, 3, 64, 49_152], true, false),
    shape("smollm2-360m", [32, 960, 2560, 15, 5, 64, 49_152], true, false),
    shape("qwen3-0.6b", [28, 1024, 3072, 16, 8, 128, 151_936], true, true),
    shape("llama-1b", [16, 2048, 8192, 32, 8, 64, 128_256], true, false),
    shape("llama-8b", [32, 4096, 14_336, 32, 8, 128, 128_256], false, false),
    // Few layers of those, which the reference can follow.
    shape("few-64", [2, 960, 2560, 15, 5, 64, 4096], true, false),
    shape("few-128", [2, 1024, 3072, 16, 8, 128, 4096], true, true),
    shape("few-left", [2, 2048, 8192, 32, 8, 64, 4096], true, false),
    shape("few-wide", [1, 4096, 14_336, 32, 8, 128, 4096], false, false),
];

/// Random encoded weights; matrices are windows of it at different places.
pub(crate) struct Pool {
    ty: TensorType,
    data: Arc<Mapping>,
    at: usize,
}

impl Pool {
    pub(crate) fn new(ty: TensorType) -> Result<Pool, String> {
        // One piece is quantised and repeated with its blocks in another order.
        let piece = 1 << 20;
        let values: Vec<f32> = (0..piece).map(|i| 2.0 * uniform(7, i) - 1.0).collect();
        let mut bytes = vec![0; piece as usize / ty.block_len() * ty.block_bytes()];
        blocks::quantize(ty, &values, &mut bytes).map_err(|e| e.to_string())?;
        let block = ty.block_bytes();
        let n = bytes.len() / block;
        let mut all = Vec::new();
        let mut shift = 0;
        while all.len() < 640 << 20 {
            shift = (shift + 7919) % n;
            all.extend_from_slice(&bytes[shift * block..]);
            all.extend_from_slice(&bytes[..shift * block]);
        }
        Ok(Pool { ty, data: Arc::new(Mapping::from_vec(all)), at: 0 })
    }

    fn weight(&mut self, name: &str, rows: u32, cols: u32) -> WeightRef {
        let block = self.ty.block_bytes();
        let len = rows as usize * cols as usize / self.ty.block_len() * block;
        let room = self.data.bytes().len() - len;
        self.at = (self.at + 1_000_003 * block) % room / block * block;
        let (ty, experts, data) = (self.ty, 1, Arc::clone(&self.data));
        WeightRef { name: name.to_string(), ty, cols, rows, experts, data, offset: self.at }
    }
}

pub(crate) fn plan(s: &Shape, pool: &mut Pool) -> Plan {
    let hyper = Hyper { family: s.name.into(), vocab: s.vocab, width: s.width, context: 1 << 15 };
    let mut p = Plan::new(hyper);
    let vector = |p: &mut Plan, len: u32, scale: f32| {
        let v: Vec<f32> = (0..len).map(|i| scale * (0.75 + 0.5 * uniform(len.into(), i))).collect();
        p.weight(WeightRef::from_f32("norm", 1, len, &v))
    };
    let table = p.weight(pool.weight("embd", s.vocab, s.width));
    let mut x = p.value("x", s.width);
    p.push(Op::Embed { table, scale: 1.0, out: x });
    let inv_freq = (0..s.dim / 2).map(|i| 1e6f32.powf(-2.0 * i as f32 / s.dim as f32)).collect();
    let pairs = if s.norms { RopePairs::Halves } else { RopePairs::Adjacent };
    let rope = Some(p.rope(RopeTable { pairs, inv_freq, magnitude: 1.0 }));
    let group =
        KvGroup { layers: vec![], window: None, heads: s.kv_heads, k_width: s.dim, v_width: s.dim };
    let (qw, kw, eps) = (s.heads * s.dim, s.kv_heads * s.dim, 1e-6);
    // Weights are spread evenly over ±1: norms bring the sums back to about one.
    let gain = |cols: u32| (3.0 / cols as f32).sqrt();
    for layer in 0..s.layers {
        let start = p.ops.len() as u32;
        let mut linear = |p: &mut Plan, rows, cols| Linear {
            weight: p.weight(pool.weight("w", rows, cols)),
            bias: None,
        };
        let weight = vector(&mut p, s.width, gain(s.width));
        let h = p.value("h", s.width);
        p.push(Op::RmsNorm { x, weight, eps, residual: None, out: h });
        let [q0, q] = ["q0", "q"].map(|n| p.value(n, qw));
        let [k0, k, v] = ["k0", "k", "v"].map(|n| p.value(n, kw));
        let (wq, wk, wv) =
            (linear(&mut p, qw, s.width), linear(&mut p, kw, s.width), linear(&mut p, kw, s.width));
        p.push(Op::Qkv { x: h, q: wq, k: wk, v: wv, q_out: q0, k_out: k0, v_out: v });
        let q_norm = s.norms.then(|| vector(&mut p, s.dim, 1.0));
        let k_norm = s.norms.then(|| vector(&mut p, s.dim, 1.0));
        let dim = s.dim;
        p.push(Op::QkNormRope { q: q0, k: k0, q_norm, k_norm, eps, rope, dim, q_out: q, k_out: k });
        let kv = p.kv_layer(layer, &group);
        p.push(Op::KvWrite { k, v, kv });
        let mix = p.value("mix", qw);
        let scale = 1.0 / (s.dim as f32).sqrt();
        p.push(Op::Attention {
            q,
            kv,
            heads: s.heads,
            scale,
            softcap: None,
            sinks: None,
            out: mix,
        });
        let o = linear(&mut p, s.width, qw);
        let x1 = p.value("x1", s.width);
        p.push(Op::MatMul { x: mix, linear: o, residual: Some(x), out: x1 });
        let weight = vector(&mut p, s.width, gain(s.width));
        let h1 = p.value("h1", s.width);
        p.push(Op::RmsNorm { x: x1, weight, eps, residual: None, out: h1 });
        let (gate, up) = (linear(&mut p, s.ff, s.width), linear(&mut p, s.ff, s.width));
        let m = p.value("m", s.ff);
        p.push(Op::GatedMlp { x: h1, gate, up, act: Activation::Silu, out: m });
        let down = linear(&mut p, s.width, s.ff);
        let x2 = p.value("x2", s.width);
        p.push(Op::MatMul { x: m, linear: down, residual: Some(x1), out: x2 });
        x = x2;
        p.layers.push(LayerSpan { start, end: p.ops.len() as u32, shape: 0 });
    }
    let last = p.wanted_value("last", s.width);
    p.push(Op::SelectRows { x, out: last });
    let normed = p.wanted_value("normed", s.width);
    let weight = vector(&mut p, s.width, gain(s.width));
    p.push(Op::RmsNorm { x: last, weight, eps, residual: None, out: normed });
    let head = if s.tied { table } else { p.weight(pool.weight("output", s.vocab, s.width)) };
    let logits = p.wanted_value("logits", s.vocab);
    let linear = Linear { weight: head, bias: None };
    p.push(Op::Logits { x: normed, linear, scale: 1.0, softcap: None, out: logits });
    p.push(Op::Sample { logits });
    p
}

/// Rows of one step of a prompt.
const PROMPT: u32 = 2048;

struct Case {
    depth: u32,
    kv: KvType,
    rows: u32,
    how: String,
}

impl Case {
    fn sample(&self) -> Option<SampleParams> {
        let drawn = SampleParams {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            seed: 1,
            ..SampleParams::default()
        };
        match self.how.as_str() {
            "drawn" => Some(drawn),
            "penalised" => Some(SampleParams { repeat_penalty: 1.1, ..drawn }),
            _ => None,
        }
    }
}

fn measure(device: &CudaDevice, plan: &Plan, label: &str, case: &Case) -> Result<(), String> {
    let told = |e: fornax_plan::Error| e.to_string();
    let block = device.info().kv_block;
    let (chain, reps) = (64, 5);
    let blocks = (case.depth + chain * 2).div_ceil(block) + 1;
    let limits = Limits {
        slots: case.rows,
        rows: PROMPT,
        wanted: case.rows,
        kv_blocks: blocks * case.rows,
        kv_type: case.kv,
        act: None,
        deterministic: case.how == "deterministic",
        ..Limits::default()
    };
    let began = Instant::now();
    let mut program = device.prepare(plan, &limits).map_err(told)?;
    let prepared = began.elapsed().as_secs_f64();
    let tables: Vec<Vec<BlockId>> =
        (0..case.rows).map(|r| (0..blocks).map(|i| BlockId(i * case.rows + r)).collect()).collect();
    let tables: Vec<Vec<&[BlockId]>> = tables.iter().map(|t| vec![&t[..]; plan.kv.len()]).collect();
    let tokens: Vec<u32> =
        (0..case.depth).map(|i| i.wrapping_mul(2_654_435_761) % plan.hyper.vocab).collect();
    let mut out = StepOutput::default();
    let want = [(0..1, Want::Token { logprob: false })];
    let mut prompts = Vec::new();
    for row in (0..case.rows).chain([0, 0]) {
        let began = Instant::now();
        for (ix, chunk) in tokens.chunks(PROMPT as usize).enumerate() {
            let n = chunk.len() as u32;
            let ends = [(n - 1..n, Want::Token { logprob: false })];
            let step = SeqStep {
                slot: SlotId(row),
                tokens: Tokens::Host(chunk),
                pos: ix as u32 * PROMPT,
                tables: &tables[row as usize],
                wants: &ends,
                sample: None,
                max_new: 1,
                stop: &[],
            };
            let ticket = program.submit(&[step]).map_err(told)?;
            program.wait(ticket, &mut out).map_err(told)?;
        }
        prompts.push(f64::from(case.depth) / began.elapsed().as_secs_f64());
    }
    let prompt = prompts.iter().copied().fold(0.0, f64::max);
    if std::env::var_os("PROFILE").is_some() {
        // The last chunk again, op by op, each waited for.
        let at = case.depth.saturating_sub(1) / PROMPT * PROMPT;
        let step = SeqStep {
            slot: SlotId(0),
            tokens: Tokens::Host(&tokens[at as usize..]),
            pos: at,
            tables: &tables[0],
            wants: &[],
            sample: None,
            max_new: 1,
            stop: &[],
        };
        program.profile(std::slice::from_ref(&step), &mut out).map_err(told)?;
        for t in program.profile(&[step], &mut out).map_err(told)? {
            println!("    {t:?}");
        }
    }
    let mut run = |program: &mut Box<dyn Program>| -> Result<(f64, Vec<u32>), String> {
        let steps: Vec<SeqStep<'_>> = (0..case.rows)
            .map(|row| SeqStep {
                slot: SlotId(row),
                tokens: Tokens::Host(&[5]),
                pos: case.depth,
                tables: &tables[row as usize],
                wants: &want,
                sample: case.sample(),
                max_new: chain,
                stop: &[],
            })
            .collect();
        let began = Instant::now();
        let ticket = program.submit(&steps).map_err(told)?;
        program.wait(ticket, &mut out).map_err(told)?;
        Ok((began.elapsed().as_secs_f64(), out.tokens.iter().map(|t| t.token).collect()))
    };
    let (_, first) = run(&mut program)?;
    let mut best = f64::INFINITY;
    let mut all = Vec::new();
    for _ in 0..reps {
        let (seconds, ids) = run(&mut program)?;
        if ids != first {
            let at = ids.iter().zip(&first).position(|(a, b)| a != b);
            println!("{label}: repeats chose other tokens, first at {at:?}");
        }
        all.push(seconds);
        best = best.min(seconds);
    }
    all.sort_by(f64::total_cmp);
    let step = all[reps / 2] / f64::from(chain);
    let bytes = plan.bytes_per_token() as f64;
    let ids = &first[..6.min(first.len())];
    println!(
        "{label:<34} {:8.1} tok/s ({:.1} best) {:7.1} us/step {:5.2} TB/s | prompt {prompt:8.0} tok/s, prepare {prepared:.1} s | {ids:?}",
        f64::from(case.rows) / step,
        f64::from(case.rows * chain) / best,
        step * 1e6,
        bytes / step * 1e-12,
    );
    Ok(())
}

fn one(device: &CudaDevice, text: &str) -> Result<(), String> {
    let mut parts = text.split(':');
    let name = parts.next().unwrap_or_default();
    let ty = TensorType::parse(parts.next().unwrap_or("q8_0")).ok_or("no such type")?;
    let number = |p: Option<&str>, or: u32| p.filter(|p| !p.is_empty()).map_or(Ok(or), str::parse);
    let depth = number(parts.next(), 128).map_err(|e| e.to_string())?;
    let kv = match parts.next() {
        Some("q8_0") => KvType::Q8_0,
        Some("f32") => KvType::F32,
        _ => KvType::F16,
    };
    let rows = number(parts.next(), 1).map_err(|e| e.to_string())?;
    let shape = SHAPES.iter().find(|s| s.name == name).ok_or("no such shape")?;
    let plan = plan(shape, &mut Pool::new(ty)?);
    let how = parts.next().unwrap_or_default().to_string();
    measure(device, &plan, text, &Case { depth, kv, rows, how })
}

fn main() -> ExitCode {
    let device = match CudaDevice::open(0) {
        Ok(device) => device,
        Err(e) => {
            println!("{e}");
            return ExitCode::FAILURE;
        }
    };
    let mut failed = false;
    for text in std::env::args().skip(1) {
        if let Err(e) = one(&device, &text) {
            println!("{text}: {e}");
            failed = true;
        }
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
