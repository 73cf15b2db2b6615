//! Text and calls told apart, character by character, so that it does not matter how the text is cut. What may become
//! a mark is held back; what turns out to be no call is text again. It knows the marks of every format but channels.

use std::sync::Arc;

use super::json_call::{JsonCall, Part, Step};
use super::{Format, Tool, Written, block};
use crate::turn::TurnPiece;

#[derive(Clone, Debug)]
enum State {
    Text,
    /// After a mark, before what says how the call is written.
    Open,
    Json(Box<JsonCall>),
    /// After a call: another one, the mark that closes, or text.
    After {
        list: bool,
    },
    /// A name up to its mark.
    Name,
    /// All up to this mark, or to the end.
    Block {
        end: Option<&'static str>,
        begin: usize,
    },
}

/// Reads an answer that may hold calls.
#[derive(Debug)]
pub(crate) struct CallReader {
    format: Format,
    tools: Arc<[Tool]>,
    one_call: bool,
    state: State,
    /// What is not decided yet.
    held: String,
    /// The text of the call that is being read, as far as it was not announced.
    raw: String,
    /// Calls so far, and whether the one that is being read is among them.
    calls: usize,
    announced: bool,
    list: bool,
    /// Whether there was text.
    spoke: bool,
    out: Vec<TurnPiece>,
}

impl CallReader {
    pub(crate) fn new(format: Format, tools: Arc<[Tool]>, one_call: bool) -> CallReader {
        CallReader {
            format,
            tools,
            one_call,
            state: State::Text,
            held: String::new(),
            raw: String::new(),
            calls: 0,
            announced: false,
            list: false,
            spoke: false,
            out: Vec::new(),
        }
    }

    /// Takes more of the answer.
    pub(crate) fn push(&mut self, text: &str) -> Vec<TurnPiece> {
        text.chars().for_each(|c| self.take(c));
        std::mem::take(&mut self.out)
    }

