//! `POST /v1/messages` and its `count_tokens`: Anthropic's protocol. Knows its blocks and events, nothing of how an
//! answer comes about.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use fornax_engine::constrain::Grammar;
use serde_json::{Map, Value, json};

use super::conversation::Conversation;
use super::read;
use crate::app::App;
use crate::gate::Note;
use crate::live::{End, Live, Piece, Reason, Usage};
use crate::order::{Order, new_id};
use crate::refusal::{Refusal, json_response};
use crate::schema::Body;
use crate::sse::{self, Events, Outgoing};
use crate::turn::Choice;
use crate::whole::{Whole, gather};

pub(super) async fn create(
    State(app): State<Arc<App>>,
    Extension(note): Extension<Note>,
    request: Request,
) -> Response {
    answer(&app, note, request).await.unwrap_or_else(Refusal::into_anthropic)
}

pub(super) async fn count_tokens(State(app): State<Arc<App>>, request: Request) -> Response {
    count(&app, request).await.unwrap_or_else(Refusal::into_anthropic)
}

async fn count(app: &Arc<App>, request: Request) -> Result<Response, Refusal> {
    let body = app.read(request, "CountTokensRequest").await?;
    let served = read::model(app, &body)?;
    let conversation = Arc::new(conversation(&body)?);
    body.finish();
    let tokens = conversation.tokens(&served).await?;
    Ok(json_response(StatusCode::OK, &json!({ "input_tokens": tokens.len() })))
}

async fn answer(app: &Arc<App>, note: Note, request: Request) -> Result<Response, Refusal> {
    let body = app.read(request, "MessagesRequest").await?;
    let served = read::model(app, &body)?;
    note.model(&served.alias);
    let mut conversation = conversation(&body)?;
    if let Some(format) = body.get("output_config").and_then(|o| o.get("format"))
        && !format.is_null()
    {
        conversation.format = Some(Grammar::JsonSchema(format["schema"].clone()));
        conversation.format_field = "output_config.format";
    }
    let mut sampling = read::basic(&body);
    let top_k = body.integer("top_k").and_then(|k| u32::try_from(k).ok());
    sampling.base.top_k = top_k.unwrap_or(0);
    let max_new = body.integer("max_tokens").map_or(u32::MAX, read::limit);
    let stops = read::stops(&body, "stop_sequences");
    let stream = body.flag("stream").unwrap_or(false);
    body.finish();
    let order = Arc::new(conversation).order(app, &served).await?;
    let order = Order { sampling, max_new, stops, ..order };
    let head = Head {
        id: new_id("msg_"),
        model: served.alias.clone(),
        stops: order.stops.clone(),
        prompt: order.prompts[0].len() as u32,
    };
    let live = Live::start(&order, app.metrics.clone())?;
    if stream {
        return Ok(sse::stream(live, Stream { head, blocks: 0, open: None, note }));
    }
    let mut all = gather(live, 1).await?;
    let whole = all.pop().unwrap_or_default();
    note.usage(whole.usage());
    Ok(json_response(StatusCode::OK, &head.whole(&whole)?))
}

fn conversation(body: &Body) -> Result<Conversation, Refusal> {
    let mut messages = Vec::new();
    match body.get("system") {
        Some(Value::String(text)) => messages.push(json!({ "role": "system", "content": text })),
        Some(Value::Array(parts)) => {
            messages.push(json!({ "role": "system", "content": joined(parts) }));
        }
        _ => {}
    }
    let given = body.list("messages");
    for (i, message) in given.iter().enumerate() {
        translate(message, i, &mut messages)?;
    }
    if given.last().is_some_and(|m| m["role"] == "assistant") {
        let said =
            "messages: the last one is the assistant's; this server does not go on with a turn";
        return Err(Refusal::field("messages", said));
    }
    let tools: Vec<Value> = body.list("tools").iter().map(tool).collect();
    let choice = choice(body, &tools)?;
    let wanted = body.get("tool_choice");
    let thinking = body.get("thinking").map(|t| t["type"] != "disabled");
    Ok(Conversation {
        messages,
        tools,
        choice,
        one_call: wanted.is_some_and(|c| c["disable_parallel_tool_use"] == true),
        thinking,
        ..Conversation::default()
    })
}

