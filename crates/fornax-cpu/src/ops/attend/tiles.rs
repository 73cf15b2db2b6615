//! Attention of many rows of one sequence with tiles of 16-bit floats (AMX), for prompts that may round differently. It
//! knows no plan, no pool and no block table beyond its addresses.
//!
//! Keys (f16) and queries are parted into two bfloat16 each, the second what the first leaves: three products of four
//! are made, so that scores are good to some 2⁻¹⁶. Weights and values are rounded to one bfloat16; sums are f32.
//! Keys are taken in splits of 256 at fixed positions and merged into a running softmax, 32 queries at a time.
//!
//! ```text
//! queries   [query][element], first parts, then second parts
//! keys      [32 keys][half of them][32 elements]: 16 pairs of elements × 16 keys × 2, both parts
//! values    [16 elements][32 keys]: 16 pairs of keys × 16 elements × 2
//! ```

use std::arch::x86_64::*;

use super::room::{Places, TOGETHER, TileScratch};
use super::{Attend, BLOCK, SPLIT, TILE_QUERIES, fits};
use crate::matrix::amx::{FULL, Silicon, Unit};
use crate::ops::math;
use crate::ops::x86::Avx512;

/// Bytes of a register.
const TILE: usize = 1024;

/// [`attend_with`] on the processor's own unit.
///
/// # Safety
/// As there.
pub(in crate::ops) unsafe fn attend(a: &Attend<'_>, s: &mut TileScratch) {
    // SAFETY: the caller's word.
    unsafe {
        attend_with(a, s, &mut Silicon);
        Silicon.close();
    }
}

/// Runs one call: as `super::attend` does, but for its roundings.
///
/// # Safety
/// The tier and the unit are there; the addresses in `a` are good for its sizes, `rows · heads` is at most
/// [`TILE_QUERIES`], the shape [`fits`], and nobody writes the blocks meanwhile.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(in crate::ops) unsafe fn attend_with<U: Unit>(
    a: &Attend<'_>,
    s: &mut TileScratch,
    unit: &mut U,
) {
    let queries = a.rows * a.heads;
    assert!(queries <= TILE_QUERIES && fits(a.cell, a.k_width, a.v_width));
    let places = s.places(a.k_width, a.v_width);
    s.max[..queries].fill(f32::NEG_INFINITY);
    s.total[..queries].fill(0.0);
    let end = a.pos + a.rows;
    let mut start = (a.pos + 1).saturating_sub(a.window);
    // SAFETY: the caller's word; the places are as large as the shapes say.
    unsafe {
        unit.shape(&FULL);
        take_queries(a, &places);
        std::ptr::write_bytes(places.sums, 0, queries.next_multiple_of(TOGETHER) * a.v_width);
        while start < end {
            let base = start / SPLIT * SPLIT;
            let keys = start - base..(end - base).min(SPLIT);
            for b in keys.start / BLOCK..keys.end.div_ceil(BLOCK) {
                let (k, v) = (a.block)(base / BLOCK + b);
                take_keys(a, &places, b, k.cast());
                take_values(a, &places, b, v.cast(), (end - base - b * BLOCK).min(BLOCK));
            }
            for first in (0..queries).step_by(TOGETHER) {
                some(a, s, &places, unit, base, first);
            }
            start = base + SPLIT;
        }
        for m in 0..queries {
            finish(a, s, &places, m);
        }
    }
}

/// The upper halves of `x` and `y`, side by side lane by lane: two bfloat16 cut short.
#[inline(always)]
unsafe fn pairs(x: __m512, y: __m512) -> __m512i {
    // SAFETY: the caller's word that the features are there.
    unsafe {
        let high = _mm512_and_si512(_mm512_castps_si512(y), _mm512_set1_epi32(-1 << 16));
        _mm512_or_si512(high, _mm512_srli_epi32::<16>(_mm512_castps_si512(x)))
    }
}

/// What is left of `x` when its upper half is taken.
#[inline(always)]
unsafe fn rest(x: __m512) -> __m512 {
    // SAFETY: the caller's word that the features are there.
    unsafe {
        let high = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(-1 << 16));
        _mm512_sub_ps(x, _mm512_castsi512_ps(high))
    }
}

/// `x` with half a step of a bfloat16 added, so that its upper half is rounded.
#[inline(always)]
unsafe fn rounded(x: __m512) -> __m512 {
    // SAFETY: the caller's word that the features are there.
    unsafe {
        let sum = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(1 << 15));
        _mm512_castsi512_ps(sum)
    }
}

