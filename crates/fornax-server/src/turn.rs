//! An assistant's turn taken apart while it comes: thoughts, text, calls of functions. Which marks a model uses
//! is the matter of `reasoning` and `tools`; this file strings them together. Knows no protocol and no tokens.

use std::sync::Arc;

use fornax_engine::Model;
use fornax_engine::constrain::Grammar;
use fornax_plan::TokenId;
use fornax_text::Tokenizer;
use serde_json::Value;

use crate::reasoning::{Split, Thinking, ThoughtReader};
use crate::refusal::Refusal;
use crate::tools::{CallReader, Format, HarmonyReader, Tool, Wanted, answer};

/// Tokens at the end of a prompt that may open thoughts.
const TAIL: usize = 32;

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
pub(crate) struct TurnFormat {
    format: Format,
    tools: Arc<[Tool]>,
    choice: Choice,
    one_call: bool,
    thinking: Option<Thinking>,
    keeps_special: bool,
}

/// A turn as it comes.
#[derive(Debug)]
pub(crate) struct Turn {
    thoughts: Option<ThoughtReader>,
    answer: Answer,
}

#[derive(Debug)]
enum Answer {
    Text,
    Calls(Box<CallReader>),
    Harmony(Box<HarmonyReader>),
}

/// A part of a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TurnPiece {
    Text(String),
    Reasoning(String),
    Call { index: usize, id: String, name: String },
    Arguments { index: usize, fragment: String },
}

impl TurnFormat {
    /// The format of a model's answer to `prompt`. With no tool to call, marks of calls are text.
    pub(crate) fn new(
        model: &Model,
        tools: &[Value],
        choice: &Choice,
        one_call: bool,
        prompt: &[TokenId],
    ) -> TurnFormat {
        let template = model.template().map_or("", |t| t.source());
        let tokenizer = model.tokenizer();
        let tail = tokenizer.decode(&prompt[prompt.len().saturating_sub(TAIL)..], false);
        TurnFormat::of(tokenizer, template, &tail, tools, choice, one_call)
    }

    /// For a model with this template, where the prompt ends in `tail`.
    pub(crate) fn of(
        tokenizer: &Tokenizer,
        template: &str,
        tail: &str,
        tools: &[Value],
        choice: &Choice,
        one_call: bool,
    ) -> TurnFormat {
        let format = Format::of(template);
        let callable = *choice != Choice::None;
        let tools: Vec<Tool> = tools.iter().filter(|_| callable).map(Tool::from_value).collect();
        let thinking = Thinking::of(template, tail).filter(|_| format != Format::Harmony);
        let steers =
            |text: &str| tokenizer.token_id(text).is_some_and(|id| tokenizer.is_control(id));
        let keeps_special = (!tools.is_empty() || format == Format::Harmony)
            && format.needs_control_tokens(tokenizer)
            || thinking.is_some_and(|t| steers(t.open) || steers(t.close));
        let choice = choice.clone();
        TurnFormat { format, tools: tools.into(), choice, one_call, thinking, keeps_special }
    }

    /// What the answer is held to.
    ///
    /// # Errors
    /// 400 where what is wanted together cannot be enforced together.
    pub(crate) fn grammar(
        &self,
        model: &Model,
        format: Option<&Grammar>,
        field: &'static str,
    ) -> Result<Option<Grammar>, Refusal> {
        let grammar = self.held_to(model.tokenizer(), format);
        grammar.map_err(|why| Refusal::field(field, why))
    }

    /// As [`TurnFormat::grammar`], the refusal in words.
    pub(crate) fn held_to(
        &self,
        tokenizer: &Tokenizer,
        format: Option<&Grammar>,
    ) -> Result<Option<Grammar>, String> {
        answer(&Wanted {
            format: self.format,
            tools: &self.tools,
            choice: &self.choice,
            one_call: self.one_call,
            thinking: self.thinking,
            answer: format,
            tokenizer,
        })
    }

    /// Whether the marks are control tokens, which must then be kept in the text.
    pub(crate) fn keeps_special(&self) -> bool {
        self.keeps_special
    }

    pub(crate) fn start(&self) -> Turn {
        let answer = if self.format == Format::Harmony {
            Answer::Harmony(Box::new(HarmonyReader::new(self.one_call)))
        } else if self.tools.is_empty() {
            Answer::Text
        } else {
            let reader = CallReader::new(self.format, self.tools.clone(), self.one_call);
            Answer::Calls(Box::new(reader))
        };
        Turn { thoughts: self.thinking.map(ThoughtReader::new), answer }
    }
}

impl Turn {
    /// Whether what comes next is a thought.
    pub(crate) fn is_reasoning(&self) -> bool {
        match (&self.thoughts, &self.answer) {
            (Some(thoughts), _) => thoughts.is_reasoning(),
            (None, Answer::Harmony(reader)) => reader.is_reasoning(),
            (None, _) => false,
        }
    }

    pub(crate) fn push(&mut self, text: &str) -> Vec<TurnPiece> {
        match &mut self.thoughts {
            None => self.answered(text),
            Some(thoughts) => {
                let split = thoughts.push(text);
                self.split(split)
            }
        }
    }

    pub(crate) fn finish(&mut self) -> Vec<TurnPiece> {
        let mut pieces = match &mut self.thoughts {
            None => Vec::new(),
            Some(thoughts) => {
                let split = thoughts.finish();
                self.split(split)
            }
        };
        pieces.extend(match &mut self.answer {
            Answer::Text => Vec::new(),
            Answer::Calls(reader) => reader.finish(),
            Answer::Harmony(reader) => reader.finish(),
        });
        pieces
    }

    fn split(&mut self, split: Split) -> Vec<TurnPiece> {
        let mut pieces = Vec::new();
        if !split.thought.is_empty() {
            pieces.push(TurnPiece::Reasoning(split.thought));
        }
        pieces.extend(self.answered(&split.answer));
        pieces
    }

    fn answered(&mut self, text: &str) -> Vec<TurnPiece> {
        if text.is_empty() {
            return Vec::new();
        }
        match &mut self.answer {
            Answer::Text => vec![TurnPiece::Text(text.to_owned())],
            Answer::Calls(reader) => reader.push(text),
            Answer::Harmony(reader) => reader.push(text),
        }
    }
}
