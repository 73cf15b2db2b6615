//! What a caller hands to the engine and gets back from it. Plain data and one trait; no thread,
//! no device, no text.

use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use fornax_plan::{ActMode, KvType, SampleParams, TokenId};

use super::bits::BitSet;
use crate::error::{Error, Result};
use crate::sampler::Sampler;

/// What an engine is made for. Memory is decided here and grows no further.
#[derive(Clone, Debug, PartialEq)]
pub struct ServeOptions {
    /// Sequences that run at once.
    pub max_running: usize,
    /// Requests that wait for a place; one more is refused.
    pub max_queue: usize,
    /// Positions of one request: prompt and generated tokens.
    pub context: u32,
    /// Positions of the whole pool of keys and values.
    pub kv_tokens: Option<u64>,
    /// The same in bytes. Where neither is given: room for `max_running` contexts, within what the
    /// device says that may be taken, less the weights; 2 GiB where it says nothing.
    pub kv_bytes: Option<u64>,
    /// How keys and values are stored.
    pub kv_type: KvType,
    /// The activation form; the device's own where absent.
    pub act: Option<ActMode>,
    /// Token rows of one step at most; 0 for as many as the device is fastest with.
    pub step_rows: u32,
    /// Milliseconds that a step may take while sequences decode; what they leave of it goes to
    /// prompts, and up to five times as much where more wait for a first token than decode.
    pub step_ms_busy: f32,
    /// Milliseconds that a step may take when only prompts run.
    pub step_ms_idle: f32,
    /// Keep the keys and values of what was computed for prompts that begin alike.
    pub prefix_cache: bool,
    /// Guess continuations from what is there already and verify them, while it pays.
    pub speculate: bool,
    /// Ask for the same ids whatever runs beside a request, on devices where that costs
    /// something; one that cannot give them refuses. The CPU always does.
    pub deterministic: bool,
}

impl Default for ServeOptions {
    fn default() -> ServeOptions {
        ServeOptions {
            max_running: 32,
            max_queue: 1024,
            context: 4096,
            kv_tokens: None,
            kv_bytes: None,
            kv_type: KvType::F16,
            act: None,
            step_rows: 0,
            step_ms_busy: 30.0,
            step_ms_idle: 250.0,
            prefix_cache: true,
            speculate: true,
            deterministic: false,
        }
    }
}

/// A request's name, unique for the life of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// What is pooled into one vector where a request wants no tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The mean of the final hidden states of all prompt tokens.
    Mean,
    /// The final hidden state of the last prompt token.
    Last,
}

/// One request.
pub struct Generation {
    /// The tokens to go on from; at least one.
    pub prompt: Arc<[TokenId]>,
    /// How tokens are chosen.
    pub sample: SampleParams,
    /// Chooses instead of [`Generation::sample`], on the host, where more is asked for than a
    /// device can remember.
    pub sampler: Option<Sampler>,
    /// Tokens to generate; `u32::MAX` for as many as there is room for, 0 for none (the prompt
    /// alone is run where its log-probabilities are wanted).
    pub max_new: u32,
    /// Tokens that end the generation; the one that did is not reported.
    pub stop: Vec<TokenId>,
    /// Report the log-probability of each token, and of this many of the likeliest beside it.
    pub logprobs: Option<u8>,
    /// Report the prompt's log-probabilities too, with as many beside each as `logprobs` says.
    pub prompt_logprobs: bool,
    /// Higher goes first, and may take a lower one's place.
    pub priority: i32,
    /// Restricts which tokens may be chosen.
    pub constraint: Option<Box<dyn Constraint>>,
    /// A pooled hidden state instead of tokens.
    pub pool: Option<Pooling>,
    /// When it is no longer worth an answer; it then fails.
    pub deadline: Option<Instant>,
}

impl Generation {
    /// The likeliest tokens after a prompt, and nothing else asked for.
    pub fn new(prompt: impl Into<Arc<[TokenId]>>, max_new: u32) -> Generation {
        Generation {
            prompt: prompt.into(),
            sample: SampleParams::default(),
            sampler: None,
            max_new,
            stop: Vec::new(),
            logprobs: None,
            prompt_logprobs: false,
            priority: 0,
            constraint: None,
            pool: None,
            deadline: None,
        }
    }
}

impl fmt::Debug for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Generation")
            .field("prompt", &self.prompt.len())
            .field("max_new", &self.max_new)
            .field("priority", &self.priority)
            .finish_non_exhaustive()
    }
}

/// Restricts a generation to what a grammar allows. Called on the engine's thread; an
/// implementation computes masks elsewhere, between `accept` and the `mask` after it.
pub trait Constraint: Send {
    /// Puts exactly the tokens that may come next into `allowed`, which has the size of the
    /// vocabulary. Tokens that end the generation are the engine's: it adds the request's stop
    /// tokens when [`Constraint::may_end`] says so and takes them out when not.
    ///
    /// # Errors
    /// The request ends with the error; nothing unchecked is ever sent.
    fn mask(&mut self, allowed: &mut BitSet) -> Result<()>;

    /// Notes a chosen token.
    ///
    /// # Errors
    /// Where the token is not allowed; the request ends.
    fn accept(&mut self, token: TokenId) -> Result<()>;

