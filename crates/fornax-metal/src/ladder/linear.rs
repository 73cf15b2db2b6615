//! Kernels that read weights: each type, each shape of the sweep, each variant.

use fornax_gguf::{TensorType, blocks};
use fornax_plan::{WeightRef, conformance};

use super::{Run, bytes, close, noise, read_floats, read_words, room};
use crate::library::{WEIGHT_TYPES, entry, typed};

/// A matrix as bytes and as decoded numbers.
pub(super) struct Matrix {
    pub(super) ty: TensorType,
    pub(super) outs: usize,
    pub(super) cols: usize,
    pub(super) data: Vec<u8>,
    pub(super) values: Vec<f32>,
}

/// Bytes of a matrix: random numbers encoded, or the blocks that the decoders are tested with
/// where a type has no encoder.
fn blocks_of(ty: TensorType, outs: usize, cols: usize, seed: u64) -> Vec<u8> {
    if blocks::can_quantize(ty) {
        let w: WeightRef = conformance::weight("w", ty, 1, outs as u32, cols as u32, seed);
        return w.data.bytes().to_vec();
    }
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/quant-blocks/");
    let all = std::fs::read(format!("{folder}{ty}.blocks.bin")).expect("blocks of the type");
    let skip = seed as usize * ty.block_bytes();
    let bytes = outs * cols / ty.block_len() * ty.block_bytes();
    all.iter().copied().cycle().skip(skip).take(bytes).collect()
}

impl Matrix {
    pub(super) fn new(ty: TensorType, outs: usize, cols: usize, seed: u64) -> Matrix {
        let data = blocks_of(ty, outs, cols, seed);
        let mut values = vec![0.0; outs * cols];
        blocks::dequantize(ty, &data, &mut values).expect("whole blocks");
        Matrix { ty, outs, cols, data, values }
    }

    /// `W·x` for every row of x, rows × outs.
    pub(super) fn product(&self, x: &[f32]) -> Vec<f64> {
        let dot = |x: &[f32], w: &[f32]| {
            x.iter().zip(w).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>()
        };
        let outs = |x| self.values.chunks(self.cols).map(move |w| dot(x, w));
        x.chunks(self.cols).flat_map(outs).collect()
    }
}

/// What each output of a product may be off by, a share of ‖w‖·‖x‖.
pub(super) fn allowed(m: &Matrix, x: &[f32]) -> Vec<f64> {
    let norm = |v: &[f32]| v.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    let rows: Vec<f64> = m.values.chunks(m.cols).map(norm).collect();
    // A hundredth of what the ladder allows: the fragments are floats too.
    let of = |x: &[f32]| rows.iter().map(|w| 5e-6 * w * norm(x) + 1e-6).collect::<Vec<f64>>();
    x.chunks(m.cols).flat_map(of).collect()
}

/// Holds each output to its bound.
pub(super) fn within(what: &str, have: &[f32], want: &[f64], m: &Matrix, x: &[f32]) {
    for (i, ((h, w), bound)) in have.iter().zip(want).zip(allowed(m, x)).enumerate() {
        assert!((f64::from(*h) - w).abs() <= bound, "{what}: output {i} is {h}, expected {w}");
    }
}

/// Columns of the sweep that a type can have.
pub(super) fn columns(ty: TensorType) -> Vec<usize> {
    match ty.block_len() {
        1 => vec![7, 33, 130, 544],
        n => vec![n, 3 * n, 1024 + n],
    }
}

/// A kernel of the matmul family with everything in its epilogue but the soft-cap, or with none.
fn matmul(kernel: &str, m: &Matrix, rows: usize, constants: &[u32], grid: [u32; 3], threads: u32) {
    matmul_by(&entry(kernel, m.ty), m, rows, constants, grid, threads);
}

/// The same by the kernel of that name.
pub(super) fn matmul_by(
    kernel: &str,
    m: &Matrix,
    rows: usize,
    constants: &[u32],
    grid: [u32; 3],
    threads: u32,
) {
    let x = noise(3, rows * m.cols);
    let (bias, residual) = (noise(4, m.outs), noise(5, rows * m.outs));
    for full in [false, true] {
        let out = room(rows * m.outs);
        let flag = u32::from(full);
        let scale = if full { 1.5f32 } else { 1.0 };
        let args = [
            rows as u32,
            m.cols as u32,
            m.outs as u32,
            flag,
            flag,
            scale.to_bits(),
            0f32.to_bits(),
        ];
        Run::new(kernel, constants, grid, [threads, 1, 1])
            .buffer(&bytes(&m.data))
            .floats(&x)
            .floats(&bias)
            .floats(&residual)
            .buffer(&out)
            .go(&args);
        let mut want = m.product(&x);
        if full {
            for (i, w) in want.iter_mut().enumerate() {
                *w = (*w + f64::from(bias[i % m.outs])) * 1.5 + f64::from(residual[i]);
            }
        }
        let what = format!("{kernel} {} {rows}x{}x{} {constants:?}", m.ty, m.outs, m.cols);
        within(&what, &read_floats(&out, rows * m.outs), &want, m, &x);
    }
}

