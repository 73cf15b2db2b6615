//! The AMX tier: for eight rows of activations and more, a tile register multiplies sixteen of
//! them with sixteen weight rows over a whole block at once; everything else is as in the AVX-512
//! tier. It must not know models or threads.
//!
//! The planes of a block are what a register of weights wants as they lie: eight rows of sixteen
//! quads. Formats of fewer than eight bits are spelled out once for all rows of activations. The
//! integer sums are exact and are scaled and added by the same code as on the other tiers, so
//! that every bit is theirs. The four instructions stand behind [`Unit`], which tests emulate.

mod trial;

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

pub(crate) use trial::{has_halves, works};
#[cfg(test)]
pub(super) use trial::{right_halves, right_sums};

use super::Layout;
use super::activations::{ActBlock, Acts, GROUP};
use super::avx512::{self, Avx512Vnni};
use super::drive::{Job, Kernels, by_layout};
use super::format::{self, Float, Format, Scales};
use super::kernel::scaled;
use super::lines;
use super::simd::{BLOCK, QUADS, Simd, TILE};

/// Rows of activations from which tiles pay.
const WORTH: usize = 8;
/// Groups of sixteen rows that are multiplied with a piece of weights before the next piece.
const GROUPS: usize = 8;
/// Blocks whose weights are spelled out at a time: a multiple of every format's unit.
const CHUNK: usize = 16;
/// Bytes of a block's weights spelled out.
const PLAIN: usize = QUADS * 64;
/// Bytes from one row of a block of activations to the next.
const ACT_STEP: usize = size_of::<ActBlock>();

/// Shapes of the eight registers, as `ldtilecfg` takes them.
#[repr(C, align(64))]
pub(crate) struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Registers 0 to 3 hold results. Of activations there are two, 4 and 6, and of weights two, 5 and 7,
/// so that the next product's are on their way while one is made: of whole blocks.
pub(super) static WHOLE: Config = Config::of(32, 8);
/// The same of half a block, where each half has a scale of its own.
pub(super) static HALVES: Config = Config::of(16, 4);
/// The largest registers that there are, all of them.
pub(crate) static FULL: Config = Config::of(64, 16);

impl Config {
    /// For `act_bytes` activations of a row at once and as many weights, in `weight_rows` quads.
    const fn of(act_bytes: u16, weight_rows: u8) -> Config {
        let (a, w) = (act_bytes, weight_rows);
        Config {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [64, 64, 64, 64, a, 64, a, 64, 0, 0, 0, 0, 0, 0, 0, 0],
            rows: [16, 16, 16, 16, 16, w, 16, w, 0, 0, 0, 0, 0, 0, 0, 0],
        }
    }

    /// Rows of a register, and bytes of a row.
    #[cfg(test)]
    pub(super) fn shape(&self, t: u8) -> (usize, usize) {
        (self.rows[usize::from(t)].into(), self.row_bytes[usize::from(t)].into())
    }
}

/// The tile registers.
///
/// # Safety
/// Of every function: the registers are there and, but for the first, configured; addresses reach
/// as far as the register's shape and the step say.
pub(crate) trait Unit {
    /// Gives the registers their shapes and clears them.
    unsafe fn shape(&mut self, config: &'static Config);
    /// Fills register `T` with rows that lie `step` bytes apart.
    unsafe fn load<const T: u8>(&mut self, at: *const u8, step: usize);
    /// Clears register `T`.
    unsafe fn zero<const T: u8>(&mut self);
    /// Adds to the 32-bit sums of `C` the products of the signed bytes of `A` and `B`.
    unsafe fn dot<const C: u8, const A: u8, const B: u8>(&mut self);
    /// Adds to the f32 sums of `C` the products of the bfloat16 of `A` and `B`; this needs [`has_halves`] besides.
    unsafe fn dot_halves<const C: u8, const A: u8, const B: u8>(&mut self);
    /// Writes register `T` as rows of 64 bytes.
    unsafe fn store<const T: u8>(&mut self, to: *mut u8);
    /// The same with rows that begin `step` bytes apart.
    unsafe fn store_apart<const T: u8>(&mut self, to: *mut u8, step: usize);
}

/// The processor's own.
pub(crate) struct Silicon;

// SAFETY (every block below): the caller's word. The compiler keeps nothing in tile registers,
// and keeps the order of these statements.
impl Unit for Silicon {
    #[inline(always)]
    unsafe fn shape(&mut self, config: &'static Config) {
        // SAFETY: see above; the configuration is 64 bytes.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const *config, options(nostack, readonly));
        }
    }

    #[inline(always)]
    unsafe fn load<const T: u8>(&mut self, at: *const u8, step: usize) {
        // SAFETY: see above.
        unsafe {
            asm!("tileloadd tmm{t}, [{at} + {step}*1]", t = const T, at = in(reg) at,
                step = in(reg) step, options(nostack, preserves_flags, readonly));
        }
    }

