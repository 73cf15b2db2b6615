//! The vector trait for AVX2 and AVX-512. It knows no op.

use std::arch::x86_64::*;

use super::lanes::Lanes;

/// Two AVX registers; needs AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(super) struct Avx2(__m256, __m256);

/// One AVX-512 register; needs AVX-512 F.
#[derive(Clone, Copy)]
pub(super) struct Avx512(__m512);

// SAFETY of every function below: the trait's condition, which is what the intrinsics ask for.
#[allow(clippy::undocumented_unsafe_blocks, reason = "one condition for all, said above")]
impl Lanes for Avx2 {
    const REGISTERS: usize = 4;

    #[inline(always)]
    unsafe fn splat(v: f32) -> Avx2 {
        unsafe { Avx2(_mm256_set1_ps(v), _mm256_set1_ps(v)) }
    }
    #[inline(always)]
    unsafe fn load(at: *const f32) -> Avx2 {
        unsafe { Avx2(_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))) }
    }
    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        unsafe {
            _mm256_storeu_ps(at, self.0);
            _mm256_storeu_ps(at.add(8), self.1);
        }
    }
    #[inline(always)]
    unsafe fn add(self, o: Avx2) -> Avx2 {
        unsafe { Avx2(_mm256_add_ps(self.0, o.0), _mm256_add_ps(self.1, o.1)) }
    }
    #[inline(always)]
    unsafe fn sub(self, o: Avx2) -> Avx2 {
        unsafe { Avx2(_mm256_sub_ps(self.0, o.0), _mm256_sub_ps(self.1, o.1)) }
    }
    #[inline(always)]
    unsafe fn mul(self, o: Avx2) -> Avx2 {
        unsafe { Avx2(_mm256_mul_ps(self.0, o.0), _mm256_mul_ps(self.1, o.1)) }
    }
    #[inline(always)]
    unsafe fn div(self, o: Avx2) -> Avx2 {
        unsafe { Avx2(_mm256_div_ps(self.0, o.0), _mm256_div_ps(self.1, o.1)) }
    }
    #[inline(always)]
    unsafe fn add_product(self, a: Avx2, b: Avx2) -> Avx2 {
        unsafe { Avx2(_mm256_fmadd_ps(a.0, b.0, self.0), _mm256_fmadd_ps(a.1, b.1, self.1)) }
    }
    #[inline(always)]
    unsafe fn max(self, o: Avx2) -> Avx2 {
        unsafe { Avx2(_mm256_max_ps(self.0, o.0), _mm256_max_ps(self.1, o.1)) }
    }
    #[inline(always)]
    unsafe fn min(self, o: Avx2) -> Avx2 {
        unsafe { Avx2(_mm256_min_ps(self.0, o.0), _mm256_min_ps(self.1, o.1)) }
    }
    #[inline(always)]
    unsafe fn exp2_biased(self) -> Avx2 {
        unsafe {
            let one = _mm256_set1_epi32(127 << 23);
            let f = |v| {
                let n = _mm256_slli_epi32::<23>(_mm256_castps_si256(v));
                _mm256_castsi256_ps(_mm256_add_epi32(n, one))
            };
            Avx2(f(self.0), f(self.1))
        }
    }
    #[inline(always)]
    unsafe fn zero_below(self, b: Avx2, v: Avx2) -> Avx2 {
        unsafe {
            let below = |a, b| _mm256_cmp_ps::<_CMP_LT_OQ>(a, b);
            Avx2(
                _mm256_andnot_ps(below(self.0, b.0), v.0),
                _mm256_andnot_ps(below(self.1, b.1), v.1),
            )
        }
    }
    #[inline(always)]
    unsafe fn load_f16(at: *const u16) -> Avx2 {
        unsafe {
            let lo = _mm_loadu_si128(at.cast());
            let hi = _mm_loadu_si128(at.add(8).cast());
            Avx2(_mm256_cvtph_ps(lo), _mm256_cvtph_ps(hi))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, at: *mut u16) {
        unsafe {
            let lo = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0);
            let hi = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1);
            _mm_storeu_si128(at.cast(), lo);
            _mm_storeu_si128(at.add(8).cast(), hi);
        }
    }
    #[inline(always)]
    unsafe fn load_i8(at: *const i8) -> Avx2 {
        unsafe {
            let widen = |q| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q));
            Avx2(widen(_mm_loadl_epi64(at.cast())), widen(_mm_loadl_epi64(at.add(8).cast())))
        }
    }
}

