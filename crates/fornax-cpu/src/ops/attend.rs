//! Attention of a few rows of one sequence over the keys and values of one key head.
//!
//! Layout of a block of 32 tokens: keys lie token-minor, `[element][32 tokens]`, so that a score
//! is one multiply and add per element with no sum across lanes; values lie `[32 tokens][width]`.
//! Every key and value is read once for all query heads of the group and all rows at hand.
//!
//! Keys are taken in splits of 256 at fixed positions: the softmax of a split is computed on its
//! own and merged into the running one, in order. A row's result is therefore the same bits
//! however rows are grouped, chunked or spread over threads. Only the scores of one split exist
//! at a time. It knows no plan, no pool and no block table beyond its addresses.

#![allow(clippy::needless_range_loop, reason = "registers are indexed in step, by constants")]

mod merge;
mod parts;
#[cfg_attr(not(target_arch = "x86_64"), path = "attend/no_room.rs")]
mod room;
#[cfg(all(test, target_arch = "x86_64"))]
mod tile_tests;
#[cfg(target_arch = "x86_64")]
pub(in crate::ops) mod tiles;

use super::cells::{AsF16, AsF32, AsQ8, Cell, Elements};
use super::lanes::Lanes;
use super::math;
use crate::matrix::{Floats, lines, prefetch};
use merge::{exponentials, finish, merge};
pub(super) use parts::{attend_merge, attend_part};
pub(crate) use parts::{part_len, splits};
pub(crate) use room::TileScratch;

/// Tokens of one KV block.
pub(crate) const BLOCK: usize = 32;
/// Keys whose softmax is computed in one piece.
pub(crate) const SPLIT: usize = 256;
/// Query vectors (rows × heads of a group) of one call, at most.
pub(crate) const QUERIES: usize = 24;
/// The same, whole vectors of them.
const VECTORED: usize = QUERIES.next_multiple_of(16);

/// Query vectors (rows × heads of a group) of one call with tiles, at most.
pub(crate) const TILE_QUERIES: usize = 128;
/// Whether a call's shape is one that attention with tiles takes.
pub(crate) fn fits(cell: Cell, k_width: usize, v_width: usize) -> bool {
    cell == Cell::F16 && k_width.is_multiple_of(32) && v_width.is_multiple_of(32)
}

/// One call: `rows` rows × `heads` query heads against one key head.
pub(crate) struct Attend<'a> {
    /// First row, first head; a row's heads lie side by side.
    pub(crate) q: *const f32,
    /// From one row to the next, both in `q` and in elements.
    pub(crate) q_stride: usize,
    /// Where the first row's first head goes.
    pub(crate) out: *mut f32,
    /// From one row to the next.
    pub(crate) out_stride: usize,
    /// Rows, at consecutive positions.
    pub(crate) rows: usize,
    /// Query heads of this call.
    pub(crate) heads: usize,
    /// Position of the first row.
    pub(crate) pos: usize,
    /// Keys that a row sees, its own included.
    pub(crate) window: usize,
    /// Elements of a key and a value head.
    pub(crate) k_width: usize,
    /// As above.
    pub(crate) v_width: usize,
    /// Elements from one token's value to the next: `v_width` up to a multiple of 16.
    pub(crate) v_stride: usize,
    /// Factor on q·k.
    pub(crate) scale: f32,
    /// `cap · tanh(score / cap)`; 0 for none.
    pub(crate) cap: f32,
    /// One extra logit for each of the heads; may be empty.
    pub(crate) sinks: &'a [f32],
    /// How the cache stores elements.
    pub(crate) cell: Cell,
    /// Addresses of this key head's keys and values in block `i` of the sequence.
    pub(crate) block: &'a dyn Fn(usize) -> (*const u8, *const u8),
}

/// Memory of one thread for [`Attend`].
#[derive(Debug)]
pub(crate) struct Scratch {
    /// `[query][SPLIT]`: scores, then their exponentials.
    scores: Floats,
    /// `[query][v_stride]`: one split's weighted sum of values.
    part: Floats,
    /// `[query][v_stride]`: the same, merged.
    sum: Floats,
    /// The largest score so far and the sum of exponentials below it.
    max: [f32; VECTORED],
    total: [f32; VECTORED],
    /// The same times the scales of values (8-bit cells), of two neighbouring scales.
    weighed: [Floats; 2],
    /// Addresses of the queries.
    q: [*const f32; QUERIES],
    /// Addresses of one split's blocks.
    blocks: [(*const u8, *const u8); SPLIT / BLOCK],
}

