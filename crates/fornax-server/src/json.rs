//! JSON as requests bring it: strict where a lenient reader would lose something. Knows no field.

use std::fmt;

use serde_json::{Map, Value};

/// Reads one JSON text.
///
/// Stricter than `serde_json` in one point: a name that is twice in an object is an error, because one of
/// the two values would be dropped. Depth is bounded (128), so no text overflows the stack.
///
/// # Errors
/// What is wrong and where, as a sentence.
pub(crate) fn read(bytes: &[u8]) -> Result<Value, String> {
    if bytes.starts_with(b"\xef\xbb\xbf") {
        return Err("the body begins with a byte order mark; expected JSON in plain UTF-8".into());
    }
    if let Err(e) = std::str::from_utf8(bytes) {
        return Err(format!("the body is not UTF-8: a wrong byte at {}", e.valid_up_to()));
    }
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Err("the body is empty; expected a JSON object".into());
    }
    let mut source = serde_json::Deserializer::from_slice(bytes);
    let value = serde::de::DeserializeSeed::deserialize(Once, &mut source)
        .and_then(|value| source.end().map(|()| value))
        .map_err(|e| format!("the body is not JSON: {e}"))?;
    Ok(value)
}

/// A value in which no object has a name twice.
struct Once;

impl<'de> serde::de::DeserializeSeed<'de> for Once {
    type Value = Value;

    fn deserialize<D: serde::Deserializer<'de>>(self, source: D) -> Result<Value, D::Error> {
        source.deserialize_any(self)
    }
}

impl<'de> serde::de::Visitor<'de> for Once {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_f64<E>(self, v: f64) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_string<E>(self, v: String) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut all = Vec::new();
        while let Some(item) = items.next_element_seed(Once)? {
            all.push(item);
        }
        Ok(Value::Array(all))
    }

    fn visit_map<A: serde::de::MapAccess<'de>>(self, mut pairs: A) -> Result<Value, A::Error> {
        let mut all = Map::new();
        while let Some(name) = pairs.next_key::<String>()? {
            let value = pairs.next_value_seed(Once)?;
            if all.contains_key(&name) {
                return Err(serde::de::Error::custom(format!("{name:?} is there twice")));
            }
            all.insert(name, value);
        }
        Ok(Value::Object(all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_lose_something_is_refused() {
        for (text, word) in [
            (&b""[..], "empty"),
            (b"  \n", "empty"),
            (b"{", "not JSON"),
            (b"{:", "not JSON"),
            (b"{\"a\":1,\"a\":2}", "twice"),
            (b"[{\"b\":{\"a\":1,\"a\":1}}]", "twice"),
            (b"{\"a\":NaN}", "not JSON"),
            (b"{\"a\":1e999}", "not JSON"),
            (b"{\"a\":\"\\ud800\"}", "not JSON"),
            (b"{\"a\":\"\xe6\xad\"}", "not UTF-8"),
            (b"\xef\xbb\xbf{}", "byte order mark"),
            (b"{} {}", "not JSON"),
        ] {
            let said = read(text).unwrap_err();
            assert!(said.contains(word), "{text:?}: {said}");
        }
    }

    #[test]
    fn depth_is_an_error_and_no_overflow() {
        for open in ["[", "{\"a\":"] {
            let said = read(open.repeat(200_000).as_bytes()).unwrap_err();
            assert!(said.contains("recursion limit"), "{said}");
        }
    }

    #[test]
    fn what_is_sound_comes_through_in_order() {
        let text = r#"{"b":[1,-2,1.5,true,null,"\u0000é"],"a":{"z":{},"y":18446744073709551615}}"#;
        let value = read(text.as_bytes()).unwrap();
        assert_eq!(value, serde_json::from_str::<Value>(text).unwrap());
        assert_eq!(value.to_string(), text);
    }
}
