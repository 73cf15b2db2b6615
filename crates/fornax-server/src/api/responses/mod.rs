//! `POST /v1/responses`: OpenAI's newer protocol, without anything stored. Knows its items, nothing of how an answer
//! comes about.

mod stream;

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use fornax_engine::constrain::Grammar;
use serde_json::{Map, Value, json};

use super::chat::{choice, kwargs};
use super::conversation::{Conversation, check_arguments};
use super::{read, write};
use crate::app::App;
use crate::gate::Note;
use crate::live::{Live, Reason, Usage};
use crate::order::{Order, new_id};
use crate::refusal::{Refusal, json_response};
use crate::schema::Body;
use crate::sse;
use crate::tokens::Logprob;
use crate::whole::{Call, Whole, gather};

pub(super) async fn create(
    State(app): State<Arc<App>>,
    Extension(note): Extension<Note>,
    request: Request,
) -> Result<Response, Refusal> {
    let body = app.read(request, "ResponsesRequest").await?;
    let served = read::model(&app, &body)?;
    note.model(&served.alias);
    let head = Head::new(&body, &served.alias);
    let stream = body.flag("stream").unwrap_or(false);
    let conversation = conversation(&body)?;
    let mut sampling = read::basic(&body);
    read::seed(&body, &mut sampling);
    let max_new = body.integer("max_output_tokens").map_or(u32::MAX, read::limit);
    let logprobs = logprobs(&body)?;
    let priority = read::priority(&body);
    body.finish();
    let order = Arc::new(conversation).order(&app, &served).await?;
    let order = Order { sampling, max_new, logprobs, priority, ..order };
    let live = Live::start(&order, app.metrics.clone())?;
    if stream {
        return Ok(sse::stream(live, stream::Stream::new(head, note, logprobs.is_some())));
    }
    let mut all = gather(live, 1).await?;
    let whole = all.pop().unwrap_or_default();
    note.usage(whole.usage());
    Ok(json_response(StatusCode::OK, &head.whole(&whole, logprobs.is_some())))
}

fn logprobs(body: &Body) -> Result<Option<u8>, Refusal> {
    let included = body.list("include").iter().any(|what| what == "message.output_text.logprobs");
    let top = body.integer("top_logprobs").and_then(|n| u8::try_from(n).ok());
    match (included, top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => {
            let said = "top_logprobs need include to hold message.output_text.logprobs";
            Err(Refusal::field("top_logprobs", said))
        }
    }
}

fn conversation(body: &Body) -> Result<Conversation, Refusal> {
    let mut messages = Vec::new();
    if let Some(text) = body.text("instructions") {
        messages.push(json!({ "role": "system", "content": text }));
    }
    match body.get("input") {
        Some(Value::Array(items)) => {
            for item in items {
                translate(item, &mut messages);
            }
        }
        text => messages.push(json!({ "role": "user", "content": text })),
    }
    check_arguments(&messages, "input")?;
    if messages.is_empty() {
        return Err(Refusal::field("input", "input: there is no message in it"));
    }
    let tools: Vec<Value> = body.list("tools").iter().map(tool).collect();
    let format = body.get("text").map(|t| &t["format"]).filter(|f| !f.is_null());
    Ok(Conversation {
        messages,
        choice: choice(body.get("tool_choice"), &tools)?,
        tools,
        one_call: body.flag("parallel_tool_calls") == Some(false),
        format: format.and_then(|format| match format["type"].as_str()? {
            "json_object" => Some(Grammar::JsonObject),
            "json_schema" => Some(Grammar::JsonSchema(format["schema"].clone())),
            _ => None,
        }),
        format_field: "text.format",
        kwargs: kwargs(body),
        effort: body.get("reasoning").and_then(|r| r["effort"].as_str()).map(str::to_owned),
        thinking: None,
    })
}

fn tool(tool: &Value) -> Value {
    let mut function = tool.as_object().cloned().unwrap_or_default();
    function.remove("type");
    json!({ "type": "function", "function": function })
}

/// An item becomes a message, or joins the assistant's message before it.
fn translate(item: &Value, out: &mut Vec<Value>) {
    match item["type"].as_str() {
        Some("function_call") => {
            let call = json!({
                "id": item["call_id"], "type": "function",
                "function": { "name": item["name"], "arguments": item["arguments"] },
            });
            let turn = turn(out);
            match turn.get_mut("tool_calls").and_then(Value::as_array_mut) {
                Some(calls) => calls.push(call),
                None => drop(turn.insert("tool_calls".into(), json!([call]))),
            }
        }
        Some("function_call_output") => out.push(json!({
            "role": "tool", "tool_call_id": item["call_id"], "content": content(&item["output"]),
        })),
        Some("reasoning") => {
            let texts = item["content"].as_array().into_iter().flatten();
            let texts: Vec<&str> = texts.filter_map(|t| t["text"].as_str()).collect();
            if !texts.is_empty() {
                // Thoughts come before what they led to.
                out.push(json!({ "role": "assistant", "reasoning_content": texts.join("\n") }));
            }
        }
        _ if item["role"] == "assistant" => {
            let text = content(&item["content"]);
            let open = out.last().is_some_and(|m| {
                m["role"] == "assistant" && m["content"].is_null() && m["tool_calls"].is_null()
            });
            if !open {
                out.push(json!({ "role": "assistant" }));
            }
            turn(out).insert("content".into(), text);
        }
        _ => out.push(json!({ "role": item["role"], "content": content(&item["content"]) })),
    }
}

