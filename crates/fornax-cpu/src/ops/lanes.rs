//! Sixteen floats at a time: the tiny vector trait that norms, activations and attention are
//! written over, once. It knows no op.
//!
//! Every operation rounds as IEEE 754 says, and what is fused is fused everywhere, so that the same
//! algorithm gives the same bits on every tier, plain Rust included. The functions are
//! `inline(always)` and become vector code only inside an entry that carries the tier's
//! `target_feature`.

#![allow(clippy::needless_range_loop, reason = "registers are indexed in step, by constants")]

/// Sixteen lanes of f32.
///
/// # Safety
/// Every function may be called only where the tier's instructions are available (inside an
/// entry with its `target_feature`), and pointers must be good for sixteen elements.
pub(super) trait Lanes: Copy {
    /// How many vectors an inner loop may keep in registers beside its operands.
    const REGISTERS: usize;

    unsafe fn splat(v: f32) -> Self;
    unsafe fn load(at: *const f32) -> Self;
    unsafe fn store(self, at: *mut f32);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    /// `self + a · b`, rounded once. Twice the rate of two operations on every tier but plain Rust,
    /// where it may be a call: for the inner products of attention and for exponentials.
    unsafe fn add_product(self, a: Self, b: Self) -> Self;
    /// The larger; `other` where either is NaN.
    unsafe fn max(self, other: Self) -> Self;
    /// The smaller; `other` where either is NaN.
    unsafe fn min(self, other: Self) -> Self;
    /// 2ⁿ for lanes that hold n + 1.5 · 2²³ with |n| ≤ 126.
    unsafe fn exp2_biased(self) -> Self;
    /// Zero where the lane of `self` is below `bound`, else the lane of `value`.
    unsafe fn zero_below(self, bound: Self, value: Self) -> Self;
    unsafe fn load_f16(at: *const u16) -> Self;
    unsafe fn store_f16(self, at: *mut u16);
    unsafe fn load_i8(at: *const i8) -> Self;

    /// The sum of the lanes: halves added to halves, down to one.
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let mut a = [0.0f32; 16];
        // SAFETY: sixteen elements.
        unsafe { self.store(a.as_mut_ptr()) };
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                a[i] += a[i + half];
            }
        }
        a[0]
    }

    /// The first lane.
    #[inline(always)]
    unsafe fn first(self) -> f32 {
        let mut a = [0.0f32; 16];
        // SAFETY: sixteen elements.
        unsafe { self.store(a.as_mut_ptr()) };
        a[0]
    }

    /// The largest lane; NaN lanes may be passed over.
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        let mut a = [0.0f32; 16];
        // SAFETY: sixteen elements.
        unsafe { self.store(a.as_mut_ptr()) };
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                a[i] = if a[i] > a[i + half] { a[i] } else { a[i + half] };
            }
        }
        a[0]
    }

    /// The first `n` < 16 elements, zeros behind them.
    #[inline(always)]
    unsafe fn load_part(at: *const f32, n: usize) -> Self {
        let mut a = [0.0f32; 16];
        // SAFETY: the caller has `n` elements, and `n` is below sixteen.
        unsafe {
            std::ptr::copy_nonoverlapping(at, a.as_mut_ptr(), n);
            Self::load(a.as_ptr())
        }
    }

    /// Stores the first `n` < 16 lanes.
    #[inline(always)]
    unsafe fn store_part(self, at: *mut f32, n: usize) {
        let mut a = [0.0f32; 16];
        // SAFETY: the caller has room for `n`, and `n` is below sixteen.
        unsafe {
            self.store(a.as_mut_ptr());
            std::ptr::copy_nonoverlapping(a.as_ptr(), at, n);
        }
    }
}

/// Plain Rust.
#[derive(Clone, Copy)]
pub(super) struct Plain([f32; 16]);

macro_rules! lanewise {
    ($a:expr, $b:expr, $f:expr) => {{
        let mut out = [0.0f32; 16];
        for i in 0..16 {
            out[i] = $f($a[i], $b[i]);
        }
        Plain(out)
    }};
}

impl Lanes for Plain {
    const REGISTERS: usize = 1;

    #[inline(always)]
    unsafe fn splat(v: f32) -> Plain {
        Plain([v; 16])
    }
    #[inline(always)]
    unsafe fn load(at: *const f32) -> Plain {
        // SAFETY: the trait's condition.
        Plain(unsafe { at.cast::<[f32; 16]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: the trait's condition.
        unsafe { at.cast::<[f32; 16]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Plain) -> Plain {
        lanewise!(self.0, other.0, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(self, other: Plain) -> Plain {
        lanewise!(self.0, other.0, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(self, other: Plain) -> Plain {
        lanewise!(self.0, other.0, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(self, other: Plain) -> Plain {
        lanewise!(self.0, other.0, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn add_product(self, a: Plain, b: Plain) -> Plain {
        let mut out = self.0;
        for i in 0..16 {
            out[i] = a.0[i].mul_add(b.0[i], out[i]);
        }
        Plain(out)
    }
    #[inline(always)]
    unsafe fn max(self, other: Plain) -> Plain {
        lanewise!(self.0, other.0, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn min(self, other: Plain) -> Plain {
        lanewise!(self.0, other.0, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn exp2_biased(self) -> Plain {
        Plain(self.0.map(|v| f32::from_bits((v.to_bits() << 23).wrapping_add(127 << 23))))
    }
    #[inline(always)]
    unsafe fn zero_below(self, bound: Plain, value: Plain) -> Plain {
        let mut out = value.0;
        for i in 0..16 {
            if self.0[i] < bound.0[i] {
                out[i] = 0.0;
            }
        }
        Plain(out)
    }
    #[inline(always)]
    unsafe fn load_f16(at: *const u16) -> Plain {
        // SAFETY: the trait's condition.
        let bits = unsafe { at.cast::<[u16; 16]>().read_unaligned() };
        Plain(bits.map(fornax_gguf::blocks::f16_to_f32))
    }
    #[inline(always)]
    unsafe fn store_f16(self, at: *mut u16) {
        let bits = self.0.map(fornax_gguf::blocks::f32_to_f16);
        // SAFETY: the trait's condition.
        unsafe { at.cast::<[u16; 16]>().write_unaligned(bits) }
    }
    #[inline(always)]
    unsafe fn load_i8(at: *const i8) -> Plain {
        // SAFETY: the trait's condition.
        let q = unsafe { at.cast::<[i8; 16]>().read_unaligned() };
        Plain(q.map(f32::from))
    }
}
