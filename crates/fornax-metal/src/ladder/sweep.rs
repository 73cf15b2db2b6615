//! The sweep: every variant of the kernels forced on every shape, whether a policy picks it or not. A sample of it in every
//! run, all of it in the ignored tests.

mod others;

use fornax_gguf::TensorType;

use super::attention::Scene;
use super::linear::{Matrix, gated, joined, matmul_by, qkv};
use super::rows::norm;
use crate::library::{KV_TYPES, MORE_TYPES, WEIGHT_TYPES, numbered, typed};
use crate::pieces::PIECES_MAX;

/// Takes one of `every` of what it is asked about, spread evenly.
struct Sampler {
    every: u64,
    seen: u64,
}

impl Sampler {
    fn new(every: u64) -> Sampler {
        Sampler { every, seen: 0 }
    }

    fn takes(&mut self) -> bool {
        self.seen += 1;
        // Multiplication by an odd number of no pattern: neighbours in the sweep differ in one axis.
        self.seen.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 < (1 << 32) / self.every
    }
}

fn every_type() -> impl Iterator<Item = TensorType> {
    WEIGHT_TYPES.iter().chain(MORE_TYPES).copied()
}

/// Columns of the sweep: of plain numbers as it names them, of blocks as many as hold those.
fn columns(ty: TensorType) -> Vec<usize> {
    let whole = |n: usize| n.next_multiple_of(ty.block_len());
    let mut all = [7, 33, 130, 576].map(whole).to_vec();
    all.dedup();
    all
}

#[test]
fn vectors_sampled() {
    vectors(250);
}

#[test]
#[ignore = "the complete sweep"]
fn vectors_complete() {
    vectors(1);
}

fn vectors(every: u64) {
    let mut sampler = Sampler::new(every);
    for ty in every_type() {
        for cols in columns(ty) {
            for outs in [7usize, 33, 130] {
                for [o, rows, s] in variants() {
                    // The smallest simdgroups must have a thread for each output.
                    if !sampler.takes() || 32 * s < o * rows {
                        continue;
                    }
                    let m = Matrix::new(ty, outs, cols, u64::from(o));
                    let grid = [(outs as u32).div_ceil(o), 1, 1];
                    let (name, constants) = typed("matvec", &[ty], &[o, rows, s, 0]);
                    matmul_by(&name, &m, rows as usize, &constants, grid, 32 * s);
                    let constants = numbered(&[ty], &[o, rows, s, 0]);
                    matmul_by("matvec_any", &m, rows as usize, &constants, grid, 32 * s);
                }
            }
        }
    }
}

fn variants() -> impl Iterator<Item = [u32; 3]> {
    let of = |o| (1..=4).flat_map(move |r| [1, 2, 4, 8].map(|s| [o, r, s]));
    [1, 2, 4].into_iter().flat_map(of)
}

#[test]
fn fused_sampled() {
    fused(500);
}

#[test]
#[ignore = "the complete sweep"]
fn fused_complete() {
    fused(1);
}

/// Projections and the gated pair in every variant, with a norm and without; the product behind attention in all that it has.
/// Activations and biases go round.
fn fused(every: u64) {
    let mut sampler = Sampler::new(every);
    for (t, ty) in every_type().enumerate() {
        for cols in columns(ty) {
            for (v, [o, rows, s]) in variants().enumerate() {
                // The smallest simdgroups must have a thread for each output.
                if 32 * s < o * rows {
                    continue;
                }
                for norm in [0, 1] {
                    if sampler.takes() {
                        qkv(ty, cols, rows, [o, rows, s, norm]);
                        let turn = (t + v) as u32 + norm;
                        gated(ty, cols, (turn % 3, turn / 3 % 4), rows, [o, rows, s, norm]);
                    }
                }
            }
        }
        for (n, shape) in
            [(16, 16, 3), (4, 64, 16), (8, 32, 1), (2, 256, 7)].into_iter().enumerate()
        {
            for rows in 1..=4u32 {
                for (o, s) in [(4, 2), (4, 4), (4, 8), (8, 2), (8, 4), (8, 8)] {
                    if (o == 4 || rows == 1) && sampler.takes() {
                        joined(ty, shape, rows as usize, [o, rows, s], n % 2 == 0);
                    }
                }
            }
        }
    }
}

#[test]
fn matrices_sampled() {
    matrices(60);
}

#[test]
#[ignore = "the complete sweep"]
fn matrices_complete() {
    matrices(1);
}

fn matrices(every: u64) {
    let mut sampler = Sampler::new(every);
    for ty in every_type() {
        for cols in columns(ty) {
            for outs in [7usize, 33, 130] {
                for rows in [1usize, 2, 5, 8, 11, 16, 17, 32, 33, 64] {
                    if !sampler.takes() {
                        continue;
                    }
                    let m = Matrix::new(ty, outs, cols, rows as u64);
                    let (o, r) = (outs as u32, rows as u32);
                    let (name, constants) = typed("matmul_small", &[ty], &[]);
                    let grid = [o.div_ceil(8), r.div_ceil(16), 1];
                    matmul_by(&name, &m, rows, &constants, grid, 128);
                    let (name, constants) = typed("matmul_tiled", &[ty], &[]);
                    let grid = [o.div_ceil(64), r.div_ceil(32), 1];
                    matmul_by(&name, &m, rows, &constants, grid, 128);
                }
            }
        }
    }
}

