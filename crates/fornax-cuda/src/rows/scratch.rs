//! Memory of steps with many rows: inputs of products in the form that they read, parts of sums, expanded matrices. It
//! knows sizes alone.

use std::sync::Arc;

use fornax_plan::{Limits, Plan, Result};

use super::item::{Item, Onward};
use super::kernels::{TILE_BYTES, TILE_ROWS, cut};
use crate::driver::{Gpu, Memory};
use crate::fast::stage::GATED;
use crate::prepare::KV_BLOCK;

/// Rows of one launch of a product of 8-bit numbers at most, so that parts of sums have bounds.
pub(crate) const AT_ONCE: u32 = 256;
/// Parts of a context at most, and keys of one at least.
pub(crate) const PARTS: u32 = 16;
pub(crate) const PART_KEYS: u32 = 512;
/// Rows of one product of attention of few rows.
pub(crate) const SLOTS: u32 = 8;

/// An input of products: numbers or tiles, with the scales and sums of the former, and the squares of blocks whose norm
/// is still to come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Input {
    pub(crate) bytes: u64,
    pub(crate) scales: u64,
    pub(crate) sums: u64,
    pub(crate) squares: u64,
}

#[derive(Debug)]
pub(crate) struct Scratch {
    /// A product reads one while it writes the other.
    pub(crate) inputs: [Input; 2],
    pub(crate) partial: u64,
    pub(crate) arrived: u64,
    /// The matrix of halves that is read next.
    pub(crate) matrix: u64,
    pub(crate) means: u64,
    pub(crate) marks: u64,
    pub(crate) counts: u64,
    pub(crate) bytes: u64,
    _memory: Vec<Memory>,
}

/// Rows that attention takes at once where it takes each by itself; else so many sequences have places for their parts.
pub(crate) fn each_at_once(limits: &Limits) -> u32 {
    limits.slots.max(if limits.deterministic { 64 } else { 0 })
}

/// Parts of a context of so many keys, at most.
pub(crate) fn parts(keys: u32) -> u32 {
    keys.div_ceil(PART_KEYS).clamp(1, PARTS)
}

impl Scratch {
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        plan: &Plan,
        limits: &Limits,
        items: &[Item],
        long: bool,
    ) -> Result<Scratch> {
        let rows = u64::from(
            limits.rows.max(limits.wanted).max(limits.slots).next_multiple_of(2 * TILE_ROWS),
        );
        let mut blocks = [1u64; 2];
        let (mut partial, mut tiles, mut matrix, mut means, mut counts) =
            (1u64, 1u64, 1u64, 1u64, 1u64);
        let context = plan.hyper.context.min(limits.kv_blocks * KV_BLOCK);
        for item in items {
            match item {
                Item::Product(p) => {
                    let nb = u64::from(p.stage.nb);
                    blocks[p.reads] = blocks[p.reads].max(nb);
                    let outs = match p.onward {
                        Onward::Nothing => 0,
                        Onward::Pairs => p.stage.outs[0] / 2,
                        Onward::Normed(_) => p.stage.outs[0],
                    };
                    blocks[1 - p.reads] = blocks[1 - p.reads].max(u64::from(outs / 32));
                    for m in &p.matrices {
                        let c = cut(p.stage.nb, m.outs, p.stage.epi == GATED);
                        let out_tiles = u64::from(m.outs.div_ceil(32 * c.wide));
                        let row_tiles = u64::from(AT_ONCE / 16).min(rows.div_ceil(16));
                        tiles = tiles.max(out_tiles * row_tiles);
                        if c.splits > 1 {
                            let outs = out_tiles * u64::from(32 * c.wide);
                            partial =
                                partial.max(outs * u64::from(AT_ONCE + 64) * u64::from(c.splits));
                        }
                        let whole = u64::from(m.outs.div_ceil(256) * 2) * nb.div_ceil(2);
                        matrix = matrix.max(whole * u64::from(TILE_BYTES));
                    }
                }
                Item::Attend(a) => {
                    blocks[0] = blocks[0].max(u64::from(a.heads * a.dim).div_ceil(32));
                    let heads = u64::from(each_at_once(limits)) * u64::from(a.kv_heads);
                    counts = counts.max(heads);
                    means = means.max(
                        heads
                            * u64::from(parts(context).next_power_of_two() * SLOTS)
                            * u64::from(a.dim),
                    );
                }
                _ => {}
            }
        }
        let mut memory = Vec::new();
        let mut bytes = 0;
        let mut keep = |n: u64| -> Result<u64> {
            let m = gpu.alloc(n as usize)?;
            let at = m.ptr;
            bytes += n;
            memory.push(m);
            Ok(at)
        };
        let mut input = |nb: u64| -> Result<Input> {
            let width = if long { nb.next_multiple_of(2) * 64 } else { nb * 32 };
            Ok(Input {
                bytes: keep(rows * width)?,
                scales: keep(rows * nb * 4)?,
                sums: keep(rows * nb * 4)?,
                squares: keep(rows * nb * 4)?,
            })
        };
        let inputs = [input(blocks[0])?, input(blocks[1])?];
        Ok(Scratch {
            inputs,
            partial: keep(4 * partial)?,
            arrived: keep(4 * tiles)?,
            matrix: keep(if long { matrix } else { 4 })?,
            means: keep(4 * means)?,
            marks: keep(8 * means.div_ceil(16))?,
            counts: keep(4 * counts)?,
            bytes,
            _memory: memory,
        })
    }
}
