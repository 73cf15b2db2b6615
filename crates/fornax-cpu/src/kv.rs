//! The paged key/value cache: pools of blocks, how a token is written and read back, and the
//! commands of the boundary. It knows no ops and no threads.
//!
//! A block of a group holds 32 tokens of all its layers: `[layer][head]` runs of keys, then
//! values, in the layout that [`crate::ops::Attend`] reads. A run starts on a cache line.

use fornax_gguf::{TensorType, blocks};
use fornax_plan::{BlockId, Cmd, Error, KvGroup, KvType, Result};

use crate::matrix::Memory;
use crate::ops::{BLOCK, Cell, VectorOps};

/// Bytes from which a pool is on large pages.
const LARGE: usize = 8 << 20;

/// The pools of all groups.
#[derive(Debug)]
pub(crate) struct Cache {
    pools: Vec<Pool>,
    blocks: u32,
}

/// One group's blocks.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) run: Run,
    layers: usize,
    memory: Vec<Memory>,
    /// Address of every block; growth appends and moves nothing.
    at: Vec<*mut u8>,
}

// SAFETY: the addresses point into `memory`, which the pool owns.
unsafe impl Send for Pool {}
// SAFETY: blocks are written through raw pointers by one thread per (token, head) of a step.
unsafe impl Sync for Pool {}

/// Sizes of the keys and values of one head in one block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) cell: Cell,
    pub(crate) heads: usize,
    pub(crate) k_width: usize,
    pub(crate) v_width: usize,
    /// Elements from one token's value to the next.
    pub(crate) v_stride: usize,
    /// Bytes of the keys; the values follow.
    k_bytes: usize,
    bytes: usize,
}

impl Run {
    fn new(group: &KvGroup, ty: KvType) -> Run {
        let (k, v) = (group.k_width as usize, group.v_width as usize);
        let v_stride = v.next_multiple_of(16);
        let (cell, element) = match ty {
            KvType::F32 => (Cell::F32, 4),
            KvType::F16 => (Cell::F16, 2),
            KvType::Q8_0 => (Cell::Q8, 1),
        };
        let scales = |width: usize| if cell == Cell::Q8 { width / 32 * BLOCK * 2 } else { 0 };
        let k_bytes = (k * BLOCK * element + scales(k)).next_multiple_of(64);
        let v_bytes = (v_stride * BLOCK * element + scales(v)).next_multiple_of(64);
        let heads = group.heads as usize;
        Run { cell, heads, k_width: k, v_width: v, v_stride, k_bytes, bytes: k_bytes + v_bytes }
    }
}

impl Pool {
    /// Keys and values of one head of one layer in a block.
    #[inline]
    pub(crate) fn run(&self, block: BlockId, layer: usize, head: usize) -> (*mut u8, *mut u8) {
        let at = self.at[block.ix()].wrapping_add((layer * self.run.heads + head) * self.run.bytes);
        (at, at.wrapping_add(self.run.k_bytes))
    }

    fn block_bytes(&self) -> usize {
        self.layers * self.run.heads * self.run.bytes
    }

    /// Stores one head's key and value at a position.
    ///
    /// # Safety
    /// The ops' tier is available, and nobody else touches this token of this head meanwhile.
    pub(crate) unsafe fn write(
        &self,
        ops: &VectorOps,
        (block, layer, head, token): (BlockId, usize, usize, usize),
        k: &[f32],
        v: &[f32],
    ) {
        let (keys, values) = self.run(block, layer, head);
        let Run { cell, k_width, v_width, v_stride, .. } = self.run;
        assert!(k.len() == k_width && v.len() == v_width && token < BLOCK);
        // SAFETY: all indices below are within the run by its sizes.
        unsafe {
            match cell {
                Cell::F32 => {
                    scatter(k, keys.cast::<f32>(), token);
                    let to = values.cast::<f32>().add(token * v_stride);
                    std::ptr::copy_nonoverlapping(v.as_ptr(), to, v_width);
                }
                Cell::F16 => {
                    let mut half = [0u16; 64];
                    for (ix, k) in k.chunks(64).enumerate() {
                        halves(ops, k, &mut half);
                        scatter(&half[..k.len()], keys.cast::<u16>().add(ix * 64 * BLOCK), token);
                    }
                    let to = values.cast::<u16>().add(token * v_stride);
                    for (ix, v) in v.chunks(64).enumerate() {
                        halves(ops, v, &mut half);
                        std::ptr::copy_nonoverlapping(half.as_ptr(), to.add(ix * 64), v.len());
                    }
                }
                Cell::Q8 => {
                    let scales = keys.add(k_width * BLOCK).cast::<u16>();
                    for (ix, k) in k.chunks(32).enumerate() {
                        let (d, q) = bytes_of(k);
                        scatter(&q, keys.cast::<i8>().add(ix * 32 * BLOCK), token);
                        *scales.add(ix * BLOCK + token) = d;
                    }
                    let scales = values.add(v_stride * BLOCK).cast::<u16>();
                    for (ix, v) in v.chunks(32).enumerate() {
                        let (d, q) = bytes_of(v);
                        let to = values.cast::<i8>().add(token * v_stride + ix * 32);
                        std::ptr::copy_nonoverlapping(q.as_ptr(), to, 32);
                        *scales.add(ix * BLOCK + token) = d;
                    }
                }
            }
        }
    }

