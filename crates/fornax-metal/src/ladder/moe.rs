//! Mixtures of experts: the choice, and the chosen experts' products, of every type.

use fornax_gguf::TensorType;
use fornax_msl::Buffer;

use super::linear::{Matrix, columns, gated_within};
use super::{Run, bytes, close, noise, read_floats, read_words, room};
use crate::library::{MORE_TYPES, WEIGHT_TYPES, numbered};

#[test]
fn the_best_experts_are_chosen_and_weighed() {
    for (experts, top_k) in [(1, 1), (5, 2), (32, 4), (33, 32), (128, 8), (1024, 6)] {
        for normalise in [0, 1] {
            let rows = 3;
            let mut scores = noise(7, rows * experts);
            // Ties, of which the lower id is the better; and what is no number.
            if experts > 4 {
                (scores[1], scores[4], scores[experts]) = (2.0, 2.0, f32::NAN);
            }
            let (ids, weights) = (room(rows * top_k), room(rows * top_k));
            Run::new("moe_route", &[], [rows as u32, 1, 1], [32, 1, 1])
                .floats(&scores)
                .buffer(&ids)
                .buffer(&weights)
                .go(&[rows as u32, experts as u32, top_k as u32, normalise]);
            let (ids, weights) =
                (read_words(&ids, rows * top_k), read_floats(&weights, rows * top_k));
            for (r, row) in scores.chunks(experts).enumerate() {
                let value = |i: usize| if row[i].is_nan() { f32::NEG_INFINITY } else { row[i] };
                let mut order: Vec<usize> = (0..experts).collect();
                order.sort_by(|a, b| value(*b).total_cmp(&value(*a)).then(a.cmp(b)));
                let have = &ids[r * top_k..][..top_k];
                assert!(have.iter().map(|i| *i as usize).eq(order[..top_k].iter().copied()));
                let exp = |i: &usize| f64::from(value(*i)).exp();
                let among = if normalise == 1 { &order[..top_k] } else { &order[..] };
                let sum: f64 = among.iter().map(exp).sum();
                let want: Vec<f64> = order[..top_k].iter().map(|i| exp(i) / sum).collect();
                close("weights", &weights[r * top_k..][..top_k], &want, 1e-5);
            }
        }
    }
}

/// Rows of gates of all experts, and what the kernel must make of them.
pub(super) struct Mixture {
    experts: usize,
    top_k: usize,
    rows: usize,
    outs: usize,
    pub(super) ids: Vec<u32>,
}

/// Numbers, and what each may be off by.
type Bounded = (Vec<f64>, Vec<f64>);

impl Mixture {
    pub(super) fn new(experts: usize, top_k: usize, rows: usize, outs: usize) -> Mixture {
        let pick = |i: usize| (i * 7 + i / top_k) as u32 % experts as u32;
        Mixture { experts, top_k, rows, outs, ids: (0..rows * top_k).map(pick).collect() }
    }

    /// The matrices of all experts below one another.
    fn matrix(&self, ty: TensorType, cols: usize, seed: u64) -> Matrix {
        Matrix::new(ty, self.experts * self.outs, cols, seed)
    }

    /// One expert's outputs of a row, with its bias, and what each may be off by: as of other products.
    fn one(&self, m: &Matrix, bias: &[f32], expert: usize, x: &[f32]) -> Bounded {
        let rows = expert * self.outs..(expert + 1) * self.outs;
        let norm = |v: &[f32]| v.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
        let x_norm = norm(x);
        let dot = |o: usize| {
            let w = &m.values[o * m.cols..][..m.cols];
            let sum: f64 = w.iter().zip(x).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            (sum + f64::from(bias[o]), 5e-6 * norm(w) * x_norm + 1e-6)
        };
        rows.map(dot).unzip()
    }

    /// The products of every pick, in the order of the picks.
    fn all_products(&self, m: &Matrix, bias: &[f32], x: &[f32]) -> Bounded {
        let of = |(pick, id): (usize, &u32)| {
            let x = &x[pick / self.top_k * m.cols..][..m.cols];
            let (values, bounds) = self.one(m, bias, *id as usize, x);
            values.into_iter().zip(bounds)
        };
        self.ids.iter().enumerate().flat_map(of).unzip()
    }

