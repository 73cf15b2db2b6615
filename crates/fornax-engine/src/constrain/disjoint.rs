//! Whether two schemas can accept the same value, decided cautiously: "disjoint" is certain, anything else is not. It
//! is what lets `oneOf` be read as `anyOf`. It compiles nothing.

use serde_json::{Map, Value};

use super::refs::Refs;

/// How far references, branches and properties are followed.
const DEPTH: u32 = 12;

/// Compares schemas of one document.
pub(super) struct Disjoint<'r, 'a> {
    refs: &'r Refs<'a>,
    left: u32,
}

impl<'r, 'a> Disjoint<'r, 'a> {
    /// With so many comparisons to spend; past them nothing is disjoint.
    pub(super) fn new(refs: &'r Refs<'a>, left: u32) -> Disjoint<'r, 'a> {
        Disjoint { refs, left }
    }

    /// Comparisons that were not spent.
    pub(super) fn left(&self) -> u32 {
        self.left
    }

    /// Whether no value is accepted by two of the alternatives.
    pub(super) fn all(&mut self, alternatives: &'a [Value]) -> bool {
        alternatives
            .iter()
            .enumerate()
            .all(|(i, a)| alternatives[i + 1..].iter().all(|b| self.pair(a, b, DEPTH)))
    }

    fn pair(&mut self, a: &'a Value, b: &'a Value, depth: u32) -> bool {
        if self.left == 0 || depth == 0 {
            return false;
        }
        self.left -= 1;
        let (Some(a), Some(b)) = (a.as_object(), b.as_object()) else {
            return a == &Value::Bool(false) || b == &Value::Bool(false);
        };
        types(a) & types(b) == 0
            || self.values(a, b)
            || self.properties(a, b, depth)
            || self.branches(a, b, depth)
            || self.branches(b, a, depth)
    }

    /// By `const` and `enum`, where both list what they accept.
    fn values(&mut self, a: &'a Map<String, Value>, b: &'a Map<String, Value>) -> bool {
        let (Some(a), Some(b)) = (listed(a), listed(b)) else { return false };
        a.iter().all(|a| {
            self.left = self.left.saturating_sub(b.len() as u32);
            self.left > 0 && b.iter().all(|b| differ(a, b))
        })
    }

    /// By a property that objects must have and cannot have alike.
    fn properties(
        &mut self,
        a: &'a Map<String, Value>,
        b: &'a Map<String, Value>,
        depth: u32,
    ) -> bool {
        if types(a) & types(b) != OBJECT {
            return false;
        }
        let (of_a, of_b) = (required(a), required(b));
        let cost = of_a.len().saturating_mul(of_b.len()).max(of_a.len() + of_b.len());
        self.left = self.left.saturating_sub(u32::try_from(cost).unwrap_or(u32::MAX));
        if self.left == 0 {
            return false;
        }
        let closed = |map: &Map<String, Value>, name: &str| {
            map.get("additionalProperties") == Some(&Value::Bool(false))
                && !map.contains_key("patternProperties")
                && property(map, name).is_none()
        };
        if of_a.iter().any(|name| closed(b, name)) || of_b.iter().any(|name| closed(a, name)) {
            return true;
        }
        of_a.iter().filter(|name| of_b.contains(name)).any(|name| {
            match (property(a, name), property(b, name)) {
                (Some(a), Some(b)) => self.pair(a, b, depth - 1),
                _ => false,
            }
        })
    }

    /// By what `a` refers to, must meet as well, or has as its alternatives.
    fn branches(
        &mut self,
        a: &'a Map<String, Value>,
        b: &'a Map<String, Value>,
        depth: u32,
    ) -> bool {
        let b_value = |this: &mut Self, part: &'a Value| this.against(part, b, depth - 1);
        if let Some(reference) = a.get("$ref").and_then(Value::as_str)
            && let Ok(target) = self.refs.resolve(reference, "")
            && b_value(self, target)
        {
            return true;
        }
        let list = |key: &str| a.get(key).and_then(Value::as_array).filter(|l| !l.is_empty());
        list("allOf").is_some_and(|parts| parts.iter().any(|part| b_value(self, part)))
            || ["anyOf", "oneOf"].into_iter().any(|key| {
                list(key).is_some_and(|parts| parts.iter().all(|part| b_value(self, part)))
            })
    }

