//! How the cache stores an element, and how sixteen of them become floats. It knows no attention.

use super::lanes::Lanes;

/// How the cache stores an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cell {
    /// f32.
    F32,
    /// f16.
    F16,
    /// i8 with an f16 scale for 32 elements of a head: scales behind the elements,
    /// `[block of 32 elements][32 tokens]`.
    Q8,
}

/// Elements of the cache as floats, sixteen at a time.
pub(super) trait Elements {
    /// Whether scales lie behind the elements.
    const SCALED: bool;
    /// Bytes of an element.
    const BYTES: usize;

    unsafe fn load<L: Lanes>(at: *const u8, ix: usize) -> L;
}

pub(super) struct AsF32;
pub(super) struct AsF16;
pub(super) struct AsQ8;

impl Elements for AsF32 {
    const SCALED: bool = false;
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load<L: Lanes>(at: *const u8, ix: usize) -> L {
        // SAFETY: the caller's word.
        unsafe { L::load(at.cast::<f32>().add(ix)) }
    }
}

impl Elements for AsF16 {
    const SCALED: bool = false;
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load<L: Lanes>(at: *const u8, ix: usize) -> L {
        // SAFETY: the caller's word.
        unsafe { L::load_f16(at.cast::<u16>().add(ix)) }
    }
}

impl Elements for AsQ8 {
    const SCALED: bool = true;
    const BYTES: usize = 1;

    #[inline(always)]
    unsafe fn load<L: Lanes>(at: *const u8, ix: usize) -> L {
        // SAFETY: the caller's word.
        unsafe { L::load_i8(at.cast::<i8>().add(ix)) }
    }
}