    #[inline(always)]
    unsafe fn zero<const T: u8>(&mut self) {
        // SAFETY: see above.
        unsafe { asm!("tilezero tmm{t}", t = const T, options(nostack, preserves_flags, nomem)) }
    }

    #[inline(always)]
    unsafe fn dot<const C: u8, const A: u8, const B: u8>(&mut self) {
        // SAFETY: see above.
        unsafe {
            asm!("tdpbssd tmm{c}, tmm{a}, tmm{b}", c = const C, a = const A, b = const B,
                options(nostack, preserves_flags, nomem));
        }
    }

    #[inline(always)]
    unsafe fn dot_halves<const C: u8, const A: u8, const B: u8>(&mut self) {
        // SAFETY: see above.
        unsafe {
            asm!("tdpbf16ps tmm{c}, tmm{a}, tmm{b}", c = const C, a = const A, b = const B,
                options(nostack, preserves_flags, nomem));
        }
    }

    #[inline(always)]
    unsafe fn store<const T: u8>(&mut self, to: *mut u8) {
        // SAFETY: see above.
        unsafe { self.store_apart::<T>(to, 64) }
    }

    #[inline(always)]
    unsafe fn store_apart<const T: u8>(&mut self, to: *mut u8, step: usize) {
        // SAFETY: see above.
        unsafe {
            asm!("tilestored [{to} + {step}*1], tmm{t}", t = const T, to = in(reg) to,
                step = in(reg) step, options(nostack, preserves_flags));
        }
    }
}

impl Silicon {
    /// Leaves the registers empty, so that no switch of threads has to keep them.
    #[inline(always)]
    pub(crate) fn close(self) {
        // SAFETY: only ever called where the registers are.
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
    }
}

/// The routines of this tier.
pub(super) static KERNELS: Kernels = Kernels { multiply, quantize: avx512::KERNELS.quantize };

/// The door of the tier.
///
/// # Safety
/// As for [`super::Matrix::multiply`]; the tier is available.
unsafe fn multiply(job: &Job<'_>) {
    // SAFETY: the caller's word.
    unsafe {
        if job.act_rows.len() < WORTH
            || !job.matrix.takes_q8()
            || job.matrix.layout == Layout::Foreign
        {
            return (avx512::KERNELS.multiply)(job);
        }
        multiply_with(job, &mut Silicon);
        Silicon.close();
    }
}

/// [`multiply`] of a block format on any unit.
///
/// # Safety
/// As there, and the unit's.
pub(super) unsafe fn multiply_with<U: Unit>(job: &Job<'_>, unit: &mut U) {
    // SAFETY: the caller's word.
    unsafe {
        by_layout!(job.matrix.layout, quantised, floats, foreign::<U>, (job, unit), U);
    }
}

unsafe fn floats<U: Unit, F: Float>(_: &Job<'_>, _: &mut U) {
    unreachable!("only block formats come here");
}

fn foreign<U: Unit>(_: &Job<'_>, _: &mut U) {
    unreachable!("only block formats come here");
}

/// Rows in groups as they lie; those before the first whole group and too few at the end go the
/// other tier's way.
unsafe fn quantised<U: Unit, F: Format>(job: &Job<'_>, unit: &mut U) {
    let Acts::Q8(acts) = job.acts else {
        unreachable!("checked in Matrix::multiply");
    };
    // SAFETY: the caller's word.
    unsafe { unit.shape(if F::HALVES { &HALVES } else { &WHOLE }) };
    let mut row = job.act_rows.start;
    while row < job.act_rows.end {
        let aligned = acts.side_by_side(row) == GROUP;
        let left = job.act_rows.end - row;
        let rows = match aligned {
            true if left >= WORTH => left.min(GROUPS * GROUP),
            true => left,
            false => acts.side_by_side(row).min(left),
        };
        let part = job.of_rows(row..row + rows);
        // SAFETY: the caller's word.
        unsafe {
            if aligned && left >= WORTH {
                for tile in job.tiles.clone() {
                    one_tile::<U, F>(&part, unit, tile);
                }
            } else {
                (avx512::KERNELS.multiply)(&part);
            }
        }
        row += rows;
    }
}

/// Weights and scales of a few blocks of a tile, spelled out.
#[repr(C, align(64))]
struct Spelled {
    w: [[u8; PLAIN]; CHUNK],
    scales: [Scales<Avx512Vnni>; CHUNK],
}

/// Products whose sums are in memory at a time.
const WAITING: usize = 4;

/// The integer sums of a block, of two halves where they have scales of their own.
type Sums = [[[i32; TILE]; GROUP]; 2];

