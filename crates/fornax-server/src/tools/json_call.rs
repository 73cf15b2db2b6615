//! A call written as a JSON object, read character by character: the name as soon as it is known, the arguments as
//! they come. It knows no marks around it.

use serde_json::Value;

/// What a character meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    More,
    /// The object is closed.
    Done,
    /// This is no call.
    Bad,
}

/// What was understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Name(String),
    /// A piece of the arguments, as the model wrote it.
    Arguments(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before the opening brace.
    Start,
    /// Before a key, a comma, or the closing brace.
    Key,
    InKey,
    Colon,
    /// Before a value.
    Value,
    InValue,
    /// After a value.
    Next,
}

/// `{"name": "f", "arguments": {…}}`; `parameters` is as good as `arguments`, and both may lie in a `function`.
#[derive(Clone, Debug)]
pub(super) struct JsonCall {
    state: State,
    key: String,
    /// The value being read, as written; nothing of arguments that are passed on.
    value: String,
    /// Brackets open in the value, whether it is in a string, and after a backslash there.
    depth: u32,
    in_string: bool,
    escaped: bool,
    /// Objects around the one that is read.
    nested: u32,
    name: Option<String>,
    /// Arguments that came before the name.
    early: Option<String>,
    streams: bool,
    has_arguments: bool,
}

/// Brackets within brackets in arguments; nothing is recursive here, but what reads them later is.
const DEPTH: u32 = 100;

impl JsonCall {
    pub(super) fn new() -> JsonCall {
        JsonCall {
            state: State::Start,
            key: String::new(),
            value: String::new(),
            depth: 0,
            in_string: false,
            escaped: false,
            nested: 0,
            name: None,
            early: None,
            streams: false,
            has_arguments: false,
        }
    }

    /// A call whose name is known already and whose object is its arguments.
    pub(super) fn arguments_of(name: String, out: &mut Vec<Part>) -> JsonCall {
        out.push(Part::Name(name.clone()));
        JsonCall {
            state: State::Value,
            key: "arguments".into(),
            name: Some(name),
            ..JsonCall::new()
        }
    }

    fn bare(&self) -> bool {
        self.nested == u32::MAX
    }

    /// As [`JsonCall::arguments_of`], ending with the arguments.
    pub(super) fn bare_arguments(name: String, out: &mut Vec<Part>) -> JsonCall {
        JsonCall { nested: u32::MAX, ..JsonCall::arguments_of(name, out) }
    }

    pub(super) fn push(&mut self, c: char, out: &mut Vec<Part>) -> Step {
        let space = matches!(c, ' ' | '\t' | '\n' | '\r');
        match self.state {
            State::Start | State::Key | State::Colon | State::Value | State::Next if space => {}
            State::Start if c == '{' => self.state = State::Key,
            State::Key | State::Next if c == '}' => return self.close(out),
            State::Key if c == '"' => {
                self.key.clear();
                self.state = State::InKey;
            }
            State::InKey => match (c, self.escaped) {
                (_, true) => {
                    self.key.push(c);
                    self.escaped = false;
                }
                ('\\', false) => {
                    self.key.push(c);
                    self.escaped = true;
                }
                ('"', false) => self.state = State::Colon,
                _ => self.key.push(c),
            },
            State::Colon if c == ':' => self.state = State::Value,
            State::Value => return self.begin(c, out),
            State::InValue => return self.inside(c, out),
            State::Next if c == ',' => self.state = State::Key,
            _ => return Step::Bad,
        }
        Step::More
    }

    fn is_arguments(&self) -> bool {
        matches!(&*self.key, "arguments" | "parameters")
    }

    fn begin(&mut self, c: char, out: &mut Vec<Part>) -> Step {
        if c == '{' && self.key == "function" && self.nested < 4 {
            self.nested += 1;
            self.state = State::Key;
            return Step::More;
        }
        if self.is_arguments() && (self.has_arguments || !matches!(c, '{' | '"' | 'n')) {
            return Step::Bad;
        }
        self.streams = c == '{' && self.is_arguments() && self.name.is_some();
        self.has_arguments |= self.streams;
        self.value.clear();
        self.state = State::InValue;
        self.inside(c, out)
    }

    fn inside(&mut self, c: char, out: &mut Vec<Part>) -> Step {
        let scalar = self.depth == 0 && !self.in_string;
        if scalar && matches!(c, ',' | '}' | ']' | ' ' | '\t' | '\n' | '\r') {
            // A number, true, false or null ends before this character.
            let step = self.end_value(out);
            return if step == Step::More { self.push(c, out) } else { step };
        }
        if self.streams {
            match out.last_mut() {
                Some(Part::Arguments(text)) => text.push(c),
                _ => out.push(Part::Arguments(c.into())),
            }
        } else {
            self.value.push(c);
        }
        match c {
            _ if self.escaped => self.escaped = false,
            '\\' if self.in_string => self.escaped = true,
            '"' => {
                self.in_string = !self.in_string;
                if !self.in_string && self.depth == 0 {
                    return self.end_value(out);
                }
            }
            '{' | '[' if !self.in_string => {
                self.depth += 1;
                if self.depth > DEPTH {
                    return Step::Bad;
                }
            }
            '}' | ']' if !self.in_string => {
                self.depth -= 1;
                if self.depth == 0 {
                    return self.end_value(out);
                }
            }
            _ => {}
        }
        Step::More
    }

    fn end_value(&mut self, out: &mut Vec<Part>) -> Step {
        self.state = State::Next;
        if self.streams {
            self.streams = false;
            return if self.bare() { Step::Done } else { Step::More };
        }
        let value = std::mem::take(&mut self.value);
        if self.key == "name" && self.name.is_none() {
            match serde_json::from_str(&value) {
                Ok(Value::String(name)) if !name.is_empty() => {
                    out.push(Part::Name(name.clone()));
                    out.extend(self.early.take().map(Part::Arguments));
                    self.name = Some(name);
                }
                _ => return Step::Bad,
            }
        } else if self.is_arguments() {
            let text = match serde_json::from_str(&value) {
                Ok(Value::Object(_)) => value,
                Ok(Value::Null) => "{}".into(),
                // Arguments as a text that holds them.
                Ok(Value::String(text))
                    if serde_json::from_str(&text).is_ok_and(|v: Value| v.is_object()) =>
                {
                    text
                }
                _ => return Step::Bad,
            };
            self.has_arguments = true;
            match self.name {
                Some(_) => out.push(Part::Arguments(text)),
                None => self.early = Some(text),
            }
            if self.bare() {
                return Step::Done;
            }
        } else if serde_json::from_str::<Value>(&value).is_err() {
            return Step::Bad;
        }
        Step::More
    }

    fn close(&mut self, out: &mut Vec<Part>) -> Step {
        if self.nested > 0 && !self.bare() {
            self.nested -= 1;
            self.state = State::Next;
            return Step::More;
        }
        if self.name.is_none() {
            return Step::Bad;
        }
        if !self.has_arguments {
            out.push(Part::Arguments("{}".into()));
        }
        Step::Done
    }
}
