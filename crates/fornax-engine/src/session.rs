//! One sequence on one program: prefill in chunks, then one token after the other. It knows
//! tokens alone, no text, and reads no clock.

mod chained;

use std::cell::RefCell;
use std::ops::ControlFlow;
use std::time::Duration;

use fornax_plan::sample::log_sum_exp;
use fornax_plan::{
    ActMode, BlockId, Cmd, Device, KvType, Limits, MemoryUse, OpTime, Plan, Program, SampleParams,
    SeqStep, SlotId, StepOutput, StepReport, StepSeconds, Ticket, TokenId, Tokens, Want,
};

use self::chained::Pace;
use crate::error::{Error, Result};
use crate::sampler::{Sampler, SamplerParams};
use crate::serve::{BitSet, Constraint};

/// What a session is made for.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// Positions of KV; the model's own context, up to 4,096, where absent.
    pub context: Option<u32>,
    /// Rows of one prefill step.
    pub chunk: u32,
    /// How keys and values are stored.
    pub kv_type: KvType,
    /// The activation form; the device's own where absent.
    pub act: Option<ActMode>,
    /// The same numbers however the sequence is cut into steps, on devices where that costs
    /// something; one that cannot give them refuses.
    pub deterministic: bool,
    /// Tokens that the device may choose one after the other before it is asked again, for one that runs beside the host. Each
    /// is reported as soon as it can be read.
    pub chain: u32,
    /// How long such a chain may take, by the pace of the one before: what is stopped is computed to its end.
    pub chain_time: Duration,
}

impl Default for SessionOptions {
    fn default() -> SessionOptions {
        SessionOptions {
            context: None,
            chunk: 256,
            kv_type: KvType::F16,
            act: None,
            deterministic: false,
            chain: 1,
            chain_time: Duration::from_millis(20),
        }
    }
}

/// Context that a session takes when nothing is said.
const CONTEXT_DEFAULT: u32 = 4096;
/// KV groups of a plan, at most; every step lists a block table for each on the stack.
const GROUPS_MAX: usize = 8;

/// Tokens whose keys and values [`Session::pretend`] writes at once.
const PRETENDED: usize = 64;

/// What happens during a generation, in order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event {
    /// The prompt is about to run; this many of its tokens came from the cache.
    Started {
        /// Tokens that need no computing.
        cached: u32,
    },
    /// A token was chosen; the first one ends the prefill.
    Token {
        /// The token.
        token: TokenId,
        /// Natural log of its probability; NaN unless asked for.
        logprob: f32,
    },
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop token, which was not reported, or the caller's word.
    Stop,
    /// The limit of new tokens, or the end of the context.
    Length,
}

/// What to generate.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// The whole sequence so far; what the session still holds of it is not computed again.
    pub prompt: &'a [TokenId],
    /// How tokens are chosen, on the device.
    pub sample: SampleParams,
    /// Chooses on the host instead, where a request asks for more than a device can remember.
    pub sampler: Option<&'a RefCell<Sampler>>,
    /// Most tokens to generate.
    pub max_new: u32,
    /// Tokens that end the generation.
    pub stop: &'a [TokenId],
    /// Report log-probabilities.
    pub logprobs: bool,
}

/// One sequence's state on a device.
pub struct Session {
    program: Box<dyn Program>,
    table: Vec<BlockId>,
    groups: usize,
    stateful: bool,
    context: u32,
    chunk: u32,
    pace: Pace,
    /// Stop tokens that a step may name.
    stops: usize,
    vocab: u32,
    /// Tokens whose keys and values are in the cache.
    held: Vec<TokenId>,
    out: StepOutput,
    /// Rows and times of every step, while somebody wants them.
    timed: Option<Vec<(usize, StepSeconds)>>,
}

/// What an answer is held to, and the memory for what it allows.
struct Held<'a> {
    constraint: &'a mut dyn Constraint,
    allowed: BitSet,
}

