//! Grammars for turns: calls that have to come, arguments that have to meet their schema, answers with thoughts before
//! them, each in the model's own format. It writes Lark and knows nothing of how it is enforced.

use std::fmt::Write;

use fornax_engine::constrain::{self, Grammar, lark};
use fornax_text::Tokenizer;
use serde_json::{Value, json};

use super::{Format, Tool};
use crate::reasoning::Thinking;
use crate::turn::Choice;

/// Calls in one turn, at most, where a grammar writes them.
const CALLS: u32 = 16;

/// What a turn is to be.
pub(crate) struct Wanted<'a> {
    pub(crate) format: Format,
    pub(crate) tools: &'a [Tool],
    pub(crate) choice: &'a Choice,
    pub(crate) one_call: bool,
    pub(crate) thinking: Option<Thinking>,
    pub(crate) answer: Option<&'a Grammar>,
    pub(crate) tokenizer: &'a Tokenizer,
}

/// The grammar of a turn; none where nothing has to be enforced.
///
/// # Errors
/// In words, where what is wanted together cannot be enforced together.
pub(crate) fn answer(wanted: &Wanted<'_>) -> Result<Option<Grammar>, String> {
    let callable = !wanted.tools.is_empty() && *wanted.choice != Choice::None;
    let forced = callable && matches!(wanted.choice, Choice::Required | Choice::Named(_));
    let strict = callable && wanted.tools.iter().any(|tool| tool.strict);
    let wrapped = wanted.thinking.is_some() || wanted.format == Format::Harmony;
    match wanted.answer {
        None if !forced && !strict => return Ok(None),
        Some(own) if !callable && !wrapped => return Ok(Some(own.clone())),
        Some(Grammar::Lark(_) | Grammar::Gbnf(_)) if !callable && !wanted.begins_elsewhere() => {
            return Ok(wanted.answer.cloned());
        }
        _ => {}
    }
    let mut out = Writer { wanted, rules: String::new() };
    let value = match wanted.answer.filter(|_| !forced) {
        Some(grammar) => Some(out.value(grammar)?),
        None => None,
    };
    let body = match value {
        Some(value) if callable => format!("{value} | {}", out.calls()?),
        Some(value) => value,
        None if forced => out.calls()?,
        None => out.free()?,
    };
    let start = out.thoughts();
    Ok(Some(Grammar::Lark(format!("start: {start} body\nbody: {body}\n{}", out.rules))))
}

impl Wanted<'_> {
    /// Whether the answer itself comes after something that is no part of it.
    fn begins_elsewhere(&self) -> bool {
        self.format == Format::Harmony || self.thinking.is_some_and(|thinking| thinking.begun)
    }
}

struct Writer<'a> {
    wanted: &'a Wanted<'a>,
    rules: String,
}

