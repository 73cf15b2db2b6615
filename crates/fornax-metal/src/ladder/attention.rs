//! Attention over a paged cache: decode in shares and prefill in tiles, against the textbook.

use std::cell::OnceCell;

use fornax_gguf::TensorType;
use fornax_msl::Buffer;

use super::{Run, bytes, close, noise, read_floats, room};
use crate::library::{KV_TYPES, entry, pieced};
use crate::pieces::Pieces;

const BLOCK: usize = 32;

/// A cache with `keys` tokens for each of two sequences, and rows that look at it.
pub(super) struct Scene {
    pub(super) ty: TensorType,
    heads: usize,
    kv_heads: usize,
    kw: usize,
    vw: usize,
    stride: usize,
    pub(super) window: u32,
    pub(super) softcap: f32,
    pub(super) sinks: bool,
    /// Position, sequence, liveness.
    pub(super) rows: Vec<(u32, u32, u32)>,
    /// Buffers that the pools are in.
    pub(super) pieces: usize,
    /// Keys, values and results, made when they are first asked for, after everything else was said.
    keys: OnceCell<Vec<f32>>,
    values: OnceCell<Vec<f32>>,
    right: OnceCell<Vec<f64>>,
}

/// A pool as the kernels take it.
struct Kept {
    pieces: Vec<Buffer>,
    places: Pieces,
    ty: TensorType,
    /// Elements of a token.
    width: usize,
}

impl Kept {
    /// A token's piece, and where in it its elements begin.
    fn at(&self, token: usize) -> (&Buffer, usize) {
        let (piece, block) = self.places.place((token / BLOCK) as u32);
        (&self.pieces[piece], (block as usize * BLOCK + token % BLOCK) * self.width)
    }

    /// What was written of a token counts as not written.
    fn forget(&self, token: usize) {
        let (piece, at) = self.at(token);
        let bytes = |n: usize| n / self.ty.block_len() * self.ty.block_bytes();
        piece.forget(bytes(at), bytes(self.width));
    }

    fn row(&self, token: usize) -> Vec<f32> {
        let (piece, at) = self.at(token);
        super::pool_row(piece, self.ty, at, self.width)
    }
}

impl Scene {
    pub(super) fn new(heads: usize, kv_heads: usize, kw: usize, vw: usize, keys: usize) -> Scene {
        Scene {
            ty: TensorType::F32,
            heads,
            kv_heads,
            kw,
            vw,
            stride: keys.div_ceil(BLOCK),
            window: 0,
            softcap: 0.0,
            sinks: false,
            pieces: 1,
            keys: OnceCell::new(),
            values: OnceCell::new(),
            right: OnceCell::new(),
            rows: vec![(keys as u32 - 1, 0, 1), (keys as u32 / 2, 1, 1), (keys as u32, 0, 0)],
        }
    }

    /// The same cache, for other rows.
    pub(super) fn looked_at_by(self, rows: Vec<(u32, u32, u32)>) -> Scene {
        Scene { right: OnceCell::new(), rows, ..self }
    }

    /// Physical block of a sequence's block: the second sequence's are in between, backwards.
    fn block(&self, seq: usize, n: usize) -> usize {
        if seq == 0 { 2 * n } else { 2 * (self.stride - 1 - n) + 1 }
    }

    fn tables(&self) -> Vec<u32> {
        let places = self.places();
        let of = |s| (0..self.stride).map(move |n| self.block(s, n) as u32);
        of(0).chain(of(1)).map(|block| places.entry(block)).collect()
    }

    /// Pieces of as many blocks each, the first of the rest too.
    fn places(&self) -> Pieces {
        let (all, each) = (2 * self.stride, 2 * self.stride / self.pieces);
        let mut places = Pieces::new((all - (self.pieces - 1) * each) as u32).expect("few blocks");
        (1..self.pieces).for_each(|_| places.push(each as u32).expect("few pieces"));
        places
    }

    fn keys(&self) -> &[f32] {
        self.keys.get_or_init(|| self.pool(1, self.kw))
    }

    fn values(&self) -> &[f32] {
        self.values.get_or_init(|| self.pool(2, self.vw))
    }

