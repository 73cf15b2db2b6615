//! Text in and out of a model: tokenizers, chat templates, and what a stream of tokens needs on its way to
//! a reader. It must not know tensors or devices.
//!
//! - [`Tokenizer`] turns text into token ids and back, from the metadata of a GGUF file or a [`VocabSpec`].
//! - [`StreamDecoder`] gives the text of a generation token by token, never half a character.
//! - [`StopMatcher`] finds stop strings across token borders.
//! - [`ChatTemplate`] lays messages out as the model was trained to see them, and keeps what users wrote
//!   from becoming control tokens.

#![forbid(unsafe_code)]

mod added;
mod bpe;
mod byte_level;
mod error;
mod from_gguf;
mod pretok;
mod spm;
mod stop;
mod stream;
mod template;
mod tokenizer;
mod vocab;

pub use error::Error;
pub use from_gguf::vocab_spec;
pub use stop::{StopMatcher, StopOutput};
pub use stream::StreamDecoder;
pub use template::{ChatTemplate, Prompt};
pub use tokenizer::{EncodeOptions, Tokenizer};
pub use vocab::{ModelKind, TokenKind, VocabSpec};