fn choice(body: &Body, tools: &[Value]) -> Result<Choice, Refusal> {
    let Some(wanted) = body.get("tool_choice") else { return Ok(Choice::Auto) };
    let value = match wanted["type"].as_str() {
        Some("any") => "required".into(),
        Some("none") => "none".into(),
        Some("tool") => json!({ "name": wanted["name"] }),
        _ => "auto".into(),
    };
    super::chat::choice(Some(&value), tools)
}

fn tool(tool: &Value) -> Value {
    let mut function = Map::new();
    function.insert("name".into(), tool["name"].clone());
    if let Some(text) = tool["description"].as_str() {
        function.insert("description".into(), text.into());
    }
    function.insert("parameters".into(), tool["input_schema"].clone());
    if tool["strict"] == true {
        function.insert("strict".into(), true.into());
    }
    json!({ "type": "function", "function": function })
}

/// One message of Anthropic's becomes one or several of OpenAI's: results of tools are messages of their own there.
fn translate(message: &Value, i: usize, out: &mut Vec<Value>) -> Result<(), Refusal> {
    let role = message["role"].as_str().unwrap_or_default();
    let blocks = match &message["content"] {
        Value::Array(blocks) => blocks,
        text => {
            out.push(json!({ "role": role, "content": text }));
            return Ok(());
        }
    };
    let of = |kind: &'static str| blocks.iter().filter(move |b| b["type"] == kind);
    let misplaced = if role == "assistant" { "tool_result" } else { "tool_use" };
    if of(misplaced).next().is_some() || role == "user" && of("thinking").next().is_some() {
        let param = format!("messages[{i}].content");
        let said = format!("{param}: a block that a message of the {role} cannot have");
        return Err(Refusal::field(param, said));
    }
    let texts: Vec<Value> = of("text").cloned().collect();
    if role == "assistant" {
        let mut turn = Map::new();
        turn.insert("role".into(), role.into());
        turn.insert("content".into(), joined(&texts).into());
        let thoughts: Vec<&str> = of("thinking").filter_map(|b| b["thinking"].as_str()).collect();
        if !thoughts.is_empty() {
            turn.insert("reasoning_content".into(), thoughts.join("\n").into());
        }
        let calls: Vec<Value> = of("tool_use").map(call).collect();
        if !calls.is_empty() {
            turn.insert("tool_calls".into(), calls.into());
        }
        out.push(turn.into());
        return Ok(());
    }
    for result in of("tool_result") {
        let mut content = match &result["content"] {
            Value::Array(parts) => joined(parts),
            text => text.as_str().unwrap_or_default().to_owned(),
        };
        if result["is_error"] == true {
            content.insert_str(0, "Error: ");
        }
        out.push(
            json!({ "role": "tool", "tool_call_id": result["tool_use_id"], "content": content }),
        );
    }
    if !texts.is_empty() || of("tool_result").next().is_none() {
        out.push(json!({ "role": role, "content": joined(&texts) }));
    }
    Ok(())
}

fn call(block: &Value) -> Value {
    json!({
        "id": block["id"],
        "type": "function",
        "function": { "name": block["name"], "arguments": block["input"].to_string() },
    })
}

fn joined(parts: &[Value]) -> String {
    let texts: Vec<&str> = parts.iter().filter_map(|p| p["text"].as_str()).collect();
    texts.join("\n")
}

struct Head {
    id: String,
    model: String,
    stops: Vec<String>,
    prompt: u32,
}

fn usage(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.generated,
    })
}

impl Head {
    fn object(&self, content: &[Value], end: Option<&End>, used: &Value) -> Value {
        let (reason, stop) = end.map_or((Value::Null, Value::Null), |end| self.ended(end));
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": used,
        })
    }

    fn ended(&self, end: &End) -> (Value, Value) {
        let stop = end.stop.and_then(|at| self.stops.get(at));
        let reason = match (end.reason, stop) {
            (Reason::Length, _) => "max_tokens",
            (Reason::Calls, _) => "tool_use",
            (Reason::Stop, Some(_)) => "stop_sequence",
            (Reason::Stop, None) => "end_turn",
        };
        (reason.into(), stop.map_or(Value::Null, |s| s.clone().into()))
    }

    fn whole(&self, whole: &Whole) -> Result<Value, Refusal> {
        let mut content = Vec::new();
        if !whole.reasoning.is_empty() {
            content
                .push(json!({ "type": "thinking", "thinking": whole.reasoning, "signature": "" }));
        }
        if !whole.text.is_empty() || whole.calls.is_empty() && whole.reasoning.is_empty() {
            content.push(json!({ "type": "text", "text": whole.text }));
        }
        for call in &whole.calls {
            // A call that the limit cut off is no object; what there is of it is lost to this protocol.
            let input = serde_json::from_str::<Map<String, Value>>(&call.arguments);
            let input = input.unwrap_or_default();
            content.push(
                json!({ "type": "tool_use", "id": call.id, "name": call.name, "input": input }),
            );
        }
        Ok(self.object(&content, whole.end.as_ref(), &usage(whole.usage())))
    }
}

