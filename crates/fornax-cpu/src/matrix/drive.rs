//! From a matrix and a range of rows and tiles to kernel calls: chooses the kernel for a format
//! and walks tiles and groups of rows. It must not know instruction sets beyond their names.

use std::ops::Range;

use super::activations::{ActBlock, Acts, GROUP, Q8View};
use super::format::{self, Float, Format};
use super::kernel::Out;
use super::many;
use super::simd::{BLOCK, TILE};
use super::{Layout, Matrix};

/// The routines of one tier.
pub(crate) struct Kernels {
    pub(super) multiply: unsafe fn(&Job<'_>),
    pub(super) quantize: unsafe fn(&[f32], *mut ActBlock, usize),
}

/// Where the outputs of a product go: output `o` of row `i` to `at[i · stride + o]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dest {
    pub(crate) at: *mut f32,
    pub(crate) stride: usize,
    /// Added to every row, element `o` to output `o`; null for nothing.
    pub(crate) bias: *const f32,
    /// Added after that, from `plus[i · stride + o]`; null for nothing.
    pub(crate) plus: *const f32,
}

impl Dest {
    /// Outputs as they are.
    pub(crate) fn plain(at: *mut f32, stride: usize) -> Dest {
        Dest { at, stride, bias: std::ptr::null(), plus: std::ptr::null() }
    }

    /// The rows from `row` on, and the outputs from `from` on.
    pub(super) fn from(self, row: usize, from: usize) -> Dest {
        let on = row * self.stride + from;
        let moved = |at: *const f32, on: usize| match at.is_null() {
            true => at,
            false => at.wrapping_add(on),
        };
        Dest {
            at: self.at.wrapping_add(on),
            bias: moved(self.bias, from),
            plus: moved(self.plus, on),
            ..self
        }
    }
}

/// One call of [`Matrix::multiply`].
#[derive(Clone, Debug)]
pub(super) struct Job<'a> {
    pub(super) matrix: &'a Matrix,
    pub(super) expert: usize,
    pub(super) acts: Acts<'a>,
    pub(super) act_rows: Range<usize>,
    pub(super) tiles: Range<usize>,
    pub(super) out: Dest,
    /// Weights that will be read after these.
    pub(super) then: *const u8,
}

impl Job<'_> {
    /// The same for some of its rows.
    pub(super) fn of_rows(&self, act_rows: Range<usize>) -> Self {
        let out = self.out.from(act_rows.start - self.act_rows.start, 0);
        Job { act_rows, out, ..self.clone() }
    }

    /// The outputs of tile `tile` for row `row`.
    pub(super) fn out(&self, tile: usize, row: usize) -> Out {
        let columns = self.matrix.rows() - tile * TILE;
        let to = self.out.from(row - self.act_rows.start, tile * TILE);
        let then = match tile + 1 < self.tiles.end {
            true => self.matrix.tile(self.expert, tile + 1),
            false => self.then,
        };
        Out { to, columns, then }
    }
}

/// The kernels of one tier, each compiled with the tier's features.
///
/// # Safety
/// As for the kernels of the same names; the tier is available.
pub(super) trait Tier {
    /// Most rows of 8-bit activations for which results stay in registers: 1, 2, 4 or 8.
    const ROWS: usize;
    /// The same for f32 activations.
    const FLOAT_ROWS: usize;
    /// Rows of 8-bit activations from which weights are spelled out once for all of them.
    const MANY: usize;

    unsafe fn quantised<F: Format, const R: usize>(
        tile: *const u8,
        blocks: usize,
        acts: *const ActBlock,
        step: usize,
        out: Out,
    );

    unsafe fn many<F: Format>(
        tile: *const u8,
        blocks: usize,
        acts: &Q8View,
        rows: Range<usize>,
        out: Out,
    );

    unsafe fn floats<F: Float, const R: usize>(
        tile: *const u8,
        cols: usize,
        x: *const f32,
        out: Out,
    );

