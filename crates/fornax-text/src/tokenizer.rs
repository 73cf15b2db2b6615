//! From text to token ids and back, for both kinds of vocabulary. It must not know templates, tensors or
//! devices.

use crate::Error;
use crate::added::Added;
use crate::bpe::{self, Bpe};
use crate::spm::{self, Spm};
use crate::vocab::{ModelKind, TokenKind, Vocab, VocabSpec};

/// Texts of tokens that end a turn or a text, whatever else the file says of them.
const ENDS: &[&str] = &[
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|eom|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<|return|>",
    "<|call|>",
    "<|END_OF_TURN_TOKEN|>",
    "<end_of_turn>",
    "<turn|>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<｜end▁of▁sentence｜>",
];

/// How [`Tokenizer::encode`] reads its text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Whether control tokens written in the text become those tokens. Off for anything that a user wrote.
    pub special: bool,
    /// Whether to start with BOS (and end with EOS) if the model wants that.
    pub bos: bool,
}

/// Text to token ids and back, as one model was trained.
///
/// `Send + Sync`; every method takes `&self`.
#[derive(Debug)]
pub struct Tokenizer {
    vocab: Vocab,
    model: Model,
    added: AddedSets,
    bos: Option<u32>,
    eos: Option<u32>,
    ends: Vec<u32>,
    add_bos: bool,
    add_eos: bool,
    prefix: SpacePrefix,
}

#[derive(Debug)]
enum Model {
    Bpe(Bpe),
    Spm(Spm),
}

/// Where a space goes that is not in the text (SentencePiece).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SpacePrefix {
    Never,
    /// Before the text.
    Start,
    /// Before the text and again after each control token.
    Sections,
}

/// The added tokens, by when they are looked for.
#[derive(Debug)]
struct AddedSets {
    /// In the raw text, where control tokens are parsed.
    special: Added,
    /// In the raw text, where they are not.
    plain: Added,
    /// SentencePiece: in normalised text, where control tokens are parsed.
    pieces_special: Added,
    /// SentencePiece: in normalised text, where they are not.
    pieces_plain: Added,
    markers: Markers,
}

/// The texts that must never come about from what a user wrote.
#[derive(Debug)]
pub(crate) struct Markers {
    pub(crate) whole: Added,
    /// The same, each written backwards.
    pub(crate) reversed: Added,
    /// Bytes of the longest.
    pub(crate) longest: usize,
}

/// True for a user-defined token that reads like one that steers the model: `<think>`, `[TOOL_CALLS]`.
/// Runs of spaces and the like are ordinary text, and so are SentencePiece's HTML tags.
fn looks_like_marker(text: &str, model: ModelKind) -> bool {
    let inner = |open, close| text.strip_prefix(open).and_then(|t: &str| t.strip_suffix(close));
    if inner('[', ']').is_some() {
        return true;
    }
    match (inner('<', '>'), model) {
        (None, _) => false,
        (Some(_), ModelKind::Bpe) => true,
        (Some(tag), ModelKind::Spm) => {
            let name = tag.strip_prefix('/').unwrap_or(tag);
            name.is_empty() || !name.bytes().all(|b| b.is_ascii_alphanumeric())
        }
    }
}

impl AddedSets {
    fn new(vocab: &Vocab, model: ModelKind) -> AddedSets {
        let control =
            |id: u32| matches!(vocab.kind(id), Some(TokenKind::Control | TokenKind::Unknown));
        let user = |id: u32| vocab.kind(id) == Some(TokenKind::UserDefined);
        let marker = |id: u32| control(id) || user(id) && looks_like_marker(vocab.text(id), model);
        let set = |keep: &dyn Fn(u32) -> bool, normalised: bool| {
            let ids = (0..vocab.len() as u32).filter(|&id| keep(id));
            Added::new(ids.map(|id| {
                let text = vocab.text(id).as_bytes();
                (if normalised { vocab.bytes(id) } else { text }.to_vec(), id)
            }))
        };
        let none = |_: u32| false;
        let marker_ids: Vec<u32> = (0..vocab.len() as u32).filter(|&id| marker(id)).collect();
        let text = |id: u32| vocab.text(id).as_bytes();
        let markers = Markers {
            whole: Added::new(marker_ids.iter().map(|&id| (text(id).to_vec(), id))),
            reversed: Added::new(
                marker_ids.iter().map(|&id| (text(id).iter().rev().copied().collect(), id)),
            ),
            longest: marker_ids.iter().map(|&id| text(id).len()).max().unwrap_or(0),
        };
        match model {
            ModelKind::Bpe => AddedSets {
                special: set(&|id| control(id) || user(id), false),
                plain: set(&|id| user(id) && !marker(id), false),
                pieces_special: set(&none, true),
                pieces_plain: set(&none, true),
                markers,
            },
            ModelKind::Spm => AddedSets {
                special: set(&control, false),
                plain: set(&none, false),
                pieces_special: set(&user, true),
                pieces_plain: set(&|id| user(id) && !marker(id), true),
                markers,
            },
        }
    }
}

