//! What was computed before, found again by its tokens: a tree of chunks. A node is found by the
//! hash of all tokens up to its end and then compared token by token, so that a collision is a
//! miss and never a wrong answer. It knows which blocks it names, not what is in them.

use std::collections::{HashMap, VecDeque};

use fornax_plan::{BlockId, TokenId};

use super::blocks::Pool;

/// A node and which of its lives: a place in the tree is used again after eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeId {
    pub(crate) ix: u32,
    life: u32,
}

/// No node, and the end of a list.
const NONE: u32 = u32::MAX;
/// A block that a node has given up.
pub(crate) const GONE: BlockId = BlockId(u32::MAX);

#[derive(Debug)]
struct Node {
    life: u32,
    live: bool,
    parent: u32,
    hash: u64,
    tokens: Vec<TokenId>,
    /// Group after group, the blocks that hold the chunk, or `GONE`.
    blocks: Vec<BlockId>,
    /// The model's states right after the chunk; empty where not kept.
    state: Vec<f32>,
    children: u32,
    /// Sequences that go on from here.
    users: u32,
    /// When the last of them came or went.
    used: u64,
    /// By group, one bit: listed among those that windows have passed.
    passed: u8,
    /// The list of nodes that may be evicted, oldest first.
    prev: u32,
    next: u32,
    listed: bool,
}

/// The tree.
#[derive(Debug)]
pub(crate) struct Prefix {
    /// Tokens of one chunk.
    chunk: usize,
    nodes: Vec<Node>,
    spare: Vec<u32>,
    by_hash: HashMap<u64, u32>,
    oldest: u32,
    newest: u32,
    /// By group: nodes whose blocks no running sequence looks at any more, oldest first.
    passed: Vec<VecDeque<NodeId>>,
    /// Nodes with states, oldest first.
    states: VecDeque<NodeId>,
    states_max: usize,
    /// Counts arrivals and departures.
    now: u64,
}

