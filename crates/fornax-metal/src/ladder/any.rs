//! The kernels of any type: every format that they read, and several formats side by side.

use fornax_gguf::TensorType;

use super::linear::{Matrix, activated, columns, matmul_by, normed, within};
use super::{Run, bytes, close, noise, read_floats, room};
use crate::library::{CODEBOOK_TEXT, MORE_TYPES, WEIGHT_TYPES, numbered};

fn every_type() -> impl Iterator<Item = TensorType> {
    MORE_TYPES.iter().chain(WEIGHT_TYPES).copied()
}

#[test]
fn embedding_decodes_every_type() {
    for ty in every_type() {
        let cols = columns(ty)[1];
        let m = Matrix::new(ty, 5, cols, 3);
        let out = room(2 * cols);
        let mut rows = vec![0u32; 16];
        (rows[0], rows[8]) = (4, 1);
        Run::new("embed_any", &numbered(&[ty], &[]), [2, 1, 1], [32, 1, 1])
            .buffer(&bytes(&m.data))
            .words(&rows)
            .words(&[0])
            .buffer(&out)
            .words(&[0])
            .go(&[2, cols as u32, 5, 1f32.to_bits(), 0]);
        let have = read_floats(&out, 2 * cols);
        for (row, token) in [4usize, 1].into_iter().enumerate() {
            let want: Vec<f64> =
                m.values[token * cols..][..cols].iter().map(|v| f64::from(*v)).collect();
            close(&format!("embed {ty}"), &have[row * cols..][..cols], &want, 1e-6);
        }
    }
}

#[test]
fn products_of_every_type() {
    for ty in every_type() {
        for (n, cols) in columns(ty).into_iter().enumerate() {
            let m = Matrix::new(ty, 33, cols, 1 + n as u64);
            for [o, r, s] in [[2, 1, 4], [4, 4, 2]] {
                let grid = [33u32.div_ceil(o), 1, 1];
                let constants = numbered(&[ty], &[o, r, s, 0]);
                matmul_by("matvec_any", &m, r as usize, &constants, grid, 32 * s);
            }
            let constants = numbered(&[ty], &[]);
            matmul_by("matmul_small_any", &m, 7, &constants, [5, 1, 1], 128);
            matmul_by("matmul_tiled_any", &m, 35, &constants, [1, 2, 1], 128);
        }
    }
}

#[test]
pub(super) fn projections_of_several_types() {
    use TensorType::{IQ4_XS, MXFP4, Q2_K, Q4_K, Q5_0, Q6_K, Q8_0, TQ1_0};
    for (types, rows, norm) in [
        ([Q4_K, Q4_K, Q6_K], 1, true),
        ([Q2_K, IQ4_XS, TQ1_0], 3, false),
        ([MXFP4, Q8_0, Q5_0], 4, true),
    ] {
        let cols = 256;
        let outs = [33, 7, 5];
        let all: Vec<Matrix> =
            (0..3).map(|i| Matrix::new(types[i], outs[i], cols, i as u64)).collect();
        let (x, weight) = (noise(9, rows * cols), noise(13, cols));
        let rooms = outs.map(|n| room(rows * n));
        let biases = outs.map(|n| noise(10, n));
        let groups = outs.iter().map(|n| n.div_ceil(2) as u32).sum();
        let constants = numbered(&types, &[2, rows as u32, 2, u32::from(norm)]);
        let mut run = Run::new("qkv_any", &constants, [groups, 1, 1], [64, 1, 1]);
        for m in &all {
            run = run.buffer(&bytes(&m.data));
        }
        run = run.floats(&x).floats(&weight);
        for bias in &biases {
            run = run.floats(bias);
        }
        for out in &rooms {
            run = run.buffer(out);
        }
        run.go(&[rows as u32, cols as u32, 33, 7, 5, 5, 1e-5f32.to_bits()]);
        let x = if norm { normed(&x, &weight) } else { x };
        for (i, m) in all.iter().enumerate() {
            let mut want = m.product(&x);
            for (j, w) in want.iter_mut().enumerate().filter(|_| i != 1) {
                *w += f64::from(biases[i][j % m.outs]);
            }
            let have = read_floats(&rooms[i], rows * m.outs);
            within(&format!("qkv of {types:?}, {i}"), &have, &want, m, &x);
        }
    }
}