impl Held<'_> {
    /// Takes every token out that may not come.
    fn restrict(&mut self, stop: &[TokenId], logits: &mut [f32]) -> Result<()> {
        self.constraint.mask(&mut self.allowed)?;
        let may_end = self.constraint.may_end();
        for &token in stop {
            self.allowed.set(token, may_end);
        }
        if self.allowed.is_empty() {
            return Err(Error::request("holding the answer to its grammar: no token can follow"));
        }
        for (token, logit) in (0..).zip(logits) {
            if !self.allowed.contains(token) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("context", &self.context)
            .field("held", &self.held.len())
            .finish()
    }
}

impl Session {
    /// Prepares a plan on a device for one sequence.
    ///
    /// # Errors
    /// `is_unsupported` for what the device does not do, by name; `is_out_of_memory`.
    pub fn new(device: &dyn Device, plan: &Plan, options: &SessionOptions) -> Result<Session> {
        if plan.kv.len() > GROUPS_MAX {
            return Err(Error::unsupported(format!(
                "preparing the model: its layers have {} kinds of key/value cache (by window, heads and \
                 head width), expected at most {GROUPS_MAX}",
                plan.kv.len()
            )));
        }
        let context = options.context.unwrap_or(plan.hyper.context.min(CONTEXT_DEFAULT)).max(1);
        let chunk = options.chunk.clamp(1, context);
        let blocks = context.div_ceil(device.info().kv_block);
        let limits = Limits {
            slots: 1,
            rows: chunk,
            wanted: chunk,
            kv_blocks: blocks,
            kv_type: options.kv_type,
            act: options.act,
            deterministic: options.deterministic,
            ..Limits::default()
        };
        let program = device.prepare(plan, &limits)?;
        // A state that a token has gone into cannot be taken back.
        let stateful = !plan.states.is_empty();
        let chain = if stateful { 1 } else { options.chain.clamp(1, limits.chain) };
        Ok(Session {
            program,
            table: (0..blocks).map(BlockId).collect(),
            groups: plan.kv.len(),
            stateful,
            context,
            chunk,
            pace: Pace::new(chain, options.chain_time),
            stops: limits.stops as usize,
            vocab: plan.hyper.vocab,
            held: Vec::with_capacity(context.min(1 << 16) as usize),
            out: StepOutput::default(),
            timed: None,
        })
    }

    /// Positions that the session has room for.
    pub fn context(&self) -> u32 {
        self.context
    }

    /// Bytes held by the program.
    pub fn memory(&self) -> MemoryUse {
        self.program.memory()
    }

    /// Forgets the sequence.
    pub fn reset(&mut self) {
        self.held.clear();
    }