/// The upper halves of `x`.
#[inline(always)]
unsafe fn upper(x: __m512) -> __m256i {
    // SAFETY: the caller's word that the features are there.
    unsafe { _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_castps_si512(x))) }
}

/// Both parts of every query, times the scale (and log₂ e, where nothing comes between a score and its exponential).
#[inline(always)]
unsafe fn take_queries(a: &Attend<'_>, to: &Places) {
    let by = if a.cap == 0.0 { a.scale * std::f32::consts::LOG2_E } else { a.scale };
    let queries = a.rows * a.heads;
    // SAFETY: the caller's word.
    unsafe {
        let by = _mm512_set1_ps(by);
        for m in 0..queries.next_multiple_of(TOGETHER) {
            let from = a.q.wrapping_add(m / a.heads * a.q_stride + m % a.heads * a.k_width);
            for i in (0..a.k_width).step_by(16) {
                let x = match m < queries {
                    true => _mm512_mul_ps(_mm512_loadu_ps(from.add(i)), by),
                    false => _mm512_setzero_ps(),
                };
                let at = m * a.k_width + i;
                _mm256_storeu_si256(to.queries[0].add(at).cast(), upper(x));
                _mm256_storeu_si256(to.queries[1].add(at).cast(), upper(rest(x)));
            }
        }
    }
}

/// Both parts of block `b` of the keys.
#[inline(always)]
unsafe fn take_keys(a: &Attend<'_>, to: &Places, b: usize, keys: *const u16) {
    let steps = a.k_width / 32;
    // SAFETY: the caller's word.
    unsafe {
        for half in 0..2 {
            for pair in 0..a.k_width / 2 {
                let load = |i: usize| {
                    let at = keys.add((2 * pair + i) * BLOCK + half * 16);
                    _mm512_cvtph_ps(_mm256_loadu_si256(at.cast()))
                };
                let (x, y) = (load(0), load(1));
                let at = ((b * 2 + half) * steps + pair / 16) * (TILE / 2) + pair % 16 * 32;
                _mm512_storeu_si512(to.keys[0].add(at).cast(), pairs(x, y));
                _mm512_storeu_si512(to.keys[1].add(at).cast(), pairs(rest(x), rest(y)));
            }
        }
    }
}

/// The first `tokens` values of block `b`; zeros behind them, where anything may lie.
#[inline(always)]
unsafe fn take_values(a: &Attend<'_>, to: &Places, b: usize, values: *const u16, tokens: usize) {
    // SAFETY: the caller's word.
    unsafe {
        for pair in 0..BLOCK / 2 {
            for c in 0..a.v_width / 16 {
                let load = |i: usize| {
                    let token = 2 * pair + i;
                    let at = values.add(token * a.v_stride + c * 16);
                    match token < tokens {
                        true => rounded(_mm512_cvtph_ps(_mm256_loadu_si256(at.cast()))),
                        false => _mm512_setzero_ps(),
                    }
                };
                let at = (c * (SPLIT / BLOCK) + b) * (TILE / 2) + pair * 32;
                _mm512_storeu_si512(to.values.add(at).cast(), pairs(load(0), load(1)));
            }
        }
    }
}

/// One split for up to [`TOGETHER`] queries from `first` on.
#[inline(always)]
unsafe fn some<U: Unit>(
    a: &Attend<'_>,
    s: &mut TileScratch,
    to: &Places,
    unit: &mut U,
    base: usize,
    first: usize,
) {
    let count = (a.rows * a.heads - first).min(TOGETHER);
    let seen = |m: usize| {
        let pos = a.pos + m / a.heads;
        let from = (pos + 1).saturating_sub(a.window).max(base) - base;
        from..(pos + 1).min(base + SPLIT).saturating_sub(base)
    };
    let keys = seen(first).start..seen(first + count - 1).end;
    if keys.is_empty() {
        return;
    }
    let blocks = keys.start / BLOCK..keys.end.div_ceil(BLOCK);
    // SAFETY: the caller's word.
    unsafe {
        for b in blocks.clone() {
            scores(a, to, unit, b, first);
        }
        for ix in 0..TOGETHER {
            let m = first + ix;
            let range = if ix < count { seen(m) } else { 0..0 };
            softmax(a, s, to, ix, m, range, blocks.clone());
        }
        for c in (0..a.v_width / 16).step_by(2) {
            values(a, to, unit, blocks.clone(), first, c);
        }
    }
}

