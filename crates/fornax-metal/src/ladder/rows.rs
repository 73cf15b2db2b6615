//! Kernels that go row by row: norm, copies, rotary positions, the append, the highest logit.

use fornax_gguf::TensorType;
use fornax_msl::Buffer;

use super::{Run, close, floats, noise, read_floats, read_words, room, words};
use crate::feed::UNUSABLE;
use crate::library::{KV_TYPES, entry, pieced};

/// The norm of so many rows of a width by threadgroups of so many threads.
pub(super) fn norm(width: usize, rows: usize, threads: u32) {
    let (x, weight) = (noise(1, width * rows), noise(2, width));
    let residual = noise(3, width * rows);
    for with in [false, true] {
        let out = room(width * rows);
        Run::new("rms_norm", &[], [rows as u32, 1, 1], [threads, 1, 1])
            .floats(&x)
            .floats(&weight)
            .floats(&residual)
            .buffer(&out)
            .go(&[rows as u32, width as u32, 1e-5f32.to_bits(), u32::from(with)]);
        let mut want = Vec::new();
        for (x, residual) in x.chunks(width).zip(residual.chunks(width)) {
            let square: f64 = x.iter().map(|v| f64::from(*v).powi(2)).sum();
            let scale = 1.0 / (square / width as f64 + f64::from(1e-5f32)).sqrt();
            for ((x, w), r) in x.iter().zip(&weight).zip(residual) {
                let r = if with { f64::from(*r) } else { 0.0 };
                want.push(f64::from(*x) * scale * f64::from(*w) + r);
            }
        }
        close(&format!("norm {rows}x{width}"), &read_floats(&out, width * rows), &want, 1e-5);
    }
}

#[test]
pub(super) fn norm_of_rows_shorter_and_longer_than_a_threadgroup() {
    for (width, rows, threads) in
        [(7, 1, 32), (33, 2, 64), (130, 3, 64), (4100, 2, 1024), (576, 64, 96)]
    {
        norm(width, rows, threads);
    }
}

#[test]
fn rows_are_copied_and_selected() {
    let x = noise(1, 5 * 33);
    let out = room(2 * 33);
    let run = |name| Run::new(name, &[], [2, 2, 1], [32, 1, 1]).floats(&x);
    run("select_rows").words(&[4, 9, 9, 9, 1, 9, 9, 9]).buffer(&out).go(&[2, 33]);
    assert_eq!(read_floats(&out, 66), [&x[4 * 33..], &x[33..66]].concat());
    run("copy").buffer(&out).go(&[2, 33]);
    assert_eq!(read_floats(&out, 66), x[..66]);
}

/// Position, sequence and liveness of rows as the kernels read them.
fn rows_of(list: &[(u32, u32, u32)]) -> Vec<u32> {
    list.iter().flat_map(|(pos, seq, left)| [0, *pos, *seq, 0, *left, 0, 0, 0]).collect()
}

/// A rotation, and the norm before it.
pub(super) struct Head<'a> {
    pub(super) norm: Option<&'a [f32]>,
    pub(super) freqs: &'a [f32],
    pub(super) halves: bool,
    pub(super) magnitude: f64,
}

impl Head<'_> {
    pub(super) fn rotated(&self, x: &[f32], pos: u32) -> Vec<f64> {
        let mut y: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
        if let Some(norm) = self.norm {
            let square: f64 = y.iter().map(|v| v * v).sum();
            let scale = 1.0 / (square / y.len() as f64 + f64::from(1e-6f32)).sqrt();
            y.iter_mut().zip(norm).for_each(|(y, w)| *y *= scale * f64::from(*w));
        }
        let pairs = self.freqs.len();
        for (i, freq) in self.freqs.iter().enumerate() {
            let (p, q) = if self.halves { (i, i + pairs) } else { (2 * i, 2 * i + 1) };
            // The angle is a float on the device: its rounding is the format's, not the kernel's.
            let (sin, cos) = f64::from(pos as f32 * freq).sin_cos();
            let (u, v) = (y[p], y[q]);
            y[p] = self.magnitude * (u * cos - v * sin);
            y[q] = self.magnitude * (u * sin + v * cos);
        }
        y
    }
}