    fn against(&mut self, a: &'a Value, b: &'a Map<String, Value>, depth: u32) -> bool {
        if self.left == 0 || depth == 0 {
            return false;
        }
        self.left -= 1;
        let Some(a) = a.as_object() else { return a == &Value::Bool(false) };
        types(a) & types(b) == 0
            || self.values(a, b)
            || self.properties(a, b, depth)
            || self.branches(a, b, depth)
            || self.branches(b, a, depth)
    }
}

const OBJECT: u8 = 1;
const ARRAY: u8 = 2;
const STRING: u8 = 4;
const NUMBER: u8 = 8;
const BOOLEAN: u8 = 16;
const NULL: u8 = 32;
const ANY: u8 = 63;

/// The types of value that a schema can accept, as far as it says so itself.
fn types(map: &Map<String, Value>) -> u8 {
    let named = |name: &Value| match name.as_str() {
        Some("object") => OBJECT,
        Some("array") => ARRAY,
        Some("string") => STRING,
        Some("number" | "integer") => NUMBER,
        Some("boolean") => BOOLEAN,
        Some("null") => NULL,
        _ => ANY,
    };
    let said = match map.get("type") {
        Some(Value::Array(names)) => names.iter().fold(0, |all, name| all | named(name)),
        Some(name) => named(name),
        None => ANY,
    };
    let of_values = listed(map).map_or(ANY, |values| values.iter().fold(0, |all, v| all | of(v)));
    said & of_values
}

fn of(value: &Value) -> u8 {
    match value {
        Value::Object(_) => OBJECT,
        Value::Array(_) => ARRAY,
        Value::String(_) => STRING,
        Value::Number(_) => NUMBER,
        Value::Bool(_) => BOOLEAN,
        Value::Null => NULL,
    }
}

/// All values that a schema can accept, where it lists them.
fn listed(map: &Map<String, Value>) -> Option<&[Value]> {
    match (map.get("const"), map.get("enum")) {
        (Some(value), _) => Some(std::slice::from_ref(value)),
        (None, Some(Value::Array(values))) => Some(values),
        _ => None,
    }
}

/// Certainly not the same value; 1 and 1.0 are.
fn differ(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() != b.as_f64(),
        (Value::Array(_), Value::Array(_)) | (Value::Object(_), Value::Object(_)) => false,
        _ => a != b,
    }
}

fn required(map: &Map<String, Value>) -> Vec<&str> {
    let names = map.get("required").and_then(Value::as_array);
    names.into_iter().flatten().filter_map(Value::as_str).collect()
}

fn property<'a>(map: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    map.get("properties")?.as_object()?.get(name)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_what_is_certain_is_disjoint() {
        let root = json!({"$defs": {
            "cat": {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
            "dog": {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]},
            "loop": {"oneOf": [{"$ref": "#/$defs/loop"}, {"type": "null"}]},
        }});
        let (cat, dog) = (json!({"$ref": "#/$defs/cat"}), json!({"$ref": "#/$defs/dog"}));
        for (a, b, want) in [
            (json!({"type": "null"}), json!({"type": ["string", "integer"]}), true),
            (json!({"type": "integer"}), json!({"type": "number"}), false),
            (json!({"const": 1}), json!({"const": 1.0}), false),
            (json!({"const": "a"}), json!({"enum": ["b", "c"]}), true),
            (json!({"const": "a"}), json!({"type": "string"}), false),
            (json!({"const": [1]}), json!({"const": [2]}), false),
            (json!({}), json!({"type": "null"}), false),
            (json!(false), json!(true), true),
            (cat.clone(), dog.clone(), true),
            (cat.clone(), cat.clone(), false),
            (
                json!({"allOf": [cat.clone()]}),
                json!({"anyOf": [dog.clone(), {"type": "null"}]}),
                true,
            ),
            (json!({"anyOf": [dog, cat.clone()]}), cat, false),
            (
                json!({"type": "object", "required": ["a"]}),
                json!({"type": "object", "additionalProperties": false, "properties": {"b": {}}}),
                true,
            ),
            (json!({"$ref": "#/$defs/loop"}), json!({"type": "null"}), false),
            (json!({"$ref": "#/$defs/loop"}), json!({"type": "string"}), false),
        ] {
            let both = [a, b];
            let refs = Refs::new(&root);
            assert_eq!(Disjoint::new(&refs, 10_000).all(&both), want, "{both:?}");
        }
    }
}
