//! A ragged step and the chain behind it as the words that the device reads: uploaded once, after
//! which every further token is the device's own. It knows no buffer and no kernel.
//!
//! Rows: `rows` for what the host gives, then one chain row for every sequence that feeds tokens
//! back; the kernel that chooses a token writes it, its position and what is left into the chain
//! row, in place, and the next round reads it there.

use std::ops::Range;

use fornax_plan::{
    Batch, Error, Limits, Plan, Result, SampleParams, SeqStep, SlotId, Tokens, Want,
};

use crate::pieces::Pieces;

/// Words of a row: token (or [`NONE`]: the slot's last), position, sequence, slot, tokens still
/// to come from it, round, its place among its sequence's rows of the step, rows of it that follow.
pub(crate) const ROW: usize = 8;
/// Words of a wanted row: row, [`TOKEN`]…, chain row among all rows or [`NONE`], ticket.
pub(crate) const WANTED: usize = 4;
/// Words of a sequence's stop list: the count, then the tokens.
pub(crate) const STOPS: usize = 16;
/// Words of how a sequence's tokens are drawn: temperature, top-k, top-p, the logarithm of min-p,
/// two of the seed, window and three penalties, two spare.
pub(crate) const DRAW: usize = 12;
/// No token, no chain.
pub(crate) const NONE: u32 = u32::MAX;

/// Wanted: choose a token.
pub(crate) const TOKEN: u32 = 1;
/// Wanted: with its log-probability.
pub(crate) const LOGPROB: u32 = 2;
/// Wanted: this choice becomes the slot's last token.
pub(crate) const SETS_LAST: u32 = 4;
/// Wanted: the token is drawn, and not the best.
pub(crate) const DRAWN: u32 = 8;
/// Wanted: recent tokens are penalised before.
pub(crate) const PENALISED: u32 = 16;

/// Output: no logit of the row was usable. [`NONE`]: nothing was chosen.
pub(crate) const UNUSABLE: u32 = u32::MAX - 1;

/// Rounds of one ticket at most.
pub(crate) const CHAIN_MAX: u32 = 64;

/// Where everything lies in the uploaded words.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    slots: usize,
    rows: usize,
    wanted: usize,
    groups: usize,
    /// Entries of one block table.
    pub(crate) stride: usize,
    /// Where the blocks are.
    pub(crate) pieces: Pieces,
    /// Positions of a slot of which the device remembers the tokens.
    pub(crate) remembered: usize,
}

/// Positions that a history has at most.
const REMEMBERED_MAX: u32 = 1 << 18;

impl Shape {
    /// The shape for a plan.
    ///
    /// # Errors
    /// `is_unsupported` for more blocks than a table can name.
    pub(crate) fn new(plan: &Plan, limits: &Limits) -> Result<Shape> {
        Ok(Shape {
            remembered: plan.hyper.context.clamp(1, REMEMBERED_MAX) as usize,
            slots: limits.slots as usize,
            rows: limits.rows as usize,
            wanted: limits.wanted as usize,
            groups: plan.kv.len(),
            stride: limits.kv_blocks as usize,
            pieces: Pieces::new(limits.kv_blocks)?,
        })
    }

    /// Rows that the host gives, then the chain rows.
    pub(crate) fn all_rows(&self) -> Range<usize> {
        0..(self.rows + self.slots) * ROW
    }

    /// The first chain row among all rows.
    pub(crate) fn chain_base(&self) -> usize {
        self.rows
    }

    pub(crate) fn wanted(&self) -> Range<usize> {
        let start = self.all_rows().end;
        start..start + self.wanted * WANTED
    }

    pub(crate) fn chain_wanted(&self) -> Range<usize> {
        let start = self.wanted().end;
        start..start + self.slots * WANTED
    }

    pub(crate) fn stops(&self) -> Range<usize> {
        let start = self.chain_wanted().end;
        start..start + self.slots * STOPS
    }

    /// How every sequence's tokens are drawn.
    pub(crate) fn draws(&self) -> Range<usize> {
        let start = self.stops().end;
        start..start + self.slots * DRAW
    }

