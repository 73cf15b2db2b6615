//! The three tiers of 64-bit Arm: sixteen rows are the lanes of four registers. They differ in
//! their dot products alone: widening multiplications, `sdot`, or `smmla` for two rows of
//! activations at once. It must not know layouts.
//!
//! `sdot` and `smmla` are written as assembly: the compiler's own functions for them are not
//! stable yet. So is the widening of f16, which this project's oldest compiler lacks.

use std::arch::aarch64::*;
use std::arch::asm;
use std::marker::PhantomData;

use super::activations::ActBlock;
use super::simd::{QUADS, Range, Simd};

/// Registers that hold one value for each of the sixteen rows.
const PARTS: usize = 4;

type Bytes = [uint8x16_t; PARTS];
type Ints = [int32x4_t; PARTS];
type Floats = [float32x4_t; PARTS];

/// A tier's way to multiply and add bytes.
pub(super) trait Dots: Copy + 'static {
    /// As [`Simd::dot`], of signed weights.
    ///
    /// # Safety
    /// As there.
    unsafe fn dot<const N: usize>(w: &[Bytes; QUADS], first: usize, x: *const ActBlock) -> Ints;

    /// As [`Simd::dot_pair`], of signed weights.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    unsafe fn pair<const N: usize>(
        w: &[Bytes; QUADS],
        first: usize,
        x: [*const ActBlock; 2],
    ) -> [Ints; 2] {
        // SAFETY: the caller's word.
        unsafe { [Self::dot::<N>(w, first, x[0]), Self::dot::<N>(w, first, x[1])] }
    }
}

/// Widening multiplications.
#[derive(Clone, Copy, Debug)]
pub(super) struct Widening;
/// `sdot`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dotprod;
/// `smmla`, and `sdot` for a single row.
#[derive(Clone, Copy, Debug)]
pub(super) struct I8mm;

/// Four activations, four times.
#[inline(always)]
unsafe fn quad_of(x: *const ActBlock, quad: usize) -> int8x16_t {
    // SAFETY: the caller's word: `x` is a record, `quad` is below 8; no alignment is needed.
    unsafe {
        let four = (*x).q.as_ptr().add(quad * 4).cast::<i32>().read_unaligned();
        vreinterpretq_s8_s32(vdupq_n_s32(four))
    }
}

impl Dots for Widening {
    #[inline(always)]
    unsafe fn dot<const N: usize>(w: &[Bytes; QUADS], first: usize, x: *const ActBlock) -> Ints {
        // SAFETY: the caller's word.
        unsafe {
            let mut low = [vdupq_n_s32(0); PARTS];
            let mut high = [vdupq_n_s32(0); PARTS];
            // Two products of at most 128 · 127 fit 16 bits.
            for k in 0..N / 2 {
                let (a, b) = (first + 2 * k, first + 2 * k + 1);
                let (xa, xb) = (quad_of(x, a), quad_of(x, b));
                for part in 0..PARTS {
                    let wa = vreinterpretq_s8_u8(w[a][part]);
                    let wb = vreinterpretq_s8_u8(w[b][part]);
                    let products = vmull_s8(vget_low_s8(wa), vget_low_s8(xa));
                    let products = vmlal_s8(products, vget_low_s8(wb), vget_low_s8(xb));
                    low[part] = vpadalq_s16(low[part], products);
                    let products = vmull_high_s8(wa, xa);
                    let products = vmlal_high_s8(products, wb, xb);
                    high[part] = vpadalq_s16(high[part], products);
                }
            }
            let mut sum = low;
            for (sum, high) in sum.iter_mut().zip(high) {
                *sum = vpaddq_s32(*sum, high);
            }
            sum
        }
    }
}

/// `acc + Σ w·x` over four bytes for each lane.
///
/// # Safety
/// The processor has the dot-product instructions.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn sdot(mut acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: registers alone are touched.
    unsafe {
        asm!("sdot {acc:v}.4s, {w:v}.16b, {x:v}.16b", acc = inout(vreg) acc, w = in(vreg) w,
            x = in(vreg) x, options(pure, nomem, nostack, preserves_flags));
    }
    acc
}

