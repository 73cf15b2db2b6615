//! From a model file to generated tokens: families, sessions, and the loop that drives a
//! device's program. It knows no provider and no HTTP.
//!
//! ```
//! use std::ops::ControlFlow;
//! use fornax_engine::{Event, Model, Request, SampleParams, Session, SessionOptions, StreamDecoder};
//!
//! # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/models/llama3-q8_0/model.gguf");
//! # let device = fornax_plan::reference::ReferenceDevice::default();
//! let model = Model::open(path.as_ref())?;
//! let mut session = Session::new(&device, model.plan(), &SessionOptions::default())?;
//! let mut text = StreamDecoder::new(model.tokenizer().clone(), true);
//! let prompt = model.encode("Once upon a time");
//! let request = Request {
//!     prompt: &prompt,
//!     sample: SampleParams::default(),
//!     sampler: None,
//!     max_new: 8,
//!     stop: model.tokenizer().ends_of_generation(),
//!     logprobs: false,
//! };
//! session.generate(&request, |event| {
//!     if let Event::Token { token, .. } = event {
//!         print!("{}", text.push(token));
//!     }
//!     ControlFlow::Continue(())
//! })?;
//! # Ok::<(), fornax_engine::Error>(())
//! ```

#![forbid(unsafe_code)]

pub mod arch;
pub mod constrain;
mod error;
mod kv;
mod model;
mod perplexity;
pub mod sampler;
pub mod serve;
mod session;
mod speculate;

pub use error::{Error, Result};
pub use fornax_plan::SampleParams;
pub use fornax_text::StreamDecoder;
pub use model::Model;
pub use perplexity::{Perplexity, perplexity};
pub use session::{Event, Finish, Request, Session, SessionOptions};
