//! Tapes out of planes, once at load, by the GPU: every unit of 32 blocks to the place where its block of threads comes to it.
//! It knows no plan.

use std::sync::Arc;

use fornax_gguf::TensorType;
use fornax_plan::Result;

use super::share::{CLUSTER, Geometry, Pace, Part, SPAN, Share, rows, stage_at, tape_bytes};
use crate::args::LayArgs;
use crate::driver::{Gpu, Memory, Module};
use crate::kernels::entry;

/// Warps of a block, and blocks for every block of threads that has a tape.
const WARPS: u32 = 8;
const SIDE_BY_SIDE: u32 = 8;

/// Bytes of all tapes together.
pub(crate) fn bytes(g: &Geometry, shares: &[Share]) -> u64 {
    let last = shares.len() - 1;
    shares[last].at + tape_bytes(g, last as u32, &shares[last])
}

/// A matrix in planes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub(crate) at: u64,
    pub(crate) rows: u32,
    /// Blocks of 32 of a row.
    pub(crate) nb: u32,
    pub(crate) ty: TensorType,
}

/// The tapes, being laid.
#[derive(Debug)]
pub(crate) struct Lay<'a> {
    gpu: &'a Arc<Gpu>,
    module: Arc<Module>,
    geometry: &'a Geometry,
    pace: &'a Pace,
    shares: &'a [Share],
    pub(crate) tapes: Memory,
    /// By part: the rows of every block of threads, one after the other, and where each block's begin.
    lists: Vec<(Memory, Vec<[u32; 2]>)>,
    /// What is copied from while the launch runs.
    used: Vec<Memory>,
}

impl<'a> Lay<'a> {
    pub(crate) fn new(
        gpu: &'a Arc<Gpu>,
        module: Arc<Module>,
        geometry: &'a Geometry,
        pace: &'a Pace,
        shares: &'a [Share],
    ) -> Result<Lay<'a>> {
        let tapes = gpu.alloc(bytes(geometry, shares) as usize)?;
        let list = |part: Part| {
            let (mut all, mut spans) = (Vec::new(), Vec::new());
            for (ix, share) in shares.iter().enumerate() {
                let own = rows(geometry, pace, part, ix as u32, share);
                spans.push([all.len() as u32, own.len() as u32]);
                all.extend(own);
            }
            let bytes: Vec<u8> = all.iter().flat_map(|r| r.to_le_bytes()).collect();
            let memory = gpu.alloc(bytes.len())?;
            gpu.write(memory.ptr, &bytes)?;
            Ok((memory, spans))
        };
        let lists = Part::ALL.into_iter().map(list).collect::<Result<Vec<_>>>()?;
        let used = Vec::new();
        Ok(Lay { gpu, module, geometry, pace, shares, tapes, lists, used })
    }

    /// Lays a matrix of a layer; the head's layer is the number of layers.
    pub(crate) fn put(&mut self, part: Part, layer: u32, from: &Matrix) -> Result<()> {
        let (list, spans) = &self.lists[part as usize];
        let g = self.geometry;
        let near = part == Part::Out && g.near();
        let (span, wide) = if near { (SPAN, g.mix_blocks()) } else { (32, 32) };
        let mut words = Vec::with_capacity(24 * spans.len());
        for (ix, (share, [first, count])) in self.shares.iter().zip(spans).enumerate() {
            let at = stage_at(g, part, layer, ix as u32, share);
            words.extend(at.to_le_bytes());
            words.extend(first.to_le_bytes());
            words.extend(count.to_le_bytes());
            words.extend(self.pace.batch(part, *count).to_le_bytes());
            let block = if near { ix as u32 / CLUSTER * wide } else { 0 };
            words.extend(block.to_le_bytes());
        }
        let places = self.gpu.alloc(words.len())?;
        self.gpu.write(places.ptr, &words)?;
        let function = self.module.function(&entry("lay", from.ty))?;
        let units = g.units(part);
        let constants = LayArgs { rows: from.rows, nb: from.nb, units, span, wide }.words();
        let pointers = [from.at, list.ptr, places.ptr, self.tapes.ptr];
        let grid = (self.shares.len() as u32, SIDE_BY_SIDE);
        self.gpu.launch(&function, grid, 32 * WARPS, 0, &constants, &pointers)?;
        self.used.push(places);
        Ok(())
    }

    /// The tapes, when they are whole.
    pub(crate) fn finish(self) -> Result<Memory> {
        self.gpu.finish()?;
        Ok(self.tapes)
    }
}