    /// Generates after a prompt and reports each event; the callback may end it.
    ///
    /// # Errors
    /// `is_request` for an empty prompt, one longer than the context, or sampling parameters out
    /// of range; `is_device` when the device failed.
    pub fn generate(
        &mut self,
        request: &Request<'_>,
        report: impl FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Finish> {
        self.run(request, None, report)
    }

    /// As [`Session::generate`], with the answer held to a constraint; tokens are then chosen on the host. The end of
    /// what the constraint allows is a stop.
    ///
    /// # Errors
    /// As [`Session::generate`]; `is_request` where no token can follow.
    pub fn generate_held(
        &mut self,
        request: &Request<'_>,
        constraint: &mut dyn Constraint,
        report: impl FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Finish> {
        let params = SamplerParams { base: request.sample, ..SamplerParams::default() };
        let plain = RefCell::new(Sampler::new(params)?);
        let sampler = request.sampler.or(Some(&plain));
        let request = Request { sampler, ..request.clone() };
        let allowed = BitSet::new(self.vocab as usize);
        self.run(&request, Some(Held { constraint, allowed }), report)
    }

    fn run(
        &mut self,
        request: &Request<'_>,
        mut held: Option<Held<'_>>,
        mut report: impl FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Finish> {
        let n = self.check(request.prompt)?;
        request.sample.validate()?;
        let cached = self.reuse(request.prompt);
        if report(Event::Started { cached: cached as u32 }).is_break() || request.max_new == 0 {
            return Ok(if request.max_new == 0 { Finish::Length } else { Finish::Stop });
        }
        let want = match request.sampler {
            Some(_) => Want::Logits,
            None => Want::Token { logprob: request.logprobs },
        };
        for (at, part) in chunks(&request.prompt[cached..], self.chunk as usize) {
            let last = part.len() as u32 - 1;
            let wants = [(last..last + 1, want)];
            let is_last = cached + at + part.len() == n;
            self.step(
                Tokens::Host(part),
                if is_last { &wants } else { &[] },
                Some(request.sample),
            )?;
            self.held.extend_from_slice(part);
        }
        let most = request.max_new.min(self.context - n as u32 + 1);
        for made in 1.. {
            let (token, logprob) = self.chosen(request, held.as_mut())?;
            if request.stop.contains(&token) {
                return Ok(Finish::Stop);
            }
            if report(Event::Token { token, logprob }).is_break() {
                return Ok(Finish::Stop);
            }
            if let Some(Held { constraint, .. }) = &mut held {
                constraint.accept(token)?;
                if constraint.is_done() {
                    return Ok(Finish::Stop);
                }
            }
            if made >= most {
                break;
            }
            if request.sampler.is_none() && self.pace.chains() && request.stop.len() <= self.stops {
                return self.chained(request, token, most - made, report);
            }
            let next = [token];
            let tokens = match request.sampler {
                Some(_) => Tokens::Host(&next),
                None => Tokens::Last { draft: &[] },
            };
            self.step(tokens, &[(0..1, want)], Some(request.sample))?;
            self.held.push(token);
        }
        Ok(Finish::Length)
    }

    /// The token that the last step's wanted row yields, and its log-probability where asked.
    fn chosen(
        &mut self,
        request: &Request<'_>,
        held: Option<&mut Held<'_>>,
    ) -> Result<(TokenId, f32)> {
        let Some(sampler) = request.sampler else {
            let chosen = self.out.tokens.last().expect("invariant: a wanted row yields a token");
            return Ok((chosen.token, chosen.logprob));
        };
        let sum = if request.logprobs { log_sum_exp(&self.out.logits) } else { f64::NAN };
        let before = if request.logprobs { self.out.logits.clone() } else { Vec::new() };
        if let Some(held) = held {
            held.restrict(request.stop, &mut self.out.logits)?;
        }
        let pos = self.held.len() as u32;
        let token = sampler.borrow_mut().choose(&mut self.out.logits, &self.held, pos)?;
        let logit = before.get(token as usize).copied().unwrap_or(f32::NAN);
        Ok((token, (f64::from(logit) - sum) as f32))
    }

    /// Logits of a sequence run from its start: one row of `vocab` elements for every token, or
    /// for the last one alone.
    ///
    /// # Errors
    /// As [`Session::generate`].
    pub fn logits(&mut self, tokens: &[TokenId], all: bool) -> Result<Vec<f32>> {
        self.check(tokens)?;
        self.reset();
        let mut rows = Vec::new();
        for (at, part) in chunks(tokens, self.chunk as usize) {
            let len = part.len() as u32;
            let ends = at + part.len() == tokens.len();
            let every = [(0..len, Want::Logits)];
            let last = [(len - 1..len, Want::Logits)];
            let wants = if all {
                &every[..]
            } else if ends {
                &last[..]
            } else {
                &[]
            };
            self.step(Tokens::Host(part), wants, None)?;
            self.held.extend_from_slice(part);
            rows.extend_from_slice(&self.out.logits);
        }
        Ok(rows)
    }

    /// Computes keys and values of a sequence without asking for anything, reusing what is held.
    ///
    /// # Errors
    /// As [`Session::generate`].
    pub fn prefill(&mut self, tokens: &[TokenId]) -> Result<()> {
        self.check(tokens)?;
        let cached = self.reuse(tokens);
        for (_, part) in chunks(&tokens[cached..], self.chunk as usize) {
            self.step(Tokens::Host(part), &[], None)?;
            self.held.extend_from_slice(part);
        }
        Ok(())
    }

    /// Copies the whole sequence to a session of the same plan on another device, which goes on
    /// from there.
    ///
    /// # Errors
    /// `is_request` where the other session's context is too small or its plan another,
    /// `is_unsupported` where a device cannot hand over.
    pub fn hand_over(&mut self, to: &mut Session) -> Result<()> {
        let n = self.held.len() as u32;
        if n > to.context || self.groups != to.groups || self.vocab != to.vocab {
            return Err(Error::request(format!(
                "handing over: {n} tokens to a session with room for {} (KV groups {} and {})",
                to.context, self.groups, to.groups
            )));
        }
        let mut data = Vec::new();
        for group in 0..self.groups as u32 {
            let tokens = 0..n;
            self.program.command(Cmd::ReadKv {
                group,
                table: &self.table,
                tokens: tokens.clone(),
                out: &mut data,
            })?;
            to.program.command(Cmd::WriteKv { group, table: &to.table, tokens, data: &data })?;
        }
        if self.stateful {
            self.program.command(Cmd::ReadState { slot: SlotId(0), out: &mut data })?;
            to.program.command(Cmd::WriteState { slot: SlotId(0), data: &data })?;
        }
        to.held.clone_from(&self.held);
        Ok(())
    }

    /// Log-probability (natural) of every token given those before it, from the second on.
    ///
    /// # Errors
    /// As [`Session::generate`].
    pub fn logprobs(&mut self, tokens: &[TokenId]) -> Result<Vec<f32>> {
        self.check(tokens)?;
        self.reset();
        let mut all = Vec::new();
        let known = &tokens[..tokens.len() - 1];
        for (at, part) in chunks(known, self.chunk as usize) {
            let next = |i: u32| tokens[at + i as usize + 1];
            let wants: Vec<_> =
                (0..part.len() as u32).map(|i| (i..i + 1, Want::LogprobOf(next(i)))).collect();
            self.step(Tokens::Host(part), &wants, None)?;
            self.held.extend_from_slice(part);
            all.extend(self.out.logprobs.iter().map(|(_, v)| *v));
        }
        Ok(all)
    }

    /// Runs tokens at the end of the sequence and tells the time of every kind of op; the last
    /// row is asked for a token.
    ///
    /// # Errors
    /// As [`Session::generate`].
    pub fn profile(&mut self, tokens: &[TokenId]) -> Result<Vec<OpTime>> {
        self.check(tokens)?;
        let last = tokens.len() as u32 - 1;
        let pos = self.held.len() as u32;
        let tables = vec![&self.table[..]; self.groups];
        let step = SeqStep {
            slot: SlotId(0),
            tokens: Tokens::Host(tokens),
            pos,
            tables: &tables,
            wants: &[(last..last + 1, Want::Token { logprob: false })],
            sample: None,
            max_new: 1,
            stop: &[],
        };
        let times = self.program.profile(&[step], &mut self.out)?;
        self.held.extend_from_slice(tokens);
        Ok(times)
    }

    /// The times of the last [`Session::profile`] kernel by kernel; empty where every op is one.
    pub fn kernel_times(&self) -> Vec<OpTime> {
        self.program.kernel_times()
    }

    /// What the last token cost, where the device counts.
    pub fn step_report(&self) -> Option<StepReport> {
        self.program.step_report()
    }

    /// Where the time of the last step went, where the device tells.
    pub fn step_seconds(&self) -> Option<StepSeconds> {
        self.program.step_seconds()
    }

    /// Notes from now on how many rows each step has and where its time goes.
    pub fn time(&mut self) {
        self.timed = Some(Vec::new());
    }

    /// What [`Session::time`] noted; nothing where the device does not tell.
    pub fn timed(&self) -> &[(usize, StepSeconds)] {
        self.timed.as_deref().unwrap_or_default()
    }

    /// Takes a sequence for computed, with keys and values of no meaning: what a step at a depth
    /// costs does not depend on them.
    ///
    /// # Errors
    /// As [`Session::generate`]; `is_unsupported` for a model with states.
    pub fn pretend(&mut self, plan: &Plan, tokens: &[TokenId]) -> Result<()> {
        self.check(tokens)?;
        if self.stateful {
            return Err(Error::unsupported("a model with states cannot start at a depth"));
        }
        for (group, g) in plan.kv.iter().enumerate() {
            let each = g.layers.len() * (g.heads * (g.k_width + g.v_width)) as usize;
            for from in (0..tokens.len()).step_by(PRETENDED) {
                let n = PRETENDED.min(tokens.len() - from);
                // Small, and different from token to token.
                let data: Vec<f32> = (0..n * each)
                    .map(|i| ((i * 2_654_435_761) % 1021) as f32 / 1021.0 - 0.5)
                    .collect();
                self.program.command(Cmd::WriteKv {
                    group: group as u32,
                    table: &self.table,
                    tokens: from as u32..(from + n) as u32,
                    data: &data,
                })?;
            }
        }
        self.held.clear();
        self.held.extend_from_slice(tokens);
        Ok(())
    }

    fn check(&self, prompt: &[TokenId]) -> Result<usize> {
        let n = prompt.len();
        if n == 0 {
            return Err(Error::request(
                "generating: the prompt has no tokens, expected at least one",
            ));
        }
        if n > self.context as usize {
            return Err(Error::request(format!(
                "generating: the prompt has {n} tokens, the context holds {}; use --ctx to enlarge it",
                self.context
            )));
        }
        if let Some(t) = prompt.iter().find(|t| **t >= self.vocab) {
            return Err(Error::request(format!(
                "generating: token {t} is not in the vocabulary of {}",
                self.vocab
            )));
        }
        Ok(n)
    }

    /// Keeps what the cache already holds of the prompt and returns how much; at least the last
    /// token is computed again, for its logits. A state cannot be taken back by a few tokens.
    fn reuse(&mut self, prompt: &[TokenId]) -> usize {
        let same = self.held.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let keep = same.min(prompt.len() - 1);
        let keep = if self.stateful && keep < self.held.len() { 0 } else { keep };
        self.held.truncate(keep);
        keep
    }

    fn step(
        &mut self,
        tokens: Tokens<'_>,
        wants: &[(std::ops::Range<u32>, Want)],
        sample: Option<SampleParams>,
    ) -> Result<()> {
        let ticket = self.submit(tokens, wants, sample, (1, &[]))?;
        self.program.wait(ticket, &mut self.out)?;
        if let (Some(timed), Some(seconds)) = (&mut self.timed, self.program.step_seconds()) {
            timed.push((tokens.rows(), seconds));
        }
        Ok(())
    }

    /// Hands over a step at the end of the sequence that may produce so many tokens, and ends at a stop token.
    fn submit(
        &mut self,
        tokens: Tokens<'_>,
        wants: &[(std::ops::Range<u32>, Want)],
        sample: Option<SampleParams>,
        (max_new, stop): (u32, &[TokenId]),
    ) -> Result<Ticket> {
        let tables = [&self.table[..]; GROUPS_MAX];
        let step = SeqStep {
            slot: SlotId(0),
            tokens,
            pos: self.held.len() as u32,
            tables: &tables[..self.groups],
            wants,
            sample,
            max_new,
            stop,
        };
        Ok(self.program.submit(&[step])?)
    }
}

/// Parts of at most `size` with their offsets.
fn chunks(tokens: &[TokenId], size: usize) -> impl Iterator<Item = (usize, &[TokenId])> {
    tokens.chunks(size).enumerate().map(move |(i, part)| (i * size, part))
}
