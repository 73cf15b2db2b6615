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
    copied(33, 2, 32);
}

/// Copies of so many rows of a width, the first ones and others, by threadgroups of so many threads.
pub(super) fn copied(width: usize, rows: usize, threads: u32) {
    let x = noise(1, (rows + 3) * width);
    let out = room(rows * width);
    let picks: Vec<usize> = (0..rows).map(|r| (r * 7 + 4) % (rows + 3)).collect();
    let grid = [(width as u32).div_ceil(threads), rows as u32, 1];
    let run = |name| Run::new(name, &[], grid, [threads, 1, 1]).floats(&x);
    let words: Vec<u32> = picks.iter().flat_map(|p| [*p as u32, 9, 9, 9]).collect();
    run("select_rows").words(&words).buffer(&out).go(&[rows as u32, width as u32]);
    let want: Vec<f32> = picks.iter().flat_map(|p| x[p * width..][..width].to_vec()).collect();
    assert_eq!(read_floats(&out, rows * width), want, "{rows}x{width} selected");
    run("copy").buffer(&out).go(&[rows as u32, width as u32]);
    assert_eq!(read_floats(&out, rows * width), x[..rows * width], "{rows}x{width} copied");
}

/// Position, sequence, liveness.
pub(super) type Place = (u32, u32, u32);

/// Rows as the kernels read them.
fn rows_of(list: &[Place]) -> Vec<u32> {
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

/// Rotations of every kind.
pub(super) const ROTATIONS: [Rotation; 7] = [
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

/// Head size, rotated elements, halves apart, with norms.
pub(super) type Rotation = (usize, usize, bool, bool);

#[test]
fn rope_of_every_head_size() {
    for rotation in ROTATIONS {
        rope(rotation, 5, &[(0, 0, 1), (4000, 0, 1), (17, 1, 1)]);
    }
}

/// So many heads of rows at these positions, turned.
pub(super) fn rope((dim, rotated, halves, normed): Rotation, heads: usize, list: &[Place]) {
    let rows = list.len();
    let (x, norm) = (noise(1, rows * heads * dim), noise(2, dim));
    let freqs = freqs(rotated);
    let out = room(x.len());
    let grid = [heads.div_ceil(4) as u32, rows as u32, 1];
    Run::new("norm_rope", &[], grid, [128, 1, 1])
        .floats(&x)
        .floats(&norm)
        .floats(&freqs)
        .words(&rows_of(list))
        .buffer(&out)
        .go(&[
            rows as u32,
            heads as u32,
            dim as u32,
            u32::from(normed),
            1e-6f32.to_bits(),
            freqs.len() as u32,
            u32::from(halves),
            1.1f32.to_bits(),
        ]);
    let norm = normed.then_some(&norm[..]);
    let head = Head { norm, freqs: &freqs, halves, magnitude: f64::from(1.1f32) };
    let heads_of = x.chunks(dim).enumerate();
    let want: Vec<f64> = heads_of.flat_map(|(i, x)| head.rotated(x, list[i / heads].0)).collect();
    let what = format!("rope {rotated} of {dim}, {heads} heads of {rows} rows");
    close(&what, &read_floats(&out, x.len()), &want, 1e-4);
}

/// Tokens of a block.
const BLOCK: usize = 4;
/// Rows of which the last may not be written.
pub(super) const APPENDED: [Place; 4] = [(0, 0, 1), (6, 0, 1), (5, 1, 9), (400, 1, 0)];

/// Where rows of two sequences lie in a pool: the blocks of the second are between those of the first, backwards.
struct Appended<'a> {
    list: &'a [Place],
    stride: usize,
}

impl Appended<'_> {
    fn new(list: &[Place]) -> Appended<'_> {
        let live = list.iter().filter(|(.., left)| *left != 0);
        let stride = live.map(|(pos, ..)| *pos as usize / BLOCK + 1).max().unwrap_or(1);
        Appended { list, stride }
    }

    fn block(&self, seq: u32, n: usize) -> usize {
        if seq == 0 { 2 * n } else { 2 * (self.stride - 1 - n) + 1 }
    }

    fn tables(&self) -> Vec<u32> {
        let of = |seq| (0..self.stride).map(move |n| self.block(seq, n) as u32);
        of(0).chain(of(1)).collect()
    }

    fn tokens(&self) -> usize {
        2 * self.stride * BLOCK
    }

    /// Every row that is written, and its token in the pool.
    fn places(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let live = self.list.iter().enumerate().filter(|(_, (.., left))| *left != 0);
        live.map(|(row, (pos, seq, _))| {
            let at = *pos as usize;
            (row, self.block(*seq, at / BLOCK) * BLOCK + at % BLOCK)
        })
    }

    /// A pool for all tokens.
    fn pool(&self, ty: TensorType, width: usize) -> Buffer {
        room((self.tokens() * width / ty.block_len() * ty.block_bytes()).div_ceil(4))
    }

    /// Holds the rows in a pool to `want`, and that no other was written.
    fn held(&self, what: &str, pool: &Buffer, ty: TensorType, want: &[f64], bound: f64) {
        let width = want.len() / self.list.len();
        for (row, place) in self.places() {
            let have = super::pool_row(pool, ty, place * width, width);
            close(what, &have, &want[row * width..][..width], bound);
        }
        let bytes = width / ty.block_len() * ty.block_bytes();
        let written = |t: &usize| pool.first_unwritten(t * bytes, bytes).is_none();
        let written = (0..self.tokens()).filter(written).count();
        assert_eq!(written, self.places().count(), "{what}: a row with nothing left was written");
    }
}

