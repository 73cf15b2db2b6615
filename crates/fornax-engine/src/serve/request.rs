//! One request inside the engine: what was asked, how far it is, and the way back to whoever
//! asked. It knows no other request.

use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use fornax_plan::{SampleParams, SlotId, TokenId};

use super::api::{Constraint, Done, Finish, Generation, Pooling, Publish, RequestId, Update};
use crate::error::Error;
use crate::kv::Table;
use crate::sampler::Sampler;
use crate::speculate::Record;

/// The way back. It says exactly once how the request ended, and last: what is dropped without a
/// word has failed.
pub(crate) struct Reply {
    publish: Option<Publish>,
    after: Option<Box<dyn FnOnce() + Send>>,
}

impl Reply {
    pub(crate) fn new(publish: Publish) -> Reply {
        Reply { publish: Some(publish), after: None }
    }

    /// The same, with something to do right before the end is told.
    pub(crate) fn then(self, after: impl FnOnce() + Send + 'static) -> Reply {
        let mut reply = self;
        reply.after = Some(Box::new(after));
        reply
    }

    /// Tells of progress; `Break` where the receiver wants no more, or panicked.
    pub(crate) fn tell(&mut self, update: Update) -> ControlFlow<()> {
        let Some(publish) = &mut self.publish else { return ControlFlow::Break(()) };
        catch_unwind(AssertUnwindSafe(|| publish(update))).unwrap_or(ControlFlow::Break(()))
    }

    /// Drops the way back unused: the request was refused where it was made.
    pub(crate) fn forget(&mut self) {
        self.publish = None;
        if let Some(after) = self.after.take() {
            after();
        }
    }

    /// Tells how it ended.
    pub(crate) fn end(&mut self, update: Update) {
        if let Some(after) = self.after.take() {
            after();
        }
        if let Some(mut publish) = self.publish.take() {
            // The receiver's panic is the receiver's loss.
            drop(catch_unwind(AssertUnwindSafe(|| publish(update))));
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        self.end(Update::Failed(Error::device("the engine ended before the request did")));
    }
}

/// How a request is to end.
pub(crate) enum End {
    Finished(Finish),
    Failed(Error),
}

/// A request from arrival to end.
pub(crate) struct Seq {
    pub(crate) id: RequestId,
    pub(crate) priority: i32,
    pub(crate) reply: Reply,
    /// The prompt, then what was generated.
    pub(crate) tokens: Vec<TokenId>,
    /// Tokens of the prompt.
    pub(crate) prompt: usize,
    /// Tokens at which it ends by length.
    pub(crate) most: usize,
    /// Positions whose keys, values and states are in the cache.
    pub(crate) computed: usize,
    pub(crate) table: Table,
    pub(crate) slot: Option<SlotId>,
    pub(crate) sample: SampleParams,
    pub(crate) sampler: Option<Sampler>,
    pub(crate) stop: Vec<TokenId>,
    pub(crate) logprobs: Option<u8>,
    pub(crate) prompt_logprobs: bool,
    /// Prompt tokens whose log-probabilities were told.
    pub(crate) told: usize,
    pub(crate) constraint: Option<Box<dyn Constraint>>,
    pub(crate) pool: Option<Pooling>,
    /// Sums of hidden states, and how many positions are in them.
    pub(crate) pooled: Vec<f64>,
    pub(crate) pooled_rows: usize,
    pub(crate) deadline: Option<Instant>,
    /// Prompt tokens found in the cache when it was first let in; none before that.
    pub(crate) cached: Option<u32>,
    pub(crate) record: Record,
    /// Guessed tokens at the end of `tokens`, while the step that verifies them runs.
    pub(crate) drafted: usize,
    /// States before a guess, to go back to.
    pub(crate) before: Vec<f32>,
    /// It took part in a step that failed, and runs alone until it is cleared.
    pub(crate) suspect: bool,
    pub(crate) end: Option<End>,
}

impl Seq {
    /// A request as it arrives; `most` tokens, prompt and generated, are the engine's limit.
    pub(crate) fn new(
        id: RequestId,
        g: Generation,
        reply: Reply,
        groups: usize,
        most: usize,
    ) -> Seq {
        let prompt = g.prompt.len();
        let most = most.min(prompt.saturating_add(g.max_new as usize));
        let mut tokens = Vec::with_capacity(most.min(prompt + (1 << 16)) + 1);
        tokens.extend_from_slice(&g.prompt);
        Seq {
            id,
            priority: g.priority,
            reply,
            tokens,
            prompt,
            most: if g.pool.is_some() { prompt } else { most },
            computed: 0,
            table: Table::new(groups),
            slot: None,
            sample: g.sample,
            sampler: g.sampler,
            stop: g.stop,
            logprobs: g.logprobs,
            prompt_logprobs: g.prompt_logprobs,
            told: 0,
            constraint: g.constraint,
            pool: g.pool,
            pooled: Vec::new(),
            pooled_rows: 0,
            deadline: g.deadline,
            cached: None,
            record: Record::default(),
            drafted: 0,
            before: Vec::new(),
            suspect: false,
            end: None,
        }
    }