    /// A pool's values as they are stored.
    fn pool(&self, seed: u64, width: usize) -> Vec<f32> {
        let mut all = noise(seed, 2 * self.stride * BLOCK * self.kv_heads * width);
        let data = self.encoded(&all);
        fornax_gguf::blocks::dequantize(self.ty, &data, &mut all).expect("whole blocks");
        all
    }

    fn encoded(&self, values: &[f32]) -> Vec<u8> {
        let mut data = vec![0; values.len() / self.ty.block_len() * self.ty.block_bytes()];
        fornax_gguf::blocks::quantize(self.ty, values, &mut data).expect("whole blocks");
        data
    }

    fn stored(&self, values: &[f32], width: usize) -> Kept {
        let (places, width) = (self.places(), self.kv_heads * width);
        let (mut rest, mut pieces) = (values, Vec::new());
        for blocks in places.lens() {
            let (piece, after) = rest.split_at(blocks as usize * BLOCK * width);
            rest = after;
            pieces.push(bytes(&self.encoded(piece)));
        }
        Kept { pieces, places, ty: self.ty, width }
    }

    fn queries(&self) -> Vec<f32> {
        noise(3, self.rows.len() * self.heads * self.kw)
    }

    fn sink(&self) -> Vec<f32> {
        noise(4, self.heads)
    }

    fn args(&self, splits: u32) -> [u32; 12] {
        [
            self.rows.len() as u32,
            self.heads as u32,
            self.kv_heads as u32,
            self.kw as u32,
            self.vw as u32,
            BLOCK as u32,
            self.stride as u32,
            self.window,
            (1.0 / (self.kw as f32).sqrt()).to_bits(),
            self.softcap.to_bits(),
            u32::from(self.sinks),
            splits,
        ]
    }

    fn expected(&self) -> &[f64] {
        self.right.get_or_init(|| self.expected_of(&self.queries(), self.keys()))
    }

    fn expected_of(&self, queries: &[f32], keys: &[f32]) -> Vec<f64> {
        let values = self.values();
        let sink = self.sink();
        let mut out = Vec::new();
        for (row, &(pos, seq, left)) in self.rows.iter().enumerate() {
            for head in 0..self.heads {
                if left == 0 {
                    out.extend(vec![0.0; self.vw]);
                    continue;
                }
                let kv = head / (self.heads / self.kv_heads);
                let first =
                    if self.window == 0 { 0 } else { (pos + 1).saturating_sub(self.window) };
                let at = |p: u32| {
                    let (n, i) = (p as usize / BLOCK, p as usize % BLOCK);
                    (self.block(seq as usize, n) * BLOCK + i) * self.kv_heads + kv
                };
                let q = &queries[(row * self.heads + head) * self.kw..][..self.kw];
                let scores: Vec<f64> = (first..=pos)
                    .map(|p| {
                        let k = &keys[at(p) * self.kw..][..self.kw];
                        let dot: f64 =
                            q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                        let s = dot / f64::from((self.kw as f32).sqrt());
                        let cap = f64::from(self.softcap);
                        if cap == 0.0 { s } else { cap * (s / cap).tanh() }
                    })
                    .collect();
                let mut sum: f64 = scores.iter().map(|s| s.exp()).sum();
                if self.sinks {
                    sum += f64::from(sink[head]).exp();
                }
                let mut mix = vec![0.0; self.vw];
                for (p, s) in (first..=pos).zip(&scores) {
                    let v = &values[at(p) * self.vw..][..self.vw];
                    mix.iter_mut().zip(v).for_each(|(m, v)| *m += s.exp() / sum * f64::from(*v));
                }
                out.extend(mix);
            }
        }
        out
    }

    fn row_words(&self) -> Vec<u32> {
        self.rows.iter().flat_map(|(p, s, left)| [0, *p, *s, 0, *left, 0, 0, 0]).collect()
    }

    fn constants(&self, heads: usize, simds: u32) -> Vec<u32> {
        let each = [self.kw.div_ceil(32) as u32, self.vw.div_ceil(32) as u32];
        pieced(&[heads as u32, each[0], each[1], simds], self.pieces)
    }

