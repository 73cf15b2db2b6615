//! Reads a [`VocabSpec`] from the metadata of a GGUF file. The one place that knows the file's keys; it
//! must not know how text is split or merged.

use fornax_gguf::{Metadata, Value};

use crate::{ChatTemplate, Error, ModelKind, TokenKind, Tokenizer, VocabSpec};

/// Keys of tokens that end a generation besides EOS.
const END_KEYS: [&str; 2] = ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];

/// A vocabulary that a file describes.
///
/// # Errors
/// `is_missing` without a vocabulary, `is_unsupported` for a kind of tokenizer that is not known here,
/// `is_malformed` for values of the wrong type.
pub fn vocab_spec(meta: &Metadata) -> Result<VocabSpec, Error> {
    let model = match meta.require_str("tokenizer.ggml.model")? {
        "gpt2" => ModelKind::Bpe,
        "llama" => ModelKind::Spm,
        other => {
            return Err(Error::unsupported(format!(
                "reading the tokenizer: tokenizer.ggml.model is {other:?}; known are gpt2 (byte-level BPE) \
                 and llama (SentencePiece)"
            )));
        }
    };
    let tokens = meta.require_str_array("tokenizer.ggml.tokens")?;
    let pre = meta.str("tokenizer.ggml.pre")?.unwrap_or_default();
    let mut spec = VocabSpec::new(model, pre, tokens.iter().map(str::to_owned).collect());
    if let Some(types) = meta.i32_array("tokenizer.ggml.token_type")? {
        spec.kinds = kinds(&types)?;
    }
    match model {
        ModelKind::Bpe => {
            if let Some(merges) = meta.str_array("tokenizer.ggml.merges")? {
                spec.merges = merges.iter().map(str::to_owned).collect();
            }
        }
        ModelKind::Spm => {
            spec.scores = meta.f32_array("tokenizer.ggml.scores")?.unwrap_or_default().to_vec();
        }
    }
    spec.bos = token_id(meta, "tokenizer.ggml.bos_token_id")?;
    spec.eos = token_id(meta, "tokenizer.ggml.eos_token_id")?;
    spec.unknown = token_id(meta, "tokenizer.ggml.unknown_token_id")?;
    for key in END_KEYS {
        spec.eog.extend(token_id(meta, key)?);
    }
    spec.add_bos = meta.bool("tokenizer.ggml.add_bos_token")?;
    spec.add_eos = meta.bool("tokenizer.ggml.add_eos_token")?;
    spec.add_space_prefix = meta.bool("tokenizer.ggml.add_space_prefix")?;
    Ok(spec)
}

fn kinds(types: &[i32]) -> Result<Vec<TokenKind>, Error> {
    let kind = |(id, &number): (usize, &i32)| {
        TokenKind::from_number(number.into()).ok_or_else(|| {
            Error::malformed(format!(
                "reading the tokenizer: tokenizer.ggml.token_type[{id}] is {number}, expected 0 to 6"
            ))
        })
    };
    types.iter().enumerate().map(kind).collect()
}

/// A token id; −1, which some converters write, means that there is none.
fn token_id(meta: &Metadata, key: &str) -> Result<Option<u32>, Error> {
    match meta.get(key).and_then(Value::as_integer) {
        Some(-1 | 0xffff_ffff) => Ok(None),
        _ => Ok(meta.u32(key)?),
    }
}

impl Tokenizer {
    /// The tokenizer of a GGUF file.
    ///
    /// # Errors
    /// As [`vocab_spec`] and [`Tokenizer::new`].
    pub fn from_gguf(meta: &Metadata) -> Result<Tokenizer, Error> {
        Tokenizer::new(&vocab_spec(meta)?)
    }
}

impl ChatTemplate {
    /// The chat template of a GGUF file, `tokenizer.chat_template`.
    ///
    /// # Errors
    /// `is_missing` if the file has none, `is_template` if it does not parse.
    pub fn from_gguf(meta: &Metadata, tokenizer: &Tokenizer) -> Result<ChatTemplate, Error> {
        let Some(source) = meta.str("tokenizer.chat_template")? else {
            return Err(Error::missing(
                "preparing a chat: the model has no chat template (tokenizer.chat_template); it may not be \
                 trained for chats. Send it plain text instead (--raw), or name a template of your own",
            ));
        };
        let text = |id: Option<u32>| id.map_or("", |id| tokenizer.piece(id));
        ChatTemplate::new(source, text(tokenizer.bos()), text(tokenizer.eos()))
    }
}
