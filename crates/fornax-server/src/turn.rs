//! An assistant's turn taken apart while it comes: thoughts, text, calls of functions. Which marks a model uses
//! is the matter of `reasoning` and `tools`; this file strings them together. Knows no protocol and no tokens.

use fornax_engine::Model;
use fornax_engine::constrain::Grammar;
use fornax_plan::TokenId;
use serde_json::Value;

use crate::refusal::Refusal;

/// Whether and what the model is to call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Choice {
    #[default]
    Auto,
    None,
    Required,
    Named(String),
}

/// What the text of a turn is made of, for one request.
#[derive(Clone, Debug)]
pub(crate) struct TurnFormat {}

/// A turn as it comes.
#[derive(Debug)]
pub(crate) struct Turn {}

/// A part of a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TurnPiece {
    Text(String),
    Reasoning(String),
    Call { index: usize, id: String, name: String },
    Arguments { index: usize, fragment: String },
}

impl TurnFormat {
    pub(crate) fn new(
        _model: &Model,
        _tools: &[Value],
        _choice: &Choice,
        _one_call: bool,
        _prompt: &[TokenId],
    ) -> Result<TurnFormat, Refusal> {
        Ok(TurnFormat {})
    }

    /// What the answer is held to.
    pub(crate) fn grammar(
        &self,
        format: Option<&Grammar>,
        _field: &'static str,
    ) -> Result<Option<Grammar>, Refusal> {
        Ok(format.cloned())
    }

    /// Whether the marks are control tokens, which must then be kept in the text.
    pub(crate) fn keeps_special(&self) -> bool {
        false
    }

    pub(crate) fn start(&self) -> Turn {
        Turn {}
    }
}

impl Turn {
    pub(crate) fn is_reasoning(&self) -> bool {
        false
    }

    pub(crate) fn push(&mut self, text: &str) -> Vec<TurnPiece> {
        if text.is_empty() { Vec::new() } else { vec![TurnPiece::Text(text.to_owned())] }
    }

    pub(crate) fn finish(&mut self) -> Vec<TurnPiece> {
        Vec::new()
    }
}