/// Head size, rotated elements, halves apart, with norms.
pub(super) const ROTATIONS: [(usize, usize, bool, bool); 7] = [
    (64, 64, true, true),
    (80, 40, true, false),
    (96, 96, false, true),
    (128, 128, true, true),
    (256, 64, false, false),
    (20, 20, false, true),
    (64, 0, false, true),
];

pub(super) fn freqs(rotated: usize) -> Vec<f32> {
    (0..rotated / 2).map(|i| 1e4f32.powf(-2.0 * i as f32 / rotated as f32)).collect()
}

#[test]
fn rope_of_every_head_size() {
    for (dim, rotated, halves, normed) in ROTATIONS {
        let (heads, list) = (5, [(0, 0, 1), (4000, 0, 1), (17, 1, 1)]);
        let (x, norm) = (noise(1, 3 * heads * dim), noise(2, dim));
        let freqs = freqs(rotated);
        let out = room(x.len());
        Run::new("norm_rope", &[], [2, 3, 1], [128, 1, 1])
            .floats(&x)
            .floats(&norm)
            .floats(&freqs)
            .words(&rows_of(&list))
            .buffer(&out)
            .go(&[
                3,
                heads as u32,
                dim as u32,
                u32::from(normed),
                1e-6f32.to_bits(),
                freqs.len() as u32,
                u32::from(halves),
                1.1f32.to_bits(),
            ]);
        let head = Head {
            norm: normed.then_some(&norm[..]),
            freqs: &freqs,
            halves,
            magnitude: f64::from(1.1f32),
        };
        let want: Vec<f64> = x
            .chunks(dim)
            .enumerate()
            .flat_map(|(i, x)| head.rotated(x, list[i / heads].0))
            .collect();
        close(&format!("rope {rotated} of {dim}"), &read_floats(&out, x.len()), &want, 1e-4);
    }
}

/// Blocks of four tokens, four blocks a table: sequence 0 has 3, 1, …, sequence 1 has 5, 0, ….
const TABLES: [u32; 8] = [3, 1, 7, 7, 5, 0, 7, 7];
/// Position, sequence, liveness: the last may not be written.
const APPENDED: [(u32, u32, u32); 4] = [(0, 0, 1), (6, 0, 1), (5, 1, 9), (400, 1, 0)];
/// Where those rows lie in a pool.
const PLACES: [usize; 3] = [12, 6, 1];

/// A pool of eight blocks of four tokens.
fn pool(ty: TensorType, width: usize) -> Buffer {
    room((32 * width / ty.block_len() * ty.block_bytes()).div_ceil(4))
}

/// What a type of cache may change of numbers below one.
fn stored_within(ty: TensorType) -> f64 {
    match ty {
        TensorType::F32 => 1e-4,
        TensorType::F16 => 1e-3,
        _ => 0.5 / 127.0,
    }
}

#[test]
fn keys_and_values_are_appended_where_their_tables_say() {
    for ty in KV_TYPES {
        let ty = *ty;
        let (kw, vw) = if ty == TensorType::Q8_0 { (64, 32) } else { (40, 24) };
        let (k, v) = (noise(1, 4 * kw), noise(2, 4 * vw));
        let row_bytes = kw / ty.block_len() * ty.block_bytes();
        let [keys, values] = [kw, vw].map(|w| pool(ty, w));
        Run::new(&entry("kv_write", ty), &pieced(&[], 1), [2, 4, 1], [32, 1, 1])
            .floats(&k)
            .floats(&v)
            .words(&rows_of(&APPENDED))
            .words(&TABLES)
            .pool(std::slice::from_ref(&keys))
            .pool(std::slice::from_ref(&values))
            .go(&[4, kw as u32, vw as u32, 4, 4]);
        for (row, place) in PLACES.into_iter().enumerate() {
            for (from, pool, w) in [(&k, &keys, kw), (&v, &values, vw)] {
                let have = super::pool_row(pool, ty, place * w, w);
                let want: Vec<f64> = from[row * w..][..w].iter().map(|v| f64::from(*v)).collect();
                close("append", &have, &want, stored_within(ty));
            }
        }
        let written = (0..32).filter(|t| keys.first_unwritten(t * row_bytes, row_bytes).is_none());
        assert_eq!(written.count(), 3, "a row with nothing left was written");
    }
}