/// Where sums wait to be scaled.
#[repr(C, align(64))]
struct Waiting(MaybeUninit<[Sums; WAITING]>);

/// A tile times at most [`GROUPS`] groups of rows.
///
/// # Safety
/// As for [`multiply_with`]; the job's first row begins a group, and the records of whole groups
/// exist.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn one_tile<U: Unit, F: Format>(job: &Job<'_>, unit: &mut U, tile: usize) {
    let Acts::Q8(acts) = job.acts else {
        unreachable!("checked in Matrix::multiply");
    };
    let blocks = job.matrix.cols() / BLOCK;
    let (first, count) = (job.act_rows.start, job.act_rows.len());
    let weights = job.matrix.start(job.expert, tile);
    let zero = _mm512_setzero_ps();
    let mut acc = [[zero; GROUP]; GROUPS];
    let none = Scales { scale: [zero; 2], min: [zero; 2] };
    let mut spelled = Spelled { w: [[0; PLAIN]; CHUNK], scales: [none; CHUNK] };
    for from in (0..blocks).step_by(CHUNK) {
        let n = CHUNK.min(blocks - from);
        // SAFETY: the caller's word; blocks are within the tile, rows within the view.
        unsafe {
            let unit_bytes = F::HEAD + F::UNIT * F::PLANES;
            let mut plain = [std::ptr::null(); CHUNK];
            for (ix, plain) in plain.iter_mut().enumerate().take(n) {
                let (u, b) = ((from + ix) / F::UNIT, (from + ix) % F::UNIT);
                let head = weights.add(u * unit_bytes);
                let planes = head.add(F::HEAD + b * F::PLANES);
                *plain = planes;
                // The same block of the next chunk, of this tile or the one behind it.
                lines(planes.wrapping_add(CHUNK / F::UNIT * unit_bytes), F::PLANES);
                if !(F::SIGNED && F::PLANES == PLAIN) {
                    spell::<F>(planes, &mut spelled.w[ix]);
                    *plain = spelled.w[ix].as_ptr();
                }
                let (scale, min) = F::scales::<Avx512Vnni>(head, b);
                spelled.scales[ix] = Scales { scale, min };
            }
            let x = acts.block(first, from);
            let groups = &mut acc[..count.div_ceil(GROUP)];
            let apart = acts.blocks() * GROUP;
            blocks_of::<U, F>(unit, &plain[..n], &spelled.scales, x, apart, groups);
        }
    }
    for row in 0..count {
        // SAFETY: the outputs of these rows and this tile are the caller's to give.
        unsafe { job.out(tile, first + row).put::<Avx512Vnni>(0, acc[row / GROUP][row % GROUP]) };
    }
}

/// The weights of a block as signed bytes.
///
/// # Safety
/// `planes` are a block's, and the tier is available.
#[inline(always)]
unsafe fn spell<F: Format>(planes: *const u8, to: &mut [u8; PLAIN]) {
    // SAFETY: the caller's word.
    unsafe {
        let bias = _mm512_set1_epi8(F::BIAS as i8);
        for (j, v) in F::stored::<Avx512Vnni>(planes).into_iter().enumerate() {
            let v = if F::BIAS == 0 { v } else { _mm512_sub_epi8(v, bias) };
            Avx512Vnni::store_bytes(v, to.as_mut_ptr().add(j * 64));
        }
    }
}

/// Some blocks of a tile times a few groups of rows, block after block. A product is made while the
/// sums of the one before go to memory and those of an earlier one are scaled. On a Xeon, by block
/// and group: 18 cycles for products alone, 29 with their loads, 41 with the stores, 67 with the
/// scaling; 73 where one group after the other meets all blocks, 98 with VNNI.
///
/// # Safety
/// As for [`one_tile`]; `x` is the first row's record of the first block, those of the groups lie
/// `apart`.
#[inline(always)]
unsafe fn blocks_of<U: Unit, F: Format>(
    unit: &mut U,
    weights: &[*const u8],
    scales: &[Scales<Avx512Vnni>; CHUNK],
    x: *const ActBlock,
    apart: usize,
    acc: &mut [[__m512; GROUP]],
) {
    /// Products between one and its scaling.
    const BEHIND: usize = WAITING - 1;
    let mut waiting = Waiting(MaybeUninit::uninit());
    let waiting = waiting.0.as_mut_ptr().cast::<Sums>();
    let place = |step: usize| waiting.wrapping_add(step % WAITING);
    let groups = acc.len();
    let acts = |ix: usize, group: usize| x.wrapping_add(ix * GROUP + group * apart);
    let steps = weights.len() * groups;
    let (mut next, mut old) = ((0, 0), (0, 0));
    let after = |(ix, group): (usize, usize)| match group + 1 == groups {
        true => (ix + 1, 0),
        false => (ix, group + 1),
    };
    for step in 0..steps + BEHIND {
        // SAFETY: the caller's word; the sums that are added were stored two steps ago.
        unsafe {
            if step < steps {
                let (ix, group) = next;
                if group == 0 {
                    load_weights::<U, F>(unit, weights[ix], ix);
                }
                let q = (&raw const (*acts(ix, group)).q).cast::<u8>();
                match (step % 2, ix % 2) {
                    (0, 0) => product::<U, F, 0, 1, 4, 5>(unit, q),
                    (0, _) => product::<U, F, 0, 1, 4, 7>(unit, q),
                    (_, 0) => product::<U, F, 2, 3, 6, 5>(unit, q),
                    (_, _) => product::<U, F, 2, 3, 6, 7>(unit, q),
                }
                next = after(next);
            }
            if step > 0 && step <= steps {
                let to = place(step - 1).cast();
                match step % 2 {
                    1 => put::<U, F, 0, 1>(unit, to),
                    _ => put::<U, F, 2, 3>(unit, to),
                }
            }
            if step >= BEHIND {
                let (ix, group) = old;
                let sums = place(step - BEHIND);
                add::<F>(&mut acc[group], &scales[ix], acts(ix, group), sums);
                old = after(old);
            }
        }
    }
}