impl Tokenizer {
    /// Builds a tokenizer.
    ///
    /// # Errors
    /// `is_malformed` where lengths or ids contradict the vocabulary, `is_unsupported` for an unknown
    /// splitting rule, `is_missing` where it is not named.
    pub fn new(spec: &VocabSpec) -> Result<Tokenizer, Error> {
        let vocab = Vocab::new(spec)?;
        let ids = [("bos", spec.bos), ("eos", spec.eos), ("unknown", spec.unknown)];
        let all = ids.into_iter().chain(spec.eog.iter().map(|&id| ("end-of-generation", Some(id))));
        for (name, id) in all.filter_map(|(name, id)| id.map(|id| (name, id))) {
            if id as usize >= vocab.len() {
                return Err(Error::malformed(format!(
                    "reading the vocabulary: the {name} token is {id}, but there are {} tokens",
                    vocab.len()
                )));
            }
        }
        let model = match spec.model {
            ModelKind::Bpe => Model::Bpe(Bpe::new(spec, &vocab)?),
            ModelKind::Spm => Model::Spm(Spm::new(spec, &vocab)?),
        };
        let usual_bos = match &model {
            Model::Bpe(bpe) => bpe.adds_bos(),
            Model::Spm(_) => true,
        };
        let prefix = match (spec.model, spec.add_space_prefix) {
            (ModelKind::Bpe, _) | (_, Some(false)) => SpacePrefix::Never,
            (_, Some(true)) => SpacePrefix::Sections,
            (_, None) => SpacePrefix::Start,
        };
        Ok(Tokenizer {
            added: AddedSets::new(&vocab, spec.model),
            ends: ends(spec, &vocab),
            add_bos: spec.add_bos.unwrap_or(usual_bos) && spec.bos.is_some(),
            add_eos: spec.add_eos.unwrap_or(false) && spec.eos.is_some(),
            bos: spec.bos,
            eos: spec.eos,
            vocab,
            model,
            prefix,
        })
    }

    /// The tokens of `text`.
    ///
    /// SentencePiece vocabularies may put a space before the text that is not in it
    /// (`tokenizer.ggml.add_space_prefix`): `false` means none, `true` one at the start and one after each
    /// control token in the text (Hugging Face's `legacy=true`), absent one at the start alone
    /// (`legacy=false`).
    ///
    /// Without `special`, user-defined tokens that read like control tokens (`<think>`, `[TOOL_CALLS]`) are
    /// not parsed either; those that are plain text, such as runs of spaces, always are. With `bos`, BOS
    /// comes first even if the text spells it out already, as with Hugging Face's tokenizers.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Vec<u32> {
        self.encode_bytes(text.as_bytes(), options)
    }

    /// The tokens of bytes that need not be UTF-8. Byte-level vocabularies give every byte back on decoding.
    pub fn encode_bytes(&self, text: &[u8], options: EncodeOptions) -> Vec<u32> {
        self.encode_guarded(text, &[], options)
    }

    /// As [`Tokenizer::encode`] with control tokens parsed, except those that would reach across one of the
    /// sorted byte offsets `guards`. Everything else comes out as if the guards were not there.
    pub(crate) fn encode_guarded(
        &self,
        text: &[u8],
        guards: &[usize],
        options: EncodeOptions,
    ) -> Vec<u32> {
        let mut out = Vec::with_capacity(text.len() / 3 + 2);
        if options.bos && self.add_bos {
            out.extend(self.bos);
        }
        match &self.model {
            Model::Bpe(bpe) => {
                let set = if options.special { &self.added.special } else { &self.added.plain };
                let mut scratch = bpe::Scratch::default();
                sections(set, text, guards, &mut out, |section, _, out| {
                    bpe.encode(&self.vocab, section, &mut scratch, out);
                });
            }
            Model::Spm(spm) => self.encode_spm(spm, text, guards, options.special, &mut out),
        }
        if options.bos && self.add_eos {
            out.extend(self.eos);
        }
        out
    }

    fn encode_spm(
        &self,
        spm: &Spm,
        text: &[u8],
        guards: &[usize],
        special: bool,
        out: &mut Vec<u32>,
    ) {
        let (raw, pieces) = if special {
            (&self.added.special, &self.added.pieces_special)
        } else {
            (&self.added.plain, &self.added.pieces_plain)
        };
        let mut scratch = spm::Scratch::default();
        sections(raw, text, guards, out, |section, start, out| {
            let prefix = match self.prefix {
                SpacePrefix::Never => false,
                SpacePrefix::Start => start == 0,
                SpacePrefix::Sections => true,
            };
            let (normalised, inner) = normalise(section, start, prefix, guards);
            sections(pieces, &normalised, &inner, out, |plain, _, out| {
                spm.encode(&self.vocab, plain, &mut scratch, out);
            });
        });
    }

    /// The text of `ids`. Bytes that are not UTF-8 become U+FFFD, one for each maximal ill-formed part.
    ///
    /// With `skip_special`, control tokens leave nothing behind. A space that the tokenizer puts before
    /// text is taken off again. Ids past the end of the vocabulary stand for nothing.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let bytes = self.decode_bytes(ids, skip_special);
        match String::from_utf8_lossy(&bytes) {
            std::borrow::Cow::Owned(text) => text,
            std::borrow::Cow::Borrowed(_) => String::from_utf8(bytes).unwrap_or_default(),
        }
    }

    /// The bytes of `ids`, as [`Tokenizer::decode`] without the last step.
    pub fn decode_bytes(&self, ids: &[u32], skip_special: bool) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for &id in ids {
            if !(skip_special && self.is_control(id)) {
                bytes.extend_from_slice(self.token_bytes(id));
            }
        }
        if self.strips_space() && bytes.first() == Some(&b' ') {
            bytes.remove(0);
        }
        bytes
    }

    /// Whether decoding takes a leading space off.
    pub(crate) fn strips_space(&self) -> bool {
        self.prefix != SpacePrefix::Never
    }

    /// The bytes that a token stands for; empty for ids past the end of the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.vocab.bytes(id)
    }

    /// A token's text as the model file writes it (`Ġthe`, `▁the`, `<0x0A>`); empty for ids past the end.
    pub fn piece(&self, id: u32) -> &str {
        self.vocab.text(id)
    }

    /// The token whose text, as the model file writes it, is `piece`.
    pub fn token_id(&self, piece: &str) -> Option<u32> {
        self.vocab.id_of_text(piece)
    }

    /// What a token is; `None` for ids past the end of the vocabulary.
    pub fn kind(&self, id: u32) -> Option<TokenKind> {
        self.vocab.kind(id)
    }

    /// True for tokens that steer the model and are no text, and for the unknown token.
    pub fn is_control(&self, id: u32) -> bool {
        matches!(self.vocab.kind(id), Some(TokenKind::Control | TokenKind::Unknown))
    }

    /// Number of tokens.
    pub fn vocab_len(&self) -> usize {
        self.vocab.len()
    }

    /// The token that begins a sequence, if the model has one; it may have one and not want it.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a sequence.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Whether sequences start with BOS. Never true without a BOS token.
    pub fn adds_bos(&self) -> bool {
        self.add_bos
    }

    /// True for every token after which a generation is over: EOS, end of turn, end of message.
    pub fn is_end_of_generation(&self, id: u32) -> bool {
        self.ends.binary_search(&id).is_ok()
    }

    /// All tokens for which [`Tokenizer::is_end_of_generation`] holds, sorted.
    pub fn ends_of_generation(&self) -> &[u32] {
        &self.ends
    }

    /// The texts that must not come about from what a user wrote.
    pub(crate) fn markers(&self) -> &Markers {
        &self.added.markers
    }
}

