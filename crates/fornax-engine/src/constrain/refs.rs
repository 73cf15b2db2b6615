//! `$ref` in schemas: what it names inside the same document. It fetches nothing, and knows no other keyword.

use std::cell::OnceCell;
use std::collections::HashMap;

use serde_json::Value;

use crate::{Error, Result};

/// A document whose own parts are referred to.
pub(super) struct Refs<'a> {
    root: &'a Value,
    id: Option<&'a str>,
    anchors: OnceCell<HashMap<&'a str, &'a Value>>,
}

impl<'a> Refs<'a> {
    pub(super) fn new(root: &'a Value) -> Refs<'a> {
        let id = root.get("$id").or_else(|| root.get("id")).and_then(Value::as_str);
        let id = id.map(|id| id.trim_end_matches('#')).filter(|id| !id.is_empty());
        Refs { root, id, anchors: OnceCell::new() }
    }

    /// The schema that a reference names; `at` is where it stands.
    ///
    /// Understands `#`, JSON pointers with their escapes (`#/$defs/a~1b`), `#name` of an `$anchor`, and each of them
    /// after the document's own `$id`.
    ///
    /// # Errors
    /// `is_unsupported` for a reference to another document, `is_request` for one that leads nowhere.
    pub(super) fn resolve(&self, reference: &str, at: &str) -> Result<&'a Value> {
        let local = self.id.and_then(|id| reference.strip_prefix(id)).unwrap_or(reference);
        let fragment = match local.strip_prefix('#') {
            Some(fragment) => fragment,
            None if local.is_empty() && !reference.is_empty() => "",
            None => {
                return Err(Error::unsupported(format!(
                    "the JSON schema cannot be enforced: `$ref` at {at} names another document, {reference:?}; put \
                     it under `$defs`"
                )));
            }
        };
        let fragment = percent_decoded(fragment);
        let found = if fragment.is_empty() || fragment.starts_with('/') {
            // "#/" is written for the root as often as it is meant to be the empty key.
            self.root.pointer(&fragment).or((fragment == "/").then_some(self.root))
        } else {
            self.anchors.get_or_init(|| anchors(self.root)).get(&*fragment).copied()
        };
        found.ok_or_else(|| {
            Error::request(format!(
                "reading the JSON schema: `$ref` at {at} leads nowhere, {reference:?} is not in the schema"
            ))
        })
    }
}

fn percent_decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let hex = bytes.get(at + 1..at + 3).and_then(|h| std::str::from_utf8(h).ok());
        let byte = hex.filter(|_| bytes[at] == b'%').and_then(|h| u8::from_str_radix(h, 16).ok());
        out.push(byte.unwrap_or(bytes[at]));
        at += if byte.is_some() { 3 } else { 1 };
    }
    String::from_utf8(out).unwrap_or_else(|_| text.to_owned())
}

/// The schemas that carry a name; the first of equal ones. `$anchor` is its own keyword since 2019, before that `$id`
/// held it.
fn anchors(root: &Value) -> HashMap<&str, &Value> {
    let mut anchors = HashMap::new();
    let mut open = vec![root];
    while let Some(value) = open.pop() {
        match value {
            Value::Object(map) => {
                let text = |key: &str| map.get(key).and_then(Value::as_str);
                let old = text("$id").or(text("id")).and_then(|id| id.strip_prefix('#'));
                for name in [text("$anchor"), old].into_iter().flatten() {
                    anchors.entry(name).or_insert(value);
                }
                open.extend(map.values().rev());
            }
            Value::Array(items) => open.extend(items.iter().rev()),
            _ => {}
        }
    }
    anchors
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn references_of_every_form_are_followed() {
        let root = json!({
            "$id": "https://example.org/s.json",
            "$defs": {"a/b~c d": {"title": "odd"}, "n": {"$anchor": "name", "title": "named"}},
            "items": [{"title": "first"}],
        });
        for (reference, title) in [
            ("#/$defs/a~1b~0c%20d", "odd"),
            ("#/items/0", "first"),
            ("#name", "named"),
            ("https://example.org/s.json#name", "named"),
            ("https://example.org/s.json#/items/0", "first"),
        ] {
            let found = Refs::new(&root).resolve(reference, "/").unwrap();
            assert_eq!(found["title"], title, "{reference}");
        }
        for reference in ["#", "#/", "https://example.org/s.json"] {
            assert_eq!(Refs::new(&root).resolve(reference, "/").unwrap(), &root, "{reference}");
        }
    }

    #[test]
    fn what_is_elsewhere_or_nowhere_is_refused() {
        let root = json!({"$defs": {}});
        assert!(Refs::new(&root).resolve("other.json#/a", "/x").unwrap_err().is_unsupported());
        assert!(Refs::new(&root).resolve("", "/x").unwrap_err().is_unsupported());
        for reference in ["#/$defs/a", "#a", "#/$defs/%zz", "#/items/0"] {
            assert!(
                Refs::new(&root).resolve(reference, "/x").unwrap_err().is_request(),
                "{reference}"
            );
        }
    }
}
