//! The AVX-512 VNNI tier: sixteen rows are the lanes of one register, and `vpdpbusd` multiplies
//! four neighbouring weights of each with four activations that are broadcast from memory. It must
//! not know layouts.
//!
//! The instruction takes unsigned weights, so those with a sign are kept 128 too high and the sum
//! starts at −128 · Σq, which the activations carry.

use std::arch::x86_64::*;

use super::activations::{ActBlock, flat};
use super::simd::{BLOCK, QUADS, Range, Simd};

/// The tier's vectors; used only behind the door that checks for its features.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx512Vnni;

/// Weights are stored this much too high for `vpdpbusd`, where they have a sign.
const LIFT: i32 = 128;

// SAFETY (every block below): the caller's word that the features are there and that pointers
// reach as far as the trait says; no load needs alignment.
impl Simd for Avx512Vnni {
    type Bytes = __m512i;
    type Ints = __m512i;
    type Floats = __m512;

    #[inline(always)]
    unsafe fn bytes(at: *const u8) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_loadu_si512(at.cast()) }
    }

    #[inline(always)]
    unsafe fn store_bytes(v: __m512i, to: *mut u8) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_si512(to.cast(), v) }
    }

    #[inline(always)]
    unsafe fn field(v: __m512i, from: u32, to: u32, mask: u8) -> __m512i {
        // SAFETY: see above.
        unsafe {
            // Bits that cross from a neighbouring byte are outside the mask.
            let moved = if from >= to {
                _mm512_srl_epi16(v, _mm_cvtsi32_si128((from - to) as i32))
            } else {
                _mm512_sll_epi16(v, _mm_cvtsi32_si128((to - from) as i32))
            };
            _mm512_and_si512(moved, _mm512_set1_epi8(mask as i8))
        }
    }

    #[inline(always)]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_or_si512(a, b) }
    }

    #[inline(always)]
    unsafe fn lookup(table: &[i8; 16], v: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, v)
        }
    }

    /// To unsigned, [`LIFT`] above the weight where the format has a sign.
    #[inline(always)]
    unsafe fn ready<R: Range>(v: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe {
            if R::SIGNED {
                _mm512_xor_si512(v, _mm512_set1_epi8(LIFT as u8 as i8))
            } else if R::BIAS != 0 {
                _mm512_add_epi8(v, _mm512_set1_epi8((LIFT - R::BIAS) as i8))
            } else {
                v
            }
        }
    }

    #[inline(always)]
    unsafe fn dot<R: Range, const N: usize>(
        w: &[__m512i; QUADS],
        first: usize,
        x: *const ActBlock,
    ) -> __m512i {
        // SAFETY: see above.
        unsafe {
            let begin = if !R::SIGNED && R::BIAS == 0 {
                _mm512_setzero_si512()
            } else {
                lift::<N>(first, x)
            };
            added::<N>(begin, w, first, x)
        }
    }

    /// Without a sign, weights are what the instruction takes as they are: only the bias has to go, and that from the
    /// sum.
    #[inline(always)]
    unsafe fn dot_stored<R: Range, const N: usize>(
        w: &[__m512i; QUADS],
        first: usize,
        x: *const ActBlock,
    ) -> __m512i {
        // SAFETY: see above.
        unsafe {
            let mut w = *w;
            let begin = match R::BIAS {
                _ if R::SIGNED => {
                    w = w.map(|w| Self::ready::<R>(w));
                    lift::<N>(first, x)
                }
                0 => _mm512_setzero_si512(),
                bias if LIFT % bias == 0 => {
                    let shift = _mm_cvtsi32_si128((LIFT / bias).trailing_zeros() as i32);
                    _mm512_sra_epi32(lift::<N>(first, x), shift)
                }
                bias => {
                    let sum = _mm512_srai_epi32::<7>(lift::<N>(first, x));
                    _mm512_mullo_epi32(sum, _mm512_set1_epi32(bias))
                }
            };
            if N < QUADS {
                return added::<N>(begin, &w, first, x);
            }
            // Two short chains instead of a long one: a row alone has no other work to do meanwhile.
            let half = added::<{ QUADS / 2 }>(begin, &w, 0, x);
            let other = added::<{ QUADS / 2 }>(_mm512_setzero_si512(), &w, QUADS / 2, x);
            _mm512_add_epi32(half, other)
        }
    }

    #[inline(always)]
    unsafe fn quantized(x: &[f32; BLOCK]) -> ActBlock {
        // SAFETY: see above.
        unsafe {
            let (low, high) = (_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x.as_ptr().add(16)));
            let size = |v| _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(i32::MAX));
            let most = _mm512_max_epu32(size(low), size(high));
            let most = _mm256_max_epu32(
                _mm512_castsi512_si256(most),
                _mm512_extracti64x4_epi64::<1>(most),
            );
            let most =
                _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256::<1>(most));
            let most = _mm_max_epu32(most, _mm_shuffle_epi32::<0b01_00_11_10>(most));
            let most = _mm_max_epu32(most, _mm_shuffle_epi32::<0b10_11_00_01>(most));
            let largest = _mm_cvtsi128_si32(most) as u32;
            let a = f32::from_bits(largest);
            let inverse = 127.0 / a;
            if let Some(flat) = flat(largest, inverse) {
                return flat;
            }
            // To the nearest integer, ties to even: the mode that Rust's programs run in.
            let whole = |v| {
                let w = _mm512_cvtps_epi32(_mm512_mul_ps(v, _mm512_set1_ps(inverse)));
                _mm512_cvtepi32_epi8(w)
            };
            let q = _mm256_set_m128i(whole(high), whole(low));
            // Sums of four, then of each half.
            let sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), q);
            let sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32::<0b01_00_11_10>(sums));
            let sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32::<0b10_11_00_01>(sums));
            let first = _mm_cvtsi128_si32(_mm256_castsi256_si128(sums));
            let sum = first + _mm_cvtsi128_si32(_mm256_extracti128_si256::<1>(sums));
            let mut block = ActBlock {
                q: [0; BLOCK],
                d: a / 127.0,
                sx: 0.0,
                lift: -LIFT * sum,
                lift_first: -LIFT * first,
            };
            block.sx = block.d * sum as f32;
            _mm256_storeu_si256(block.q.as_mut_ptr().cast(), q);
            block
        }
    }

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn splat(v: f32) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_set1_ps(v) }
    }

    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn negate(v: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_sub_ps(_mm512_setzero_ps(), v) }
    }

    #[inline(always)]
    unsafe fn from_ints(v: __m512i) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtepi32_ps(v) }
    }

    #[inline(always)]
    unsafe fn from_f32(at: *const u8) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_loadu_ps(at.cast()) }
    }

    #[inline(always)]
    unsafe fn from_f16(at: *const u8) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
    }

    #[inline(always)]
    unsafe fn from_bf16(at: *const u8) -> __m512 {
        // SAFETY: see above.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    unsafe fn from_u8(at: *const u8) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast()))) }
    }

    #[inline(always)]
    unsafe fn from_i8(at: *const u8) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast()))) }
    }

    #[inline(always)]
    unsafe fn from_exponents(at: *const u8) -> __m512 {
        // SAFETY: see above.
        unsafe {
            let e = _mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast()));
            let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(e, _mm512_set1_epi32(1)));
            let small = _mm512_sllv_epi32(_mm512_set1_epi32(0x0020_0000), e);
            let below = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
            _mm512_castsi512_ps(_mm512_mask_blend_epi32(below, normal, small))
        }
    }

    #[inline(always)]
    unsafe fn store(v: __m512, to: *mut f32) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(to, v) }
    }
}