    /// `together` query heads in a threadgroup, `splits` shares.
    pub(super) fn decode(&self, together: usize, splits: u32) {
        let rows = self.rows.len();
        let partials = room(rows * self.heads * splits as usize * (2 + self.vw));
        let out = room(rows * self.heads * self.vw);
        let constants = self.constants(together, 0);
        let grid = [splits, (self.heads / together) as u32, rows as u32];
        Run::new(&entry("attention_split", self.ty), &constants, grid, [32, 1, 1])
            .floats(&self.queries())
            .words(&self.row_words())
            .words(&self.tables())
            .pool(&self.stored(self.keys(), self.kw).pieces)
            .pool(&self.stored(self.values(), self.vw).pieces)
            .buffer(&partials)
            .go(&self.args(splits));
        let grid = [self.heads as u32, rows as u32, 1];
        Run::new("attention_reduce", &constants, grid, [32, 1, 1])
            .buffer(&partials)
            .words(&self.row_words())
            .floats(&self.sink())
            .buffer(&out)
            .go(&self.args(splits));
        let have = read_floats(&out, rows * self.heads * self.vw);
        close(&format!("decode of {} wide", self.kw), &have, self.expected(), 1e-4);
    }

    /// `together` query heads in a threadgroup.
    pub(super) fn prefill(&self, together: usize) {
        let rows = self.rows.len();
        let out = room(rows * self.heads * self.vw);
        let grid = [(self.heads / together) as u32, rows.div_ceil(8) as u32, 1];
        let constants = self.constants(together, 0);
        Run::new(&entry("attention_tiled", self.ty), &constants, grid, [256, 1, 1])
            .floats(&self.queries())
            .words(&self.row_words())
            .words(&self.tables())
            .pool(&self.stored(self.keys(), self.kw).pieces)
            .pool(&self.stored(self.values(), self.vw).pieces)
            .floats(&self.sink())
            .buffer(&out)
            .go(&self.args(1));
        let have = read_floats(&out, rows * self.heads * self.vw);
        close(&format!("prefill of {} wide", self.kw), &have, self.expected(), 1e-4);
    }
}

#[test]
fn every_head_size_in_every_type_of_cache() {
    for (heads, kv_heads, kw, vw) in [
        (4, 2, 64, 64),
        (3, 1, 80, 80),
        (2, 2, 96, 96),
        (8, 1, 128, 128),
        (4, 1, 256, 256),
        (4, 2, 96, 32),
    ] {
        // Blocks of 32 have no other heads than of whole blocks.
        for ty in KV_TYPES.iter().filter(|ty| kw % ty.block_len() == 0) {
            let scene = Scene { ty: *ty, ..Scene::new(heads, kv_heads, kw, vw, 70) };
            scene.decode(heads / kv_heads, 3);
            scene.prefill((heads / kv_heads).min(4));
        }
    }
}

#[test]
pub(super) fn every_number_of_keys() {
    for (keys, splits) in [(1, 1), (7, 4), (33, 2), (130, 32), (1000, 8)] {
        let scene = Scene::new(4, 2, 64, 64, keys);
        for together in [1, 2] {
            scene.decode(together, splits);
            scene.prefill(together);
        }
    }
    let long = Scene { rows: vec![(4999, 0, 1)], ..Scene::new(2, 1, 64, 64, 5000) };
    long.decode(2, 32);
    long.prefill(2);
}

/// As a cache is that has grown: keys in every piece.
#[test]
fn a_cache_in_pieces() {
    for (pieces, keys) in [(2, 70), (3, 130), (4, 300)] {
        for ty in KV_TYPES {
            let scene = Scene { pieces, ty: *ty, ..Scene::new(4, 2, 64, 32, keys) };
            scene.decode(2, 4);
            scene.prefill(2);
            scene.append(2, 4, 4, (0, false, false));
        }
    }
}

#[test]
fn windows_soft_caps_and_sinks() {
    for (window, softcap, sinks) in [
        (1, 0.0, false),
        (9, 0.0, true),
        (64, 0.0, false),
        (0, 2.0, false),
        (0, 0.0, true),
        (200, 1.0, true),
    ] {
        let scene = Scene { window, softcap, sinks, ..Scene::new(4, 2, 32, 32, 90) };
        scene.decode(2, 3);
        scene.prefill(1 + usize::from(sinks));
    }
}

