//! A conversation, whichever protocol it came in: messages, tools and what the answer must be, made into a prompt
//! and an order. Messages are in OpenAI's form here. Knows templates, no endpoint.

use std::sync::Arc;

use fornax_engine::constrain::Grammar;
use fornax_plan::TokenId;
use fornax_text::Prompt;
use serde_json::{Map, Value, json};

use crate::app::{App, LARGE, beside};
use crate::backend::Served;
use crate::live::Reading;
use crate::order::Order;
use crate::refusal::Refusal;
use crate::turn::{Choice, TurnFormat};

/// A conversation to be answered.
#[derive(Clone, Debug, Default)]
pub(super) struct Conversation {
    pub(super) messages: Vec<Value>,
    /// Each `{"type": "function", "function": {…}}`.
    pub(super) tools: Vec<Value>,
    pub(super) choice: Choice,
    /// One call in a turn at most.
    pub(super) one_call: bool,
    /// What the answer must be.
    pub(super) format: Option<Grammar>,
    pub(super) kwargs: Map<String, Value>,
    pub(super) effort: Option<String>,
    /// Thinking on or off.
    pub(super) thinking: Option<bool>,
    /// Where the request says what the answer must be, for errors.
    pub(super) format_field: &'static str,
}

impl Conversation {
    /// The prompt as the model's template lays it out.
    ///
    /// # Errors
    /// 400 with the template's own words where it refuses the messages.
    pub(super) fn prompt(&self, served: &Served, answer: bool) -> Result<Prompt, Refusal> {
        let template = served.model.template();
        let template = template
            .map_err(|e| Refusal::field("messages", e.to_string()).with_code("no_chat_template"))?;
        let mut extra = self.kwargs.clone();
        for own in ["messages", "tools"] {
            if extra.contains_key(own) {
                let param = format!("chat_template_kwargs.{own}");
                let said = format!("{param}: the request's own {own} are what the template sees");
                return Err(Refusal::field(param, said));
            }
        }
        self.think(template.source(), &mut extra)?;
        if !self.tools.is_empty() && self.choice != Choice::None {
            extra.insert("tools".into(), self.shown_tools());
        }
        extra.entry("add_generation_prompt").or_insert(answer.into());
        let messages = Value::from(self.messages.iter().map(shown).collect::<Vec<_>>());
        template
            .prompt(served.model.tokenizer(), &messages, &extra.into())
            .map_err(|e| Refusal::field("messages", e.to_string()).with_code("template_refused"))
    }

    /// The prompt's tokens.
    ///
    /// # Errors
    /// As [`Conversation::prompt`].
    pub(super) async fn tokens(
        self: &Arc<Self>,
        served: &Arc<Served>,
    ) -> Result<Vec<TokenId>, Refusal> {
        let (conversation, served) = (self.clone(), served.clone());
        let size: usize = self.messages.iter().chain(&self.tools).map(weight).sum();
        beside(size > LARGE, move || {
            let prompt = conversation.prompt(&served, true)?;
            Ok(served.model.tokenizer().encode_prompt(&prompt))
        })
        .await
    }

    /// Prompt, reading and grammar; the rest is the endpoint's.
    ///
    /// # Errors
    /// 400 where the template or the grammar is refused.
    pub(super) async fn order(
        self: &Arc<Self>,
        app: &Arc<App>,
        served: &Arc<Served>,
    ) -> Result<Order, Refusal> {
        let tokens = self.tokens(served).await?;
        let format =
            TurnFormat::new(&served.model, &self.tools, &self.choice, self.one_call, &tokens);
        let grammar = format.grammar(&served.model, self.format.as_ref(), self.format_field)?;
        let mut order = Order::new(served.clone(), tokens);
        if let Some(grammar) = grammar {
            let field = if self.format.is_some() { self.format_field } else { "tools" };
            order.rule = Some(app.compile(served, grammar, field).await?);
        }
        order.reading = Reading::Turn(format);
        order.deadline = app.deadline();
        Ok(order)
    }

    /// Hands over how much to think, to a template that has a word for it.
    fn think(&self, source: &str, extra: &mut Map<String, Value>) -> Result<(), Refusal> {
        if let Some(effort) = &self.effort {
            if source.contains("reasoning_effort") {
                extra.insert("reasoning_effort".into(), effort.clone().into());
            } else if source.contains("enable_thinking") {
                extra.insert("enable_thinking".into(), (effort != "none").into());
            } else {
                let said = "this model's chat template knows no reasoning effort";
                return Err(
                    Refusal::field("reasoning_effort", said).with_code("unsupported_parameter")
                );
            }
        }
        match self.thinking {
            Some(thinking) if source.contains("enable_thinking") => {
                extra.insert("enable_thinking".into(), thinking.into());
            }
            Some(true) if !source.contains("think") && !source.contains("reasoning") => {
                let said = "this model's chat template knows no thinking";
                return Err(Refusal::field("thinking", said).with_code("unsupported_parameter"));
            }
            // Thoughts that come unasked are given in parts of their own.
            _ => {}
        }
        Ok(())
    }

    /// The tools as the template shows them to the model: without what is only between client and server.
    fn shown_tools(&self) -> Value {
        let mut tools = self.tools.clone();
        for tool in &mut tools {
            if let Some(function) = tool["function"].as_object_mut() {
                function.remove("strict");
                function.retain(|_, v| !v.is_null());
            }
        }
        tools.into()
    }
}

/// About how many bytes of text a value holds.
fn weight(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(weight).sum(),
        Value::Object(map) => map.values().map(weight).sum(),
        _ => 8,
    }
}

/// A message as the template sees it: without nulls and what has no meaning.
fn shown(message: &Value) -> Value {
    let Some(map) = message.as_object() else { return message.clone() };
    let mut out = Map::new();
    for (name, value) in map {
        match (name.as_str(), value) {
            (_, Value::Null) | ("refusal" | "annotations", _) => {}
            ("role", Value::String(role)) if role == "developer" => {
                out.insert("role".into(), "system".into());
            }
            ("content", Value::Array(parts)) => {
                let parts = parts.iter().map(|p| json!({ "type": "text", "text": p["text"] }));
                out.insert("content".into(), parts.collect());
            }
            ("tool_calls", Value::Array(calls)) if calls.is_empty() => {}
            ("tool_calls", Value::Array(calls)) => {
                let calls = calls.iter().map(
                    |c| json!({ "id": c["id"], "type": "function", "function": c["function"] }),
                );
                out.insert("tool_calls".into(), calls.collect());
            }
            _ => {
                out.insert(name.clone(), value.clone());
            }
        }
    }
    out.into()
}

/// Refuses arguments of earlier calls that are no JSON object: templates walk through them.
///
/// # Errors
/// 400, naming the call.
pub(super) fn check_arguments(messages: &[Value], field: &str) -> Result<(), Refusal> {
    for (m, message) in messages.iter().enumerate() {
        for (c, call) in message["tool_calls"].as_array().into_iter().flatten().enumerate() {
            let arguments = call["function"]["arguments"].as_str().unwrap_or_default();
            let sound = arguments.trim().is_empty()
                || serde_json::from_str::<Map<String, Value>>(arguments).is_ok();
            if !sound {
                let param = format!("{field}[{m}].tool_calls[{c}].function.arguments");
                let said = format!("{param}: this is no JSON object");
                return Err(Refusal::field(param, said));
            }
        }
    }
    Ok(())
}
