//! Matrices as the kernels read them, and their products with rows of activations. It must not
//! know ops, models or threads: a caller hands out tiles to its threads as it likes, and no bit of
//! a result depends on how.
//!
//! Weights are re-tiled when they are loaded, sixteen rows interleaved ([`format`] has the
//! layouts), without growth worth naming (at most 3 %). Types without a tile form are read where
//! they lie in the file ([`foreign`]).

mod activations;
#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(all(test, target_arch = "x86_64"))]
pub(crate) mod amx_tests;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "x86_64")]
pub(crate) mod coarse;
#[cfg(not(target_arch = "x86_64"))]
#[path = "coarse/absent.rs"]
pub(crate) mod coarse;
mod drive;
mod foreign;
mod format;
mod kernel;
mod many;
pub(crate) mod measure;
mod memory;
#[cfg(target_arch = "aarch64")]
mod neon;
mod pack;
mod scalar;
mod simd;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use fornax_gguf::{TensorType, blocks};
use fornax_plan::{Error, Result, WeightRef, q8};

pub(crate) use activations::{Acts, GROUP, Q8Rows, Q8View};
pub(crate) use drive::{Dest, Kernels};
use drive::{Job, by_layout};
use format::{Float, Format};
pub(crate) use memory::{Arena, Floats, Memory, Share, give_back};
pub(crate) use simd::TILE;

use crate::isa::Isa;

impl Isa {
    /// The matrix routines of the tier.
    ///
    /// # Panics
    /// Where this machine does not have the tier: what it would run is undefined.
    pub(crate) fn kernels(self) -> &'static Kernels {
        assert!(self.is_available(), "this machine does not have the instructions of {self}");
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &avx2::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => &avx512::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => &amx::KERNELS,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => &neon::widening::KERNELS,
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDotprod => &neon::dotprod::KERNELS,
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm => &neon::i8mm::KERNELS,
            _ => &scalar::KERNELS,
        }
    }
}

/// How a matrix lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Mxfp4,
    Iq4Nl,
    Iq4Xs,
    Q4K,
    Q5K,
    Q2K,
    Q3K,
    Q6K,
    F32,
    F16,
    Bf16,
    /// Left where it is.
    Foreign,
}

impl Layout {
    fn of(ty: TensorType) -> Layout {
        match ty {
            TensorType::Q8_0 => Layout::Q8_0,
            TensorType::Q4_0 => Layout::Q4_0,
            TensorType::Q4_1 => Layout::Q4_1,
            TensorType::Q5_0 => Layout::Q5_0,
            TensorType::Q5_1 => Layout::Q5_1,
            TensorType::MXFP4 => Layout::Mxfp4,
            TensorType::IQ4_NL => Layout::Iq4Nl,
            TensorType::IQ4_XS => Layout::Iq4Xs,
            TensorType::Q4_K => Layout::Q4K,
            TensorType::Q5_K => Layout::Q5K,
            TensorType::Q2_K => Layout::Q2K,
            TensorType::Q3_K => Layout::Q3K,
            TensorType::Q6_K => Layout::Q6K,
            TensorType::F32 => Layout::F32,
            TensorType::F16 => Layout::F16,
            TensorType::BF16 => Layout::Bf16,
            _ => Layout::Foreign,
        }
    }

    /// What packs a unit of a block format; none for the others.
    fn pack(self) -> Option<pack::PackUnit> {
        Some(match self {
            Layout::Q8_0 => pack::q8_0,
            Layout::Q4_0 | Layout::Iq4Nl => pack::q4_0,
            Layout::Q4_1 => pack::q4_1,
            Layout::Q5_0 => pack::q5_0,
            Layout::Q5_1 => pack::q5_1,
            Layout::Mxfp4 => pack::mxfp4,
            Layout::Iq4Xs => pack::iq4_xs,
            Layout::Q4K => pack::q4_k,
            Layout::Q5K => pack::q5_k,
            Layout::Q2K => pack::q2_k,
            Layout::Q3K => pack::q3_k,
            Layout::Q6K => pack::q6_k,
            Layout::F32 | Layout::F16 | Layout::Bf16 | Layout::Foreign => return None,
        })
    }
}

/// Columns of a plain float format that are packed together.
const PLAIN_COLUMNS: usize = 128;

/// Sizes of a tile.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// Blocks of a unit, bytes before its planes, bytes of a block's planes.
    unit: usize,
    head: usize,
    planes: usize,
    /// Bytes of a tile.
    tile: usize,
}

fn block_shape<F: Format>(cols: usize) -> Shape {
    let tile = F::tile_bytes(cols / q8::BLOCK);
    Shape { unit: F::UNIT, head: F::HEAD, planes: F::PLANES, tile }
}