/// `acc` plus the 2 × 2 products of two rows of eight weights with two of eight activations.
///
/// # Safety
/// The processor has the 8-bit matrix instructions.
#[inline]
#[target_feature(enable = "neon,i8mm")]
unsafe fn smmla(mut acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: registers alone are touched.
    unsafe {
        asm!("smmla {acc:v}.4s, {w:v}.16b, {x:v}.16b", acc = inout(vreg) acc, w = in(vreg) w,
            x = in(vreg) x, options(pure, nomem, nostack, preserves_flags));
    }
    acc
}

/// Widens four halves; exact, subnormals included.
#[inline(always)]
unsafe fn widen(halves: uint16x4_t) -> float32x4_t {
    let out: float32x4_t;
    // SAFETY: registers alone are touched; the instruction is in every 64-bit Arm.
    unsafe {
        asm!("fcvtl {out:v}.4s, {halves:v}.4h", out = out(vreg) out, halves = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags));
    }
    out
}

impl Dots for Dotprod {
    #[inline(always)]
    unsafe fn dot<const N: usize>(w: &[Bytes; QUADS], first: usize, x: *const ActBlock) -> Ints {
        // SAFETY: the caller's word.
        unsafe {
            let mut sum = [vdupq_n_s32(0); PARTS];
            for k in 0..N {
                let x = quad_of(x, first + k);
                for (part, sum) in sum.iter_mut().enumerate() {
                    *sum = sdot(*sum, vreinterpretq_s8_u8(w[first + k][part]), x);
                }
            }
            sum
        }
    }
}

impl Dots for I8mm {
    #[inline(always)]
    unsafe fn dot<const N: usize>(w: &[Bytes; QUADS], first: usize, x: *const ActBlock) -> Ints {
        // SAFETY: the caller's word; the tier has these instructions too.
        unsafe { Dotprod::dot::<N>(w, first, x) }
    }

    #[inline(always)]
    unsafe fn pair<const N: usize>(
        w: &[Bytes; QUADS],
        first: usize,
        x: [*const ActBlock; 2],
    ) -> [Ints; 2] {
        // SAFETY: the caller's word.
        unsafe {
            // Rows 0 and 1 of a part, then rows 2 and 3, each against both rows of activations.
            let mut front = [vdupq_n_s32(0); PARTS];
            let mut back = [vdupq_n_s32(0); PARTS];
            for k in 0..N / 2 {
                let (a, b) = (first + 2 * k, first + 2 * k + 1);
                let eight = |x: *const ActBlock| vld1_s8((*x).q.as_ptr().add(a * 4));
                let x = vcombine_s8(eight(x[0]), eight(x[1]));
                for part in 0..PARTS {
                    let wa = vreinterpretq_u32_u8(w[a][part]);
                    let wb = vreinterpretq_u32_u8(w[b][part]);
                    let rows = vreinterpretq_s8_u32(vzip1q_u32(wa, wb));
                    front[part] = smmla(front[part], rows, x);
                    let rows = vreinterpretq_s8_u32(vzip2q_u32(wa, wb));
                    back[part] = smmla(back[part], rows, x);
                }
            }
            let mut sums = [front, back];
            for part in 0..PARTS {
                sums[0][part] = vuzp1q_s32(front[part], back[part]);
                sums[1][part] = vuzp2q_s32(front[part], back[part]);
            }
            sums
        }
    }
}

/// The vectors of the Arm tiers; used only behind the door that checks for their features.
#[derive(Clone, Copy, Debug)]
pub(super) struct Neon<D>(PhantomData<D>);

/// The operation on each of the four registers.
macro_rules! each {
    ($a:ident in $all:expr => $op:expr) => {{
        let mut out = $all;
        for $a in &mut out {
            *$a = $op;
        }
        out
    }};
    ($a:ident in $all:expr, $b:ident in $others:expr => $op:expr) => {{
        let mut out = $all;
        for ($a, $b) in out.iter_mut().zip($others) {
            *$a = $op;
        }
        out
    }};
}

// SAFETY (every block below): the caller's word that the features are there and that pointers
// reach as far as the trait says; no load needs alignment.
impl<D: Dots> Simd for Neon<D> {
    type Bytes = Bytes;
    type Ints = Ints;
    type Floats = Floats;

