//! Encoders of Q4_K, Q5_K and Q6_K: a search for the scales of each group, then one scale over the scales. It
//! must not know importance data.
//!
//! A group's scale (and minimum) is first sought without its own rounding: for a handful of step sizes near
//! the one that just spans the group, the weights are rounded to levels, and the scale that fits those levels
//! best in the least-squares sense is computed; the best fit of all stays. Large weights count more, as they
//! do in a dot product. The scales are then rounded against the f16 scale as it is stored, and the levels are
//! chosen last, against exactly the numbers that a decoder will see.

use super::f32_to_f16;
use super::k::scale_and_min;
use super::simple::{fill_blocks, half};

const LEN: usize = 256;
/// Step sizes tried on either side of the spanning one, and how far apart in levels.
const TRIES: i32 = 12;
const TRY_STEP: f32 = 0.1;

/// The nearest integer, ties to even, for magnitudes below 2^22; beyond them it is off, and clamped after. Far
/// cheaper than `round`, which is a call on hosts whose baseline has no instruction for it.
#[inline]
fn nearest(v: f32) -> f32 {
    const UNIT_IS_LAST_BIT: f32 = 12_582_912.0;
    (v + UNIT_IS_LAST_BIT) - UNIT_IS_LAST_BIT
}

/// A scale and a minimum, `w ≈ scale × level − min`, both at least 0.
#[derive(Clone, Copy, Default)]
struct Affine {
    scale: f32,
    min: f32,
}

pub(super) fn quantize_q4_k(src: &[f32], dst: &mut [u8]) {
    fill_blocks::<144, LEN>(src, dst, |w, b| {
        let levels = affine_block(w, 15, &mut b[..16]);
        put_low_halves(&levels, &mut b[16..]);
    });
}

pub(super) fn quantize_q5_k(src: &[f32], dst: &mut [u8]) {
    fill_blocks::<176, LEN>(src, dst, |w, b| {
        let levels = affine_block(w, 31, &mut b[..16]);
        for (i, byte) in b[16..48].iter_mut().enumerate() {
            *byte = (0..8).fold(0, |bits, g| bits | (levels[32 * g + i] >> 4) << g);
        }
        put_low_halves(&levels, &mut b[48..]);
    });
}

/// Four low bits of each level: pairs of groups of 32, the second in the high halves of the first's bytes.
fn put_low_halves(levels: &[u8; LEN], out: &mut [u8]) {
    for (i, byte) in out.iter_mut().enumerate() {
        let first = i / 32 * 64 + i % 32;
        *byte = (levels[first] & 15) | (levels[first + 32] & 15) << 4;
    }
}

/// Writes `d`, `m` and the packed scales to `head`, and returns the levels from 0 to `top`.
fn affine_block(w: &[f32; LEN], top: u8, head: &mut [u8]) -> [u8; LEN] {
    let groups = w.as_chunks::<32>().0;
    let mut fits = [Affine::default(); 8];
    for (fit, group) in fits.iter_mut().zip(groups) {
        *fit = fit_affine(group, top);
    }
    let over = |max: f32| f32_to_f16(max / 63.0);
    let d = over(fits.iter().fold(0.0, |max, fit| max.max(fit.scale)));
    let m = over(fits.iter().fold(0.0, |max, fit| max.max(fit.min)));
    head[..2].copy_from_slice(&d.to_le_bytes());
    head[2..4].copy_from_slice(&m.to_le_bytes());
    let (d, m) = (half(head, 0), half(head, 2));
    let round = |value: f32, unit: f32| {
        if unit > 0.0 { ((value / unit).round() as u8).min(63) } else { 0 }
    };
    let packed = &mut head[4..16];
    packed.fill(0);
    for (g, fit) in fits.iter().enumerate() {
        let (s, t) = (round(fit.scale, d), round(fit.min, m));
        if g < 4 {
            packed[g] |= s;
            packed[g + 4] |= t;
        } else {
            packed[g + 4] = (s & 15) | (t & 15) << 4;
            packed[g - 4] |= (s >> 4) << 6;
            packed[g] |= (t >> 4) << 6;
        }
    }
    let mut levels = [0; LEN];
    for (g, (group, out)) in groups.iter().zip(levels.as_chunks_mut::<32>().0).enumerate() {
        let (s, t) = scale_and_min(packed, g);
        let (scale, min) = (d * f32::from(s), m * f32::from(t));
        if scale > 0.0 {
            *out = group.map(|v| (nearest((v + min) / scale) as u8).min(top));
        }
    }
    levels
}