/// What kind of block is open.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Block {
    Text,
    Thinking,
    Call(usize),
}

struct Stream {
    head: Head,
    /// Blocks that were begun.
    blocks: usize,
    open: Option<Block>,
    note: Note,
}

impl Stream {
    /// Makes sure that this kind of block is open, and gives its index.
    fn block(&mut self, kind: Block, start: &Value, out: &mut Outgoing) -> usize {
        if self.open != Some(kind) {
            self.shut(out);
            self.open = Some(kind);
            self.blocks += 1;
            let event = json!({
                "type": "content_block_start", "index": self.blocks - 1, "content_block": start,
            });
            out.named("content_block_start", &event);
        }
        self.blocks - 1
    }

    fn shut(&mut self, out: &mut Outgoing) {
        if let Some(kind) = self.open.take() {
            let index = self.blocks - 1;
            if kind == Block::Thinking {
                delta(index, &json!({ "type": "signature_delta", "signature": "" }), out);
            }
            let event = json!({ "type": "content_block_stop", "index": index });
            out.named("content_block_stop", &event);
        }
    }
}

fn delta(index: usize, delta: &Value, out: &mut Outgoing) {
    let event = json!({ "type": "content_block_delta", "index": index, "delta": delta });
    out.named("content_block_delta", &event);
}

impl Events for Stream {
    fn open(&mut self, out: &mut Outgoing) {
        let used = usage(Usage { prompt: self.head.prompt, ..Usage::default() });
        let message = self.head.object(&[], None, &used);
        out.named("message_start", &json!({ "type": "message_start", "message": message }));
        out.named("ping", &json!({ "type": "ping" }));
    }

    fn piece(&mut self, _: usize, piece: Piece, out: &mut Outgoing) {
        match piece {
            Piece::Prompt(_) => {}
            Piece::Text(certain) if certain.text.is_empty() => {}
            Piece::Text(certain) => {
                let start = json!({ "type": "text", "text": "" });
                let index = self.block(Block::Text, &start, out);
                delta(index, &json!({ "type": "text_delta", "text": certain.text }), out);
            }
            Piece::Reasoning(certain) => {
                let start = json!({ "type": "thinking", "thinking": "", "signature": "" });
                let index = self.block(Block::Thinking, &start, out);
                delta(index, &json!({ "type": "thinking_delta", "thinking": certain.text }), out);
            }
            Piece::Call { index, id, name } => {
                let start = json!({ "type": "tool_use", "id": id, "name": name, "input": {} });
                self.block(Block::Call(index), &start, out);
            }
            Piece::Arguments { index, fragment } => {
                let at = self.block(Block::Call(index), &Value::Null, out);
                delta(at, &json!({ "type": "input_json_delta", "partial_json": fragment }), out);
            }
            Piece::End(end) => {
                if self.blocks == 0 {
                    self.block(Block::Text, &json!({ "type": "text", "text": "" }), out);
                }
                self.shut(out);
                self.note.usage(end.usage);
                let (reason, stop) = self.head.ended(&end);
                let event = json!({
                    "type": "message_delta",
                    "delta": { "stop_reason": reason, "stop_sequence": stop },
                    "usage": usage(end.usage),
                });
                out.named("message_delta", &event);
            }
        }
    }

    fn close(&mut self, out: &mut Outgoing) {
        out.named("message_stop", &json!({ "type": "message_stop" }));
    }

    fn failed(&mut self, refusal: &Refusal, out: &mut Outgoing) {
        out.named("error", &refusal.anthropic());
    }
}
