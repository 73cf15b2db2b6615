//! The null device: cells of keys and values hold hashes of tokens, a row's answer is the hash of
//! the cells that it may see. And the oracle, which computes the same from the tokens alone.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fornax_plan::{
    Cmd, Error, Hyper, KvGroup, MemoryUse, Op, OpTime, Plan, Program, Progress, Result, RowOut,
    SeqStep, SlotId, StepOutput, Ticket, TokenId, TokenOut, Tokens, Want,
};

use super::{Rng, Rules};

pub(super) const VOCAB: usize = 5;

thread_local! {
    /// Whether the device has failed.
    pub(super) static LOST: Cell<bool> = const { Cell::new(false) };
}

pub(super) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// What kind of model is played.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub(super) block: usize,
    pub(super) windows: Vec<Option<u32>>,
    pub(super) stateful: bool,
    /// Answers depend on the last tokens alone, so that guesses come right.
    simple: bool,
}

impl Shape {
    pub(super) fn draw(rng: &mut Rng) -> Shape {
        let window = 2 + rng.below(40) as u32;
        let mut windows = match rng.below(5) {
            0 | 1 => vec![None],
            2 | 3 => vec![None, Some(window)],
            _ => vec![Some(window)],
        };
        if rng.one_in(2) {
            windows.reverse();
        }
        Shape {
            block: rng.of(&[2, 4, 8, 16, 20, 32, 32, 64, 96, 128]),
            windows,
            stateful: rng.one_in(3),
            simple: rng.one_in(3),
        }
    }

    fn cell(token: TokenId, pos: usize) -> u64 {
        mix(u64::from(token) << 32 | pos as u64 | 1 << 60)
    }

    fn state(before: u64, token: TokenId) -> u64 {
        mix(before.wrapping_mul(31) ^ u64::from(token)) & 0xff_ffff
    }

    fn first(window: Option<u32>, pos: usize) -> usize {
        window.map_or(0, |w| (pos + 1).saturating_sub(w as usize))
    }

    fn row(&self, sums: &[u64], state: u64, last: [u64; 2]) -> Row {
        if self.simple {
            let h = mix(last[0].wrapping_mul(3) ^ last[1]);
            // What is seen must still be right.
            return Row { h, poison: false, seen: mix(sums.iter().fold(state, |a, b| mix(a ^ b))) };
        }
        let h = mix(sums.iter().fold(state, |a, b| mix(a ^ b)));
        Row { h, poison: h.is_multiple_of(1009), seen: h }
    }
}

/// A row's answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    h: u64,
    seen: u64,
    pub(super) poison: bool,
}

impl Row {
    pub(super) fn token(&self, seed: u64) -> TokenId {
        (mix(self.h ^ seed) % VOCAB as u64) as TokenId
    }

    /// Of a token, in the row of logits that favours the chosen one by one.
    pub(super) fn logprob(&self, id: TokenId, seed: u64) -> f32 {
        let sum = (std::f32::consts::E + VOCAB as f32 - 1.0).ln();
        if id == self.token(seed) { 1.0 - sum } else { -sum }
    }

    /// What the device says of the token it chose: a hash of all that the row sees.
    pub(super) fn seen_logprob(&self) -> f32 {
        -((self.seen % 1000) as f32)
    }

    pub(super) fn hidden(&self) -> f32 {
        (self.seen % 1000) as f32
    }
}

/// Knows the right answer to every row.
pub(super) struct Oracle {
    pub(super) shape: Shape,
}

impl Oracle {
    pub(super) fn new(shape: Shape) -> Oracle {
        Oracle { shape }
    }

    pub(super) fn row(&self, tokens: &[TokenId], pos: usize) -> Row {
        let s = &self.shape;
        let sums: Vec<u64> = s
            .windows
            .iter()
            .map(|w| {
                let range = Shape::first(*w, pos)..pos + 1;
                range.fold(0u64, |sum, p| sum.wrapping_add(Shape::cell(tokens[p], p)))
            })
            .collect();
        let state = match s.stateful {
            true => tokens[..=pos].iter().fold(0, |st, t| Shape::state(st, *t)),
            false => 0,
        };
        let at = |p: Option<usize>| p.map_or(77, |p| u64::from(tokens[p]));
        s.row(&sums, state, [at(pos.checked_sub(1)), at(Some(pos))])
    }
}