    #[inline(always)]
    unsafe fn bytes(at: *const u8) -> Bytes {
        // SAFETY: see above.
        unsafe { [vld1q_u8(at), vld1q_u8(at.add(16)), vld1q_u8(at.add(32)), vld1q_u8(at.add(48))] }
    }

    #[inline(always)]
    unsafe fn store_bytes(v: Bytes, to: *mut u8) {
        // SAFETY: see above.
        unsafe {
            for (part, v) in v.into_iter().enumerate() {
                vst1q_u8(to.add(part * 16), v);
            }
        }
    }

    #[inline(always)]
    unsafe fn field(v: Bytes, from: u32, to: u32, mask: u8) -> Bytes {
        // SAFETY: see above.
        unsafe {
            let by = vdupq_n_s8(to as i8 - from as i8);
            each!(v in v => vandq_u8(vshlq_u8(*v, by), vdupq_n_u8(mask)))
        }
    }

    #[inline(always)]
    unsafe fn or(a: Bytes, b: Bytes) -> Bytes {
        // SAFETY: see above.
        unsafe { each!(a in a, b in b => vorrq_u8(*a, b)) }
    }

    #[inline(always)]
    unsafe fn lookup(table: &[i8; 16], v: Bytes) -> Bytes {
        // SAFETY: see above.
        unsafe {
            let table = vreinterpretq_u8_s8(vld1q_s8(table.as_ptr()));
            each!(v in v => vqtbl1q_u8(table, *v))
        }
    }

    /// To two's complement of 8 bits.
    #[inline(always)]
    unsafe fn ready<R: Range>(v: Bytes) -> Bytes {
        // SAFETY: see above.
        unsafe { each!(v in v => vsubq_u8(*v, vdupq_n_u8(R::BIAS as u8))) }
    }

    #[inline(always)]
    unsafe fn dot<R: Range, const N: usize>(
        w: &[Bytes; QUADS],
        first: usize,
        x: *const ActBlock,
    ) -> Ints {
        // SAFETY: see above.
        unsafe { D::dot::<N>(w, first, x) }
    }

    #[inline(always)]
    unsafe fn dot_pair<R: Range, const N: usize>(
        w: &[Bytes; QUADS],
        first: usize,
        x: [*const ActBlock; 2],
    ) -> [Ints; 2] {
        // SAFETY: see above.
        unsafe { D::pair::<N>(w, first, x) }
    }

    #[inline(always)]
    unsafe fn zero() -> Floats {
        // SAFETY: see above.
        unsafe { [vdupq_n_f32(0.0); PARTS] }
    }

    #[inline(always)]
    unsafe fn splat(v: f32) -> Floats {
        // SAFETY: see above.
        unsafe { [vdupq_n_f32(v); PARTS] }
    }

    #[inline(always)]
    unsafe fn add(a: Floats, b: Floats) -> Floats {
        // SAFETY: see above.
        unsafe { each!(a in a, b in b => vaddq_f32(*a, b)) }
    }

    #[inline(always)]
    unsafe fn mul(a: Floats, b: Floats) -> Floats {
        // SAFETY: see above.
        unsafe { each!(a in a, b in b => vmulq_f32(*a, b)) }
    }

    #[inline(always)]
    unsafe fn negate(v: Floats) -> Floats {
        // SAFETY: see above.
        unsafe { each!(v in v => vsubq_f32(vdupq_n_f32(0.0), *v)) }
    }

    #[inline(always)]
    unsafe fn from_ints(v: Ints) -> Floats {
        // SAFETY: see above.
        unsafe {
            [vcvtq_f32_s32(v[0]), vcvtq_f32_s32(v[1]), vcvtq_f32_s32(v[2]), vcvtq_f32_s32(v[3])]
        }
    }

    #[inline(always)]
    unsafe fn from_f32(at: *const u8) -> Floats {
        // SAFETY: see above.
        unsafe {
            let v = Self::bytes(at);
            [
                vreinterpretq_f32_u8(v[0]),
                vreinterpretq_f32_u8(v[1]),
                vreinterpretq_f32_u8(v[2]),
                vreinterpretq_f32_u8(v[3]),
            ]
        }
    }

