//! How fast the kernels run on this machine: matrices of arbitrary bits, multiplied over and over.
//! For examples and reports; it must not be used by programs that compute.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use fornax_gguf::{Mapping, TensorType};
use fornax_plan::{Error, Result, WeightRef};

use super::coarse::{self, CoarseKernels, CoarseMatrix, CoarseRows, CoarseView, ROWS};
use super::{Acts, Dest, Matrix, Q8Rows};
use crate::isa::Isa;
use crate::run::ROW_BLOCK;

/// What to multiply.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Type of the weights.
    pub ty: TensorType,
    /// Rows of the matrix.
    pub rows: u32,
    /// Columns of the matrix.
    pub cols: u32,
    /// Rows of activations.
    pub act_rows: usize,
    /// The tier.
    pub isa: Isa,
    /// In the form of `fast_prompt`.
    pub fast: bool,
    /// Threads, each with a share of the tiles.
    pub threads: usize,
    /// How long to go on at least.
    pub seconds: f64,
    /// Pieces of the matrix at least, one or more.
    pub pieces: usize,
}

/// What was measured: the 5th percentile of the times of pieces of a matrix, so that what else the
/// machine does does not count.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Weight bytes read, GB/s (10⁹).
    pub gigabytes: f64,
    /// Multiplications and additions, GOPS (10⁹).
    pub gigaops: f64,
    /// Weights of one piece, each of which meets every row of activations.
    pub piece: usize,
}

/// A product to be measured.
enum Product<'a> {
    Exact(&'a Matrix, Acts<'a>),
    Coarse(CoarseMatrix, CoarseView, &'static CoarseKernels),
}

impl Product<'_> {
    /// # Safety
    /// As the two kinds of `multiply`.
    unsafe fn run(
        &self,
        case: &Case,
        rows: Range<usize>,
        tiles: Range<usize>,
        out: *mut f32,
        width: usize,
    ) {
        // SAFETY: the caller's word.
        unsafe {
            match self {
                Product::Exact(matrix, acts) => {
                    let kernels = case.isa.kernels();
                    let out = Dest::plain(out, width);
                    matrix.multiply(kernels, 0, acts, rows, tiles, out, std::ptr::null());
                }
                Product::Coarse(matrix, acts, kernels) => {
                    matrix.multiply(kernels, *acts, rows, tiles, out, width);
                }
            }
        }
    }
}

/// Measures one case.
///
/// # Errors
/// `is_unsupported` where the tier or the type is not there; as for packing a matrix otherwise.
pub fn multiply(case: &Case) -> Result<Rates> {
    let Case { ty, rows, cols, act_rows, isa, threads, .. } = *case;
    if !isa.is_available() {
        return Err(Error::unsupported(format!("measuring {isa}: not on this machine")));
    }
    let fast = isa.coarse().filter(|_| case.fast);
    if case.fast && fast.is_none() {
        return Err(Error::unsupported(format!("measuring {isa}: it has no fast form of prompts")));
    }
    let len = cols as usize / ty.block_len() * ty.block_bytes() * rows as usize;
    // Bits of no meaning, but floats of usual size in every type: subnormals are slow.
    let bytes = (0..len).map(|ix| (60 + ix * 7 % 41) as u8).collect();
    let data = Arc::new(Mapping::from_vec(bytes));
    let weight = WeightRef { name: ty.to_string(), ty, cols, rows, experts: 1, data, offset: 0 };
    let matrix = Matrix::alone(&weight, threads)?;
    let x: Vec<f32> = (0..act_rows * cols as usize).map(|ix| (ix % 17) as f32 - 8.0).collect();
    let store = Q8Rows::new(act_rows, cols as usize)?;
    let room = fast.map(|_| CoarseRows::new(act_rows, cols as usize)).transpose()?;
    let product = if let (Some(kernels), Some(room)) = (fast, &room) {
        let form = CoarseMatrix::place(&matrix, &mut coarse::arena(&[&matrix])?);
        coarse::fill(&[(&form, &matrix)], kernels, threads);
        let view = room.shaped(act_rows, cols as usize);
        for (row, x) in x.chunks(cols as usize).enumerate() {
            // SAFETY: one thread fills, and `room` outlives the view.
            unsafe { view.fill(kernels, row, x, 0) };
        }
        Product::Coarse(form, view, kernels)
    } else if matrix.takes_q8() {
        let view = store.shaped(act_rows, cols as usize);
        for (row, x) in x.chunks(cols as usize).enumerate() {
            // SAFETY: one thread fills, and `store` outlives the view.
            unsafe { view.fill(isa.kernels(), row, x, 0..view.blocks()) };
        }
        Product::Exact(&matrix, Acts::Q8(view))
    } else {
        Product::Exact(&matrix, Acts::F32 { x: &x, cols: cols as usize })
    };
    let all = matrix.tiles();
    let share = |thread: usize| all * thread / threads..all * (thread + 1) / threads;
    let tiles_per_second: f64 = std::thread::scope(|scope| {
        let run = |thread| rate(&matrix, &product, share(thread), case);
        let others: Vec<_> = (1..threads).map(|thread| scope.spawn(move || run(thread))).collect();
        run(0) + others.into_iter().map(|t| t.join().unwrap_or(0.0)).sum::<f64>()
    });
    let outputs = tiles_per_second * super::TILE as f64 * act_rows as f64;
    Ok(Rates {
        gigabytes: tiles_per_second * matrix.tile_bytes() as f64 / 1e9,
        gigaops: 2.0 * outputs * f64::from(cols) / 1e9,
        piece: per_piece(&matrix, act_rows).min(all / threads) * super::TILE * cols as usize,
    })
}

/// Tiles of a piece.
fn per_piece(matrix: &Matrix, act_rows: usize) -> usize {
    ((1 << 19) / matrix.tile_bytes() / act_rows.min(64)).max(4)
}

/// Tiles per second of one thread, which goes round its share a few tiles at a time.
fn rate(matrix: &Matrix, product: &Product<'_>, share: Range<usize>, case: &Case) -> f64 {
    let per_piece = per_piece(matrix, case.act_rows);
    let most = if case.fast { ROWS } else { ROW_BLOCK };
    let width = per_piece * super::TILE;
    let mut out = vec![0.0f32; case.act_rows * width];
    let mut times = Vec::new();
    let started = Instant::now();
    let mut at = share.start;
    while times.len() < case.pieces || started.elapsed().as_secs_f64() < case.seconds {
        if at + per_piece > share.end {
            at = share.start;
        }
        let tiles = at..(at + per_piece).min(share.end);
        at = tiles.end;
        let from = Instant::now();
        // Outputs before these tiles are not written, so their place need not exist.
        let to = out.as_mut_ptr().wrapping_sub(tiles.start * super::TILE);
        let count = tiles.len();
        for from in (0..case.act_rows).step_by(most) {
            let rows = from..case.act_rows.min(from + most);
            // SAFETY: output o of row r lies at r · width + o − 16 · tiles.start, within `out`.
            unsafe { product.run(case, rows, tiles.clone(), to.wrapping_add(from * width), width) };
        }
        times.push(from.elapsed().as_secs_f64() / count as f64);
        std::hint::black_box(&out);
    }
    times.sort_by(f64::total_cmp);
    1.0 / times[times.len() / 20]
}
