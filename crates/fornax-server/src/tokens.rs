//! What one choice's tokens become: text cut at characters and stop strings, with the log-probabilities of the
//! tokens that made it. Runs in the request's task, never on the engine's thread. Knows no protocol.

use std::sync::Arc;

use fornax_engine::StreamDecoder;
use fornax_engine::serve::TokenUpdate;
use fornax_text::{StopMatcher, Tokenizer};

/// A token's log-probability and those of the likeliest beside it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Logprob {
    pub(crate) bytes: Vec<u8>,
    /// None for the first token of a text.
    pub(crate) logprob: Option<f32>,
    pub(crate) top: Vec<(Vec<u8>, f32)>,
    /// Where the token begins in the text of all tokens, in bytes.
    pub(crate) start: usize,
}

impl Logprob {
    pub(crate) fn new(tokenizer: &Tokenizer, update: &TokenUpdate, start: usize) -> Logprob {
        let bytes = |id| tokenizer.token_bytes(id).to_vec();
        Logprob {
            bytes: bytes(update.id),
            logprob: update.logprob,
            top: update.top.iter().map(|(id, p)| (bytes(*id), *p)).collect(),
            start,
        }
    }
}

/// Text that is certain, and the log-probabilities of the tokens that begin in it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Certain {
    pub(crate) text: String,
    pub(crate) logprobs: Vec<Logprob>,
    /// The stop string that ended the text.
    pub(crate) stopped: Option<usize>,
}

/// One choice's tokens, as they come.
#[derive(Debug)]
pub(crate) struct TokenReader {
    tokenizer: Arc<Tokenizer>,
    decoder: StreamDecoder,
    stops: StopMatcher,
    wants_logprobs: bool,
    /// Of tokens whose text is not certain yet.
    held: Vec<Logprob>,
    /// Bytes that the decoder gave, and those that were passed on.
    decoded: usize,
    shown: usize,
}

impl TokenReader {
    /// `continues` is for text that goes on from a prompt; `skip_special` leaves control tokens out.
    pub(crate) fn new(
        tokenizer: Arc<Tokenizer>,
        stops: &[String],
        wants_logprobs: bool,
        continues: bool,
        skip_special: bool,
    ) -> TokenReader {
        let new = if continues { StreamDecoder::continuing } else { StreamDecoder::new };
        TokenReader {
            decoder: new(tokenizer.clone(), skip_special),
            tokenizer,
            stops: StopMatcher::new(stops),
            wants_logprobs,
            held: Vec::new(),
            decoded: 0,
            shown: 0,
        }
    }

    /// Takes one token.
    pub(crate) fn push(&mut self, token: &TokenUpdate) -> Certain {
        if self.wants_logprobs {
            self.held.push(Logprob::new(&self.tokenizer, token, self.decoded));
        }
        let text = self.decoder.push(token.id);
        self.decoded += text.len();
        let found = self.stops.push(text);
        let text = found.text.to_owned();
        let stopped = found.stopped;
        self.certain(text, stopped)
    }

    /// Ends the text: gives what was held back.
    pub(crate) fn finish(&mut self) -> Certain {
        let text = self.decoder.finish();
        self.decoded += text.len();
        let found = self.stops.push(text);
        let (mut text, stopped) = (found.text.to_owned(), found.stopped);
        if !stopped {
            text.push_str(self.stops.finish());
        }
        let mut certain = self.certain(text, stopped);
        if !stopped {
            certain.logprobs.append(&mut self.held);
        }
        certain
    }

    fn certain(&mut self, text: String, stopped: bool) -> Certain {
        self.shown += text.len();
        // A token whose text is not certain waits; one without text goes with what is before it.
        let ready = self.held.iter().take_while(|l| l.start < self.shown).count();
        let logprobs = self.held.drain(..ready).collect();
        if stopped {
            self.held.clear();
        }
        Certain { text, logprobs, stopped: if stopped { self.stops.matched() } else { None } }
    }
}
