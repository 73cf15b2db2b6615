//! Types without a tile form: rows are decoded where they lie in the file, block by block, as
//! they are multiplied. Slow and right, the same code compiled for every tier. It must not know
//! formats.
//!
//! Numerics: within 32 columns, product `c` goes to sum `c % 8`, the eight sums are added in
//! pairs; the total times the activations' scale is added to the row's f32, block after block.

use fornax_gguf::{TensorType, blocks};

use super::activations::{Acts, GROUP};
use super::drive::Job;
use super::simd::{BLOCK, TILE};

/// Weights decoded at a time; a multiple of every type's block.
const CHUNK: usize = 256;

/// # Safety
/// As for [`super::Matrix::multiply`].
#[inline(always)]
pub(super) unsafe fn multiply(job: &Job<'_>) {
    for tile in job.tiles.clone() {
        for row in tile * TILE..(tile * TILE + TILE).min(job.matrix.rows()) {
            let bytes = job.matrix.source.row(job.expert, row);
            let mut at = job.act_rows.start;
            while at < job.act_rows.end {
                let count = (job.act_rows.end - at).min(GROUP);
                let sums =
                    products(job.matrix.source.ty, bytes, job.matrix.cols(), &job.acts, at, count);
                for (ix, sum) in sums.iter().enumerate().take(count) {
                    let (out, o) = (job.out(tile, at + ix), row - tile * TILE);
                    // SAFETY: the outputs of these rows and tiles are the caller's to give.
                    unsafe { *out.to.at.add(o) = out.with(0, o, *sum) };
                }
                at += count;
            }
        }
    }
}

/// One weight row times the `count` rows of activations from `first` on.
#[inline(always)]
fn products(
    ty: TensorType,
    bytes: &[u8],
    cols: usize,
    acts: &Acts<'_>,
    first: usize,
    count: usize,
) -> [f32; GROUP] {
    let mut sums = [0.0f32; GROUP];
    let mut w = [0.0f32; CHUNK];
    let mut col = 0;
    while col < cols {
        let w = &mut w[..CHUNK.min(cols - col)];
        let from = col / ty.block_len() * ty.block_bytes();
        let to = from + w.len() / ty.block_len() * ty.block_bytes();
        blocks::dequantize(ty, &bytes[from..to], w)
            .expect("invariant: the type was tried when the matrix was made");
        for (ix, sum) in sums.iter_mut().enumerate().take(count) {
            for (block, w) in w.chunks(BLOCK).enumerate() {
                let col = col + block * BLOCK;
                *sum += match *acts {
                    Acts::Q8(view) => {
                        // SAFETY: the row and the block are within the view, which is alive.
                        let x = unsafe { &*view.block(first + ix, col / BLOCK) };
                        let mut wide = [0.0; BLOCK];
                        for (wide, q) in wide.iter_mut().zip(x.q) {
                            *wide = f32::from(q);
                        }
                        x.d * pairwise(&padded(w), &wide)
                    }
                    Acts::F32 { x, cols } => {
                        let from = (first + ix) * cols + col;
                        pairwise(&padded(w), &padded(&x[from..from + w.len()]))
                    }
                };
            }
        }
        col += w.len();
    }
    sums
}

/// Up to 32 elements with zeros behind them.
#[inline(always)]
fn padded(x: &[f32]) -> [f32; BLOCK] {
    if let Ok(whole) = x.try_into() {
        return whole;
    }
    let mut out = [0.0; BLOCK];
    out[..x.len()].copy_from_slice(x);
    out
}

#[inline(always)]
fn pairwise(w: &[f32; BLOCK], x: &[f32; BLOCK]) -> f32 {
    let mut sums = [0.0f32; 8];
    for step in 0..BLOCK / 8 {
        for (lane, sum) in sums.iter_mut().enumerate() {
            *sum += w[step * 8 + lane] * x[step * 8 + lane];
        }
    }
    let [a, b, c, d, e, f, g, h] = sums;
    ((a + e) + (b + f)) + ((c + g) + (d + h))
}
