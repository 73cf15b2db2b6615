//! Every shared tokenizer fixture, exactly: ids, ids with BOS, and both decodes, as Hugging Face's
//! tokenizers give them. It must not know how the tokenizer works.

use std::path::PathBuf;
use std::sync::Arc;

use fornax_gguf::Gguf;
use fornax_text::{EncodeOptions, StreamDecoder, Tokenizer};
use serde_json::Value;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tokenizers")
}

fn load(family: &str) -> (Arc<Tokenizer>, Value) {
    let folder = folder().join(family);
    let gguf = Gguf::open(&folder.join("vocab.gguf")).expect("the fixture opens");
    let tokenizer = Tokenizer::from_gguf(gguf.metadata()).expect("the tokenizer is known");
    let text = std::fs::read_to_string(folder.join("expected.json")).expect("the fixture is there");
    (Arc::new(tokenizer), serde_json::from_str(&text).expect("the fixture is JSON"))
}

fn ids(case: &Value, key: &str) -> Vec<u32> {
    let list = case[key].as_array().expect("a list of ids");
    list.iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

fn check(family: &str) {
    let (tokenizer, expected) = load(family);
    assert_eq!(Some(tokenizer.vocab_len() as u64), expected["vocab_size"].as_u64());
    assert_eq!(Some(tokenizer.adds_bos()), expected["add_bos"].as_bool());
    assert_eq!(tokenizer.bos().map(u64::from), expected["bos"].as_u64());
    assert_eq!(tokenizer.eos().map(u64::from), expected["eos"].as_u64());
    let cases = expected["cases"].as_array().expect("cases");
    assert!(cases.len() >= 80, "{family}: only {} cases", cases.len());
    let mut wrong = Vec::new();
    for case in cases {
        let text = case["text"].as_str().expect("a text");
        let plain = tokenizer.encode(text, EncodeOptions { special: true, bos: false });
        let with_bos = tokenizer.encode(text, EncodeOptions { special: true, bos: true });
        let want = ids(case, "ids");
        if plain != want {
            wrong.push(format!("ids of {text:?}\n  got  {plain:?}\n  want {want:?}"));
        }
        if with_bos != ids(case, "ids_with_bos") {
            wrong.push(format!("ids with BOS of {text:?}: {with_bos:?}"));
        }
        for (skip, key) in [(false, "decoded"), (true, "decoded_skip_special")] {
            let decoded = tokenizer.decode(&want, skip);
            if Some(&*decoded) != case[key].as_str() {
                wrong.push(format!("{key} of {text:?}: {decoded:?}"));
            }
            let mut stream = StreamDecoder::new(Arc::clone(&tokenizer), skip);
            let mut streamed = String::new();
            for &id in &want {
                streamed.push_str(stream.push(id));
            }
            streamed.push_str(stream.finish());
            assert_eq!(streamed, decoded, "{family}: stream of {text:?}");
        }
    }
    assert!(wrong.is_empty(), "{family}: {} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

macro_rules! families {
    ($($test:ident: $family:literal,)*) => {
        $(#[test] fn $test() { check($family); })*

        /// A fixture that is added to the folder has to be added here.
        #[test]
        fn no_family_is_left_out() {
            let mut there: Vec<String> = std::fs::read_dir(folder())
                .expect("the fixtures are there")
                .map(|entry| entry.expect("an entry").file_name().into_string().expect("a name"))
                .collect();
            there.sort();
            assert_eq!(there, [$($family),*]);
        }
    };
}

families! {
    deepseek_llm: "deepseek-llm",
    deepseek_v3: "deepseek-v3",
    gemma_spm: "gemma-spm",
    gpt_4o: "gpt-4o",
    gpt2: "gpt2",
    llama_spm: "llama-spm",
    llama3: "llama3",
    qwen2: "qwen2",
    refact: "refact",
    smollm: "smollm",
    tekken: "tekken",
}