impl Writer<'_> {
    fn rule(&mut self, name: &str, body: &str) -> String {
        let _ = writeln!(self.rules, "{name}: {body}");
        name.to_owned()
    }

    /// A mark: the control token, where it is one, else its text.
    fn mark(&self, text: &str) -> String {
        let tokenizer = self.wanted.tokenizer;
        match tokenizer.token_id(text).filter(|id| tokenizer.is_control(*id)) {
            Some(id) => format!("<[{id}]>"),
            None => lark::quote(text),
        }
    }

    fn is_token(&self, text: &str) -> bool {
        self.mark(text).starts_with('<')
    }

    /// What may, or has to, come before the answer.
    fn thoughts(&mut self) -> String {
        if self.wanted.format == Format::Harmony {
            let analysis = format!(
                "{} \"analysis\" {} /(?s:.+)/ {} {} \"assistant\"",
                self.mark("<|channel|>"),
                self.mark("<|message|>"),
                self.mark("<|end|>"),
                self.mark("<|start|>"),
            );
            return format!("{}?", self.rule("thoughts", &analysis));
        }
        let Some(Thinking { open, close, begun }) = self.wanted.thinking else {
            return String::new();
        };
        let ends = if self.is_token(close) {
            format!("/(?s:.+)/? {}", self.mark(close))
        } else {
            let _ = writeln!(self.rules, "thinking[lazy]: /(?s:.*){}/", lark::escape(close));
            "thinking".into()
        };
        let thoughts = self.rule("thoughts", &format!("{ends} /\\n{{1,2}}/?"));
        if begun {
            return thoughts;
        }
        let open = self.mark(open);
        format!("({open} {thoughts})?")
    }

    fn value(&mut self, grammar: &Grammar) -> Result<String, String> {
        let value = match grammar {
            Grammar::JsonSchema(schema) => lark::json(schema),
            Grammar::JsonObject => lark::json(&json!({"type": "object"})),
            Grammar::Regex(pattern) => format!("/{}/", lark::regex(pattern)),
            Grammar::Choice(texts) => format!("/{}/", lark::any_of(texts)),
            Grammar::Lark(_) | Grammar::Gbnf(_) => {
                return Err("a grammar cannot be combined with calls of tools, or with the thoughts that this model \
                            writes first; a JSON schema or a regular expression can"
                    .into());
            }
        };
        if self.wanted.format == Format::Harmony {
            let (channel, message) = (self.mark("<|channel|>"), self.mark("<|message|>"));
            return Ok(format!("{channel} \"final\" {message} {value}"));
        }
        Ok(value)
    }

    /// Text as the model likes, in which calls meet their schemas.
    fn free(&mut self) -> Result<String, String> {
        let format = self.wanted.format;
        let mark = match format {
            Format::Hermes => "<tool_call>",
            Format::Lfm2 => "<|tool_call_start|>",
            Format::Mistral | Format::MistralArgs => "[TOOL_CALLS]",
            Format::Llama => {
                let calls = self.calls()?;
                return Ok(format!("{calls} | /\\s*[^\\s{{](?s:.*)/"));
            }
            Format::Harmony => {
                let calls = self.calls()?;
                let (channel, message) = (self.mark("<|channel|>"), self.mark("<|message|>"));
                return Ok(format!("{calls} | {channel} /final|commentary/ {message} /(?s:.+)/"));
            }
            Format::Gemma => {
                return Err("with this model's format, `strict` can be enforced only where a call has to come: with \
                            `tool_choice` \"required\" or a function's name"
                    .into());
            }
        };
        let calls = self.calls()?;
        if self.is_token(mark) {
            return Ok(format!("/(?s:.+)/? ({calls})?"));
        }
        // The rule for the first call begins with its mark; before text, the text ends with it.
        let _ = writeln!(self.rules, "lead[lazy]: /(?s:.*){}/", lark::escape(mark));
        Ok("/(?s:.+)/? | lead first_call more_calls".into())
    }

    /// Calls and nothing else.
    fn calls(&mut self) -> Result<String, String> {
        let format = self.wanted.format;
        let python = matches!(format, Format::Lfm2 | Format::Gemma)
            && self.tools().all(|tool| Python::of(tool).is_some());
        let mut each = Vec::new();
        for (i, tool) in self.tools().cloned().collect::<Vec<_>>().iter().enumerate() {
            let body = if python { self.python(i, tool) } else { self.call(tool)? };
            each.push(self.rule(&format!("call_{i}"), &body));
        }
        if each.is_empty() {
            return Err("the function that has to be called is not among the tools".into());
        }
        let call = self.rule("call", &each.join(" | "));
        let more = |between: &str, call: &str| match self.wanted.one_call {
            true => String::new(),
            false => format!("({} {call}){{0,{}}}", lark::quote(between), CALLS - 1),
        };
        Ok(match format {
            Format::Hermes => {
                let (open, close) = (self.mark("<tool_call>"), self.mark("</tool_call>"));
                let again = more("\n", &format!("{open} first_call"));
                self.rule("first_call", &format!("\"\\n\" {call} \"\\n\" {close}"));
                let again = if again.is_empty() { "\"\"".into() } else { again };
                self.rule("more_calls", &again);
                format!("{open} first_call more_calls")
            }
            Format::Llama => format!("{call} {}", more("; ", &call)),
            Format::Mistral => {
                let again = more(", ", &call);
                self.rule("first_call", &format!("\"[\" {call} {again} \"]\""));
                self.rule("more_calls", "\"\"");
                format!("{} first_call more_calls", self.mark("[TOOL_CALLS]"))
            }
            Format::MistralArgs => {
                let open = self.mark("[TOOL_CALLS]");
                let again = more("", &format!("{open} {call}"));
                self.rule("first_call", &call);
                self.rule("more_calls", if again.is_empty() { "\"\"" } else { &again });
                format!("{open} first_call more_calls")
            }
            Format::Lfm2 => {
                let (open, close) =
                    (self.mark("<|tool_call_start|>"), self.mark("<|tool_call_end|>"));
                let again = more(", ", &call);
                self.rule("first_call", &format!("\"[\" {call} {again} \"]\" {close}"));
                self.rule("more_calls", "\"\"");
                format!("{open} first_call more_calls")
            }
            Format::Gemma if python => {
                format!("\"```tool_code\\n\" {call} {} \"\\n```\"", more("\n", &call))
            }
            Format::Gemma => {
                format!("\"```tool_code\\n[\" {call} {} \"]\\n```\"", more(", ", &call))
            }
            Format::Harmony => call,
        })
    }

    /// The tools that may be called.
    fn tools(&self) -> impl Iterator<Item = &Tool> {
        let named = match self.wanted.choice {
            Choice::Named(name) => Some(name.as_str()),
            _ => None,
        };
        self.wanted.tools.iter().filter(move |tool| named.is_none_or(|name| name == tool.name))
    }

    /// One call of a tool, without the marks around it.
    fn call(&self, tool: &Tool) -> Result<String, String> {
        let name = Value::from(tool.name.as_str());
        let arguments = lark::json(&self.parameters(tool)?);
        let object = |key: &str| {
            let before = format!("{{\"name\": {name}, \"{key}\": ");
            format!("{} {arguments} \"}}\"", lark::quote(&before))
        };
        Ok(match self.wanted.format {
            Format::Llama => object("parameters"),
            Format::MistralArgs => {
                format!("{} {} {arguments}", lark::quote(&tool.name), self.mark("[ARGS]"))
            }
            Format::Harmony => format!(
                "{} {} {} \"json\" {} {arguments}",
                self.mark("<|channel|>"),
                lark::quote(&format!("commentary to=functions.{} ", tool.name)),
                self.mark("<|constrain|>"),
                self.mark("<|message|>"),
            ),
            _ => object("arguments"),
        })
    }

    /// The schema that arguments are held to: always an object; what is not strict may ask for less.
    ///
    /// # Errors
    /// In words, where a strict schema cannot be enforced.
    fn parameters(&self, tool: &Tool) -> Result<Value, String> {
        let mut schema = tool.parameters.clone();
        if let Some(map) = schema.as_object_mut() {
            map.entry("type").or_insert("object".into());
            if tool.strict {
                map.entry("additionalProperties").or_insert(false.into());
            }
        }
        match constrain::check_schema(&schema) {
            Ok(()) => Ok(schema),
            Err(e) if tool.strict => Err(format!("the parameters of {:?}: {e}", tool.name)),
            Err(_) => Ok(json!({"type": "object"})),
        }
    }

    /// A call with arguments by name.
    fn python(&mut self, number: usize, tool: &Tool) -> String {
        let Some(Python { properties }) = Python::of(tool) else { return String::new() };
        let last = properties.len();
        // `a…`: arguments before these; `b…`: none yet.
        self.rule(&format!("a{number}_{last}"), "\"\"");
        self.rule(&format!("b{number}_{last}"), "\"\"");
        for (k, (name, schema, required)) in properties.iter().enumerate().rev() {
            let literal = if schema["type"] == "boolean" {
                "(\"True\" | \"False\")".to_owned()
            } else {
                lark::json(schema)
            };
            let argument = self.rule(
                &format!("p{number}_{k}"),
                &format!("{} {literal}", lark::quote(&format!("{name}="))),
            );
            let (after, none) = (format!("a{number}_{}", k + 1), format!("b{number}_{}", k + 1));
            let (a, b) = if *required {
                (format!("\", \" {argument} {after}"), format!("{argument} {after}"))
            } else {
                (format!("(\", \" {argument})? {after}"), format!("{argument} {after} | {none}"))
            };
            self.rule(&format!("a{number}_{k}"), &a);
            self.rule(&format!("b{number}_{k}"), &b);
        }
        format!("{} b{number}_0 \")\"", lark::quote(&format!("{}(", tool.name)))
    }
}