fn fit_affine(w: &[f32; 32], top: u8) -> Affine {
    // The minimum is subtracted and stored without a sign, so that it can only be 0 or below.
    let low = w.iter().fold(0.0f32, |low, &v| low.min(v));
    let high = w.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let span = high - low;
    if span.is_nan() || span <= 0.0 {
        return Affine { scale: 0.0, min: -low };
    }
    let rms = (w.iter().map(|v| v * v).sum::<f32>() / 32.0).sqrt();
    let importance = w.map(|v| rms + v.abs());
    let top = f32::from(top);
    let mut best = Affine { scale: span / top, min: -low };
    let mut best_error = f32::INFINITY;
    for attempt in -TRIES..=TRIES {
        let per_level = (top + TRY_STEP * attempt as f32) / span;
        let levels = w.map(|v| nearest((v - low) * per_level).clamp(0.0, top));
        let fit = least_squares(w, &levels, &importance);
        let error: f32 =
            (0..32).map(|i| importance[i] * (fit.scale * levels[i] - fit.min - w[i]).powi(2)).sum();
        if fit.scale > 0.0 && error < best_error {
            (best, best_error) = (fit, error);
        }
    }
    best
}

/// The scale and minimum of the least weighted error for fixed levels, the minimum not below 0.
fn least_squares(w: &[f32; 32], levels: &[f32; 32], importance: &[f32; 32]) -> Affine {
    let mut sums = [0.0f32; 5];
    for i in 0..32 {
        let (p, l, v) = (importance[i], levels[i], w[i]);
        for (sum, term) in sums.iter_mut().zip([p, p * l, p * l * l, p * v, p * l * v]) {
            *sum += term;
        }
    }
    let [p, l, ll, v, lv] = sums;
    let determinant = p * ll - l * l;
    let min = if determinant > 0.0 { (l * lv - ll * v) / determinant } else { 0.0 };
    if min > 0.0 {
        return Affine { scale: (p * lv - l * v) / determinant, min };
    }
    Affine { scale: if ll > 0.0 { lv / ll } else { 0.0 }, min: 0.0 }
}

pub(super) fn quantize_q6_k(src: &[f32], dst: &mut [u8]) {
    fill_blocks::<210, LEN>(src, dst, |w, b| {
        let groups = w.as_chunks::<16>().0;
        let mut fits = [0.0f32; 16];
        for (fit, group) in fits.iter_mut().zip(groups) {
            *fit = fit_symmetric(group);
        }
        // The extreme scale becomes −128, the one value more on the negative side.
        let extreme = fits.iter().fold(0.0f32, |max, &s| if s.abs() > max.abs() { s } else { max });
        b[208..].copy_from_slice(&f32_to_f16(extreme / -128.0).to_le_bytes());
        let d = half(b, 208);
        let mut levels = [0u8; LEN];
        for (g, (group, out)) in groups.iter().zip(levels.as_chunks_mut::<16>().0).enumerate() {
            let scale = if d == 0.0 { 0 } else { (fits[g] / d).round() as i8 };
            b[192 + g] = scale as u8;
            let scale = d * f32::from(scale);
            // Level 32 stands for 0.
            *out = if scale == 0.0 {
                [32; 16]
            } else {
                group.map(|v| (nearest(v / scale).clamp(-32.0, 31.0) + 32.0) as u8)
            };
        }
        for (i, byte) in b[..128].iter_mut().enumerate() {
            let first = i / 64 * 128 + i % 64;
            *byte = (levels[first] & 15) | (levels[first + 64] & 15) << 4;
        }
        for (i, byte) in b[128..192].iter_mut().enumerate() {
            let first = i / 32 * 128 + i % 32;
            *byte = (0..4).fold(0, |bits, k| bits | (levels[first + 32 * k] >> 4) << (2 * k));
        }
    });
}

/// The signed scale, `w ≈ scale × level` with levels from −32 to 31, of the least weighted error.
fn fit_symmetric(w: &[f32; 16]) -> f32 {
    let extreme = w.iter().fold(0.0f32, |max, &v| if v.abs() > max.abs() { v } else { max });
    if extreme == 0.0 {
        return 0.0;
    }
    let mut best = extreme / -32.0;
    let mut best_gain = 0.0f32;
    for attempt in -TRIES..=TRIES {
        let per_unit = -(32.0 + TRY_STEP * attempt as f32) / extreme;
        let (mut lv, mut ll) = (0.0f32, 0.0f32);
        for v in w {
            let level = nearest(v * per_unit).clamp(-32.0, 31.0);
            // A weight counts by its square.
            lv += v * v * level * v;
            ll += v * v * level * level;
        }
        // With the best scale for these levels, lv / ll, the error falls by lv² / ll.
        if ll > 0.0 && lv * lv > best_gain * ll {
            best_gain = lv * lv / ll;
            best = lv / ll;
        }
    }
    best
}
