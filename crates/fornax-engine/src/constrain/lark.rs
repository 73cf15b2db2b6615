//! Grammars in `llguidance`'s dialect of Lark, and what is needed to write one: quoting, alternatives of texts. It
//! knows no other format but the schemas that a grammar may hold.
//!
//! A grammar has rules (`answer: "yes" | number`), terminals in capitals, `/regular expressions/`, `%json {…}` with a
//! schema, and control tokens by text `<|name|>` or number `<[32001]>`. The dialect is described at
//! <https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md>. Everything in it is enforced but the attribute
//! `temperature`, which is refused; schemas are held to what [`Grammar::JsonSchema`](super::Grammar) is.

use std::fmt::Write;

use serde_json::Value;

use super::{limits, schema};
use crate::{Error, Result};

/// A text as a string literal of the grammar.
pub fn quote(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\u{0}'..='\u{1f}' | '\u{7f}' => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            _ => out.push(c),
        }
    }
    out.push('"');
    out
}

/// A regular expression, without its slashes, for exactly these texts.
pub fn any_of(texts: &[String]) -> String {
    let texts: Vec<String> = texts.iter().map(|text| escape(text)).collect();
    format!("({})", texts.join("|"))
}

/// A regular expression, without its slashes, for exactly this text.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_ascii_alphanumeric() || (!c.is_ascii() && !c.is_control()) {
            out.push(c);
        } else {
            let _ = write!(out, "\\x{{{:x}}}", u32::from(c));
        }
    }
    out
}

/// A regular expression of its own, for use between slashes.
pub fn regex(pattern: &str) -> String {
    llguidance::regex_to_lark(whole(pattern), "")
}

/// A schema as the grammar takes it.
pub fn json(schema: &Value) -> String {
    format!("%json {schema}")
}

/// The pattern without anchors at its ends, which say no more than that all of the text is meant.
pub(super) fn whole(pattern: &str) -> &str {
    let inner = pattern.strip_prefix('^').unwrap_or(pattern);
    let inner = match inner.strip_suffix('$') {
        Some(less) if less.bytes().rev().take_while(|&b| b == b'\\').count() % 2 == 0 => less,
        _ => inner,
    };
    // In `^a|b$` each anchor belongs to one alternative; what that means is for the compiler to refuse.
    if inner.contains('|') { pattern } else { inner }
}

/// Checks a grammar and puts the schemas in it into the form that is enforced.
///
/// # Errors
/// `is_request` for what is nested too deeply or broken, `is_unsupported` for what cannot be enforced.
pub(super) fn prepare(text: &str) -> Result<String> {
    let mut scan = Scan { text, at: 0, out: String::with_capacity(text.len()), depth: 0 };
    while scan.step()? {}
    Ok(scan.out)
}

struct Scan<'a> {
    text: &'a str,
    at: usize,
    out: String,
    depth: usize,
}

