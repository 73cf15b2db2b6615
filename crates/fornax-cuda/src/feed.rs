//! A ragged step and the chain behind it as the words that the device reads: uploaded once, after
//! which every further token is the device's own. It knows no buffer and no kernel.
//!
//! Rows: `rows` for what the host gives, then one chain row for every sequence that feeds tokens
//! back; the kernel that chooses a token writes it, its position and what is left into the chain
//! row, in place, and the next round reads it there.

use std::ops::Range;

use fornax_plan::{Batch, Error, Limits, Plan, Result, SampleParams, SeqStep, Span, Tokens, Want};

use crate::prepare::KV_BLOCK;
use crate::slots::Slots;

/// Words of a row: token (or [`NONE`]: the slot's last), position, sequence, slot, tokens still
/// to come from it, round, which of its sequence's rows it is, how many those are (0 for one that was chosen here).
pub(crate) const ROW: usize = 8;
/// Words of a wanted row: row, [`TOKEN`]…, chain row among all rows or [`NONE`], ticket.
pub(crate) const WANTED: usize = 4;
/// Words of an output: token, log-probability, state ([`CHOSEN`]… and, above two bits, the ticket), position.
pub(crate) const OUT: usize = 4;
/// Words of a sequence's stop list: the count, then the tokens.
pub(crate) const STOPS: usize = 16;
/// Words of how a sequence's tokens are drawn: temperature, top-k, top-p, the logarithm of min-p, two of the seed, window and
/// three penalties, the first position whose token the history holds, one spare.
pub(crate) const DRAW: usize = 12;
/// No token, no chain.
pub(crate) const NONE: u32 = u32::MAX;

/// Wanted: choose a token.
pub(crate) const TOKEN: u32 = 1;
/// Wanted: with its log-probability.
pub(crate) const LOGPROB: u32 = 2;
/// Wanted: this choice becomes the slot's last token.
pub(crate) const SETS_LAST: u32 = 4;
/// Wanted, instead of [`TOKEN`]: the token is drawn, and not the best.
pub(crate) const DRAWN: u32 = 8;
/// Wanted, instead of [`TOKEN`]: recent tokens are penalised before.
pub(crate) const PENALISED: u32 = 16;

/// Output: a token.
pub(crate) const CHOSEN: u32 = 1;
/// Output: no logit of the row was usable.
pub(crate) const UNUSABLE: u32 = 2;

/// What became of an output of this ticket; nothing yet where its state is another's.
pub(crate) fn outcome(state: u32, ticket: u32) -> u32 {
    if state >> 2 == ticket & (u32::MAX >> 2) { state & 3 } else { 0 }
}

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
    /// Positions of a slot of which the device remembers the tokens.
    pub(crate) remembered: usize,
}

/// How many rows a graph for `rows` sequences has: the next of 1, 2, 4, 8, 16, 24, 32, 48, 64, then of multiples of 32, then
/// of 128, but `most` at most.
pub(crate) fn padded(rows: u32, most: u32) -> u32 {
    let up = match rows {
        0 => 0,
        1..=16 => rows.next_power_of_two(),
        17..=32 => rows.next_multiple_of(8),
        33..=64 => rows.next_multiple_of(16),
        65..=256 => rows.next_multiple_of(32),
        _ => rows.next_multiple_of(128),
    };
    up.min(most).max(rows)
}

/// Rows that a graph can have: of the first round of a ticket, or of later ones.
pub(crate) fn row_limit(limits: &Limits, first: bool) -> u32 {
    if first { limits.slots.min(limits.rows).min(limits.wanted) } else { limits.slots }
}

/// Blocks of a sequence at most: four times the context that the model was made for. Every step uploads the tables.
fn table_blocks(context: u32) -> u32 {
    context.max(64).saturating_mul(4).div_ceil(KV_BLOCK)
}

/// Positions that a history has at most.
const REMEMBERED_MAX: u32 = 1 << 18;

