//! A model's tokens as the tree of bytes that masks are computed on. It knows no grammar.

use std::sync::Arc;

use fornax_text::{TokenKind, Tokenizer};
use llguidance::toktrie::{ApproximateTokEnv, INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie};

/// The tree cannot hold longer tokens; a text is written without them.
const LONGEST: usize = 1000;

/// The tokens of a model, as `llguidance` wants them.
///
/// Tokens that are no text (control tokens, everything that ends a generation) carry a mark in front, so that no
/// text can ask for them: only a grammar that names them can. Holes in the numbering and tokens that begin with
/// 0xFF, which no UTF-8 has and the mark is, are never allowed.
pub(super) fn environment(tokenizer: &Tokenizer) -> TokEnv {
    let n = tokenizer.vocab_len() as u32;
    let words: Vec<Vec<u8>> = (0..n).map(|id| word(tokenizer, id)).collect();
    let ends = tokenizer.ends_of_generation();
    let info = TokRxInfo::new(n, ends.first().copied().unwrap_or(INVALID_TOKEN));
    let mut trie = TokTrie::from(&info, &words);
    if !ends.is_empty() {
        trie = trie.with_eos_tokens(ends);
    }
    Arc::new(ApproximateTokEnv::new(trie))
}

fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let marked = |text: &str| {
        let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
        word.extend_from_slice(text.as_bytes());
        word
    };
    let bytes = tokenizer.token_bytes(id);
    if bytes.len() > LONGEST {
        return Vec::new();
    }
    if tokenizer.is_control(id) || tokenizer.is_end_of_generation(id) {
        return marked(tokenizer.piece(id));
    }
    let never = tokenizer.kind(id) == Some(TokenKind::Unused)
        || bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER);
    if never { Vec::new() } else { bytes.to_vec() }
}
