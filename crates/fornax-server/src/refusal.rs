//! Why a request is not answered, and how each protocol says so. Knows status codes and error shapes, no
//! endpoint.

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// Why a request is refused or failed; becomes an HTTP response, or an event in a stream that has begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
    /// The field at fault, as a path: `messages[1].content`.
    pub(crate) param: Option<String>,
    pub(crate) code: Option<&'static str>,
    pub(crate) retry_after_s: Option<u32>,
}

/// Bytes of a message at most: it may quote what a client sent.
const MESSAGE: usize = 2000;

fn bounded(text: String, most: usize) -> String {
    if text.len() <= most {
        return text;
    }
    let end = (0..=most).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    format!("{}…", &text[..end])
}

impl Refusal {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Refusal {
        let message = bounded(message.into(), MESSAGE);
        Refusal { status, message, param: None, code: None, retry_after_s: None }
    }

    /// 400 about one field.
    pub(crate) fn field(param: impl Into<String>, message: impl Into<String>) -> Refusal {
        let param = Some(bounded(param.into(), MESSAGE)).filter(|p| !p.is_empty());
        Refusal { param, ..Refusal::new(StatusCode::BAD_REQUEST, message) }
    }

    pub(crate) fn with_code(self, code: &'static str) -> Refusal {
        Refusal { code: Some(code), ..self }
    }

    /// 429: come again in a while.
    pub(crate) fn full(retry_after_s: u32) -> Refusal {
        Refusal {
            retry_after_s: Some(retry_after_s.max(1)),
            code: Some("queue_full"),
            ..Refusal::new(
                StatusCode::TOO_MANY_REQUESTS,
                format!("the queue is full; try again in {} s", retry_after_s.max(1)),
            )
        }
    }

    /// 500: the engine or its device failed.
    pub(crate) fn failed(message: impl Into<String>) -> Refusal {
        Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, message).with_code("engine_failed")
    }

    /// What kind of error OpenAI's clients are told.
    fn openai_kind(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            503 => "service_unavailable",
            504 => "timeout",
            500.. => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// What kind of error Anthropic's clients are told.
    fn anthropic_kind(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            504 => "timeout_error",
            500.. => "api_error",
            _ => "invalid_request_error",
        }
    }

    /// The object in OpenAI's shape.
    pub(crate) fn openai(&self) -> Value {
        json!({ "error": {
            "message": self.message,
            "type": self.openai_kind(),
            "param": self.param,
            "code": self.code,
        }})
    }

    /// The object in Anthropic's shape.
    pub(crate) fn anthropic(&self) -> Value {
        json!({
            "type": "error",
            "error": { "type": self.anthropic_kind(), "message": self.message },
        })
    }

    /// The response in Anthropic's shape.
    pub(crate) fn into_anthropic(self) -> Response {
        let body = self.anthropic();
        self.respond(&body)
    }

    fn respond(&self, body: &Value) -> Response {
        let mut response = json_response(self.status, body);
        if let Some(s) = self.retry_after_s {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(s));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        }
        response
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let body = self.openai();
        self.respond(&body)
    }
}

/// A response that is one JSON value.
pub(crate) fn json_response(status: StatusCode, value: &Value) -> Response {
    let mut response = Response::new(Body::from(value.to_string()));
    *response.status_mut() = status;
    let kind = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}
