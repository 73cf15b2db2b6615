//! An answer of `/v1/responses` as events: items that open, grow and close. Knows the order that clients rely on.

use serde_json::{Value, json};

use super::{Head, function_call, logprob_list, message, reasoning, status, text_part};
use crate::gate::Note;
use crate::live::{Piece, Reason};
use crate::order::new_id;
use crate::refusal::Refusal;
use crate::sse::{Events, Outgoing};
use crate::tokens::Logprob;
use crate::whole::Call;

/// The item that grows.
enum Item {
    Text { id: String, text: String, logprobs: Vec<Logprob> },
    Reasoning { id: String, text: String },
    Call { id: String, call: Call, index: usize },
}

pub(super) struct Stream {
    head: Head,
    note: Note,
    logprobs: bool,
    /// Events so far.
    number: u64,
    /// Items that are closed.
    output: Vec<Value>,
    open: Option<Item>,
    reason: Option<Reason>,
    used: crate::live::Usage,
}

impl Stream {
    pub(super) fn new(head: Head, note: Note, logprobs: bool) -> Stream {
        let used = crate::live::Usage::default();
        Stream {
            head,
            note,
            logprobs,
            number: 0,
            output: Vec::new(),
            open: None,
            reason: None,
            used,
        }
    }

    fn send(&mut self, kind: &str, mut event: Value, out: &mut Outgoing) {
        event["type"] = kind.into();
        event["sequence_number"] = self.number.into();
        self.number += 1;
        out.named(kind, &event);
    }

    /// An event about a part of the open item.
    fn send_part(&mut self, kind: &str, id: &str, mut event: Value, out: &mut Outgoing) {
        event["item_id"] = id.into();
        event["output_index"] = self.output.len().into();
        if !kind.contains("function_call") {
            event["content_index"] = 0.into();
        }
        self.send(kind, event, out);
    }

    fn add(&mut self, item: &Value, out: &mut Outgoing) {
        let event = json!({ "output_index": self.output.len(), "item": item });
        self.send("response.output_item.added", event, out);
    }

    fn text(&mut self, text: &str, new: Vec<Logprob>, out: &mut Outgoing) {
        if !matches!(self.open, Some(Item::Text { .. })) {
            if text.is_empty() {
                return;
            }
            self.shut("completed", out);
            let id = new_id("msg_");
            let item = json!({
                "id": id, "type": "message", "role": "assistant", "status": "in_progress", "content": [],
            });
            self.add(&item, out);
            let part = json!({ "part": text_part("", &[]) });
            self.send_part("response.content_part.added", &id, part, out);
            self.open = Some(Item::Text { id, text: String::new(), logprobs: Vec::new() });
        }
        let Some(Item::Text { id, text: all, logprobs }) = &mut self.open else { return };
        all.push_str(text);
        let shown = if self.logprobs { logprob_list(&new) } else { json!([]) };
        logprobs.extend(new);
        let id = id.clone();
        let event = json!({ "delta": text, "logprobs": shown });
        self.send_part("response.output_text.delta", &id, event, out);
    }

    fn think(&mut self, text: &str, out: &mut Outgoing) {
        if !matches!(self.open, Some(Item::Reasoning { .. })) {
            if text.is_empty() {
                return;
            }
            self.shut("completed", out);
            let id = new_id("rs_");
            let item = json!({
                "id": id, "type": "reasoning", "status": "in_progress", "summary": [], "content": [],
            });
            self.add(&item, out);
            let part = json!({ "part": { "type": "reasoning_text", "text": "" } });
            self.send_part("response.content_part.added", &id, part, out);
            self.open = Some(Item::Reasoning { id, text: String::new() });
        }
        let Some(Item::Reasoning { id, text: all }) = &mut self.open else { return };
        all.push_str(text);
        let id = id.clone();
        self.send_part("response.reasoning_text.delta", &id, json!({ "delta": text }), out);
    }

    fn call(&mut self, index: usize, call_id: String, name: String, out: &mut Outgoing) {
        self.shut("completed", out);
        let id = new_id("fc_");
        let call = Call { id: call_id, name, arguments: String::new() };
        self.add(&function_call(&id, &call, "in_progress"), out);
        self.open = Some(Item::Call { id, call, index });
    }

    fn arguments(&mut self, at: usize, fragment: &str, out: &mut Outgoing) {
        let Some(Item::Call { id, call, index }) = &mut self.open else { return };
        if *index == at {
            call.arguments.push_str(fragment);
            let id = id.clone();
            let event = json!({ "delta": fragment });
            self.send_part("response.function_call_arguments.delta", &id, event, out);
        }
    }

    /// Closes the open item.
    fn shut(&mut self, status: &str, out: &mut Outgoing) {
        let item = match self.open.take() {
            None => return,
            Some(Item::Text { id, text, logprobs }) => {
                let shown: &[Logprob] = if self.logprobs { &logprobs } else { &[] };
                let done = json!({ "text": text, "logprobs": logprob_list(shown) });
                self.send_part("response.output_text.done", &id, done, out);
                let part = json!({ "part": text_part(&text, shown) });
                self.send_part("response.content_part.done", &id, part, out);
                message(&id, &text, shown, status)
            }
            Some(Item::Reasoning { id, text }) => {
                self.send_part("response.reasoning_text.done", &id, json!({ "text": text }), out);
                let part = json!({ "part": { "type": "reasoning_text", "text": text } });
                self.send_part("response.content_part.done", &id, part, out);
                reasoning(&id, &text, status)
            }
            Some(Item::Call { id, call, .. }) => {
                let done = json!({ "name": call.name, "arguments": call.arguments });
                self.send_part("response.function_call_arguments.done", &id, done, out);
                function_call(&id, &call, status)
            }
        };
        let event = json!({ "output_index": self.output.len(), "item": item });
        self.send("response.output_item.done", event, out);
        self.output.push(item);
    }
}

impl Events for Stream {
    fn open(&mut self, out: &mut Outgoing) {
        for kind in ["response.created", "response.in_progress"] {
            let response = self.head.with("in_progress", Vec::new(), None);
            self.send(kind, json!({ "response": response }), out);
        }
    }

    fn piece(&mut self, _: usize, piece: Piece, out: &mut Outgoing) {
        match piece {
            Piece::Prompt(_) => {}
            Piece::Text(certain) => self.text(&certain.text, certain.logprobs, out),
            Piece::Reasoning(certain) => self.think(&certain.text, out),
            Piece::Call { index, id, name } => self.call(index, id, name, out),
            Piece::Arguments { index, fragment } => self.arguments(index, &fragment, out),
            Piece::End(end) => {
                self.reason = Some(end.reason);
                self.used = end.usage;
                self.note.usage(end.usage);
            }
        }
    }

    fn close(&mut self, out: &mut Outgoing) {
        let status = status(self.reason);
        self.shut(status, out);
        let output = std::mem::take(&mut self.output);
        let response = self.head.with(status, output, Some(self.used));
        self.send(&format!("response.{status}"), json!({ "response": response }), out);
    }

    fn failed(&mut self, refusal: &Refusal, out: &mut Outgoing) {
        let output = std::mem::take(&mut self.output);
        let mut response = self.head.with("failed", output, None);
        let code = refusal.code.unwrap_or("server_error");
        response["error"] = json!({ "code": code, "message": refusal.message });
        self.send("response.failed", json!({ "response": response }), out);
        tracing::warn!("{}: {}", self.head.id, refusal.message);
    }
}
