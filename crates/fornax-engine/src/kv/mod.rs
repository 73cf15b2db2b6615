//! Keys and values: which block belongs to whom, what was computed before and can be shared, and
//! what is given up when blocks run out. The storage is the program's; this file knows positions,
//! blocks and tokens, and no device.
//!
//! A block that several hold is only ever read: a sequence writes at and past what it has
//! computed, and the block of that position is its own, a copy where the cache had it half full.

mod blocks;
mod prefix;

use fornax_plan::{BlockId, KvGroup, TokenId};

use blocks::Pool;
use prefix::{GONE, NodeId, Prefix};

/// Tokens that one lookup of the prefix cache steps over, unless blocks force another number.
const CHUNK: usize = 32;

/// Where a window has passed; a device never reads there, and any id will do.
const PASSED: BlockId = BlockId(0);

/// A block to copy before the sequence's next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyOf {
    pub(crate) group: u32,
    pub(crate) from: BlockId,
    pub(crate) to: BlockId,
}

/// How keys and values are kept.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KvRules {
    /// Tokens of a physical block.
    pub(crate) block: usize,
    /// Blocks in the pool of every group.
    pub(crate) blocks: u32,
    /// Rows of a step at most; how far a sequence may write past what it has computed.
    pub(crate) rows: usize,
    /// Whether to find again what was computed.
    pub(crate) cache: bool,
    /// Saved states at most; absent for a model that has none.
    pub(crate) states: Option<usize>,
}

/// The pools of all groups and what is known of their contents.
#[derive(Debug)]
pub(crate) struct Kv {
    rules: KvRules,
    chunk: usize,
    /// Blocks of one chunk in one group.
    per_group: usize,
    windows: Vec<Option<usize>>,
    pools: Vec<Pool>,
    prefix: Prefix,
    path: Vec<NodeId>,
}

/// One sequence's blocks.
#[derive(Debug, Default)]
pub(crate) struct Table {
    /// By group; entry `i` holds positions `i · block ..`.
    blocks: Vec<Vec<BlockId>>,
    /// By group: entries before this one are passed and held no longer.
    first: Vec<usize>,
    /// The nodes of the chunks that the sequence has computed or found, in order.
    path: Vec<NodeId>,
    /// Whether a chunk could not be added; those after it hang on nothing.
    unlisted: bool,
}

impl Table {
    pub(crate) fn new(groups: usize) -> Table {
        Table {
            blocks: vec![Vec::new(); groups],
            first: vec![0; groups],
            path: Vec::new(),
            unlisted: false,
        }
    }

    /// The block table of a group, as a step takes it.
    pub(crate) fn group(&self, group: usize) -> &[BlockId] {
        &self.blocks[group]
    }

    /// Blocks that are held of a group.
    fn held(&self, group: usize) -> usize {
        self.blocks[group].len() - self.first[group]
    }
}

impl Kv {
    pub(crate) fn new(groups: &[KvGroup], rules: KvRules) -> Kv {
        let block = rules.block;
        // A chunk is a number of blocks, or a block a number of chunks.
        let chunk = match (block < CHUNK, block.is_multiple_of(CHUNK)) {
            (true, _) => block * CHUNK.div_ceil(block),
            (false, true) => CHUNK,
            (false, false) => block,
        };
        Kv {
            chunk,
            per_group: chunk.div_ceil(block),
            windows: groups.iter().map(|g| g.window.map(|w| w as usize)).collect(),
            pools: groups.iter().map(|_| Pool::new(rules.blocks)).collect(),
            prefix: Prefix::new(chunk, groups.len(), rules.states.unwrap_or(0)),
            path: Vec::new(),
            rules,
        }
    }

    /// Tokens of one chunk: sequences share multiples of it, and states are saved there.
    pub(crate) fn chunk(&self) -> usize {
        self.chunk
    }

    /// Whether states are to be saved where a chunk ends.
    pub(crate) fn saves_states(&self) -> bool {
        self.rules.cache && self.rules.states.is_some_and(|most| most > 0)
    }

    /// Blocks of the group that sequences hold most of, and of those the cache alone holds there.
    pub(crate) fn usage(&self) -> (u32, u32) {
        let fullest = self.pools.iter().max_by_key(|p| p.used());
        fullest.map_or((0, 0), |p| (p.used(), p.cached()))
    }

    /// Blocks of a group that a sequence of so many positions holds at most.
    fn need(&self, group: usize, positions: usize) -> usize {
        let all = positions.div_ceil(self.rules.block);
        let windowed = |w: usize| (w + self.rules.rows).div_ceil(self.rules.block) + 1;
        self.windows[group].map_or(all, |w| all.min(windowed(w)))
    }

    /// Whether a sequence of so many positions fits when it is alone.
    pub(crate) fn can_ever_fit(&self, positions: usize) -> bool {
        (0..self.pools.len()).all(|g| self.need(g, positions) <= self.pools[g].total() as usize)
    }

