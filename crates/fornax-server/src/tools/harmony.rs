//! The harmony format of gpt-oss: messages with headers, channels and recipients. It knows its marks, no tokens.

use super::Format;
use crate::turn::TurnPiece;

/// Everything that stands between texts.
pub(super) const MARKS: &[&str] = &[
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Text,
    Reasoning,
    /// Arguments of the last call.
    Call,
    /// Of a call beyond the one that was asked for.
    Nothing,
}

/// Reads an answer that goes on from `<|start|>assistant`.
#[derive(Debug)]
pub(crate) struct HarmonyReader {
    one_call: bool,
    /// The header so far; none inside of a message.
    header: Option<String>,
    kind: Kind,
    /// What may become a mark.
    held: String,
    calls: usize,
    out: Vec<TurnPiece>,
}

impl HarmonyReader {
    pub(crate) fn new(one_call: bool) -> HarmonyReader {
        HarmonyReader {
            one_call,
            header: Some(String::new()),
            kind: Kind::Text,
            held: String::new(),
            calls: 0,
            out: Vec::new(),
        }
    }

    /// Whether what comes next is a thought, as far as can be told.
    pub(crate) fn is_reasoning(&self) -> bool {
        match &self.header {
            Some(header) => header.contains("analysis"),
            None => self.kind == Kind::Reasoning,
        }
    }

    /// Takes more of the answer.
    pub(crate) fn push(&mut self, text: &str) -> Vec<TurnPiece> {
        for c in text.chars() {
            self.held.push(c);
            self.settle();
        }
        std::mem::take(&mut self.out)
    }

    /// Takes the end of the answer. A header that was never finished and has no marks was meant as text.
    pub(crate) fn finish(&mut self) -> Vec<TurnPiece> {
        let held = std::mem::take(&mut self.held);
        match self.header.take() {
            None => self.add(&held),
            Some(header) => {
                let all = header + &held;
                if !all.contains("<|") && self.out.is_empty() {
                    self.kind = Kind::Text;
                    self.add(&all);
                }
            }
        }
        std::mem::take(&mut self.out)
    }

    fn settle(&mut self) {
        while let Some(first) = self.held.chars().next() {
            if let Some(mark) = MARKS.iter().find(|mark| **mark == self.held) {
                self.held.clear();
                return self.mark(mark);
            }
            if MARKS.iter().any(|mark| mark.starts_with(&*self.held)) {
                return;
            }
            let certain: String = self.held.drain(..first.len_utf8()).collect();
            self.add(&certain);
        }
    }

    fn mark(&mut self, mark: &str) {
        match mark {
            "<|message|>" => {
                if let Some(header) = self.header.take() {
                    self.begin(&header);
                }
            }
            "<|end|>" | "<|call|>" | "<|return|>" => self.header = Some(String::new()),
            _ => self.header.get_or_insert_default().push_str(mark),
        }
    }

    /// A message after its header: `assistant<|channel|>commentary to=functions.f <|constrain|>json`.
    fn begin(&mut self, header: &str) {
        let word = |text: &str| -> String {
            text.trim_start().chars().take_while(|c| !c.is_whitespace() && *c != '<').collect()
        };
        let channel =
            header.split_once("<|channel|>").map(|(_, rest)| word(rest)).unwrap_or_default();
        let recipient = header.split_once("to=").map(|(_, rest)| word(rest));
        let function = recipient.as_deref().and_then(|to| to.strip_prefix("functions."));
        self.kind = match function {
            Some(_) if self.one_call && self.calls > 0 => Kind::Nothing,
            Some(name) => {
                let (index, id) = (self.calls, Format::Harmony.new_id());
                self.out.push(TurnPiece::Call { index, id, name: name.to_owned() });
                self.calls += 1;
                Kind::Call
            }
            // Tools that are the model's own are none of the client's.
            None if recipient.is_some() || channel == "analysis" => Kind::Reasoning,
            None => Kind::Text,
        };
    }

    fn add(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        if let Some(header) = &mut self.header {
            header.push_str(text);
            return;
        }
        match (self.kind, self.out.last_mut()) {
            (Kind::Nothing, _) => {}
            (Kind::Text, Some(TurnPiece::Text(last)))
            | (Kind::Reasoning, Some(TurnPiece::Reasoning(last)))
            | (Kind::Call, Some(TurnPiece::Arguments { fragment: last, .. })) => {
                last.push_str(text)
            }
            (Kind::Text, _) => self.out.push(TurnPiece::Text(text.to_owned())),
            (Kind::Reasoning, _) => self.out.push(TurnPiece::Reasoning(text.to_owned())),
            (Kind::Call, _) => {
                let index = self.calls - 1;
                self.out.push(TurnPiece::Arguments { index, fragment: text.to_owned() });
            }
        }
    }
}
