//! How the server is: `/health`, `/metrics`, and what it is: `/openapi.json`. Knows what the engines say of
//! themselves.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use serde_json::{Value, json};

use crate::app::App;
use crate::backend::Served;
use crate::refusal::json_response;
use crate::schema::Document;

pub(super) async fn health(State(app): State<Arc<App>>) -> Response {
    let (sound, models): (Vec<bool>, Vec<Value>) =
        app.models.iter().map(|m| state(&app, m)).unzip();
    let sound = sound.into_iter().all(|s| s);
    let status = if sound { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let word = if sound { "ok" } else { "failed" };
    json_response(status, &json!({ "status": word, "models": models }))
}

/// Whether an engine works, and what it last did.
fn state(app: &App, served: &Served) -> (bool, Value) {
    let stats = served.engine.stats();
    let now = Instant::now();
    let since = |at: Instant| now.saturating_duration_since(at);
    let step = stats.step_since.map(since);
    // One that has work and neither steps nor stands in a step is stuck as well.
    let idle = stats.running + stats.waiting == 0;
    let quiet = step.unwrap_or_else(|| since(stats.last_step));
    let stuck = !idle && quiet > app.options.stuck_after
        || step.is_some_and(|s| s > app.options.stuck_after);
    let word = match (stats.healthy, stuck, idle) {
        (false, _, _) => "lost",
        (_, true, _) => "stuck",
        (_, _, true) => "idle",
        _ => "working",
    };
    let state = json!({
        "model": served.alias,
        "state": word,
        "fault": stats.fault,
        "running": stats.running,
        "waiting": stats.waiting,
        "steps": stats.steps,
        "last_step_ms": stats.last_step_ms,
        "last_step_rows": stats.last_rows,
        "last_step_ago_ms": since(stats.last_step).as_millis() as u64,
        "in_step_for_ms": step.map(|s| s.as_millis() as u64),
        "kv_blocks_used": stats.kv_blocks_used,
        "kv_blocks_total": stats.kv_blocks_total,
    });
    (stats.healthy && !stuck, state)
}

pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response {
    let mut response = Response::new(Body::from(app.metrics.page(&app.models)));
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

pub(super) async fn openapi(State(app): State<Arc<App>>) -> Response {
    let mut published = Document::get().published().clone();
    // What a request may name is what is loaded here.
    let mut names: Vec<Value> = app.models.iter().map(|m| m.alias.clone().into()).collect();
    let path = &mut published["paths"]["/v1/models/{model}"]["get"]["parameters"][0];
    path["schema"]["enum"] = names.clone().into();
    names.push(Value::Null);
    let schemas = published["components"]["schemas"].as_object_mut();
    for schema in schemas.into_iter().flat_map(|all| all.values_mut()) {
        if let Some(model) = schema.get_mut("properties").and_then(|p| p.get_mut("model")) {
            model["enum"] = names.clone().into();
        }
    }
    json_response(StatusCode::OK, &published)
}