// SAFETY: the addresses are written and read within one call.
unsafe impl Send for Scratch {}

impl Scratch {
    /// Room for value heads of `v_stride` elements.
    pub(crate) fn new(v_stride: usize) -> Scratch {
        Scratch {
            scores: Floats::zeroed(QUERIES * SPLIT),
            part: Floats::zeroed(QUERIES * v_stride),
            sum: Floats::zeroed(QUERIES * v_stride),
            max: [0.0; VECTORED],
            total: [0.0; VECTORED],
            weighed: [Floats::zeroed(QUERIES * SPLIT), Floats::zeroed(QUERIES * SPLIT)],
            q: [std::ptr::null(); QUERIES],
            blocks: [(std::ptr::null(), std::ptr::null()); SPLIT / BLOCK],
        }
    }

    /// Nothing seen yet by any query.
    fn clear(&mut self, queries: usize, v_stride: usize) {
        assert!(queries <= QUERIES && queries * v_stride <= self.sum.len());
        self.max[..queries].fill(f32::NEG_INFINITY);
        self.total[..queries].fill(0.0);
        self.sum[..queries * v_stride].fill(0.0);
    }
}

/// Runs one call.
///
/// # Safety
/// As [`Lanes`]; the addresses in `a` are good for its sizes, `rows · heads` is at most
/// [`QUERIES`], and nobody writes the blocks meanwhile.
#[inline(always)]
pub(super) unsafe fn attend<L: Lanes>(a: &Attend<'_>, s: &mut Scratch) {
    // SAFETY: the caller's word.
    unsafe {
        match a.cell {
            Cell::F32 => run::<L, AsF32>(a, s),
            Cell::F16 => run::<L, AsF16>(a, s),
            Cell::Q8 => run::<L, AsQ8>(a, s),
        }
    }
}

#[inline(always)]
unsafe fn run<L: Lanes, E: Elements>(a: &Attend<'_>, s: &mut Scratch) {
    let queries = a.rows * a.heads;
    s.clear(queries, a.v_stride);
    let end = a.pos + a.rows;
    let mut start = (a.pos + 1).saturating_sub(a.window);
    while start < end {
        let base = start / SPLIT * SPLIT;
        // SAFETY: the caller's word.
        unsafe {
            let softmax = one_split::<L, E>(a, s, base, start - base..(end - base).min(SPLIT));
            let mut max = [f32::NEG_INFINITY; VECTORED];
            for m in 0..queries {
                max[m] = softmax[m].map_or(f32::NEG_INFINITY, |(max, _)| max);
            }
            let mut weights = [[0.0; VECTORED]; 2];
            for m in (0..queries).step_by(16) {
                let (old, new) = (L::load(s.max[m..].as_ptr()), L::load(max[m..].as_ptr()));
                let both = exponentials::<L>(old, new);
                both[0].store(weights[0][m..].as_mut_ptr());
                both[1].store(weights[1][m..].as_mut_ptr());
            }
            for m in 0..queries {
                if let Some(softmax) = softmax[m] {
                    let part = s.part[m * a.v_stride..].as_ptr();
                    let weights = [weights[0][m], weights[1][m]];
                    merge::<L>(s, m, a.v_stride, part, softmax, weights);
                }
            }
        }
        start = base + SPLIT;
    }
    for m in 0..queries {
        // SAFETY: the caller's word.
        unsafe { finish::<L>(a, s, m) }
    }
}