fn matvec(m: &Matrix, rows: usize, [o, r, s]: [u32; 3]) {
    let grid = [(m.outs as u32).div_ceil(o), (rows as u32).div_ceil(r), 1];
    matmul("matvec", m, rows, &[o, r, s, 0], grid, 32 * s);
}

#[test]
pub(super) fn matvec_of_every_type() {
    for ty in WEIGHT_TYPES {
        for cols in columns(*ty) {
            let m = Matrix::new(*ty, 33, cols, 1);
            matvec(&m, 1, [2, 1, 4]);
            matvec(&m, 4, [4, 4, 2]);
        }
    }
}

#[test]
fn matvec_in_every_variant() {
    for (ty, cols) in [(TensorType::Q8_0, 288), (TensorType::Q4_K, 768), (TensorType::F16, 130)] {
        let m = Matrix::new(ty, 7, cols, 2);
        for outs in [1, 2, 4] {
            for rows in 1..=4 {
                for simds in [1, 2, 4, 8] {
                    matvec(&m, rows as usize, [outs, rows, simds]);
                }
            }
        }
        // Rows in tiles that they do not fill.
        for rows in [1, 5, 7, 64] {
            matvec(&m, rows, [2, 4, 2]);
        }
    }
}

#[test]
pub(super) fn small_matmul_of_every_type() {
    for ty in WEIGHT_TYPES {
        for (cols, rows) in columns(*ty).into_iter().zip([16usize, 5, 11, 17]) {
            let m = Matrix::new(*ty, 33, cols, 1);
            let grid = [m.outs.div_ceil(8) as u32, rows.div_ceil(16) as u32, 1];
            matmul("matmul_small", &m, rows, &[], grid, 128);
        }
    }
}

#[test]
pub(super) fn tiled_matmul_of_every_type() {
    for ty in WEIGHT_TYPES {
        for (cols, (rows, outs)) in
            columns(*ty).into_iter().zip([(64usize, 130), (33, 64), (17, 33), (1, 1)])
        {
            let m = Matrix::new(*ty, outs, cols, 1);
            let grid = [m.outs.div_ceil(64) as u32, rows.div_ceil(32) as u32, 1];
            matmul("matmul_tiled", &m, rows, &[], grid, 128);
        }
    }
}

#[test]
fn a_softcap_comes_after_scale_and_before_the_residual() {
    let m = Matrix::new(TensorType::F32, 3, 33, 6);
    let (x, residual, out) = (noise(7, 33), noise(8, 3), room(3));
    for (kernel, constants, threads) in
        [("matvec", &[1, 1, 1, 0][..], 32), ("matmul_small", &[], 128), ("matmul_tiled", &[], 128)]
    {
        Run::new(&entry(kernel, m.ty), constants, [3, 1, 1], [threads, 1, 1])
            .buffer(&bytes(&m.data))
            .floats(&x)
            .floats(&[0.0])
            .floats(&residual)
            .buffer(&out)
            .go(&[1, 33, 3, 0, 1, 20f32.to_bits(), 2f32.to_bits()]);
        let cap = |v: f64| 2.0 * (v * 20.0 / 2.0).tanh();
        let want: Vec<f64> =
            m.product(&x).iter().zip(&residual).map(|(v, r)| cap(*v) + f64::from(*r)).collect();
        close(kernel, &read_floats(&out, 3), &want, 1e-5);
    }
}

#[test]
pub(super) fn qkv_of_every_type() {
    for ty in WEIGHT_TYPES {
        let cols = columns(*ty)[1];
        for (rows, own) in [(1, [2, 1, 2, 1]), (3, [4, 2, 1, 0]), (2, [2, 2, 4, 1])] {
            qkv(*ty, cols, rows, own);
        }
    }
}

