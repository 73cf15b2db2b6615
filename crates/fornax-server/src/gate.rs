//! What every request passes: who may ask (keys, Host, Origin), its id, the access log, CORS. Knows headers, no
//! endpoint.

use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Version, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http_body::{Frame, SizeHint};
use subtle::ConstantTimeEq;

use crate::app::App;
use crate::half::{Peer, UnderWay};
use crate::live::Usage;
use crate::order::new_id;
use crate::refusal::Refusal;
use crate::sse::{COMMENT, EVENTS};

/// What a handler tells the access log of its request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Note(Arc<Mutex<Noted>>);

#[derive(Clone, Debug, Default)]
struct Noted {
    model: String,
    usage: Usage,
}

impl Note {
    pub(crate) fn model(&self, alias: &str) {
        self.lock().model = alias.to_owned();
    }

    pub(crate) fn usage(&self, usage: Usage) {
        self.lock().usage = usage;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Noted> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// Lets a request through, or says why not; logs it when its answer has gone out.
pub(crate) async fn gate(
    State(app): State<Arc<App>>,
    mut request: Request,
    next: Next,
) -> Response {
    let began = Instant::now();
    let id = request_id(request.headers());
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let endpoint = request.extensions().get::<MatchedPath>().map(|p| p.as_str().to_owned());
    let origin = request.headers().get(header::ORIGIN).cloned();
    let note = Note::default();
    // Older clients know no interim answers, by which those that left are found out.
    if request.version() < Version::HTTP_11 {
        request.extensions_mut().remove::<Peer>();
    }
    let under_way = request.extensions().get::<Peer>().map(Peer::begin);
    request.extensions_mut().insert(note.clone());
    let anthropic = path.starts_with("/v1/messages");
    let entry = Entry { id: id.clone(), method, path, status: CLIENT_LEFT, began, note };
    let mut waiting = Waiting(Some(entry));
    let mut response = match admit(&app, &request) {
        Ok(Admitted::Preflight) => StatusCode::NO_CONTENT.into_response(),
        Ok(Admitted::Request) => next.run(request).await,
        Err(refusal) if anthropic => refusal.into_anthropic(),
        Err(refusal) => refusal.into_response(),
    };
    let headers = response.headers_mut();
    if let Ok(value) = HeaderValue::from_str(&id) {
        headers.insert("x-request-id", value.clone());
        headers.insert("request-id", value);
    }
    if let Some(origin) = origin.filter(|o| allowed(&app.options.cors, o)) {
        allow(headers, origin);
    }
    // Paths that are no endpoint's are anybody's choice, and would fill the table.
    app.metrics.answered(endpoint.as_deref().unwrap_or("none"), response.status().as_u16());
    let status = response.status().as_u16();
    let entry = waiting.0.take().map(|entry| Entry { status, ..entry });
    let events = response.headers().get(header::CONTENT_TYPE).is_some_and(|v| v == EVENTS);
    response.map(|body| Body::new(Logged { body, entry, whole: false, events, under_way }))
}

enum Admitted {
    Request,
    Preflight,
}

fn admit(app: &App, request: &Request) -> Result<Admitted, Refusal> {
    let headers = request.headers();
    let options = &app.options;
    if options.keys.is_empty() && options.loopback {
        check_host(headers)?;
    }
    if let Some(origin) = headers.get(header::ORIGIN)
        && !allowed(&options.cors, origin)
        && !same_site(headers, origin)
    {
        let said = format!("pages of {origin:?} may not use this server; start it with --cors");
        return Err(Refusal::new(StatusCode::FORBIDDEN, said).with_code("origin_not_allowed"));
    }
    let preflight = request.method() == Method::OPTIONS
        && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    if preflight {
        return Ok(Admitted::Preflight);
    }
    if request.uri().path() != "/health" && !options.keys.is_empty() {
        check_key(headers, &options.keys)?;
    }
    Ok(Admitted::Request)
}

/// A page of elsewhere whose name was made to point here (DNS rebinding) is told apart by the Host that its
/// browser sends.
fn check_host(headers: &HeaderMap) -> Result<(), Refusal> {
    let host = headers.get(header::HOST).and_then(|h| h.to_str().ok()).unwrap_or_default();
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((inside, _)) => inside,
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    let name = name.trim_end_matches('.');
    let local = name.eq_ignore_ascii_case("localhost")
        || name.to_ascii_lowercase().ends_with(".localhost")
        || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    if local {
        return Ok(());
    }
    let host: String = host.chars().take(100).collect();
    let said = format!(
        "the Host is {host:?}: without keys this server answers localhost alone; start it with --api-key-file"
    );
    Err(Refusal::new(StatusCode::FORBIDDEN, said).with_code("host_not_allowed"))
}

fn check_key(headers: &HeaderMap, keys: &[String]) -> Result<(), Refusal> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|v| v.to_str().ok());
    let bearer = bearer.and_then(|v| {
        let (scheme, key) = v.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
    });
    let given = bearer.or_else(|| headers.get("x-api-key").and_then(|v| v.to_str().ok()));
    let Some(given) = given else {
        let said = "no key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`";
        return Err(Refusal::new(StatusCode::UNAUTHORIZED, said).with_code("missing_api_key"));
    };
    // Every key is compared, each in time that depends on its length alone.
    let mut found = subtle::Choice::from(0);
    for key in keys {
        found |= key.as_bytes().ct_eq(given.as_bytes());
    }
    if bool::from(found) {
        return Ok(());
    }
    Err(Refusal::new(StatusCode::UNAUTHORIZED, "the key is wrong").with_code("invalid_api_key"))
}

