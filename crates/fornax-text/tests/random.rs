//! Seeded random texts through every family, and random vocabularies: what must hold for any input. It must
//! not know how the tokenizer works.

use std::path::PathBuf;
use std::sync::Arc;

use fornax_gguf::Gguf;
use fornax_text::{
    EncodeOptions, ModelKind, StopMatcher, StreamDecoder, TokenKind, Tokenizer, VocabSpec,
    vocab_spec,
};

/// Xorshift.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % n
    }

    fn bytes(&mut self, parts: &[&[u8]]) -> Vec<u8> {
        let mut out = Vec::new();
        for _ in 0..self.below(12) {
            if self.below(4) == 0 {
                out.push(self.below(256) as u8);
            } else {
                out.extend_from_slice(parts[self.below(parts.len())]);
            }
        }
        out
    }
}

const PARTS: &[&str] = &[
    "a",
    " the",
    "ing",
    "\n",
    "\r\n",
    "  ",
    "\t",
    "1",
    "234",
    "'s",
    "'LL",
    "\"",
    "...",
    "/",
    "é",
    "e\u{301}",
    "漢字",
    "한국",
    "สวัสดี",
    "नमस्ते",
    "٣",
    "½",
    "🙂",
    "👨\u{200d}👩",
    "\u{a0}",
    "\u{2028}",
    "\0",
    "ǅ",
    "$",
    "HTTP",
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "<unk>",
    "<|im_",
    "\u{e000}",
];

#[test]
fn every_byte_comes_back() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tokenizers");
    let parts: Vec<&[u8]> = PARTS.iter().map(|p| p.as_bytes()).collect();
    for entry in std::fs::read_dir(folder).expect("the fixtures are there") {
        let path = entry.expect("an entry").path();
        let gguf = Gguf::open(&path.join("vocab.gguf")).expect("the fixture opens");
        let mut spec = vocab_spec(gguf.metadata()).expect("a vocabulary");
        let name = path.file_name().and_then(|n| n.to_str()).expect("a name").to_owned();
        if spec.add_space_prefix == Some(true) {
            // With it, the space after control tokens is new.
            spec.add_space_prefix = None;
        }
        let tokenizer = Arc::new(Tokenizer::new(&spec).expect("a tokenizer"));
        let mut random = Random(0x5eed_0001);
        for round in 0..400 {
            let bytes = random.bytes(&parts);
            for special in [false, true] {
                let ids = tokenizer.encode_bytes(&bytes, EncodeOptions { special, bos: false });
                // NFC composes these.
                if name != "qwen2" {
                    assert_eq!(
                        tokenizer.decode_bytes(&ids, false),
                        bytes,
                        "{name}, round {round}, special {special}"
                    );
                }
                for skip in [false, true] {
                    let mut stream = StreamDecoder::new(Arc::clone(&tokenizer), skip);
                    let mut text = String::new();
                    for &id in &ids {
                        text.push_str(stream.push(id));
                    }
                    text.push_str(stream.finish());
                    assert_eq!(text, tokenizer.decode(&ids, skip), "{name}, round {round}");
                }
                if !special {
                    assert!(!ids.iter().any(|&id| tokenizer.kind(id) == Some(TokenKind::Control)));
                }
            }
        }
    }
}

#[test]
fn any_ids_decode() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tokenizers");
    for family in ["llama-spm", "qwen2"] {
        let gguf = Gguf::open(&folder.join(family).join("vocab.gguf")).expect("the fixture opens");
        let tokenizer = Arc::new(Tokenizer::from_gguf(gguf.metadata()).expect("a tokenizer"));
        let mut random = Random(0x5eed_0002);
        for _ in 0..2000 {
            let ids: Vec<u32> = (0..random.below(20)).map(|_| random.below(1400) as u32).collect();
            for skip in [false, true] {
                let mut stream = StreamDecoder::new(Arc::clone(&tokenizer), skip);
                let mut text = String::new();
                for &id in &ids {
                    text.push_str(stream.push(id));
                }
                text.push_str(stream.finish());
                assert_eq!(text, tokenizer.decode(&ids, skip), "{family}: {ids:?}");
            }
        }
    }
}

#[test]
fn any_vocabulary_is_an_error_or_works() {
    let mut random = Random(0x5eed_0003);
    let mut built = 0;
    for _ in 0..3000 {
        let count = random.below(12);
        let tokens: Vec<String> = (0..count)
            .map(|_| (0..random.below(4)).map(|_| PARTS[random.below(PARTS.len())]).collect())
            .collect();
        let model = if random.below(2) == 0 { ModelKind::Bpe } else { ModelKind::Spm };
        let mut spec =
            VocabSpec::new(model, ["gpt-2", "qwen2", "default", "x"][random.below(4)], tokens);
        let or_not = |random: &mut Random, n: usize| {
            if random.below(3) == 0 { random.below(20) } else { n }
        };
        let kinds = or_not(&mut random, count);
        spec.kinds =
            (0..kinds).filter_map(|_| TokenKind::from_number(random.below(6) as i64)).collect();
        let scores = or_not(&mut random, count);
        spec.scores =
            (0..scores).map(|_| [0.0, -1.0, f32::NAN, f32::INFINITY][random.below(4)]).collect();
        let part = |random: &mut Random| PARTS[random.below(PARTS.len())];
        spec.merges = (0..random.below(3))
            .map(|_| format!("{} {}", part(&mut random), part(&mut random)))
            .collect();
        spec.unknown = (random.below(2) == 0).then(|| random.below(14) as u32);
        spec.bos = (random.below(2) == 0).then(|| random.below(14) as u32);
        if let Ok(tokenizer) = Tokenizer::new(&spec) {
            built += 1;
            let text: String = (0..random.below(9)).map(|_| part(&mut random)).collect();
            for special in [false, true] {
                let ids = tokenizer.encode(&text, EncodeOptions { special, bos: true });
                assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_len()));
                tokenizer.decode(&ids, false);
            }
        }
    }
    assert!(built > 100, "only {built} vocabularies were sound");
}

#[test]
fn stop_strings_do_not_depend_on_cuts() {
    let mut random = Random(0x5eed_0004);
    let letters = ["a", "b", "é", "\n"];
    let mut word = |max: usize| -> String {
        let n = random.below(max);
        (0..n).map(|_| letters[random.below(letters.len())]).collect()
    };
    for _ in 0..3000 {
        let stops: Vec<String> = (0..3).map(|_| word(5)).collect();
        let text = word(40);
        let mut whole = StopMatcher::new(&stops);
        let mut expected = whole.push(&text).text.to_owned();
        expected.push_str(whole.finish());
        let mut cut = StopMatcher::new(&stops);
        let mut shown = String::new();
        for c in text.chars() {
            shown.push_str(cut.push(c.encode_utf8(&mut [0; 4])).text);
        }
        shown.push_str(cut.finish());
        assert_eq!((&shown, cut.matched()), (&expected, whole.matched()), "{stops:?} in {text:?}");
        // What was shown is the text, up to a stop string if there was one.
        match cut.matched() {
            None => assert_eq!(shown, text),
            Some(i) => {
                assert!(text[shown.len()..].starts_with(&stops[i]) && text.starts_with(&shown))
            }
        }
    }
}
