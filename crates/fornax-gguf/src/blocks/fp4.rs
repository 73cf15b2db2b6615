//! Four-bit floats: MXFP4 (OCP Microscaling Formats 1.0) and NVFP4. It must not know other formats.
//!
//! ```text
//! MXFP4  e:u8  qs[16]           32 weights, one scale 2^(e − 127)
//! NVFP4  e[4]:u8  qs[32]        64 weights, a UE4M3 scale for each 16
//! ```
//! Elements are E2M1. As everywhere in GGUF they are decoded as twice their value, and the scale as half.

use super::codebooks::E2M1_DOUBLED;
use super::iq::levels;
use super::simple::{each_block, fill_blocks};

/// Half of the E8M0 scale `e`, 2^(e − 128); the two smallest are subnormal in f32.
pub fn e8m0_half(e: u8) -> f32 {
    f32::from_bits(match e {
        0 => 0x0020_0000,
        1 => 0x0040_0000,
        e => u32::from(e - 1) << 23,
    })
}

/// Half of the unsigned E4M3 scale `e`; the code for NaN, 0x7F, counts as 0. The top bit is no part of it.
pub fn ue4m3_half(e: u8) -> f32 {
    if e == 0x7F {
        return 0.0;
    }
    let (exponent, significand) = (i32::from(e >> 3 & 15), f32::from(e & 7));
    match exponent {
        0 => significand * f32::from_bits((127 - 10) << 23),
        _ => (8.0 + significand) * f32::from_bits(((exponent + 127 - 11) as u32) << 23),
    }
}

pub(super) fn dequantize_mxfp4(src: &[u8], dst: &mut [f32]) {
    each_block::<17, 32>(src, dst, |b, out| {
        levels(out, &b[1..], &E2M1_DOUBLED, e8m0_half(b[0]));
    });
}

pub(super) fn dequantize_nvfp4(src: &[u8], dst: &mut [f32]) {
    each_block::<36, 64>(src, dst, |b, out| {
        for (g, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            levels(out, &b[4 + 8 * g..][..8], &E2M1_DOUBLED, ue4m3_half(b[g]));
        }
    });
}

pub(super) fn quantize_mxfp4(src: &[f32], dst: &mut [u8]) {
    fill_blocks::<17, 32>(src, dst, |w, b| {
        let max = w.iter().fold(0.0f32, |max, v| max.max(v.abs()));
        // The largest element is 6 = 1.5 × 2²: its exponent goes to the scale. Conversion saturates.
        let e = if max > 0.0 { (max.log2().floor() - 2.0 + 127.0) as u8 } else { 0 };
        let e = e.min(254);
        let d = e8m0_half(e);
        for i in 0..16 {
            b[1 + i] = nearest(w[i], d) | nearest(w[i + 16], d) << 4;
        }
        b[0] = e;
    });
}

/// The code of the level nearest to `value`, the smaller magnitude of two; never the code for −0.
fn nearest(value: f32, d: f32) -> u8 {
    let (mut code, mut least) = (0, value.abs());
    for (candidate, &level) in E2M1_DOUBLED[..8].iter().enumerate().skip(1) {
        let error = (d * f32::from(level) - value.abs()).abs();
        if error < least {
            (code, least) = (candidate as u8, error);
        }
    }
    if code > 0 && value < 0.0 { code | 8 } else { code }
}
