//! The AVX2 tier: sixteen rows are the lanes of two registers. It must not know layouts.
//!
//! `vpmaddubsw` multiplies unsigned weights with signed activations into pairs of 16 bits. Small
//! weights let several pairs be added before they are widened; weights of 8 bits give their sign
//! to the activations. Weights above zero by a bias have it taken off with Σq at the end.

use std::arch::x86_64::*;

use super::activations::ActBlock;
use super::simd::{QUADS, Range, Simd};

/// The tier's vectors; used only behind the door that checks for its features.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx2;

/// What one vector operation is on the halves.
macro_rules! both {
    ($a:expr, $op:expr) => {
        [$op($a[0]), $op($a[1])]
    };
    ($a:expr, $b:expr, $op:expr) => {
        [$op($a[0], $b[0]), $op($a[1], $b[1])]
    };
}

/// −128 · Σq over the quads that a dot product goes over.
#[inline(always)]
unsafe fn lift<const N: usize>(first: usize, x: *const ActBlock) -> i32 {
    // SAFETY: the caller's word.
    let x = unsafe { &*x };
    match (N, first) {
        (QUADS, _) => x.lift,
        (_, 0) => x.lift_first,
        _ => x.lift - x.lift_first,
    }
}

// SAFETY (every block below): the caller's word that the features are there and that pointers
// reach as far as the trait says; no load needs alignment.
impl Simd for Avx2 {
    type Bytes = [__m256i; 2];
    type Ints = [__m256i; 2];
    type Floats = [__m256; 2];

    #[inline(always)]
    unsafe fn bytes(at: *const u8) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(32).cast())] }
    }

    #[inline(always)]
    unsafe fn store_bytes(v: [__m256i; 2], to: *mut u8) {
        // SAFETY: see above.
        unsafe {
            _mm256_storeu_si256(to.cast(), v[0]);
            _mm256_storeu_si256(to.add(32).cast(), v[1]);
        }
    }

    #[inline(always)]
    unsafe fn field(v: [__m256i; 2], from: u32, to: u32, mask: u8) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe {
            // Bits that cross from a neighbouring byte are outside the mask.
            let mask = _mm256_set1_epi8(mask as i8);
            let right = _mm_cvtsi32_si128(from.saturating_sub(to) as i32);
            let left = _mm_cvtsi32_si128(to.saturating_sub(from) as i32);
            let mut out = v;
            for v in &mut out {
                let moved = if from >= to {
                    _mm256_srl_epi16(*v, right)
                } else {
                    _mm256_sll_epi16(*v, left)
                };
                *v = _mm256_and_si256(moved, mask);
            }
            out
        }
    }

    #[inline(always)]
    unsafe fn or(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe { both!(a, b, _mm256_or_si256) }
    }

    #[inline(always)]
    unsafe fn lookup(table: &[i8; 16], v: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            [_mm256_shuffle_epi8(table, v[0]), _mm256_shuffle_epi8(table, v[1])]
        }
    }

    /// As stored.
    #[inline(always)]
    unsafe fn ready<R: Range>(v: [__m256i; 2]) -> [__m256i; 2] {
        v
    }

    #[inline(always)]
    unsafe fn dot<R: Range, const N: usize>(
        w: &[[__m256i; 2]; QUADS],
        first: usize,
        x: *const ActBlock,
    ) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe {
            let q = (*x).q.as_ptr().cast::<i32>();
            let ones = _mm256_set1_epi16(1);
            let mut sum = [_mm256_setzero_si256(); 2];
            // Pairs that can be added in 16 bits: each is at most 2 · MAX · 127.
            let together = if R::SIGNED { 1 } else { (32767 / (2 * R::MAX * 127)) as usize };
            let mut quad = first;
            while quad < first + N {
                let end = (quad + together).min(first + N);
                let mut pairs = [_mm256_setzero_si256(); 2];
                while quad < end {
                    let x = _mm256_set1_epi32(q.add(quad).read_unaligned());
                    for half in 0..2 {
                        let w = w[quad][half];
                        let products = if R::SIGNED {
                            // |−128| is 128 as an unsigned byte, and no activation is −128.
                            _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
                        } else {
                            _mm256_maddubs_epi16(w, x)
                        };
                        pairs[half] = _mm256_add_epi16(pairs[half], products);
                    }
                    quad += 1;
                }
                for half in 0..2 {
                    let wide = _mm256_madd_epi16(pairs[half], ones);
                    sum[half] = _mm256_add_epi32(sum[half], wide);
                }
            }
            if R::BIAS != 0 {
                // Exact: the lift is a multiple of 128.
                let off = _mm256_set1_epi32(lift::<N>(first, x) / 128 * R::BIAS);
                sum = [_mm256_add_epi32(sum[0], off), _mm256_add_epi32(sum[1], off)];
            }
            sum
        }
    }

    #[inline(always)]
    unsafe fn zero() -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_setzero_ps(); 2] }
    }

    #[inline(always)]
    unsafe fn splat(v: f32) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_set1_ps(v); 2] }
    }

    #[inline(always)]
    unsafe fn add(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { both!(a, b, _mm256_add_ps) }
    }

    #[inline(always)]
    unsafe fn mul(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { both!(a, b, _mm256_mul_ps) }
    }

    #[inline(always)]
    unsafe fn negate(v: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe {
            [_mm256_sub_ps(_mm256_setzero_ps(), v[0]), _mm256_sub_ps(_mm256_setzero_ps(), v[1])]
        }
    }

    #[inline(always)]
    unsafe fn from_ints(v: [__m256i; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { both!(v, _mm256_cvtepi32_ps) }
    }

    #[inline(always)]
    unsafe fn from_f32(at: *const u8) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_loadu_ps(at.cast()), _mm256_loadu_ps(at.add(32).cast())] }
    }

    #[inline(always)]
    unsafe fn from_f16(at: *const u8) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(at.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(at.add(16).cast())),
            ]
        }
    }

    #[inline(always)]
    unsafe fn from_bf16(at: *const u8) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.add(16).cast()));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn from_u8(at: *const u8) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { both!(bytes_as_ints(at), _mm256_cvtepi32_ps) }
    }

    #[inline(always)]
    unsafe fn from_i8(at: *const u8) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe {
            let low = _mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast()));
            let high = _mm256_cvtepi8_epi32(_mm_loadl_epi64(at.add(8).cast()));
            [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)]
        }
    }

    #[inline(always)]
    unsafe fn from_exponents(at: *const u8) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe {
            let mut out = bytes_as_ints(at);
            for e in &mut out {
                let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(*e, _mm256_set1_epi32(1)));
                let small = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), *e);
                let below = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), *e);
                *e = _mm256_blendv_epi8(normal, small, below);
            }
            both!(out, _mm256_castsi256_ps)
        }
    }

    #[inline(always)]
    unsafe fn store(v: [__m256; 2], to: *mut f32) {
        // SAFETY: see above.
        unsafe {
            _mm256_storeu_ps(to, v[0]);
            _mm256_storeu_ps(to.add(8), v[1]);
        }
    }
}

#[inline(always)]
unsafe fn bytes_as_ints(at: *const u8) -> [__m256i; 2] {
    // SAFETY: see above.
    unsafe {
        [
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast())),
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(at.add(8).cast())),
        ]
    }
}

super::drive::tier!(KERNELS, Avx2, rows 4, float rows 2, many 32, #[target_feature(enable = "avx2,fma,f16c")]);