fn allowed(cors: &[String], origin: &HeaderValue) -> bool {
    cors.iter().any(|known| known == "*" || known.as_bytes() == origin.as_bytes())
}

/// Whether a page comes from this very server.
fn same_site(headers: &HeaderMap, origin: &HeaderValue) -> bool {
    let host = headers.get(header::HOST).map(HeaderValue::as_bytes);
    let origin = origin.as_bytes();
    let origin = origin.strip_prefix(b"http://").or_else(|| origin.strip_prefix(b"https://"));
    origin.is_some() && origin == host
}

fn allow(headers: &mut HeaderMap, origin: HeaderValue) {
    let fixed = |text| HeaderValue::from_static(text);
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.append(header::VARY, fixed("origin"));
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, fixed("GET, POST, OPTIONS"));
    headers.insert(
        header::ACCESS_CONTROL_ALLOW_HEADERS,
        fixed(
            "authorization, content-type, x-api-key, anthropic-version, anthropic-beta, \
             anthropic-dangerous-direct-browser-access, openai-organization, openai-project, \
             x-request-id, x-stainless-arch, x-stainless-lang, x-stainless-os, \
             x-stainless-package-version, x-stainless-retry-count, x-stainless-runtime, \
             x-stainless-runtime-version, x-stainless-timeout, x-stainless-helper-method",
        ),
    );
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, fixed("x-request-id, retry-after"));
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, fixed("600"));
}

/// The client's own id where it is harmless, else a new one.
fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get(HeaderName::from_static("x-request-id"));
    let sane = |id: &&str| {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
        (1..=64).contains(&id.len()) && id.bytes().all(plain)
    };
    let given = given.and_then(|v| v.to_str().ok()).filter(sane);
    given.map_or_else(|| new_id("req_"), str::to_owned)
}

/// What the log calls the status of an answer that nobody waited for.
const CLIENT_LEFT: u16 = 499;

/// A line of the access log.
#[derive(Debug)]
struct Entry {
    id: String,
    method: Method,
    path: String,
    status: u16,
    began: Instant,
    note: Note,
}

impl Entry {
    fn write(&self, left: bool) {
        let Entry { id, method, path, status, began, note } = self;
        let noted = note.lock().clone();
        tracing::info!(
            target: "fornax::access",
            id,
            %method,
            path = path.chars().take(200).collect::<String>(),
            status,
            ms = began.elapsed().as_millis() as u64,
            model = noted.model,
            prompt = noted.usage.prompt,
            cached = noted.usage.cached,
            generated = noted.usage.generated,
            left,
        );
    }
}

/// Writes the entry of a request that is dropped before it has an answer: its client left.
struct Waiting(Option<Entry>);

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(entry) = &self.0 {
            entry.write(true);
        }
    }
}

/// A body that writes its entry of the access log when it is gone, sent or not.
#[derive(Debug)]
struct Logged {
    body: Body,
    entry: Option<Entry>,
    /// The end was reached.
    whole: bool,
    /// It is a stream of events, each part of it whole events.
    events: bool,
    under_way: Option<UnderWay>,
}

impl http_body::Body for Logged {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.events && self.under_way.as_ref().is_some_and(UnderWay::is_asked) {
            return Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(COMMENT)))));
        }
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if matches!(polled, Poll::Ready(None)) || self.body.is_end_stream() {
            self.whole = true;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Logged {
    fn drop(&mut self) {
        let whole = self.whole || self.body.is_end_stream();
        if let Some(entry) = &self.entry {
            entry.write(!whole);
        }
    }
}