/// Projections of `rows` by a variant: outputs, rows and simdgroups of a threadgroup, with a norm or not.
pub(super) fn qkv(ty: TensorType, cols: usize, rows: u32, own: [u32; 4]) {
    let all = [33, 7, 5].map(|outs| Matrix::new(ty, outs, cols, outs as u64));
    let [o, r, s, n] = own;
    let x = noise(9, rows as usize * cols);
    let norm = noise(13, cols);
    let outs = all.each_ref().map(|m| room(rows as usize * m.outs));
    let biases = all.each_ref().map(|m| noise(10, m.outs));
    let tiles = all.iter().map(|m| (m.outs as u32).div_ceil(o)).sum();
    let grid = [tiles, rows.div_ceil(r), 1];
    let (name, constants) = typed("qkv", &[ty; 3], &own);
    let mut run = Run::new(&name, &constants, grid, [32 * s, 1, 1]);
    for m in &all {
        run = run.buffer(&bytes(&m.data));
    }
    run = run.floats(&x).floats(&norm);
    for bias in &biases {
        run = run.floats(bias);
    }
    for out in &outs {
        run = run.buffer(out);
    }
    // No bias for the keys.
    run.go(&[rows, cols as u32, 33, 7, 5, 5, 1e-5f32.to_bits()]);
    let x = if n == 0 { x } else { normed(&x, &norm) };
    for (i, m) in all.iter().enumerate() {
        let mut want = m.product(&x);
        if i != 1 {
            let add = |(j, w): (usize, &mut f64)| *w += f64::from(biases[i][j % m.outs]);
            want.iter_mut().enumerate().for_each(add);
        }
        let have = read_floats(&outs[i], rows as usize * m.outs);
        within(&format!("qkv {ty} {i} {rows}x{cols} {own:?}"), &have, &want, m, &x);
    }
}

/// Rows after their RMS norm.
pub(super) fn normed(x: &[f32], norm: &[f32]) -> Vec<f32> {
    let row = |x: &[f32]| {
        let square: f64 = x.iter().map(|v| f64::from(*v).powi(2)).sum();
        let scale = 1.0 / (square / norm.len() as f64 + 1e-5).sqrt();
        x.iter().zip(norm).map(|(x, w)| (f64::from(*x) * scale) as f32 * w).collect::<Vec<f32>>()
    };
    x.chunks(norm.len()).flat_map(row).collect()
}

pub(super) fn activated(act: u32, g: f64, u: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match act {
        0 => g * sigmoid(g) * u,
        1 => {
            0.5 * g
                * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g * g * g)).tanh())
                * u
        }
        _ => {
            let (g, u) = (g.min(0.5), u.clamp(-0.5, 0.5));
            g * sigmoid(1.702 * g) * (u + 1.0)
        }
    }
}

#[test]
pub(super) fn gated_mlp_of_every_type_and_activation() {
    for (n, ty) in WEIGHT_TYPES.iter().enumerate() {
        for (act, cols) in columns(*ty).into_iter().take(3).enumerate() {
            let rows = 1 + (n + act) as u32 % 6;
            gated(*ty, cols, (act as u32, n as u32 % 4), rows, [2, rows.min(4), 2, rows % 2]);
        }
    }
}

/// The gated pair of `rows` by a variant, as in [`qkv`], with an activation and biases of gate and up by bits.
pub(super) fn gated(
    ty: TensorType,
    cols: usize,
    (act, bias): (u32, u32),
    rows: u32,
    own: [u32; 4],
) {
    let [gate, up] = [1, 2].map(|seed| Matrix::new(ty, 17, cols, seed));
    let [o, r, s, n] = own;
    let all = rows as usize;
    let (x, norm) = (noise(9, all * cols), noise(13, cols));
    let biases = [noise(11, 17), noise(12, 17)];
    let out = room(all * 17);
    let grid = [17u32.div_ceil(o), rows.div_ceil(r), 1];
    let [alpha, limit, eps] = [1.702f32, 0.5, 1e-5].map(f32::to_bits);
    let (name, constants) = typed("gated_mlp", &[ty; 2], &own);
    Run::new(&name, &constants, grid, [32 * s, 1, 1])
        .buffer(&bytes(&gate.data))
        .buffer(&bytes(&up.data))
        .floats(&x)
        .floats(&norm)
        .floats(&biases[0])
        .floats(&biases[1])
        .buffer(&out)
        .go(&[rows, cols as u32, 17, bias, act, alpha, limit, eps]);
    let x = if n == 0 { x } else { normed(&x, &norm) };
    let add = |m: &Matrix, i: usize, flag| {
        let mut all = m.product(&x);
        if bias & flag != 0 {
            let add = |(j, w): (usize, &mut f64)| *w += f64::from(biases[i][j % 17]);
            all.iter_mut().enumerate().for_each(add);
        }
        all
    };
    let pair = [(&gate, 0, 1), (&up, 1, 2)].map(|(m, i, flag)| (add(m, i, flag), allowed(m, &x)));
    let have = read_floats(&out, all * 17);
    gated_within(&format!("gated {ty} {act} {rows}x{cols} {own:?}"), &have, act, &pair);
}

