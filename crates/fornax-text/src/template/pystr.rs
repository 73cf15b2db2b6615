//! Methods of Python's strings, lists and mappings that templates call. It must not know templates.

use minijinja::value::{ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

/// Called for methods that minijinja does not know.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let own = match value.kind() {
        ValueKind::String => string_method(value.as_str().unwrap_or_default(), name, args)?,
        ValueKind::Seq => list_method(value, name, args)?,
        ValueKind::Map if name == "copy" => Some(value.clone()),
        _ => None,
    };
    match own {
        Some(result) => Ok(result),
        None => pycompat::unknown_method_callback(state, value, name, args),
    }
}

fn list_method(list: &Value, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    match name {
        "index" => {
            let (wanted,): (&Value,) = from_args(args)?;
            match list.try_iter()?.position(|item| item == *wanted) {
                Some(i) => Ok(Some(i.into())),
                None => Err(Error::new(ErrorKind::InvalidOperation, "value is not in list")),
            }
        }
        "copy" => Ok(Some(list.clone())),
        _ => Ok(None),
    }
}

fn string_method(text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let not_found = || Error::new(ErrorKind::InvalidOperation, "substring not found");
    let chars_before = |at: usize| Value::from(text[..at].chars().count());
    Ok(Some(match name {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            text.strip_prefix(prefix).unwrap_or(text).into()
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            text.strip_suffix(suffix).unwrap_or(text).into()
        }
        "partition" => {
            let (separator,): (&str,) = from_args(args)?;
            match text.split_once(separator) {
                Some((before, after)) => texts(&[before, separator, after]),
                None => texts(&[text, "", ""]),
            }
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            match text.rsplit_once(separator) {
                Some((before, after)) => texts(&[before, separator, after]),
                None => texts(&["", "", text]),
            }
        }
        "rsplit" => {
            let (separator, limit): (Option<&str>, Option<i64>) = from_args(args)?;
            rsplit(text, separator, limit)?
        }
        "index" => {
            let (part,): (&str,) = from_args(args)?;
            text.find(part).map(chars_before).ok_or_else(not_found)?
        }
        "rindex" => {
            let (part,): (&str,) = from_args(args)?;
            text.rfind(part).map(chars_before).ok_or_else(not_found)?
        }
        "title" => {
            let () = from_args(args)?;
            title(text).into()
        }
        "isdecimal" => (!text.is_empty() && text.chars().all(|c| c.is_ascii_digit())).into(),
        "swapcase" => text
            .chars()
            .flat_map(|c| -> Vec<char> {
                if c.is_uppercase() {
                    c.to_lowercase().collect()
                } else {
                    c.to_uppercase().collect()
                }
            })
            .collect::<String>()
            .into(),
        "zfill" => {
            let (width,): (usize,) = from_args(args)?;
            let (sign, digits) = match text.strip_prefix(['-', '+']) {
                Some(digits) => (&text[..1], digits),
                None => ("", text),
            };
            format!("{sign}{}{digits}", padding(text, width, '0')?).into()
        }
        "ljust" => {
            let (width, fill): (usize, Option<char>) = from_args(args)?;
            format!("{text}{}", padding(text, width, fill.unwrap_or(' '))?).into()
        }
        "rjust" => {
            let (width, fill): (usize, Option<char>) = from_args(args)?;
            format!("{}{text}", padding(text, width, fill.unwrap_or(' '))?).into()
        }
        _ => return Ok(None),
    }))
}

/// Letters after anything without case in upper case, all others in lower case.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut inside = false;
    for c in text.chars() {
        if inside {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        inside = c.is_lowercase() || c.is_uppercase();
    }
    out
}

fn texts(parts: &[&str]) -> Value {
    parts.iter().map(|&part| Value::from(part)).collect()
}

fn padding(text: &str, width: usize, fill: char) -> Result<String, Error> {
    if width > 1 << 16 {
        return Err(Error::new(ErrorKind::InvalidOperation, "width is over 65536"));
    }
    let missing = width.saturating_sub(text.chars().count());
    Ok(std::iter::repeat_n(fill, missing).collect())
}

fn rsplit(text: &str, separator: Option<&str>, limit: Option<i64>) -> Result<Value, Error> {
    let limit = limit.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
    let mut parts: Vec<&str> = Vec::new();
    match separator {
        Some("") => return Err(Error::new(ErrorKind::InvalidOperation, "empty separator")),
        Some(separator) => parts.extend(text.rsplitn(limit.saturating_add(1), separator)),
        None => {
            let mut rest = text.trim_end();
            while !rest.is_empty() && parts.len() < limit {
                let cut = rest
                    .rfind(char::is_whitespace)
                    .map_or(0, |i| i + rest[i..].chars().next().map_or(1, char::len_utf8));
                parts.push(&rest[cut..]);
                rest = rest[..cut].trim_end();
            }
            if !rest.is_empty() {
                parts.push(rest);
            }
        }
    }
    parts.reverse();
    Ok(texts(&parts))
}
