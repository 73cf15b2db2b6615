//! The vector trait for 64-bit Arm. It knows no op.

use std::arch::aarch64::*;
use std::arch::asm;

use super::lanes::Lanes;

/// Four NEON registers.
#[derive(Clone, Copy)]
pub(super) struct Neon([float32x4_t; 4]);

macro_rules! each {
    ($f:expr) => {
        Neon([$f(0), $f(1), $f(2), $f(3)])
    };
}

// SAFETY of every function below: the trait's condition, which is what the intrinsics ask for.
#[allow(clippy::undocumented_unsafe_blocks, reason = "one condition for all, said above")]
impl Lanes for Neon {
    const REGISTERS: usize = 4;

    #[inline(always)]
    unsafe fn splat(v: f32) -> Neon {
        unsafe { Neon([vdupq_n_f32(v); 4]) }
    }
    #[inline(always)]
    unsafe fn load(at: *const f32) -> Neon {
        unsafe { each!(|i: usize| vld1q_f32(at.add(4 * i))) }
    }
    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        for i in 0..4 {
            unsafe { vst1q_f32(at.add(4 * i), self.0[i]) }
        }
    }
    #[inline(always)]
    unsafe fn add(self, o: Neon) -> Neon {
        unsafe { each!(|i: usize| vaddq_f32(self.0[i], o.0[i])) }
    }
    #[inline(always)]
    unsafe fn sub(self, o: Neon) -> Neon {
        unsafe { each!(|i: usize| vsubq_f32(self.0[i], o.0[i])) }
    }
    #[inline(always)]
    unsafe fn mul(self, o: Neon) -> Neon {
        unsafe { each!(|i: usize| vmulq_f32(self.0[i], o.0[i])) }
    }
    #[inline(always)]
    unsafe fn div(self, o: Neon) -> Neon {
        unsafe { each!(|i: usize| vdivq_f32(self.0[i], o.0[i])) }
    }
    #[inline(always)]
    unsafe fn add_product(self, a: Neon, b: Neon) -> Neon {
        unsafe { each!(|i: usize| vfmaq_f32(self.0[i], a.0[i], b.0[i])) }
    }
    #[inline(always)]
    unsafe fn max(self, o: Neon) -> Neon {
        // A compare and a select: the instruction for the maximum treats NaN differently.
        unsafe { each!(|i: usize| vbslq_f32(vcgtq_f32(self.0[i], o.0[i]), self.0[i], o.0[i])) }
    }
    #[inline(always)]
    unsafe fn min(self, o: Neon) -> Neon {
        unsafe { each!(|i: usize| vbslq_f32(vcltq_f32(self.0[i], o.0[i]), self.0[i], o.0[i])) }
    }
    #[inline(always)]
    unsafe fn exp2_biased(self) -> Neon {
        unsafe {
            each!(|i: usize| {
                let n = vshlq_n_s32::<23>(vreinterpretq_s32_f32(self.0[i]));
                vreinterpretq_f32_s32(vaddq_s32(n, vdupq_n_s32(127 << 23)))
            })
        }
    }
    #[inline(always)]
    unsafe fn zero_below(self, b: Neon, v: Neon) -> Neon {
        unsafe {
            each!(|i: usize| {
                let below = vcltq_f32(self.0[i], b.0[i]);
                vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(v.0[i]), below))
            })
        }
    }
    #[inline(always)]
    unsafe fn load_f16(at: *const u16) -> Neon {
        unsafe { each!(|i: usize| widen(vld1_u16(at.add(4 * i)))) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, at: *mut u16) {
        for i in 0..4 {
            unsafe { vst1_u16(at.add(4 * i), narrow(self.0[i])) }
        }
    }
    #[inline(always)]
    unsafe fn load_i8(at: *const i8) -> Neon {
        unsafe {
            let q = vld1q_s8(at);
            let (lo, hi) = (vmovl_s8(vget_low_s8(q)), vmovl_s8(vget_high_s8(q)));
            Neon([
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo))),
                vcvtq_f32_s32(vmovl_s16(vget_high_s16(lo))),
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi))),
                vcvtq_f32_s32(vmovl_s16(vget_high_s16(hi))),
            ])
        }
    }
}

/// Four halves to floats. Written as an instruction: the half-precision intrinsics are newer than
/// the compiler that this crate asks for.
#[inline(always)]
unsafe fn widen(h: uint16x4_t) -> float32x4_t {
    let out: float32x4_t;
    // SAFETY: one instruction of the base architecture, registers only.
    unsafe {
        asm!("fcvtl {o:v}.4s, {h:v}.4h", o = out(vreg) out, h = in(vreg) h,
            options(pure, nomem, nostack, preserves_flags));
    }
    out
}

/// Four floats to halves, to nearest, ties to even.
#[inline(always)]
unsafe fn narrow(v: float32x4_t) -> uint16x4_t {
    let out: uint16x4_t;
    // SAFETY: one instruction of the base architecture, registers only.
    unsafe {
        asm!("fcvtn {o:v}.4h, {v:v}.4s", o = out(vreg) out, v = in(vreg) v,
            options(pure, nomem, nostack, preserves_flags));
    }
    out
}