#[test]
pub(super) fn rope_and_append_in_one() {
    for (dim, rotated, halves, normed) in ROTATIONS {
        for ty in KV_TYPES.iter().filter(|ty| dim % ty.block_len() == 0) {
            let ty = *ty;
            let (heads, kv_heads) = (3, 2);
            let vw = if ty == TensorType::Q8_0 { 64 } else { 24 };
            let [q, k, v] = [(1, heads * dim), (2, kv_heads * dim), (3, kv_heads * vw)]
                .map(|(seed, w)| noise(seed, 4 * w));
            let (q_norm, k_norm, freqs) = (noise(4, dim), noise(5, dim), freqs(rotated));
            let [keys, values] = [dim, vw].map(|w| pool(ty, kv_heads * w));
            let out = room(q.len());
            let flag = u32::from(normed);
            Run::new(&entry("rope_write", ty), &pieced(&[], 1), [2, 4, 1], [128, 1, 1])
                .floats(&q)
                .floats(&k)
                .floats(&v)
                .floats(&q_norm)
                .floats(&k_norm)
                .floats(&freqs)
                .words(&rows_of(&APPENDED))
                .words(&TABLES)
                .buffer(&out)
                .pool(std::slice::from_ref(&keys))
                .pool(std::slice::from_ref(&values))
                .go(&[
                    4,
                    heads as u32,
                    kv_heads as u32,
                    dim as u32,
                    vw as u32,
                    flag,
                    flag,
                    1e-6f32.to_bits(),
                    freqs.len() as u32,
                    u32::from(halves),
                    1f32.to_bits(),
                    4,
                    4,
                ]);
            let head =
                |norm| Head { norm: normed.then_some(norm), freqs: &freqs, halves, magnitude: 1.0 };
            let all = |x: &[f32], n: usize, norm| -> Vec<f64> {
                let pos = |i: usize| APPENDED[i / n].0;
                x.chunks(dim).enumerate().flat_map(|(i, x)| head(norm).rotated(x, pos(i))).collect()
            };
            close("q", &read_floats(&out, q.len()), &all(&q, heads, &q_norm[..]), 1e-4);
            let want = all(&k, kv_heads, &k_norm[..]);
            for (row, place) in PLACES.into_iter().enumerate() {
                let w = kv_heads * dim;
                // A norm and the magnitude make elements of up to a few ones.
                let bound = stored_within(ty) * if ty == TensorType::Q8_0 { 4.0 } else { 1.0 };
                let have = super::pool_row(&keys, ty, place * w, w);
                close("k", &have, &want[row * w..][..w], bound);
                let w = kv_heads * vw;
                let exact: Vec<f64> = v[row * w..][..w].iter().map(|v| f64::from(*v)).collect();
                close("v", &super::pool_row(&values, ty, place * w, w), &exact, bound);
            }
        }
    }
}

/// What the choosing kernels left: token and log-probability.
fn choose(logits: &[f32], parts: u32) -> (u32, f32) {
    let partials = room(parts as usize * 4);
    let vocab = logits.len() as u32;
    Run::new("argmax_parts", &[], [parts, 1, 1], [256, 1, 1])
        .floats(logits)
        .buffer(&partials)
        .go(&[1, vocab, parts]);
    let rows = words(&rows_of(&[(6, 0, 1)]));
    let (last, out) = (room(1), room(2));
    Run::new("argmax_pick", &[], [1, 1, 1], [32, 1, 1])
        .buffer(&partials)
        .words(&[0, 7, u32::MAX, 1])
        .buffer(&rows)
        .buffer(&last)
        .words(&[0; 16])
        .words(&[0])
        .buffer(&out)
        .buffer(&room(1))
        .buffer(&room(1))
        .floats(logits)
        .buffer(&room(1))
        .buffer(&room(1))
        .go(&[1, 0, 1, 1, 1, parts, vocab, 1]);
    let out = read_words(&out, 2);
    let usable = out[0] != UNUSABLE;
    assert_eq!(read_words(&last, 1)[0], if usable { out[0] } else { 0 });
    (out[0], f32::from_bits(out[1]))
}

