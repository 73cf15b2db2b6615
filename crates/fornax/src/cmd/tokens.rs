//! `fornax tokenize` and `fornax detokenize`. Reads the file's vocabulary and no weight.

use anyhow::{Result, bail};
use fornax_gguf::Gguf;
use fornax_text::{EncodeOptions, Tokenizer};
use serde::Serialize;

use super::start;
use crate::flags::high::Config;
use crate::flags::low::{Detokenize, Tokenize};
use crate::output;

/// The one object of `tokenize --json`.
#[derive(Serialize)]
struct Pieces<'a> {
    ids: &'a [u32],
    pieces: Vec<&'a str>,
}

/// The one object of `detokenize --json`.
#[derive(Serialize)]
struct Whole {
    text: String,
}

/// Prints the ids, separated by commas.
///
/// # Errors
/// When the model cannot be read.
pub(crate) fn tokenize(config: &Config, flags: &Tokenize) -> Result<()> {
    let tokenizer = open(config, &flags.model.model)?;
    let options = EncodeOptions { special: !flags.no_special, bos: flags.bos };
    let ids = match &flags.text {
        Some(text) => tokenizer.encode(text, options),
        None => tokenizer.encode_bytes(&output::stdin_bytes("TEXT")?, options),
    };
    if flags.json {
        let pieces = ids.iter().map(|&id| tokenizer.piece(id)).collect();
        return output::json(&Pieces { ids: &ids, pieces });
    }
    let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
    output::product(format!("{}\n", ids.join(",")).as_bytes())
}

/// Prints the bytes of the ids, nothing added.
///
/// # Errors
/// When the model cannot be read or has no such token.
pub(crate) fn detokenize(config: &Config, flags: &Detokenize) -> Result<()> {
    let tokenizer = open(config, &flags.model.model)?;
    let ids =
        if flags.ids.is_empty() { typed(&output::stdin_text("IDS")?)? } else { flags.ids.clone() };
    if let Some(id) = ids.iter().find(|&&id| id as usize >= tokenizer.vocab_len()) {
        bail!("there is no token {id}; the vocabulary has {}", tokenizer.vocab_len());
    }
    if flags.json {
        return output::json(&Whole { text: tokenizer.decode(&ids, flags.no_special) });
    }
    output::product(&tokenizer.decode_bytes(&ids, flags.no_special))
}

fn open(config: &Config, name: &str) -> Result<Tokenizer> {
    let gguf = Gguf::open(&start::file(config, Some(name))?)?;
    Ok(Tokenizer::from_gguf(gguf.metadata())?)
}

/// Ids between commas or white space.
fn typed(text: &str) -> Result<Vec<u32>> {
    let words = text.split(|c: char| c == ',' || c.is_whitespace()).filter(|w| !w.is_empty());
    words
        .map(|w| w.parse().map_err(|_| super::Usage(format!("{w:?} is no token id")).into()))
        .collect()
}