#[test]
fn a_ragged_prefill_keeps_sequences_apart() {
    // Tiles of eight rows with two sequences, out of order, and dead rows between.
    let mut rows: Vec<(u32, u32, u32)> = (0..11).map(|p| (p, 0, 1)).collect();
    rows.extend((30..49).map(|p| (p, 1, u32::from(p != 37))));
    rows.extend([(12, 0, 1), (49, 1, 1), (13, 0, 1)]);
    let scene = Scene { rows, window: 20, ..Scene::new(4, 2, 64, 32, 50) };
    scene.prefill(2);
    scene.decode(2, 2);
}

/// Shares as the kernels leave them, joined by plain arithmetic: rows × heads × v_width.
fn joined(scene: &Scene, parts: &[f32], splits: usize, part: usize) -> Vec<f32> {
    let (heads, vw) = (scene.heads, scene.vw);
    let sink = scene.sink();
    let mut out = Vec::new();
    for (row, (_, _, left)) in scene.rows.iter().enumerate() {
        let row = &parts[row * part..][..part];
        for head in 0..heads {
            let ends = &row[heads * splits * vw + head * splits * 2..][..splits * 2];
            let sink = if scene.sinks { sink[head] } else { f32::NEG_INFINITY };
            let top = ends.chunks(2).fold(sink, |m, e| m.max(e[0]));
            let (mut total, mut mix) = ((sink - top).exp(), vec![0.0; vw]);
            for (s, end) in ends.chunks(2).enumerate().filter(|(_, e)| e[0] > f32::NEG_INFINITY) {
                let weight = (end[0] - top).exp();
                total += weight * end[1];
                let from = &row[(head * splits + s) * vw..][..vw];
                mix.iter_mut().zip(from).for_each(|(m, v)| *m += weight * v);
            }
            out.extend(mix.iter().map(|m| if *left == 0 { 0.0 } else { m / total }));
        }
    }
    out
}

