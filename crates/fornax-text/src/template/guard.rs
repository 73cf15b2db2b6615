//! Keeps what users wrote from becoming control tokens. It must not know the template.
//!
//! A template may trim, split and compare what it is given, so that values cannot be wrapped without
//! changing what it does. Instead, only where a value holds the text of a control token, or a beginning or
//! end of one that its surroundings could complete, a mark (a character that occurs nowhere else) is put
//! into it. After rendering the marks are taken out again, and no control token may reach across the
//! places where they were. Harmless values pass through untouched.
//!
//! Limit: where a template itself writes the ends of a control token around a value, the token comes about;
//! that is how templates make tokens of roles (`<|user|>`). Who takes roles from strangers has to check them.

use serde_json::{Map, Value};

use crate::{Error, Tokenizer};

/// A noncharacter that occurs neither in the template nor in any value.
///
/// # Errors
/// `is_malformed` if all of them occur.
pub(super) fn choose_mark(
    source: &str,
    messages: &Value,
    extra: &Map<String, Value>,
) -> Result<char, Error> {
    let free = |mark: &char| {
        !source.contains(*mark)
            && !holds(messages, *mark)
            && !extra.iter().any(|(k, v)| k.contains(*mark) || holds(v, *mark))
    };
    // Unicode sets these aside for internal use; text for interchange never has them.
    ('\u{fdd0}'..='\u{fdef}').find(free).ok_or_else(|| {
        Error::malformed(
            "rendering a chat: the messages hold all of U+FDD0 to U+FDEF, which no text should; remove them",
        )
    })
}

fn holds(value: &Value, mark: char) -> bool {
    match value {
        Value::String(text) => text.contains(mark),
        Value::Array(items) => items.iter().any(|v| holds(v, mark)),
        Value::Object(map) => map.iter().any(|(k, v)| k.contains(mark) || holds(v, mark)),
        _ => false,
    }
}

/// Marks every text in the messages and variables that could become a control token.
pub(super) fn defuse_all(
    messages: &mut Value,
    extra: &mut Map<String, Value>,
    tokenizer: &Tokenizer,
    mark: char,
) {
    let guard = Guard { tokenizer, mark };
    if let Value::Array(list) = messages {
        for message in list.iter_mut().filter_map(Value::as_object_mut) {
            guard.object(message, true);
        }
    }
    guard.values(extra);
}

struct Guard<'a> {
    tokenizer: &'a Tokenizer,
    mark: char,
}

impl Guard<'_> {
    fn values(&self, map: &mut Map<String, Value>) {
        for value in map.values_mut() {
            self.value(value);
        }
    }

    fn object(&self, map: &mut Map<String, Value>, is_message: bool) {
        let marked = map.keys().any(|key| !self.marks(key, true).is_empty());
        if marked {
            *map = std::mem::take(map).into_iter().map(|(k, v)| (self.text(&k, true), v)).collect();
        }
        for (key, value) in map.iter_mut() {
            match value {
                // Templates make control tokens of roles: <|user|>.
                Value::String(role) if is_message && key == "role" => {
                    *role = self.text(role, false)
                }
                _ => self.value(value),
            }
        }
    }

    fn value(&self, value: &mut Value) {
        match value {
            Value::String(text) => *text = self.text(text, true),
            Value::Array(items) => items.iter_mut().for_each(|v| self.value(v)),
            Value::Object(map) => self.object(map, false),
            _ => {}
        }
    }

    fn text(&self, text: &str, ends: bool) -> String {
        let marks = self.marks(text, ends);
        let mut out = String::with_capacity(text.len() + marks.len() * self.mark.len_utf8());
        let mut from = 0;
        for at in marks {
            out.push_str(&text[from..at]);
            out.push(self.mark);
            from = at;
        }
        out.push_str(&text[from..]);
        out
    }

    /// Where marks go, sorted: after the first character of each control token in the text, and with
    /// `ends` inside what could be one end of such a token.
    fn marks(&self, text: &str, ends: bool) -> Vec<usize> {
        let markers = self.tokenizer.markers();
        let first_char = |at: usize| text[at..].chars().next().map_or(1, char::len_utf8);
        let mut marks = Vec::new();
        let mut at = 0;
        while let Some(found) = markers.whole.find(text.as_bytes(), at, &[]) {
            at = found.start + first_char(found.start);
            marks.push(at);
        }
        if ends {
            let tail = text.len().saturating_sub(markers.longest);
            for at in (tail..text.len()).filter(|&i| text.is_char_boundary(i)) {
                if markers.whole.starts_longer(&text.as_bytes()[at..]) {
                    marks.push(at + first_char(at));
                }
            }
            for (at, c) in text.char_indices().take_while(|&(at, _)| at < markers.longest) {
                let end = at + c.len_utf8();
                let mut reversed = text.as_bytes()[..end].to_vec();
                reversed.reverse();
                if markers.reversed.starts_longer(&reversed) {
                    marks.push(at);
                }
            }
        }
        marks.sort_unstable();
        marks.dedup();
        marks
    }
}

/// The rendered text without marks, and where they were.
pub(super) fn take_marks(rendered: &str, mark: char) -> (String, Vec<usize>) {
    let mut text = String::with_capacity(rendered.len());
    let mut guards = Vec::new();
    for (i, part) in rendered.split(mark).enumerate() {
        if i > 0 {
            guards.push(text.len());
        }
        text.push_str(part);
    }
    (text, guards)
}