/// What a type of cache may change of numbers below one.
fn stored_within(ty: TensorType) -> f64 {
    match ty {
        TensorType::F32 => 1e-4,
        TensorType::F16 => 1e-3,
        _ => 0.5 / 127.0,
    }
}

fn exact(x: &[f32]) -> Vec<f64> {
    x.iter().map(|v| f64::from(*v)).collect()
}

#[test]
fn keys_and_values_are_appended_where_their_tables_say() {
    for ty in KV_TYPES {
        let (kw, vw) = if *ty == TensorType::Q8_0 { (64, 32) } else { (40, 24) };
        kv_write(*ty, kw, vw, &APPENDED);
    }
}

/// Keys and values of these widths, appended as they are.
pub(super) fn kv_write(ty: TensorType, kw: usize, vw: usize, list: &[Place]) {
    let (rows, at) = (list.len(), Appended::new(list));
    let (k, v) = (noise(1, rows * kw), noise(2, rows * vw));
    let [keys, values] = [kw, vw].map(|w| at.pool(ty, w));
    let grid = [kw.max(vw).div_ceil(32) as u32, rows as u32, 1];
    Run::new(&entry("kv_write", ty), &pieced(&[], 1), grid, [32, 1, 1])
        .floats(&k)
        .floats(&v)
        .words(&rows_of(list))
        .words(&at.tables())
        .pool(std::slice::from_ref(&keys))
        .pool(std::slice::from_ref(&values))
        .go(&[rows as u32, kw as u32, vw as u32, BLOCK as u32, at.stride as u32]);
    for (pool, x) in [(&keys, &k), (&values, &v)] {
        at.held(&format!("append to {ty}"), pool, ty, &exact(x), stored_within(ty));
    }
}

#[test]
pub(super) fn rope_and_append_in_one() {
    for rotation in ROTATIONS {
        for ty in KV_TYPES.iter().filter(|ty| rotation.0 % ty.block_len() == 0) {
            let vw = if *ty == TensorType::Q8_0 { 64 } else { 24 };
            rope_write(rotation, *ty, (3, 2, vw), &APPENDED);
        }
    }
}

/// So many query and key heads, the first turned and the second appended, and values of a width.
pub(super) fn rope_write(
    (dim, rotated, halves, normed): Rotation,
    ty: TensorType,
    (heads, kv_heads, vw): (usize, usize, usize),
    list: &[Place],
) {
    let (rows, at) = (list.len(), Appended::new(list));
    let [q, k, v] = [(1, heads * dim), (2, kv_heads * dim), (3, kv_heads * vw)]
        .map(|(seed, w)| noise(seed, rows * w));
    let (q_norm, k_norm, freqs) = (noise(4, dim), noise(5, dim), freqs(rotated));
    let [keys, values] = [dim, vw].map(|w| at.pool(ty, kv_heads * w));
    let out = room(q.len());
    let flag = u32::from(normed);
    let grid = [(heads + 2 * kv_heads).div_ceil(4) as u32, rows as u32, 1];
    Run::new(&entry("rope_write", ty), &pieced(&[], 1), grid, [128, 1, 1])
        .floats(&q)
        .floats(&k)
        .floats(&v)
        .floats(&q_norm)
        .floats(&k_norm)
        .floats(&freqs)
        .words(&rows_of(list))
        .words(&at.tables())
        .buffer(&out)
        .pool(std::slice::from_ref(&keys))
        .pool(std::slice::from_ref(&values))
        .go(&[
            rows as u32,
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
            BLOCK as u32,
            at.stride as u32,
        ]);
    let head = |norm| Head { norm: normed.then_some(norm), freqs: &freqs, halves, magnitude: 1.0 };
    let all = |x: &[f32], n: usize, norm| -> Vec<f64> {
        let pos = |i: usize| list[i / n].0;
        x.chunks(dim).enumerate().flat_map(|(i, x)| head(norm).rotated(x, pos(i))).collect()
    };
    let what = format!("{rotated} of {dim}, {heads} and {kv_heads} heads of {rows} rows, {ty}");
    let turned = all(&q, heads, &q_norm[..]);
    close(&format!("q, {what}"), &read_floats(&out, q.len()), &turned, 1e-4);
    // A norm and the magnitude make elements of up to a few ones.
    let bound = stored_within(ty) * if ty == TensorType::Q8_0 { 4.0 } else { 1.0 };
    at.held(&format!("k, {what}"), &keys, ty, &all(&k, kv_heads, &k_norm[..]), bound);
    at.held(&format!("v, {what}"), &values, ty, &exact(&v), bound);
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