impl Scan<'_> {
    /// Copies the next element; false at the end.
    fn step(&mut self) -> Result<bool> {
        let rest = &self.text[self.at..];
        let Some(c) = rest.chars().next() else { return Ok(false) };
        match c {
            '"' => self.copy(closing(rest, '"')),
            '#' => self.copy(rest.find('\n').unwrap_or(rest.len())),
            '/' if rest.starts_with("//") => self.copy(rest.find('\n').unwrap_or(rest.len())),
            '/' => {
                let len = closing(rest, '/');
                limits::regex("a regular expression of the Lark grammar", &rest[..len])?;
                self.copy(len);
            }
            '%' => self.directive(rest)?,
            '(' | '[' | '{' => {
                self.depth += 1;
                if self.depth > limits::NESTING {
                    return Err(Error::request(format!(
                        "the Lark grammar has brackets nested deeper than {}",
                        limits::NESTING
                    )));
                }
                self.copy(1);
            }
            ')' | ']' | '}' => {
                self.depth = self.depth.saturating_sub(1);
                self.copy(1);
            }
            _ if c.is_alphabetic() => self.word(rest)?,
            _ => self.copy(c.len_utf8()),
        }
        Ok(true)
    }

    fn copy(&mut self, len: usize) {
        self.out.push_str(&self.text[self.at..self.at + len]);
        self.at += len;
    }

    fn word(&mut self, rest: &str) -> Result<()> {
        let len = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        let is_attribute = self.out.trim_end().ends_with(['[', ',']);
        if &rest[..len] == "temperature"
            && is_attribute
            && rest[len..].trim_start().starts_with('=')
        {
            return Err(Error::unsupported(
                "the Lark grammar cannot be enforced: the attribute `temperature` of a rule; set the request's own",
            ));
        }
        self.copy(len);
        Ok(())
    }

    /// `%json` and the others that are followed by JSON; the rest is copied as it is.
    fn directive(&mut self, rest: &str) -> Result<()> {
        let names = ["%json", "%regex", "%llguidance"];
        let Some(name) = names.into_iter().find(|name| rest.starts_with(name)) else {
            self.copy(1);
            return Ok(());
        };
        let mut values =
            serde_json::Deserializer::from_str(&rest[name.len()..]).into_iter::<Value>();
        let value = match values.next() {
            Some(Ok(value)) => value,
            Some(Err(e)) => {
                return Err(Error::request(format!(
                    "reading the Lark grammar: the JSON after `{name}`: {e}"
                )));
            }
            None => {
                return Err(Error::request(format!(
                    "reading the Lark grammar: nothing follows `{name}`, expected JSON"
                )));
            }
        };
        let len = name.len() + values.byte_offset();
        if name == "%json" {
            limits::json("a schema of the Lark grammar", &value)?;
            let _ = write!(self.out, "%json {}", schema::prepare(&value)?);
            self.at += len;
        } else {
            self.copy(len);
        }
        Ok(())
    }
}

/// Length of what begins with a quote, up to and with the next one that is not escaped; all that is there without one.
fn closing(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if c == quote => return at + c.len_utf8(),
            _ => {}
        }
    }
    rest.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anchors_at_both_ends_go_and_others_stay() {
        for (pattern, want) in [
            ("^a$", "a"),
            ("a", "a"),
            (r"^a\$", r"a\$"),
            (r"^a\\$", r"a\\"),
            ("^a|b$", "^a|b$"),
            ("", ""),
            ("^", ""),
        ] {
            assert_eq!(whole(pattern), want, "{pattern}");
        }
    }

    #[test]
    fn schemas_are_found_where_they_are_and_nowhere_else() {
        let text = "start: \"%json {\" x // %json [\nx: %json {\"title\": \"t\", \"type\": \"null\"} /%json {/ # %json\n";
        let out = prepare(text).unwrap();
        assert!(!out.contains("title") && out.contains("x-guidance"), "{out}");
        assert!(
            out.starts_with("start: \"%json {\" x // %json [\n")
                && out.ends_with("/%json {/ # %json\n")
        );
        for (text, says) in [
            ("start: %json {\"uniqueItems\": true}", "uniqueItems"),
            ("start: %json {", "JSON after"),
            ("start: %json", "nothing follows"),
            ("start: x\nx[temperature=0.5]: /a/", "temperature"),
            ("start: x\nx[max_tokens=3, temperature = 1]: /a/", "temperature"),
            (&format!("start: {}\"a\"", "(".repeat(10_000)), "nested deeper"),
            (&format!("start: /{}/", "(".repeat(10_000)), "nested deeper"),
        ] {
            let e = prepare(text).unwrap_err().to_string();
            assert!(e.contains(says), "{text:.40}: {e}");
        }
        let innocent = "start: temperature\ntemperature: \"temperature=\" | \"\\\"[\"\n";
        assert_eq!(prepare(innocent).unwrap(), innocent);
    }
}
