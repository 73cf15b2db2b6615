//! Calls of functions in what a model writes: which marks a model uses, reading them while they come, and grammars
//! that have them written. It knows text and pieces of turns; it knows no protocol and no engine.

mod block;
mod grammar;
mod harmony;
mod json_call;
mod python;
mod scan;
#[cfg(test)]
mod tests;

use fornax_text::Tokenizer;
use serde_json::{Value, json};

pub(crate) use grammar::{Wanted, answer};
pub(crate) use harmony::HarmonyReader;
pub(crate) use scan::CallReader;

/// A function that may be called.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tool {
    pub(crate) name: String,
    /// The schema of its arguments.
    pub(crate) parameters: Value,
    /// Whether arguments have to meet the schema.
    pub(crate) strict: bool,
}

impl Tool {
    /// From `{"type": "function", "function": {…}}`.
    pub(crate) fn from_value(value: &Value) -> Tool {
        let function = &value["function"];
        let parameters = function.get("parameters").filter(|p| p.is_object());
        Tool {
            name: function["name"].as_str().unwrap_or_default().to_owned(),
            parameters: parameters.cloned().unwrap_or_else(|| json!({"type": "object"})),
            strict: function["strict"] == true,
        }
    }
}

/// A call that is known as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Written {
    name: String,
    /// JSON text of an object.
    arguments: String,
}

/// How a model was trained to write calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, Qwen and Hermes; also with `<function=name>` inside.
    Hermes,
    /// `{"name": …, "parameters": {…}}` and nothing else, perhaps after `<|python_tag|>`: Llama 3.
    Llama,
    /// `[TOOL_CALLS][{"name": …, "arguments": {…}}]`.
    Mistral,
    /// `[TOOL_CALLS]name[ARGS]{…}`, of Mistral's later tokenizers.
    MistralArgs,
    /// `<|tool_call_start|>[f(x=1)]<|tool_call_end|>`.
    Lfm2,
    /// Python or JSON between three back ticks.
    Gemma,
    /// Channels: `<|channel|>commentary to=functions.f<|message|>{…}`, gpt-oss.
    Harmony,
}

/// What in a chat template gives a format away; the first that is found counts.
const SIGNS: &[(&str, Format)] = &[
    ("<|channel|>", Format::Harmony),
    ("<|tool_call_start|>", Format::Lfm2),
    ("<|tool_list_start|>", Format::Lfm2),
    ("[ARGS]", Format::MistralArgs),
    ("[TOOL_CALLS]", Format::Mistral),
    ("<tool_call>", Format::Hermes),
    ("<|python_tag|>", Format::Llama),
    ("Environment: ipython", Format::Llama),
    ("<start_of_turn>", Format::Gemma),
];

impl Format {
    /// The format of a model by its template; Hermes where it says nothing.
    pub(crate) fn of(template: &str) -> Format {
        let found = SIGNS.iter().find(|(sign, _)| template.contains(sign));
        found.map_or(Format::Hermes, |(_, format)| *format)
    }

    /// The marks that have to be in the text for it to be read.
    fn marks(self) -> &'static [&'static str] {
        match self {
            Format::Hermes => &["<tool_call>", "</tool_call>"],
            Format::Llama => &["<|python_tag|>"],
            Format::Mistral | Format::MistralArgs => &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
            Format::Lfm2 => &["<|tool_call_start|>", "<|tool_call_end|>"],
            Format::Gemma => &[],
            Format::Harmony => harmony::MARKS,
        }
    }

    /// Whether the marks are control tokens of this model, which a decoder leaves out unless told otherwise.
    pub(crate) fn needs_control_tokens(self, tokenizer: &Tokenizer) -> bool {
        let mut ids = self.marks().iter().filter_map(|mark| tokenizer.token_id(mark));
        ids.any(|id| tokenizer.is_control(id))
    }

    /// A call's name for the messages that answer it. Mistral's templates refuse any that has not nine characters.
    fn new_id(self) -> String {
        match self {
            Format::Mistral | Format::MistralArgs => crate::order::new_id("")[..9].to_owned(),
            _ => crate::order::new_id("call_"),
        }
    }
}
