//! Chat templates with the meaning that Hugging Face's tokenizers give them: Jinja in a model file that
//! lays out messages as the model was trained to see them. It must not know HTTP or how answers are parsed.

mod clock;
mod engine;
mod guard;
mod json;
mod messages;
mod pystr;
mod source;

use std::sync::OnceLock;

use serde_json::{Map, Value};

use crate::{EncodeOptions, Error, Tokenizer};
use engine::Engine;

/// A model's chat template, parsed.
///
/// `Send + Sync`; one template serves any number of threads.
#[derive(Debug)]
pub struct ChatTemplate {
    engine: Engine,
    source: String,
    bos: String,
    eos: String,
    /// Whether the template reads contents that are lists of parts; found out at the first chat, so
    /// that a file whose template runs for ever can be opened for everything else.
    takes_parts: OnceLock<bool>,
}

/// A rendered chat, and where in it control tokens must not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    text: String,
    /// Sorted byte offsets that no control token may reach across.
    guards: Vec<usize>,
}

impl Prompt {
    /// The prompt as text, exactly what the template gave.
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl ChatTemplate {
    /// Parses a template. `bos` and `eos` are the texts of those tokens, empty where the model has none.
    ///
    /// # Errors
    /// `is_template` if the source is not Jinja; the message names the line.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<ChatTemplate, Error> {
        Ok(ChatTemplate {
            engine: Engine::new(source)?,
            source: source.to_owned(),
            bos: bos.to_owned(),
            eos: eos.to_owned(),
            takes_parts: OnceLock::new(),
        })
    }

    /// The source as the model file has it.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The same template with a fixed time (seconds since 1970, UTC) for `strftime_now`.
    pub fn with_time(mut self, unix_seconds: i64) -> ChatTemplate {
        self.engine.time = Some(unix_seconds);
        self
    }

    /// Renders `messages`, a list of objects with `role` and `content`.
    ///
    /// `extra` is an object with further variables: `add_generation_prompt`, `tools`, `documents`, or
    /// whatever else the template knows. Tool-call arguments that are JSON text become mappings, and a
    /// content that is null or absent is the empty string. Control tokens in the messages are **not**
    /// defused: use [`ChatTemplate::prompt`] for what goes to a model.
    ///
    /// # Errors
    /// `is_raised` if the template refuses the messages, `is_template` if rendering fails, `is_malformed`
    /// if `messages` or `extra` are not what they should be.
    pub fn render(&self, messages: &Value, extra: &Value) -> Result<String, Error> {
        let messages = messages::prepare(messages, self.takes_parts())?;
        self.render_prepared(messages, extra_object(extra)?, None)
    }

    /// Renders `messages` for `tokenizer`, so that nothing that they, the tools or any other variable hold
    /// becomes a control token.
    ///
    /// The text is what [`ChatTemplate::render`] gives. One case needs care: templates of thinking models
    /// take an assistant's content apart at `</think>`, which they would not find in defused content. The
    /// thoughts that such a content starts with are then handed over as `reasoning_content`.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`].
    pub fn prompt(
        &self,
        tokenizer: &Tokenizer,
        messages: &Value,
        extra: &Value,
    ) -> Result<Prompt, Error> {
        let messages = messages::prepare(messages, self.takes_parts())?;
        let extra = extra_object(extra)?;
        if !self.source.contains("</think>") {
            return self.defused(tokenizer, messages, extra);
        }
        let Some(apart) = messages::split_thoughts(&messages, "\n") else {
            return self.defused(tokenizer, messages, extra);
        };
        // Templates differ in whether they keep the line breaks after the thoughts, and whether they look
        // for thoughts in the content at all. The one that comes out as it would undefused is right.
        let plain = self.render_prepared(messages.clone(), extra.clone(), None)?;
        let first = self.defused(tokenizer, apart, extra.clone())?;
        if first.text == plain {
            return Ok(first);
        }
        let kept = messages::split_thoughts(&messages, "");
        for candidate in kept.into_iter().chain([messages]) {
            let prompt = self.defused(tokenizer, candidate, extra.clone())?;
            if prompt.text == plain {
                return Ok(prompt);
            }
        }
        Ok(first)
    }

    fn defused(
        &self,
        tokenizer: &Tokenizer,
        mut messages: Value,
        mut extra: Map<String, Value>,
    ) -> Result<Prompt, Error> {
        let mark = guard::choose_mark(&self.source, &messages, &extra)?;
        guard::defuse_all(&mut messages, &mut extra, tokenizer, mark);
        let marked = self.render_prepared(messages, extra, Some(mark))?;
        let (text, guards) = guard::take_marks(&marked, mark);
        Ok(Prompt { text, guards })
    }

    /// Renders and tokenises in one step.
    ///
    /// BOS is there if and only if the template writes it, and never twice: what the template gives is the
    /// whole prompt, as with Hugging Face's `apply_chat_template`.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`].
    pub fn encode_chat(
        &self,
        tokenizer: &Tokenizer,
        messages: &Value,
        extra: &Value,
    ) -> Result<Vec<u32>, Error> {
        Ok(tokenizer.encode_prompt(&self.prompt(tokenizer, messages, extra)?))
    }

    fn render_prepared(
        &self,
        messages: Value,
        extra: Map<String, Value>,
        mark: Option<char>,
    ) -> Result<String, Error> {
        let mut variables = Map::new();
        variables.insert("messages".into(), messages);
        variables.insert("tools".into(), Value::Null);
        variables.insert("documents".into(), Value::Null);
        variables.insert("add_generation_prompt".into(), false.into());
        variables.insert("bos_token".into(), self.bos.clone().into());
        variables.insert("eos_token".into(), self.eos.clone().into());
        variables.extend(extra);
        self.engine.render(variables, mark)
    }

    fn takes_parts(&self) -> bool {
        *self.takes_parts.get_or_init(|| self.probe_parts())
    }

    /// Tries a message with one part: a template that does not know parts prints the list, or fails.
    fn probe_parts(&self) -> bool {
        const TEXT: &str = "a part of the probe";
        let messages = serde_json::json!([
            {"role": "user", "content": [{"type": "text", "text": TEXT}]}
        ]);
        self.render_prepared(messages, Map::new(), None).is_ok_and(|out| {
            out.contains(TEXT) && !out.contains("'type'") && !out.contains("\"type\"")
        })
    }
}

impl Tokenizer {
    /// The tokens of a rendered chat.
    pub fn encode_prompt(&self, prompt: &Prompt) -> Vec<u32> {
        let options = EncodeOptions { special: true, bos: false };
        let mut ids = self.encode_guarded(prompt.text.as_bytes(), &prompt.guards, options);
        if let (Some(bos), [first, second, ..]) = (self.bos(), &ids[..])
            && *first == bos
            && *second == bos
        {
            ids.remove(0);
        }
        ids
    }
}

fn extra_object(extra: &Value) -> Result<Map<String, Value>, Error> {
    match extra {
        Value::Null => Ok(Map::new()),
        Value::Object(map) => Ok(map.clone()),
        _ => Err(Error::malformed(
            "rendering a chat: the extra variables are not an object; expected names and values",
        )),
    }
}