/// Scores of block `b` of the split.
#[inline(always)]
unsafe fn scores<U: Unit>(a: &Attend<'_>, to: &Places, unit: &mut U, b: usize, first: usize) {
    let (k, steps) = (a.k_width, a.k_width / 32);
    let query = |part: usize, half: usize, step: usize| {
        to.queries[part].wrapping_add((first + half * 16) * k + step * 32).cast::<u8>()
    };
    let key = |part: usize, half: usize, step: usize| {
        to.keys[part].wrapping_add(((b * 2 + half) * steps + step) * (TILE / 2)).cast::<u8>()
    };
    // SAFETY: the caller's word.
    unsafe {
        unit.zero::<0>();
        unit.zero::<1>();
        unit.zero::<2>();
        unit.zero::<3>();
        for step in 0..steps {
            // Second parts of queries, then their first, with the first of keys; then with the second.
            unit.load::<4>(query(1, 0, step), 2 * k);
            unit.load::<6>(key(0, 0, step), 64);
            unit.dot_halves::<0, 4, 6>();
            unit.load::<7>(key(0, 1, step), 64);
            unit.dot_halves::<1, 4, 7>();
            unit.load::<5>(query(1, 1, step), 2 * k);
            unit.dot_halves::<2, 5, 6>();
            unit.dot_halves::<3, 5, 7>();
            unit.load::<4>(query(0, 0, step), 2 * k);
            unit.dot_halves::<0, 4, 6>();
            unit.dot_halves::<1, 4, 7>();
            unit.load::<5>(query(0, 1, step), 2 * k);
            unit.dot_halves::<2, 5, 6>();
            unit.dot_halves::<3, 5, 7>();
            unit.load::<6>(key(1, 0, step), 64);
            unit.dot_halves::<0, 4, 6>();
            unit.dot_halves::<2, 5, 6>();
            unit.load::<7>(key(1, 1, step), 64);
            unit.dot_halves::<1, 4, 7>();
            unit.dot_halves::<3, 5, 7>();
        }
        let to = to.scores.add(b * BLOCK);
        unit.store_apart::<0>(to.cast(), 4 * SPLIT);
        unit.store_apart::<1>(to.add(16).cast(), 4 * SPLIT);
        unit.store_apart::<2>(to.add(16 * SPLIT).cast(), 4 * SPLIT);
        unit.store_apart::<3>(to.add(16 * SPLIT + 16).cast(), 4 * SPLIT);
    }
}

/// Weights of query `ix` of those together, which is `m` of all and sees the keys `seen`; zeros for the rest of
/// `blocks`.
#[inline(always)]
unsafe fn softmax(
    a: &Attend<'_>,
    s: &mut TileScratch,
    to: &Places,
    ix: usize,
    m: usize,
    seen: std::ops::Range<usize>,
    blocks: std::ops::Range<usize>,
) {
    let (from, end) = (blocks.start * BLOCK, blocks.end * BLOCK);
    // SAFETY: the caller's word.
    unsafe {
        let (p, weights) = (to.scores.add(ix * SPLIT), to.weights.add(ix * SPLIT));
        if seen.is_empty() {
            return std::ptr::write_bytes(weights.add(from), 0, end - from);
        }
        if a.cap != 0.0 {
            math::scale_and_cap::<Avx512>(p.add(from), end - from, 1.0, a.cap);
            for i in (from..end).step_by(16) {
                let log = _mm512_set1_ps(std::f32::consts::LOG2_E);
                _mm512_storeu_ps(p.add(i), _mm512_mul_ps(_mm512_loadu_ps(p.add(i)), log));
            }
        }
        let none = _mm512_set1_ps(f32::NEG_INFINITY);
        let is_whole = |i: usize| seen.start <= i && i + 16 <= seen.end;
        let load = |i: usize| {
            if is_whole(i) {
                return _mm512_loadu_ps(p.add(i));
            }
            // Lanes that are seen.
            let below = |n: usize| (1u32 << n.saturating_sub(i).min(16)) - 1;
            let mask = (below(seen.end) & !below(seen.start)) as u16;
            _mm512_mask_loadu_ps(none, mask, p.add(i))
        };
        let some = seen.start / 16 * 16..seen.end.next_multiple_of(16);
        let mut max = none;
        for i in some.clone().step_by(16) {
            max = _mm512_max_ps(max, load(i));
        }
        let max = _mm512_reduce_max_ps(max).max(s.max[m]);
        let largest = _mm512_set1_ps(max);
        let mut total = _mm512_setzero_ps();
        std::ptr::write_bytes(weights.add(from), 0, some.start - from);
        for i in some.clone().step_by(16) {
            // Of the weights as they are multiplied.
            let e = rounded(exp2(_mm512_sub_ps(load(i), largest)));
            let e = _mm512_and_si512(_mm512_castps_si512(e), _mm512_set1_epi32(-1 << 16));
            let e = _mm512_castsi512_ps(e);
            total = _mm512_add_ps(total, e);
            _mm256_storeu_si256(weights.add(i).cast(), upper(e));
        }
        std::ptr::write_bytes(weights.add(some.end), 0, end - some.end);
        let old = exp2(_mm512_set1_ps(s.max[m] - max));
        s.total[m] = s.total[m] * _mm512_cvtss_f32(old) + _mm512_reduce_add_ps(total);
        if max > s.max[m] {
            for i in (0..a.v_width).step_by(16) {
                let sum = to.sums.add(m * a.v_width + i);
                _mm512_storeu_ps(sum, _mm512_mul_ps(_mm512_loadu_ps(sum), old));
            }
        }
        s.max[m] = max;
    }
}

