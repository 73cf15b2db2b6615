//! The vocabulary: what each token is, what bytes it stands for, and which token has given bytes. It must
//! not know how text is split or merged.

use crate::Error;
use crate::byte_level;

/// How a vocabulary is used; `tokenizer.ggml.model` in a GGUF file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelKind {
    /// Byte-level byte-pair encoding (`gpt2`): merges by rank, any byte can be encoded.
    Bpe,
    /// SentencePiece (`llama`): merges by score, characters without a token fall back to bytes.
    Spm,
}

/// What a token is; the numbers are those of `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// A piece of ordinary text.
    Normal = 1,
    /// Stands for what the vocabulary cannot express.
    Unknown = 2,
    /// Steers the model (start of a turn, end of the text) and is no text.
    Control = 3,
    /// Added to the vocabulary by hand; text, but found before any splitting.
    UserDefined = 4,
    /// A hole in the numbering.
    Unused = 5,
    /// One byte, `<0xNN>`.
    Byte = 6,
}

impl TokenKind {
    /// The kind that a file's number means; 0 (undefined) is taken as ordinary text.
    pub fn from_number(number: i64) -> Option<TokenKind> {
        Some(match number {
            0 | 1 => TokenKind::Normal,
            2 => TokenKind::Unknown,
            3 => TokenKind::Control,
            4 => TokenKind::UserDefined,
            5 => TokenKind::Unused,
            6 => TokenKind::Byte,
            _ => return None,
        })
    }
}

/// Everything that a tokenizer is made from, as plain data.
#[derive(Clone, Debug)]
pub struct VocabSpec {
    /// The algorithm.
    pub model: ModelKind,
    /// Name of the splitting rule, `tokenizer.ggml.pre`; SentencePiece has none and ignores it.
    pub pre: String,
    /// Token texts by id: in the byte-level alphabet for BPE, with U+2581 for a space for SentencePiece.
    pub tokens: Vec<String>,
    /// Merge priorities by id (SentencePiece): the greatest is merged first. Empty for BPE.
    pub scores: Vec<f32>,
    /// Kinds by id; empty means that every token is ordinary text.
    pub kinds: Vec<TokenKind>,
    /// Merges, best first, as `left right` (BPE). Empty for SentencePiece.
    pub merges: Vec<String>,
    /// Beginning of a sequence.
    pub bos: Option<u32>,
    /// End of a sequence.
    pub eos: Option<u32>,
    /// Further tokens that end a generation (end of turn, end of message).
    pub eog: Vec<u32>,
    /// What stands for the inexpressible (SentencePiece).
    pub unknown: Option<u32>,
    /// Whether sequences start with `bos`; `None` means what the kind of tokenizer usually does.
    pub add_bos: Option<bool>,
    /// Whether sequences end with `eos`; absent is false.
    pub add_eos: Option<bool>,
    /// Whether text starts with a space that is not in it (SentencePiece). See
    /// [`Tokenizer::encode`](crate::Tokenizer::encode) for what absent means.
    pub add_space_prefix: Option<bool>,
}

impl VocabSpec {
    /// A specification with tokens alone; the rest is empty or absent.
    pub fn new(model: ModelKind, pre: &str, tokens: Vec<String>) -> VocabSpec {
        VocabSpec {
            model,
            pre: pre.to_owned(),
            tokens,
            scores: Vec::new(),
            kinds: Vec::new(),
            merges: Vec::new(),
            bos: None,
            eos: None,
            eog: Vec::new(),
            unknown: None,
            add_bos: None,
            add_eos: None,
            add_space_prefix: None,
        }
    }
}

/// Strings of bytes in one piece of memory.
#[derive(Debug, Default)]
struct Arena {
    bytes: Vec<u8>,
    ends: Vec<u32>,
}

impl Arena {
    fn push(&mut self, item: &[u8]) -> Result<(), Error> {
        self.bytes.extend_from_slice(item);
        let end = u32::try_from(self.bytes.len())
            .map_err(|_| Error::malformed("reading the vocabulary: its tokens exceed 4 GiB"))?;
        self.ends.push(end);
        Ok(())
    }

    fn get(&self, id: u32) -> Option<&[u8]> {
        let i = id as usize;
        let end = *self.ends.get(i)? as usize;
        let start = if i == 0 { 0 } else { self.ends[i - 1] as usize };
        Some(&self.bytes[start..end])
    }
}

const EMPTY: u32 = u32::MAX;

/// From bytes to the id that has them: open addressing over ids, the bytes stay in their arena.
#[derive(Debug, Default)]
struct Index {
    slots: Vec<u32>,
}

impl Index {
    fn with_capacity(tokens: usize) -> Index {
        Index { slots: vec![EMPTY; (tokens * 2).next_power_of_two().max(2)] }
    }

