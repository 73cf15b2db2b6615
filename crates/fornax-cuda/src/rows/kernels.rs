//! The kernels of steps with many rows, compiled for what a plan needs. It knows no step.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use fornax_gguf::TensorType;
use fornax_plan::{KvType, Result};

use super::item::{Attend, Item, Product};
use super::scratch::SLOTS;
use crate::compiler::Compiler;
use crate::driver::{Function, Gpu};
use crate::fast::planes::PLANED;
use crate::fast::stage::GATED;
use crate::kernels::{self, Define, Variant, entry};

/// Rows up to which kernels are the eager ones: steps so small are a chain of waits, and nothing is ahead of its time.
pub(crate) const EAGER: u32 = 32;

/// Rows that a block of a product takes, and whether its kernel is the eager one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tile {
    pub(crate) rows: u32,
    pub(crate) eager: bool,
}

const fn tile(rows: u32, eager: bool) -> Tile {
    Tile { rows, eager }
}

/// By how many rows there are.
pub(crate) const TILES: [Tile; 3] = [tile(16, true), tile(EAGER, true), tile(64, false)];
/// Instead of the last of them where blocks are few.
pub(crate) const HALF: Tile = tile(32, false);
/// Outputs of 32 that a block takes side by side, and its threads.
const SHAPES: [(u32, u32); 3] = [(1, 256), (2, 256), (2, 512)];
/// Columns of a block's tile of a long product, with the steps of its ring and blocks of a multiprocessor.
pub(crate) const LONG: [(u32, u32, u32); 2] = [(128, 3, 2), (256, 4, 1)];
/// Bytes of a tile of halves, and its rows.
pub(crate) const TILE_BYTES: u32 = 16384;
pub(crate) const TILE_ROWS: u32 = 128;

/// Blocks of the grid that a product should have at least, before its columns are cut into parts.
const BUSY: u32 = 90;
/// Blocks of the grid up to which a multiprocessor hardly gets a second one.
const ALONE: u32 = 160;

/// Blocks of 512 threads that run at once.
const RESIDENT: u32 = 132;
/// Parts of the columns at most: blocks of a cluster on any GPU that has clusters.
const SPLITS_MAX: u32 = 8;

/// How a product of 8-bit numbers is shared out: by the matrix alone, so that no row depends on the rows beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Cut {
    pub(crate) wide: u32,
    pub(crate) splits: u32,
    /// Threads of a block: more where a multiprocessor has one block.
    pub(crate) threads: u32,
}

pub(crate) fn cut(nb: u32, outs: u32, gated: bool) -> Cut {
    let wide = if gated || outs >= 8192 { 2 } else { 1 };
    let (tiles, steps) = (outs.div_ceil(32 * wide), nb.div_ceil(8));
    let mut splits = 1;
    let most = if wide == 2 { RESIDENT } else { 2 * BUSY };
    while tiles * splits < BUSY
        && steps >= 4 * splits
        && 2 * tiles * splits <= most
        && splits < SPLITS_MAX
    {
        splits *= 2;
    }
    let threads = if wide == 2 && tiles * splits <= ALONE { 512 } else { 256 };
    Cut { wide, splits, threads }
}

/// Steps of a ring of a product.
fn stages(threads: u32) -> u32 {
    if threads == 512 { 4 } else { 3 }
}

/// Bytes of a row of a step of weights beside plane A: plane B, fifth bits, scales; as the kernel has them.
fn extra(ty: TensorType) -> u32 {
    match ty {
        TensorType::Q8_0 => 128 + 16,
        TensorType::Q4_1 => 32,
        TensorType::Q5_0 | TensorType::Q5_K => 32 + 16,
        TensorType::Q5_1 => 32 + 32,
        TensorType::Q6_K => 64 + 32,
        TensorType::MXFP4 => 8,
        _ => 16,
    }
}

/// Shared memory of a product: the ring, or the sums that take its place; then what the other parts of the columns send.
pub(crate) fn product_bytes(ty: TensorType, tile: Tile, cut: Cut) -> u32 {
    let Cut { wide, splits, threads } = cut;
    let (outs, rows) = (32 * wide, tile.rows);
    let step = outs * (128 + extra(ty)) + rows * 256 + 2 * 8 * rows * 4;
    let sums = threads / 32 / wide * rows * (outs + 4) * 4;
    let own = rows * outs / threads;
    let sent = if tile.eager && splits > 1 { threads * 4 * own.max(2 * splits) } else { 0 };
    (stages(threads) * step).max(sums) + sent
}

fn product_defines(tile: Tile, wide: u32, threads: u32) -> [Define; 5] {
    [
        Define::number("TOKENS", tile.rows),
        Define::number("WIDE", wide),
        Define::number("STAGES", stages(threads)),
        Define::number("THREADS_AT_ONCE", threads),
        Define::number("EAGER", tile.eager.into()),
    ]
}

fn few_defines(dim: u32, kv: KvType, eager: bool) -> [Define; 3] {
    [Define::number("DIM", dim), Define::cache(kv), Define::number("EAGER", eager.into())]
}