    /// Higher priorities first, then who came first.
    pub(crate) fn rank(&self) -> (std::cmp::Reverse<i32>, RequestId) {
        (std::cmp::Reverse(self.priority), self.id)
    }

    /// Tokens that have still to run.
    pub(crate) fn pending(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Whether it is past its prompt and waits for its next token.
    pub(crate) fn decodes(&self) -> bool {
        self.tokens.len() > self.prompt && self.pending() <= crate::speculate::DRAFT_MAX + 1
    }

    /// Tokens that were generated.
    pub(crate) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    /// Whether its tokens are chosen from logits on the host: for what a device does not
    /// remember, or for tokens that a slot never saw because the cache had them.
    pub(crate) fn on_host(&self) -> bool {
        self.sampler.is_some()
            || self.constraint.is_some()
            || self.sample.penalises()
            || self.logprobs.is_some_and(|n| n > 0)
    }

    /// Whether a token is wanted after its last one.
    pub(crate) fn wants_token(&self) -> bool {
        self.pool.is_none() && self.tokens.len() < self.most
    }

    /// How many of its tokens may come from the cache: all but the last, and none where
    /// something is wanted of every row.
    pub(crate) fn may_reuse(&self) -> usize {
        let each_row = (self.prompt_logprobs && self.told < self.prompt)
            || (self.pool == Some(Pooling::Mean) && self.pooled_rows < self.prompt);
        if each_row { 0 } else { self.tokens.len() - 1 }
    }

    /// Marks the end, unless there is one already.
    pub(crate) fn finish(&mut self, end: End) {
        if self.end.is_none() {
            self.end = Some(end);
        }
    }

    /// Tells of progress; a receiver that wants no more ends the request.
    pub(crate) fn tell(&mut self, update: Update) {
        if self.end.is_none() && self.reply.tell(update).is_break() {
            self.finish(End::Finished(Finish::Cancelled));
        }
    }

    /// Tells how it ended.
    pub(crate) fn tell_end(&mut self) {
        let end = self.end.take().unwrap_or(End::Finished(Finish::Cancelled));
        let update = match end {
            End::Failed(e) => Update::Failed(e),
            End::Finished(finish) => Update::Done(Done {
                finish,
                prompt: self.prompt as u32,
                cached: self.cached.unwrap_or(0),
                generated: self.generated() as u32,
                hidden: self.hidden(),
            }),
        };
        self.reply.end(update);
    }

    fn hidden(&self) -> Option<Vec<f32>> {
        let n = match self.pool? {
            Pooling::Mean => self.prompt,
            Pooling::Last => 1,
        };
        let whole = self.pooled_rows == self.prompt && !self.pooled.is_empty();
        whole.then(|| self.pooled.iter().map(|v| (v / n as f64) as f32).collect())
    }
}