/// One split on its own, for every query: maximum and sum of exponentials (none where it sees
/// nothing of the split), the weighted values in `part`.
#[inline(always)]
unsafe fn one_split<L: Lanes, E: Elements>(
    a: &Attend<'_>,
    s: &mut Scratch,
    base: usize,
    keys: std::ops::Range<usize>,
) -> [Option<(f32, f32)>; QUERIES] {
    let queries = a.rows * a.heads;
    let mut all = [None; QUERIES];
    // SAFETY: the caller's word; all keys of the range are this sequence's own.
    unsafe {
        let these = keys.start / BLOCK..keys.end.div_ceil(BLOCK);
        for row in 0..a.rows {
            for head in 0..a.heads {
                s.q[row * a.heads + head] = a.q.add(row * a.q_stride + head * a.k_width);
            }
        }
        for b in these.clone() {
            s.blocks[b] = (a.block)(base / BLOCK + b);
        }
        // Blocks lie far apart, so nothing but this brings the next one.
        let behind = match base + SPLIT < a.pos + a.rows {
            true => (a.block)((base + SPLIT) / BLOCK).0,
            false => std::ptr::null(),
        };
        for b in these.clone() {
            let next = if b + 1 < these.end { s.blocks[b + 1].0 } else { s.blocks[these.start].1 };
            let last = keys.end.div_ceil(16) - b * (BLOCK / 16);
            score::<L, E>(a, s, b, last.min(BLOCK / 16), next);
        }
        for m in 0..queries {
            let pos = a.pos + m / a.heads;
            let from = (pos + 1).saturating_sub(a.window).max(base) - base;
            let to = (pos + 1).min(base + SPLIT).saturating_sub(base);
            let p = &mut s.scores[m * SPLIT..][..SPLIT];
            if from < to {
                all[m] = Some(softmax::<L>(p, keys.clone(), from..to, a));
            } else {
                p.fill(0.0);
            }
        }
        values::<L, E>(a, s, base, keys, behind);
    }
    all
}

/// Queries up to which a pass over a block asks for the next one: more take longer than memory.
const FEW: usize = 8;

/// The first of the fewest and most equal parts of `left`, each at most `most`.
#[inline(always)]
fn fair(left: usize, most: usize) -> usize {
    left.div_ceil(left.div_ceil(most))
}

/// Evaluates `$call` with the constant `$n` equal to a count of 1 to 12.
macro_rules! with_count {
    ($count:expr, $n:ident => $call:expr) => {
        with_count!(@ $count, $n, $call, 1 2 3 4 5 6 7 8 9 10 11)
    };
    (@ $count:expr, $n:ident, $call:expr, $($k:literal)*) => {
        match $count {
            $($k => {
                const $n: usize = $k;
                $call
            })*
            _ => {
                const $n: usize = 12;
                $call
            }
        }
    };
}

/// Scores of block `b` of the split for every query, of its first `vectors` vectors of keys where that is less; `next`
/// will be read after it.
#[inline(always)]
unsafe fn score<L: Lanes, E: Elements>(
    a: &Attend<'_>,
    s: &mut Scratch,
    b: usize,
    vectors: usize,
    next: *const u8,
) {
    let queries = a.rows * a.heads;
    let keys = s.blocks[b].0;
    let mut m = 0;
    // SAFETY: the caller's word.
    unsafe {
        while m < queries {
            let out = s.scores.as_mut_ptr().add(m * SPLIT + b * BLOCK);
            let left = queries - m;
            // As many queries as there are registers for, so that keys are widened once for all
            // of them.
            m += if L::REGISTERS >= 16 {
                match (fair(left, 12), vectors) {
                    (12, 1) => score_some::<L, E, 12, 1>(s, keys, a.k_width, m, vectors, out, next),
                    (n, _) => with_count!(n, N => {
                        score_some::<L, E, N, 2>(s, keys, a.k_width, m, BLOCK / 16, out, next)
                    }),
                }
            } else if L::REGISTERS >= 4 {
                match left {
                    4.. => score_some::<L, E, 4, 1>(s, keys, a.k_width, m, vectors, out, next),
                    3 => score_some::<L, E, 3, 1>(s, keys, a.k_width, m, vectors, out, next),
                    2 => score_some::<L, E, 2, 1>(s, keys, a.k_width, m, vectors, out, next),
                    _ => score_some::<L, E, 1, 2>(s, keys, a.k_width, m, BLOCK / 16, out, next),
                }
            } else {
                score_some::<L, E, 1, 1>(s, keys, a.k_width, m, vectors, out, next)
            };
        }
    }
}

