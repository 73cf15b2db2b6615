//! Formats of 32 weights with one scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q8_1. It must not know other formats.
//!
//! ```text
//! Q4_0  d:f16  qs[16]                 w = d × (q − 8)
//! Q4_1  d:f16  m:f16  qs[16]          w = d × q + m
//! Q5_0  d:f16  qh:u32  qs[16]         w = d × (q − 16), fifth bit of weight i in bit i of qh
//! Q5_1  d:f16  m:f16  qh:u32  qs[16]  w = d × q + m
//! Q8_0  d:f16  qs[32]:i8              w = d × q
//! Q8_1  d:f16  s:f16  qs[32]:i8       w = d × q; s = d × Σq
//! ```
//! Four-bit values: byte `i` of `qs` holds weight `i` in its low half and weight `i + 16` in its high half.
//!
//! The quantisers give the bytes of the format's reference quantiser: f32 arithmetic throughout, the scale
//! rounded to f16 only when stored.

use super::{f16_to_f32, f32_to_f16};

const LEN: usize = 32;

/// An f16 at byte `at` of a block, widened.
#[inline]
pub(super) fn half(block: &[u8], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([block[at], block[at + 1]]))
}

/// Calls `decode` for every block of `BYTES` bytes and `WEIGHTS` weights.
#[inline]
pub(super) fn each_block<const BYTES: usize, const WEIGHTS: usize>(
    src: &[u8],
    dst: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; WEIGHTS]),
) {
    let blocks = src.as_chunks::<BYTES>().0;
    for (block, out) in blocks.iter().zip(dst.as_chunks_mut::<WEIGHTS>().0) {
        decode(block, out);
    }
}

/// Calls `encode` for every block; the counterpart of [`each_block`].
#[inline]
pub(super) fn fill_blocks<const BYTES: usize, const WEIGHTS: usize>(
    src: &[f32],
    dst: &mut [u8],
    encode: impl Fn(&[f32; WEIGHTS], &mut [u8; BYTES]),
) {
    let weights = src.as_chunks::<WEIGHTS>().0;
    for (w, block) in weights.iter().zip(dst.as_chunks_mut::<BYTES>().0) {
        encode(w, block);
    }
}

pub(super) fn dequantize_q4_0(src: &[u8], dst: &mut [f32]) {
    each_block::<18, LEN>(src, dst, |b, out| {
        let d = half(b, 0);
        for i in 0..16 {
            let q = b[2 + i];
            out[i] = d * (i32::from(q & 15) - 8) as f32;
            out[i + 16] = d * (i32::from(q >> 4) - 8) as f32;
        }
    });
}

pub(super) fn dequantize_q4_1(src: &[u8], dst: &mut [f32]) {
    each_block::<20, LEN>(src, dst, |b, out| {
        let (d, m) = (half(b, 0), half(b, 2));
        for i in 0..16 {
            let q = b[4 + i];
            out[i] = d * f32::from(q & 15) + m;
            out[i + 16] = d * f32::from(q >> 4) + m;
        }
    });
}

pub(super) fn dequantize_q5_0(src: &[u8], dst: &mut [f32]) {
    each_block::<22, LEN>(src, dst, |b, out| {
        let d = half(b, 0);
        for (i, q) in fives(&b[2..6], &b[6..22]).into_iter().enumerate() {
            out[i] = d * (i32::from(q) - 16) as f32;
        }
    });
}

pub(super) fn dequantize_q5_1(src: &[u8], dst: &mut [f32]) {
    each_block::<24, LEN>(src, dst, |b, out| {
        let (d, m) = (half(b, 0), half(b, 2));
        for (i, q) in fives(&b[4..8], &b[8..24]).into_iter().enumerate() {
            out[i] = d * f32::from(q) + m;
        }
    });
}

pub(super) fn dequantize_q8_0(src: &[u8], dst: &mut [f32]) {
    each_block::<34, LEN>(src, dst, |b, out| {
        let d = half(b, 0);
        for i in 0..LEN {
            out[i] = d * f32::from(b[2 + i] as i8);
        }
    });
}

pub(super) fn dequantize_q8_1(src: &[u8], dst: &mut [f32]) {
    each_block::<36, LEN>(src, dst, |b, out| {
        let d = half(b, 0);
        for i in 0..LEN {
            out[i] = d * f32::from(b[4 + i] as i8);
        }
    });
}

