//! `POST /v1/chat/completions`. Knows OpenAI's chat protocol, nothing of how an answer comes about.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use fornax_engine::constrain::Grammar;
use serde_json::{Map, Value, json};

use super::conversation::{Conversation, check_arguments};
use super::{read, write};
use crate::app::App;
use crate::gate::Note;
use crate::live::{End, Live, Piece, Usage};
use crate::order::{Order, new_id};
use crate::refusal::{Refusal, json_response};
use crate::schema::Body;
use crate::sse::{self, Events, Outgoing};
use crate::tokens::Logprob;
use crate::turn::Choice;
use crate::whole::{Whole, gather};

pub(super) async fn create(
    State(app): State<Arc<App>>,
    Extension(note): Extension<Note>,
    request: Request,
) -> Result<Response, Refusal> {
    let body = app.read(request, "ChatRequest").await?;
    let (order, streaming) = order(&app, body).await?;
    note.model(&order.served.alias);
    let head = Head {
        id: new_id("chatcmpl-"),
        model: order.served.alias.clone(),
        created: write::now(),
        logprobs: order.logprobs.is_some(),
    };
    let live = Live::start(&order, app.metrics.clone())?;
    let usages = vec![Usage::default(); order.n];
    if let Some(include_usage) = streaming {
        return Ok(sse::stream(live, Stream { head, include_usage, usages, note }));
    }
    let all = gather(live, order.n).await?;
    let sum = Usage::sum(&all.iter().map(Whole::usage).collect::<Vec<_>>(), order.n);
    note.usage(sum);
    Ok(json_response(StatusCode::OK, &head.whole(&all, sum)))
}

async fn order(app: &Arc<App>, body: Body) -> Result<(Order, Option<bool>), Refusal> {
    let served = read::model(app, &body)?;
    let streaming = read::streaming(&body)?;
    let messages = body.list("messages").to_vec();
    check_arguments(&messages, "messages")?;
    let tools = body.list("tools").to_vec();
    let conversation = Conversation {
        messages,
        choice: choice(body.get("tool_choice"), &tools)?,
        tools,
        one_call: body.flag("parallel_tool_calls") == Some(false),
        format: body.get("response_format").and_then(format),
        kwargs: kwargs(&body),
        effort: body.text("reasoning_effort").map(str::to_owned),
        thinking: None,
        format_field: "response_format",
    };
    let mut sampling = read::sampling(&body, &served)?;
    read::seed(&body, &mut sampling);
    let limits = [body.integer("max_tokens"), body.integer("max_completion_tokens")];
    if limits.contains(&Some(0)) {
        return Err(Refusal::field(
            "max_completion_tokens",
            "0 tokens are no answer; ask for 1 or more",
        ));
    }
    let logprobs = logprobs(&body)?;
    let (n, stops, priority) =
        (read::choices(&body), read::stops(&body, "stop"), read::priority(&body));
    body.finish();
    let order = Arc::new(conversation).order(app, &served).await?;
    let max_new = limits.into_iter().flatten().map(read::limit).min().unwrap_or(u32::MAX);
    Ok((Order { n, sampling, max_new, stops, logprobs, priority, ..order }, streaming))
}

fn logprobs(body: &Body) -> Result<Option<u8>, Refusal> {
    let top = body.integer("top_logprobs").and_then(|n| u8::try_from(n).ok());
    match (body.flag("logprobs").unwrap_or(false), top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => {
            Err(Refusal::field("top_logprobs", "top_logprobs need logprobs to be true"))
        }
    }
}

/// Further variables for the template.
pub(super) fn kwargs(body: &Body) -> Map<String, Value> {
    body.get("chat_template_kwargs").and_then(Value::as_object).cloned().unwrap_or_default()
}

/// What `tool_choice` says; the name of a function is at either of two places.
///
/// # Errors
/// 400 where it names what is not there.
pub(super) fn choice(value: Option<&Value>, tools: &[Value]) -> Result<Choice, Refusal> {
    let choice = match value {
        None => Choice::Auto,
        Some(Value::String(word)) => match word.as_str() {
            "none" => Choice::None,
            "required" => Choice::Required,
            _ => Choice::Auto,
        },
        Some(named) => {
            let name = named["function"]["name"].as_str().or(named["name"].as_str());
            let name = name.unwrap_or_default().to_owned();
            if !tools.iter().any(|t| t["function"]["name"] == name.as_str()) {
                let said = format!("tool_choice: there is no tool {name:?} among the tools");
                return Err(Refusal::field("tool_choice", said));
            }
            Choice::Named(name)
        }
    };
    if choice == Choice::Required && tools.is_empty() {
        return Err(Refusal::field(
            "tool_choice",
            "tool_choice requires a call, but there are no tools",
        ));
    }
    Ok(choice)
}