/// Scores of `vectors` vectors of keys of width `k` for `M` queries, `H` of them at a time; returns `M`.
#[inline(always)]
unsafe fn score_some<L: Lanes, E: Elements, const M: usize, const H: usize>(
    s: &Scratch,
    keys: *const u8,
    k: usize,
    first: usize,
    vectors: usize,
    out: *mut f32,
    next: *const u8,
) -> usize {
    // SAFETY: the caller's word.
    unsafe {
        let mut q = [std::ptr::null(); M];
        q.copy_from_slice(&s.q[first..first + M]);
        for half in (0..vectors).step_by(H) {
            let mut sums = [[L::splat(0.0); H]; M];
            let step = if E::SCALED { 32 } else { k };
            for from in (0..k).step_by(step) {
                let mut acc = [[L::splat(0.0); H]; M];
                for i in from..from + step {
                    if M <= FEW && (half > 0 || H == 2) && (i * BLOCK * E::BYTES).is_multiple_of(64)
                    {
                        prefetch(next.wrapping_add(i * BLOCK * E::BYTES));
                    }
                    let mut key = [L::splat(0.0); H];
                    for h in 0..H {
                        key[h] = E::load(keys, i * BLOCK + (half + h) * 16);
                    }
                    for m in 0..M {
                        let q = L::splat(*q[m].add(i));
                        for h in 0..H {
                            acc[m][h] = acc[m][h].add_product(q, key[h]);
                        }
                    }
                }
                if E::SCALED {
                    let scales = keys.add(k * BLOCK).cast::<u16>().add(from / 32 * BLOCK);
                    if M <= FEW {
                        prefetch(next.wrapping_add((k + from / 32 * 2) * BLOCK));
                    }
                    for h in 0..H {
                        let d = L::load_f16(scales.add((half + h) * 16));
                        for m in 0..M {
                            sums[m][h] = sums[m][h].add(acc[m][h].mul(d));
                        }
                    }
                } else {
                    sums = acc;
                }
            }
            for m in 0..M {
                for h in 0..H {
                    sums[m][h].store(out.add(m * SPLIT + (half + h) * 16));
                }
            }
        }
    }
    M
}

/// Turns the scores `seen` of a split into exponentials below their maximum and the rest of
/// `keys` into zeros; returns the maximum and the sum.
#[inline(always)]
unsafe fn softmax<L: Lanes>(
    p: &mut [f32],
    keys: std::ops::Range<usize>,
    seen: std::ops::Range<usize>,
    a: &Attend<'_>,
) -> (f32, f32) {
    let (from, to) = (keys.start / 16 * 16, keys.end.next_multiple_of(16));
    // SAFETY: `from..to` lies within the split, in whole vectors.
    unsafe {
        math::scale_and_cap::<L>(p.as_mut_ptr().add(from), to - from, a.scale, a.cap);
        p[from..seen.start].fill(f32::NEG_INFINITY);
        p[seen.end..to].fill(f32::NEG_INFINITY);
        let p = p.as_mut_ptr();
        let mut max = L::splat(f32::NEG_INFINITY);
        for i in (from..to).step_by(16) {
            max = max.max(L::load(p.add(i)));
        }
        let max = max.largest();
        let mut total = L::splat(0.0);
        for i in (from..to).step_by(16) {
            let e = math::exp(L::load(p.add(i)).sub(L::splat(max)));
            e.store(p.add(i));
            total = total.add(e);
        }
        (max, total.sum())
    }
}

/// The weighted sums of a split's values into `part`.
#[inline(always)]
unsafe fn values<L: Lanes, E: Elements>(
    a: &Attend<'_>,
    s: &mut Scratch,
    base: usize,
    keys: std::ops::Range<usize>,
    behind: *const u8,
) {
    let (vectors, queries) = (a.v_stride / 16, a.rows * a.heads);
    let mut w = 0;
    // SAFETY: the caller's word.
    unsafe {
        while w < vectors {
            // Two neighbouring vectors share a scale; a width has whole pairs of them.
            let wide = 4.min(vectors - w);
            if E::SCALED {
                for of in w / 2..(w + wide) / 2 {
                    weigh::<L>(a, s, keys.clone(), queries, of);
                }
            }
            let mut m = 0;
            while m < queries {
                let left = queries - m;
                let keys = keys.clone();
                m += if L::REGISTERS >= 16 && wide == 4 {
                    let n = fair(left, 6);
                    // Those that the last of these queries sees; the others weigh nothing.
                    let seen = a.pos + (m + n - 1) / a.heads + 1;
                    let keys = keys.start..seen.saturating_sub(base).clamp(keys.start, keys.end);
                    match n {
                        6 => values_some::<L, E, 6, 4>(a, s, keys, m, w, behind),
                        5 => values_some::<L, E, 5, 4>(a, s, keys, m, w, behind),
                        4 => values_some::<L, E, 4, 4>(a, s, keys, m, w, behind),
                        3 => values_some::<L, E, 3, 4>(a, s, keys, m, w, behind),
                        2 => values_some::<L, E, 2, 4>(a, s, keys, m, w, behind),
                        _ => values_some::<L, E, 1, 4>(a, s, keys, m, w, behind),
                    }
                } else if L::REGISTERS >= 16 && wide == 2 {
                    with_count!(fair(left, 12), N => values_some::<L, E, N, 2>(a, s, keys, m, w, behind))
                } else if L::REGISTERS >= 4 && left >= 4 {
                    values_wide::<L, E, 4>(a, s, keys, m, w, wide, behind)
                } else if L::REGISTERS >= 4 && wide == 4 {
                    values_some::<L, E, 1, 4>(a, s, keys, m, w, behind)
                } else if L::REGISTERS >= 4 && wide == 2 {
                    values_some::<L, E, 1, 2>(a, s, keys, m, w, behind)
                } else {
                    values_wide::<L, E, 1>(a, s, keys, m, w, wide, behind)
                };
            }
            w += wide;
        }
    }
}