struct Null {
    shape: Shape,
    rules: Rules,
    /// By group: block after block of cells.
    pools: Vec<Vec<u64>>,
    states: Vec<u64>,
    clock: Arc<AtomicU64>,
    done: StepOutput,
    failed: bool,
    /// By slot: the token chosen last.
    last: Vec<Option<TokenId>>,
    /// Steps that were handed over, the oldest first.
    under_way: VecDeque<Step>,
    tickets: u64,
}

/// A step under way: it is computed when it is handed over, and told when it is waited for.
struct Step {
    ticket: Ticket,
    out: StepOutput,
    failed: bool,
    ns: u64,
}

pub(super) fn program(
    shape: Shape,
    rules: &Rules,
    clock: Arc<AtomicU64>,
) -> (Box<dyn Program>, Plan) {
    let hyper = Hyper { family: "null".into(), vocab: VOCAB as u32, width: 1, context: 4096 };
    let mut plan = Plan::new(hyper);
    for window in &shape.windows {
        plan.kv.push(KvGroup {
            layers: vec![0],
            window: *window,
            heads: 1,
            k_width: 1,
            v_width: 1,
        });
    }
    if shape.stateful {
        plan.state("state", 1);
    }
    let x = plan.wanted_value("x", 1);
    plan.push(Op::HiddenOut { x });
    let cells = rules.kv.blocks as usize * shape.block;
    let null = Null {
        pools: vec![vec![0; cells]; shape.windows.len()],
        states: vec![u64::MAX >> 40; rules.slots],
        rules: rules.clone(),
        shape,
        clock,
        done: StepOutput::default(),
        failed: false,
        last: vec![None; rules.slots],
        under_way: VecDeque::new(),
        tickets: 0,
    };
    (Box::new(null), plan)
}

impl Null {
    fn cell(&self, table: &[fornax_plan::BlockId], pos: usize) -> usize {
        let block = table[pos / self.shape.block];
        assert!(block.0 < self.rules.kv.blocks, "block {} does not exist", block.0);
        block.ix() * self.shape.block + pos % self.shape.block
    }

    /// The tokens of a step, and the one that was chosen last where it follows.
    fn tokens(&self, seq: &SeqStep<'_>) -> Vec<TokenId> {
        match seq.tokens {
            Tokens::Host(tokens) => tokens.to_vec(),
            Tokens::Last { draft } => {
                let last = self.last[seq.slot.ix()].expect("a token was chosen in this slot");
                [&[last], draft].concat()
            }
        }
    }

    fn answer(&mut self, ix: u32, seq: &SeqStep<'_>, tokens: &[TokenId]) {
        let from = seq.pos as usize;
        for (i, token) in tokens.iter().enumerate() {
            let pos = from + i;
            let state = &mut self.states[seq.slot.ix()];
            if pos == 0 {
                *state = 0;
            }
            *state = if self.shape.stateful { Shape::state(*state, *token) } else { 0 };
            let state = *state;
            let wants = seq.wants.iter().filter(|(r, _)| r.contains(&(i as u32)));
            let wants: Vec<Want> = wants.map(|(_, w)| *w).collect();
            if wants.is_empty() {
                continue;
            }
            let mut sums = Vec::with_capacity(2);
            for (g, w) in self.shape.windows.iter().enumerate() {
                let mut sum = 0u64;
                for p in Shape::first(*w, pos)..=pos {
                    sum = sum.wrapping_add(self.pools[g][self.cell(seq.tables[g], p)]);
                }
                sums.push(sum);
            }
            let before = match (i, pos) {
                (_, 0) => 77,
                (0, _) => self.token_before(seq, pos - 1),
                _ => u64::from(tokens[i - 1]),
            };
            let row = self.shape.row(&sums, state, [before, u64::from(*token)]);
            self.failed |= row.poison;
            for want in wants {
                self.give(ix, pos, row, want, seq.sample.map_or(0, |s| s.seed));
            }
        }
    }

    /// The token that a cell was written for.
    fn token_before(&self, seq: &SeqStep<'_>, pos: usize) -> u64 {
        // Every window holds it: none is shorter than two.
        let cell = self.pools[0][self.cell(seq.tables[0], pos)];
        let found = (0..VOCAB as u32).find(|t| Shape::cell(*t, pos) == cell);
        u64::from(found.expect("a cell that was written for this position"))
    }