/// Holds activated pairs to what their two products, each with what it may be off by, make of it.
pub(super) fn gated_within(
    what: &str,
    have: &[f32],
    act: u32,
    [(g, of_g), (u, of_u)]: &[(Vec<f64>, Vec<f64>); 2],
) {
    assert_eq!(have.len(), g.len(), "{what}");
    for (i, h) in have.iter().enumerate() {
        let w = activated(act, g[i], u[i]);
        // What the two products may be off by, through the activation; and the activation's own, which is no smaller than
        // single precision is at one (where a factor is the rest of that one) times what the factor belongs to.
        let ways = [(1.0, 1.0), (1.0, -1.0), (-1.0, 1.0), (-1.0, -1.0)];
        let through =
            ways.map(|(a, b)| (activated(act, g[i] + a * of_g[i], u[i] + b * of_u[i]) - w).abs());
        let own = 1e-5 * (1.0 + w.abs()) + 2e-7 * (g[i] * u[i]).abs();
        let bound = through.into_iter().fold(0.0, f64::max) + own;
        let off = (f64::from(*h) - w).abs();
        let of = format!("{} and {}", g[i], u[i]);
        assert!(off <= bound, "{what}: {i}, of {of}, is {h}, expected {w} within {bound:.1e}");
    }
}

#[test]
fn activations_of_many_rows() {
    let (gate, up) = (noise(1, 64 * 300), noise(2, 64 * 300));
    for act in 0..3 {
        let out = super::floats(&gate);
        let args = [64, 300, 300, 0, act, 1.702f32.to_bits(), 0.5f32.to_bits(), 0];
        Run::new("activate", &[], [2, 64, 1], [256, 1, 1]).floats(&up).buffer(&out).go(&args);
        let one = |(g, u): (&f32, &f32)| activated(act, f64::from(*g), f64::from(*u));
        let want: Vec<f64> = gate.iter().zip(&up).map(one).collect();
        close("activations", &read_floats(&out, want.len()), &want, 1e-5);
    }
}

#[test]
fn embedding_of_every_type() {
    for ty in WEIGHT_TYPES {
        for cols in columns(*ty) {
            let m = Matrix::new(*ty, 9, cols, 4);
            embed(&entry("embed", *ty), &[], &m, 3, 64);
        }
    }
}

/// The rows of a table that so many rows of a step choose: tokens of the host's, of a slot, and, where there are several, one
/// that the table has not, as the last.
pub(super) fn embed(kernel: &str, constants: &[u32], m: &Matrix, rows: usize, threads: u32) {
    const STRIDE: usize = 70;
    let (cols, vocab) = (m.cols, m.outs as u32);
    let token = |r: usize| match r {
        1 => 5 % vocab,
        r if r > 0 && r + 1 == rows => vocab,
        r => (8 + 3 * r as u32) % vocab,
    };
    // A row's slot is the last bit of its number; every third position has no place in the history, or no row left to produce.
    let mut history = vec![77; 2 * STRIDE];
    let mut words = Vec::new();
    for r in 0..rows {
        let (slot, lost, done) = (r % 2, r % 3 == 1, r % 5 == 4);
        let pos = if lost { STRIDE + r } else { r };
        let word = if r == 1 { u32::MAX } else { token(r) };
        words.extend([word, pos as u32, 0, slot as u32, u32::from(!done), 0, 0, 0]);
        if !lost && !done {
            history[slot * STRIDE + pos] = token(r);
        }
    }
    let (out, seen) = (room(rows * cols), super::words(&vec![77; 2 * STRIDE]));
    Run::new(kernel, constants, [rows as u32, 1, 1], [threads, 1, 1])
        .buffer(&bytes(&m.data))
        .words(&words)
        .words(&[1, 5 % vocab])
        .buffer(&out)
        .buffer(&seen)
        .go(&[rows as u32, cols as u32, vocab, 3.5f32.to_bits(), STRIDE as u32]);
    assert_eq!(read_words(&seen, 2 * STRIDE), history, "tokens by slot and position");
    let have = read_floats(&out, rows * cols);
    for (r, have) in have.chunks(cols).enumerate() {
        let of = token(r) as usize * cols;
        let Some(row) = m.values.get(of..of + cols) else {
            assert!(have.iter().all(|v| v.is_nan()), "a token of nowhere");
            continue;
        };
        let want: Vec<f64> = row.iter().map(|v| f64::from(*v) * 3.5).collect();
        close(&format!("{kernel} of {}, {rows} rows", m.ty), have, &want, 1e-6);
    }
}