/// −[`LIFT`] times the sum of the activations of `N` quads from `first` on: all, or either half.
#[inline(always)]
unsafe fn lift<const N: usize>(first: usize, x: *const ActBlock) -> __m512i {
    // SAFETY: see above.
    unsafe {
        if N == QUADS {
            _mm512_set1_epi32((*x).lift)
        } else if first == 0 {
            _mm512_set1_epi32((*x).lift_first)
        } else {
            _mm512_sub_epi32(_mm512_set1_epi32((*x).lift), _mm512_set1_epi32((*x).lift_first))
        }
    }
}

/// `sum` and the products of `N` quads from `first` on.
#[inline(always)]
unsafe fn added<const N: usize>(
    mut sum: __m512i,
    w: &[__m512i; QUADS],
    first: usize,
    x: *const ActBlock,
) -> __m512i {
    // SAFETY: see above.
    unsafe {
        let q = (*x).q.as_ptr().cast::<i32>();
        for k in 0..N {
            let quad = first + k;
            let x = _mm512_set1_epi32(q.add(quad).read_unaligned());
            sum = _mm512_dpbusd_epi32(sum, w[quad], x);
        }
        sum
    }
}

super::drive::tier!(
    KERNELS,
    Avx512Vnni,
    rows 8,
    float rows 4, many 32,
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
);

/// Multiplies in registers, twelve sums in flight; returns multiplications and additions.
///
/// # Safety
/// The tier is available.
#[target_feature(enable = "avx512f,avx512vnni")]
pub(crate) unsafe fn busy(rounds: usize) -> usize {
    let mut sums = [_mm512_set1_epi32(1); 12];
    let (w, x) = (std::hint::black_box(_mm512_set1_epi8(3)), _mm512_set1_epi8(5));
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbusd_epi32(*sum, w, x);
        }
    }
    std::hint::black_box(sums);
    rounds * 12 * 2 * 64
}
