//! Decoders of the codebook formats: IQ1_S to IQ4_XS. Their encoders need a search over importance data and
//! are not here. It must not know the codebooks' numbers.
//!
//! ```text
//! IQ2_XXS  d:f16  8 × { index[4]:u8, u32: 4 × 7 bits of signs, 4 bits of scale }
//! IQ2_XS   d:f16  qs[32]:u16 (9 bits of index, 7 of signs)  scales[8] (a half byte for 16 weights)
//! IQ2_S    d:f16  qs[32]  signs[32]  qh[8] (2 bits for each index)  scales[8]
//! IQ3_XXS  d:f16  qs[64]  8 × u32: 4 × 7 bits of signs, 4 bits of scale
//! IQ3_S    d:f16  qs[64]  qh[8] (a bit for each index)  signs[32]  scales[4] (a half byte for 32 weights)
//! IQ1_S    d:f16  qs[32]  qh[8]:u16 (4 × 3 bits of index, 3 of scale, 1 of shift)
//! IQ1_M    qs[32]  qh[16] (3 bits of index, 1 of shift, for each 8 weights)  scales[4]:u16 (4 × 3 bits of
//!          scale; the top halves of the four make d:f16)
//! IQ4_NL   d:f16  qs[16]                                       32 weights
//! IQ4_XS   d:f16  sh:u16  sl[4]  qs[128]                       six-bit scales of 32 weights
//! ```

use super::codebooks::{IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, IQ4_LEVELS, SIGNS};
use super::f16_to_f32;
use super::simple::{each_block, half};

const LEN: usize = 256;
/// Half a step by which IQ1 moves its ternary values up or down.
const IQ1_DELTA: f32 = 0.125;

#[inline]
fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

#[inline]
fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// Writes codebook values times `scale`, minus where the bit of `signs` is set.
#[inline]
fn signed<const N: usize>(out: &mut [f32], grid: &[u8; N], signs: u8, scale: f32) {
    for (j, (w, &level)) in out.iter_mut().zip(grid).enumerate() {
        let magnitude = scale * f32::from(level);
        *w = if signs >> j & 1 == 0 { magnitude } else { -magnitude };
    }
}

pub(super) fn dequantize_iq2_xxs(src: &[u8], dst: &mut [f32]) {
    each_block::<66, LEN>(src, dst, |b, out| {
        let d = half(b, 0);
        for (g, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let at = 2 + 8 * g;
            let packed = u32_at(b, at + 4);
            let scale = d * (0.5 + (packed >> 28) as f32) * 0.25;
            for (k, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                let signs = SIGNS[(packed >> (7 * k) & 127) as usize];
                signed(out, &IQ2_XXS[usize::from(b[at + k])], signs, scale);
            }
        }
    });
}

pub(super) fn dequantize_iq2_xs(src: &[u8], dst: &mut [f32]) {
    each_block::<74, LEN>(src, dst, |b, out| {
        let d = half(b, 0);
        for (k, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let q = usize::from(u16_at(b, 2 + 2 * k));
            let nibble = b[66 + k / 4] >> (k % 4 / 2 * 4) & 15;
            let scale = d * (0.5 + f32::from(nibble)) * 0.25;
            signed(out, &IQ2_XS[q & 511], SIGNS[q >> 9], scale);
        }
    });
}

pub(super) fn dequantize_iq2_s(src: &[u8], dst: &mut [f32]) {
    each_block::<82, LEN>(src, dst, |b, out| {
        let d = half(b, 0);
        for (k, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let high = usize::from(b[66 + k / 4] >> (k % 4 * 2) & 3);
            let index = usize::from(b[2 + k]) | high << 8;
            let nibble = b[74 + k / 4] >> (k % 4 / 2 * 4) & 15;
            let scale = d * (0.5 + f32::from(nibble)) * 0.25;
            signed(out, &IQ2_S[index], b[34 + k], scale);
        }
    });
}

