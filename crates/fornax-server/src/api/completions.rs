//! `POST /v1/completions`: a text that goes on. Knows OpenAI's older protocol.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use fornax_plan::TokenId;
use serde_json::{Map, Value, json};

use super::{chat, read, write};
use crate::app::{App, LARGE, beside};
use crate::backend::Served;
use crate::gate::Note;
use crate::live::{Live, Piece, Usage};
use crate::order::{Order, new_id};
use crate::refusal::{Refusal, json_response};
use crate::schema::Body;
use crate::sse::{self, Events, Outgoing};
use crate::tokens::Logprob;
use crate::whole::{Whole, gather};

pub(super) async fn create(
    State(app): State<Arc<App>>,
    Extension(note): Extension<Note>,
    request: Request,
) -> Result<Response, Refusal> {
    let body = app.read(request, "CompletionsRequest").await?;
    let (order, streaming, echo) = order(&app, body).await?;
    note.model(&order.served.alias);
    let prompts = order.prompts.iter().map(|p| Echoed::new(&order.served, p)).collect();
    let head = Head {
        id: new_id("cmpl-"),
        model: order.served.alias.clone(),
        created: write::now(),
        n: order.n,
        logprobs: order.logprobs.is_some(),
        echo: echo.then_some(prompts),
    };
    let choices = order.prompts.len() * order.n;
    let live = Live::start(&order, app.metrics.clone())?;
    if let Some(include_usage) = streaming {
        let usages = vec![Usage::default(); choices];
        let offsets = vec![0; choices];
        return Ok(sse::stream(live, Stream { head, include_usage, usages, offsets, note }));
    }
    let all = gather(live, choices).await?;
    let sum = Usage::sum(&all.iter().map(Whole::usage).collect::<Vec<_>>(), order.n);
    note.usage(sum);
    Ok(json_response(StatusCode::OK, &head.whole(&all, sum)))
}

async fn order(app: &Arc<App>, body: Body) -> Result<(Order, Option<bool>, bool), Refusal> {
    let served = read::model(app, &body)?;
    let streaming = read::streaming(&body)?;
    let mut sampling = read::sampling(&body, &served)?;
    read::seed(&body, &mut sampling);
    let max_new = read::limit(body.integer("max_tokens").unwrap_or(16));
    let echo = body.flag("echo").unwrap_or(false);
    let logprobs = body.integer("logprobs").and_then(|n| u8::try_from(n).ok());
    let (n, stops, priority) =
        (read::choices(&body), read::stops(&body, "stop"), read::priority(&body));
    let grammar = body.get("response_format").and_then(chat::format);
    if max_new == 0 && grammar.is_some() {
        let said = "response_format asks for text of a form, and max_tokens for none";
        return Err(Refusal::field("max_tokens", said));
    }
    let prompt = body.get("prompt").cloned().unwrap_or_default();
    body.finish();
    let long = prompt.as_str().is_none_or(|p| p.len() > LARGE);
    let for_prompts = served.clone();
    let prompts = beside(long, move || read::prompts(&prompt, &for_prompts, "prompt")).await?;
    let mut order = Order::new(served.clone(), Vec::new());
    order.prompts = prompts.into_iter().map(Arc::from).collect();
    if let Some(grammar) = grammar {
        order.rule = Some(app.compile(&served, grammar, "response_format").await?);
    }
    let prompt_logprobs = echo && logprobs.is_some();
    let deadline = app.deadline();
    let order = Order {
        n,
        sampling,
        max_new,
        stops,
        logprobs,
        prompt_logprobs,
        priority,
        deadline,
        ..order
    };
    Ok((order, streaming, echo))
}

/// A prompt as `echo` gives it back: without a first token that the client did not write.
struct Echoed {
    text: String,
    skipped: bool,
}

impl Echoed {
    fn new(served: &Served, prompt: &Arc<[TokenId]>) -> Echoed {
        let tokenizer = served.model.tokenizer();
        let skipped = tokenizer.adds_bos() && prompt.first().copied() == tokenizer.bos();
        let text = tokenizer.decode(&prompt[usize::from(skipped)..], false);
        Echoed { text, skipped }
    }
}

struct Head {
    id: String,
    model: String,
    created: u64,
    /// Choices for each prompt.
    n: usize,
    logprobs: bool,
    echo: Option<Vec<Echoed>>,
}

impl Head {
    fn object(&self) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("id".into(), self.id.clone().into());
        map.insert("object".into(), "text_completion".into());
        map.insert("created".into(), self.created.into());
        map.insert("model".into(), self.model.clone().into());
        map.insert("system_fingerprint".into(), write::FINGERPRINT.into());
        map
    }

    fn echoed(&self, choice: usize) -> Option<&Echoed> {
        self.echo.as_ref().map(|all| &all[choice / self.n])
    }

    fn whole(&self, all: &[Whole], sum: Usage) -> Value {
        let choices = all.iter().enumerate().map(|(i, whole)| {
            let echoed = self.echoed(i);
            let skip = usize::from(echoed.is_some_and(|e| e.skipped));
            let logprobs = whole.prompt.iter().skip(skip).chain(&whole.logprobs);
            json!({
                "index": i,
                "text": echoed.map_or(String::new(), |e| e.text.clone()) + &whole.text,
                "logprobs": self.logprobs.then(|| write::completion_logprobs(logprobs, &mut 0)),
                "finish_reason": whole.end.as_ref().map(|end| write::reason(end.reason)),
            })
        });
        let mut object = self.object();
        object.insert("choices".into(), choices.collect());
        object.insert("usage".into(), write::usage(sum));
        object.into()
    }
}

struct Stream {
    head: Head,
    include_usage: bool,
    usages: Vec<Usage>,
    /// Characters that each choice's log-probabilities were given for.
    offsets: Vec<usize>,
    note: Note,
}

impl Stream {
    fn chunk(
        &mut self,
        choice: usize,
        text: &str,
        logprobs: &[Logprob],
        end: Option<&str>,
    ) -> Value {
        let logprobs = (self.head.logprobs && !logprobs.is_empty())
            .then(|| write::completion_logprobs(logprobs.iter(), &mut self.offsets[choice]));
        let mut object = self.head.object();
        object.insert(
            "choices".into(),
            json!([{ "index": choice, "text": text, "logprobs": logprobs, "finish_reason": end }]),
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
            if let Some(text) = self.head.echoed(choice).map(|e| e.text.clone()) {
                out.data(&self.chunk(choice, &text, &[], None));
            }
        }
    }

    fn piece(&mut self, choice: usize, piece: Piece, out: &mut Outgoing) {
        let chunk = match piece {
            Piece::Prompt(mut logprobs) => {
                let first = logprobs.first().is_some_and(|l| l.start == 0 && l.logprob.is_none());
                if first && self.head.echoed(choice).is_some_and(|e| e.skipped) {
                    logprobs.remove(0);
                }
                self.chunk(choice, "", &logprobs, None)
            }
            Piece::Text(certain) => self.chunk(choice, &certain.text, &certain.logprobs, None),
            Piece::End(end) => {
                self.usages[choice] = end.usage;
                self.chunk(choice, "", &[], Some(write::reason(end.reason)))
            }
            // A completion is nothing but text.
            Piece::Reasoning(_) | Piece::Call { .. } | Piece::Arguments { .. } => return,
        };
        out.data(&chunk);
    }

    fn close(&mut self, out: &mut Outgoing) {
        let sum = Usage::sum(&self.usages, self.head.n);
        self.note.usage(sum);
        if self.include_usage {
            let mut object = self.head.object();
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
