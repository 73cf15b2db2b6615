//! The arithmetic that is not a matrix product: norms, activations, rotary positions, attention,
//! convolution, routing. It knows no plan and no threads; callers say which rows are theirs.
//!
//! What pays for vectors is written once over [`lanes::Lanes`] and compiled for every tier; the
//! rest is plain Rust. Both give the same bits on every tier.

mod attend;
mod cells;
mod lanes;
mod math;
pub(crate) mod measure;
pub(crate) mod rows;

#[cfg(target_arch = "aarch64")]
mod arm;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use attend::{
    Attend, BLOCK, QUERIES, SPLIT, Scratch, TILE_QUERIES, TileScratch, fits, part_len, splits,
};
pub(crate) use cells::Cell;

use fornax_plan::{Activation, RopePairs};

use crate::isa::Isa;

/// The vector routines of one tier.
///
/// # Safety
/// Of every function: the tier is available on this processor, and the pointers are good for the
/// element counts given.
pub(crate) struct VectorOps {
    /// x, weight, residual or null, eps, out, n: RMS norm.
    pub(crate) norm: unsafe fn(*const f32, *const f32, *const f32, f32, *mut f32, usize),
    /// gate, up, out, n, activation.
    pub(crate) gate: unsafe fn(*const f32, *const f32, *mut f32, usize, Activation),
    /// x, n, scale, cap (0 for none).
    pub(crate) scale_and_cap: unsafe fn(*mut f32, usize, f32, f32),
    /// x, y, n: x += y.
    pub(crate) add: unsafe fn(*mut f32, *const f32, usize),
    /// A head, its angles as [`rows::angles`] makes them, which elements pair up.
    pub(crate) rotate: unsafe fn(&mut [f32], &[f32], RopePairs),
    /// x, out, n (a multiple of 16).
    pub(crate) to_f16: unsafe fn(*const f32, *mut u16, usize),
    /// One call of attention.
    pub(crate) attend: unsafe fn(&Attend<'_>, &mut Scratch),
    /// One split of a call, its number, where its parts go, elements from head to head.
    pub(crate) attend_part: unsafe fn(&Attend<'_>, &mut Scratch, usize, *mut f32, usize),
    /// The end of a call from all of its parts, elements from head to head.
    pub(crate) attend_merge: unsafe fn(&Attend<'_>, &mut Scratch, *const f32, usize),
}

/// One tier: entries that carry its features, and the table of them.
macro_rules! tier {
    ($name:ident, $lanes:ty $(, $feature:literal)?) => {
        mod $name {
            use super::*;

            // SAFETY of every entry: the table's condition is the trait's.
            $(#[target_feature(enable = $feature)])?
            unsafe fn norm(
                x: *const f32,
                w: *const f32,
                r: *const f32,
                eps: f32,
                out: *mut f32,
                n: usize,
            ) {
                // SAFETY: as said above.
                unsafe { math::norm::<$lanes>(x, w, r, eps, out, n) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn gate(g: *const f32, u: *const f32, out: *mut f32, n: usize, act: Activation) {
                // SAFETY: as said above.
                unsafe { math::gate::<$lanes>(g, u, out, n, act) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn scale_and_cap(x: *mut f32, n: usize, scale: f32, cap: f32) {
                // SAFETY: as said above.
                unsafe { math::scale_and_cap::<$lanes>(x, n, scale, cap) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn add(x: *mut f32, y: *const f32, n: usize) {
                // SAFETY: as said above.
                unsafe { math::add::<$lanes>(x, y, n) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn rotate(head: &mut [f32], angles: &[f32], pairs: RopePairs) {
                rows::rotate(head, angles, pairs);
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn to_f16(x: *const f32, out: *mut u16, n: usize) {
                // SAFETY: as said above.
                unsafe { math::to_f16::<$lanes>(x, out, n) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn attend(a: &Attend<'_>, s: &mut Scratch) {
                // SAFETY: as said above.
                unsafe { super::attend::attend::<$lanes>(a, s) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn attend_part(
                a: &Attend<'_>,
                s: &mut Scratch,
                split: usize,
                parts: *mut f32,
                stride: usize,
            ) {
                // SAFETY: as said above.
                unsafe { super::attend::attend_part::<$lanes>(a, s, split, parts, stride) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn attend_merge(
                a: &Attend<'_>,
                s: &mut Scratch,
                parts: *const f32,
                stride: usize,
            ) {
                // SAFETY: as said above.
                unsafe { super::attend::attend_merge::<$lanes>(a, s, parts, stride) }
            }

            pub(super) static TABLE: VectorOps = VectorOps {
                norm,
                gate,
                scale_and_cap,
                add,
                rotate,
                to_f16,
                attend,
                attend_part,
                attend_merge,
            };
        }
    };
}

tier!(plain, lanes::Plain);
#[cfg(target_arch = "x86_64")]
tier!(avx2, x86::Avx2, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
tier!(avx512, x86::Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c");
#[cfg(target_arch = "aarch64")]
tier!(neon, arm::Neon, "neon");

impl VectorOps {
    /// The routines of a tier; plain Rust for a tier of another architecture.
    pub(crate) fn of(isa: Isa) -> &'static VectorOps {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &avx2::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni | Isa::Amx => &avx512::TABLE,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon | Isa::NeonDotprod | Isa::NeonI8mm => &neon::TABLE,
            _ => &plain::TABLE,
        }
    }
}

/// Attention of up to [`TILE_QUERIES`] queries of one sequence that may round differently, of shapes that [`fits`]
/// names.
///
/// # Safety
/// As of [`VectorOps`], and the addresses of the call are good for its sizes.
pub(crate) type LongAttend = unsafe fn(&Attend<'_>, &mut TileScratch);

impl Isa {
    /// That of the tier, where it has one.
    pub(crate) fn long_attend(self) -> Option<LongAttend> {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx if crate::matrix::amx::has_halves() => Some(attend::tiles::attend),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