    /// One group's block tables, sequence after sequence.
    pub(crate) fn tables(&self, group: usize) -> Range<usize> {
        let len = self.slots * self.stride;
        let start = self.draws().end + group * len;
        start..start + len
    }

    /// All words.
    pub(crate) fn len(&self) -> usize {
        self.draws().end + self.groups * self.slots * self.stride
    }

    /// Choices of a ticket: one word each for the tokens, then one each for their log-probabilities.
    pub(crate) fn choices(&self) -> usize {
        self.wanted + (CHAIN_MAX as usize - 1) * self.slots
    }

    /// Outputs of the first round, and of each later one.
    pub(crate) fn out_counts(&self) -> (usize, usize) {
        (self.wanted, self.slots)
    }
}

/// A sequence that feeds its tokens back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chain {
    /// The sequence.
    pub(crate) seq: u32,
    /// Position of the token that the first round chooses.
    pub(crate) pos: u32,
    /// Log-probabilities are wanted.
    pub(crate) logprob: bool,
}

/// One step's words and counts; reused from step to step.
#[derive(Debug)]
pub(crate) struct Feed {
    pub(crate) words: Vec<u32>,
    /// The step as flat rows: what the results are told by.
    pub(crate) batch: Batch,
    /// Every chain row.
    pub(crate) chain: Vec<Chain>,
    /// Rounds of the ticket, the first included.
    pub(crate) rounds: u32,
    /// [`DRAWN`] and [`PENALISED`], where some sequence asks for it.
    pub(crate) ways: u32,
}

impl Feed {
    pub(crate) fn new(shape: &Shape, limits: &Limits) -> Feed {
        Feed {
            words: vec![0; shape.len()],
            batch: Batch::with_capacity(limits),
            chain: Vec::with_capacity(shape.slots),
            rounds: 1,
            ways: 0,
        }
    }