fn float_shape<F: Float>(cols: usize) -> Shape {
    Shape { unit: 1, head: 0, planes: 0, tile: F::tile_bytes(cols) }
}

fn foreign_shape(_cols: usize) -> Shape {
    Shape { unit: 1, head: 0, planes: 0, tile: 0 }
}

fn shape(w: &WeightRef) -> Shape {
    let cols = w.cols as usize;
    by_layout!(Layout::of(w.ty), block_shape, float_shape, foreign_shape, (cols))
}

/// A matrix, or one for each expert, ready to be multiplied.
pub(crate) struct Matrix {
    layout: Layout,
    shape: Shape,
    /// Where it came from; read where there is no tile form.
    source: WeightRef,
    data: Share,
}

impl Matrix {
    /// Bytes that a weight takes when it is packed, whole cache lines; none where it stays in the
    /// file.
    ///
    /// # Errors
    /// `is_unsupported` for a type that nothing here decodes; `is_malformed` where a row is not
    /// whole blocks or the weight ends past its map.
    pub(crate) fn room(w: &WeightRef) -> Result<usize> {
        check(w)?;
        let tiles = (w.rows as usize).div_ceil(TILE) * w.experts as usize;
        Ok(shape(w).tile.saturating_mul(tiles).next_multiple_of(64))
    }

    /// A weight in the next [`Matrix::room`] of `arena`, still to be filled by [`fill`].
    ///
    /// # Errors
    /// As [`Matrix::room`].
    pub(crate) fn place(w: &WeightRef, arena: &mut Arena) -> Result<Matrix> {
        let data = arena.take(Matrix::room(w)?);
        Ok(Matrix { layout: Layout::of(w.ty), shape: shape(w), source: w.clone(), data })
    }

    /// Packs a weight into memory of its own.
    ///
    /// # Errors
    /// As [`Matrix::room`]; `is_out_of_memory`.
    pub(crate) fn alone(w: &WeightRef, threads: usize) -> Result<Matrix> {
        let matrix = Matrix::place(w, &mut Arena::new(Matrix::room(w)?, &w.name)?)?;
        fill(&[&matrix], threads);
        Ok(matrix)
    }

    /// Tiles, over all experts, that one thread fills at a time.
    fn piece(&self) -> usize {
        const PIECE_BYTES: usize = 1 << 20;
        (PIECE_BYTES / (TILE * self.source.row_bytes()).max(1)).clamp(1, 4096)
    }

    /// Fills some tiles from the file and lets its pages go, so that no matrix is resident twice
    /// as a whole.
    ///
    /// # Safety
    /// Nobody else reads or writes these tiles meanwhile.
    unsafe fn fill_piece(&self, from: usize) {
        let to = (from + self.piece()).min(self.tiles() * self.experts());
        for tile in from..to {
            // SAFETY: the caller's word.
            unsafe { self.fill_tile(tile / self.tiles(), tile % self.tiles()) };
        }
        self.source.data.release(self.source_bytes(from)..self.source_bytes(to));
    }

    /// Where in its map the rows of a tile begin, tiles counted over all experts.
    fn source_bytes(&self, tile: usize) -> usize {
        let w = &self.source;
        let within = (tile % self.tiles() * TILE).min(self.rows());
        w.offset + (tile / self.tiles() * self.rows() + within) * w.row_bytes()
    }

    /// # Safety
    /// Nobody else reads or writes the tile meanwhile.
    unsafe fn fill_tile(&self, expert: usize, tile: usize) {
        let at = self.tile(expert, tile).cast_mut();
        let Shape { unit, head, planes, .. } = self.shape;
        let ty = self.source.ty;
        // Unit by unit, so that what sixteen rows write into stays in the nearest cache.
        let (columns, bytes) = match self.layout.pack() {
            Some(_) => (unit * q8::BLOCK, head + unit * planes),
            None => (PLAIN_COLUMNS, PLAIN_COLUMNS * TILE * ty.block_bytes()),
        };
        let row_bytes = columns / ty.block_len() * ty.block_bytes();
        let rows = TILE.min(self.rows() - tile * TILE);
        for ix in 0..self.cols().div_ceil(columns) {
            for row in 0..rows {
                let all = self.source.row(expert, tile * TILE + row);
                let part = &all[ix * row_bytes..all.len().min((ix + 1) * row_bytes)];
                // SAFETY: the tile has room for sixteen rows in its layout, by `shape`.
                unsafe {
                    let unit = at.add(ix * bytes);
                    match self.layout.pack() {
                        Some(pack) => pack(&pack::Place { unit, head, planes, row }, part),
                        None if ty.block_bytes() == 4 => pack::plain::<4>(unit, row, part),
                        None => pack::plain::<2>(unit, row, part),
                    }
                }
            }
        }
    }

    /// Rows of one expert: elements of the product.
    pub(crate) fn rows(&self) -> usize {
        self.source.rows as usize
    }

