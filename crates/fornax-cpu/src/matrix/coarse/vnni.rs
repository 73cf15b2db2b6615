//! The products of [`super`] with the dot products of AVX-512: sixteen rows of activations meet a tile's span, a
//! register of sums each. It must not know models or threads.
//!
//! `vpdpbusd` takes unsigned weights: theirs are taken 128 too high, and the sum starts at −128 · Σq. Loads for each
//! sixteen rows of both kinds and quad: 64 bytes of weights, four of each row of activations; sums of 32 bits.

use std::arch::x86_64::*;

use super::super::Matrix;
use super::{
    CoarseKernels, CoarseMatrix, Job, ROWS, SPAN, STEP, STEP_BYTES, STEPS, TILE, flat, spans, steps,
};

/// The routines of this tier.
pub(super) static KERNELS: CoarseKernels = CoarseKernels { multiply, quantize, fill_tile };

/// Groups of sixteen rows of one call, at most.
pub(super) const GROUPS: usize = ROWS / TILE;

/// # Safety
/// As for [`super::CoarseMatrix::multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn multiply(job: &Job<'_>) {
    let cols = job.matrix.cols;
    let groups = job.act_rows.start / TILE..job.act_rows.end.div_ceil(TILE);
    for tile in job.tiles.clone() {
        let mut acc = [[_mm512_setzero_ps(); TILE]; GROUPS];
        for span in 0..spans(cols) {
            let n = STEPS.min(steps(cols) - span * STEPS);
            let at = span * STEPS * STEP_BYTES;
            for (group, acc) in groups.clone().zip(&mut acc) {
                // SAFETY: the caller's word; tile, span and group are within the job.
                unsafe {
                    let w = job.matrix.tile(tile).add(at);
                    let x = job.acts.group(group).add(at);
                    let sums = sums(w, x, n, job.acts.lift(group, span));
                    let dw = _mm512_loadu_ps(job.matrix.scale(tile, span));
                    let dx = job.acts.scale(group, span);
                    for (row, acc) in acc.iter_mut().enumerate() {
                        let scale = _mm512_mul_ps(dw, _mm512_set1_ps(*dx.add(row)));
                        *acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[row]), scale, *acc);
                    }
                }
            }
        }
        // SAFETY: the caller's word.
        unsafe { put(job, tile, |group, row| acc[group][row]) };
    }
}

/// The integer sums of `n` steps of sixteen rows.
///
/// # Safety
/// The steps exist, and the features are there.
#[inline(always)]
unsafe fn sums(w: *const u8, x: *const u8, n: usize, lift: *const i32) -> [__m512i; TILE] {
    // SAFETY: the caller's word.
    unsafe {
        let mut sums = [_mm512_setzero_si512(); TILE];
        for (row, sum) in sums.iter_mut().enumerate() {
            *sum = _mm512_set1_epi32(*lift.add(row));
        }
        let high = _mm512_set1_epi8(-128);
        for step in 0..n {
            let (w, x) = (w.add(step * STEP_BYTES), x.add(step * STEP_BYTES));
            for quad in 0..TILE {
                let w = _mm512_xor_si512(_mm512_loadu_si512(w.add(quad * 64).cast()), high);
                let x = x.add(quad * 4).cast::<i32>();
                for (row, sum) in sums.iter_mut().enumerate() {
                    let x = _mm512_set1_epi32(x.add(row * STEP / 4).read());
                    *sum = _mm512_dpbusd_epi32(*sum, w, x);
                }
            }
        }
        sums
    }
}

/// Writes what the rows of the job have of a tile.
///
/// # Safety
/// `sum` counts groups from that of the job's first row; the outputs are the caller's to give, and the features there.
#[inline(always)]
pub(super) unsafe fn put(job: &Job<'_>, tile: usize, sum: impl Fn(usize, usize) -> __m512) {
    let columns = TILE.min(job.matrix.rows - tile * TILE);
    let mask = ((1u32 << columns) - 1) as u16;
    let first = job.act_rows.start / TILE * TILE;
    for row in job.act_rows.clone() {
        let v = sum((row - first) / TILE, row % TILE);
        let to = job.out.wrapping_add((row - job.act_rows.start) * job.stride + tile * TILE);
        // SAFETY: the caller's word.
        unsafe { _mm512_mask_storeu_ps(to, mask, v) };
    }
}

/// As [`CoarseMatrix::fill_tile`].
///
/// # Safety
/// As there, and the tier is available.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn fill_tile(to: &CoarseMatrix, from: &Matrix, tile: usize, room: &mut [f32]) {
    // SAFETY: the caller's word.
    unsafe { to.fill_tile(from, tile, room, quantize) }
}

/// As [`CoarseKernels::quantize`].
///
/// # Safety
/// There is room for all steps of the span, and the tier is available.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn quantize(x: &[f32], q: *mut i8, scale: *mut f32, lift: *mut i32) {
    debug_assert!(!x.is_empty() && x.len() <= SPAN);
    // SAFETY: the caller's word; masked loads read nothing past the end.
    unsafe {
        let vectors = x.len().div_ceil(16);
        let load = |ix: usize| {
            let left = x.len().saturating_sub(ix * 16).min(16);
            let mask = ((1u32 << left) - 1) as u16;
            _mm512_maskz_loadu_ps(mask, x.as_ptr().wrapping_add(ix * 16))
        };
        let mut most = _mm512_setzero_si512();
        for ix in 0..vectors {
            let size = _mm512_and_si512(_mm512_castps_si512(load(ix)), _mm512_set1_epi32(i32::MAX));
            most = _mm512_max_epu32(most, size);
        }
        let largest = _mm512_reduce_max_epu32(most);
        let a = f32::from_bits(largest);
        let inverse = 127.0 / a;
        let flat = flat(largest, inverse);
        // Nothing of what is not finite, or too small, comes through.
        let by = _mm512_set1_ps(if flat.is_some() { 0.0 } else { inverse });
        let keep = if flat.is_some() { 0 } else { u16::MAX };
        let mut total = _mm512_setzero_si512();
        for ix in 0..x.len().div_ceil(STEP) * 4 {
            let v = if ix < vectors { load(ix) } else { _mm512_setzero_ps() };
            // To the nearest integer, ties to even: the mode that Rust's programs run in.
            let whole = _mm512_maskz_cvtps_epi32(keep, _mm512_mul_ps(v, by));
            total = _mm512_add_epi32(total, whole);
            let to = q.add(ix / 4 * STEP_BYTES + ix % 4 * 16);
            _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(whole));
        }
        *scale = flat.unwrap_or(a / 127.0);
        *lift = -128 * _mm512_reduce_add_epi32(total);
    }
}