impl Scene {
    /// Decode where the kernel norms, turns and appends first: halves or neighbours `rotated`,
    /// with norms or not.
    pub(super) fn append(
        &self,
        together: usize,
        splits: usize,
        simds: u32,
        (rotated, halves, normed): (usize, bool, bool),
    ) {
        let freqs = super::rows::freqs(rotated);
        let norms = [noise(7, self.kw), noise(8, self.kw)];
        let turned = |x: &[f32], norm: &[f32], pos: u32| -> Vec<f32> {
            let norm = normed.then_some(norm);
            let head = super::rows::Head { norm, freqs: &freqs, halves, magnitude: 1.0 };
            x.chunks(self.kw).flat_map(|x| head.rotated(x, pos)).map(|v| v as f32).collect()
        };
        let rows = self.rows.len();
        let part = (self.heads * splits * (self.vw + 2)).next_multiple_of(4);
        let partials = room(rows * part);
        let (mut keys, values) = (self.keys().to_vec(), self.values());
        // A row brings what is in the pool at its position; once turned, that is there.
        let own = |pool: &[f32], width: usize| -> Vec<f32> {
            let at = |(pos, seq, left): &(u32, u32, u32)| {
                let n = if *left == 0 { 0 } else { *pos as usize };
                self.block(*seq as usize, n / BLOCK) * BLOCK + n % BLOCK
            };
            let row = |r| pool[at(r) * self.kv_heads * width..][..self.kv_heads * width].to_vec();
            self.rows.iter().flat_map(row).collect()
        };
        let (k, v) = (own(&keys, self.kw), own(values, self.vw));
        let mut queries = Vec::new();
        for (row, (pos, seq, left)) in self.rows.iter().enumerate() {
            let wide = self.heads * self.kw;
            queries.extend(turned(&self.queries()[row * wide..][..wide], &norms[0], *pos));
            if *left != 0 {
                let wide = self.kv_heads * self.kw;
                let n = *pos as usize;
                let at = self.block(*seq as usize, n / BLOCK) * BLOCK + n % BLOCK;
                let key = turned(&k[row * wide..][..wide], &norms[1], *pos);
                keys[at * wide..][..wide].copy_from_slice(&key);
            }
        }
        let [kept_k, kept_v] =
            [(&keys[..], self.kw), (values, self.vw)].map(|(pool, width)| self.stored(pool, width));
        for pool in [&kept_k, &kept_v] {
            for (pos, seq, _) in self.rows.iter().filter(|(.., left)| *left != 0) {
                let n = *pos as usize;
                pool.forget(self.block(*seq as usize, n / BLOCK) * BLOCK + n % BLOCK);
            }
        }
        let a = self.args(splits as u32);
        let args = [
            [a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]].as_slice(),
            &[splits as u32, part as u32, u32::from(normed), u32::from(normed)],
            &[1e-6f32.to_bits(), freqs.len() as u32, u32::from(halves), 1f32.to_bits()],
        ]
        .concat();
        let constants = self.constants(together, simds);
        let grid = [splits as u32, (self.heads / together) as u32, rows as u32];
        Run::new(&entry("attention_append", self.ty), &constants, grid, [32 * simds, 1, 1])
            .floats(&self.queries())
            .floats(&k)
            .floats(&v)
            .floats(&norms[0])
            .floats(&norms[1])
            .floats(&freqs)
            .words(&self.row_words())
            .words(&self.tables())
            .pool(&kept_k.pieces)
            .pool(&kept_v.pieces)
            .buffer(&partials)
            .go(&args);
        let mut parts = vec![0u8; 4 * rows * part];
        partials.read(0, &mut parts).expect("a range inside");
        let parts: Vec<f32> =
            parts.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect();
        let have = joined(self, &parts, splits, part);
        // The row's own key is rounded where it is kept, and not where it is expected.
        let exact = (rotated == 0 && !normed) || self.ty == TensorType::F32;
        let bound = if exact { 1e-4 } else { 2e-3 };
        let want = self.expected_of(&queries, &keys);
        close(&format!("append of {} wide", self.kw), &have, &want, bound);
        for (pool, all, width) in [(&kept_k, &keys[..], self.kw), (&kept_v, values, self.vw)] {
            for (pos, seq, _) in self.rows.iter().filter(|(.., left)| *left != 0) {
                let n = *pos as usize;
                let at = self.block(*seq as usize, n / BLOCK) * BLOCK + n % BLOCK;
                let n = self.kv_heads * width;
                let want: Vec<f64> = all[at * n..][..n].iter().map(|v| f64::from(*v)).collect();
                close("appended", &pool.row(at), &want, bound);
            }
        }
    }
}

#[test]
pub(super) fn the_append_and_the_first_stage_in_one() {
    for (heads, kv_heads, kw, vw, keys, splits, simds) in [
        (4, 2, 64, 64, 1, 1, 4),
        (4, 2, 64, 64, 70, 3, 4),
        (3, 1, 80, 80, 33, 2, 2),
        (8, 1, 256, 256, 130, 4, 4),
        (4, 2, 96, 32, 300, 8, 1),
        (2, 2, 128, 128, 600, 16, 4),
    ] {
        for ty in KV_TYPES.iter().filter(|ty| kw % ty.block_len() == 0) {
            let scene = Scene { ty: *ty, ..Scene::new(heads, kv_heads, kw, vw, keys) };
            scene.append(heads / kv_heads, splits, simds, (0, false, false));
            scene.append(1, splits, simds, (0, true, false));
        }
    }
    for (window, softcap) in [(1, 0.0), (9, 0.0), (64, 0.0), (0, 2.0)] {
        let scene = Scene { window, softcap, ..Scene::new(4, 2, 32, 32, 90) };
        scene.append(2, 3, 4, (0, false, false));
    }
}

#[test]
fn the_append_norms_and_turns_heads_of_every_size() {
    for (dim, rotated, halves, normed) in super::rows::ROTATIONS {
        for ty in [TensorType::F32, TensorType::F16] {
            let scene = Scene { ty, ..Scene::new(4, 2, dim, 32, 70) };
            scene.append(2, 3, 2, (rotated, halves, normed));
        }
    }
}