    /// Elements of a row.
    pub(crate) fn cols(&self) -> usize {
        self.source.cols as usize
    }

    /// 1 for an ordinary matrix.
    pub(crate) fn experts(&self) -> usize {
        self.source.experts as usize
    }

    /// Tiles of [`TILE`] rows of one expert; the last may be partly empty.
    pub(crate) fn tiles(&self) -> usize {
        self.rows().div_ceil(TILE)
    }

    /// Whether it is multiplied with 8-bit activations ([`q8::applies_to`]), or with f32.
    pub(crate) fn takes_q8(&self) -> bool {
        q8::applies_to(self.source.ty)
    }

    /// Whether the weight was copied, so that its bytes in the map are not needed any more.
    pub(crate) fn copied(&self) -> bool {
        self.layout != Layout::Foreign
    }

    /// Bytes held beside the file's map.
    pub(crate) fn bytes(&self) -> usize {
        if self.copied() { self.data.len() } else { 0 }
    }

    /// Bytes that multiplying one tile reads.
    pub(crate) fn tile_bytes(&self) -> usize {
        if self.copied() { self.shape.tile } else { self.source.row_bytes() * TILE }
    }

    /// Where a tile begins, to be read ahead; it need not exist.
    pub(crate) fn start(&self, expert: usize, tile: usize) -> *const u8 {
        self.data.as_ptr().wrapping_add((expert * self.tiles() + tile) * self.shape.tile)
    }

    fn tile(&self, expert: usize, tile: usize) -> *const u8 {
        let at = (expert * self.tiles() + tile) * self.shape.tile;
        debug_assert!(at + self.shape.tile <= self.data.len());
        self.data.as_ptr().wrapping_add(at)
    }

    /// Multiplies the rows `act_rows` of `acts` with the tiles `tiles` of `expert`, to `out`. Only the outputs of these
    /// tiles are written, none past [`Matrix::rows`]. Nothing is allocated. `then` is what the caller will
    /// read next, as [`Matrix::start`] tells it; null for what follows in memory.
    ///
    /// # Safety
    /// `out` reaches all of these outputs, nobody else reads or writes them meanwhile, and 8-bit
    /// activations are alive and filled.
    ///
    /// # Panics
    /// Where expert, tiles, rows or the activations' form and width do not fit the matrix.
    #[expect(clippy::too_many_arguments, reason = "one call of the innermost operation")]
    pub(crate) unsafe fn multiply(
        &self,
        kernels: &Kernels,
        expert: usize,
        acts: &Acts<'_>,
        act_rows: Range<usize>,
        tiles: Range<usize>,
        out: Dest,
        then: *const u8,
    ) {
        assert!(expert < self.experts() && tiles.end <= self.tiles());
        match acts {
            Acts::Q8(view) => {
                assert!(self.takes_q8() && act_rows.end <= view.rows());
                assert_eq!(view.blocks(), self.cols() / q8::BLOCK, "{}: width", self.source.name);
            }
            Acts::F32 { x, cols } => {
                assert!(!self.takes_q8() && act_rows.end * cols <= x.len());
                assert_eq!(*cols, self.cols(), "{}: width", self.source.name);
            }
        }
        let acts = *acts;
        let then = match then.is_null() {
            true => self.start(expert, tiles.end),
            false => then,
        };
        // SAFETY: shapes were checked above, a table of kernels is handed out only where its tier
        // is available, and the rest is the caller's word.
        unsafe {
            let job = Job { matrix: self, expert, acts, act_rows, tiles, out, then };
            (kernels.multiply)(&job);
        }
    }

    /// Row `row` of expert 0 as f32, to the bit what the file's blocks stand for.
    ///
    /// # Panics
    /// Where `out` is not as wide as the matrix or there is no such row.
    pub(crate) fn row_to_f32(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows() && out.len() == self.cols(), "{}: row", self.source.name);
        by_layout!(self.layout, unpack, widen, decode, (self, row, out));
    }

    /// All sixteen rows of a tile of expert 0, one after the other, as [`Matrix::row_to_f32`]; those past the last
    /// row are left as they are. Block formats only.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn tile_to_f32(&self, tile: usize, out: &mut [f32]) {
        assert!(tile < self.tiles() && out.len() == TILE * self.cols());
        by_layout!(self.layout, unpack_all, no_floats, not_foreign, (self, tile, out));
    }
}

/// Fills matrices that were placed, a piece at a time to whichever of `threads` threads is free.
/// Their bytes in the map are read once; where [`Matrix::copied`] says so they are not needed
/// afterwards.
pub(crate) fn fill(matrices: &[&Matrix], threads: usize) {
    let mut pieces = Vec::new();
    for matrix in matrices.iter().filter(|m| m.copied()) {
        let tiles = matrix.tiles() * matrix.experts();
        pieces.extend((0..tiles).step_by(matrix.piece()).map(|from| (*matrix, from)));
    }
    // SAFETY: every piece is taken once, by one thread.
    each_once(&pieces, threads, |(matrix, from), ()| unsafe { matrix.fill_piece(*from) });
}

