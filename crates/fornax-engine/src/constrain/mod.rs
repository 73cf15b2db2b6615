//! Output held to a grammar: JSON by schema, a regular expression, a Lark or GBNF grammar, one of several texts.
//!
//! A [`Constrainer`] turns a [`Grammar`] into a [`Constraint`](crate::serve::Constraint) for one request. What cannot
//! be enforced is refused when the grammar is compiled, by name; nothing is ever ignored. It knows tokens and text;
//! it knows no device and no scheduler.
//!
//! ```
//! use fornax_engine::constrain::{Constrainer, Grammar};
//! use fornax_engine::serve::BitSet;
//! use serde_json::json;
//! # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/models/llama3-q8_0/model.gguf");
//! # let model = fornax_engine::Model::open(path.as_ref())?;
//!
//! let constrainer = Constrainer::new(model.tokenizer());
//! let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]});
//! let compiled = constrainer.compile(&Grammar::JsonSchema(schema))?;
//!
//! // For each request, and before each choice of a token:
//! let mut constraint = compiled.start();
//! let mut allowed = BitSet::new(model.tokenizer().vocab_len());
//! constraint.mask(&mut allowed)?;
//! let brace = model.tokenizer().token_id("{").unwrap();
//! assert!(allowed.contains(brace) && !constraint.may_end());
//! constraint.accept(brace)?;
//! # Ok::<(), fornax_engine::Error>(())
//! ```

mod compile;
mod disjoint;
mod gbnf;
pub mod lark;
mod limits;
mod literal;
mod refs;
mod schema;
mod trie;
mod worker;

use std::fmt;

use serde_json::Value;

pub use compile::{Compiled, Constrainer};
pub use worker::ConstraintWorker;

/// What an answer has to be.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Grammar {
    /// A JSON value that a schema (draft 2020-12, or an older one) accepts.
    JsonSchema(Value),
    /// Any JSON object.
    JsonObject,
    /// A text that a regular expression matches from end to end.
    Regex(String),
    /// A grammar in `llguidance`'s dialect of Lark; its start symbol is `start`. See [`lark`].
    Lark(String),
    /// A grammar in llama.cpp's GBNF; its start symbol is `root`. Parts that need no recursion become lexemes, of
    /// which the longest match is taken.
    Gbnf(String),
    /// One of these texts.
    Choice(Vec<String>),
}

/// Whether a schema's keywords can all be enforced, without compiling it.
///
/// # Errors
/// As [`Constrainer::compile`].
pub fn check_schema(schema: &Value) -> crate::Result<()> {
    limits::json("the JSON schema", schema)?;
    schema::prepare(schema).map(drop)
}

/// Names the kind of grammar, for messages.
impl fmt::Display for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Grammar::JsonSchema(_) => "the JSON schema",
            Grammar::JsonObject => "the JSON object",
            Grammar::Regex(_) => "the regular expression",
            Grammar::Lark(_) => "the Lark grammar",
            Grammar::Gbnf(_) => "the GBNF grammar",
            Grammar::Choice(_) => "the list of choices",
        })
    }
}