    /// Checks the step and lays out its words. `known` says whether a slot has chosen a token,
    /// or will have when this step runs.
    ///
    /// # Errors
    /// `is_malformed` as [`Batch::fill`], `is_unsupported` for a way of choosing that the device
    /// does not have.
    #[allow(clippy::too_many_arguments, reason = "one call, from submit")]
    pub(crate) fn fill(
        &mut self,
        step: &[SeqStep<'_>],
        plan: &Plan,
        limits: &Limits,
        kv_block: u32,
        shape: &Shape,
        ticket: u32,
        known: impl Fn(SlotId) -> bool,
    ) -> Result<()> {
        // The token itself is on the device; any valid one stands for it in the check.
        self.batch.fill(step, plan, limits, kv_block, |slot| known(slot).then_some(0))?;
        self.chain.clear();
        self.rounds = 1;
        self.ways = 0;
        for (ix, seq) in step.iter().enumerate() {
            check(ix, seq)?;
            let sample = seq.sample.unwrap_or_default();
            self.ways |= ways(&sample);
            self.words[shape.draws()][ix * DRAW..][..DRAW].copy_from_slice(&draw(&sample));
            self.rounds = self.rounds.max(seq.max_new);
            let stops = &mut self.words[shape.stops()][ix * STOPS..][..STOPS];
            stops[0] = seq.stop.len() as u32;
            stops[1..=seq.stop.len()].copy_from_slice(seq.stop);
            for (group, table) in seq.tables.iter().enumerate() {
                let n = table.len().min(shape.stride);
                let to = &mut self.words[shape.tables(group)][ix * shape.stride..][..n];
                to.iter_mut().zip(*table).for_each(|(to, block)| *to = shape.pieces.entry(block.0));
            }
        }
        self.rows(step, shape);
        self.wants(step, shape, ticket);
        Ok(())
    }

    /// Choices that the ticket may make, counted from the first.
    pub(crate) fn choices(&self, shape: &Shape) -> usize {
        let (first, next) = shape.out_counts();
        if self.rounds == 1 {
            self.batch.wanted.len()
        } else {
            first + (self.rounds as usize - 1) * next
        }
    }

    fn rows(&mut self, step: &[SeqStep<'_>], shape: &Shape) {
        for span in &self.batch.spans {
            let last = matches!(step[span.seq as usize].tokens, Tokens::Last { .. });
            for row in span.start..span.start + span.rows {
                let r = self.batch.rows[row as usize];
                let token = if last && row == span.start { NONE } else { r.token };
                let place = row - span.start;
                let words = [token, r.pos, r.seq, span.slot.0, 1, 0, place, span.rows - 1 - place];
                self.words[row as usize * ROW..][..ROW].copy_from_slice(&words);
            }
            let seq = &step[span.seq as usize];
            if seq.max_new > 1 {
                let at = shape.chain_base() + self.chain.len();
                let words = [0, 0, span.seq, span.slot.0, seq.max_new, 1, 0, 0];
                self.words[at * ROW..][..ROW].copy_from_slice(&words);
                let pos = seq.pos + span.rows;
                let last = seq.wants.last();
                let logprob = matches!(last, Some((_, Want::Token { logprob: true })));
                self.chain.push(Chain { seq: span.seq, pos, logprob });
            }
        }
    }

    fn wants(&mut self, step: &[SeqStep<'_>], shape: &Shape, ticket: u32) {
        let Batch { rows, wanted, spans, .. } = &self.batch;
        let kind = |want: Want| match want {
            Want::Token { logprob } => TOKEN | if logprob { LOGPROB } else { 0 },
            _ => 0,
        };
        let ways = |seq: u32| ways(&step[seq as usize].sample.unwrap_or_default());
        for (ix, w) in wanted.iter().enumerate() {
            let seq = rows[w.row as usize].seq;
            let mut flags = kind(w.want);
            if flags & TOKEN != 0 {
                flags |= ways(seq);
            }
            let later = |o: &fornax_plan::Wanted| {
                rows[o.row as usize].seq == seq && kind(o.want) & TOKEN != 0
            };
            if flags & TOKEN != 0 && !wanted[ix + 1..].iter().any(later) {
                flags |= SETS_LAST;
            }
            let span = spans[seq as usize];
            let chained = w.row + 1 == span.start + span.rows;
            let chain = self.chain.iter().position(|c| chained && c.seq == seq);
            let chain = chain.map_or(NONE, |c| (shape.chain_base() + c) as u32);
            let words = [w.row, flags, chain, ticket];
            self.words[shape.wanted()][ix * WANTED..][..WANTED].copy_from_slice(&words);
        }
        for (ix, chain) in self.chain.iter().enumerate() {
            let seq = chain.seq;
            let want = step[chain.seq as usize].wants.last().map_or(0, |(_, w)| kind(*w));
            let chain = (shape.chain_base() + ix) as u32;
            let words = [ix as u32, want | SETS_LAST | ways(seq), chain, ticket];
            self.words[shape.chain_wanted()][ix * WANTED..][..WANTED].copy_from_slice(&words);
        }
    }
}

/// What this form of the device does not do in a step, by name.
fn check(ix: usize, seq: &SeqStep<'_>) -> Result<()> {
    let no = |what: String| Err(Error::unsupported(format!("step, sequence {ix}: {what}")));
    if seq.max_new > CHAIN_MAX {
        return no(format!("{} tokens in one ticket, at most {CHAIN_MAX}", seq.max_new));
    }
    if seq.stop.len() >= STOPS {
        return no(format!("{} stop tokens, at most {}", seq.stop.len(), STOPS - 1));
    }
    Ok(())
}

/// Which of [`DRAWN`] and [`PENALISED`] the parameters ask for.
fn ways(s: &SampleParams) -> u32 {
    let drawn = if s.temperature > 0.0 { DRAWN } else { 0 };
    drawn | if s.penalises() { PENALISED } else { 0 }
}

/// The parameters as the kernels read them.
fn draw(s: &SampleParams) -> [u32; DRAW] {
    let floor = if s.min_p > 0.0 { s.min_p.ln() } else { f32::NEG_INFINITY };
    [
        s.temperature.to_bits(),
        s.top_k,
        s.top_p.to_bits(),
        floor.to_bits(),
        s.seed as u32,
        (s.seed >> 32) as u32,
        s.penalty_window,
        s.repeat_penalty.to_bits(),
        s.frequency_penalty.to_bits(),
        s.presence_penalty.to_bits(),
        0,
        0,
    ]
}