/// Does something with every piece once, each in whichever of `threads` threads is free, which has room of its own.
fn each_once<P: Sync, R: Default>(pieces: &[P], threads: usize, go: impl Fn(&P, &mut R) + Sync) {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut room = R::default();
        while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            go(piece, &mut room);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.min(pieces.len()) {
            scope.spawn(work);
        }
        work();
    });
}

fn unpack<F: Format>(matrix: &Matrix, row: usize, out: &mut [f32]) {
    let tile = matrix.tile(0, row / TILE);
    // SAFETY: the tile holds as many blocks as the row, in this format.
    unsafe { kernel::unpack_row::<scalar::Scalar, F>(tile, row % TILE, out) }
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn unpack_all<F: Format>(matrix: &Matrix, tile: usize, out: &mut [f32]) {
    // SAFETY: the tile holds as many blocks as a row, in this format.
    unsafe { kernel::unpack_tile::<scalar::Scalar, F>(matrix.tile(0, tile), out) }
}

#[cfg(target_arch = "x86_64")]
fn no_floats<F: Float>(_: &Matrix, _: usize, _: &mut [f32]) {
    unreachable!("only block formats come here");
}

#[cfg(target_arch = "x86_64")]
fn not_foreign(_: &Matrix, _: usize, _: &mut [f32]) {
    unreachable!("only block formats come here");
}

fn widen<F: Float>(matrix: &Matrix, row: usize, out: &mut [f32]) {
    let tile = matrix.tile(0, row / TILE);
    // SAFETY: the tile holds as many columns as the row, in this format.
    unsafe { kernel::widen_row::<scalar::Scalar, F>(tile, row % TILE, out) }
}

fn decode(matrix: &Matrix, row: usize, out: &mut [f32]) {
    blocks::dequantize(matrix.source.ty, matrix.source.row(0, row), out)
        .expect("invariant: the type was tried when the matrix was made");
}

/// Asks for the cache line at an address, which may be any, where the processor has a word for it.
#[inline(always)]
pub(crate) fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: part of the architecture's base, and an address that cannot be read is passed over.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{}]", in(reg) at, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = at;
}

/// Asks for the cache line at an address, which may be any, to be written by this core alone.
#[inline(always)]
pub(crate) fn prefetch_to_write<T>(at: *mut T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: processors of 64 bits that lack the instruction pass it over, as all do an address that cannot be written.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags, readonly));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: part of the architecture's base, and an address that cannot be written is passed over.
    unsafe {
        std::arch::asm!("prfm pstl2keep, [{}]", in(reg) at, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = at;
}

/// Asks for the cache lines of `len` bytes.
#[inline(always)]
pub(crate) fn lines(at: *const u8, len: usize) {
    for line in (0..len).step_by(64) {
        prefetch(at.wrapping_add(line));
    }
}

/// Whether a matrix can be made of `ty`: by tiles, or decoded as it is multiplied.
pub(crate) fn supports(ty: TensorType) -> bool {
    if Layout::of(ty) != Layout::Foreign {
        return true;
    }
    let mut out = [0.0; 256];
    let len = ty.block_len();
    len <= 256
        && 256 % len == 0
        && blocks::dequantize(ty, &vec![0; 256 / len * ty.block_bytes()], &mut out).is_ok()
}

/// Whether a weight of `ty` is multiplied from tiles, at full speed.
pub(crate) fn is_tiled(ty: TensorType) -> bool {
    Layout::of(ty) != Layout::Foreign
}

fn check(w: &WeightRef) -> Result<()> {
    let doing = format!("packing {} ({} {} x {} x {})", w.name, w.ty, w.experts, w.rows, w.cols);
    if !supports(w.ty) {
        return Err(Error::unsupported(format!("{doing}: the type cannot be multiplied with")));
    }
    if !(w.cols as usize).is_multiple_of(w.ty.block_len()) {
        return Err(Error::malformed(format!(
            "{doing}: a row is not whole blocks of {}",
            w.ty.block_len()
        )));
    }
    let held = w.data.bytes().len();
    if w.offset.checked_add(w.len_bytes()).is_none_or(|end| end > held) {
        return Err(Error::malformed(format!(
            "{doing}: needs {} bytes from {}, its map has {held}",
            w.len_bytes(),
            w.offset
        )));
    }
    Ok(())
}

impl std::fmt::Debug for Matrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} as {:?}, {} bytes", self.source, self.layout, self.bytes())
    }
}