/// Sorted ids of the tokens that end a generation.
fn ends(spec: &VocabSpec, vocab: &Vocab) -> Vec<u32> {
    let mut ends: Vec<u32> = spec.eog.iter().copied().chain(spec.eos).collect();
    for text in ENDS {
        if let Some(id) = vocab.id_of_text(text)
            && matches!(vocab.kind(id), Some(TokenKind::Control | TokenKind::UserDefined))
        {
            ends.push(id);
        }
    }
    // In the harmony format <|end|> ends a message of which more follow; <|return|> ends the answer.
    if vocab.id_of_text("<|return|>").is_some() && vocab.id_of_text("<|channel|>").is_some() {
        let message_end = vocab.id_of_text("<|end|>");
        ends.retain(|&id| Some(id) != message_end || spec.eos == Some(id));
    }
    ends.sort_unstable();
    ends.dedup();
    ends
}

/// Walks through `text`: added tokens go to `out`, what lies between them to `plain` with its offset.
fn sections(
    set: &Added,
    text: &[u8],
    guards: &[usize],
    out: &mut Vec<u32>,
    mut plain: impl FnMut(&[u8], usize, &mut Vec<u32>),
) {
    let mut at = 0;
    while let Some(found) = set.find(text, at, guards) {
        if found.start > at {
            plain(&text[at..found.start], at, out);
        }
        out.push(found.id);
        at = found.end;
    }
    if at < text.len() {
        plain(&text[at..], at, out);
    }
}

/// A section with U+2581 read as the space that it stands for and the space prefix, and the guards that
/// lie in the section moved to where they are then.
fn normalise(
    section: &[u8],
    start: usize,
    prefix: bool,
    guards: &[usize],
) -> (Vec<u8>, Vec<usize>) {
    const BLOCK: &[u8] = "\u{2581}".as_bytes();
    let mut out = Vec::with_capacity(section.len() + 1);
    if prefix {
        out.push(b' ');
    }
    let first = guards.partition_point(|&g| g <= start);
    let mut pending = guards[first..].iter().map(|g| g - start).peekable();
    let mut moved = Vec::new();
    let mut at = 0;
    while at < section.len() {
        while pending.next_if(|&g| g <= at).is_some() {
            moved.push(out.len());
        }
        if section[at..].starts_with(BLOCK) {
            out.push(b' ');
            at += BLOCK.len();
        } else {
            out.push(section[at]);
            at += 1;
        }
    }
    (out, moved)
}
