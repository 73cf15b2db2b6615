//! How much a grammar may cost: its size and nesting before it is read, the work of its compilation and of each mask.
//! It knows no grammar.

use llguidance::api::ParserLimits;
use serde_json::Value;

use crate::{Error, Result};

/// Bytes of a grammar in a text format, and of all strings of a schema together.
pub(super) const BYTES: usize = 1 << 20;
/// Bytes of one regular expression.
pub(super) const REGEX_BYTES: usize = 1 << 16;
/// Brackets within brackets, in a regular expression or a grammar.
pub(super) const NESTING: usize = 200;
/// Values within values of a schema.
pub(super) const SCHEMA_DEPTH: usize = 128;
/// Values in a schema, and characters of a string or items of an array that it may count to.
pub(super) const SCHEMA_VALUES: usize = 100_000;
/// Values that are read from a schema, with what is referred to read again where it lies in something else.
pub(super) const SCHEMA_READ: usize = 2 * SCHEMA_VALUES;
/// Texts of a choice.
pub(super) const CHOICES: usize = 10_000;
/// Stack of the thread that compiles; the depths above need a small part of it.
pub(super) const STACK: usize = 64 << 20;

/// What `llguidance` may spend. A unit of lexer fuel is about 20 ns at compilation and 70 ns in a mask, a lexer state
/// one or two kilobytes.
pub(super) fn parser() -> ParserLimits {
    ParserLimits {
        max_lexer_states: 50_000,
        max_grammar_size: 200_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// # Errors
/// `is_request` where a text is longer than `most` bytes.
pub(super) fn length(what: &str, text: &str, most: usize) -> Result<()> {
    if text.len() > most {
        return Err(Error::request(format!(
            "{what} has {} bytes, expected at most {most}",
            text.len()
        )));
    }
    Ok(())
}

/// Bounds depth, number of values and text of a JSON value, without recursion.
///
/// # Errors
/// `is_request` where one is too great.
pub(super) fn json(what: &str, value: &Value) -> Result<()> {
    let (mut values, mut bytes) = (0, 0);
    let mut open = vec![(value, 1)];
    while let Some((value, depth)) = open.pop() {
        values += 1;
        if depth > SCHEMA_DEPTH || values > SCHEMA_VALUES || bytes > BYTES {
            return Err(Error::request(format!(
                "{what} is too large: expected at most {SCHEMA_DEPTH} levels, {SCHEMA_VALUES} values and {BYTES} \
                 bytes of text"
            )));
        }
        match value {
            Value::String(text) => bytes += text.len(),
            Value::Array(items) => open.extend(items.iter().map(|item| (item, depth + 1))),
            Value::Object(map) => {
                bytes += map.keys().map(String::len).sum::<usize>();
                open.extend(map.values().map(|item| (item, depth + 1)));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Bounds the brackets within brackets of a regular expression.
///
/// # Errors
/// `is_request` where they are too deep.
pub(super) fn regex(what: &str, pattern: &str) -> Result<()> {
    length(what, pattern, REGEX_BYTES)?;
    let (mut depth, mut class, mut escaped) = (0usize, false, false);
    for b in pattern.bytes() {
        match (b, class) {
            _ if escaped => escaped = false,
            (b'\\', _) => escaped = true,
            (b'[', false) => class = true,
            (b']', true) => class = false,
            (b'(', false) => depth += 1,
            (b')', false) => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > NESTING {
            return Err(Error::request(format!("{what} has groups nested deeper than {NESTING}")));
        }
    }
    Ok(())
}