    /// Reads back what [`Pool::write`] stored.
    fn read(
        &self,
        (block, layer, head, token): (BlockId, usize, usize, usize),
        k: &mut [f32],
        v: &mut [f32],
    ) {
        let (keys, values) = self.run(block, layer, head);
        let Run { cell, k_width, v_stride, .. } = self.run;
        let half = fornax_gguf::blocks::f16_to_f32;
        // SAFETY: all indices are within the run by its sizes; `&mut self` of the program that
        // owns the cache says that no step runs.
        unsafe {
            let element = |at: *const u8, ix: usize| match cell {
                Cell::F32 => *at.cast::<f32>().add(ix),
                Cell::F16 => half(*at.cast::<u16>().add(ix)),
                Cell::Q8 => f32::from(*at.cast::<i8>().add(ix)),
            };
            let scale = |at: *const u8, elements: usize, i: usize| match cell {
                Cell::Q8 => {
                    half(*at.add(elements * BLOCK).cast::<u16>().add(i / 32 * BLOCK + token))
                }
                _ => 1.0,
            };
            for (i, k) in k.iter_mut().enumerate() {
                *k = element(keys, i * BLOCK + token) * scale(keys, k_width, i);
            }
            for (i, v) in v.iter_mut().enumerate() {
                *v = element(values, token * v_stride + i) * scale(values, v_stride, i);
            }
        }
    }
}

/// Puts the elements of one token 32 elements apart.
///
/// # Safety
/// `to` is good for `from.len()` rows of 32.
unsafe fn scatter<T: Copy>(from: &[T], to: *mut T, token: usize) {
    for (i, v) in from.iter().enumerate() {
        // SAFETY: the caller's word.
        unsafe { *to.add(i * BLOCK + token) = *v };
    }
}

/// Up to 64 halves.
///
/// # Safety
/// The ops' tier is available.
unsafe fn halves(ops: &VectorOps, x: &[f32], out: &mut [u16; 64]) {
    let whole = x.len() / 16 * 16;
    // SAFETY: both have at least `whole` elements, and `tail` has sixteen.
    unsafe {
        (ops.to_f16)(x.as_ptr(), out.as_mut_ptr(), whole);
        if whole < x.len() {
            let mut tail = [0.0; 16];
            tail[..x.len() - whole].copy_from_slice(&x[whole..]);
            (ops.to_f16)(tail.as_ptr(), out.as_mut_ptr().add(whole), 16);
        }
    }
}

/// A block of 32 as the file format of the same name rounds it: the scale's bits and the bytes.
fn bytes_of(x: &[f32]) -> (u16, [i8; 32]) {
    let mut block = [0u8; 34];
    blocks::quantize(TensorType::Q8_0, x, &mut block)
        .expect("invariant: widths are multiples of 32, checked by supports");
    let mut q = [0i8; 32];
    for (q, b) in q.iter_mut().zip(&block[2..]) {
        *q = *b as i8;
    }
    (u16::from_le_bytes([block[0], block[1]]), q)
}

impl Cache {
    pub(crate) fn new(groups: &[KvGroup], blocks: u32, ty: KvType) -> Result<Cache> {
        let pool = |g: &KvGroup| Pool {
            run: Run::new(g, ty),
            layers: g.layers.len(),
            memory: Vec::new(),
            at: Vec::new(),
        };
        let mut cache = Cache { pools: groups.iter().map(pool).collect(), blocks: 0 };
        cache.grow(blocks)?;
        Ok(cache)
    }

    pub(crate) fn pool(&self, group: usize) -> &Pool {
        &self.pools[group]
    }

