//! Text of a generation as it grows, never half a character. It must not know where the tokens come from.

use std::sync::Arc;

use crate::Tokenizer;

/// Turns token ids into text one by one.
///
/// What all calls give together is what [`Tokenizer::decode`] gives for all ids at once: an incomplete
/// character is held back until it is complete, and a byte that cannot become one is U+FFFD at once.
#[derive(Debug)]
pub struct StreamDecoder {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    /// A leading space is still to be taken off.
    strip: bool,
    /// Bytes of a character that is not complete: at most three.
    held: Vec<u8>,
    ready: String,
}

impl StreamDecoder {
    /// For ids that begin a text. `skip_special` as in [`Tokenizer::decode`].
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> StreamDecoder {
        let strip = tokenizer.strips_space();
        StreamDecoder { tokenizer, skip_special, strip, held: Vec::new(), ready: String::new() }
    }

    /// For ids that continue a text already shown: a leading space is kept.
    pub fn continuing(tokenizer: Arc<Tokenizer>, skip_special: bool) -> StreamDecoder {
        StreamDecoder { strip: false, ..StreamDecoder::new(tokenizer, skip_special) }
    }

    /// Takes the next token and gives the text that is certain now; often empty.
    pub fn push(&mut self, id: u32) -> &str {
        self.ready.clear();
        if self.skip_special && self.tokenizer.is_control(id) {
            return &self.ready;
        }
        let mut bytes = self.tokenizer.token_bytes(id);
        if self.strip && !bytes.is_empty() {
            self.strip = false;
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        self.held.extend_from_slice(bytes);
        let mut rest = 0;
        for chunk in self.held.utf8_chunks() {
            self.ready.push_str(chunk.valid());
            rest += chunk.valid().len();
            let invalid = chunk.invalid();
            if invalid.is_empty() {
                continue;
            }
            let is_last = rest + invalid.len() == self.held.len();
            if is_last && may_continue(invalid) {
                break;
            }
            self.ready.push(char::REPLACEMENT_CHARACTER);
            rest += invalid.len();
        }
        self.held.drain(..rest);
        &self.ready
    }

    /// Ends the text: gives U+FFFD for a character that never became complete.
    pub fn finish(&mut self) -> &str {
        self.ready.clear();
        if !self.held.is_empty() {
            self.held.clear();
            self.ready.push(char::REPLACEMENT_CHARACTER);
        }
        &self.ready
    }
}

/// Whether bytes that end a text and are no character could be the beginning of one.
fn may_continue(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|e| e.error_len().is_none())
}