/// A block's weights, where [`product`] takes them: into 5 or 7 in turns, or both halves.
#[inline(always)]
unsafe fn load_weights<U: Unit, F: Format>(unit: &mut U, w: *const u8, ix: usize) {
    // SAFETY: the caller's word.
    unsafe {
        if F::HALVES {
            unit.load::<5>(w, 64);
            unit.load::<7>(w.add(PLAIN / 2), 64);
        } else if ix.is_multiple_of(2) {
            unit.load::<5>(w, 64);
        } else {
            unit.load::<7>(w, 64);
        }
    }
}

/// Integer products of the activations at `q`: all in register `C` by way of `A` and `W`, or those of
/// the halves in `C` and `D`, by way of 4 and 5, and of 6 and 7.
#[inline(always)]
unsafe fn product<U: Unit, F: Format, const C: u8, const D: u8, const A: u8, const W: u8>(
    unit: &mut U,
    q: *const u8,
) {
    // SAFETY: the caller's word.
    unsafe {
        unit.zero::<C>();
        if F::HALVES {
            unit.load::<4>(q, ACT_STEP);
            unit.dot::<C, 4, 5>();
            unit.zero::<D>();
            unit.load::<6>(q.add(BLOCK / 2), ACT_STEP);
            unit.dot::<D, 6, 7>();
        } else {
            unit.load::<A>(q, ACT_STEP);
            unit.dot::<C, A, W>();
        }
    }
}

/// Writes what [`product`] left in `C` and `D`.
#[inline(always)]
unsafe fn put<U: Unit, F: Format, const C: u8, const D: u8>(unit: &mut U, to: *mut u8) {
    // SAFETY: the caller's word.
    unsafe {
        unit.store::<C>(to);
        if F::HALVES {
            unit.store::<D>(to.add(size_of::<Sums>() / 2));
        }
    }
}

/// Scales a block's sums and adds them to every row's.
#[inline(always)]
unsafe fn add<F: Format>(
    rows: &mut [__m512; GROUP],
    scales: &Scales<Avx512Vnni>,
    x: *const ActBlock,
    sums: *const Sums,
) {
    let sums = sums.cast::<[i32; TILE]>();
    for (row, acc) in rows.iter_mut().enumerate() {
        // SAFETY: the caller's word; sixteen sums of each row.
        unsafe {
            let of = |half: usize| _mm512_load_si512(sums.add(half * GROUP + row).cast());
            let first = of(0);
            let second = if F::HALVES { of(1) } else { first };
            *acc = scaled::<Avx512Vnni, F>(*acc, scales, [first, second], x.add(row));
        }
    }
}

/// Multiplies full registers, four results in flight; returns multiplications and additions.
///
/// # Safety
/// The tier is available.
pub(crate) unsafe fn busy(rounds: usize) -> usize {
    let ones = [[1u8; 64]; 16];
    let at = ones.as_ptr().cast::<u8>();
    // SAFETY: the caller's word; every register is as large as `ones`.
    unsafe {
        let mut unit = Silicon;
        unit.shape(&FULL);
        unit.load::<4>(at, 64);
        unit.load::<5>(at, 64);
        unit.load::<6>(at, 64);
        unit.load::<7>(at, 64);
        for _ in 0..rounds {
            unit.dot::<0, 4, 6>();
            unit.dot::<1, 4, 7>();
            unit.dot::<2, 5, 6>();
            unit.dot::<3, 5, 7>();
        }
        unit.close();
    }
    rounds * 4 * 2 * 16 * 16 * 64
}
