//! One group's pool of blocks: who holds which, counted. It knows no token and no device.

use fornax_plan::BlockId;

/// The blocks of one group. A block is free, held by sequences, held by the prefix cache, or by
/// both.
#[derive(Debug)]
pub(crate) struct Pool {
    free: Vec<BlockId>,
    /// By block: tables of sequences that name it.
    seqs: Vec<u32>,
    /// By block: nodes of the prefix cache that name it.
    nodes: Vec<u32>,
    used: u32,
    cached: u32,
}

impl Pool {
    pub(crate) fn new(blocks: u32) -> Pool {
        Pool {
            // The lowest id is given out first.
            free: (0..blocks).rev().map(BlockId).collect(),
            seqs: vec![0; blocks as usize],
            nodes: vec![0; blocks as usize],
            used: 0,
            cached: 0,
        }
    }

    /// Blocks that sequences hold.
    pub(crate) fn used(&self) -> u32 {
        self.used
    }

    /// Blocks that the prefix cache alone holds.
    pub(crate) fn cached(&self) -> u32 {
        self.cached
    }

    /// Blocks that nobody holds.
    pub(crate) fn free(&self) -> u32 {
        self.free.len() as u32
    }

    pub(crate) fn total(&self) -> u32 {
        self.seqs.len() as u32
    }

    /// Takes a free block for a sequence.
    pub(crate) fn take(&mut self) -> Option<BlockId> {
        let block = self.free.pop()?;
        self.seqs[block.ix()] = 1;
        self.used += 1;
        Some(block)
    }

    /// Counts one more sequence that holds a block which is not free.
    pub(crate) fn share(&mut self, block: BlockId) {
        let seqs = &mut self.seqs[block.ix()];
        if *seqs == 0 {
            self.used += 1;
            self.cached -= 1;
        }
        *seqs += 1;
    }

    /// Counts one sequence less.
    pub(crate) fn release(&mut self, block: BlockId) {
        let seqs = &mut self.seqs[block.ix()];
        *seqs -= 1;
        if *seqs == 0 {
            self.used -= 1;
            if self.nodes[block.ix()] > 0 {
                self.cached += 1;
            } else {
                self.free.push(block);
            }
        }
    }

    /// Counts one more node that names a block which a sequence holds.
    pub(crate) fn keep(&mut self, block: BlockId) {
        self.nodes[block.ix()] += 1;
    }

    /// Counts one node less.
    pub(crate) fn drop_node(&mut self, block: BlockId) {
        let nodes = &mut self.nodes[block.ix()];
        *nodes -= 1;
        if *nodes == 0 && self.seqs[block.ix()] == 0 {
            self.cached -= 1;
            self.free.push(block);
        }
    }

    /// Whether the prefix cache alone holds a block.
    pub(crate) fn is_cached_only(&self, block: BlockId) -> bool {
        self.seqs[block.ix()] == 0 && self.nodes[block.ix()] > 0
    }

    /// Compares the counts with those that sequences and nodes really hold.
    ///
    /// # Errors
    /// A sentence that names the first block that is counted wrongly.
    pub(crate) fn check(&self, seqs: &[u32], nodes: &[u32]) -> Result<(), String> {
        let mut free = vec![false; self.seqs.len()];
        for b in &self.free {
            if std::mem::replace(&mut free[b.ix()], true) {
                return Err(format!("block {} is free twice", b.0));
            }
        }
        let (mut used, mut cached) = (0, 0);
        for b in 0..self.seqs.len() {
            if (self.seqs[b], self.nodes[b]) != (seqs[b], nodes[b]) {
                return Err(format!(
                    "block {b} is held by {} sequences and {} nodes, {} and {} are counted",
                    seqs[b], nodes[b], self.seqs[b], self.nodes[b]
                ));
            }
            if free[b] != (seqs[b] == 0 && nodes[b] == 0) {
                return Err(format!("block {b}: free is {}, and it is held otherwise", free[b]));
            }
            used += u32::from(seqs[b] > 0);
            cached += u32::from(seqs[b] == 0 && nodes[b] > 0);
        }
        if (used, cached) != (self.used, self.cached) {
            return Err(format!(
                "{used} blocks used and {cached} cached, counted {} and {}",
                self.used, self.cached
            ));
        }
        Ok(())
    }
}
