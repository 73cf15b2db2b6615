//! The sweep of what is neither a product of one matrix nor attention: experts, embeddings, rotations, appends, copies,
//! convolutions, choices.

use fornax_gguf::TensorType;

use super::super::conv::cut_up;
use super::super::linear::{Matrix, embed};
use super::super::moe::Mixture;
use super::super::rows::{Place, Rotation, copied, kv_write, rope, rope_write};
use super::super::sample::choices;
use super::{Sampler, columns, every_type};
use crate::library::{KV_TYPES, WEIGHT_TYPES, entry, numbered};

#[test]
fn experts_sampled() {
    experts(150);
}

#[test]
#[ignore = "the complete sweep"]
fn experts_complete() {
    experts(1);
}

/// Experts and how many of them a row chooses.
const MIXTURES: [(usize, usize); 4] = [(1, 1), (3, 2), (8, 4), (5, 1)];

/// The chosen experts' products of few rows in every variant, and of many. The number of experts, the activation, biases and
/// the residual go round.
fn experts(every: u64) {
    let mut sampler = Sampler::new(every);
    for (t, ty) in every_type().enumerate() {
        for (c, cols) in columns(ty).into_iter().enumerate() {
            for outs in [7usize, 33] {
                for (v, o) in [1u32, 2, 4].into_iter().enumerate() {
                    for (s, simds) in [1u32, 2, 4, 8].into_iter().enumerate() {
                        let turn = t + c + v + s;
                        if sampler.takes() {
                            let (experts, top_k) = MIXTURES[turn % 4];
                            let mixture = Mixture::new(experts, top_k, 1 + turn / 2 % 3, outs);
                            mixture.gated([ty; 2], cols, turn as u32 % 3, [o, simds]);
                            mixture.down(ty, cols, turn % 2 == 0, [o, simds]);
                        }
                    }
                }
            }
            for outs in [7usize, 70] {
                for (r, rows) in [1usize, 8, 17, 33, 64].into_iter().enumerate() {
                    let turn = t + c + r;
                    if sampler.takes() {
                        let (experts, top_k) = MIXTURES[turn % 4];
                        let mixture = Mixture::new(experts, top_k, rows, outs);
                        mixture.grouped([ty; 3], cols, cols, turn as u32 % 3);
                    }
                }
            }
        }
    }
}

#[test]
fn rows_sampled() {
    rows(40);
}

#[test]
#[ignore = "the complete sweep"]
fn rows_complete() {
    rows(1);
}

/// Numbers of rows, and how many threads share one.
const ROWS: [usize; 4] = [1, 3, 17, 64];
const THREADS: [u32; 4] = [32, 64, 256, 1024];

/// Rows of two sequences, one of them with nothing left.
fn step(n: usize) -> Vec<Place> {
    let first = n.div_ceil(2);
    let at = |i: usize| if i < first { (i as u32, 0, 1) } else { ((40 + i - first) as u32, 1, 1) };
    let mut all: Vec<Place> = (0..n).map(at).collect();
    if n > 2 {
        all[n / 2].2 = 0;
    }
    all
}

/// Everything that goes row by row.
fn rows(every: u64) {
    let mut sampler = Sampler::new(every);
    for ty in every_type() {
        for cols in columns(ty) {
            let m = Matrix::new(ty, 13, cols, 5);
            for n in ROWS {
                for threads in THREADS {
                    if !sampler.takes() {
                        continue;
                    }
                    if WEIGHT_TYPES.contains(&ty) {
                        embed(&entry("embed", ty), &[], &m, n, threads);
                    }
                    embed("embed_any", &numbered(&[ty], &[]), &m, n, threads);
                }
            }
        }
    }
    for width in [1, 7, 33, 130, 1025, 4100] {
        for n in ROWS {
            for threads in THREADS {
                if sampler.takes() {
                    copied(width, n, threads);
                }
            }
        }
    }
    for rotation in rotations() {
        for n in ROWS {
            for heads in [1, 4, 9] {
                if sampler.takes() {
                    rope(rotation, heads, &step(n));
                }
            }
            for (t, ty) in KV_TYPES.iter().enumerate() {
                let fits = rotation.0 % ty.block_len() == 0;
                for (h, (heads, kv_heads)) in [(1, 1), (4, 2), (9, 3)].into_iter().enumerate() {
                    if fits && sampler.takes() {
                        let vw = [64, 96, 256][(t + h) % 3];
                        rope_write(rotation, *ty, (heads, kv_heads, vw), &step(n));
                    }
                }
            }
        }
    }
    for ty in KV_TYPES {
        for width in [32usize, 64, 96, 256, 1024].map(|w| w + usize::from(*ty != TensorType::Q8_0))
        {
            for n in ROWS {
                if sampler.takes() {
                    let narrow = (width / 2).next_multiple_of(ty.block_len());
                    kv_write(*ty, width, narrow, &step(n));
                    kv_write(*ty, narrow, width, &step(n));
                }
            }
        }
    }
}

/// Every head size, all of it turned, half of it and none, in both ways, with a norm and without.
fn rotations() -> impl Iterator<Item = Rotation> {
    let ways = [(false, false), (false, true), (true, false), (true, true)];
    let of = move |dim: usize| {
        [dim, dim / 2, 0].into_iter().flat_map(move |turned| ways.map(|(h, n)| (dim, turned, h, n)))
    };
    [64, 80, 96, 128, 256].into_iter().flat_map(of)
}

#[test]
fn convolutions_and_choices_sampled() {
    convolutions_and_choices(30);
}

#[test]
#[ignore = "the complete sweep"]
fn convolutions_and_choices_complete() {
    convolutions_and_choices(1);
}

fn convolutions_and_choices(every: u64) {
    let mut sampler = Sampler::new(every);
    for width in [7, 33, 64, 130, 1025] {
        for taps in [1, 2, 3, 4, 8, 9] {
            if sampler.takes() {
                cut_up(width, taps);
            }
        }
    }
    for n in ROWS {
        for vocab in [7, 33, 130, 5000] {
            for parts in [1, 2, 7, 40] {
                if sampler.takes() && n * vocab < 100_000 {
                    choices(n, vocab, parts);
                }
            }
        }
    }
}