    #[inline(always)]
    unsafe fn from_f16(at: *const u8) -> Floats {
        // SAFETY: see above.
        unsafe {
            let (low, high) = (vld1q_u8(at), vld1q_u8(at.add(16)));
            let (low, high) = (vreinterpretq_u16_u8(low), vreinterpretq_u16_u8(high));
            [
                widen(vget_low_u16(low)),
                widen(vget_high_u16(low)),
                widen(vget_low_u16(high)),
                widen(vget_high_u16(high)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn from_bf16(at: *const u8) -> Floats {
        // SAFETY: see above.
        unsafe {
            let (low, high) = (vld1q_u8(at), vld1q_u8(at.add(16)));
            let zero = vdupq_n_u16(0);
            let (low, high) = (vreinterpretq_u16_u8(low), vreinterpretq_u16_u8(high));
            [
                vreinterpretq_f32_u16(vzip1q_u16(zero, low)),
                vreinterpretq_f32_u16(vzip2q_u16(zero, low)),
                vreinterpretq_f32_u16(vzip1q_u16(zero, high)),
                vreinterpretq_f32_u16(vzip2q_u16(zero, high)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn from_u8(at: *const u8) -> Floats {
        // SAFETY: see above.
        unsafe {
            let v = widened(at);
            [vcvtq_f32_u32(v[0]), vcvtq_f32_u32(v[1]), vcvtq_f32_u32(v[2]), vcvtq_f32_u32(v[3])]
        }
    }

    #[inline(always)]
    unsafe fn from_i8(at: *const u8) -> Floats {
        // SAFETY: see above.
        unsafe {
            let v = vld1q_s8(at.cast());
            let (low, high) = (vmovl_s8(vget_low_s8(v)), vmovl_high_s8(v));
            Self::from_ints([
                vmovl_s16(vget_low_s16(low)),
                vmovl_high_s16(low),
                vmovl_s16(vget_low_s16(high)),
                vmovl_high_s16(high),
            ])
        }
    }

    #[inline(always)]
    unsafe fn from_exponents(at: *const u8) -> Floats {
        // SAFETY: see above.
        unsafe {
            let power = |e: uint32x4_t| {
                let normal = vshlq_n_u32::<23>(vsubq_u32(e, vdupq_n_u32(1)));
                let small = vshlq_u32(vdupq_n_u32(0x0020_0000), vreinterpretq_s32_u32(e));
                let below = vcltq_u32(e, vdupq_n_u32(2));
                vreinterpretq_f32_u32(vbslq_u32(below, small, normal))
            };
            let v = widened(at);
            [power(v[0]), power(v[1]), power(v[2]), power(v[3])]
        }
    }

    #[inline(always)]
    unsafe fn store(v: Floats, to: *mut f32) {
        // SAFETY: see above.
        unsafe {
            vst1q_f32(to, v[0]);
            vst1q_f32(to.add(4), v[1]);
            vst1q_f32(to.add(8), v[2]);
            vst1q_f32(to.add(12), v[3]);
        }
    }
}

/// Sixteen unsigned bytes as integers of 32 bits.
#[inline(always)]
unsafe fn widened(at: *const u8) -> [uint32x4_t; PARTS] {
    // SAFETY: sixteen bytes by the caller's word.
    unsafe {
        let v = vld1q_u8(at);
        let (low, high) = (vmovl_u8(vget_low_u8(v)), vmovl_high_u8(v));
        [
            vmovl_u16(vget_low_u16(low)),
            vmovl_high_u16(low),
            vmovl_u16(vget_low_u16(high)),
            vmovl_high_u16(high),
        ]
    }
}

/// The tier `neon`.
pub(super) mod widening {
    use super::{Neon, Widening};
    crate::matrix::drive::tier!(KERNELS, Neon<Widening>, rows 4, float rows 1, many usize::MAX, #[target_feature(enable = "neon")]);
}

/// The tier `neon_dotprod`.
pub(super) mod dotprod {
    use super::{Dotprod, Neon};
    crate::matrix::drive::tier!(KERNELS, Neon<Dotprod>, rows 4, float rows 1, many usize::MAX, #[target_feature(enable = "neon,dotprod")]);
}

/// The tier `neon_i8mm`.
pub(super) mod i8mm {
    use super::{I8mm, Neon};
    crate::matrix::drive::tier!(KERNELS, Neon<I8mm>, rows 4, float rows 1, many usize::MAX, #[target_feature(enable = "neon,dotprod,i8mm")]);
}