/// 2ˣ for x ≤ 0, to 4e-5 of itself; 0 below −126, so that nothing is subnormal.
#[inline(always)]
unsafe fn exp2(x: __m512) -> __m512 {
    /// ln 2 to the power n, by n!.
    const TAYLOR: [f32; 4] = [0.009_618_13, 0.055_504_11, 0.240_226_5, std::f32::consts::LN_2];
    // SAFETY: the caller's word that the features are there.
    unsafe {
        let least = _mm512_set1_ps(-126.0);
        // What is no number stays none.
        let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, least);
        let x = _mm512_max_ps(least, x);
        let n = _mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(x);
        let r = _mm512_sub_ps(x, n);
        let mut p = _mm512_set1_ps(TAYLOR[0]);
        for c in &TAYLOR[1..] {
            p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(*c));
        }
        _mm512_maskz_scalef_ps(keep, _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0)), n)
    }
}

/// Adds the weighted values of some blocks to elements `16 · c` to `16 · c + 31` of the sums.
#[inline(always)]
unsafe fn values<U: Unit>(
    a: &Attend<'_>,
    to: &Places,
    unit: &mut U,
    blocks: std::ops::Range<usize>,
    first: usize,
    c: usize,
) {
    let step = 4 * a.v_width;
    let sum = |half: usize, of: usize| {
        to.sums.wrapping_add((first + half * 16) * a.v_width + (c + of) * 16).cast::<u8>()
    };
    let weight =
        |half: usize, b: usize| to.weights.wrapping_add(half * 16 * SPLIT + b * BLOCK).cast::<u8>();
    let value = |of: usize, b: usize| {
        to.values.wrapping_add(((c + of) * (SPLIT / BLOCK) + b) * (TILE / 2)).cast::<u8>()
    };
    // SAFETY: the caller's word.
    unsafe {
        unit.load::<0>(sum(0, 0), step);
        unit.load::<1>(sum(0, 1), step);
        unit.load::<2>(sum(1, 0), step);
        unit.load::<3>(sum(1, 1), step);
        for b in blocks {
            unit.load::<4>(weight(0, b), 2 * SPLIT);
            unit.load::<6>(value(0, b), 64);
            unit.dot_halves::<0, 4, 6>();
            unit.load::<7>(value(1, b), 64);
            unit.dot_halves::<1, 4, 7>();
            unit.load::<5>(weight(1, b), 2 * SPLIT);
            unit.dot_halves::<2, 5, 6>();
            unit.dot_halves::<3, 5, 7>();
        }
        unit.store_apart::<0>(sum(0, 0), step);
        unit.store_apart::<1>(sum(0, 1), step);
        unit.store_apart::<2>(sum(1, 0), step);
        unit.store_apart::<3>(sum(1, 1), step);
    }
}

/// Adds the sink, divides, and writes the head out.
#[inline(always)]
unsafe fn finish(a: &Attend<'_>, s: &TileScratch, to: &Places, m: usize) {
    let (row, head) = (m / a.heads, m % a.heads);
    let (mut factor, mut total) = (1.0f32, s.total[m]);
    if let Some(sink) = a.sinks.get(head) {
        let (sink, max) = (sink * std::f32::consts::LOG2_E, s.max[m]);
        let largest = max.max(sink);
        factor = (max - largest).exp2();
        total = total * factor + (sink - largest).exp2();
    }
    // SAFETY: the caller's word.
    unsafe {
        let out = a.out.add(row * a.out_stride + head * a.v_width);
        let by = _mm512_set1_ps(factor / total);
        for i in (0..a.v_width).step_by(16) {
            let sum = _mm512_loadu_ps(to.sums.add(m * a.v_width + i));
            _mm512_storeu_ps(out.add(i), _mm512_mul_ps(sum, by));
        }
    }
}
