//! What a tier must provide: vectors of sixteen lanes, one lane per weight row of a tile. It must
//! not know formats beyond the range of their integers.
//!
//! Every operation gives the same bits on every tier. Methods are inlined into functions that
//! carry the tier's features; called elsewhere they are undefined where the features are missing.

use super::activations::{self, ActBlock};

/// Weight rows of a tile.
pub(crate) const TILE: usize = 16;
/// Weights of a block along a row.
pub(super) const BLOCK: usize = 32;
/// Groups of four neighbouring weights in a block: what one dot-product instruction takes.
pub(super) const QUADS: usize = 8;

/// The range of a format's integers as they are stored.
#[allow(dead_code, reason = "which of them a tier reads depends on the architecture")]
pub(super) trait Range: Sized {
    /// Stored as two's complement of 8 bits; `BIAS` is 0 then.
    const SIGNED: bool;
    /// What to take off the stored value to have the weight.
    const BIAS: i32;
    /// The largest stored value.
    const MAX: i32;
}

/// The vectors of a tier.
///
/// # Safety
/// For every method: the tier's features are there, and pointers reach as many elements as the
/// method says.
pub(super) trait Simd: Copy + 'static {
    /// 64 bytes: four neighbouring weights of each of the sixteen rows.
    type Bytes: Copy;
    /// 16 × i32.
    type Ints: Copy;
    /// 16 × f32.
    type Floats: Copy;

    /// Loads 64 bytes.
    unsafe fn bytes(at: *const u8) -> Self::Bytes;
    /// Stores 64 bytes.
    unsafe fn store_bytes(v: Self::Bytes, to: *mut u8);
    /// Moves bit `from` of every byte to bit `to`, the others along, and keeps those of `mask`.
    unsafe fn field(v: Self::Bytes, from: u32, to: u32, mask: u8) -> Self::Bytes;
    /// Bitwise or.
    unsafe fn or(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// `table[v]` for every byte, each below 16.
    unsafe fn lookup(table: &[i8; 16], v: Self::Bytes) -> Self::Bytes;
    /// Brings stored integers into the form that this tier's [`Simd::dot`] takes.
    unsafe fn ready<R: Range>(v: Self::Bytes) -> Self::Bytes;
    /// Per row, the exact sum over the quads `first .. first + N` of weight times activation.
    unsafe fn dot<R: Range, const N: usize>(
        w: &[Self::Bytes; QUADS],
        first: usize,
        x: *const ActBlock,
    ) -> Self::Ints;

    /// [`Simd::dot`] with weights as they are stored: for a block that meets one row alone, where making
    /// it ready would cost more than what that saves.
    #[inline(always)]
    unsafe fn dot_stored<R: Range, const N: usize>(
        w: &[Self::Bytes; QUADS],
        first: usize,
        x: *const ActBlock,
    ) -> Self::Ints {
        let mut w = *w;
        // SAFETY: the caller's word.
        unsafe {
            for v in &mut w[first..first + N] {
                *v = Self::ready::<R>(*v);
            }
            Self::dot::<R, N>(&w, first, x)
        }
    }

    /// [`Simd::dot`] with two rows of activations, where that costs less than twice one.
    #[inline(always)]
    unsafe fn dot_pair<R: Range, const N: usize>(
        w: &[Self::Bytes; QUADS],
        first: usize,
        x: [*const ActBlock; 2],
    ) -> [Self::Ints; 2] {
        // SAFETY: the caller's word.
        unsafe { [Self::dot::<R, N>(w, first, x[0]), Self::dot::<R, N>(w, first, x[1])] }
    }

    /// A block of activations in 8 bits; where a tier has words for it, the same bits sooner.
    #[inline(always)]
    unsafe fn quantized(x: &[f32; BLOCK]) -> ActBlock {
        activations::quantized(x)
    }

    /// Sixteen zeros.
    unsafe fn zero() -> Self::Floats;
    /// Sixteen times `v`.
    unsafe fn splat(v: f32) -> Self::Floats;
    /// Sums.
    unsafe fn add(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// Products.
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// 0 − v.
    unsafe fn negate(v: Self::Floats) -> Self::Floats;
    /// To the nearest float.
    unsafe fn from_ints(v: Self::Ints) -> Self::Floats;
    /// Loads 16 f32.
    unsafe fn from_f32(at: *const u8) -> Self::Floats;
    /// Loads and widens 16 f16.
    unsafe fn from_f16(at: *const u8) -> Self::Floats;
    /// Loads and widens 16 bf16.
    unsafe fn from_bf16(at: *const u8) -> Self::Floats;
    /// Loads and converts 16 unsigned bytes.
    unsafe fn from_u8(at: *const u8) -> Self::Floats;
    /// Loads and converts 16 signed bytes.
    unsafe fn from_i8(at: *const u8) -> Self::Floats;
    /// Loads 16 exponent bytes and gives 2^(e − 128).
    unsafe fn from_exponents(at: *const u8) -> Self::Floats;
    /// Stores 16 f32.
    unsafe fn store(v: Self::Floats, to: *mut f32);
}
