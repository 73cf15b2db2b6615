//! Time grows with the length of the text and nothing else, whatever the text. A quadratic step would take
//! hours here, so that the bounds can be generous. It must not compare speeds.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use fornax_gguf::Gguf;
use fornax_text::{EncodeOptions, ModelKind, TokenKind, Tokenizer, VocabSpec, vocab_spec};

const FAMILIES: [&str; 11] = [
    "deepseek-llm",
    "deepseek-v3",
    "gemma-spm",
    "gpt-4o",
    "gpt2",
    "llama-spm",
    "llama3",
    "qwen2",
    "refact",
    "smollm",
    "tekken",
];
const RUNS: [&str; 14] =
    ["A", "a", "-", "_", " ", "\n", "é", "漢", "🙂", "\0", "ab", "\u{301}", " \n", "A漢"];
const SPECIAL: EncodeOptions = EncodeOptions { special: true, bos: false };

fn spec(family: &str) -> VocabSpec {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tokenizers");
    let gguf = Gguf::open(&folder.join(family).join("vocab.gguf")).expect("the fixture opens");
    vocab_spec(gguf.metadata()).expect("a vocabulary")
}

#[track_caller]
fn encode_within(tokenizer: &Tokenizer, name: &str, text: &str, limit: Duration) -> usize {
    let start = Instant::now();
    let ids = tokenizer.encode(text, SPECIAL);
    let took = start.elapsed();
    assert!(took < limit, "{name}: {} bytes took {took:?}", text.len());
    assert_eq!(tokenizer.decode(&ids, false), text.replace('\u{2581}', " "), "{name}");
    ids.len()
}

#[test]
fn long_runs_in_every_family() {
    for family in FAMILIES {
        let mut spec = spec(family);
        if spec.add_space_prefix == Some(true) {
            // Decoding then gives the text back.
            spec.add_space_prefix = Some(false);
        }
        let tokenizer = Tokenizer::new(&spec).expect("a tokenizer");
        for run in RUNS {
            let text = run.repeat((1 << 17) / run.len());
            // NFC leaves runs of these as they are.
            encode_within(&tokenizer, &format!("{family} {run:?}"), &text, Duration::from_secs(5));
            // A run that something else ends takes other paths.
            let text = format!("{}9x", run.repeat((1 << 15) / run.len()));
            encode_within(
                &tokenizer,
                &format!("{family} {run:?}9x"),
                &text,
                Duration::from_secs(2),
            );
        }
    }
}

#[test]
fn a_mebibyte_of_one_character() {
    for family in ["llama3", "smollm", "llama-spm"] {
        let mut spec = spec(family);
        spec.add_space_prefix = Some(false);
        let tokenizer = Tokenizer::new(&spec).expect("a tokenizer");
        for run in ["A", " ", "é", "🙂", "\0"] {
            let text = run.repeat((1 << 20) / run.len());
            encode_within(&tokenizer, &format!("{family} {run:?}"), &text, Duration::from_secs(10));
        }
    }
}

#[test]
fn thousands_of_turns_against_a_thousand_special_tokens() {
    let mut spec = spec("qwen2");
    for i in 0..1000 {
        spec.tokens.push(format!("<|im_special_{i}|>"));
        spec.kinds.push(TokenKind::Control);
    }
    let tokenizer = Tokenizer::new(&spec).expect("a tokenizer");
    let text = "<|im_start|>user\nhi<|im_end|>\n".repeat(4000);
    let count = encode_within(&tokenizer, "turns", &text, Duration::from_secs(5));
    assert_eq!(count % 4000, 0);
    // Beginnings that never become a token.
    let text = "<|im_special_".repeat(40_000);
    encode_within(&tokenizer, "beginnings", &text, Duration::from_secs(5));
}

#[test]
fn a_large_vocabulary_loads_quickly() {
    let count = 262_144u32;
    let mut tokens = Vec::new();
    let mut scores = Vec::new();
    for i in 0..count {
        tokens.push(format!("▁w{i:x}"));
        scores.push(-(i as f32));
    }
    let mut spec = VocabSpec::new(ModelKind::Spm, "", tokens);
    spec.scores = scores;
    let start = Instant::now();
    let tokenizer = Tokenizer::new(&spec).expect("a tokenizer");
    let took = start.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
    assert_eq!(tokenizer.token_id("▁w1ffff"), Some(0x1ffff));
}