/// The assistant's message that is last, or a new one.
fn turn(out: &mut Vec<Value>) -> &mut Map<String, Value> {
    if out.last().is_none_or(|m| m["role"] != "assistant") {
        out.push(json!({ "role": "assistant" }));
    }
    match out.last_mut() {
        Some(Value::Object(map)) => map,
        // The line above put one there.
        _ => unreachable!("invariant: the last message is an object"),
    }
}

fn content(value: &Value) -> Value {
    match value {
        Value::Array(parts) => {
            let texts: Vec<&str> = parts.iter().filter_map(|p| p["text"].as_str()).collect();
            texts.join("\n").into()
        }
        text => text.clone(),
    }
}

/// What the answer repeats of the request, and what all its events have in common.
struct Head {
    id: String,
    /// The object of the answer, without what changes.
    object: Map<String, Value>,
}

impl Head {
    fn new(body: &Body, model: &str) -> Head {
        let id = new_id("resp_");
        let or = |field, absent: Value| body.get(field).cloned().unwrap_or(absent);
        let object = json!({
            "id": id,
            "object": "response",
            "created_at": write::now(),
            "status": "in_progress",
            "background": false,
            "error": null,
            "incomplete_details": null,
            "instructions": or("instructions", Value::Null),
            "max_output_tokens": or("max_output_tokens", Value::Null),
            "metadata": or("metadata", json!({})),
            "model": model,
            "output": [],
            "parallel_tool_calls": or("parallel_tool_calls", true.into()),
            "previous_response_id": null,
            "reasoning": { "effort": body.get("reasoning").map(|r| r["effort"].clone()), "summary": null },
            "service_tier": "default",
            "store": false,
            "temperature": or("temperature", json!(1.0)),
            "text": or("text", json!({ "format": { "type": "text" } })),
            "tool_choice": or("tool_choice", "auto".into()),
            "tools": or("tools", json!([])),
            "top_logprobs": or("top_logprobs", json!(0)),
            "top_p": or("top_p", json!(1.0)),
            "truncation": "disabled",
            "usage": null,
            "user": null,
        });
        let Value::Object(object) = object else { unreachable!("invariant: written as an object") };
        Head { id, object }
    }

    /// The answer as it is now.
    fn with(&self, status: &str, output: Vec<Value>, used: Option<Usage>) -> Value {
        let mut object = self.object.clone();
        object.insert("status".into(), status.into());
        object.insert("output".into(), output.into());
        if let Some(used) = used {
            object.insert("usage".into(), usage(used));
        }
        if status == "incomplete" {
            object.insert("incomplete_details".into(), json!({ "reason": "max_output_tokens" }));
        }
        object.into()
    }

    fn whole(&self, whole: &Whole, logprobs: bool) -> Value {
        let status = status(whole.end.as_ref().map(|end| end.reason));
        let mut output = Vec::new();
        if !whole.reasoning.is_empty() {
            output.push(reasoning(&new_id("rs_"), &whole.reasoning, status));
        }
        if !whole.text.is_empty() || whole.calls.is_empty() && whole.reasoning.is_empty() {
            let shown: &[Logprob] = if logprobs { &whole.logprobs } else { &[] };
            output.push(message(&new_id("msg_"), &whole.text, shown, status));
        }
        output.extend(whole.calls.iter().map(|c| function_call(&new_id("fc_"), c, status)));
        self.with(status, output, Some(whole.usage()))
    }
}

fn status(reason: Option<Reason>) -> &'static str {
    if reason == Some(Reason::Length) { "incomplete" } else { "completed" }
}

fn usage(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt,
        "input_tokens_details": { "cached_tokens": usage.cached },
        "output_tokens": usage.generated,
        "output_tokens_details": { "reasoning_tokens": usage.reasoning },
        "total_tokens": usage.prompt + usage.generated,
    })
}

fn logprob_list(all: &[Logprob]) -> Value {
    write::chat_logprobs(all)["content"].take()
}

fn text_part(text: &str, logprobs: &[Logprob]) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": logprob_list(logprobs) })
}

fn message(id: &str, text: &str, logprobs: &[Logprob], status: &str) -> Value {
    json!({
        "id": id, "type": "message", "role": "assistant", "status": status,
        "content": [text_part(text, logprobs)],
    })
}

fn reasoning(id: &str, text: &str, status: &str) -> Value {
    json!({
        "id": id, "type": "reasoning", "status": status, "summary": [],
        "content": [{ "type": "reasoning_text", "text": text }],
    })
}

fn function_call(id: &str, call: &Call, status: &str) -> Value {
    json!({
        "id": id, "type": "function_call", "status": status,
        "call_id": call.id, "name": call.name, "arguments": call.arguments,
    })
}