/// The grammar of a `response_format`.
pub(super) fn format(value: &Value) -> Option<Grammar> {
    let text = |field: &str| value[field].as_str().unwrap_or_default().to_owned();
    match value["type"].as_str()? {
        "json_object" => Some(Grammar::JsonObject),
        "json_schema" => match value["json_schema"].get("schema") {
            Some(schema @ Value::Object(_)) => Some(Grammar::JsonSchema(schema.clone())),
            _ => Some(Grammar::JsonObject),
        },
        "regex" => Some(Grammar::Regex(text("regex"))),
        "lark" => Some(Grammar::Lark(text("grammar"))),
        "gbnf" => Some(Grammar::Gbnf(text("grammar"))),
        _ => None,
    }
}

/// What all chunks of an answer have in common.
struct Head {
    id: String,
    model: String,
    created: u64,
    logprobs: bool,
}

impl Head {
    fn object(&self, kind: &str) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("id".into(), self.id.clone().into());
        map.insert("object".into(), kind.into());
        map.insert("created".into(), self.created.into());
        map.insert("model".into(), self.model.clone().into());
        map.insert("system_fingerprint".into(), write::FINGERPRINT.into());
        map
    }

    fn whole(&self, all: &[Whole], sum: Usage) -> Value {
        let mut object = self.object("chat.completion");
        let choices = all.iter().enumerate().map(|(i, w)| self.choice(i, w));
        object.insert("choices".into(), choices.collect());
        object.insert("usage".into(), write::usage(sum));
        object.into()
    }

    fn choice(&self, index: usize, whole: &Whole) -> Value {
        let mut message = Map::new();
        message.insert("role".into(), "assistant".into());
        let only_calls = whole.text.is_empty() && !whole.calls.is_empty();
        let content = if only_calls { Value::Null } else { whole.text.clone().into() };
        message.insert("content".into(), content);
        message.insert("refusal".into(), Value::Null);
        if !whole.reasoning.is_empty() {
            message.insert("reasoning_content".into(), whole.reasoning.clone().into());
        }
        if !whole.calls.is_empty() {
            let calls = whole.calls.iter().map(|c| {
                json!({ "id": c.id, "type": "function",
                    "function": { "name": c.name, "arguments": c.arguments } })
            });
            message.insert("tool_calls".into(), calls.collect());
        }
        json!({
            "index": index,
            "message": message,
            "logprobs": self.logprobs.then(|| write::chat_logprobs(&whole.logprobs)),
            "finish_reason": whole.end.as_ref().map(|end| write::reason(end.reason)),
        })
    }
}

/// The answer as chunks.
struct Stream {
    head: Head,
    include_usage: bool,
    usages: Vec<Usage>,
    note: Note,
}

impl Stream {
    fn chunk(
        &self,
        choice: usize,
        delta: &Value,
        logprobs: &[Logprob],
        end: Option<&End>,
    ) -> Value {
        let mut object = self.head.object("chat.completion.chunk");
        let logprobs =
            (self.head.logprobs && !logprobs.is_empty()).then(|| write::chat_logprobs(logprobs));
        object.insert(
            "choices".into(),
            json!([{
                "index": choice,
                "delta": delta,
                "logprobs": logprobs,
                "finish_reason": end.map(|end| write::reason(end.reason)),
            }]),
        );
        if self.include_usage {
            object.insert("usage".into(), Value::Null);
        }
        object.into()
    }
}

impl Events for Stream {
    fn open(&mut self, out: &mut Outgoing) {
        for choice in 0..self.usages.len() {
            let delta = json!({ "role": "assistant", "content": "" });
            out.data(&self.chunk(choice, &delta, &[], None));
        }
    }

    fn piece(&mut self, choice: usize, piece: Piece, out: &mut Outgoing) {
        let (delta, logprobs) = match piece {
            Piece::Prompt(_) => return,
            Piece::Text(certain) => (json!({ "content": certain.text }), certain.logprobs),
            Piece::Reasoning(certain) => {
                (json!({ "reasoning_content": certain.text }), certain.logprobs)
            }
            Piece::Call { index, id, name } => {
                let function = json!({ "name": name, "arguments": "" });
                let call =
                    json!({ "index": index, "id": id, "type": "function", "function": function });
                (json!({ "tool_calls": [call] }), Vec::new())
            }
            Piece::Arguments { index, fragment } => {
                let call = json!({ "index": index, "function": { "arguments": fragment } });
                (json!({ "tool_calls": [call] }), Vec::new())
            }
            Piece::End(end) => {
                self.usages[choice] = end.usage;
                out.data(&self.chunk(choice, &json!({}), &[], Some(&end)));
                return;
            }
        };
        out.data(&self.chunk(choice, &delta, &logprobs, None));
    }

    fn close(&mut self, out: &mut Outgoing) {
        let sum = Usage::sum(&self.usages, self.usages.len());
        self.note.usage(sum);
        if self.include_usage {
            let mut object = self.head.object("chat.completion.chunk");
            object.insert("choices".into(), json!([]));
            object.insert("usage".into(), write::usage(sum));
            out.data(&object.into());
        }
        out.done();
    }

    fn failed(&mut self, refusal: &Refusal, out: &mut Outgoing) {
        out.data(&refusal.openai());
    }
}