/// Hashes a chunk into the hash of what is before it (FNV-1a over words, then a finaliser).
fn chain(before: u64, tokens: &[TokenId]) -> u64 {
    let mut h = before ^ 0x9e37_79b9_7f4a_7c15;
    for t in tokens {
        h = (h ^ u64::from(*t)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    h ^= h >> 32;
    h.wrapping_mul(0xd6e8_feb8_6659_fd93)
}

impl Prefix {
    pub(crate) fn new(chunk: usize, groups: usize, states_max: usize) -> Prefix {
        Prefix {
            chunk,
            nodes: Vec::new(),
            spare: Vec::new(),
            by_hash: HashMap::new(),
            oldest: NONE,
            newest: NONE,
            passed: vec![VecDeque::new(); groups],
            states: VecDeque::new(),
            states_max,
            now: 0,
        }
    }

    /// Whether a node is still the one that was meant.
    pub(crate) fn is_live(&self, id: NodeId) -> bool {
        let node = &self.nodes[id.ix as usize];
        node.live && node.life == id.life
    }

    /// The child of `parent` (the root where absent) that holds these tokens.
    pub(crate) fn child(&self, parent: Option<NodeId>, tokens: &[TokenId]) -> Option<NodeId> {
        let hash = self.hash_of(parent, tokens);
        let ix = *self.by_hash.get(&hash)?;
        let node = &self.nodes[ix as usize];
        let same = node.parent == parent.map_or(NONE, |p| p.ix) && node.tokens == tokens;
        same.then_some(NodeId { ix, life: node.life })
    }

    fn hash_of(&self, parent: Option<NodeId>, tokens: &[TokenId]) -> u64 {
        chain(parent.map_or(0, |p| self.nodes[p.ix as usize].hash), tokens)
    }

    /// The longest path of nodes along `tokens`, appended to `path`.
    pub(crate) fn walk(&self, tokens: &[TokenId], path: &mut Vec<NodeId>) {
        let mut at = None;
        for chunk in tokens.chunks_exact(self.chunk) {
            at = self.child(at, chunk);
            let Some(node) = at else { return };
            path.push(node);
        }
    }

    /// The blocks of a node, group after group.
    pub(crate) fn blocks(&self, id: NodeId) -> &[BlockId] {
        &self.nodes[id.ix as usize].blocks
    }

    /// The states right after a node, where kept.
    pub(crate) fn state(&self, id: NodeId) -> Option<&[f32]> {
        let state = &self.nodes[id.ix as usize].state;
        (!state.is_empty()).then_some(state)
    }

    /// Adds a child; none where another chunk has the same hash. The caller counts the blocks.
    pub(crate) fn insert(
        &mut self,
        parent: Option<NodeId>,
        tokens: &[TokenId],
        blocks: impl Iterator<Item = BlockId>,
    ) -> Option<NodeId> {
        let hash = self.hash_of(parent, tokens);
        if self.by_hash.contains_key(&hash) {
            return None;
        }
        let ix = self.spare.pop().unwrap_or_else(|| {
            self.nodes.push(Node {
                life: 0,
                live: false,
                parent: NONE,
                hash: 0,
                tokens: Vec::new(),
                blocks: Vec::new(),
                state: Vec::new(),
                children: 0,
                users: 0,
                used: 0,
                passed: 0,
                prev: NONE,
                next: NONE,
                listed: false,
            });
            self.nodes.len() as u32 - 1
        });
        let node = &mut self.nodes[ix as usize];
        node.life = node.life.wrapping_add(1);
        node.live = true;
        node.parent = parent.map_or(NONE, |p| p.ix);
        node.hash = hash;
        node.tokens.clear();
        node.tokens.extend_from_slice(tokens);
        node.blocks.clear();
        node.blocks.extend(blocks);
        node.state.clear();
        (node.children, node.users, node.passed) = (0, 0, 0);
        self.now += 1;
        node.used = self.now;
        let id = NodeId { ix, life: node.life };
        self.by_hash.insert(hash, ix);
        if let Some(p) = parent {
            self.nodes[p.ix as usize].children += 1;
            self.unlist(p.ix);
        }
        self.list(ix, false);
        Some(id)
    }

    /// Puts blocks in place of those that a node has given up; `counted` is told of each.
    pub(crate) fn mend(
        &mut self,
        id: NodeId,
        blocks: impl Iterator<Item = BlockId>,
        mut counted: impl FnMut(usize, BlockId),
    ) {
        let have = &mut self.nodes[id.ix as usize].blocks;
        for (at, (have, own)) in have.iter_mut().zip(blocks).enumerate() {
            if *have == GONE && own != GONE {
                *have = own;
                counted(at, own);
            }
        }
    }

    /// Keeps the states right after a node; the oldest states go when there are too many.
    pub(crate) fn set_state(&mut self, id: NodeId, state: &[f32]) {
        if self.states_max == 0 || state.is_empty() {
            return;
        }
        let had = &mut self.nodes[id.ix as usize].state;
        if had.is_empty() {
            self.states.push_back(id);
        }
        had.clear();
        had.extend_from_slice(state);
        while self.states.len() > self.states_max {
            let Some(old) = self.states.pop_front() else { break };
            if self.is_live(old) {
                self.nodes[old.ix as usize].state.clear();
            }
        }
    }

    /// One more sequence goes on from a node.
    pub(crate) fn pin(&mut self, id: NodeId) {
        self.now += 1;
        let node = &mut self.nodes[id.ix as usize];
        node.users += 1;
        node.used = self.now;
        self.unlist(id.ix);
    }

    /// One sequence less; the node is now the one used last.
    pub(crate) fn unpin(&mut self, id: NodeId) {
        self.now += 1;
        let node = &mut self.nodes[id.ix as usize];
        node.users -= 1;
        node.used = self.now;
        self.list(id.ix, false);
    }

    /// Notes that a sequence's window has passed a node of this group.
    pub(crate) fn pass(&mut self, group: usize, id: NodeId) {
        let node = &mut self.nodes[id.ix as usize];
        if node.passed >> group & 1 == 1 {
            return;
        }
        node.passed |= 1 << group;
        self.passed[group].push_back(id);
        if self.passed[group].len() > 2 * self.nodes.len() + 64 {
            let mut list = std::mem::take(&mut self.passed[group]);
            list.retain(|id| self.is_live(*id));
            self.passed[group] = list;
        }
    }

    /// Gives up blocks of one group until the pool has a free one: first those that windows have
    /// passed, then what was used longest ago, then whatever no sequence reads. False when
    /// sequences hold every block.
    pub(crate) fn free_one(&mut self, group: usize, per_group: usize, pools: &mut [Pool]) -> bool {
        while pools[group].free() == 0 {
            if pools[group].cached() == 0 {
                return false;
            }
            if let Some(id) = self.passed[group].pop_front() {
                if self.is_live(id) {
                    self.nodes[id.ix as usize].passed &= !(1 << group);
                    self.strip(id.ix, group, per_group, pools);
                }
            } else if self.oldest != NONE {
                self.evict(self.oldest, per_group, pools);
            } else {
                for ix in 0..self.nodes.len() as u32 {
                    self.strip(ix, group, per_group, pools);
                }
            }
        }
        true
    }

    /// Gives up the blocks of a node's group that no sequence reads.
    fn strip(&mut self, ix: u32, group: usize, per_group: usize, pools: &mut [Pool]) {
        let node = &mut self.nodes[ix as usize];
        if !node.live {
            return;
        }
        for block in &mut node.blocks[group * per_group..(group + 1) * per_group] {
            if *block != GONE && pools[group].is_cached_only(*block) {
                pools[group].drop_node(std::mem::replace(block, GONE));
            }
        }
    }

    fn evict(&mut self, ix: u32, per_group: usize, pools: &mut [Pool]) {
        self.unlist(ix);
        let node = &mut self.nodes[ix as usize];
        for (at, block) in node.blocks.drain(..).enumerate() {
            if block != GONE {
                pools[at / per_group].drop_node(block);
            }
        }
        node.live = false;
        if !node.state.is_empty() {
            node.state.clear();
            let life = node.life;
            self.states.retain(|s| (s.ix, s.life) != (ix, life));
        }
        let (hash, parent, used) = {
            let node = &self.nodes[ix as usize];
            (node.hash, node.parent, node.used)
        };
        self.by_hash.remove(&hash);
        self.spare.push(ix);
        if parent != NONE {
            let node = &mut self.nodes[parent as usize];
            node.children -= 1;
            // Older than all that are listed, as its child was, unless somebody came since.
            let as_oldest = node.used <= used;
            self.list(parent, as_oldest);
        }
    }

    /// Lists a node for eviction, where nobody goes on from it.
    fn list(&mut self, ix: u32, as_oldest: bool) {
        let (oldest, newest) = (self.oldest, self.newest);
        let node = &mut self.nodes[ix as usize];
        if node.listed || node.children > 0 || node.users > 0 || !node.live {
            return;
        }
        node.listed = true;
        (node.prev, node.next) = if as_oldest { (NONE, oldest) } else { (newest, NONE) };
        let (prev, next) = (node.prev, node.next);
        match prev {
            NONE => self.oldest = ix,
            p => self.nodes[p as usize].next = ix,
        }
        match next {
            NONE => self.newest = ix,
            n => self.nodes[n as usize].prev = ix,
        }
    }

    fn unlist(&mut self, ix: u32) {
        let node = &mut self.nodes[ix as usize];
        if !std::mem::take(&mut node.listed) {
            return;
        }
        let (prev, next) = (node.prev, node.next);
        match prev {
            NONE => self.oldest = next,
            p => self.nodes[p as usize].next = next,
        }
        match next {
            NONE => self.newest = prev,
            n => self.nodes[n as usize].prev = prev,
        }
    }

    /// Adds to `held[group][block]` what the nodes hold, and checks the tree itself.
    ///
    /// # Errors
    /// A sentence about the first thing that is wrong.
    pub(crate) fn check(&self, per_group: usize, held: &mut [Vec<u32>]) -> Result<(), String> {
        let mut children = vec![0; self.nodes.len()];
        let mut listed = 0;
        for (ix, node) in self.nodes.iter().enumerate().filter(|(_, n)| n.live) {
            for (at, block) in node.blocks.iter().enumerate().filter(|(_, b)| **b != GONE) {
                held[at / per_group][block.ix()] += 1;
            }
            if node.parent != NONE {
                children[node.parent as usize] += 1;
                if !self.nodes[node.parent as usize].live {
                    return Err(format!("node {ix} hangs on one that is gone"));
                }
            }
            if self.by_hash.get(&node.hash) != Some(&(ix as u32)) {
                return Err(format!("node {ix} cannot be found by its hash"));
            }
            listed += usize::from(node.listed);
        }
        for (ix, node) in self.nodes.iter().enumerate().filter(|(_, n)| n.live) {
            if node.children != children[ix] {
                return Err(format!(
                    "node {ix} counts {} children of {}",
                    node.children, children[ix]
                ));
            }
            if node.listed != (node.children == 0 && node.users == 0) {
                return Err(format!("node {ix}: listed for eviction is {}", node.listed));
            }
        }
        let mut at = self.oldest;
        let mut seen = 0;
        while at != NONE && seen <= listed {
            seen += 1;
            at = self.nodes[at as usize].next;
        }
        if seen != listed {
            return Err(format!("the list of evictable nodes has {seen} of {listed}"));
        }
        Ok(())
    }
}