/// `fine` is where products take 8-bit activations: queries and weights then keep more than halves hold.
fn many_defines(dim: u32, share: u32, kv: KvType, fine: bool) -> [Define; 4] {
    [
        Define::number("DIM", dim),
        Define::cache(kv),
        Define::number("SHARE", share),
        Define::number("FINE", fine.into()),
    ]
}

fn long_defines((columns, depth, blocks): (u32, u32, u32)) -> [Define; 3] {
    [
        Define::number("COLUMNS", columns),
        Define::number("DEPTH", depth),
        Define::number("BLOCKS", blocks),
    ]
}

/// Shared memory of attention of few rows and of many.
pub(crate) fn few_bytes(dim: u32) -> u32 {
    4 * SLOTS * dim * 4
}
pub(crate) fn many_bytes(dim: u32) -> u32 {
    4 * 64 * (2 * dim + 16)
}
/// Shared memory of a long product; tiles begin where a kilobyte does.
pub(crate) fn long_bytes((columns, depth, _): (u32, u32, u32)) -> u32 {
    depth * TILE_BYTES * (1 + columns / 128) + 1024
}

/// The kernels of common models.
pub(crate) fn variants() -> Vec<Variant> {
    let mut list = vec![Variant::of("round", &[], &[]), Variant::of("turn", &[], &[])];
    for ty in PLANED {
        for tile in TILES.into_iter().chain([HALF]) {
            for (wide, threads) in SHAPES {
                let defines = product_defines(tile, wide, threads);
                list.push(Variant::of("products", &[*ty], &defines));
            }
        }
    }
    let shapes =
        [(64, 2), (64, 3), (64, 4), (128, 2), (128, 4), (128, 7), (80, 1), (96, 1), (256, 4)];
    for (dim, share) in shapes {
        for kv in [KvType::F16, KvType::Q8_0] {
            if kv == KvType::Q8_0 && dim % 32 != 0 {
                continue;
            }
            if share != 4 {
                for eager in [false, true] {
                    list.push(Variant::of("few", &[], &few_defines(dim, kv, eager)));
                }
            }
            for fine in [false, true] {
                list.push(Variant::of("many", &[], &many_defines(dim, share, kv, fine)));
            }
        }
    }
    for ty in PLANED {
        list.push(Variant::of("expand", &[*ty], &[]));
    }
    list.extend(LONG.map(|l| Variant::of("gemm", &[], &long_defines(l))));
    list
}

/// Everything that is launched.
#[derive(Debug)]
pub(crate) struct Kernels {
    pub(crate) round: Function,
    pub(crate) halve: Function,
    pub(crate) turn: Function,
    /// By format, tile, width and threads.
    pub(crate) products: HashMap<(TensorType, Tile, u32, u32), Function>,
    /// By elements of a head, and whether they are the eager ones.
    pub(crate) few: HashMap<(u32, bool), Function>,
    /// The same with norms and positions.
    pub(crate) few_turned: HashMap<(u32, bool), Function>,
    /// By elements of a head, query heads of a KV head, and whether they are the fine ones.
    pub(crate) many: HashMap<(u32, u32, bool), Function>,
    /// By format; none where the GPU lacks the products.
    pub(crate) expand: HashMap<TensorType, Function>,
    pub(crate) long: Vec<Function>,
}

/// The tiles of steps of up to `most` rows.
fn tiles(most: u32, wide: u32) -> impl Iterator<Item = Tile> {
    let needed = move |ix: usize| ix == 0 || most > TILES[ix - 1].rows;
    let half = (wide == 1 && needed(2)).then_some(HALF);
    TILES.into_iter().enumerate().filter(move |(ix, _)| needed(*ix)).map(|(_, t)| t).chain(half)
}

/// Compiles kernels, each once.
struct Maker<'a> {
    gpu: &'a Arc<Gpu>,
    compiler: &'a Compiler,
}

impl Maker<'_> {
    fn make(
        &self,
        name: &str,
        types: &[TensorType],
        defines: &[Define],
        of: &str,
        shared: u32,
    ) -> Result<Function> {
        let module = kernels::load(self.gpu, self.compiler, name, types, defines)?;
        let function = module.function(of)?;
        if shared > 0 {
            function.allow_shared(shared)?;
        }
        Ok(function)
    }
}