    /// Holds the sums of the picks' results by weight, from what `want` has, to the bounds of their products.
    fn summed(
        &self,
        what: &str,
        have: &[f32],
        m: &Matrix,
        bias: &[f32],
        (inner, weights): (&[f32], &[f32]),
        mut want: Vec<f64>,
    ) {
        let mut bounds: Vec<f64> = want.iter().map(|w| 1e-6 * (1.0 + w.abs())).collect();
        for (pick, id) in self.ids.iter().enumerate() {
            let (y, off) = self.one(m, bias, *id as usize, &inner[pick * m.cols..][..m.cols]);
            let weight = f64::from(weights[pick]);
            for (j, (y, off)) in y.iter().zip(&off).enumerate() {
                let at = pick / self.top_k * self.outs + j;
                want[at] += weight * y;
                bounds[at] += weight * (off + 1e-6 * y.abs());
            }
        }
        assert_eq!(have.len(), want.len(), "{what}");
        for (i, (h, (w, bound))) in have.iter().zip(want.iter().zip(&bounds)).enumerate() {
            let off = (f64::from(*h) - w).abs();
            assert!(off <= *bound, "{what}: element {i} is {h}, expected {w} within {bound:.1e}");
        }
    }

    pub(super) fn gated(&self, types: [TensorType; 2], cols: usize, act: u32, [o, s]: [u32; 2]) {
        let [gate, up] = [0, 1].map(|i| self.matrix(types[i], cols, i as u64));
        let x = noise(3, self.rows * cols);
        let biases = [4, 5].map(|seed| noise(seed, self.experts * self.outs));
        let n = self.rows * self.top_k;
        let out = room(n * self.outs);
        let sizes = [self.rows, cols, self.outs].map(|v| v as u32);
        let limits = [1.702f32, 0.5, 0.0].map(f32::to_bits);
        let tail = [self.top_k as u32, self.experts as u32];
        let grid = [(self.outs as u32).div_ceil(o), n as u32, 1];
        Run::new("moe_gated", &numbered(&types, &[o, 1, s, 0]), grid, [32 * s, 1, 1])
            .buffer(&bytes(&gate.data))
            .buffer(&bytes(&up.data))
            .floats(&x)
            .words(&self.ids)
            .floats(&biases[0])
            .floats(&biases[1])
            .buffer(&out)
            .go(&[&sizes[..], &[3, act], &limits[..], &tail[..]].concat());
        let pair = [(&gate, 0), (&up, 1)].map(|(m, i)| self.all_products(m, &biases[i], &x));
        let what = format!("gates of {types:?}, {act}, {cols} columns by {o} {s}");
        gated_within(&what, &read_floats(&out, n * self.outs), act, &pair);
    }

    pub(super) fn down(&self, ty: TensorType, cols: usize, full: bool, [o, s]: [u32; 2]) {
        let m = self.matrix(ty, cols, 2);
        let inner = noise(3, self.rows * self.top_k * cols);
        let weights: Vec<f32> = noise(4, self.rows * self.top_k).iter().map(|w| w.abs()).collect();
        let mut bias = noise(5, self.experts * self.outs);
        let residual = noise(6, self.rows * self.outs);
        let out = room(self.rows * self.outs);
        let all = [self.rows, cols, self.outs, self.top_k, self.experts].map(|v| v as u32);
        let grid = [(self.outs as u32).div_ceil(o), self.rows as u32, 1];
        Run::new("moe_down", &numbered(&[ty], &[o, 1, s, 0]), grid, [32 * s, 1, 1])
            .buffer(&bytes(&m.data))
            .floats(&inner)
            .words(&self.ids)
            .floats(&weights)
            .floats(&bias)
            .floats(&residual)
            .buffer(&out)
            .go(&[&all[..], &[u32::from(full); 2]].concat());
        if !full {
            bias.fill(0.0);
        }
        let want = residual.iter().map(|r| if full { f64::from(*r) } else { 0.0 }).collect();
        let have = read_floats(&out, self.rows * self.outs);
        let what = format!("down of {ty}, {cols} columns by {o} {s}");
        self.summed(&what, &have, &m, &bias, (&inner, &weights), want);
    }
}

impl Mixture {
    fn tiles(&self) -> u32 {
        (self.rows * self.top_k / 16 + self.experts) as u32
    }

    /// The picks by expert, as the kernel orders them.
    fn groups(&self) -> Buffer {
        let (picks, tiles) = (self.ids.len(), self.tiles());
        let groups = room(1 + 3 * tiles as usize + picks);
        let threads = (self.experts as u32).next_multiple_of(32);
        let sizes = [self.rows, self.experts, self.top_k].map(|v| v as u32);
        Run::new("moe_group", &[], [1, 1, 1], [threads, 1, 1])
            .words(&self.ids)
            .buffer(&groups)
            .go(&[&sizes[..], &[tiles]].concat());
        groups
    }

