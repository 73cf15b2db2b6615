//! A ragged step and the chain behind it as the words that the device reads: uploaded once, after
//! which every further token is the device's own. It knows no buffer and no kernel.
//!
//! Rows: `rows` for what the host gives, then one chain row for every sequence that feeds tokens
//! back; the kernel that chooses a token writes it, its position and what is left into the chain
//! row, in place, and the next round reads it there.

use std::ops::Range;

use fornax_plan::{
    Batch, Error, Limits, Plan, Result, SampleParams, SeqStep, SlotId, Span, TokenId, Tokens, Want,
};

/// Words of a row: token (or [`NONE`]: the slot's last), position, sequence, slot, tokens still
/// to come from it, round, which of its sequence's rows it is, how many those are (0 for one that was chosen here).
pub(crate) const ROW: usize = 8;
/// Words of a wanted row: row, [`TOKEN`]…, chain row among all rows or [`NONE`], ticket.
pub(crate) const WANTED: usize = 4;
/// Words of an output: token, log-probability, state ([`CHOSEN`]…), position.
pub(crate) const OUT: usize = 4;
/// Words of a sequence's stop list: the count, then the tokens.
pub(crate) const STOPS: usize = 16;
/// No token, no chain.
pub(crate) const NONE: u32 = u32::MAX;

/// Wanted: choose a token.
pub(crate) const TOKEN: u32 = 1;
/// Wanted: with its log-probability.
pub(crate) const LOGPROB: u32 = 2;
/// Wanted: this choice becomes the slot's last token.
pub(crate) const SETS_LAST: u32 = 4;

/// Output: a token.
pub(crate) const CHOSEN: u32 = 1;
/// Output: no logit of the row was usable.
pub(crate) const UNUSABLE: u32 = 2;

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
}