/// The weights of a split's keys times the scales of 8-bit values of the 32 elements from `32 ·
/// of` on, for every query.
#[inline(always)]
unsafe fn weigh<L: Lanes>(
    a: &Attend<'_>,
    s: &mut Scratch,
    keys: std::ops::Range<usize>,
    queries: usize,
    of: usize,
) {
    // SAFETY: the caller's word; whole vectors lie within a split and a block.
    unsafe {
        for t in (keys.start / 16 * 16..keys.end).step_by(16) {
            let block = s.blocks[t / BLOCK].1;
            let scales = block.add(BLOCK * a.v_stride).cast::<u16>().add(of * BLOCK);
            let d = L::load_f16(scales.add(t % BLOCK));
            for m in 0..queries {
                let p = L::load(s.scores.as_ptr().add(m * SPLIT + t));
                p.mul(d).store(s.weighed[of % 2].as_mut_ptr().add(m * SPLIT + t));
            }
        }
    }
}

/// As [`values_some`] for `wide` vectors, one after the other.
#[inline(always)]
unsafe fn values_wide<L: Lanes, E: Elements, const M: usize>(
    a: &Attend<'_>,
    s: &mut Scratch,
    keys: std::ops::Range<usize>,
    first: usize,
    w: usize,
    wide: usize,
    behind: *const u8,
) -> usize {
    for w in w..w + wide {
        // SAFETY: the caller's word.
        unsafe { values_some::<L, E, M, 1>(a, s, keys.clone(), first, w, behind) };
    }
    M
}

/// The weighted sums of `W` vectors of the values for `M` queries; returns `M`.
#[inline(always)]
unsafe fn values_some<L: Lanes, E: Elements, const M: usize, const W: usize>(
    a: &Attend<'_>,
    s: &mut Scratch,
    keys: std::ops::Range<usize>,
    first: usize,
    w: usize,
    behind: *const u8,
) -> usize {
    let ask = a.rows * a.heads <= FEW;
    // SAFETY: the caller's word.
    unsafe {
        // The weights of every pair of vectors.
        let weights = [0, 1].map(|pair: usize| match E::SCALED {
            true => s.weighed[(w / 2 + pair) % 2].as_ptr().wrapping_add(first * SPLIT),
            false => s.scores.as_ptr().wrapping_add(first * SPLIT),
        });
        let mut acc = [[L::splat(0.0); W]; M];
        let mut from = keys.start;
        while from < keys.end {
            let (b, to) = (from / BLOCK, (from / BLOCK * BLOCK + BLOCK).min(keys.end));
            let at = s.blocks[b].1;
            let next = if to < keys.end { s.blocks[b + 1].1 } else { behind };
            for t in from..to {
                let row = t % BLOCK * a.v_stride + w * 16;
                if M <= FEW && ask {
                    lines(next.wrapping_add(row * E::BYTES), W * 16 * E::BYTES);
                }
                let mut v = [L::splat(0.0); W];
                for j in 0..W {
                    v[j] = E::load(at, row + j * 16);
                }
                for m in 0..M {
                    let mut weight = L::splat(*weights[0].add(m * SPLIT + t));
                    for j in 0..W {
                        if E::SCALED && j == 2 {
                            weight = L::splat(*weights[1].add(m * SPLIT + t));
                        }
                        acc[m][j] = acc[m][j].add_product(weight, v[j]);
                    }
                }
            }
            from = to;
        }
        for m in 0..M {
            for j in 0..W {
                let to = s.part.as_mut_ptr().add((first + m) * a.v_stride + (w + j) * 16);
                acc[m][j].store(to);
            }
        }
    }
    M
}