    /// Whether what was accepted so far is complete.
    fn may_end(&mut self) -> bool;

    /// Whether it is complete and nothing may follow; the request then ends as if by a stop
    /// token.
    fn is_done(&mut self) -> bool;
}

/// A generated token, or one of the prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenUpdate {
    /// The token.
    pub id: TokenId,
    /// Natural log of its probability in the unmodified distribution, where asked for; none for
    /// the first token of a prompt.
    pub logprob: Option<f32>,
    /// The likeliest tokens at its place with their log-probabilities, best first.
    pub top: Vec<(TokenId, f32)>,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop token, or the end of a constraint.
    Stop,
    /// As many tokens as asked for, or as there is room for.
    Length,
    /// `EngineHandle::cancel`, or the receiver's `Break`.
    Cancelled,
}

/// The end of a request that did not fail.
#[derive(Clone, Debug, PartialEq)]
pub struct Done {
    /// Why it ended.
    pub finish: Finish,
    /// Tokens of the prompt.
    pub prompt: u32,
    /// How many of them needed no computing, when it was first let in.
    pub cached: u32,
    /// Tokens that were generated and reported.
    pub generated: u32,
    /// The pooled hidden state, where asked for; not normalised.
    pub hidden: Option<Vec<f32>>,
}

/// What happens to a request, in order.
#[derive(Debug)]
pub enum Update {
    /// It was let in; this many of its prompt's tokens were cached.
    Started {
        /// Tokens that need no computing; fewer than the prompt has.
        cached: u32,
    },
    /// The next tokens of the prompt with their log-probabilities, where asked for.
    Prompt(Vec<TokenUpdate>),
    /// The next generated tokens.
    Tokens(Vec<TokenUpdate>),
    /// It ended; nothing follows.
    Done(Done),
    /// It failed; nothing follows.
    Failed(Error),
}

/// Receives a request's updates on the engine's thread. It must not block: everything waits for
/// it. `Break` cancels the request, which then still ends by `Done`. The last call is `Done` or
/// `Failed`, and there is exactly one of them.
pub type Publish = Box<dyn FnMut(Update) -> ControlFlow<()> + Send>;

/// Why a request was not taken; decided before it waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// As many requests wait as may.
    QueueFull {
        /// When to try again, seconds.
        retry_after_s: u32,
    },
    /// It needs more positions than there will ever be.
    NeverFits {
        /// Positions that it may need.
        needs: u64,
        /// Positions that one request can have.
        has: u64,
    },
    /// It contradicts itself or the model.
    Invalid(String),
    /// The engine cannot run any more, or is ending.
    Lost(String),
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::QueueFull { retry_after_s } => {
                write!(f, "too many requests are waiting; try again in {retry_after_s} s")
            }
            Refused::NeverFits { needs, has } => write!(
                f,
                "prompt and answer need {needs} positions, one request can have {has}; shorten the \
                 prompt or ask for fewer tokens"
            ),
            Refused::Invalid(why) | Refused::Lost(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for Refused {}

/// A snapshot of an engine.
#[derive(Clone, Debug, PartialEq)]
pub struct Stats {
    /// Requests that run.
    pub running: usize,
    /// Requests that wait, those that lost their place among them.
    pub waiting: usize,
    /// Blocks of the fullest pool that sequences hold.
    pub kv_blocks_used: u32,
    /// Blocks of that pool that hold only what may be found again; given up when needed.
    pub kv_blocks_cached: u32,
    /// The most that [`Stats::kv_blocks_used`] has been.
    pub kv_blocks_peak: u32,
    /// Blocks of every pool.
    pub kv_blocks_total: u32,
    /// Prompt tokens of the requests that were let in.
    pub prompt_tokens: u64,
    /// How many of them were found in the cache.
    pub prefix_hits: u64,
    /// Times that a request lost its place.
    pub preemptions: u64,
    /// Tokens generated and reported.
    pub tokens: u64,
    /// Guessed tokens that were verified.
    pub drafted: u64,
    /// How many of them were right.
    pub accepted: u64,
    /// Steps run.
    pub steps: u64,
    /// How many of them were handed over while the step before still ran.
    pub steps_ahead: u64,
    /// Rows of the last step.
    pub last_rows: u32,
    /// When the last step ended; the start of the engine before the first.
    pub last_step: Instant,
    /// How long it took, milliseconds.
    pub last_step_ms: f32,
    /// When the step under way began.
    pub step_since: Option<Instant>,
    /// False when the device is lost or the engine's thread has ended.
    pub healthy: bool,
    /// What ended it.
    pub fault: Option<String>,
}

impl Stats {
    /// Of an engine that has done nothing yet and began at `now`.
    pub fn new(kv_blocks_total: u32, now: Instant) -> Stats {
        Stats {
            running: 0,
            waiting: 0,
            kv_blocks_used: 0,
            kv_blocks_cached: 0,
            kv_blocks_peak: 0,
            kv_blocks_total,
            prompt_tokens: 0,
            prefix_hits: 0,
            preemptions: 0,
            tokens: 0,
            drafted: 0,
            accepted: 0,
            steps: 0,
            steps_ahead: 0,
            last_rows: 0,
            last_step: now,
            last_step_ms: 0.0,
            step_since: None,
            healthy: true,
            fault: None,
        }
    }
}
