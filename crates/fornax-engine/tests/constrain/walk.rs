//! Walks through a constraint: by chance, and along a given text. They know tokens and no grammar.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use fornax_engine::constrain::{Constrainer, Grammar};
use fornax_engine::serve::{BitSet, Constraint};
use fornax_gguf::Gguf;
use fornax_text::Tokenizer;

/// Byte-level vocabularies, SentencePiece ones, and one that has both `<0xNN>` tokens and spaces of its own.
pub(crate) const FAMILIES: &[&str] =
    &["llama3", "qwen2", "tekken", "gpt-4o", "gemma-spm", "llama-spm"];

/// A model's part in this: its tokenizer, and what holds answers to grammars.
pub(crate) struct Model {
    pub(crate) name: &'static str,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) constrainer: Constrainer,
}

/// All families, read once.
pub(crate) fn models() -> &'static [Model] {
    static MODELS: OnceLock<Vec<Model>> = OnceLock::new();
    MODELS.get_or_init(|| FAMILIES.iter().map(|name| model(name)).collect())
}

fn model(name: &'static str) -> Model {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tokenizers");
    let gguf = Gguf::open(&folder.join(name).join("vocab.gguf")).expect("the fixture opens");
    let tokenizer =
        Arc::new(Tokenizer::from_gguf(gguf.metadata()).expect("the tokenizer is known"));
    Model { name, constrainer: Constrainer::new(&tokenizer), tokenizer }
}

impl Model {
    pub(crate) fn start(&self, grammar: &Grammar) -> Box<dyn Constraint> {
        match self.constrainer.compile(grammar) {
            Ok(compiled) => compiled.start(),
            Err(e) => panic!("{}: {grammar:?}: {e}", self.name),
        }
    }

    fn bytes(&self, id: u32) -> &[u8] {
        self.tokenizer.token_bytes(id)
    }

    /// Writes a text by chance. `check` sees the text each time that it could end. Gives it where it did end.
    pub(crate) fn write(
        &self,
        grammar: &Grammar,
        random: &mut Random,
        check: &mut dyn FnMut(&str),
    ) -> Option<String> {
        let mut constraint = self.start(grammar);
        let mut allowed = BitSet::new(self.tokenizer.vocab_len());
        let mut ids = Vec::new();
        let free = 4 + random.below(40);
        for step in 0..600 {
            constraint.mask(&mut allowed).unwrap_or_else(|e| panic!("{}: {e}", self.show(&ids)));
            assert!(!allowed.is_empty());
            let may_end = constraint.may_end();
            let ends = self.tokenizer.ends_of_generation();
            if may_end {
                check(&self.text(&ids));
            }
            for &end in ends {
                assert_eq!(
                    allowed.contains(end),
                    may_end,
                    "{}: end at {}",
                    self.name,
                    self.show(&ids)
                );
            }
            if constraint.is_done() || may_end && (step >= free || random.below(4) == 0) {
                return Some(self.text(&ids));
            }
            let id = self.choose(&allowed, step < free, random)?;
            constraint.accept(id).unwrap_or_else(|e| panic!("{}: {id}: {e}", self.show(&ids)));
            ids.push(id);
        }
        None
    }

    /// A token by chance; one that closes something, once the text is long enough.
    fn choose(&self, allowed: &BitSet, free: bool, random: &mut Random) -> Option<u32> {
        let is_text = |id: &u32| !self.tokenizer.is_end_of_generation(*id);
        let ids: Vec<u32> = tokens(allowed).filter(is_text).collect();
        if !free {
            let closes = |end: &u8| ids.iter().copied().find(|&id| self.bytes(id) == [*end]);
            if let Some(id) = b"\"}]".iter().find_map(closes) {
                return Some(id);
            }
        }
        // Short tokens half of the time: punctuation would drown in words.
        let short: Vec<u32> = ids.iter().copied().filter(|&id| self.bytes(id).len() == 1).collect();
        let from = if !short.is_empty() && random.below(2) == 0 { &short } else { &ids };
        assert!(!from.is_empty(), "{}: only the end is allowed, and it was not taken", self.name);
        Some(from[random.below(from.len())])
    }

    /// Whether a text can be written from end to end, by any of its ways to be cut into tokens that begins with the
    /// longest.
    pub(crate) fn accepts(&self, grammar: &Grammar, text: &str) -> bool {
        let mut constraint = self.start(grammar);
        let mut allowed = BitSet::new(self.tokenizer.vocab_len());
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            if constraint.is_done() {
                return false;
            }
            constraint.mask(&mut allowed).unwrap();
            let fits = |id: &u32| !self.bytes(*id).is_empty() && rest.starts_with(self.bytes(*id));
            let ids = tokens(&allowed).filter(fits).filter(|&id| !self.tokenizer.is_control(id));
            let Some(id) = ids.max_by_key(|&id| self.bytes(id).len()) else { return false };
            constraint.accept(id).unwrap();
            rest = &rest[self.bytes(id).len()..];
        }
        constraint.may_end()
    }

    fn text(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.bytes(id)).copied().collect();
        String::from_utf8(bytes).unwrap_or_else(|e| panic!("{}: not UTF-8: {e}", self.name))
    }

    fn show(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.bytes(id)).copied().collect();
        format!("{:?} of {}", String::from_utf8_lossy(&bytes), self.name)
    }
}

pub(crate) fn tokens(set: &BitSet) -> impl Iterator<Item = u32> + '_ {
    set.words().iter().enumerate().flat_map(|(at, &word)| {
        (0..32).filter(move |bit| word >> bit & 1 == 1).map(move |bit| at as u32 * 32 + bit)
    })
}

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) % n as u64) as usize
    }
}