/// The five-bit values of a block, from their high bits and their low halves.
#[inline]
fn fives(high: &[u8], low: &[u8]) -> [u8; LEN] {
    let high = u32::from_le_bytes([high[0], high[1], high[2], high[3]]);
    std::array::from_fn(|i| {
        let nibble = if i < 16 { low[i] & 15 } else { low[i - 16] >> 4 };
        nibble | ((high >> i & 1) as u8) << 4
    })
}

/// Stores four-bit values: the low halves, then the high halves.
fn put_nibbles(q: &[u8; LEN], out: &mut [u8]) {
    for i in 0..16 {
        out[i] = (q[i] & 15) | (q[i + 16] & 15) << 4;
    }
}

/// Stores the fifth bits.
fn put_fifths(q: &[u8; LEN], out: &mut [u8]) {
    let bits = (0..LEN).fold(0u32, |bits, i| bits | u32::from(q[i] >> 4) << i);
    out.copy_from_slice(&bits.to_le_bytes());
}

/// The weight of the largest magnitude with its sign, the first of several.
fn extreme(w: &[f32; LEN]) -> f32 {
    w.iter().fold(0.0, |max: f32, &v| if v.abs() > max.abs() { v } else { max })
}

fn reciprocal(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// Values from 0 to `2 × half − 1` that stand for multiples of `d` around `half`. The scale's sign is such
/// that the extreme weight becomes 0, the one value more on the negative side.
fn symmetric(w: &[f32; LEN], half: f32) -> (f32, [u8; LEN]) {
    let d = extreme(w) / -half;
    let id = reciprocal(d);
    // Conversion to integers cuts, saturates and maps NaN to 0.
    (d, w.map(|v| ((v * id + (half + 0.5)) as u8).min(2 * half as u8 - 1)))
}

/// Values from 0 to `levels` that stand for multiples of `d` above the minimum.
fn affine(w: &[f32; LEN], levels: u8) -> (f32, f32, [u8; LEN]) {
    let min = w.iter().copied().fold(f32::INFINITY, f32::min);
    let max = w.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let d = (max - min) / f32::from(levels);
    let id = reciprocal(d);
    (d, min, w.map(|v| (((v - min) * id + 0.5) as u8).min(levels)))
}

pub(super) fn quantize_q4_0(src: &[f32], dst: &mut [u8]) {
    fill_blocks::<18, LEN>(src, dst, |w, b| {
        let (d, q) = symmetric(w, 8.0);
        b[..2].copy_from_slice(&f32_to_f16(d).to_le_bytes());
        put_nibbles(&q, &mut b[2..]);
    });
}

pub(super) fn quantize_q4_1(src: &[f32], dst: &mut [u8]) {
    fill_blocks::<20, LEN>(src, dst, |w, b| {
        let (d, m, q) = affine(w, 15);
        b[..2].copy_from_slice(&f32_to_f16(d).to_le_bytes());
        b[2..4].copy_from_slice(&f32_to_f16(m).to_le_bytes());
        put_nibbles(&q, &mut b[4..]);
    });
}

pub(super) fn quantize_q5_0(src: &[f32], dst: &mut [u8]) {
    fill_blocks::<22, LEN>(src, dst, |w, b| {
        let (d, q) = symmetric(w, 16.0);
        b[..2].copy_from_slice(&f32_to_f16(d).to_le_bytes());
        put_fifths(&q, &mut b[2..6]);
        put_nibbles(&q, &mut b[6..]);
    });
}

pub(super) fn quantize_q5_1(src: &[f32], dst: &mut [u8]) {
    fill_blocks::<24, LEN>(src, dst, |w, b| {
        let (d, m, q) = affine(w, 31);
        b[..2].copy_from_slice(&f32_to_f16(d).to_le_bytes());
        b[2..4].copy_from_slice(&f32_to_f16(m).to_le_bytes());
        put_fifths(&q, &mut b[4..8]);
        put_nibbles(&q, &mut b[8..]);
    });
}

pub(super) fn quantize_q8_0(src: &[f32], dst: &mut [u8]) {
    fill_blocks::<34, LEN>(src, dst, |w, b| {
        let d = w.iter().fold(0.0f32, |max, v| max.max(v.abs())) / 127.0;
        let id = reciprocal(d);
        b[..2].copy_from_slice(&f32_to_f16(d).to_le_bytes());
        for i in 0..LEN {
            // Halves away from zero, as `roundf` of C.
            b[2 + i] = (w[i] * id).round() as i8 as u8;
        }
    });
}
