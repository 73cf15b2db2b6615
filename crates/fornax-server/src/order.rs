//! What a request asks of the engine, whatever protocol it came in; and handing it over. Knows no protocol.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use axum::http::StatusCode;
use fornax_engine::constrain::Compiled;
use fornax_engine::sampler::{Sampler, SamplerParams};
use fornax_engine::serve::{Generation, Pooling, Refused, RequestId, Update};
use fornax_plan::TokenId;
use tokio::sync::mpsc::{self, UnboundedReceiver};

use crate::backend::Served;
use crate::live::Reading;
use crate::refusal::Refusal;

/// Everything about a request that the protocols have in common.
pub(crate) struct Order {
    pub(crate) served: Arc<Served>,
    /// Token ids; each at least one.
    pub(crate) prompts: Vec<Arc<[TokenId]>>,
    /// Choices for each prompt.
    pub(crate) n: usize,
    pub(crate) sampling: SamplerParams,
    /// `u32::MAX`: to the end of the context.
    pub(crate) max_new: u32,
    pub(crate) stops: Vec<String>,
    pub(crate) logprobs: Option<u8>,
    pub(crate) prompt_logprobs: bool,
    pub(crate) priority: i32,
    pub(crate) rule: Option<Compiled>,
    pub(crate) reading: Reading,
    pub(crate) pool: Option<Pooling>,
    pub(crate) deadline: Option<Instant>,
}

impl Order {
    /// The prompt alone; everything else as if the client had left it out.
    pub(crate) fn new(served: Arc<Served>, prompt: Vec<TokenId>) -> Order {
        Order {
            served,
            prompts: vec![prompt.into()],
            n: 1,
            sampling: SamplerParams::default(),
            max_new: u32::MAX,
            stops: Vec::new(),
            logprobs: None,
            prompt_logprobs: false,
            priority: 0,
            rule: None,
            reading: Reading::Continued,
            pool: None,
            deadline: None,
        }
    }

    /// Hands every choice to the engine: all of them or none.
    ///
    /// # Errors
    /// Why the engine does not take it.
    pub(crate) fn submit(&self) -> Result<Submitted, Refusal> {
        let (send, updates) = mpsc::unbounded_channel();
        let mut submitted = Submitted { served: self.served.clone(), open: Vec::new(), updates };
        for (p, prompt) in self.prompts.iter().enumerate() {
            if prompt.is_empty() {
                let said =
                    "there is no token to go on from, and this model has none that begins a text";
                return Err(Refusal::field("prompt", said));
            }
            for c in 0..self.n {
                let index = p * self.n + c;
                let send = send.clone();
                let publish = Box::new(move |update| match send.send((index, update)) {
                    Ok(()) => ControlFlow::Continue(()),
                    Err(_) => ControlFlow::Break(()),
                });
                let id = self.served.engine.submit(self.generation(prompt, c)?, publish);
                // What was handed over before is cancelled by the drop.
                let id = id.map_err(|refused| self.refusal(refused, prompt.len()))?;
                submitted.open.push(Some(id));
            }
        }
        Ok(submitted)
    }

    fn generation(&self, prompt: &Arc<[TokenId]>, choice: usize) -> Result<Generation, Refusal> {
        let mut params = self.sampling.clone();
        params.base.seed = derived(params.base.seed, choice);
        let room = self.served.context.saturating_sub(prompt.len() as u32);
        let mut generation = Generation::new(prompt.clone(), self.max_new.min(room.max(1)));
        generation.sample = params.base;
        if !params.on_device() {
            let sampler = Sampler::new(params).map_err(|e| Refusal::field("", e.to_string()))?;
            generation.sampler = Some(sampler);
        }
        generation.stop = self.served.model.tokenizer().ends_of_generation().to_vec();
        generation.logprobs = self.logprobs;
        generation.prompt_logprobs = self.prompt_logprobs;
        generation.priority = self.priority;
        generation.constraint = self.rule.as_ref().map(Compiled::start);
        generation.pool = self.pool;
        generation.deadline = self.deadline;
        Ok(generation)
    }

    fn refusal(&self, refused: Refused, prompt: usize) -> Refusal {
        match refused {
            Refused::QueueFull { retry_after_s } => Refusal::full(retry_after_s),
            Refused::NeverFits { .. } => {
                let said = format!(
                    "the prompt has {prompt} tokens, and one request can have {} with its answer",
                    self.served.context
                );
                Refusal::field("", said).with_code("context_length_exceeded")
            }
            Refused::Invalid(why) => Refusal::field("", why),
            Refused::Lost(why) => {
                Refusal::new(StatusCode::SERVICE_UNAVAILABLE, why).with_code("engine_lost")
            }
        }
    }
}

/// What was handed over and not heard the end of; dropping it cancels that.
pub(crate) struct Submitted {
    served: Arc<Served>,
    open: Vec<Option<RequestId>>,
    updates: UnboundedReceiver<(usize, Update)>,
}

impl Submitted {
    /// The next update and whose it is.
    pub(crate) async fn next(&mut self) -> Option<(usize, Update)> {
        self.updates.recv().await
    }

    pub(crate) fn choices(&self) -> usize {
        self.open.len()
    }

    pub(crate) fn is_open(&self, choice: usize) -> bool {
        self.open[choice].is_some()
    }

    pub(crate) fn any_open(&self) -> bool {
        self.open.iter().any(Option::is_some)
    }

    /// The choice ended by itself.
    pub(crate) fn ended(&mut self, choice: usize) {
        self.open[choice] = None;
    }

    /// Nothing more is wanted of the choice.
    pub(crate) fn cancel(&mut self, choice: usize) {
        if let Some(id) = self.open[choice].take() {
            self.served.engine.cancel(id);
        }
    }
}

impl Drop for Submitted {
    fn drop(&mut self) {
        for choice in 0..self.open.len() {
            self.cancel(choice);
        }
    }
}

/// The seed of one of several choices: the first has the request's own.
fn derived(seed: u64, choice: usize) -> u64 {
    let mut z = seed.wrapping_add((choice as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    if choice > 0 {
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^= z >> 27;
    }
    z
}

/// A number that nobody asked for in particular: seeds, ids.
pub(crate) fn random() -> u64 {
    // Keys of hash maps are drawn from the system once for a thread and counted up.
    RandomState::new().build_hasher().finish()
}

/// An id in the manner of the protocol: a prefix and 24 characters.
pub(crate) fn new_id(prefix: &str) -> String {
    let id = format!("{prefix}{:016x}{:016x}", random(), random());
    id[..prefix.len() + 24].to_owned()
}
