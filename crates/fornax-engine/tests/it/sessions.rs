//! Sessions: reuse of what is held, hand-over between devices, perplexity, limits.

use std::cell::RefCell;
use std::ops::ControlFlow;

use fornax_engine::sampler::{Sampler, SamplerParams};
use fornax_engine::{Event, Finish, Request, SampleParams, Session, SessionOptions, perplexity};
use fornax_plan::reference::ReferenceDevice;
use fornax_plan::{KvType, TokenId};

use crate::fixture::Fixture;

fn session(f: &Fixture, kv_block: u32, context: u32) -> Session {
    let options = SessionOptions {
        context: Some(context),
        chunk: 7,
        kv_type: KvType::F32,
        ..SessionOptions::default()
    };
    Session::new(&ReferenceDevice { kv_block, ..Default::default() }, &f.plan, &options).unwrap()
}

fn request<'a>(prompt: &'a [TokenId], max_new: u32, stop: &'a [TokenId]) -> Request<'a> {
    let sample = SampleParams { temperature: 0.9, seed: 5, ..SampleParams::default() };
    Request { prompt, sample, sampler: None, max_new, stop, logprobs: true }
}

/// Cached tokens and generated ids.
fn generate(s: &mut Session, r: &Request<'_>) -> (u32, Vec<TokenId>, Finish) {
    let (mut cached, mut ids) = (u32::MAX, Vec::new());
    let finish = s
        .generate(r, |event| {
            match event {
                Event::Started { cached: c } => cached = c,
                Event::Token { token, logprob } => {
                    assert!(logprob <= 0.0);
                    ids.push(token);
                }
            }
            ControlFlow::Continue(())
        })
        .unwrap();
    (cached, ids, finish)
}

#[test]
fn a_second_turn_computes_only_what_is_new_and_answers_the_same() {
    for model in ["llama3", "lfm2", "gemma3-q8_0", "gptoss-mxfp4"] {
        let f = Fixture::load(model);
        let prompt = &f.prompts[1].tokens;
        let mut warm = session(&f, 16, 128);
        let (cached, first, _) = generate(&mut warm, &request(prompt, 9, &[]));
        assert_eq!((cached, first.len()), (0, 9));
        let mut turn = prompt.clone();
        turn.extend(&first);
        turn.extend([3, 1, 4]);
        let (cached, again, _) = generate(&mut warm, &request(&turn, 9, &[]));
        // The last token of an answer is never run, so it is not held.
        assert_eq!(cached as usize, prompt.len() + 8, "{model}");
        assert_eq!(
            again,
            generate(&mut session(&f, 32, 128), &request(&turn, 9, &[])).1,
            "{model}"
        );
        // The same prompt once more: an attention model keeps all but the last token.
        let (cached, repeat, _) = generate(&mut warm, &request(&turn, 9, &[]));
        let stateful = !f.plan.states.is_empty();
        assert_eq!(cached as usize, if stateful { 0 } else { turn.len() - 1 }, "{model}");
        assert_eq!(repeat, again, "{model}");
    }
}

#[test]
fn a_sequence_goes_on_where_it_is_handed_over() {
    for model in ["llama3", "lfm2", "gemma2", "mixtral"] {
        let f = Fixture::load(model);
        let prompt = &f.prompts[2].tokens;
        let alone = generate(&mut session(&f, 16, 128), &request(prompt, 12, &[])).1;
        let (mut from, mut to) = (session(&f, 16, 128), session(&f, 8, 96));
        from.prefill(&prompt[..prompt.len() - 1]).unwrap();
        from.hand_over(&mut to).unwrap();
        let (cached, ids, _) = generate(&mut to, &request(prompt, 12, &[]));
        assert_eq!(cached as usize, prompt.len() - 1, "{model}");
        assert_eq!(ids, alone, "{model}");
    }
    let f = Fixture::load("llama3");
    let mut from = session(&f, 16, 128);
    from.prefill(&f.prompts[2].tokens).unwrap();
    assert!(from.hand_over(&mut session(&f, 16, 8)).unwrap_err().is_request());
}

