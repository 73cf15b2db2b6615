//! Decoders of the formats of 256 weights with two levels of scales: Q2_K to Q6_K, and Q8_K. It must not know
//! how their encoders choose scales.
//!
//! ```text
//! Q2_K  scales[16]  qs[64]  d:f16  m:f16               w = d·(s & 15)·q − m·(s >> 4), a byte s for 16 weights
//! Q3_K  hmask[32]  qs[64]  scales[12]  d:f16           w = d·(s − 32)·(q − 4), six-bit s for 16 weights
//! Q4_K  d:f16  m:f16  scales[12]  qs[128]              w = d·s·q − m·t, six-bit s and t for 32 weights
//! Q5_K  d:f16  m:f16  scales[12]  qh[32]  qs[128]      as Q4_K, fifth bits of group g in bit g of qh
//! Q6_K  ql[128]  qh[64]  scales[16]:i8  d:f16          w = d·s·(q − 32), a byte s for 16 weights
//! Q8_K  d:f32  qs[256]:i8  sums[16]:i16                w = d·q
//! ```

use super::simple::{each_block, half};

const LEN: usize = 256;

pub(super) fn dequantize_q2_k(src: &[u8], dst: &mut [f32]) {
    each_block::<84, LEN>(src, dst, |b, out| {
        let (scales, qs) = (&b[..16], &b[16..80]);
        let (d, m) = (half(b, 80), half(b, 82));
        // Weight 128·h + 32·s + i is in bits 2s of byte 32·h + i.
        for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let scale = d * f32::from(scales[group] & 15);
            let min = m * f32::from(scales[group] >> 4);
            let shift = group % 8 / 2 * 2;
            let qs = &qs[group / 8 * 32 + group % 2 * 16..][..16];
            for (w, q) in out.iter_mut().zip(qs) {
                *w = scale * f32::from(q >> shift & 3) - min;
            }
        }
    });
}

pub(super) fn dequantize_q3_k(src: &[u8], dst: &mut [f32]) {
    each_block::<110, LEN>(src, dst, |b, out| {
        let (hmask, qs, packed) = (&b[..32], &b[32..96], &b[96..108]);
        let d = half(b, 108);
        for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            // Four low bits: bytes 0 to 7, low halves first. Two high bits: bytes 8 to 11, in four layers.
            let low = packed[group % 8] >> (group / 8 * 4) & 15;
            let high = packed[8 + group % 4] >> (group / 4 * 2) & 3;
            let scale = d * (i32::from(low | high << 4) - 32) as f32;
            let shift = group % 8 / 2 * 2;
            let qs = &qs[group / 8 * 32 + group % 2 * 16..][..16];
            let hmask = &hmask[group % 2 * 16..][..16];
            for ((w, q), h) in out.iter_mut().zip(qs).zip(hmask) {
                // A clear bit of the mask stands for −4.
                let q = i32::from(q >> shift & 3) - if h >> (group / 2) & 1 == 0 { 4 } else { 0 };
                *w = scale * q as f32;
            }
        }
    });
}

/// Six-bit scale and minimum of group `g` of 8, from the 12 bytes of Q4_K and Q5_K: groups 0 to 3 are the low
/// bits of bytes 0 to 3 and 4 to 7; groups 4 to 7 have their low halves in bytes 8 to 11 and their top bits
/// above those of the others.
#[inline]
pub(super) fn scale_and_min(packed: &[u8], g: usize) -> (u8, u8) {
    if g < 4 {
        return (packed[g] & 63, packed[g + 4] & 63);
    }
    let low = packed[g + 4];
    ((low & 15) | (packed[g - 4] >> 6) << 4, (low >> 4) | (packed[g] >> 6) << 4)
}

pub(super) fn dequantize_q4_k(src: &[u8], dst: &mut [f32]) {
    each_block::<144, LEN>(src, dst, |b, out| {
        let (d, m) = (half(b, 0), half(b, 2));
        for (g, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (s, t) = scale_and_min(&b[4..16], g);
            let (scale, min) = (d * f32::from(s), m * f32::from(t));
            let qs = &b[16 + g / 2 * 32..][..32];
            let shift = g % 2 * 4;
            for (w, q) in out.iter_mut().zip(qs) {
                *w = scale * f32::from(q >> shift & 15) - min;
            }
        }
    });
}

pub(super) fn dequantize_q5_k(src: &[u8], dst: &mut [f32]) {
    each_block::<176, LEN>(src, dst, |b, out| {
        let (d, m) = (half(b, 0), half(b, 2));
        let high = &b[16..48];
        for (g, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (s, t) = scale_and_min(&b[4..16], g);
            let (scale, min) = (d * f32::from(s), m * f32::from(t));
            let qs = &b[48 + g / 2 * 32..][..32];
            let shift = g % 2 * 4;
            for ((w, q), h) in out.iter_mut().zip(qs).zip(high) {
                *w = scale * f32::from((q >> shift & 15) | (h >> g & 1) << 4) - min;
            }
        }
    });
}

pub(super) fn dequantize_q6_k(src: &[u8], dst: &mut [f32]) {
    each_block::<210, LEN>(src, dst, |b, out| {
        let (low, high, scales) = (&b[..128], &b[128..192], &b[192..208]);
        let d = half(b, 208);
        // Groups of 32: the low halves of 64 bytes, then their high halves; twice. The two high bits of group
        // g of four are bits 2g of 32 bytes; twice.
        for (g, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let low = &low[g / 4 * 64 + g % 2 * 32..][..32];
            let high = &high[g / 4 * 32..][..32];
            let (low_shift, high_shift) = (g % 4 / 2 * 4, g % 4 * 2);
            for part in 0..2 {
                let scale = d * f32::from(scales[2 * g + part] as i8);
                let range = 16 * part..16 * part + 16;
                let (low, high) = (&low[range.clone()], &high[range.clone()]);
                for ((w, l), h) in out[range].iter_mut().zip(low).zip(high) {
                    let q = (l >> low_shift & 15) | (h >> high_shift & 3) << 4;
                    *w = scale * (i32::from(q) - 32) as f32;
                }
            }
        }
    });
}

pub(super) fn dequantize_q8_k(src: &[u8], dst: &mut [f32]) {
    each_block::<292, LEN>(src, dst, |b, out| {
        let d = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        for (w, q) in out.iter_mut().zip(&b[4..260]) {
            *w = d * f32::from(*q as i8);
        }
    });
}
