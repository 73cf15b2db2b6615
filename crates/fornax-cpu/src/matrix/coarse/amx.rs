//! The products of [`super`] with the tiles of AMX: two groups of rows by two tiles of weights, four sums of sixteen by
//! sixteen in registers over a whole span. It must not know models or threads.
//!
//! Registers 0 to 3 hold results, 4 and 5 activations, 6 and 7 weights. A span's sums go to memory, and are scaled while
//! the products of the next span are made. Loads for each four products of 16 × 16 × 64: two registers of activations and
//! two of weights, 1 KB each; sums of 32 bits.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::super::amx::{FULL, Silicon, Unit};
use super::vnni::{GROUPS, fill_tile, put, quantize};
use super::{CoarseKernels, Job, STEP_BYTES, STEPS, TILE, spans, steps};

/// The routines of this tier.
pub(super) static KERNELS: CoarseKernels = CoarseKernels { multiply, quantize, fill_tile };

/// # Safety
/// As for [`super::CoarseMatrix::multiply`].
unsafe fn multiply(job: &Job<'_>) {
    // SAFETY: the caller's word.
    unsafe {
        multiply_with(job, &mut Silicon);
        Silicon.close();
    }
}

/// [`multiply`] on any unit.
///
/// # Safety
/// As there, and the unit's.
pub(super) unsafe fn multiply_with<U: Unit>(job: &Job<'_>, unit: &mut U) {
    // SAFETY: the caller's word.
    unsafe {
        unit.shape(&FULL);
        for tile in job.tiles.clone().step_by(2) {
            two_tiles(job, unit, tile);
        }
    }
}

/// The sums of two groups by two tiles.
#[repr(C, align(64))]
struct Sums([[[i32; TILE]; TILE]; 4]);

/// A span's sums on their way: where they are, whose they are.
#[derive(Clone, Copy)]
struct Waiting {
    sums: *const Sums,
    /// The groups of the two rows of sums, and the span.
    groups: [usize; 2],
    span: usize,
}

/// Two tiles, the second of which may be past the job's last.
///
/// # Safety
/// As for [`multiply_with`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn two_tiles<U: Unit>(job: &Job<'_>, unit: &mut U, tile: usize) {
    let cols = job.matrix.cols;
    let first = job.act_rows.start / TILE;
    let groups = job.act_rows.end.div_ceil(TILE) - first;
    // One that is alone is multiplied twice, and the second result left.
    let tiles = [tile, (tile + 1).min(job.tiles.end - 1)];
    let mut acc = [[[_mm512_setzero_ps(); 2]; TILE]; GROUPS];
    let mut room = [const { MaybeUninit::<Sums>::uninit() }; 2];
    let room = room.as_mut_ptr();
    let mut waiting: Option<Waiting> = None;
    let mut turn = 0;
    let mut scale = |waiting: &Waiting, part: usize| {
        let group = waiting.groups[part / 2];
        if part / 2 == 1 && group == waiting.groups[0] {
            return;
        }
        // SAFETY: the caller's word; tiles, span and group are within the job, and the sums were stored.
        unsafe {
            let dw = tiles.map(|t| _mm512_loadu_ps(job.matrix.scale(t, waiting.span)));
            let dx = job.acts.scale(first + group, waiting.span);
            add(&mut acc[group], &*waiting.sums, part, dw, dx);
        }
    };
    for span in 0..spans(cols) {
        let n = STEPS.min(steps(cols) - span * STEPS);
        let at = span * STEPS * STEP_BYTES;
        for pair in (0..groups).step_by(2) {
            let these = [pair, (pair + 1).min(groups - 1)];
            // SAFETY: the caller's word; tiles, span and groups are within the job.
            unsafe {
                let x = these.map(|g| job.acts.group(first + g).cast_const().wrapping_add(at));
                let w = tiles.map(|t| job.matrix.tile(t).wrapping_add(at));
                unit.zero::<0>();
                unit.zero::<1>();
                unit.zero::<2>();
                unit.zero::<3>();
                for step in 0..n {
                    let from = step * STEP_BYTES;
                    unit.load::<4>(x[0].add(from), 64);
                    unit.load::<6>(w[0].add(from), 64);
                    unit.dot::<0, 4, 6>();
                    unit.load::<7>(w[1].add(from), 64);
                    unit.dot::<1, 4, 7>();
                    unit.load::<5>(x[1].add(from), 64);
                    unit.dot::<2, 5, 6>();
                    unit.dot::<3, 5, 7>();
                    if let Some(waiting) = &waiting {
                        scale(waiting, step);
                    }
                }
                if let Some(waiting) = &waiting {
                    (n..STEPS).for_each(|part| scale(waiting, part));
                }
                let sums: *mut Sums = room.wrapping_add(turn % 2).cast();
                let to = |part: usize| (&raw mut (*sums).0[part]).cast();
                unit.store::<0>(to(0));
                unit.store::<1>(to(1));
                unit.store::<2>(to(2));
                unit.store::<3>(to(3));
                waiting = Some(Waiting { sums, groups: these, span });
                turn += 1;
            }
        }
    }
    if let Some(waiting) = &waiting {
        (0..STEPS).for_each(|part| scale(waiting, part));
    }
    for of in 0..(job.tiles.end - tile).min(2) {
        // SAFETY: the caller's word.
        unsafe { put(job, tiles[of], |group, row| acc[group][row][of]) };
    }
}

/// Scales half of the rows of a group, by both tiles, and adds them: the first half in even parts.
///
/// # Safety
/// Sixteen scales at `dx`, and the features are there.
#[inline(always)]
unsafe fn add(
    acc: &mut [[__m512; 2]; TILE],
    sums: &Sums,
    part: usize,
    dw: [__m512; 2],
    dx: *const f32,
) {
    const HALF: usize = TILE / 2;
    let (group, from) = (part / 2 * 2, part % 2 * HALF);
    for row in 0..HALF {
        let row = from + row;
        // SAFETY: the caller's word.
        unsafe {
            let dx = _mm512_set1_ps(*dx.add(row));
            for of in 0..2 {
                let sum = _mm512_load_si512(sums.0[group + of][row].as_ptr().cast());
                let scale = _mm512_mul_ps(dw[of], dx);
                acc[row][of] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, acc[row][of]);
            }
        }
    }
}
