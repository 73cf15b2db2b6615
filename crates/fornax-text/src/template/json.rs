//! JSON as Python's `json.dumps` writes it. It must not know where the values come from.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

/// How to write.
#[derive(Debug)]
pub(super) struct Style {
    pub(super) ensure_ascii: bool,
    pub(super) sort_keys: bool,
    /// One level of indentation; `None` writes everything on one line.
    pub(super) indent: Option<String>,
    /// Between items.
    pub(super) item: String,
    /// Between a key and its value.
    pub(super) key: String,
    /// A character that is never escaped.
    pub(super) keep: Option<char>,
}

/// Nesting that is written; deeper values would exhaust the stack.
const DEPTH_MAX: usize = 128;

/// Items of one list and bytes of the whole that are written: lists can be added to themselves for
/// nothing, and only writing them takes the memory.
const ITEMS_MAX: usize = 1 << 20;
const BYTES_MAX: usize = 64 << 20;

/// # Errors
/// For values that JSON cannot express, undefined ones among them, and for those too large to write.
pub(super) fn dumps(value: &Value, style: &Style) -> Result<String, Error> {
    let mut out = String::new();
    write(value, style, 0, &mut out)?;
    Ok(out)
}

/// The value as a float, if it is one.
pub(super) fn float_of(value: &Value) -> Option<f64> {
    if value.kind() == ValueKind::Number && !value.is_integer() {
        f64::try_from(value.clone()).ok()
    } else {
        None
    }
}

fn write(value: &Value, style: &Style, depth: usize, out: &mut String) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        return Err(Error::new(ErrorKind::BadSerialization, "tojson: nested too deeply"));
    }
    let too_large = || Error::new(ErrorKind::BadSerialization, "tojson: the value is too large");
    if out.len() > BYTES_MAX {
        return Err(too_large());
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => match float_of(value) {
            Some(float) => out.push_str(&json_float(float)),
            None => out.push_str(&value.to_string()),
        },
        ValueKind::String => quote(value.as_str().unwrap_or_default(), style, out),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.take(ITEMS_MAX + 1).collect();
            if items.len() > ITEMS_MAX {
                return Err(too_large());
            }
            list(out, style, depth, ('[', ']'), &items, |item, out| {
                write(item, style, depth + 1, out)
            })?;
        }
        ValueKind::Map => {
            let mut items = Vec::new();
            for key in value.try_iter()? {
                let item = value.get_item(&key)?;
                items.push((key_text(&key)?, item));
            }
            if style.sort_keys {
                items.sort_by(|a, b| a.0.cmp(&b.0));
            }
            list(out, style, depth, ('{', '}'), &items, |(key, item), out| {
                quote(key, style, out);
                out.push_str(&style.key);
                write(item, style, depth + 1, out)
            })?;
        }
        kind => {
            return Err(Error::new(
                ErrorKind::BadSerialization,
                format!("tojson: a value of kind {kind} cannot be written as JSON"),
            ));
        }
    }
    Ok(())
}

fn list<T>(
    out: &mut String,
    style: &Style,
    depth: usize,
    (open, close): (char, char),
    items: &[T],
    mut item: impl FnMut(&T, &mut String) -> Result<(), Error>,
) -> Result<(), Error> {
    let line = |out: &mut String, depth: usize| {
        if let Some(indent) = &style.indent {
            out.push('\n');
            out.push_str(&indent.repeat(depth));
        }
    };
    out.push(open);
    for (i, value) in items.iter().enumerate() {
        if i > 0 {
            out.push_str(&style.item);
        }
        line(out, depth + 1);
        item(value, out)?;
    }
    if !items.is_empty() {
        line(out, depth);
    }
    out.push(close);
    Ok(())
}

fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Bool => Ok(key.is_true().to_string()),
        ValueKind::Number => Ok(float_of(key).map_or_else(|| key.to_string(), json_float)),
        kind => Err(Error::new(
            ErrorKind::BadSerialization,
            format!("tojson: a key of kind {kind} cannot be written as JSON"),
        )),
    }
}

fn quote(text: &str, style: &Style, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if Some(c) == style.keep => out.push(c),
            c if (c as u32) < 0x20 || style.ensure_ascii && (c as u32) > 0x7e => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

fn json_float(value: f64) -> String {
    if value.is_nan() {
        "NaN".to_owned()
    } else if value.is_infinite() {
        if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned()
    } else {
        python_float(value)
    }
}

/// Python's `repr` of a float: the shortest digits that read back, with an exponent below 1e-4 and from
/// 1e16 on.
pub(super) fn python_float(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if value != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = value.to_string();
    if plain.contains('.') { plain } else { format!("{plain}.0") }
}
