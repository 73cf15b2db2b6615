//! Values and numbers inside schemas: constants, bounds, multiples. Refuses what would lose digits on the way, for a
//! compiler that counts in f64 and i64. It knows no tokens.

use serde_json::{Map, Number, Value};

use super::schema::Place;
use crate::Result;

/// Greatest whole number below which every whole number is an f64.
const EXACT: f64 = 9_007_199_254_740_992.0;
/// Bounds of whole numbers go no further out: all have the same number of digits or fewer, and fit i64.
const FARTHEST: f64 = 9e17;

/// Number of values in a value, itself among them.
pub(super) fn values(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(values).sum::<usize>(),
        Value::Object(map) => map.values().map(values).sum(),
        _ => 0,
    }
}

/// The values of an `enum`.
///
/// # Errors
/// As [`check`], and where it is no list.
pub(super) fn list(value: &Value, at: &Place<'_>) -> Result<Value> {
    let Some(items) = value.as_array().filter(|items| !items.is_empty()) else {
        return Err(at.wrong("expected a list that is not empty"));
    };
    for item in items {
        check(item, at)?;
    }
    Ok(value.clone())
}

/// Refuses values that an answer could not be made to equal.
///
/// # Errors
/// `is_unsupported` for numbers from 2⁵³ on and characters that JSON must escape by number.
pub(super) fn check(value: &Value, at: &Place<'_>) -> Result<()> {
    match value {
        Value::Number(n) => {
            if n.as_f64().is_none_or(|v| v.abs() >= EXACT) {
                return Err(at.refused(&format!("the number {n}, which is not below 2^53")));
            }
        }
        Value::String(text) => writable(text, at)?,
        Value::Array(items) => items.iter().try_for_each(|item| check(item, at))?,
        Value::Object(map) => map.values().try_for_each(|item| check(item, at))?,
        Value::Null | Value::Bool(_) => {}
    }
    Ok(())
}

fn writable(text: &str, at: &Place<'_>) -> Result<()> {
    let odd =
        |c: &char| (c.is_ascii_control() && !"\n\r\t\u{8}\u{c}".contains(*c)) || *c == '\u{7f}';
    match text.chars().find(odd) {
        Some(c) => {
            Err(at.refused(&format!("the character U+{:04X} in a constant text", u32::from(c))))
        }
        None => Ok(()),
    }
}

/// The names in `required`.
///
/// # Errors
/// `is_request` where it is no list of texts.
pub(super) fn names(value: &Value, at: &Place<'_>) -> Result<Value> {
    match value.as_array() {
        Some(names) if names.iter().all(Value::is_string) => Ok(value.clone()),
        _ => Err(at.wrong("expected a list of names")),
    }
}

/// A bound of numbers. Whole numbers that are no f64 become the nearest one inside the bound.
///
/// # Errors
/// `is_request` where it is no number (or, for draft 4, no boolean).
pub(super) fn bound(
    map: &Map<String, Value>,
    key: &str,
    value: &Value,
    at: &Place<'_>,
) -> Result<Value> {
    if key.starts_with("exclusive") && value.is_boolean() {
        return Ok(value.clone());
    }
    let Some(number) = value.as_f64().filter(|v| v.is_finite()) else {
        return Err(at.wrong("expected a number"));
    };
    let upper = key.ends_with("aximum");
    let mut inside = number;
    if number.abs() >= EXACT && number.fract() == 0.0 {
        inside = if upper { number.next_down() } else { number.next_up() };
    }
    let whole = map.get("type").and_then(Value::as_str) == Some("integer");
    if whole {
        let outward = if upper { inside } else { -inside };
        if outward < -FARTHEST {
            return Err(at.refused(&format!("a bound of whole numbers beyond {FARTHEST:e}")));
        }
        inside = inside.clamp(-FARTHEST, FARTHEST);
        if inside != number {
            return Ok(Value::Number(Number::from(inside as i64)));
        }
    }
    if inside == number { Ok(value.clone()) } else { Ok(Value::from(inside)) }
}

/// A divisor.
///
/// # Errors
/// `is_unsupported` where it has more than nine digits, or more than four after the point.
pub(super) fn multiple(value: &Value, at: &Place<'_>) -> Result<f64> {
    let Some(number) = value.as_f64().filter(|v| *v > 0.0 && v.is_finite()) else {
        return Err(at.wrong("expected a number above 0"));
    };
    let scaled = number * 1e4;
    if scaled > 1e9 || (scaled - scaled.round()).abs() > 1e-6 {
        return Err(
            at.refused("a multiple of more than 9 digits, or of more than 4 after the point")
        );
    }
    Ok(number)
}
