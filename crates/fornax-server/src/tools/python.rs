//! Calls written as Python: `[f(x=1, y="a"), g()]`. Literals become JSON; nothing is evaluated. It knows no marks.

use serde_json::{Map, Number, Value};

use super::{Tool, Written};

/// Brackets within brackets.
const DEPTH: usize = 64;

/// The calls of a text that is nothing else: a list in brackets, or calls after another, each perhaps in `print(…)`.
/// Arguments without a name are those of the function's schema in order. None where it is anything else.
pub(super) fn calls(text: &str, tools: &[Tool]) -> Option<Vec<Written>> {
    let mut reader = Reader { rest: text.trim(), tools };
    let list = reader.take('[');
    let mut calls = Vec::new();
    loop {
        reader.space();
        if reader.rest.is_empty() || list && reader.rest == "]" {
            return Some(calls).filter(|calls| !calls.is_empty());
        }
        calls.push(reader.call(true)?);
        reader.space();
        if !reader.take(',') && !reader.take(';') && list && reader.rest != "]" {
            return None;
        }
    }
}

struct Reader<'a> {
    rest: &'a str,
    tools: &'a [Tool],
}

impl<'a> Reader<'a> {
    fn space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn take(&mut self, c: char) -> bool {
        self.space();
        match self.rest.strip_prefix(c) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn name(&mut self) -> Option<&'a str> {
        self.space();
        let is_name = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | '-');
        let end = self.rest.find(|c| !is_name(c)).unwrap_or(self.rest.len());
        let (name, rest) = self.rest.split_at(end);
        self.rest = rest;
        Some(name).filter(|name| name.starts_with(|c: char| c.is_alphabetic() || c == '_'))
    }

    fn call(&mut self, outer: bool) -> Option<Written> {
        let name = self.name()?;
        let tool = self.tools.iter().find(|tool| tool.name == name);
        if name == "print" && tool.is_none() && outer {
            let inner = self.take('(').then(|| self.call(false))?;
            return inner.filter(|_| self.take(')'));
        }
        if !self.take('(') {
            return None;
        }
        let mut arguments = Map::new();
        let mut position = 0;
        while !self.take(')') {
            let before = self.rest;
            let named = self.name().filter(|_| self.take('='));
            let name = match named {
                Some(name) => name.to_owned(),
                None => {
                    self.rest = before;
                    let properties = tool?.parameters.get("properties")?.as_object()?;
                    properties.keys().nth(position)?.clone()
                }
            };
            position += 1;
            let value = self.value(0)?;
            arguments.insert(name, value);
            self.space();
            if !self.take(',') && !self.rest.starts_with(')') {
                return None;
            }
        }
        Some(Written { name: name.to_owned(), arguments: Value::Object(arguments).to_string() })
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        self.space();
        let c = self.rest.chars().next().filter(|_| depth < DEPTH)?;
        match c {
            '"' | '\'' => self.text(c).map(Value::String),
            '[' | '(' => {
                self.rest = &self.rest[1..];
                let end = if c == '[' { ']' } else { ')' };
                let mut items = Vec::new();
                while !self.take(end) {
                    items.push(self.value(depth + 1)?);
                    if !self.take(',') && !self.rest.starts_with(end) {
                        return None;
                    }
                }
                Some(Value::Array(items))
            }
            '{' => {
                self.rest = &self.rest[1..];
                let mut map = Map::new();
                while !self.take('}') {
                    let Value::String(key) = self.value(depth + 1)? else { return None };
                    let value = self.take(':').then(|| self.value(depth + 1))??;
                    map.insert(key, value);
                    if !self.take(',') && !self.rest.starts_with('}') {
                        return None;
                    }
                }
                Some(Value::Object(map))
            }
            _ => self.scalar(),
        }
    }

    fn scalar(&mut self) -> Option<Value> {
        let is_part = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | '-' | '+');
        let end = self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        Some(match word {
            "True" | "true" => Value::Bool(true),
            "False" | "false" => Value::Bool(false),
            "None" | "null" => Value::Null,
            _ => {
                let digits = word.replace('_', "");
                let whole = digits.parse::<i64>().ok().map(Number::from);
                Value::Number(whole.or_else(|| Number::from_f64(digits.parse().ok()?))?)
            }
        })
    }

    /// A text in its quotes, single or three of them.
    fn text(&mut self, quote: char) -> Option<String> {
        let long = [quote; 3].iter().collect::<String>();
        let end = if self.rest.starts_with(&long) { long } else { quote.to_string() };
        self.rest = &self.rest[end.len()..];
        let mut out = String::new();
        loop {
            if let Some(rest) = self.rest.strip_prefix(&*end) {
                self.rest = rest;
                return Some(out);
            }
            let mut chars = self.rest.chars();
            match chars.next()? {
                '\\' => {
                    let c = chars.next()?;
                    self.rest = chars.as_str();
                    self.escape(c, &mut out)?;
                }
                c => {
                    self.rest = chars.as_str();
                    out.push(c);
                }
            }
        }
    }

    fn escape(&mut self, c: char, out: &mut String) -> Option<()> {
        let digits = match c {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => {
                match c {
                    'n' => out.push('\n'),
                    't' => out.push('\t'),
                    'r' => out.push('\r'),
                    'b' => out.push('\u{8}'),
                    'f' => out.push('\u{c}'),
                    '\n' => {}
                    '\\' | '\'' | '"' | '/' => out.push(c),
                    _ => out.extend(['\\', c]),
                }
                return Some(());
            }
        };
        let hex = |text: &str| u32::from_str_radix(text.get(..digits)?, 16).ok();
        let mut code = hex(self.rest)?;
        self.rest = &self.rest[digits..];
        if (0xd800..0xdc00).contains(&code) {
            // JSON writes what is past U+FFFF as two.
            let low = hex(self.rest.strip_prefix("\\u")?)?;
            code = 0x10000
                + ((code - 0xd800) << 10)
                + low.checked_sub(0xdc00).filter(|l| *l < 0x400)?;
            self.rest = &self.rest[6..];
        }
        out.push(char::from_u32(code)?);
        Some(())
    }
}
