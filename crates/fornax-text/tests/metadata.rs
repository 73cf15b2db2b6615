//! Tokenizers from metadata that is wrong in one place: errors that name the key, never a panic. It must
//! not need any file.

use fornax_gguf::{Array, Metadata, StrArray, Value};
use fornax_text::{EncodeOptions, Tokenizer};

fn strings<'a>(list: impl IntoIterator<Item = &'a str>) -> Value {
    Value::from(list.into_iter().collect::<StrArray>())
}

/// A small SentencePiece vocabulary.
fn spm() -> Metadata {
    let mut meta = Metadata::new();
    meta.set("tokenizer.ggml.model", "llama");
    meta.set("tokenizer.ggml.tokens", strings(["<unk>", "<s>", "</s>", "▁", "a", "▁a"]));
    meta.set("tokenizer.ggml.scores", vec![0f32, 0.0, 0.0, -3.0, -2.0, -1.0]);
    meta.set("tokenizer.ggml.token_type", vec![2i32, 3, 3, 1, 1, 1]);
    meta.set("tokenizer.ggml.bos_token_id", 1u32);
    meta.set("tokenizer.ggml.eos_token_id", 2u32);
    meta
}

/// A small byte-level vocabulary.
fn bpe() -> Metadata {
    let mut meta = Metadata::new();
    meta.set("tokenizer.ggml.model", "gpt2");
    meta.set("tokenizer.ggml.pre", "gpt-2");
    meta.set("tokenizer.ggml.tokens", strings(["a", "b", "ab", "<|end|>"]));
    meta.set("tokenizer.ggml.merges", strings(["a b"]));
    meta.set("tokenizer.ggml.token_type", vec![1i32, 1, 1, 3]);
    meta
}

fn with(mut meta: Metadata, key: &str, value: impl Into<Value>) -> Metadata {
    meta.set(&format!("tokenizer.ggml.{key}"), value);
    meta
}

#[test]
fn sound_metadata() {
    let t = Tokenizer::from_gguf(&spm()).expect("a tokenizer");
    let options = EncodeOptions { special: false, bos: true };
    assert_eq!(t.encode("a a", options), [1, 5, 5]);
    let t = Tokenizer::from_gguf(&bpe()).expect("a tokenizer");
    assert_eq!(t.encode("abba", options), [2, 1, 0]);
    assert_eq!(t.bos(), None);
    assert!(t.is_end_of_generation(3));
    // Any integer type will do, and some converters write -1 for none.
    let meta = with(with(spm(), "bos_token_id", 1u64), "eos_token_id", -1i32);
    let t = Tokenizer::from_gguf(&meta).expect("a tokenizer");
    assert_eq!((t.bos(), t.eos()), (Some(1), None));
    let t = Tokenizer::from_gguf(&with(spm(), "token_type", vec![2u8, 3, 3, 1, 1, 1]));
    assert!(t.expect("a tokenizer").is_control(1));
    // Ends of generation may have keys of their own.
    let t = Tokenizer::from_gguf(&with(spm(), "eot_token_id", 4u32)).expect("a tokenizer");
    assert_eq!(t.ends_of_generation(), [2, 4]);
}

#[test]
fn wrong_metadata() {
    let wrong = [
        ("model", with(spm(), "model", "bert")),
        ("model", with(spm(), "model", 3u32)),
        ("pre", with(bpe(), "pre", "unheard-of")),
        ("pre", with(bpe(), "pre", "")),
        ("tokens", with(spm(), "tokens", vec![1u32, 2, 3])),
        ("tokens", with(spm(), "tokens", strings([]))),
        ("score", with(spm(), "scores", vec![0u8; 6])),
        ("score", with(spm(), "scores", vec![0f32; 5])),
        ("token_type", with(spm(), "token_type", vec![9i32; 6])),
        ("token_type", with(spm(), "token_type", vec![1f32; 6])),
        ("token type", with(spm(), "token_type", vec![1i32; 7])),
        ("merge", with(bpe(), "merges", strings(["ab"]))),
        ("merges", with(bpe(), "merges", vec![1i32])),
        ("bos", with(spm(), "bos_token_id", 6u32)),
        ("eos_token_id", with(spm(), "eos_token_id", "x")),
        ("eos", with(spm(), "eos_token_id", 1u64 << 40)),
        ("unknown", with(spm(), "unknown_token_id", 77u32)),
        ("add_bos_token", with(spm(), "add_bos_token", 1u32)),
        ("add_space_prefix", with(spm(), "add_space_prefix", "yes")),
        ("tokens", with(spm(), "tokens", Value::Array(Array::Nested(vec![])))),
    ];
    for (needle, meta) in wrong {
        let error = Tokenizer::from_gguf(&meta).expect_err(needle);
        assert!(error.to_string().contains(needle), "{needle}: {error}");
        let classes = [error.is_malformed(), error.is_unsupported(), error.is_missing()];
        assert_eq!(classes.iter().filter(|&&class| class).count(), 1, "{error:?}");
    }
    for key in ["model", "tokens"] {
        let mut meta = spm();
        meta.remove(&format!("tokenizer.ggml.{key}"));
        let error = Tokenizer::from_gguf(&meta).expect_err(key);
        assert!(error.is_missing() && error.to_string().contains(key), "{error:?}");
    }
    let mut meta = spm();
    meta.remove("tokenizer.ggml.scores");
    assert!(Tokenizer::from_gguf(&meta).expect_err("no scores").is_malformed());
}

#[test]
fn messages_are_worded_as_agreed() {
    let message = |meta: Metadata| Tokenizer::from_gguf(&meta).expect_err("wrong").to_string();
    assert_eq!(
        message(with(bpe(), "pre", "unheard-of")),
        "reading the tokenizer: tokenizer.ggml.pre is \"unheard-of\", a splitting rule that is not known \
         here; another rule would give wrong tokens"
    );
    assert_eq!(
        message(with(spm(), "scores", vec![0f32; 5])),
        "reading the vocabulary: 5 scores for 6 tokens, expected one each"
    );
    assert_eq!(
        message(with(spm(), "bos_token_id", 6u32)),
        "reading the vocabulary: the bos token is 6, but there are 6 tokens"
    );
    assert_eq!(
        message(with(spm(), "model", "bert")),
        "reading the tokenizer: tokenizer.ggml.model is \"bert\"; known are gpt2 (byte-level BPE) and llama \
         (SentencePiece)"
    );
}