    /// Adds blocks to every pool; all or nothing.
    pub(crate) fn grow(&mut self, blocks: u32) -> Result<()> {
        let what = format!("{blocks} kv blocks (fewer of them, or a smaller --kv-type, need less)");
        // A large page holds many tokens: worth it where there will be many of them.
        let memory = |bytes: usize| match bytes >= LARGE {
            true => Memory::large(bytes, &what),
            false => Memory::zeroed(bytes, &what),
        };
        let fresh: Result<Vec<Memory>> = self
            .pools
            .iter()
            .map(|p| memory(p.block_bytes().saturating_mul(blocks as usize)))
            .collect();
        for (pool, memory) in self.pools.iter_mut().zip(fresh?) {
            let (first, step) = (memory.as_ptr(), pool.block_bytes());
            pool.at.extend((0..blocks as usize).map(|b| first.wrapping_add(b * step)));
            pool.memory.push(memory);
        }
        self.blocks += blocks;
        Ok(())
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.pools.iter().map(|p| p.block_bytes() as u64 * u64::from(self.blocks)).sum()
    }

    /// Runs a command on keys and values.
    pub(crate) fn command(&mut self, ops: &VectorOps, command: Cmd<'_>) -> Result<()> {
        match command {
            Cmd::CopyBlock { group, from, to } => {
                self.known(group, &[from, to])?;
                let pool = &self.pools[group as usize];
                // SAFETY: both are blocks of the pool; a copy onto itself overlaps whole.
                unsafe {
                    std::ptr::copy(pool.at[from.ix()], pool.at[to.ix()], pool.block_bytes());
                }
                Ok(())
            }
            Cmd::ReadKv { group, table, tokens, out } => {
                let pool = self.covered(group, table, tokens.end)?;
                let token_len = pool.run.heads * (pool.run.k_width + pool.run.v_width);
                out.clear();
                out.resize(pool.layers * tokens.len() * token_len, 0.0);
                let mut rows = out.chunks_exact_mut(token_len.max(1));
                pool.each_token(tokens, table, |block, layer, token| {
                    let Some(row) = rows.next() else { return };
                    let (k, v) = row.split_at_mut(pool.run.heads * pool.run.k_width);
                    let heads = k.chunks_mut(pool.run.k_width).zip(v.chunks_mut(pool.run.v_width));
                    for (head, (k, v)) in heads.enumerate() {
                        pool.read((block, layer, head, token), k, v);
                    }
                });
                Ok(())
            }
            Cmd::WriteKv { group, table, tokens, data } => {
                let pool = self.covered(group, table, tokens.end)?;
                let token_len = pool.run.heads * (pool.run.k_width + pool.run.v_width);
                let want = pool.layers * tokens.len() * token_len;
                if data.len() != want {
                    return Err(Error::malformed(format!(
                        "write kv: {} elements, expected {want}",
                        data.len()
                    )));
                }
                let mut rows = data.chunks_exact(token_len.max(1));
                pool.each_token(tokens, table, |block, layer, token| {
                    let Some(row) = rows.next() else { return };
                    let (k, v) = row.split_at(pool.run.heads * pool.run.k_width);
                    let heads = k.chunks(pool.run.k_width).zip(v.chunks(pool.run.v_width));
                    for (head, (k, v)) in heads.enumerate() {
                        // SAFETY: `&mut self` of the program that owns the cache says that no
                        // step runs.
                        unsafe { pool.write(ops, (block, layer, head, token), k, v) }
                    }
                });
                Ok(())
            }
            Cmd::ReadState { .. } | Cmd::WriteState { .. } => {
                unreachable!("states are the program's")
            }
        }
    }

    fn known(&self, group: u32, blocks: &[BlockId]) -> Result<()> {
        if group as usize >= self.pools.len() {
            let have = self.pools.len();
            return Err(Error::malformed(format!("kv group {group}, expected less than {have}")));
        }
        match blocks.iter().find(|b| b.0 >= self.blocks) {
            Some(b) => {
                Err(Error::malformed(format!("kv block {}, the pool has {}", b.0, self.blocks)))
            }
            None => Ok(()),
        }
    }

    fn covered(&self, group: u32, table: &[BlockId], end: u32) -> Result<&Pool> {
        self.known(group, table)?;
        let need = (end as usize).div_ceil(BLOCK);
        if table.len() < need {
            let have = table.len();
            return Err(Error::malformed(format!("kv table of {have} blocks, {need} are needed")));
        }
        Ok(&self.pools[group as usize])
    }
}

impl Pool {
    /// Calls `f` with block, layer and token in it, layer after layer.
    fn each_token(
        &self,
        tokens: std::ops::Range<u32>,
        table: &[BlockId],
        mut f: impl FnMut(BlockId, usize, usize),
    ) {
        for layer in 0..self.layers {
            for pos in tokens.clone() {
                f(table[pos as usize / BLOCK], layer, pos as usize % BLOCK);
            }
        }
    }
}