    pub(super) fn grouped(&self, types: [TensorType; 3], cols: usize, down_cols: usize, act: u32) {
        let [gate, up] = [0, 1].map(|i| self.matrix(types[i], cols, i as u64));
        let x = noise(3, self.rows * cols);
        let biases = [4, 5].map(|seed| noise(seed, self.experts * self.outs));
        let n = self.ids.len();
        let (groups, out) = (self.groups(), room(n * self.outs));
        let sizes = [self.rows, cols, self.outs].map(|v| v as u32);
        let limits = [1.702f32, 0.5, 0.0].map(f32::to_bits);
        let tail = [self.top_k as u32, self.experts as u32, self.tiles()];
        let grid = [(self.outs as u32).div_ceil(64), self.tiles(), 1];
        Run::new("grouped_gated", &numbered(&types[..2], &[]), grid, [128, 1, 1])
            .buffer(&bytes(&gate.data))
            .buffer(&bytes(&up.data))
            .floats(&x)
            .buffer(&groups)
            .floats(&biases[0])
            .floats(&biases[1])
            .buffer(&out)
            .go(&[&sizes[..], &[3, act], &limits[..], &tail[..]].concat());
        let pair = [(&gate, 0), (&up, 1)].map(|(m, i)| self.all_products(m, &biases[i], &x));
        let what = format!("grouped gates of {types:?}, {act}, {cols} columns");
        gated_within(&what, &read_floats(&out, n * self.outs), act, &pair);
        self.grouped_down(types[2], down_cols, &groups);
    }

    fn grouped_down(&self, ty: TensorType, cols: usize, groups: &Buffer) {
        let m = self.matrix(ty, cols, 2);
        let (n, width) = (self.ids.len(), self.rows * self.outs);
        let (inner, bias, residual) = (noise(3, n * cols), noise(5, m.outs), noise(6, width));
        let weights: Vec<f32> = noise(4, n).iter().map(|w| w.abs()).collect();
        let (parts, out) = (room(n * self.outs), room(width));
        let all = [self.rows, cols, self.outs, self.top_k, self.experts].map(|v| v as u32);
        let constants = [&all[..], &[1, 1, self.tiles()]].concat();
        let grid = [(self.outs as u32).div_ceil(64), self.tiles(), 1];
        Run::new("grouped_down", &numbered(&[ty], &[]), grid, [128, 1, 1])
            .buffer(&bytes(&m.data))
            .floats(&inner)
            .buffer(groups)
            .floats(&bias)
            .buffer(&parts)
            .go(&constants);
        let grid = [(self.outs as u32).div_ceil(64), self.rows as u32, 1];
        Run::new("grouped_sum", &[], grid, [64, 1, 1])
            .buffer(&parts)
            .floats(&weights)
            .floats(&residual)
            .buffer(&out)
            .go(&constants);
        let want = residual.iter().map(|r| f64::from(*r)).collect();
        let what = format!("grouped down of {ty}, {cols} columns");
        self.summed(&what, &read_floats(&out, width), &m, &bias, (&inner, &weights), want);
    }
}

#[test]
pub(super) fn experts_of_many_rows() {
    use TensorType::{F32, IQ3_XXS, MXFP4, Q4_K, Q6_K, Q8_0};
    for (experts, top_k, rows, outs) in
        [(1, 1, 1, 3), (8, 2, 40, 9), (3, 3, 17, 70), (40, 4, 33, 5)]
    {
        let mixture = Mixture::new(experts, top_k, rows, outs);
        mixture.grouped([F32, F32, F32], 33, 7, 0);
        mixture.grouped([Q8_0, Q8_0, MXFP4], 96, 64, 2);
    }
    // One expert has nearly everything, one nothing.
    let mut mixture = Mixture::new(4, 2, 50, 12);
    mixture.ids.iter_mut().enumerate().for_each(|(i, id)| *id = if i % 9 == 0 { 2 } else { 1 });
    mixture.grouped([Q4_K, IQ3_XXS, Q6_K], 256, 512, 1);
}

#[test]
pub(super) fn experts_of_every_type() {
    let types: Vec<TensorType> = WEIGHT_TYPES.iter().chain(MORE_TYPES).copied().collect();
    for (n, ty) in types.iter().enumerate() {
        let cols = columns(*ty)[n % 2];
        let mixture = Mixture::new(3 + n % 3, 1 + n % 3, 2, 9);
        let tile = [[1, 1], [2, 2], [4, 8]][n % 3];
        mixture.gated([*ty, *ty], cols, n as u32 % 3, tile);
        mixture.down(*ty, cols, n % 2 == 0, tile);
    }
}

#[test]
pub(super) fn experts_of_several_types_and_rows() {
    use TensorType::{IQ2_S, Q4_K, Q6_K};
    for (experts, top_k, rows) in [(8, 2, 1), (4, 4, 5), (64, 8, 3), (3, 1, 17)] {
        let mixture = Mixture::new(experts, top_k, rows, 5);
        mixture.gated([Q4_K, Q6_K], 256, 0, [2, 2]);
        mixture.gated([TensorType::F32, IQ2_S], 256, 2, [4, 4]);
        mixture.down(TensorType::F16, 33, true, [2, 1]);
        mixture.down(TensorType::MXFP4, 96, true, [2, 4]);
    }
}