#[test]
pub(super) fn the_highest_logit_wins_and_ties_go_to_the_lowest_id() {
    for (n, parts) in [(1, 1), (7, 1), (33, 3), (300, 2), (5000, 7), (4096, 40)] {
        let mut logits = noise(n as u64, n);
        let high = n * 3 / 4;
        logits[high] = 3.0;
        logits[n - 1] = 3.0;
        if n > 30 {
            (logits[0], logits[1], logits[20]) = (f32::NAN, f32::NEG_INFINITY, f32::NAN);
        }
        let (token, logprob) = choose(&logits, parts);
        assert_eq!(token as usize, high, "{n} in {parts}");
        let sum: f64 =
            logits.iter().filter(|v| !v.is_nan()).map(|v| (f64::from(*v) - 3.0).exp()).sum();
        close("log-probability", &[logprob], &[-sum.ln()], 1e-4);
    }
    for nothing in [f32::NAN, f32::NEG_INFINITY] {
        assert_eq!(choose(&[nothing; 70], 3).0, UNUSABLE, "no logit is usable");
    }
}

#[test]
pub(super) fn a_chains_row_is_replaced_by_its_successor() {
    let partials = floats(&[2.0, f32::from_bits(9), 1.0, 0.0]);
    let rows = words(&[0, 0, 0, 0, 1, 0, 0, 0, 4, 6, 0, 0, 3, 1, 0, 0]);
    let (last, out) = (room(1), room(6));
    Run::new("argmax_pick", &[], [1, 1, 1], [32, 1, 1])
        .buffer(&partials)
        .words(&[0, 5, 1, 8])
        .buffer(&rows)
        .buffer(&last)
        .words(&[0; 16])
        .words(&[0])
        .buffer(&out)
        .buffer(&room(1))
        .buffer(&room(1))
        .floats(&[0.0; 10])
        .buffer(&room(1))
        .buffer(&room(1))
        .go(&[1, 1, 1, 1, 3, 1, 10, 1]);
    assert_eq!(read_words(&rows, 16)[8..], [9, 7, 0, 0, 2, 2, 0, 0]);
}

#[test]
fn a_choice_is_fed_back_until_it_ends() {
    // Rows 0..2 of the host's, chain rows from 2 on; sequences 0 and 1 in slots 1 and 0.
    let row = |pos, seq, slot, left, round| [0, pos, seq, slot, left, round, 0, 0];
    let run = |stop: u32, ticket: u32| {
        let partials =
            floats(&[1.0, f32::from_bits(5), 1.0, 0.0, 2.0, f32::from_bits(9), 1.0, 0.0]);
        let rows = [row(6, 0, 1, 1, 0), row(3, 1, 0, 1, 0), row(0, 0, 1, 4, 1), row(0, 1, 0, 4, 1)];
        let rows = words(&rows.concat());
        let mut stops = vec![0; 32];
        (stops[16], stops[17], stops[18]) = (2, 77, stop);
        let (last, out) = (room(2), room(8));
        Run::new("argmax_pick", &[], [2, 1, 1], [32, 1, 1])
            .buffer(&partials)
            .words(&[0, 5, 2, 8, 1, 5, 3, 8])
            .buffer(&rows)
            .buffer(&last)
            .words(&stops)
            .words(&[0, ticket])
            .buffer(&out)
            .buffer(&room(1))
            .buffer(&room(1))
            .floats(&[0.0; 20])
            .buffer(&room(1))
            .buffer(&room(1))
            .go(&[2, 0, 2, 2, 4, 1, 10, 1]);
        assert_eq!(read_words(&last, 2), [9, 5], "by slot");
        read_words(&rows, 32)[16..].to_vec()
    };
    assert_eq!(
        run(1, 0),
        [row(7, 0, 1, 3, 1), row(4, 1, 0, 3, 1)]
            .map(|r| [&[[5, 9][r[2] as usize]], &r[1..]].concat())
            .concat()
    );
    assert_eq!(run(9, 0)[8 + 4], 0, "a stop token ends its sequence");
    assert_eq!(run(9, 0)[4], 3, "and no other");
    assert_eq!(run(1, 8)[4], 0, "asked to stop");
    assert_eq!(run(1, 7)[4], 3, "a stop of an earlier ticket");
}
