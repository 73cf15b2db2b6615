//! A session whose answers are held to a grammar, on a tiny model of random weights.

use std::cell::RefCell;
use std::ops::ControlFlow;
use std::path::Path;

use fornax_engine::constrain::{Constrainer, Grammar};
use fornax_engine::sampler::{Sampler, SamplerParams};
use fornax_engine::serve::BitSet;
use fornax_engine::{Event, Finish, Model, Request, SampleParams, Session, SessionOptions};
use fornax_plan::reference::ReferenceDevice;
use serde_json::json;

fn tiny() -> (Model, Session) {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models/llama3-q8_0/model.gguf");
    let model = Model::open(&path).unwrap();
    let options = SessionOptions::default();
    let session = Session::new(&ReferenceDevice::default(), model.plan(), &options).unwrap();
    (model, session)
}

#[test]
fn a_session_writes_what_the_grammar_says_and_stops_where_it_ends() {
    let (model, mut session) = tiny();
    let constrainer = Constrainer::new(model.tokenizer());
    let schema =
        json!({"type": "array", "items": {"enum": ["one", "two"]}, "minItems": 2, "maxItems": 2});
    let compiled = constrainer.compile(&Grammar::JsonSchema(schema)).unwrap();
    let prompt = model.encode("Once upon a time");
    // The comma would be forced; forbidding the space leaves one way to write the rest.
    let space = model.tokenizer().token_id("Ġ").unwrap();
    let biased =
        SamplerParams { logit_bias: vec![(space, f32::NEG_INFINITY)], ..SamplerParams::default() };
    let biased = RefCell::new(Sampler::new(biased).unwrap());
    for (temperature, sampler) in [(0.0, None), (2.0, None), (0.0, Some(&biased))] {
        let sample = SampleParams { temperature, seed: 7, ..SampleParams::default() };
        let request = Request {
            prompt: &prompt,
            sample,
            sampler,
            max_new: 60,
            stop: model.tokenizer().ends_of_generation(),
            logprobs: true,
        };
        let mut ids = Vec::new();
        let finish = session.generate_held(&request, &mut *compiled.start(), |event| {
            if let Event::Token { token, logprob } = event {
                assert!(logprob < 0.0, "of the whole distribution, not of what is allowed");
                ids.push(token);
            }
            ControlFlow::Continue(())
        });
        assert_eq!(finish.unwrap(), Finish::Stop);
        let text = model.tokenizer().decode(&ids, false);
        let value: Vec<String> =
            serde_json::from_str(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
        assert!(value.len() == 2 && value.iter().all(|v| v == "one" || v == "two"), "{text}");
        assert!(sampler.is_none() || !ids.contains(&space));
    }
}

#[test]
fn a_length_that_is_too_short_is_no_error() {
    let (model, mut session) = tiny();
    let compiled =
        Constrainer::new(model.tokenizer()).compile(&Grammar::Regex("a{50}".into())).unwrap();
    let prompt = model.encode("x");
    let request = Request {
        prompt: &prompt,
        sample: SampleParams::default(),
        sampler: None,
        max_new: 3,
        stop: model.tokenizer().ends_of_generation(),
        logprobs: false,
    };
    let finish =
        session.generate_held(&request, &mut *compiled.start(), |_| ControlFlow::Continue(()));
    assert_eq!(finish.unwrap(), Finish::Length);
}

#[test]
fn tokens_are_read_ahead_of_the_first_grammar_and_change_nothing() {
    let (model, _) = tiny();
    let constrainer = || Constrainer::new(model.tokenizer());
    let first_mask = |from: &Constrainer| {
        let compiled = from.compile(&Grammar::Regex("[a-c]x{2,9}".into())).unwrap();
        let mut mask = BitSet::new(model.tokenizer().vocab_len());
        compiled.start().mask(&mut mask).unwrap();
        mask.words().to_vec()
    };
    let early = constrainer();
    assert!(early.compile(&Grammar::JsonSchema(json!({"uniqueItems": true}))).is_err());
    assert!(!early.is_prepared(), "what is refused at sight needs no tokens");
    early.prepare().unwrap();
    assert!(early.is_prepared());
    early.prepare().unwrap();
    // A grammar that comes meanwhile waits for the same tokens.
    let meanwhile = constrainer();
    let mask = std::thread::scope(|scope| {
        scope.spawn(|| meanwhile.prepare().unwrap());
        scope.spawn(|| first_mask(&meanwhile)).join().unwrap()
    });
    let late = constrainer();
    assert_eq!(first_mask(&early), mask);
    assert_eq!(first_mask(&late), mask);
    assert!(meanwhile.is_prepared() && late.is_prepared());
    assert!(mask.iter().map(|w| w.count_ones()).sum::<u32>() > 0);
}