#[test]
fn limits_are_kept_to_the_token() {
    let f = Fixture::load("llama3-q8_0");
    let prompt = &f.prompts[1].tokens;
    let n = prompt.len() as u32;
    for max_new in [0, 1, 2, 3] {
        let (_, ids, finish) = generate(&mut session(&f, 16, 64), &request(prompt, max_new, &[]));
        assert_eq!((ids.len() as u32, finish), (max_new, Finish::Length));
    }
    // A context of n + 4 holds n + 4 tokens and yields one more.
    let (_, ids, finish) = generate(&mut session(&f, 4, n + 4), &request(prompt, u32::MAX, &[]));
    assert_eq!((ids.len(), finish), (5, Finish::Length));
    let (_, ids, _) = generate(&mut session(&f, 16, 64), &request(prompt, 9, &[]));
    let (_, stopped, finish) = generate(&mut session(&f, 16, 64), &request(prompt, 9, &ids[3..4]));
    let first = ids.iter().position(|t| *t == ids[3]).unwrap();
    assert_eq!((stopped.as_slice(), finish), (&ids[..first], Finish::Stop));
}

#[test]
fn requests_that_cannot_be_served_are_named() {
    let f = Fixture::load("llama3-q8_0");
    let mut s = session(&f, 16, 16);
    let mut refuse = |prompt: &[TokenId], word: &str| {
        let e = s.generate(&request(prompt, 4, &[]), |_| ControlFlow::Continue(())).unwrap_err();
        assert!(e.is_request() && e.to_string().contains(word), "{e}");
    };
    refuse(&[], "no tokens");
    refuse(&[1; 17], "17 tokens");
    refuse(&[1, 1_000_000], "1000000");
    let mut bad = request(&[1], 4, &[]);
    bad.sample.top_p = 2.0;
    assert!(
        s.generate(&bad, |_| ControlFlow::Continue(())).unwrap_err().to_string().contains("top_p")
    );
    generate(&mut s, &request(&[1; 16], 4, &[]));
}

#[test]
fn perplexity_of_one_window_is_that_of_the_logits_and_windows_overlap() {
    let f = Fixture::load("llama3");
    let tokens = &f.prompts[2].tokens;
    let mut s = session(&f, 16, 64);
    let rows = s.logits(tokens, true).unwrap();
    let vocab = f.plan.hyper.vocab as usize;
    let nll: f64 = (1..tokens.len())
        .map(|i| {
            -f64::from(fornax_plan::sample::logprob_of(
                &rows[(i - 1) * vocab..i * vocab],
                tokens[i],
            ))
        })
        .sum();
    let whole = perplexity(&mut s, tokens, 60, None, |_| ()).unwrap();
    assert_eq!(whole.tokens, tokens.len() - 1);
    assert!((whole.value.ln() - nll / (tokens.len() - 1) as f64).abs() < 1e-6);
    assert!(whole.standard_error > 0.0);
    let windows = perplexity(&mut s, tokens, 16, Some(1), |_| ()).unwrap();
    assert_eq!(windows.tokens, tokens.len() - 1);
    assert!(perplexity(&mut s, tokens, 100, None, |_| ()).unwrap_err().is_request());
}

#[test]
fn a_sampler_on_the_host_draws_what_the_device_draws() {
    for model in ["llama3", "lfm2"] {
        let f = Fixture::load(model);
        let prompt = &f.prompts[1].tokens;
        let base = request(prompt, 9, &[]);
        let (_, device, _) = generate(&mut session(&f, 16, 64), &base);
        let params = SamplerParams { base: base.sample, ..Default::default() };
        let sampler = RefCell::new(Sampler::new(params.clone()).unwrap());
        let on_host = Request { sampler: Some(&sampler), ..base.clone() };
        assert_eq!(generate(&mut session(&f, 16, 64), &on_host).1, device, "{model}");
        let banned = SamplerParams { logit_bias: vec![(device[0], f32::NEG_INFINITY)], ..params };
        assert!(!banned.on_device());
        let sampler = RefCell::new(Sampler::new(banned).unwrap());
        let without = Request { sampler: Some(&sampler), ..base };
        assert!(!generate(&mut session(&f, 16, 64), &without).1.contains(&device[0]), "{model}");
    }
}
