//! Texts and tokens without an answer: `/tokenize`, `/detokenize`, `/apply-template`, and which models there are.
//! Knows llama.cpp's names for these fields.

use std::sync::Arc;

use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use fornax_plan::TokenId;
use fornax_text::EncodeOptions;
use serde_json::{Value, json};

use super::chat::kwargs;
use super::conversation::{Conversation, check_arguments};
use super::read;
use crate::app::{App, LARGE, beside};
use crate::backend::Served;
use crate::refusal::{Refusal, json_response};
use crate::schema::shape::integer;

pub(super) async fn tokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, Refusal> {
    let body = app.read(request, "TokenizeRequest").await?;
    let served = read::model(&app, &body)?;
    let text = body.text("content").unwrap_or_default().to_owned();
    let options = EncodeOptions {
        special: body.flag("parse_special").unwrap_or(true),
        bos: body.flag("add_special").unwrap_or(false),
    };
    let pieces = body.flag("with_pieces").unwrap_or(false);
    body.finish();
    let long = text.len() > LARGE;
    let tokens = beside(long, move || {
        let tokenizer = served.model.tokenizer();
        let one = |id: TokenId| -> Value {
            if pieces {
                json!({ "id": id, "piece": piece(tokenizer.token_bytes(id)) })
            } else {
                id.into()
            }
        };
        Ok(tokenizer.encode(&text, options).into_iter().map(one).collect::<Value>())
    });
    Ok(json_response(StatusCode::OK, &json!({ "tokens": tokens.await? })))
}

/// A token's text, or its bytes where they are none by themselves.
fn piece(bytes: &[u8]) -> Value {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.into(),
        Err(_) => bytes.into(),
    }
}

pub(super) async fn detokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, Refusal> {
    let body = app.read(request, "DetokenizeRequest").await?;
    let served = read::model(&app, &body)?;
    let tokenizer = served.model.tokenizer();
    let vocab = tokenizer.vocab_len();
    let mut ids = Vec::new();
    for (i, id) in body.list("tokens").iter().enumerate() {
        let known = integer(id).and_then(|id| TokenId::try_from(id).ok());
        let Some(known) = known.filter(|id| (*id as usize) < vocab) else {
            let said = format!("tokens[{i}]: there is no token {id}; the model has {vocab}");
            return Err(Refusal::field(format!("tokens[{i}]"), said));
        };
        ids.push(known);
    }
    body.finish();
    Ok(json_response(StatusCode::OK, &json!({ "content": tokenizer.decode(&ids, false) })))
}

pub(super) async fn apply_template(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, Refusal> {
    let body = app.read(request, "ApplyTemplateRequest").await?;
    let served = read::model(&app, &body)?;
    let conversation = Conversation {
        messages: body.list("messages").to_vec(),
        tools: body.list("tools").to_vec(),
        kwargs: kwargs(&body),
        ..Conversation::default()
    };
    let answer = body.flag("add_generation_prompt").unwrap_or(true);
    body.finish();
    check_arguments(&conversation.messages, "messages")?;
    let prompt = beside(true, move || conversation.prompt(&served, answer)).await?;
    Ok(json_response(StatusCode::OK, &json!({ "prompt": prompt.text() })))
}

pub(super) async fn models(State(app): State<Arc<App>>) -> Response {
    let all: Vec<Value> = app.models.iter().map(|m| model_object(m)).collect();
    json_response(StatusCode::OK, &json!({ "object": "list", "data": all }))
}

pub(super) async fn model(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Response, Refusal> {
    let served = app.model(Some(&name))?;
    Ok(json_response(StatusCode::OK, &model_object(&served)))
}

fn model_object(served: &Served) -> Value {
    let model = &served.model;
    json!({
        "id": served.alias,
        "object": "model",
        "created": served.created,
        "owned_by": "fornax",
        "name": model.name(),
        "family": model.family().name,
        "parameters": model.parameters(),
        "context_length": served.context,
        "vocabulary": model.tokenizer().vocab_len(),
    })
}
