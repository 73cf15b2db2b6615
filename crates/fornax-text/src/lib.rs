//! Text in and out of a model: tokenizers, chat templates, and what a stream of tokens needs on its way to
//! a reader. It must not know tensors or devices.
//!
//! - [`Tokenizer`] turns text into token ids and back, from the metadata of a GGUF file or a [`VocabSpec`].
//! - [`StreamDecoder`] gives the text of a generation token by token, never half a character.
//! - [`StopMatcher`] finds stop strings across token borders.
//! - [`ChatTemplate`] lays messages out as the model was trained to see them, and keeps what users wrote
//!   from becoming control tokens.
//!
//! ```
//! use std::sync::Arc;
//!
//! use fornax_text::{ChatTemplate, EncodeOptions, ModelKind, StreamDecoder, Tokenizer, VocabSpec};
//! use serde_json::json;
//!
//! // A real program has `Tokenizer::from_gguf(file.metadata())` here.
//! let tokens = ["<unk>", "h", "i", "hi", "!"].map(str::to_owned).to_vec();
//! let spec = VocabSpec { scores: vec![0.0; 5], add_space_prefix: Some(false), ..VocabSpec::new(ModelKind::Spm, "", tokens) };
//! let tokenizer = Arc::new(Tokenizer::new(&spec)?);
//!
//! let template = ChatTemplate::new("{% for m in messages %}{{ m.content }}{% endfor %}", "", "")?;
//! let messages = json!([{"role": "user", "content": "hi!"}]);
//! let prompt = template.encode_chat(&tokenizer, &messages, &json!({"add_generation_prompt": true}))?;
//! assert_eq!(prompt, tokenizer.encode("hi!", EncodeOptions::default()));
//!
//! let mut answer = StreamDecoder::new(Arc::clone(&tokenizer), true);
//! let text: String = prompt.iter().map(|&id| answer.push(id).to_owned()).collect();
//! assert_eq!(text + answer.finish(), "hi!");
//! # Ok::<(), fornax_text::Error>(())
//! ```

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
