//! `POST /v1/embeddings`: a text's final hidden states, pooled and normalised. Knows OpenAI's protocol for them.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use fornax_engine::Model;
use fornax_engine::serve::Pooling;
use serde_json::{Value, json};

use super::read;
use crate::app::{App, LARGE, beside};
use crate::gate::Note;
use crate::live::{Live, Usage};
use crate::order::Order;
use crate::refusal::{Refusal, json_response};
use crate::whole::{Whole, gather};

pub(super) async fn create(
    State(app): State<Arc<App>>,
    Extension(note): Extension<Note>,
    request: Request,
) -> Result<Response, Refusal> {
    let body = app.read(request, "EmbeddingsRequest").await?;
    let served = read::model(&app, &body)?;
    note.model(&served.alias);
    let base64 = body.text("encoding_format") == Some("base64");
    let pooling = match body.text("pooling") {
        Some("last") => Pooling::Last,
        Some(_) => Pooling::Mean,
        None => own_pooling(&served.model)?,
    };
    let dimensions = body.integer("dimensions");
    let priority = read::priority(&body);
    let input = body.get("input").cloned().unwrap_or_default();
    body.finish();
    let long = input.as_str().is_none_or(|p| p.len() > LARGE);
    let for_prompts = served.clone();
    let prompts = beside(long, move || read::prompts(&input, &for_prompts, "input")).await?;
    let mut order = Order::new(served.clone(), Vec::new());
    order.prompts = prompts.into_iter().map(Arc::from).collect();
    order.max_new = 0;
    order.pool = Some(pooling);
    order.priority = priority;
    order.deadline = app.deadline();
    let width = served.model.plan().hyper.width;
    if dimensions.is_some_and(|d| d != i128::from(width)) {
        let said = format!(
            "dimensions: this model's vectors have {}, and cutting them short would lose what they say",
            width
        );
        return Err(Refusal::field("dimensions", said));
    }
    let live = Live::start(&order, app.metrics.clone())?;
    let all = gather(live, order.prompts.len()).await?;
    let sum = Usage::sum(&all.iter().map(Whole::usage).collect::<Vec<_>>(), 1);
    note.usage(sum);
    let mut data = Vec::with_capacity(all.len());
    for (index, whole) in all.into_iter().enumerate() {
        let hidden = whole.end.and_then(|end| end.hidden);
        let hidden = hidden.ok_or_else(|| Refusal::failed("the engine gave no vector"))?;
        data.push(json!({
            "object": "embedding",
            "index": index,
            "embedding": written(&normalised(hidden)?, base64),
        }));
    }
    let object = json!({
        "object": "list",
        "data": data,
        "model": served.alias,
        "usage": { "prompt_tokens": sum.prompt, "total_tokens": sum.prompt },
    });
    Ok(json_response(StatusCode::OK, &object))
}

/// What the model file says, as `llama.cpp` numbers it.
fn own_pooling(model: &Model) -> Result<Pooling, Refusal> {
    let key = format!("{}.pooling_type", model.family().name);
    match model.gguf().metadata().u32(&key) {
        Ok(None | Some(1)) | Err(_) => Ok(Pooling::Mean),
        Ok(Some(3)) => Ok(Pooling::Last),
        Ok(Some(other)) => {
            let name = match other {
                0 => "none",
                2 => "cls",
                4 => "rank",
                _ => "one that is not known",
            };
            let said = format!(
                "the model file asks for the pooling {name:?}, which is not there; name mean or last"
            );
            Err(Refusal::field("pooling", said))
        }
    }
}

/// The vector at length one.
fn normalised(mut vector: Vec<f32>) -> Result<Vec<f32>, Refusal> {
    let squares: f64 = vector.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
    let length = squares.sqrt();
    if !length.is_finite() {
        return Err(Refusal::failed("the model gave a vector with numbers that are none"));
    }
    if length > 0.0 {
        vector.iter_mut().for_each(|v| *v = (f64::from(*v) / length) as f32);
    }
    Ok(vector)
}

fn written(vector: &[f32], base64: bool) -> Value {
    if !base64 {
        return vector.into();
    }
    let bytes: Vec<u8> = vector.iter().flat_map(|v| v.to_le_bytes()).collect();
    encode(&bytes).into()
}

/// Base64 with padding (RFC 4648).
fn encode(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let at = |i: usize| u32::from(three.get(i).copied().unwrap_or(0));
        let all = at(0) << 16 | at(1) << 8 | at(2);
        for digit in 0..4 {
            let some = digit <= three.len();
            let value = (all >> (18 - 6 * digit)) & 63;
            out.push(if some { char::from(DIGITS[value as usize]) } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_the_rfc() {
        for (bytes, text) in [
            (&b""[..], ""),
            (b"f", "Zg=="),
            (b"fo", "Zm8="),
            (b"foo", "Zm9v"),
            (b"foob", "Zm9vYg=="),
            (b"fooba", "Zm9vYmE="),
            (b"foobar", "Zm9vYmFy"),
            (b"\xff\xfe\xfd", "//79"),
        ] {
            assert_eq!(encode(bytes), text);
        }
    }

    #[test]
    fn vectors_have_length_one() {
        assert_eq!(normalised(vec![3.0, 4.0]).unwrap(), [0.6, 0.8]);
        assert_eq!(normalised(vec![0.0, 0.0]).unwrap(), [0.0, 0.0]);
        assert!(normalised(vec![f32::NAN]).is_err());
        let huge = normalised(vec![f32::MAX, f32::MAX]).unwrap();
        assert!((huge[0] - 0.5f32.sqrt()).abs() < 1e-6);
    }
}