    fn hash(bytes: &[u8]) -> usize {
        // FNV-1a; the table is filled from the model alone, so that hostile text meets short probes.
        let mut h: u64 = 0xcbf2_9ce4_8422_2325;
        for &b in bytes {
            h = (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        (h ^ (h >> 32)) as usize
    }

    fn slot(&self, arena: &Arena, bytes: &[u8]) -> usize {
        let mask = self.slots.len() - 1;
        let mut at = Index::hash(bytes) & mask;
        while self.slots[at] != EMPTY && arena.get(self.slots[at]) != Some(bytes) {
            at = (at + 1) & mask;
        }
        at
    }

    /// Keeps the first of equal entries.
    fn insert(&mut self, arena: &Arena, id: u32) {
        if let Some(bytes) = arena.get(id) {
            let at = self.slot(arena, bytes);
            if self.slots[at] == EMPTY {
                self.slots[at] = id;
            }
        }
    }

    fn get(&self, arena: &Arena, bytes: &[u8]) -> Option<u32> {
        let id = self.slots[self.slot(arena, bytes)];
        (id != EMPTY).then_some(id)
    }
}

/// Tokens by id, and ids by text and by bytes.
#[derive(Debug)]
pub(crate) struct Vocab {
    texts: Arena,
    bytes: Arena,
    kinds: Vec<TokenKind>,
    by_text: Index,
    /// Only what merging may produce: neither control tokens nor single-byte tokens.
    by_bytes: Index,
    longest: usize,
}

impl Vocab {
    /// # Errors
    /// `is_malformed` where there are no tokens, or as many kinds as there are tokens is not what there is.
    pub(crate) fn new(spec: &VocabSpec) -> Result<Vocab, Error> {
        let count = spec.tokens.len();
        if count == 0 {
            return Err(Error::malformed("reading the vocabulary: it has no tokens"));
        }
        if count >= EMPTY as usize {
            return Err(Error::malformed("reading the vocabulary: it has over 4 billion tokens"));
        }
        if !spec.kinds.is_empty() && spec.kinds.len() != count {
            return Err(Error::malformed(format!(
                "reading the vocabulary: {} token types for {count} tokens, expected one each",
                spec.kinds.len()
            )));
        }
        let kinds =
            if spec.kinds.is_empty() { vec![TokenKind::Normal; count] } else { spec.kinds.clone() };
        let mut vocab = Vocab {
            texts: Arena::default(),
            bytes: Arena::default(),
            by_text: Index::with_capacity(count),
            by_bytes: Index::with_capacity(count),
            longest: 0,
            kinds,
        };
        for (id, text) in spec.tokens.iter().enumerate() {
            vocab.push(id, text, spec.model)?;
        }
        Ok(vocab)
    }

    fn push(&mut self, id: usize, text: &str, model: ModelKind) -> Result<(), Error> {
        let kind = self.kinds[id];
        let bytes = match (kind, model) {
            (TokenKind::Byte, _) => vec![parse_byte_token(text).ok_or_else(|| {
                Error::malformed(format!(
                    "reading the vocabulary: token {id} is a byte but reads {text:?}, expected <0x00> to <0xFF>"
                ))
            })?],
            (TokenKind::Normal | TokenKind::Unused, ModelKind::Bpe) => byte_level::to_bytes(text),
            (TokenKind::Unknown | TokenKind::Control | TokenKind::UserDefined, ModelKind::Bpe) => {
                text.as_bytes().to_vec()
            }
            (_, ModelKind::Spm) => text.replace('\u{2581}', " ").into_bytes(),
        };
        self.texts.push(text.as_bytes())?;
        self.bytes.push(&bytes)?;
        let id = id as u32;
        self.by_text.insert(&self.texts, id);
        if matches!(kind, TokenKind::Normal | TokenKind::UserDefined) {
            self.by_bytes.insert(&self.bytes, id);
            self.longest = self.longest.max(bytes.len());
        }
        Ok(())
    }

    pub(crate) fn len(&self) -> usize {
        self.kinds.len()
    }

    pub(crate) fn kind(&self, id: u32) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    /// The token's text as the file writes it; empty for ids past the end.
    pub(crate) fn text(&self, id: u32) -> &str {
        std::str::from_utf8(self.texts.get(id).unwrap_or_default()).unwrap_or_default()
    }

    /// The bytes that the token stands for; empty for ids past the end.
    pub(crate) fn bytes(&self, id: u32) -> &[u8] {
        self.bytes.get(id).unwrap_or_default()
    }

    /// The token whose text is `text`, whatever its kind.
    pub(crate) fn id_of_text(&self, text: &str) -> Option<u32> {
        self.by_text.get(&self.texts, text.as_bytes())
    }

    /// The token of ordinary text that stands for exactly `bytes`.
    pub(crate) fn id_of_bytes(&self, bytes: &[u8]) -> Option<u32> {
        if bytes.len() > self.longest {
            return None;
        }
        self.by_bytes.get(&self.bytes, bytes)
    }
}

/// The byte that a token text `<0xNN>` names.
fn parse_byte_token(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 { None } else { u8::from_str_radix(digits, 16).ok() }
}