#[test]
pub(super) fn gates_of_several_types() {
    use TensorType::{IQ3_S, NVFP4, Q4_K, Q5_K};
    for (n, types) in [[Q4_K, Q5_K], [IQ3_S, NVFP4]].into_iter().enumerate() {
        let (cols, outs, rows) = (512, 17, 2);
        let [gate, up] = [0, 1].map(|i| Matrix::new(types[i], outs, cols, i as u64));
        let (x, norm) = (noise(9, rows * cols), noise(13, cols));
        let biases = [noise(11, outs), noise(12, outs)];
        let out = room(rows * outs);
        let constants = numbered(&types, &[2, 2, 4, 1]);
        let limits = [1.702f32, 0.5, 1e-5].map(f32::to_bits);
        let args = [rows as u32, cols as u32, outs as u32, 3, n as u32];
        Run::new("gated_mlp_any", &constants, [9, 1, 1], [128, 1, 1])
            .buffer(&bytes(&gate.data))
            .buffer(&bytes(&up.data))
            .floats(&x)
            .floats(&norm)
            .floats(&biases[0])
            .floats(&biases[1])
            .buffer(&out)
            .go(&[&args[..], &limits[..]].concat());
        let x = normed(&x, &norm);
        let add = |m: &Matrix, bias: &[f32]| -> Vec<f64> {
            let all = m.product(&x);
            all.iter().enumerate().map(|(j, v)| v + f64::from(bias[j % outs])).collect()
        };
        let (g, u) = (add(&gate, &biases[0]), add(&up, &biases[1]));
        let want: Vec<f64> = g.iter().zip(&u).map(|(g, u)| activated(n as u32, *g, *u)).collect();
        close(&format!("gates of {types:?}"), &read_floats(&out, rows * outs), &want, 1e-4);
    }
}

/// The codebooks in the kernels' source, number by number, are those of the decoder.
#[test]
fn codebooks_are_those_of_the_decoder() {
    use fornax_gguf::blocks::codebooks::{IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
    let codes = |name: &str| -> Vec<u32> {
        let head = format!("constant ushort {name}_CODES[");
        let at = CODEBOOK_TEXT.find(&head).expect(name);
        let body = CODEBOOK_TEXT[at..].split_once('{').and_then(|(_, b)| b.split_once('}'));
        let numbers = body.expect("a list").0.split(',').map(str::trim).filter(|n| !n.is_empty());
        numbers.map(|n| n.parse().expect("a number")).collect()
    };
    let octets = |name: &str, table: &[[u8; 8]]| {
        let levels = [8, 25, 43, 0];
        let of = |c: &u32| std::array::from_fn(|j| levels[(c >> (2 * j) & 3) as usize]);
        assert!(codes(name).iter().map(of).eq(table.iter().copied()), "{name}");
    };
    octets("IQ2_XXS", &IQ2_XXS);
    octets("IQ2_XS", &IQ2_XS);
    octets("IQ2_S", &IQ2_S);
    let quartets = |name: &str, table: &[[u8; 4]], levels: [u8; 8]| {
        let of = |c: &u32| std::array::from_fn(|j| levels[(c >> (4 * j) & 7) as usize]);
        assert!(codes(name).iter().map(of).eq(table.iter().copied()), "{name}");
    };
    quartets("IQ3_XXS", &IQ3_XXS, [4, 12, 20, 28, 36, 44, 52, 62]);
    quartets("IQ3_S", &IQ3_S, [1, 3, 5, 7, 9, 11, 13, 15]);
    let of = |c: &u32| std::array::from_fn(|j| (c >> (2 * j) & 3) as i8 - 1);
    assert!(codes("IQ1").iter().map(of).eq(IQ1.iter().copied()), "IQ1");
}