impl Kernels {
    /// # Errors
    /// As `prepare`.
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        compiler: &Compiler,
        items: &[Item],
        kv: KvType,
        (most, long, each): (u32, bool, bool),
    ) -> Result<Kernels> {
        let m = Maker { gpu, compiler };
        let turn = match kv {
            KvType::F32 => "turn_f32",
            KvType::F16 => "turn_f16",
            KvType::Q8_0 => "turn_q8_0",
        };
        let mut k = Kernels {
            round: m.make("round", &[], &[], "round_rows", 0)?,
            halve: m.make("round", &[], &[], "halve_rows", 0)?,
            turn: m.make("turn", &[], &[], turn, 0)?,
            products: HashMap::new(),
            few: HashMap::new(),
            few_turned: HashMap::new(),
            many: HashMap::new(),
            expand: HashMap::new(),
            long: Vec::new(),
        };
        for item in items {
            match item {
                Item::Product(p) => k.product(&m, p, most, long)?,
                Item::Attend(a) => k.attend(&m, a, kv, (most, long, each))?,
                _ => {}
            }
        }
        if long && !k.products.is_empty() {
            for shape in LONG {
                k.long.push(m.make(
                    "gemm",
                    &[],
                    &long_defines(shape),
                    "gemm",
                    long_bytes(shape),
                )?);
            }
        }
        Ok(k)
    }

    fn product(&mut self, m: &Maker<'_>, p: &Product, most: u32, long: bool) -> Result<()> {
        for matrix in &p.matrices {
            let cut = cut(p.stage.nb, matrix.outs, p.stage.epi == GATED);
            let Cut { wide, threads, .. } = cut;
            for tile in tiles(most, wide) {
                let key = (matrix.ty, tile, wide, threads);
                if self.products.contains_key(&key) {
                    continue;
                }
                // Matrices that are cut into more parts share the kernel.
                let shared = product_bytes(matrix.ty, tile, Cut { splits: SPLITS_MAX, ..cut });
                let of = entry("product", matrix.ty);
                let made = m.make(
                    "products",
                    &[matrix.ty],
                    &product_defines(tile, wide, threads),
                    &of,
                    shared,
                )?;
                self.products.insert(key, made);
            }
            if long && !self.expand.contains_key(&matrix.ty) {
                let made = m.make("expand", &[matrix.ty], &[], &entry("expand", matrix.ty), 0)?;
                self.expand.insert(matrix.ty, made);
            }
        }
        Ok(())
    }

    fn attend(
        &mut self,
        m: &Maker<'_>,
        a: &Attend,
        kv: KvType,
        (most, long, each): (u32, bool, bool),
    ) -> Result<()> {
        let share = a.heads / a.kv_heads;
        for eager in [true, false] {
            let key = (a.dim, eager);
            if share > SLOTS || self.few.contains_key(&key) || !eager && most <= EAGER {
                continue;
            }
            let defines = few_defines(a.dim, kv, eager);
            let make = |of| m.make("few", &[], &defines, of, few_bytes(a.dim));
            self.few.insert(key, make("few")?);
            self.few_turned.insert(key, make("few_turned")?);
        }
        let fine: &[bool] = match (each, long) {
            (true, _) => &[],
            (false, false) => &[true],
            (false, true) => &[true, false],
        };
        for fine in fine {
            if let Entry::Vacant(gap) = self.many.entry((a.dim, share, *fine)) {
                let defines = many_defines(a.dim, share, kv, *fine);
                gap.insert(m.make("many", &[], &defines, "many", many_bytes(a.dim))?);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_matrices_are_cut_into_parts_and_large_ones_are_not() {
        assert_eq!(cut(64, 1024, false), Cut { wide: 1, splits: 4, threads: 256 });
        assert_eq!(cut(32, 4096, false), Cut { wide: 1, splits: 1, threads: 256 });
        assert_eq!(cut(32, 6144, true), Cut { wide: 2, splits: 1, threads: 512 });
        assert_eq!(cut(32, 151_936, false), Cut { wide: 2, splits: 1, threads: 256 });
        // Blocks of 512 threads that would not all run at once are not made.
        assert_eq!(cut(30, 5120, true), Cut { wide: 2, splits: 1, threads: 512 });
        assert_eq!(cut(32, 4096, true), Cut { wide: 2, splits: 2, threads: 512 });
        // A part has two steps at least.
        assert_eq!(cut(3, 33, false), Cut { wide: 1, splits: 1, threads: 256 });
    }

    #[test]
    fn blocks_of_a_product_fit_a_multiprocessor() {
        for ty in PLANED {
            for tile in TILES.into_iter().chain([HALF]) {
                for (wide, threads) in SHAPES {
                    let splits = if wide == 1 { SPLITS_MAX } else { 1 };
                    let bytes = product_bytes(*ty, tile, Cut { wide, splits, threads });
                    let all = 512 / threads * (bytes + 2048);
                    assert!(all <= 227 << 10, "{ty} {tile:?} {wide} {threads}: {bytes}");
                    let most = product_bytes(*ty, tile, Cut { wide, splits: SPLITS_MAX, threads });
                    assert!(most <= 225 << 10, "{ty} {tile:?} {wide} {threads}: {most}");
                }
            }
        }
    }

    #[test]
    fn tiles_are_those_that_steps_of_so_many_rows_take() {
        let rows = |most, wide| tiles(most, wide).map(|t| (t.rows, t.eager)).collect::<Vec<_>>();
        assert_eq!(rows(1, 1), [(16, true)]);
        assert_eq!(rows(32, 1), [(16, true), (32, true)]);
        assert_eq!(rows(33, 2), [(16, true), (32, true), (64, false)]);
        assert_eq!(rows(33, 1), [(16, true), (32, true), (64, false), (32, false)]);
    }
}