/// Parameters that can be written as arguments by name, one after the other.
struct Python<'a> {
    properties: Vec<(&'a str, &'a Value, bool)>,
}

impl Python<'_> {
    fn of(tool: &Tool) -> Option<Python<'_>> {
        let schema = tool.parameters.as_object()?;
        const PLAIN: &[&str] = &[
            "type",
            "properties",
            "required",
            "additionalProperties",
            "title",
            "description",
            "$schema",
        ];
        let plain = schema.keys().all(|key| PLAIN.contains(&key.as_str()))
            && !tool.parameters.to_string().contains("\"$ref\"");
        let properties: Vec<(&String, &Value)> = match schema.get("properties") {
            Some(properties) => properties.as_object()?.iter().collect(),
            None => Vec::new(),
        };
        let required: Vec<&str> = schema
            .get("required")
            .and_then(Value::as_array)
            .map_or_else(Vec::new, |names| names.iter().filter_map(Value::as_str).collect());
        let name = |name: &str| {
            name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
                && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        };
        let sound = plain
            && required.iter().all(|name| properties.iter().any(|(key, _)| key == name))
            && properties.iter().all(|(key, schema)| {
                name(key) && schema.is_object() && constrain::check_schema(schema).is_ok()
            });
        sound.then(|| Python {
            properties: properties
                .into_iter()
                .map(|(name, schema)| (name.as_str(), schema, required.contains(&name.as_str())))
                .collect(),
        })
    }
}