    unsafe fn foreign(job: &Job<'_>);
}

/// Makes the table of a tier from its vectors and the constants of [`Tier`].
macro_rules! tier {
    ($name:ident, $simd:ty, rows $rows:literal, float rows $float_rows:literal, many $many:expr $(, #[$attr:meta])*) => {
        enum Tiered {}

        impl $crate::matrix::drive::Tier for Tiered {
            const ROWS: usize = $rows;
            const FLOAT_ROWS: usize = $float_rows;
            const MANY: usize = $many;

            $(#[$attr])*
            unsafe fn quantised<F: $crate::matrix::format::Format, const R: usize>(
                tile: *const u8,
                blocks: usize,
                acts: *const $crate::matrix::activations::ActBlock,
                step: usize,
                out: $crate::matrix::kernel::Out,
            ) {
                // SAFETY: the caller's word.
                unsafe {
                    $crate::matrix::kernel::quantised::<$simd, F, R>(tile, blocks, acts, step, out)
                }
            }

            $(#[$attr])*
            unsafe fn many<F: $crate::matrix::format::Format>(
                tile: *const u8,
                blocks: usize,
                acts: &$crate::matrix::activations::Q8View,
                rows: std::ops::Range<usize>,
                out: $crate::matrix::kernel::Out,
            ) {
                // SAFETY: the caller's word.
                unsafe { $crate::matrix::many::many::<$simd, F, $rows>(tile, blocks, acts, rows, out) }
            }

            $(#[$attr])*
            unsafe fn floats<F: $crate::matrix::format::Float, const R: usize>(
                tile: *const u8,
                cols: usize,
                x: *const f32,
                out: $crate::matrix::kernel::Out,
            ) {
                // SAFETY: the caller's word.
                unsafe { $crate::matrix::kernel::floats::<$simd, F, R>(tile, cols, x, out) }
            }

            $(#[$attr])*
            unsafe fn foreign(job: &$crate::matrix::drive::Job<'_>) {
                // SAFETY: the caller's word.
                unsafe { $crate::matrix::foreign::multiply(job) }
            }
        }

        $(#[$attr])*
        unsafe fn quantize(
            x: &[f32],
            at: *mut $crate::matrix::activations::ActBlock,
            step: usize,
        ) {
            // SAFETY: the caller's word.
            unsafe { $crate::matrix::activations::quantize::<$simd>(x, at, step) }
        }

        /// The routines of this tier.
        pub(in crate::matrix) static $name: $crate::matrix::drive::Kernels = $crate::matrix::drive::Kernels {
            multiply: $crate::matrix::drive::multiply::<Tiered>,
            quantize,
        };
    };
}
pub(super) use tier;

/// Calls `$run::<$tier, format>($job)` for a layout.
macro_rules! by_layout {
    ($layout:expr, $quantised:ident, $floats:ident, $foreign:path, ($($arg:expr),*) $(, $first:ty)?) => {
        match $layout {
            Layout::Q8_0 => $quantised::<$($first,)? format::Q8_0>($($arg),*),
            Layout::Q4_0 => $quantised::<$($first,)? format::Q4_0>($($arg),*),
            Layout::Q4_1 => $quantised::<$($first,)? format::Q4_1>($($arg),*),
            Layout::Q5_0 => $quantised::<$($first,)? format::Q5_0>($($arg),*),
            Layout::Q5_1 => $quantised::<$($first,)? format::Q5_1>($($arg),*),
            Layout::Mxfp4 => $quantised::<$($first,)? format::Mxfp4>($($arg),*),
            Layout::Iq4Nl => $quantised::<$($first,)? format::Iq4Nl>($($arg),*),
            Layout::Iq4Xs => $quantised::<$($first,)? format::Iq4Xs>($($arg),*),
            Layout::Q4K => $quantised::<$($first,)? format::Q4K>($($arg),*),
            Layout::Q5K => $quantised::<$($first,)? format::Q5K>($($arg),*),
            Layout::Q2K => $quantised::<$($first,)? format::Q2K>($($arg),*),
            Layout::Q3K => $quantised::<$($first,)? format::Q3K>($($arg),*),
            Layout::Q6K => $quantised::<$($first,)? format::Q6K>($($arg),*),
            Layout::F32 => $floats::<$($first,)? format::F32>($($arg),*),
            Layout::F16 => $floats::<$($first,)? format::F16>($($arg),*),
            Layout::Bf16 => $floats::<$($first,)? format::Bf16>($($arg),*),
            Layout::Foreign => $foreign($($arg),*),
        }
    };
}
pub(super) use by_layout;

/// The door of a tier.
///
/// # Safety
/// As for [`Matrix::multiply`]; the tier is available.
pub(super) unsafe fn multiply<T: Tier>(job: &Job<'_>) {
    // SAFETY: the caller's word.
    unsafe { by_layout!(job.matrix.layout, quantised, floats, T::foreign, (job), T) }
}

/// Calls `$call` with constant numbers of rows for every piece of the job, tile by tile
/// so that a tile's weights stay in the nearer caches for all rows. `$together` says how many rows
/// from one on may go together.
macro_rules! walk {
    ($job:expr, |$tile:ident, $row:ident| $together:expr, $call:ident) => {
        let Range { start, end } = $job.act_rows;
        let mut $tile = $job.tiles.start;
        while $tile < $job.tiles.end {
            let mut $row = start;
            while $row < end {
                $row += match $together.min(end - $row) {
                    8.. => $call!($tile, $row, 8),
                    4.. => $call!($tile, $row, 4),
                    2.. => $call!($tile, $row, 2),
                    _ => $call!($tile, $row, 1),
                };
            }
            $tile += 1;
        }
    };
}

/// Rows that a tile is spelled out for go first, as many at a time as stay in the caches; the
/// rest is left to [`few`].
unsafe fn quantised<T: Tier, F: Format>(job: &Job<'_>) {
    let Acts::Q8(acts) = job.acts else {
        unreachable!("checked in Matrix::multiply");
    };
    let blocks = job.matrix.cols() / BLOCK;
    let Range { start, end } = job.act_rows;
    let mut row = start;
    if T::MANY != usize::MAX && start.is_multiple_of(GROUP) && acts.step() == GROUP {
        while end - row >= T::MANY {
            let rows = many::rows_at_once(blocks, end - row, T::ROWS);
            for tile in job.tiles.clone() {
                // SAFETY: rows and tiles are within the job; the rest is the caller's word.
                unsafe {
                    let weights = job.matrix.tile(job.expert, tile);
                    T::many::<F>(weights, blocks, &acts, row..row + rows, job.out(tile, row));
                }
            }
            row += rows;
        }
    }
    if row < end {
        // SAFETY: the caller's word.
        unsafe { few::<T, F>(&job.of_rows(row..end)) }
    }
}

unsafe fn few<T: Tier, F: Format>(job: &Job<'_>) {
    let Acts::Q8(acts) = job.acts else {
        unreachable!("checked in Matrix::multiply");
    };
    let blocks = job.matrix.cols() / BLOCK;
    macro_rules! call {
        ($tile:expr, $row:expr, $rows:expr) => {{
            // SAFETY: these rows lie side by side, rows and tiles are within the job; the rest is
            // the caller's word.
            unsafe {
                let x = acts.block($row, 0).cast_const();
                let weights = job.matrix.tile(job.expert, $tile);
                let mut out = job.out($tile, $row);
                if $row != job.act_rows.start {
                    out.then = std::ptr::null();
                }
                T::quantised::<F, { $rows }>(weights, blocks, x, acts.step(), out);
            }
            $rows
        }};
    }
    walk!(job, |tile, row| acts.side_by_side(row).min(T::ROWS), call);
}

unsafe fn floats<T: Tier, F: Float>(job: &Job<'_>) {
    let Acts::F32 { x, cols } = job.acts else {
        unreachable!("checked in Matrix::multiply");
    };
    macro_rules! call {
        ($tile:expr, $row:expr, $rows:expr) => {{
            // SAFETY: rows and tiles are within the job; the rest is the caller's word.
            unsafe {
                let x = x.as_ptr().add($row * cols);
                let weights = job.matrix.tile(job.expert, $tile);
                let out = job.out($tile, $row);
                T::floats::<F, { $rows }>(weights, cols, x, out);
            }
            $rows
        }};
    }
    walk!(job, |tile, row| T::FLOAT_ROWS, call);
}
