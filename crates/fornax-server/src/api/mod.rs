//! The endpoints: each reads one protocol's request, hands an order to the engine, and writes the answer as that
//! protocol has it. Knows fields; how answers come about is not known here.

mod chat;
mod completions;
mod conversation;
mod embeddings;
mod health;
mod messages;
mod read;
mod responses;
mod texts;
mod write;

use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use axum::response::IntoResponse;
use axum::routing::{get, post};

use crate::app::App;
use crate::gate::gate;
use crate::refusal::Refusal;

/// Every route, behind the gate.
pub(crate) fn router(app: &Arc<App>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route("/v1/responses", post(responses::create))
        .route("/v1/embeddings", post(embeddings::create))
        .route("/v1/messages", post(messages::create))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/tokenize", post(texts::tokenize))
        .route("/detokenize", post(texts::detokenize))
        .route("/apply-template", post(texts::apply_template))
        .route("/v1/models", get(texts::models))
        .route("/v1/models/{*model}", get(texts::model))
        .route("/health", get(health::health))
        .route("/metrics", get(health::metrics))
        .route("/openapi.json", get(health::openapi))
        .method_not_allowed_fallback(async || {
            Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "this path does not take this method")
        })
        .fallback(async || {
            let said = "there is nothing at this path; /openapi.json lists what there is";
            Refusal::new(StatusCode::NOT_FOUND, said).with_code("unknown_url").into_response()
        })
        .layer(from_fn_with_state(app.clone(), gate))
        .with_state(app.clone())
}