    /// Whether there are blocks for the rest of `positions`, beside what is promised to others
    /// (each with its own table and length) and one block for each of them to grow into.
    pub(crate) fn has_room<'a>(
        &self,
        table: &Table,
        positions: usize,
        others: &(impl Iterator<Item = (&'a Table, usize)> + Clone),
    ) -> bool {
        (0..self.pools.len()).all(|g| {
            let pool = &self.pools[g];
            let rest = |t: &Table, n: usize| self.need(g, n).saturating_sub(t.held(g));
            let promised: usize = others.clone().map(|(t, n)| rest(t, n) + 1).sum();
            rest(table, positions) + promised <= (pool.free() + pool.cached()) as usize
        })
    }

    /// Gives an empty table what the cache holds of `tokens`, up to `most` of them, and returns
    /// how many. `copies` and `state` are replaced by what has to be done before the next step.
    pub(crate) fn begin(
        &mut self,
        table: &mut Table,
        tokens: &[TokenId],
        most: usize,
        copies: &mut Vec<CopyOf>,
        state: &mut Vec<f32>,
    ) -> usize {
        copies.clear();
        state.clear();
        let mut path = std::mem::take(&mut self.path);
        path.clear();
        if self.rules.cache {
            self.prefix.walk(tokens, &mut path);
        }
        let mut hit = 0;
        while !path.is_empty() {
            hit = self.usable(&path, most);
            if hit > 0 {
                break;
            }
            path.pop();
        }
        if hit > 0 && !self.take_over(table, &path, hit, copies) {
            copies.clear();
            hit = 0;
        }
        if let (true, Some(node)) = (hit > 0, path.last())
            && let Some(saved) = self.prefix.state(*node)
        {
            state.extend_from_slice(saved);
        }
        self.path = path;
        hit
    }

    /// How many positions can be taken over from the end of a path; 0 where something of it was
    /// given up.
    fn usable(&self, path: &[NodeId], most: usize) -> usize {
        let end = path.len() * self.chunk;
        let hit = end.min(most);
        if self.rules.states.is_some() {
            let saved = path.last().is_some_and(|n| self.prefix.state(*n).is_some());
            if hit < end || !saved {
                return 0;
            }
        }
        let there = |g: usize| {
            let entries = self.first_needed(g, hit)..hit.div_ceil(self.rules.block);
            entries.into_iter().all(|i| self.source(path, g, i, hit) != GONE)
        };
        if (0..self.pools.len()).all(there) { hit } else { 0 }
    }

    /// The first entry of a group's table that the row at `pos` looks at.
    fn first_needed(&self, group: usize, pos: usize) -> usize {
        self.windows[group].map_or(0, |w| (pos + 1).saturating_sub(w) / self.rules.block)
    }

    /// The block that holds entry `i` of a group as far as `hit`: that of the last chunk in it,
    /// which holds everything before it too.
    fn source(&self, path: &[NodeId], group: usize, i: usize, hit: usize) -> BlockId {
        let block = self.rules.block;
        let node = (hit.min((i + 1) * block) - 1) / self.chunk;
        let within = i * block % self.chunk.max(block) / block;
        let at = if self.per_group == 1 { 0 } else { within };
        self.prefix.blocks(path[node])[group * self.per_group + at]
    }

    /// Shares the full blocks of a path and copies the half full ones; false, with nothing held,
    /// when there is no room for a copy.
    fn take_over(
        &mut self,
        table: &mut Table,
        path: &[NodeId],
        hit: usize,
        copies: &mut Vec<CopyOf>,
    ) -> bool {
        let block = self.rules.block;
        self.prefix.pin(path[path.len() - 1]);
        // Chunks that end past `hit` are computed again in part; they are listed already.
        table.path.extend_from_slice(path);
        for g in 0..self.pools.len() {
            table.first[g] = self.first_needed(g, hit);
            for i in 0..hit.div_ceil(block) {
                let source = self.source(path, g, i, hit);
                if i >= table.first[g] {
                    self.pools[g].share(source);
                }
                table.blocks[g].push(if i >= table.first[g] { source } else { PASSED });
            }
        }
        if hit.is_multiple_of(block) {
            return true;
        }
        for g in 0..self.pools.len() {
            let Some(to) = self.take(g) else {
                copies.iter().for_each(|c| self.pools[c.group as usize].release(c.from));
                self.release(table);
                return false;
            };
            let last = table.blocks[g].len() - 1;
            let from = std::mem::replace(&mut table.blocks[g][last], to);
            copies.push(CopyOf { group: g as u32, from, to });
        }
        // The copies are made before anybody writes to a block that is given out from now on.
        copies.iter().for_each(|c| self.pools[c.group as usize].release(c.from));
        true
    }

    fn take(&mut self, group: usize) -> Option<BlockId> {
        let room = self.prefix.free_one(group, self.per_group, &mut self.pools);
        if room { self.pools[group].take() } else { None }
    }

    /// Blocks for every position below `positions`; false where they run out. What was taken
    /// stays with the sequence.
    pub(crate) fn ensure(&mut self, table: &mut Table, positions: usize) -> bool {
        for g in 0..self.pools.len() {
            while table.blocks[g].len() * self.rules.block < positions {
                let Some(block) = self.take(g) else { return false };
                table.blocks[g].push(block);
            }
        }
        true
    }

    /// Positions that the sequence has blocks for.
    pub(crate) fn covered(&self, table: &Table) -> usize {
        let entries = table.blocks.iter().map(Vec::len).min();
        entries.map_or(usize::MAX, |n| n * self.rules.block)
    }

    /// Notes that the first `computed` of `tokens` are in the cache: whole chunks can be found
    /// from now on, and what windows have passed is given back. `state` holds the states right
    /// after them, where they were read.
    pub(crate) fn advance(
        &mut self,
        table: &mut Table,
        tokens: &[TokenId],
        computed: usize,
        state: Option<&[f32]>,
    ) {
        while self.rules.cache && !table.unlisted && (table.path.len() + 1) * self.chunk <= computed
        {
            self.list_chunk(table, tokens);
        }
        if let (Some(state), Some(node)) = (state, table.path.last())
            && table.path.len() * self.chunk == computed
        {
            self.prefix.set_state(*node, state);
        }
        for g in 0..self.pools.len() {
            let dead = self.first_needed(g, computed).min(table.blocks[g].len());
            for i in table.first[g]..dead {
                self.pools[g].release(std::mem::replace(&mut table.blocks[g][i], PASSED));
                let (from, to) = (i * self.rules.block, (i + 1) * self.rules.block);
                let chunks = from / self.chunk..to.div_ceil(self.chunk).min(table.path.len());
                for node in table.path.get(chunks).unwrap_or_default() {
                    self.prefix.pass(g, *node);
                }
            }
            table.first[g] = table.first[g].max(dead);
        }
    }

    fn list_chunk(&mut self, table: &mut Table, tokens: &[TokenId]) {
        let at = table.path.len() * self.chunk;
        let chunk = &tokens[at..at + self.chunk];
        let parent = table.path.last().copied();
        let (block, per_group) = (self.rules.block, self.per_group);
        let own = |j: usize| {
            let (g, i) = (j / per_group, at / block + j % per_group);
            if i < table.first[g] { GONE } else { table.blocks[g][i] }
        };
        let all = 0..self.pools.len() * per_group;
        let pools = &mut self.pools;
        let node = match self.prefix.child(parent, chunk) {
            Some(node) => {
                let keep = |j: usize, b| pools[j / per_group].keep(b);
                self.prefix.mend(node, all.map(own), keep);
                node
            }
            None => {
                let Some(node) = self.prefix.insert(parent, chunk, all.clone().map(own)) else {
                    table.unlisted = true;
                    return;
                };
                for j in all {
                    if own(j) != GONE {
                        pools[j / per_group].keep(own(j));
                    }
                }
                node
            }
        };
        self.prefix.pin(node);
        if let Some(parent) = parent {
            self.prefix.unpin(parent);
        }
        table.path.push(node);
    }

    /// Takes everything from a sequence; what was listed can still be found.
    pub(crate) fn release(&mut self, table: &mut Table) {
        for g in 0..self.pools.len() {
            let first = table.first[g];
            for block in table.blocks[g].drain(..).skip(first) {
                self.pools[g].release(block);
            }
            table.first[g] = 0;
        }
        if let Some(node) = table.path.last() {
            self.prefix.unpin(*node);
        }
        table.path.clear();
        table.unlisted = false;
    }

    /// Recounts everything from the tables of all sequences and the tree.
    ///
    /// # Errors
    /// A sentence about the first thing that is wrong.
    pub(crate) fn check<'a>(&self, tables: impl Iterator<Item = &'a Table>) -> Result<(), String> {
        let empty = || -> Vec<Vec<u32>> {
            self.pools.iter().map(|p| vec![0; p.total() as usize]).collect()
        };
        let (mut seqs, mut nodes) = (empty(), empty());
        for table in tables {
            for (g, held) in seqs.iter_mut().enumerate() {
                table.blocks[g][table.first[g]..].iter().for_each(|b| held[b.ix()] += 1);
            }
        }
        self.prefix.check(self.per_group, &mut nodes)?;
        for (g, pool) in self.pools.iter().enumerate() {
            pool.check(&seqs[g], &nodes[g]).map_err(|e| format!("group {g}: {e}"))?;
        }
        Ok(())
    }
}