/// One number of sixteen: each half with the other, in the order of [`Lanes::sum`].
macro_rules! halves {
    ($v:expr, $eight:ident, $four:ident) => {{
        let high = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd($v.0));
        let a = $eight(_mm512_castps512_ps256($v.0), _mm256_castpd_ps(high));
        let a = $four(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let a = $four(a, _mm_movehl_ps(a, a));
        _mm_cvtss_f32($four(a, _mm_movehdup_ps(a)))
    }};
}

// SAFETY of every function below: the trait's condition, which is what the intrinsics ask for.
#[allow(clippy::undocumented_unsafe_blocks, reason = "one condition for all, said above")]
impl Lanes for Avx512 {
    const REGISTERS: usize = 16;

    #[inline(always)]
    unsafe fn splat(v: f32) -> Avx512 {
        unsafe { Avx512(_mm512_set1_ps(v)) }
    }
    #[inline(always)]
    unsafe fn load(at: *const f32) -> Avx512 {
        unsafe { Avx512(_mm512_loadu_ps(at)) }
    }
    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        unsafe { _mm512_storeu_ps(at, self.0) }
    }
    #[inline(always)]
    unsafe fn add(self, o: Avx512) -> Avx512 {
        unsafe { Avx512(_mm512_add_ps(self.0, o.0)) }
    }
    #[inline(always)]
    unsafe fn sub(self, o: Avx512) -> Avx512 {
        unsafe { Avx512(_mm512_sub_ps(self.0, o.0)) }
    }
    #[inline(always)]
    unsafe fn mul(self, o: Avx512) -> Avx512 {
        unsafe { Avx512(_mm512_mul_ps(self.0, o.0)) }
    }
    #[inline(always)]
    unsafe fn div(self, o: Avx512) -> Avx512 {
        unsafe { Avx512(_mm512_div_ps(self.0, o.0)) }
    }
    #[inline(always)]
    unsafe fn add_product(self, a: Avx512, b: Avx512) -> Avx512 {
        unsafe { Avx512(_mm512_fmadd_ps(a.0, b.0, self.0)) }
    }
    #[inline(always)]
    unsafe fn max(self, o: Avx512) -> Avx512 {
        unsafe { Avx512(_mm512_max_ps(self.0, o.0)) }
    }
    #[inline(always)]
    unsafe fn min(self, o: Avx512) -> Avx512 {
        unsafe { Avx512(_mm512_min_ps(self.0, o.0)) }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        unsafe { halves!(self, _mm256_add_ps, _mm_add_ps) }
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        unsafe { halves!(self, _mm256_max_ps, _mm_max_ps) }
    }
    #[inline(always)]
    unsafe fn exp2_biased(self) -> Avx512 {
        unsafe {
            let n = _mm512_slli_epi32::<23>(_mm512_castps_si512(self.0));
            Avx512(_mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(127 << 23))))
        }
    }
    #[inline(always)]
    unsafe fn zero_below(self, b: Avx512, v: Avx512) -> Avx512 {
        unsafe {
            let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(self.0, b.0);
            Avx512(_mm512_maskz_mov_ps(keep, v.0))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(at: *const u16) -> Avx512 {
        unsafe { Avx512(_mm512_cvtph_ps(_mm256_loadu_si256(at.cast()))) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, at: *mut u16) {
        unsafe {
            let h = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0);
            _mm256_storeu_si256(at.cast(), h);
        }
    }
    #[inline(always)]
    unsafe fn load_i8(at: *const i8) -> Avx512 {
        unsafe { Avx512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast())))) }
    }
}