impl Shape {
    pub(crate) fn new(plan: &Plan, limits: &Limits) -> Shape {
        Shape {
            slots: limits.slots as usize,
            rows: limits.rows as usize,
            wanted: limits.wanted as usize,
            groups: plan.kv.len(),
            stride: limits.kv_blocks as usize,
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

    /// One group's block tables, sequence after sequence.
    pub(crate) fn tables(&self, group: usize) -> Range<usize> {
        let len = self.slots * self.stride;
        let start = self.stops().end + group * len;
        start..start + len
    }

    /// All words.
    pub(crate) fn len(&self) -> usize {
        self.stops().end + self.groups * self.slots * self.stride
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
    /// The host chooses the tokens: the device runs the first round and hands logits over.
    pub(crate) on_host: bool,
}

/// Where the token is that a slot chose last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Last {
    /// Nothing was chosen yet.
    Nowhere,
    /// On the device, or it will be when the steps under way have run.
    Device,
    /// Here.
    Host(TokenId),
}

impl Feed {
    pub(crate) fn new(shape: &Shape, limits: &Limits) -> Feed {
        Feed {
            words: vec![0; shape.len()],
            batch: Batch::with_capacity(limits),
            chain: Vec::with_capacity(shape.slots),
            rounds: 1,
            on_host: false,
        }
    }

    /// Checks the step and lays out its words. `last` tells where a slot's last token is.
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
        last: impl Fn(SlotId) -> Last,
    ) -> Result<()> {
        // Where the token itself is on the device, any valid one stands for it in the check.
        let token = |slot| match last(slot) {
            Last::Nowhere => None,
            Last::Device => Some(0),
            Last::Host(token) => Some(token),
        };
        self.batch.fill(step, plan, limits, kv_block, token)?;
        self.on_host = step.iter().any(|s| s.sample.is_some_and(|s| !greedy(&s)));
        self.rounds = 1;
        for (ix, seq) in step.iter().enumerate() {
            check(ix, seq)?;
            if !self.on_host {
                self.rounds = self.rounds.max(seq.max_new);
            }
            let stops = &mut self.words[shape.stops()][ix * STOPS..][..STOPS];
            stops[0] = seq.stop.len() as u32;
            stops[1..=seq.stop.len()].copy_from_slice(seq.stop);
            for (group, table) in seq.tables.iter().enumerate() {
                let n = table.len().min(shape.stride);
                let to = &mut self.words[shape.tables(group)][ix * shape.stride..][..n];
                to.iter_mut().zip(*table).for_each(|(to, block)| *to = block.0);
            }
        }
        self.lay(step, shape, ticket, last);
        Ok(())
    }

    /// The words of the rows and wants of `batch`: of the step, or of one more round of it that
    /// the host has laid out.
    pub(crate) fn lay(
        &mut self,
        step: &[SeqStep<'_>],
        shape: &Shape,
        ticket: u32,
        last: impl Fn(SlotId) -> Last,
    ) {
        self.rows(step, shape, last);
        self.wants(step, shape, ticket);
    }

    fn rows(&mut self, step: &[SeqStep<'_>], shape: &Shape, last: impl Fn(SlotId) -> Last) {
        self.chain.clear();
        for span in &self.batch.spans {
            let last = matches!(step[span.seq as usize].tokens, Tokens::Last { .. })
                && last(span.slot) == Last::Device;
            for row in span.start..span.start + span.rows {
                let r = self.batch.rows[row as usize];
                let token = if last && row == span.start { NONE } else { r.token };
                let nth = row - span.start;
                let words = [token, r.pos, r.seq, span.slot.0, 1, 0, nth, span.rows];
                self.words[row as usize * ROW..][..ROW].copy_from_slice(&words);
            }
            let seq = &step[span.seq as usize];
            if seq.max_new > 1 && !self.on_host {
                let at = shape.chain_base() + self.chain.len();
                let words = [0, 0, span.seq, span.slot.0, seq.max_new, 1, 0, 0];
                self.words[at * ROW..][..ROW].copy_from_slice(&words);
                self.chain.push(span.seq);
            }
        }
    }

    fn wants(&mut self, step: &[SeqStep<'_>], shape: &Shape, ticket: u32) {
        let Batch { rows, wanted, spans, .. } = &self.batch;
        let on_host = self.on_host;
        let kind = |want: Want| match want {
            Want::Token { logprob } if !on_host => TOKEN | if logprob { LOGPROB } else { 0 },
            _ => 0,
        };
        for (ix, w) in wanted.iter().enumerate() {
            let seq = rows[w.row as usize].seq;
            let mut flags = kind(w.want);
            let later = |o: &fornax_plan::Wanted| {
                rows[o.row as usize].seq == seq && kind(o.want) & TOKEN != 0
            };
            if flags & TOKEN != 0 && !wanted[ix + 1..].iter().any(later) {
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
            let want = step[*seq as usize].wants.last().map_or(0, |(_, w)| kind(*w));
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

/// True where the parameters ask for the highest logit, unchanged.
pub(crate) fn greedy(s: &SampleParams) -> bool {
    let penalises =
        s.repeat_penalty != 1.0 || s.frequency_penalty != 0.0 || s.presence_penalty != 0.0;
    s.temperature == 0.0 && (s.penalty_window == 0 || !penalises)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fornax_gguf::TensorType;
    use fornax_plan::conformance;
    use fornax_plan::{BlockId, KvType};

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
    fn laid(last: Last, sample: Option<SampleParams>, stop: &[u32]) -> Result<(Feed, Shape)> {
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
        feed.fill(&[prompt, more], &plan, &LIMITS, 32, &shape, 9, |_| last)?;
        Ok((feed, shape))
    }

    #[test]
    fn rows_wants_and_chains_lie_where_the_shape_says() {
        let (feed, shape) = laid(Last::Device, None, &[5, 6]).unwrap();
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
    fn a_step_that_draws_has_one_round_and_leaves_the_choice_to_the_host() {
        let warm = SampleParams { temperature: 1.0, ..SampleParams::default() };
        let (feed, shape) = laid(Last::Host(30), Some(warm), &[]).unwrap();
        assert!(feed.on_host && feed.rounds == 1 && feed.chain.is_empty());
        assert_eq!(feed.words[2 * ROW], 30, "a token that is here is uploaded");
        assert_eq!(feed.words[shape.wanted()][..WANTED], [1, 0, NONE, 9]);
    }

    #[test]
    fn what_has_no_room_is_refused_by_name() {
        let e = laid(Last::Device, None, &[1; STOPS]).unwrap_err();
        assert!(e.is_unsupported() && e.to_string().contains("16 stop tokens, at most 15"), "{e}");
        let e = laid(Last::Nowhere, None, &[]).unwrap_err();
        assert!(e.is_malformed() && e.to_string().contains("chosen no token"), "{e}");
    }
}