#[test]
fn norms_sampled() {
    norms(6);
}

#[test]
#[ignore = "the complete sweep"]
fn norms_complete() {
    norms(1);
}

fn norms(every: u64) {
    let mut sampler = Sampler::new(every);
    for width in [1, 7, 33, 130, 1023, 1024, 1025, 4100] {
        for rows in [1, 3, 64] {
            for threads in [32, 64, 96, 512, 1024] {
                if sampler.takes() && width * rows < 100_000 {
                    norm(width, rows, threads);
                }
            }
        }
    }
}

#[test]
fn attention_sampled() {
    attention(50);
}

#[test]
#[ignore = "the complete sweep"]
fn attention_complete() {
    attention(1);
}

/// Query heads, key heads, and the query heads of one key head that a threadgroup takes: every variant of the kernels.
const GROUPS: [[usize; 3]; 10] = [
    [1, 1, 1],
    [3, 1, 1],
    [3, 1, 3],
    [8, 1, 1],
    [8, 1, 2],
    [8, 1, 4],
    [8, 1, 8],
    [4, 2, 1],
    [4, 2, 2],
    [4, 4, 1],
];
/// Window, soft cap, sinks.
const MODES: [(u32, f32, bool); 4] =
    [(0, 0.0, false), (33, 0.0, true), (0, 3.0, true), (1, 2.0, false)];
/// Live rows of a prompt's chunk.
const CHUNKS: [u32; 5] = [1, 9, 17, 33, 64];

/// Every variant in every type of cache, on every head size, on every number of keys. What else varies, varies with these, so
/// that each of its values meets each of theirs: window, cap and sinks, rows, shares, simdgroups, pieces.
fn attention(every: u64) {
    let mut sampler = Sampler::new(every);
    for (g, [heads, kv_heads, together]) in GROUPS.into_iter().enumerate() {
        for (w, width) in [64usize, 80, 96, 128, 256].into_iter().enumerate() {
            for (k, keys) in [1usize, 2, 7, 31, 32, 33, 64, 130, 1000, 5000].into_iter().enumerate()
            {
                for (t, ty) in KV_TYPES.iter().enumerate() {
                    if width % ty.block_len() != 0 || !sampler.takes() {
                        continue;
                    }
                    let turn = g + w + k + t;
                    let mut scene = Scene::new(heads, kv_heads, width, width, keys);
                    scene.ty = *ty;
                    (scene.window, scene.softcap, scene.sinks) = MODES[turn % MODES.len()];
                    scene.pieces = 1 + (turn / 2) % PIECES_MAX.min(2 * keys.div_ceil(32));
                    // What has many keys is slow: less of it, of one sequence.
                    let long = keys >= 1000;
                    if long {
                        scene.rows.truncate(1);
                    }
                    let splits = [1 + keys / 40, 1, 4, 32][turn / 3 % 4].min(32);
                    scene.decode(together, splits as u32);
                    let simds = [1, 2, 4][turn % 3];
                    scene.append(together, splits.min(16), simds, (0, false, false));
                    if together > 4 {
                        continue;
                    }
                    if !long {
                        let n = CHUNKS[turn / 2 % CHUNKS.len()];
                        scene = scene.looked_at_by(chunk(n, keys as u32));
                    }
                    scene.prefill(together);
                }
            }
        }
    }
}

/// Rows of two sequences, the last positions of each, one row among them dead.
fn chunk(n: u32, keys: u32) -> Vec<(u32, u32, u32)> {
    let first = n.min(keys);
    let of = |seq: u32, n: u32| (keys - n..keys).map(move |pos| (pos, seq, 1));
    let mut rows: Vec<_> = of(0, first).chain(of(1, (n - first).min(keys))).collect();
    if rows.len() > 2 {
        rows[1].2 = 0;
    }
    rows
}

/// Where no more is covered than is said above, this fails: every value of what varies meets every variant, every head size
/// and every number of keys.
#[test]
fn what_varies_meets_every_axis() {
    let (mut seen, mut all) = (std::collections::BTreeSet::new(), 0);
    for g in 0..GROUPS.len() {
        for w in 0..5 {
            for k in 0..10 {
                for t in 0..3 {
                    let turn = g + w + k + t;
                    let varies = [turn % 4, turn / 3 % 4, turn % 3, turn / 2 % 5, turn / 2 % 4];
                    for (of, value) in varies.into_iter().enumerate() {
                        seen.extend([(of, value, 0, g), (of, value, 1, w), (of, value, 2, k)]);
                        seen.insert((of, value, 3, t));
                    }
                    all += 1;
                }
            }
        }
    }
    assert_eq!(all, 1500);
    assert_eq!(seen.len(), (4 + 4 + 3 + 5 + 4) * (GROUPS.len() + 5 + 10 + 3));
}