    fn give(&mut self, seq: u32, pos: usize, row: Row, want: Want, seed: u64) {
        let at = RowOut { seq, pos: pos as u32 };
        match want {
            Want::Token { .. } => {
                let (token, pos) = (row.token(seed), pos as u32 + 1);
                let logprob = row.seen_logprob();
                self.done.tokens.push(TokenOut { seq, pos, token, logprob });
            }
            Want::Logits => {
                let spike = row.token(seed);
                self.done.logits.extend((0..VOCAB as u32).map(|t| f32::from(u8::from(t == spike))));
                self.done.logit_rows.push(at);
            }
            Want::LogprobOf(id) => self.done.logprobs.push((at, row.logprob(id, seed))),
            Want::Hidden => {
                self.done.hidden.push(row.hidden());
                self.done.hidden_rows.push(at);
            }
        }
    }
}

impl Program for Null {
    fn submit(&mut self, step: &[SeqStep<'_>]) -> Result<Ticket> {
        let rows: usize = step.iter().map(|s| s.tokens.rows()).sum();
        assert!(rows <= self.rules.rows, "{rows} rows of {}", self.rules.rows);
        let wanted: usize = step.iter().flat_map(|s| s.wants).map(|(r, _)| r.len()).sum();
        assert!(wanted <= self.rules.wanted, "{wanted} wanted rows of {}", self.rules.wanted);
        assert!(self.under_way.len() < if self.rules.ahead { 2 } else { 1 }, "too many tickets");
        self.done.clear();
        // What runs behind a failed step fails with it.
        self.failed = self.under_way.iter().any(|s| s.failed);
        let tokens: Vec<Vec<TokenId>> = step.iter().map(|s| self.tokens(s)).collect();
        for (ix, seq) in step.iter().enumerate() {
            assert!(step[..ix].iter().all(|s| s.slot != seq.slot), "a slot twice");
            let mut from = 0;
            for (range, _) in seq.wants {
                assert!(from <= range.start && range.start < range.end, "{:?}", seq.wants);
                assert!(range.end as usize <= tokens[ix].len(), "{:?}", seq.wants);
                from = range.end;
            }
            for (i, token) in tokens[ix].iter().enumerate() {
                let pos = seq.pos as usize + i;
                for g in 0..self.pools.len() {
                    let cell = self.cell(seq.tables[g], pos);
                    self.pools[g][cell] = Shape::cell(*token, pos);
                }
            }
        }
        for (ix, seq) in step.iter().enumerate() {
            let before = self.done.tokens.len();
            self.answer(ix as u32, seq, &tokens[ix]);
            // A token that the host chooses is not known here.
            let chosen = self.done.tokens[before..].last().map(|t| t.token);
            self.last[seq.slot.ix()] = chosen;
        }
        self.tickets += 1;
        let ticket = Ticket(self.tickets);
        let (out, failed) = (std::mem::take(&mut self.done), self.failed);
        let ns = 1_000_000 + 50_000 * rows as u64;
        self.under_way.push_back(Step { ticket, out, failed, ns });
        Ok(ticket)
    }

    fn poll(&mut self, _: &Ticket, _: &mut StepOutput) -> Result<Progress> {
        unreachable!("the engine waits")
    }

    fn wait(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<()> {
        let step = self.under_way.pop_front().expect("a step under way");
        assert_eq!(step.ticket, ticket, "steps are waited for in their order");
        self.clock.fetch_add(step.ns, Ordering::Relaxed);
        if LOST.with(Cell::get) {
            return Err(Error::lost("null: unplugged"));
        }
        if step.failed {
            return Err(Error::malformed("null: a row had no usable logit"));
        }
        out.clone_from(&step.out);
        Ok(())
    }

    fn stop(&mut self, _: SlotId) {}

    fn command(&mut self, command: Cmd<'_>) -> Result<()> {
        assert!(self.under_way.is_empty(), "it would run after a step that is ahead of the engine");
        match command {
            Cmd::CopyBlock { group, from, to } => {
                let (n, pool) = (self.shape.block, &mut self.pools[group as usize]);
                pool.copy_within(from.ix() * n..(from.ix() + 1) * n, to.ix() * n);
            }
            Cmd::ReadState { slot, out } => {
                out.clear();
                out.push(self.states[slot.ix()] as f32);
            }
            Cmd::WriteState { slot, data } => self.states[slot.ix()] = data[0] as u64,
            _ => unreachable!("the engine moves no keys"),
        }
        Ok(())
    }

    fn memory(&self) -> MemoryUse {
        MemoryUse::default()
    }

    fn grow_kv(&mut self, _: u32) -> Result<()> {
        unreachable!("pools do not grow")
    }

    fn profile(&mut self, _: &[SeqStep<'_>], _: &mut StepOutput) -> Result<Vec<OpTime>> {
        unreachable!("nobody profiles")
    }
}
