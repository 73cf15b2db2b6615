//! Sessions in chains of several tokens on a device that shows them one by one: the same answers as token by token.

use std::ops::ControlFlow;
use std::time::Duration;

use fornax_engine::{Event, Finish, Request, SampleParams, Session, SessionOptions};
use fornax_plan::reference::ReferenceDevice;
use fornax_plan::{
    Cmd, Device, DeviceInfo, KvType, Limits, MemoryUse, OpTime, Plan, Program, Progress, Refusal,
    Result, SeqStep, SlotId, StepOutput, Ticket, TokenId,
};

use crate::fixture::Fixture;

/// The reference, but a ticket shows one token more at every second look.
struct Slow(ReferenceDevice);

struct SlowProgram {
    inner: Box<dyn Program>,
    looks: usize,
    /// Tokens asked for, ticket by ticket.
    asked: Vec<u32>,
}

impl Device for Slow {
    fn info(&self) -> DeviceInfo {
        self.0.info()
    }
    fn supports(&self, plan: &Plan, limits: &Limits) -> Vec<Refusal> {
        self.0.supports(plan, limits)
    }
    fn prepare(&self, plan: &Plan, limits: &Limits) -> Result<Box<dyn Program>> {
        let inner = self.0.prepare(plan, limits)?;
        Ok(Box::new(SlowProgram { inner, looks: 0, asked: Vec::new() }))
    }
}

impl Program for SlowProgram {
    fn submit(&mut self, step: &[SeqStep<'_>]) -> Result<Ticket> {
        self.looks = 0;
        self.asked.push(step[0].max_new);
        self.inner.submit(step)
    }
    fn poll(&mut self, ticket: &Ticket, out: &mut StepOutput) -> Result<Progress> {
        let progress = self.inner.poll(ticket, out)?;
        let shown = self.looks / 2;
        self.looks += 1;
        if shown >= out.tokens.len() {
            return Ok(progress);
        }
        out.tokens.truncate(shown);
        Ok(Progress::Running)
    }
    fn wait(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<()> {
        self.inner.wait(ticket, out)
    }
    fn stop(&mut self, slot: SlotId) {
        self.inner.stop(slot);
    }
    fn command(&mut self, command: Cmd<'_>) -> Result<()> {
        self.inner.command(command)
    }
    fn memory(&self) -> MemoryUse {
        // A way to tell the test how many tokens a ticket was asked for.
        MemoryUse {
            scratch: self.asked.iter().copied().max().unwrap_or(0).into(),
            ..MemoryUse::default()
        }
    }
    fn grow_kv(&mut self, blocks: u32) -> Result<()> {
        self.inner.grow_kv(blocks)
    }
    fn profile(&mut self, step: &[SeqStep<'_>], out: &mut StepOutput) -> Result<Vec<OpTime>> {
        self.inner.profile(step, out)
    }
}

fn session(f: &Fixture, chain: u32) -> Session {
    let options = SessionOptions {
        context: Some(64),
        kv_type: KvType::F32,
        chain,
        chain_time: Duration::MAX,
        ..SessionOptions::default()
    };
    Session::new(&Slow(ReferenceDevice::default()), &f.plan, &options).unwrap()
}

/// The answer of at most so many tokens; the caller ends it after `enough`.
fn answer(
    s: &mut Session,
    prompt: &[TokenId],
    (most, enough): (u32, usize),
    stop: &[TokenId],
) -> (Vec<TokenId>, Finish, u32) {
    let sample =
        SampleParams { temperature: 0.9, seed: 5, repeat_penalty: 1.1, ..SampleParams::default() };
    let request = Request { prompt, sample, sampler: None, max_new: most, stop, logprobs: true };
    let (mut ids, mut reused) = (Vec::new(), 0);
    let finish = s.generate(&request, |event| {
        match event {
            Event::Started { cached } => reused = cached,
            Event::Token { token, logprob } => {
                assert!(logprob <= 0.0);
                ids.push(token);
            }
        }
        if ids.len() == enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    (ids, finish.unwrap(), reused)
}

#[test]
fn chains_answer_as_single_tokens_do() {
    for model in ["llama3", "gemma3-q8_0", "lfm2"] {
        let f = Fixture::load(model);
        let prompt = &f.prompts[1].tokens;
        let (mut single, mut chained) = (session(&f, 1), session(&f, 5));
        let (all, finish, _) = answer(&mut single, prompt, (14, 99), &[]);
        assert_eq!((all.len(), finish), (14, Finish::Length));
        assert_eq!(answer(&mut chained, prompt, (14, 99), &[]).0, all, "{model}");
        // A model with states goes token by token.
        let most = if model == "lfm2" { 1 } else { 5 };
        assert_eq!(chained.memory().scratch, most, "{model}");
        assert_eq!(single.memory().scratch, 1);
        // A stop token in the middle of a chain, and a caller who has enough there.
        let stop = [all[8]];
        let at = all.iter().position(|t| *t == stop[0]).unwrap();
        for s in [&mut single, &mut chained] {
            s.reset();
            assert_eq!(answer(s, prompt, (14, 99), &stop), (all[..at].to_vec(), Finish::Stop, 0));
            s.reset();
            assert_eq!(answer(s, prompt, (14, 8), &[]), (all[..8].to_vec(), Finish::Stop, 0));
            // What was computed beyond is not taken for the conversation: it goes on as if it had never been.
            let mut turn = prompt.clone();
            turn.extend(&all[..8]);
            turn.extend([3, 1]);
            let (next, _, reused) = answer(s, &turn, (6, 99), &[]);
            let fresh = answer(&mut session(&f, 1), &turn, (6, 99), &[]);
            assert_eq!(next, fresh.0, "{model}");
            assert_eq!(reused as usize, prompt.len() + 7, "{model}");
        }
    }
}

#[test]
fn the_end_of_the_context_ends_a_chain() {
    let f = Fixture::load("llama3");
    let prompt: Vec<TokenId> = (0..60).map(|i| i % 50).collect();
    let (ids, finish, _) = answer(&mut session(&f, 16), &prompt, (99, 99), &[]);
    assert_eq!((ids.len(), finish), (5, Finish::Length));
    assert_eq!(answer(&mut session(&f, 1), &prompt, (99, 99), &[]).0, ids);
}