impl Shape {
    pub(crate) fn new(plan: &Plan, limits: &Limits) -> Shape {
        Shape {
            slots: limits.slots as usize,
            rows: limits.rows as usize,
            wanted: limits.wanted as usize,
            groups: plan.kv.len(),
            stride: limits.kv_blocks.min(table_blocks(plan.hyper.context)) as usize,
            remembered: plan.hyper.context.clamp(1, REMEMBERED_MAX) as usize,
        }
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

    /// Words of all outputs of a ticket.
    pub(crate) fn out_len(&self) -> usize {
        (self.wanted + (CHAIN_MAX as usize - 1) * self.slots) * OUT
    }

    /// Outputs of the first round, and of each later one.
    pub(crate) fn out_counts(&self) -> (usize, usize) {
        (self.wanted, self.slots)
    }
}

/// One step's words and counts; reused from step to step.
#[derive(Debug)]
pub(crate) struct Feed {
    pub(crate) words: Vec<u32>,
    /// The step as flat rows: what the results are told by.
    pub(crate) batch: Batch,
    /// Sequence of every chain row.
    pub(crate) chain: Vec<u32>,
    /// Rounds that the device runs for the ticket, the first included.
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

    /// Checks the step and lays out its words. `known` tells whether a slot has chosen a token, or will have when this step
    /// runs; and `start` from which position on a slot's history is known.
    ///
    /// # Errors
    /// `is_malformed` as [`Batch::fill`], `is_unsupported` for more rounds or stop tokens than the
    /// device has room for.
    #[allow(clippy::too_many_arguments, reason = "one call, from submit")]
    pub(crate) fn fill(
        &mut self,
        step: &[SeqStep<'_>],
        plan: &Plan,
        limits: &Limits,
        kv_block: u32,
        shape: &Shape,
        ticket: u32,
        slots: &Slots,
    ) -> Result<()> {
        // The token itself is on the device; any valid one stands for it in the check.
        self.batch.fill(step, plan, limits, kv_block, |slot| slots.known(slot).then_some(0))?;
        (self.rounds, self.ways) = (1, 0);
        for (ix, seq) in step.iter().enumerate() {
            check(ix, seq)?;
            let (ends, room) = (seq.tokens.rows() as u32 + seq.max_new - 1, shape.stride as u32);
            if seq.pos.saturating_add(ends) > room.saturating_mul(KV_BLOCK) {
                let most = room * KV_BLOCK;
                let what = format!("positions beyond {most}, from {} on", seq.pos);
                return Err(Error::unsupported(format!("step, sequence {ix}: {what}")));
            }
            self.rounds = self.rounds.max(seq.max_new);
            let sample = seq.sample.unwrap_or_default();
            self.ways |= ways(&sample);
            let words = draw(&sample, slots.start(seq.slot));
            self.words[shape.draws()][ix * DRAW..][..DRAW].copy_from_slice(&words);
            let stops = &mut self.words[shape.stops()][ix * STOPS..][..STOPS];
            stops[0] = seq.stop.len() as u32;
            stops[1..=seq.stop.len()].copy_from_slice(seq.stop);
            for (group, table) in seq.tables.iter().enumerate() {
                let n = table.len().min(shape.stride);
                let to = &mut self.words[shape.tables(group)][ix * shape.stride..][..n];
                to.iter_mut().zip(*table).for_each(|(to, block)| *to = block.0);
            }
        }
        self.rows(step, shape);
        self.wants(step, shape, ticket);
        self.mask(shape, limits);
        Ok(())
    }

    /// Rows that a graph may have beyond those of the step: nothing comes from them, and nobody wants it.
    fn mask(&mut self, shape: &Shape, limits: &Limits) {
        let (given, chained) = (self.batch.rows.len(), self.chain.len());
        // A graph is for steps of one token a sequence.
        let given = if self.batch.wanted.len() == given { given } else { 0 };
        for (first, base, n) in [(true, 0, given), (false, shape.chain_base(), chained)] {
            let wanted = if first { shape.wanted() } else { shape.chain_wanted() };
            for ix in n..padded(n as u32, row_limit(limits, first)) as usize {
                self.words[(base + ix) * ROW..][..ROW].fill(0);
                let nobody = [ix as u32, 0, NONE, 0];
                self.words[wanted.clone()][ix * WANTED..][..WANTED].copy_from_slice(&nobody);
            }
        }
    }

    /// Words that the step needs uploaded: with one group of layers, no tables behind those of the last sequence.
    pub(crate) fn used(&self, shape: &Shape) -> usize {
        match shape.groups {
            1 => shape.tables(0).start + self.batch.spans.len() * shape.stride,
            _ => shape.len(),
        }
    }

    /// Words of the outputs that the ticket may fill.
    pub(crate) fn out_len(&self, shape: &Shape) -> usize {
        let (first, next) = shape.out_counts();
        let rounds = self.rounds as usize;
        OUT * if rounds == 1 { self.batch.wanted.len() } else { first + (rounds - 1) * next }
    }

    fn rows(&mut self, step: &[SeqStep<'_>], shape: &Shape) {
        self.chain.clear();
        for span in &self.batch.spans {
            let last = matches!(step[span.seq as usize].tokens, Tokens::Last { .. });
            for row in span.start..span.start + span.rows {
                let r = self.batch.rows[row as usize];
                let token = if last && row == span.start { NONE } else { r.token };
                let nth = row - span.start;
                let words = [token, r.pos, r.seq, span.slot.0, 1, 0, nth, span.rows];
                self.words[row as usize * ROW..][..ROW].copy_from_slice(&words);
            }
            let seq = &step[span.seq as usize];
            if seq.max_new > 1 {
                let at = shape.chain_base() + self.chain.len();
                let words = [0, 0, span.seq, span.slot.0, seq.max_new, 1, 0, 0];
                self.words[at * ROW..][..ROW].copy_from_slice(&words);
                self.chain.push(span.seq);
            }
        }
    }

    fn wants(&mut self, step: &[SeqStep<'_>], shape: &Shape, ticket: u32) {
        let Batch { rows, wanted, spans, .. } = &self.batch;
        // Who chooses: the kernel that finds the best, or those that draw.
        let who = |seq: u32| match ways(&step[seq as usize].sample.unwrap_or_default()) {
            0 => TOKEN,
            ways => ways,
        };
        let kind = |want: Want, seq: u32| match want {
            Want::Token { logprob } => who(seq) | if logprob { LOGPROB } else { 0 },
            _ => 0,
        };
        for (ix, w) in wanted.iter().enumerate() {
            let seq = rows[w.row as usize].seq;
            let mut flags = kind(w.want, seq);
            let later =
                |o: &fornax_plan::Wanted| rows[o.row as usize].seq == seq && kind(o.want, seq) != 0;
            if flags != 0 && !wanted[ix + 1..].iter().any(later) {
                flags |= SETS_LAST;
            }
            let ends = |s: &Span| s.seq == seq && w.row + 1 == s.start + s.rows;
            let chained = spans.iter().any(ends);
            let chain = self.chain.iter().position(|c| chained && *c == seq);
            let chain = chain.map_or(NONE, |c| (shape.chain_base() + c) as u32);
            let words = [w.row, flags, chain, ticket];
            self.words[shape.wanted()][ix * WANTED..][..WANTED].copy_from_slice(&words);
        }
        for (ix, seq) in self.chain.iter().enumerate() {
            let want = step[*seq as usize].wants.last().map_or(0, |(_, w)| kind(*w, *seq));
            let chain = (shape.chain_base() + ix) as u32;
            let words = [ix as u32, want | SETS_LAST, chain, ticket];
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
pub(crate) fn ways(s: &SampleParams) -> u32 {
    let drawn = if s.temperature > 0.0 { DRAWN } else { 0 };
    drawn | if s.penalises() { PENALISED } else { 0 }
}

/// The parameters as the kernels read them.
fn draw(s: &SampleParams, start: u32) -> [u32; DRAW] {
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
        start,
        0,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use fornax_gguf::TensorType;
    use fornax_plan::conformance;
    use fornax_plan::{BlockId, KvType, SlotId};

    const LIMITS: Limits = Limits {
        slots: 3,
        rows: 8,
        wanted: 8,
        kv_blocks: 4,
        kv_type: KvType::F32,
        act: None,
        chain: 1000,
        stops: 100,
        deterministic: false,
    };

    /// Lays out one step of a prompt of two tokens in slot 2 and a continuation in slot 0.
    fn laid(known: bool, sample: Option<SampleParams>, stop: &[u32]) -> Result<(Feed, Shape)> {
        let plan = conformance::proof(TensorType::F32).plan;
        let shape = Shape::new(&plan, &LIMITS);
        let mut feed = Feed::new(&shape, &LIMITS);
        let blocks = [BlockId(3), BlockId(1)];
        let tables: [&[BlockId]; 1] = [&blocks];
        let (first, second) = ([(1..2, Want::Token { logprob: true })], [(0..1, Want::Logits)]);
        let prompt = SeqStep {
            slot: SlotId(2),
            tokens: Tokens::Host(&[7, 8]),
            pos: 0,
            tables: &tables,
            wants: &first,
            sample,
            max_new: 4,
            stop,
        };
        let tokens = Tokens::Last { draft: &[] };
        let (slot, max_new) = (SlotId(0), 1);
        let more = SeqStep { slot, tokens, pos: 5, wants: &second, max_new, ..prompt.clone() };
        let mut slots = Slots::new(&LIMITS, 16);
        if known {
            slots.chooses(SlotId(0));
        }
        feed.fill(&[prompt, more], &plan, &LIMITS, 32, &shape, 9, &slots)?;
        Ok((feed, shape))
    }

    #[test]
    fn rows_wants_and_chains_lie_where_the_shape_says() {
        let (feed, shape) = laid(true, None, &[5, 6]).unwrap();
        let row = |at: usize| &feed.words[at * ROW..][..6];
        assert_eq!(row(1), [8, 1, 0, 2, 1, 0]);
        assert_eq!(row(2), [NONE, 5, 1, 0, 1, 0], "the token is on the device");
        assert_eq!((shape.chain_base(), row(8)), (8, &[0, 0, 0, 2, 4, 1][..]));
        assert_eq!((feed.rounds, &feed.chain[..]), (4, &[0][..]));
        let wanted = &feed.words[shape.wanted()][..2 * WANTED];
        assert_eq!(wanted, [1, TOKEN | LOGPROB | SETS_LAST, 8, 9, 2, 0, NONE, 9]);
        assert_eq!(feed.words[shape.chain_wanted()][..WANTED], [0, 7, 8, 9]);
        assert_eq!(feed.words[shape.stops()][..3], [2, 5, 6]);
        assert_eq!(feed.words[shape.tables(0)][4..6], [3, 1], "the second sequence's table");
    }

    #[test]
    fn who_draws_is_chosen_for_by_other_kernels_and_goes_on_alike() {
        let warm = SampleParams { temperature: 1.0, seed: 7 << 32, ..SampleParams::default() };
        let (feed, shape) = laid(true, Some(warm), &[]).unwrap();
        assert_eq!((feed.ways, feed.rounds, &feed.chain[..]), (DRAWN, 4, &[0][..]));
        assert_eq!(feed.words[shape.wanted()][1], DRAWN | LOGPROB | SETS_LAST);
        assert_eq!(feed.words[shape.chain_wanted()][1], DRAWN | LOGPROB | SETS_LAST);
        let draw = &feed.words[shape.draws()][..DRAW];
        assert_eq!(draw[..6], [1f32.to_bits(), 0, 1f32.to_bits(), 0xff80_0000, 0, 7]);
        let strict = SampleParams { presence_penalty: 1.0, ..SampleParams::default() };
        assert_eq!(laid(true, Some(strict), &[]).unwrap().0.ways, PENALISED);
    }

    #[test]
    fn graphs_have_a_few_numbers_of_rows() {
        let up = [1, 2, 3, 5, 9, 17, 25, 33, 49, 65, 257].map(|n| padded(n, 512));
        assert_eq!(up, [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 384]);
        assert_eq!((padded(0, 512), padded(5, 6), padded(7, 6)), (0, 6, 7));
    }

    #[test]
    fn rows_beyond_those_of_the_step_are_masked_and_only_tables_in_use_go_along() {
        let one = |shape: &Shape| shape.tables(0).start + 2 * shape.stride;
        let (mut feed, shape) = laid(true, None, &[]).unwrap();
        assert_eq!((feed.batch.rows.len(), feed.used(&shape)), (3, one(&shape)));
        assert!(feed.used(&shape) < shape.len());
        let again = feed.batch.wanted[0];
        feed.batch.wanted.push(again);
        feed.words.fill(7);
        let limits = Limits { slots: 8, wanted: 8, ..LIMITS };
        feed.mask(&shape, &limits);
        assert_eq!(feed.words[3 * ROW..][..ROW], [0; ROW], "a fourth row");
        assert_eq!(feed.words[shape.wanted()][3 * WANTED..][..WANTED], [3, 0, NONE, 0]);
    }

    #[test]
    fn what_has_no_room_is_refused_by_name() {
        let e = laid(true, None, &[1; STOPS]).unwrap_err();
        assert!(e.is_unsupported() && e.to_string().contains("16 stop tokens, at most 15"), "{e}");
        let e = laid(false, None, &[]).unwrap_err();
        assert!(e.is_malformed() && e.to_string().contains("chosen no token"), "{e}");
    }
}
