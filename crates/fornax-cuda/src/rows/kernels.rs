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

/// Rows of a tile, by how many rows there are.
pub(crate) const TOKENS: [u32; 3] = [16, 32, 64];
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
    while tiles * splits < BUSY && steps >= 4 * splits {
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

/// Shared memory of a product: the ring, or the sums that take its place.
pub(crate) fn product_bytes(ty: TensorType, tokens: u32, wide: u32, threads: u32) -> u32 {
    let outs = 32 * wide;
    let step = outs * (128 + extra(ty)) + tokens * 256 + 2 * 8 * tokens * 4;
    let sums = threads / 32 / wide * tokens * (outs + 4) * 4;
    (stages(threads) * step).max(sums)
}

fn product_defines(tokens: u32, wide: u32, threads: u32) -> [Define; 4] {
    [
        Define::number("TOKENS", tokens),
        Define::number("WIDE", wide),
        Define::number("STAGES", stages(threads)),
        Define::number("THREADS_AT_ONCE", threads),
    ]
}

fn few_defines(dim: u32, kv: KvType) -> [Define; 2] {
    [Define::number("DIM", dim), Define::cache(kv)]
}

/// `fine` is where products take 8-bit activations: queries and weights then keep more than halves hold.
fn many_defines(dim: u32, share: u32, kv: KvType, fine: bool) -> [Define; 4] {
    let [dim, kv] = few_defines(dim, kv);
    [dim, kv, Define::number("SHARE", share), Define::number("FINE", fine.into())]
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
        for tokens in TOKENS {
            for (wide, threads) in SHAPES {
                let defines = product_defines(tokens, wide, threads);
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
                list.push(Variant::of("few", &[], &few_defines(dim, kv)));
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
    /// By format, rows of a tile, width and threads.
    pub(crate) products: HashMap<(TensorType, u32, u32, u32), Function>,
    /// By elements of a head, query heads of a KV head.
    pub(crate) few: HashMap<u32, Function>,
    /// The same with norms and positions.
    pub(crate) few_turned: HashMap<u32, Function>,
    /// And whether they are the fine ones.
    pub(crate) many: HashMap<(u32, u32, bool), Function>,
    /// By format; none where the GPU lacks the products.
    pub(crate) expand: HashMap<TensorType, Function>,
    pub(crate) long: Vec<Function>,
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
                Item::Attend(a) => k.attend(&m, a, kv, (long, each))?,
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
            let Cut { wide, threads, .. } = cut(p.stage.nb, matrix.outs, p.stage.epi == GATED);
            for (ix, tokens) in TOKENS.into_iter().enumerate() {
                let key = (matrix.ty, tokens, wide, threads);
                let needed = ix == 0 || most > TOKENS[ix - 1];
                if !needed || self.products.contains_key(&key) {
                    continue;
                }
                let shared = product_bytes(matrix.ty, tokens, wide, threads);
                let of = entry("product", matrix.ty);
                let made = m.make(
                    "products",
                    &[matrix.ty],
                    &product_defines(tokens, wide, threads),
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
        (long, each): (bool, bool),
    ) -> Result<()> {
        let share = a.heads / a.kv_heads;
        if share <= SLOTS && !self.few.contains_key(&a.dim) {
            let make = |of| m.make("few", &[], &few_defines(a.dim, kv), of, few_bytes(a.dim));
            self.few.insert(a.dim, make("few")?);
            self.few_turned.insert(a.dim, make("few_turned")?);
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
        // A part has two steps at least.
        assert_eq!(cut(3, 33, false), Cut { wide: 1, splits: 1, threads: 256 });
    }

    #[test]
    fn blocks_of_a_product_fit_a_multiprocessor() {
        for ty in PLANED {
            for tokens in TOKENS {
                for (wide, threads) in SHAPES {
                    let bytes = product_bytes(*ty, tokens, wide, threads);
                    let all = 512 / threads * (bytes + 2048);
                    assert!(all <= 227 << 10, "{ty} {tokens} {wide} {threads}: {bytes}");
                }
            }
        }
    }
}