/// Heads, their width, shares: what the product joins is what plain arithmetic makes of the shares.
#[test]
pub(super) fn products_of_joined_shares() {
    for (n, ty) in WEIGHT_TYPES.iter().enumerate() {
        for (shape, rows, own) in
            [((16, 16, 3), 1, [8, 1, 2]), ((4, 64, 16), 2, [4, 2, 4]), ((8, 32, 1), 4, [4, 4, 8])]
        {
            joined(*ty, shape, rows, own, n % 2 == 0);
        }
    }
}

/// A product of `rows` with heads × width columns in so many shares, by a variant as in [`qkv`].
pub(super) fn joined(
    ty: TensorType,
    (heads, width, splits): (usize, usize, usize),
    rows: usize,
    [o, r, s]: [u32; 3],
    sinked: bool,
) {
    let m = Matrix::new(ty, 13, heads * width, 1);
    let part = (heads * splits * (width + 2)).next_multiple_of(4);
    let mut parts = noise(21, rows * part);
    let mut x = vec![0f32; rows * heads * width];
    let sinks = noise(22, heads);
    for row in 0..rows {
        for head in 0..heads {
            let row_parts = &mut parts[row * part..][..part];
            let ends = heads * splits * width + head * splits * 2;
            // Scores of any size, a share of no keys, sums of one key at least.
            for s in 0..splits {
                row_parts[ends + 2 * s] *= 20.0;
                row_parts[ends + 2 * s + 1] = 1.0 + row_parts[ends + 2 * s + 1].abs();
            }
            if splits > 2 {
                row_parts[ends + 2] = f32::NEG_INFINITY;
            }
            let sink = if sinked { f64::from(sinks[head]) } else { f64::NEG_INFINITY };
            let best = |s: usize| f64::from(row_parts[ends + 2 * s]);
            let top = (0..splits).map(best).fold(sink, f64::max);
            let weight = |s: usize| (best(s) - top).exp();
            let sum = |s: usize| weight(s) * f64::from(row_parts[ends + 2 * s + 1]);
            let total = (0..splits).map(sum).sum::<f64>() + (sink - top).exp();
            for d in 0..width {
                let mix =
                    |s: usize| weight(s) * f64::from(row_parts[(head * splits + s) * width + d]);
                let at = (row * heads + head) * width + d;
                x[at] = ((0..splits).map(mix).sum::<f64>() / total) as f32;
            }
        }
    }
    let (bias, residual, out) = (noise(23, 13), noise(24, rows * 13), room(rows * 13));
    let live: Vec<u32> = (0..rows).flat_map(|r| [0, 0, r as u32, 0, 1, 0, 0, 0]).collect();
    let args = [rows, heads * width, 13, 1, 1, heads, width, splits, part, usize::from(sinked)];
    let grid = [13u32.div_ceil(o), (rows as u32).div_ceil(r), 1];
    let (name, constants) = typed("matvec_joined", &[ty], &[o, r, s, 0]);
    Run::new(&name, &constants, grid, [32 * s, 1, 1])
        .buffer(&bytes(&m.data))
        .floats(&parts)
        .words(&live)
        .floats(&sinks)
        .floats(&bias)
        .floats(&residual)
        .buffer(&out)
        .go(&args.map(|v| v as u32));
    let mut want = m.product(&x);
    for (i, w) in want.iter_mut().enumerate() {
        *w += f64::from(bias[i % 13]) + f64::from(residual[i]);
    }
    let what = format!("joined {ty} {heads} of {width} in {splits}, {rows} rows by {o} {r} {s}");
    within(&what, &read_floats(&out, rows * 13), &want, &m, &x);
}
