//! The tier that every machine has: plain arrays, one lane after the other. What it computes is
//! what the other tiers must compute, to the bit.

use fornax_gguf::blocks::{bf16_to_f32, f16_to_f32};

use super::activations::ActBlock;
use super::simd::{QUADS, Range, Simd, TILE};

/// The scalar tier.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scalar;

/// 2^(e − 128), below the normal range too.
#[inline(always)]
pub(super) fn half_power(e: u8) -> f32 {
    let bits = if e < 2 { 0x0020_0000 << e } else { (u32::from(e) - 1) << 23 };
    f32::from_bits(bits)
}

#[inline(always)]
unsafe fn lanes<const N: usize>(at: *const u8, widen: impl Fn([u8; N]) -> f32) -> [f32; TILE] {
    let mut out = [0.0; TILE];
    for (lane, out) in out.iter_mut().enumerate() {
        // SAFETY: sixteen elements of N bytes by the caller's word; arrays of bytes have no
        // alignment.
        *out = widen(unsafe { *at.add(lane * N).cast::<[u8; N]>() });
    }
    out
}

#[inline(always)]
fn each(a: [f32; TILE], b: [f32; TILE], op: impl Fn(f32, f32) -> f32) -> [f32; TILE] {
    let mut out = a;
    for (out, b) in out.iter_mut().zip(b) {
        *out = op(*out, b);
    }
    out
}

impl Simd for Scalar {
    type Bytes = [u8; 64];
    type Ints = [i32; TILE];
    type Floats = [f32; TILE];

    #[inline(always)]
    unsafe fn bytes(at: *const u8) -> [u8; 64] {
        // SAFETY: the caller's word.
        unsafe { *at.cast::<[u8; 64]>() }
    }

    #[inline(always)]
    unsafe fn store_bytes(v: [u8; 64], to: *mut u8) {
        // SAFETY: the caller's word.
        unsafe { *to.cast::<[u8; 64]>() = v }
    }

    #[inline(always)]
    unsafe fn field(v: [u8; 64], from: u32, to: u32, mask: u8) -> [u8; 64] {
        let mut out = v;
        for b in &mut out {
            *b = (if from >= to { *b >> (from - to) } else { *b << (to - from) }) & mask;
        }
        out
    }

    #[inline(always)]
    unsafe fn or(a: [u8; 64], b: [u8; 64]) -> [u8; 64] {
        let mut out = a;
        for (out, b) in out.iter_mut().zip(b) {
            *out |= b;
        }
        out
    }

    #[inline(always)]
    unsafe fn lookup(table: &[i8; 16], v: [u8; 64]) -> [u8; 64] {
        let mut out = v;
        for b in &mut out {
            *b = table[usize::from(*b & 15)] as u8;
        }
        out
    }

    /// To two's complement of 8 bits.
    #[inline(always)]
    unsafe fn ready<R: Range>(v: [u8; 64]) -> [u8; 64] {
        let mut out = v;
        for b in &mut out {
            *b = b.wrapping_sub(R::BIAS as u8);
        }
        out
    }

    #[inline(always)]
    unsafe fn dot<R: Range, const N: usize>(
        w: &[[u8; 64]; QUADS],
        first: usize,
        x: *const ActBlock,
    ) -> [i32; TILE] {
        // SAFETY: the caller's word.
        let q = unsafe { &(*x).q };
        let mut sums = [0i32; TILE];
        for quad in first..first + N {
            for (row, sum) in sums.iter_mut().enumerate() {
                for k in 0..4 {
                    *sum += i32::from(w[quad][row * 4 + k] as i8) * i32::from(q[quad * 4 + k]);
                }
            }
        }
        sums
    }

    #[inline(always)]
    unsafe fn zero() -> [f32; TILE] {
        [0.0; TILE]
    }

    #[inline(always)]
    unsafe fn splat(v: f32) -> [f32; TILE] {
        [v; TILE]
    }

    #[inline(always)]
    unsafe fn add(a: [f32; TILE], b: [f32; TILE]) -> [f32; TILE] {
        each(a, b, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn mul(a: [f32; TILE], b: [f32; TILE]) -> [f32; TILE] {
        each(a, b, |a, b| a * b)
    }

    #[inline(always)]
    unsafe fn negate(v: [f32; TILE]) -> [f32; TILE] {
        each([0.0; TILE], v, |zero, v| zero - v)
    }

    #[inline(always)]
    unsafe fn from_ints(v: [i32; TILE]) -> [f32; TILE] {
        let mut out = [0.0; TILE];
        for (out, v) in out.iter_mut().zip(v) {
            *out = v as f32;
        }
        out
    }

    #[inline(always)]
    unsafe fn from_f32(at: *const u8) -> [f32; TILE] {
        // SAFETY: the caller's word.
        unsafe { lanes(at, f32::from_le_bytes) }
    }

    #[inline(always)]
    unsafe fn from_f16(at: *const u8) -> [f32; TILE] {
        // SAFETY: the caller's word.
        unsafe { lanes(at, |b| f16_to_f32(u16::from_le_bytes(b))) }
    }

    #[inline(always)]
    unsafe fn from_bf16(at: *const u8) -> [f32; TILE] {
        // SAFETY: the caller's word.
        unsafe { lanes(at, |b| bf16_to_f32(u16::from_le_bytes(b))) }
    }

    #[inline(always)]
    unsafe fn from_u8(at: *const u8) -> [f32; TILE] {
        // SAFETY: the caller's word.
        unsafe { lanes(at, |[b]| f32::from(b)) }
    }

    #[inline(always)]
    unsafe fn from_i8(at: *const u8) -> [f32; TILE] {
        // SAFETY: the caller's word.
        unsafe { lanes(at, |[b]| f32::from(b as i8)) }
    }

    #[inline(always)]
    unsafe fn from_exponents(at: *const u8) -> [f32; TILE] {
        // SAFETY: the caller's word.
        unsafe { lanes(at, |[b]| half_power(b)) }
    }

    #[inline(always)]
    unsafe fn store(v: [f32; TILE], to: *mut f32) {
        // SAFETY: the caller's word.
        unsafe { to.cast::<[f32; TILE]>().write_unaligned(v) }
    }
}

super::drive::tier!(KERNELS, Scalar, rows 8, float rows 4, many usize::MAX);