    /// Takes the end of the answer. A call that was cut before its name was known is text.
    pub(crate) fn finish(&mut self) -> Vec<TurnPiece> {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Block { begin, .. } => self.end_block(begin, ""),
            State::Json(_) if self.announced => self.raw.clear(),
            State::Json(_) | State::Open | State::Name => {
                // A name that was held is in the text of the call too.
                self.held.clear();
                self.give_back();
            }
            State::Text | State::After { .. } => {}
        }
        let held = std::mem::take(&mut self.held);
        if self.calls == 0 || !held.trim().is_empty() {
            self.say(&held);
        }
        std::mem::take(&mut self.out)
    }

    fn take(&mut self, c: char) {
        match &mut self.state {
            State::Text => {
                self.held.push(c);
                self.settle();
            }
            State::Open => {
                self.raw.push(c);
                if !c.is_whitespace() {
                    self.open(c);
                }
            }
            State::Json(call) => {
                self.raw.push(c);
                let mut parts = Vec::new();
                let step = call.push(c, &mut parts);
                self.parts(parts, step);
            }
            State::After { list } => {
                let list = *list;
                self.held.push(c);
                self.after(list);
            }
            State::Name => {
                self.raw.push(c);
                self.name();
            }
            State::Block { end, begin } => {
                self.raw.push(c);
                let (end, begin) = (*end, *begin);
                if let Some(end) = end.filter(|end| self.raw[begin..].ends_with(end)) {
                    self.state = State::Text;
                    self.end_block(begin, end);
                }
            }
        }
    }

    /// Marks with which a call begins here.
    fn triggers(&self) -> &'static [&'static str] {
        let at_start = !self.spoke && self.calls == 0;
        match (self.format, at_start) {
            (Format::Hermes, _) => &["<tool_call>"],
            (Format::Llama, true) => &["<|python_tag|>", "{"],
            (Format::Llama, false) => &["<|python_tag|>"],
            (Format::Mistral | Format::MistralArgs, _) => &["[TOOL_CALLS]"],
            (Format::Lfm2, _) => &["<|tool_call_start|>"],
            (Format::Gemma, true) => &["```tool_code", "```json", "[", "{"],
            (Format::Gemma, false) => &["```tool_code", "```json"],
            (Format::Harmony, _) => &[],
        }
    }

    /// Passes on what of the held text can be no mark, and begins a call where one is complete.
    fn settle(&mut self) {
        while !self.held.is_empty() {
            let spaces = self.held.len() - self.held.trim_start().len();
            let rest = &self.held[spaces..];
            let Some(first) = rest.chars().next() else { return };
            let triggers = self.triggers();
            if let Some(mark) = triggers.iter().find(|mark| **mark == rest) {
                self.raw = std::mem::take(&mut self.held);
                self.begin(mark);
                return;
            }
            if triggers.iter().any(|mark| mark.starts_with(rest)) {
                return;
            }
            let certain: String = self.held.drain(..spaces + first.len_utf8()).collect();
            self.say(&certain);
        }
    }

    fn begin(&mut self, mark: &str) {
        self.announced = false;
        self.list = false;
        let begin = self.raw.len();
        self.state = match (self.format, mark) {
            (Format::Gemma, "[" | "{") => State::Block { end: None, begin: begin - 1 },
            (Format::Gemma, _) => State::Block { end: Some("```"), begin },
            (Format::Lfm2, _) => State::Block { end: Some("<|tool_call_end|>"), begin },
            (_, "{") => State::Json(Box::new(started())),
            _ => State::Open,
        };
    }

    /// The first character after a mark.
    fn open(&mut self, c: char) {
        let begin = self.raw.len() - c.len_utf8();
        let mistral = matches!(self.format, Format::Mistral | Format::MistralArgs);
        self.state = match c {
            '{' => State::Json(Box::new(started())),
            '<' if self.format == Format::Hermes => {
                State::Block { end: Some("</tool_call>"), begin }
            }
            '[' if mistral && !self.list => {
                self.list = true;
                State::Open
            }
            c if mistral && !self.list && (c.is_alphanumeric() || c == '_') => {
                self.held = c.to_string();
                State::Name
            }
            _ => return self.give_back(),
        };
    }

    fn name(&mut self) {
        let c = self.raw.chars().next_back().unwrap_or_default();
        self.held.push(c);
        let Some(name) = self.held.strip_suffix("[ARGS]") else {
            // A name, or a name with an id of the model's own.
            if self.held.len() > 512 || c.is_whitespace() {
                self.held.clear();
                self.give_back();
            }
            return;
        };
        let name = name.split("[CALL_ID]").next().unwrap_or_default().to_owned();
        self.held.clear();
        let mut parts = Vec::new();
        self.state = State::Json(Box::new(JsonCall::bare_arguments(name, &mut parts)));
        self.parts(parts, Step::More);
    }

    fn parts(&mut self, parts: Vec<Part>, step: Step) {
        for part in parts {
            match part {
                Part::Name(name) if self.format == Format::Llama && !self.knows(&name) => {
                    return self.give_back();
                }
                Part::Name(name) => self.announce(name),
                Part::Arguments(fragment) => self.fragment(fragment),
            }
        }
        match step {
            Step::More => {}
            Step::Done => {
                self.raw.clear();
                self.announced = false;
                self.state = State::After { list: self.list };
            }
            Step::Bad if self.announced => {
                // What came of it was handed on; the rest is text.
                self.raw.clear();
                self.announced = false;
                self.state = State::Text;
            }
            Step::Bad => self.give_back(),
        }
    }

    /// After a call. `list`: inside `[…]`.
    fn after(&mut self, list: bool) {
        let rest = self.held.trim_start();
        let rest = match self.format {
            Format::Llama => rest.trim_start_matches([';', ',']).trim_start(),
            _ if list => rest.trim_start_matches(',').trim_start(),
            _ => rest,
        };
        if rest.is_empty() {
            return;
        }
        let closes = match self.format {
            Format::Hermes => "</tool_call>",
            Format::Llama => "<|python_tag|>",
            _ if list => "]",
            _ => "",
        };
        if rest == closes {
            self.held.clear();
            self.state = if self.format == Format::Llama { State::Open } else { State::Text };
        } else if rest == "{" && (list || matches!(self.format, Format::Llama | Format::Hermes)) {
            self.raw = std::mem::take(&mut self.held);
            self.state = State::Json(Box::new(started()));
        } else if !closes.starts_with(rest) {
            self.state = State::Text;
            self.settle();
        }
    }

    fn end_block(&mut self, begin: usize, end: &str) {
        let body = &self.raw[begin..self.raw.len() - end.len()];
        let calls = block::calls(body, &self.tools);
        // A block of JSON, or brackets at the start, may as well be an answer.
        let certain =
            self.format != Format::Gemma || self.raw.trim_start().starts_with("```tool_code");
        match calls.filter(|calls| certain || calls.iter().all(|call| self.knows(&call.name))) {
            Some(calls) => {
                self.raw.clear();
                for Written { name, arguments } in calls {
                    self.announce(name);
                    self.fragment(arguments);
                }
                self.announced = false;
            }
            None => self.give_back(),
        }
    }

    fn knows(&self, name: &str) -> bool {
        self.tools.iter().any(|tool| tool.name == name)
    }

    /// What was taken for a call is text.
    fn give_back(&mut self) {
        self.state = State::Text;
        let raw = std::mem::take(&mut self.raw);
        self.say(&raw);
    }

    fn say(&mut self, text: &str) {
        self.spoke |= !text.trim().is_empty();
        match self.out.last_mut() {
            _ if text.is_empty() => {}
            Some(TurnPiece::Text(last)) => last.push_str(text),
            _ => self.out.push(TurnPiece::Text(text.to_owned())),
        }
    }

    fn announce(&mut self, name: String) {
        self.announced = true;
        self.calls += 1;
        if !self.muted() {
            let (index, id) = (self.calls - 1, self.format.new_id());
            self.out.push(TurnPiece::Call { index, id, name });
        }
    }

    fn fragment(&mut self, text: String) {
        let index = self.calls.saturating_sub(1);
        if self.muted() {
            return;
        }
        match self.out.last_mut() {
            Some(TurnPiece::Arguments { fragment, .. }) => fragment.push_str(&text),
            _ => self.out.push(TurnPiece::Arguments { index, fragment: text }),
        }
    }

    /// Whether this is a further call where one was asked for.
    fn muted(&self) -> bool {
        self.one_call && self.calls > 1
    }
}

/// A call whose opening brace was read.
fn started() -> JsonCall {
    let mut call = JsonCall::new();
    call.push('{', &mut Vec::new());
    call
}
