//! What goes into a step and what comes out of it. Plain data; no device, no scheduler.

use std::ops::Range;

use crate::ids::{BlockId, SlotId, TokenId};
use crate::sample::SampleParams;

/// Where a sequence's tokens of this step come from.
#[derive(Clone, Copy, Debug)]
pub enum Tokens<'a> {
    /// Given by the host: a prefill chunk, or a decode token.
    Host(&'a [TokenId]),
    /// The token that the device chose last for this slot, then a draft to be verified with it.
    Last {
        /// Guessed continuation; empty without speculation.
        draft: &'a [TokenId],
    },
}

impl Tokens<'_> {
    /// Rows that the sequence contributes to the step.
    pub fn rows(&self) -> usize {
        match self {
            Tokens::Host(tokens) => tokens.len(),
            Tokens::Last { draft } => 1 + draft.len(),
        }
    }
}

/// What is wanted of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Want {
    /// A token chosen by the sequence's [`SampleParams`], and its log-probability where asked.
    /// The last such row of a sequence sets its slot's last token.
    Token {
        /// Fill [`TokenOut::logprob`] (natural log, of the unmodified distribution).
        logprob: bool,
    },
    /// The whole row of logits.
    Logits,
    /// The log-probability of one given token (natural log).
    LogprobOf(TokenId),
    /// The final hidden state, normed as the language-model head sees it.
    Hidden,
}

/// One sequence's part of a ragged step. Prefill chunks and decode rows mix freely.
#[derive(Clone, Debug)]
pub struct SeqStep<'a> {
    /// The device row that keeps this sequence's last token, history and states.
    pub slot: SlotId,
    /// The tokens of this step.
    pub tokens: Tokens<'a>,
    /// Position of the first of them; everything at and past it in the cache is overwritten.
    pub pos: u32,
    /// One block table per KV group; entry `i` holds positions `i · block ..`. Window groups may
    /// hold any id in entries that the window has passed.
    pub tables: &'a [&'a [BlockId]],
    /// Rows of this sequence (0 = its first token of the step) and what is wanted of them, in
    /// ascending order; rows named in no range produce nothing.
    pub wants: &'a [(Range<u32>, Want)],
    /// How a wanted token is chosen; the highest logit where absent.
    pub sample: Option<SampleParams>,
    /// Tokens that this ticket may produce for the sequence, each fed back on the device; needs
    /// a `Want::Token` on its last row and blocks for as many positions. At least 1.
    pub max_new: u32,
    /// Tokens that end the chain early; the token itself is still reported.
    pub stop: &'a [TokenId],
}

/// A chosen token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenOut {
    /// Index of the sequence in the step.
    pub seq: u32,
    /// Position of the token in its sequence.
    pub pos: u32,
    /// The token.
    pub token: TokenId,
    /// Natural log of its probability; NaN where not asked for.
    pub logprob: f32,
}

/// Which row of a step an output row belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowOut {
    /// Index of the sequence in the step.
    pub seq: u32,
    /// Position of the row's token in its sequence.
    pub pos: u32,
}

/// The results of a step; reused from step to step, so that steady decoding allocates nothing.
#[derive(Debug, Default)]
pub struct StepOutput {
    /// Chosen tokens: by sequence, then by position.
    pub tokens: Vec<TokenOut>,
    /// Rows of logits, `vocab` elements each.
    pub logits: Vec<f32>,
    /// Which rows those are.
    pub logit_rows: Vec<RowOut>,
    /// Log-probabilities of given tokens.
    pub logprobs: Vec<(RowOut, f32)>,
    /// Hidden rows, `width` elements each.
    pub hidden: Vec<f32>,
    /// Which rows those are.
    pub hidden_rows: Vec<RowOut>,
}

impl Clone for StepOutput {
    fn clone(&self) -> StepOutput {
        let mut copy = StepOutput::default();
        copy.clone_from(self);
        copy
    }

    /// Copies list by list into the memory that is there.
    fn clone_from(&mut self, from: &StepOutput) {
        self.tokens.clone_from(&from.tokens);
        self.logits.clone_from(&from.logits);
        self.logit_rows.clone_from(&from.logit_rows);
        self.logprobs.clone_from(&from.logprobs);
        self.hidden.clone_from(&from.hidden);
        self.hidden_rows.clone_from(&from.hidden_rows);
    }
}

impl StepOutput {
    /// Empties every list and keeps the memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.logits.clear();
        self.logit_rows.clear();
        self.logprobs.clear();
        self.hidden.clear();
        self.hidden_rows.clear();
    }
}