pub(super) fn dequantize_iq3_xxs(src: &[u8], dst: &mut [f32]) {
    each_block::<98, LEN>(src, dst, |b, out| {
        let d = half(b, 0);
        for (g, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let packed = u32_at(b, 66 + 4 * g);
            let scale = d * (0.5 + (packed >> 28) as f32) * 0.5;
            for (k, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                let signs = SIGNS[(packed >> (7 * k) & 127) as usize];
                let at = 2 + 8 * g + 2 * k;
                signed(&mut out[..4], &IQ3_XXS[usize::from(b[at])], signs, scale);
                signed(&mut out[4..], &IQ3_XXS[usize::from(b[at + 1])], signs >> 4, scale);
            }
        }
    });
}

pub(super) fn dequantize_iq3_s(src: &[u8], dst: &mut [f32]) {
    each_block::<110, LEN>(src, dst, |b, out| {
        let d = half(b, 0);
        let (qs, qh, signs, scales) = (&b[2..66], &b[66..74], &b[74..106], &b[106..110]);
        for (g, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let nibble = scales[g / 2] >> (g % 2 * 4) & 15;
            let scale = d * f32::from(1 + 2 * nibble);
            for (k, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                let index = usize::from(qs[8 * g + k]) | usize::from(qh[g] >> k & 1) << 8;
                signed(out, &IQ3_S[index], signs[4 * g + k / 2] >> (k % 2 * 4), scale);
            }
        }
    });
}

/// Writes a ternary octet, moved by `delta`, times `scale`.
#[inline]
fn shifted(out: &mut [f32; 8], grid: &[i8; 8], delta: f32, scale: f32) {
    for (w, &t) in out.iter_mut().zip(grid) {
        *w = scale * (f32::from(t) + delta);
    }
}

pub(super) fn dequantize_iq1_s(src: &[u8], dst: &mut [f32]) {
    each_block::<50, LEN>(src, dst, |b, out| {
        let d = half(b, 0);
        for (g, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let qh = u16_at(b, 34 + 2 * g);
            let scale = d * f32::from(2 * (qh >> 12 & 7) + 1);
            let delta = if qh & 0x8000 == 0 { IQ1_DELTA } else { -IQ1_DELTA };
            for (k, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                let index = usize::from(b[2 + 4 * g + k]) | usize::from(qh >> (3 * k) & 7) << 8;
                shifted(out, &IQ1[index], delta, scale);
            }
        }
    });
}

pub(super) fn dequantize_iq1_m(src: &[u8], dst: &mut [f32]) {
    each_block::<56, LEN>(src, dst, |b, out| {
        let scales: [u16; 4] = std::array::from_fn(|i| u16_at(b, 48 + 2 * i));
        let d = f16_to_f32((0..4).fold(0, |bits, i| bits | (scales[i] >> 12) << (4 * i)));
        for (k, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let group = k / 2;
            let scale = scales[group / 4] >> (group % 4 * 3) & 7;
            let high = b[32 + k / 2] >> (k % 2 * 4);
            let delta = if high & 8 == 0 { IQ1_DELTA } else { -IQ1_DELTA };
            let index = usize::from(b[k]) | usize::from(high & 7) << 8;
            shifted(out, &IQ1[index], delta, d * f32::from(2 * scale + 1));
        }
    });
}

/// Writes 32 levels from 16 bytes: the low halves, then the high halves.
#[inline]
pub(super) fn levels(out: &mut [f32], qs: &[u8], table: &[i8; 16], scale: f32) {
    let (low, high) = out.split_at_mut(qs.len());
    for ((lo, hi), q) in low.iter_mut().zip(high).zip(qs) {
        *lo = scale * f32::from(table[usize::from(q & 15)]);
        *hi = scale * f32::from(table[usize::from(q >> 4)]);
    }
}

pub(super) fn dequantize_iq4_nl(src: &[u8], dst: &mut [f32]) {
    each_block::<18, 32>(src, dst, |b, out| levels(out, &b[2..], &IQ4_LEVELS, half(b, 0)));
}

pub(super) fn dequantize_iq4_xs(src: &[u8], dst: &mut [f32]) {
    each_block::<136, LEN>(src, dst, |b, out| {
        let (d, high) = (half(b, 0), u16_at(b, 2));
        for (g, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let low = b[4 + g / 2] >> (g % 2 * 4) & 15;
            let scale = i32::from(low) | i32::from(high >> (2 * g) & 3) << 4;
            levels(out, &b[8 + 16 * g..][..16], &IQ4_LEVELS, d * (scale - 32) as f32);
        }
    });
}
