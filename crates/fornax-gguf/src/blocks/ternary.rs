//! Ternary formats: TQ1_0 and TQ2_0. It must not know other formats.
//!
//! ```text
//! TQ1_0  qs[48]  qh[4]  d:f16   five base-3 digits to a byte (four in qh), w = d × (digit − 1)
//! TQ2_0  qs[64]  d:f16          four two-bit values to a byte, w = d × (q − 1)
//! ```
//! A TQ1_0 byte is `ceil(256 × n / 243)` for the number `n` of its digits, most significant first: multiplied by
//! 3^k modulo 256, its upper part is digit `k`.

use super::f32_to_f16;
use super::simple::{each_block, fill_blocks, half};

const LEN: usize = 256;
const POWERS: [u8; 5] = [1, 3, 9, 27, 81];

/// The runs of a TQ1_0 block: first byte, bytes, digits to a byte. Digit `k` of the bytes of a run stands for
/// the `k`th sequence of its weights.
const RUNS: [(usize, usize, usize); 3] = [(0, 32, 5), (32, 16, 5), (48, 4, 4)];

pub(super) fn dequantize_tq1_0(src: &[u8], dst: &mut [f32]) {
    each_block::<54, LEN>(src, dst, |b, out| {
        let d = half(b, 52);
        let mut out = out.iter_mut();
        for (first, len, digits) in RUNS {
            for power in &POWERS[..digits] {
                for (byte, w) in b[first..first + len].iter().zip(&mut out) {
                    let digit = (u16::from(byte.wrapping_mul(*power)) * 3) >> 8;
                    *w = d * (i32::from(digit) - 1) as f32;
                }
            }
        }
    });
}

pub(super) fn dequantize_tq2_0(src: &[u8], dst: &mut [f32]) {
    each_block::<66, LEN>(src, dst, |b, out| {
        let d = half(b, 64);
        for (g, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for (w, q) in out.iter_mut().zip(&b[g / 4 * 32..][..32]) {
                *w = d * (i32::from(q >> (g % 4 * 2) & 3) - 1) as f32;
            }
        }
    });
}

/// Digits 0, 1, 2 for about −d, 0, +d, where d is the largest magnitude.
fn digits(w: &[f32; LEN]) -> (f32, [u8; LEN]) {
    let d = w.iter().fold(0.0f32, |max, v| max.max(v.abs()));
    let id = if d == 0.0 { 0.0 } else { 1.0 / d };
    (d, w.map(|v| (((v * id).round() as i8).clamp(-1, 1) + 1) as u8))
}

pub(super) fn quantize_tq1_0(src: &[f32], dst: &mut [u8]) {
    fill_blocks::<54, LEN>(src, dst, |w, b| {
        let (d, q) = digits(w);
        let mut start = 0;
        for (first, len, count) in RUNS {
            for i in 0..len {
                // The run with four digits to a byte leaves the least significant one empty.
                let n = (0..count).fold(0u16, |n, k| {
                    n + u16::from(q[start + k * len + i]) * u16::from(POWERS[4 - k])
                });
                b[first + i] = (n * 256).div_ceil(243) as u8;
            }
            start += len * count;
        }
        b[52..].copy_from_slice(&f32_to_f16(d).to_le_bytes());
    });
}

pub(super) fn quantize_tq2_0(src: &[f32], dst: &mut [u8]) {
    fill_blocks::<66, LEN>(src, dst, |w, b| {
        let (d, q) = digits(w);
        for (i, byte) in b[..64].iter_mut().enumerate() {
            let start = i / 32 * 128 + i % 32;
            *byte = (0..4).fold(0, |bits, k| bits | q[start + 32 * k] << (2 * k));
        }
        b[64..].copy_from_slice(&f32_to_f16(d).to_le_bytes());
    });
}
