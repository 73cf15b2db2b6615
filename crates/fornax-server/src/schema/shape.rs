//! What a request may look like, as a tree made from the published description, and the check of a value
//! against it. What is checked is what is published, because both are one text. Knows no endpoint.

use std::sync::Arc;

use serde_json::{Map, Value};

use crate::refusal::Refusal;

/// The shape of a JSON value.
#[derive(Debug)]
pub(crate) enum Shape {
    Any,
    Null,
    Bool {
        only: Option<bool>,
    },
    Integer {
        min: i128,
        max: i128,
    },
    Number {
        min: f64,
        /// The minimum itself is not allowed.
        above: bool,
        max: f64,
    },
    Text {
        min: usize,
        max: usize,
        only: Vec<String>,
        form: Option<Form>,
    },
    List {
        min: usize,
        max: usize,
        items: Arc<Shape>,
    },
    Object(Object),
    AnyOf {
        branches: Vec<Arc<Shape>>,
        /// The field whose value tells the branches apart.
        by: Option<String>,
    },
}

/// The shape of an object.
#[derive(Debug)]
pub(crate) struct Object {
    pub(crate) fields: Vec<Field>,
    /// What other fields hold; none where there may be no others.
    rest: Option<Arc<Shape>>,
    most: usize,
    keys: Option<Form>,
    /// Fields that clients know and that are not supported, with what to do instead.
    refused: Vec<(String, String)>,
}

/// A field of an object.
#[derive(Debug)]
pub(crate) struct Field {
    pub(crate) name: String,
    pub(crate) required: bool,
    /// Accepted and without effect.
    pub(crate) ignored: bool,
    shape: Arc<Shape>,
}

/// The patterns that the description uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// A function's name.
    Name,
    /// Digits, at most nine.
    Digits,
}

impl Form {
    fn parse(pattern: &str) -> Result<Form, String> {
        match pattern {
            "^[a-zA-Z0-9_.-]+$" => Ok(Form::Name),
            "^[0-9]{1,9}$" => Ok(Form::Digits),
            _ => Err(format!("the pattern {pattern} is not known")),
        }
    }

    fn fits(self, text: &str) -> bool {
        match self {
            Form::Name => {
                let allowed = |b: u8| b.is_ascii_alphanumeric() || b"_.-".contains(&b);
                !text.is_empty() && text.bytes().all(allowed)
            }
            Form::Digits => {
                (1..=9).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit())
            }
        }
    }

    fn words(self) -> &'static str {
        match self {
            Form::Name => "letters, digits, `_`, `.` and `-`",
            Form::Digits => "a token id, in digits",
        }
    }
}

impl Shape {
    /// Reads a JSON Schema of the subset that the description uses.
    ///
    /// # Errors
    /// What the description says that this does not know: a mistake in the description.
    pub(crate) fn read(schema: &Value, all: &Map<String, Value>) -> Result<Shape, String> {
        if let Some(name) = schema["$ref"].as_str() {
            let name = name.trim_start_matches("#/components/schemas/");
            let named = all.get(name).ok_or_else(|| format!("there is no {name}"))?;
            return Shape::read(named, all);
        }
        if let Some(branches) = schema["anyOf"].as_array() {
            let branches: Result<Vec<_>, String> =
                branches.iter().map(|b| Ok(Arc::new(Shape::read(b, all)?))).collect();
            let by = schema["x-by"].as_str().map(str::to_owned);
            return Ok(Shape::AnyOf { branches: branches?, by });
        }
        let size = |name: &str, absent: usize| schema[name].as_u64().map_or(absent, |n| n as usize);
        Ok(match schema["type"].as_str() {
            None => Shape::Any,
            Some("null") => Shape::Null,
            Some("boolean") => Shape::Bool { only: schema["enum"][0].as_bool() },
            Some("integer") => {
                let bound = |name: &str| {
                    let v = &schema[name];
                    let whole = v.as_i64().map(i128::from).or_else(|| v.as_u64().map(i128::from));
                    whole.ok_or_else(|| format!("an integer without {name}"))
                };
                Shape::Integer { min: bound("minimum")?, max: bound("maximum")? }
            }
            Some("number") => {
                let above = schema["exclusiveMinimum"].as_f64();
                let min = above.or(schema["minimum"].as_f64()).ok_or("a number without minimum")?;
                let max = schema["maximum"].as_f64().ok_or("a number without maximum")?;
                Shape::Number { min, above: above.is_some(), max }
            }
            Some("string") => Shape::Text {
                min: size("minLength", 0),
                max: size("maxLength", usize::MAX),
                only: strings(&schema["enum"]),
                form: schema["pattern"].as_str().map(Form::parse).transpose()?,
            },
            Some("array") => Shape::List {
                min: size("minItems", 0),
                max: size("maxItems", usize::MAX),
                items: Arc::new(Shape::read(&schema["items"], all)?),
            },
            Some("object") => Shape::Object(Object::read(schema, all)?),
            Some(other) => return Err(format!("the type {other} is not known")),
        })
    }

    /// Checks a value; `path` is where it is.
    ///
    /// # Errors
    /// 400, naming the place, what was found and what was expected.
    pub(crate) fn check(&self, value: &Value, path: &str) -> Result<(), Refusal> {
        let fits = match self {
            Shape::Any => true,
            Shape::Null => value.is_null(),
            Shape::Bool { only } => value.as_bool().is_some_and(|v| only.is_none_or(|o| o == v)),
            Shape::Integer { min, max } => {
                integer(value).is_some_and(|v| (*min..=*max).contains(&v))
            }
            Shape::Number { min, above, max } => value
                .as_f64()
                .is_some_and(|v| v <= *max && if *above { v > *min } else { v >= *min }),
            Shape::Text { min, max, only, form } => value.as_str().is_some_and(|v| {
                // Bytes bound characters from above, and are counted already.
                let long = v.len() > *max && v.chars().count() > *max;
                let short = *min > 0 && v.chars().count() < *min;
                let listed = only.is_empty() || only.iter().any(|o| o == v);
                !long && !short && listed && form.is_none_or(|f| f.fits(v))
            }),
            Shape::List { min, max, items } => {
                let Some(list) = value.as_array() else { return Err(self.unlike(value, path)) };
                for (i, item) in list.iter().enumerate() {
                    items.check(item, &format!("{path}[{i}]"))?;
                }
                (*min..=*max).contains(&list.len())
            }
            Shape::Object(object) => match value.as_object() {
                Some(map) => return object.check(map, path),
                None => false,
            },
            Shape::AnyOf { branches, by } => {
                return self.check_branches(branches, by.as_deref(), value, path);
            }
        };
        if fits { Ok(()) } else { Err(self.unlike(value, path)) }
    }

    fn check_branches(
        &self,
        branches: &[Arc<Shape>],
        by: Option<&str>,
        value: &Value,
        path: &str,
    ) -> Result<(), Refusal> {
        if let (Some(by), Some(map)) = (by, value.as_object()) {
            let known: Vec<&Arc<Shape>> =
                branches.iter().filter(|b| b.has(by, map.get(by))).collect();
            return match known[..] {
                [one] => one.check(value, path),
                _ => Err(unknown_kind(branches, by, map.get(by), path)),
            };
        }
        let alike: Vec<&Arc<Shape>> = branches.iter().filter(|b| b.is_like(value)).collect();
        let mut deepest = None;
        for branch in alike {
            match branch.check(value, path) {
                Ok(()) => return Ok(()),
                Err(said) => {
                    let depth = |r: &Refusal| r.param.as_ref().map_or(0, String::len);
                    if deepest.as_ref().is_none_or(|d| depth(&said) > depth(d)) {
                        deepest = Some(said);
                    }
                }
            }
        }
        Err(deepest.unwrap_or_else(|| self.unlike(value, path)))
    }

    /// Whether an object of this shape may have `found` in its field `by`.
    fn has(&self, by: &str, found: Option<&Value>) -> bool {
        let Shape::Object(object) = self else { return false };
        let Some(field) = object.fields.iter().find(|f| f.name == by) else { return false };
        match (found, &*field.shape) {
            (None | Some(Value::Null), _) => !field.required,
            (Some(Value::String(found)), Shape::Text { only, .. }) => only.contains(found),
            _ => false,
        }
    }

    fn is_like(&self, value: &Value) -> bool {
        match self {
            Shape::Any => true,
            Shape::Null => value.is_null(),
            Shape::Bool { .. } => value.is_boolean(),
            Shape::Integer { .. } | Shape::Number { .. } => value.is_number(),
            Shape::Text { .. } => value.is_string(),
            Shape::List { .. } => value.is_array(),
            Shape::Object(_) => value.is_object(),
            Shape::AnyOf { branches, .. } => branches.iter().any(|b| b.is_like(value)),
        }
    }

    fn unlike(&self, value: &Value, path: &str) -> Refusal {
        let place = if path.is_empty() { "the body" } else { path };
        let message = format!("{place}: found {}, expected {}", shown(value), self.words());
        Refusal::field(path, message)
    }

    /// What is expected, for people.
    fn words(&self) -> String {
        match self {
            Shape::Any => "anything".into(),
            Shape::Null => "null".into(),
            Shape::Bool { only: None } => "true or false".into(),
            Shape::Bool { only: Some(only) } => only.to_string(),
            Shape::Integer { min, max } => format!("an integer from {min} to {max}"),
            Shape::Number { min, above: true, max } => {
                format!("a number above {min} and at most {max}")
            }
            Shape::Number { min, max, .. } => format!("a number from {min} to {max}"),
            Shape::Text { only, .. } if !only.is_empty() => {
                let all: Vec<String> = only.iter().map(|o| format!("{o:?}")).collect();
                all.join(" or ")
            }
            Shape::Text { form: Some(form), .. } => format!("a string of {}", form.words()),
            Shape::Text { min: 0, max: usize::MAX, .. } => "a string".into(),
            Shape::Text { min, max: usize::MAX, .. } => {
                format!("a string of at least {min} characters")
            }
            Shape::Text { min, max, .. } => format!("a string of {min} to {max} characters"),
            Shape::List { min: 0, max: usize::MAX, .. } => "a list".into(),
            Shape::List { min, max: usize::MAX, .. } => format!("a list of at least {min}"),
            Shape::List { min, max, .. } => format!("a list of {min} to {max}"),
            Shape::Object(_) => "an object".into(),
            Shape::AnyOf { branches, .. } => {
                let mut all: Vec<String> = branches.iter().map(|b| b.words()).collect();
                all.dedup();
                all.join(", or ")
            }
        }
    }
}

impl Object {
    fn read(schema: &Value, all: &Map<String, Value>) -> Result<Object, String> {
        let required = strings(&schema["required"]);
        let mut fields = Vec::new();
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            let shape = Shape::read(field, all).map_err(|e| format!("{name}: {e}"))?;
            fields.push(Field {
                name: name.clone(),
                required: required.contains(name),
                ignored: field.get("x-ignored").is_some(),
                shape: Arc::new(shape),
            });
        }
        let rest = match &schema["additionalProperties"] {
            Value::Bool(false) => None,
            Value::Bool(true) => Some(Shape::Any),
            Value::Null => return Err("an object without additionalProperties".into()),
            inner => Some(Shape::read(inner, all)?),
        };
        let refused = schema["x-refused"].as_object().into_iter().flatten();
        Ok(Object {
            fields,
            rest: rest.map(Arc::new),
            most: schema["maxProperties"].as_u64().map_or(usize::MAX, |n| n as usize),
            keys: schema["x-keys"].as_str().map(Form::parse).transpose()?,
            refused: refused
                .filter_map(|(name, why)| Some((name.clone(), why.as_str()?.to_owned())))
                .collect(),
        })
    }

    fn check(&self, map: &Map<String, Value>, path: &str) -> Result<(), Refusal> {
        let at = |name: &str| {
            if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
        };
        for (name, value) in map {
            let known = self.fields.iter().find(|f| f.name == *name);
            match (known, &self.rest) {
                // Null is what clients send for a field that they leave out.
                (Some(field), _) if value.is_null() && !field.required => {}
                (Some(field), _) => field.shape.check(value, &at(name))?,
                (None, Some(rest)) => {
                    if self.keys.is_some_and(|form| !form.fits(name)) {
                        let words = self.keys.map_or("", Form::words);
                        let said = format!("{path}: found the name {name:?}, expected {words}");
                        return Err(Refusal::field(path, said));
                    }
                    rest.check(value, &at(name))?;
                }
                (None, None) => return Err(self.unknown(name, &at(name))),
            }
        }
        if map.len() > self.most {
            let said = format!("{path}: {} entries, expected at most {}", map.len(), self.most);
            return Err(Refusal::field(path, said));
        }
        for field in self.fields.iter().filter(|f| f.required) {
            if !map.contains_key(&field.name) {
                let said = format!("{} is missing", at(&field.name));
                return Err(Refusal::field(at(&field.name), said).with_code("missing_parameter"));
            }
        }
        Ok(())
    }

    fn unknown(&self, name: &str, path: &str) -> Refusal {
        let refused = self.refused.iter().find(|(known, _)| known == name);
        let short: String = path.chars().take(200).collect();
        match refused {
            Some((_, advice)) => {
                Refusal::field(short, format!("{name:?} is not supported: {advice}"))
                    .with_code("unsupported_parameter")
            }
            None => {
                let said =
                    format!("{short:?} is not a field that is known here; see /openapi.json");
                Refusal::field(short, said).with_code("unknown_parameter")
            }
        }
    }
}

fn unknown_kind(branches: &[Arc<Shape>], by: &str, found: Option<&Value>, path: &str) -> Refusal {
    let mut known = Vec::new();
    for branch in branches {
        if let Shape::Object(object) = &**branch
            && let Some(field) = object.fields.iter().find(|f| f.name == by)
            && let Shape::Text { only, .. } = &*field.shape
        {
            known.extend(only.iter().map(|o| format!("{o:?}")));
        }
    }
    let param = format!("{path}.{by}");
    let found = found.map_or("nothing".to_owned(), shown);
    Refusal::field(
        param.clone(),
        format!("{param}: found {found}, expected {}", known.join(" or ")),
    )
}

/// A value as a whole number, if it is one; `2.0` is.
pub(crate) fn integer(value: &Value) -> Option<i128> {
    if let Some(v) = value.as_i64() {
        return Some(v.into());
    }
    if let Some(v) = value.as_u64() {
        return Some(v.into());
    }
    // Above 2^53 a float no longer says which integer was meant.
    value
        .as_f64()
        .filter(|v| v.fract() == 0.0 && v.abs() <= 9_007_199_254_740_992.0)
        .map(|v| v as i128)
}

fn strings(value: &Value) -> Vec<String> {
    let items = value.as_array().into_iter().flatten();
    items.filter_map(|v| v.as_str().map(str::to_owned)).collect()
}

/// A value as an error shows it.
fn shown(value: &Value) -> String {
    match value {
        Value::Array(list) => format!("a list of {}", list.len()),
        Value::Object(_) => "an object".into(),
        Value::String(text) if text.chars().count() > 60 => {
            format!("a string of {} bytes", text.len())
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn said(schema: &Value, value: &Value) -> String {
        let shape = Shape::read(schema, &Map::new()).expect("a schema of the subset");
        shape.check(value, "f").map_or_else(|r| r.message, |()| String::new())
    }

    #[test]
    fn numbers_have_ranges() {
        let t = json!({"type": "number", "minimum": 0, "maximum": 2});
        for good in [json!(0), json!(2), json!(0.7), json!(-0.0)] {
            assert_eq!(said(&t, &good), "");
        }
        for bad in [json!(-1), json!(2.1), json!("0.7"), json!(null), json!([1]), json!(true)] {
            assert!(said(&t, &bad).contains("expected a number from 0 to 2"), "{bad}");
        }
        let s = json!({"type": "integer", "minimum": i64::MIN, "maximum": u64::MAX});
        for good in [json!(i64::MIN), json!(u64::MAX), json!(3.0), json!(-0.0)] {
            assert_eq!(said(&s, &good), "");
        }
        for bad in [json!(1.5), json!(1e30), json!(1.8446744073709552e19), json!("1")] {
            assert!(said(&s, &bad).starts_with("f: found"), "{bad}");
        }
    }

    #[test]
    fn an_object_names_what_is_wrong_with_it() {
        let o = json!({"type": "object", "additionalProperties": false, "required": ["a"],
            "properties": {"a": {"type": "string", "minLength": 1}, "b": {"type": "boolean"}},
            "x-refused": {"c": "use a"}});
        assert_eq!(said(&o, &json!({"a": "x", "b": null})), "");
        assert_eq!(said(&o, &json!({"b": true})), "f.a is missing");
        assert_eq!(said(&o, &json!({"a": "x", "c": 1})), "\"c\" is not supported: use a");
        assert!(said(&o, &json!({"a": "x", "d": 1})).contains("\"f.d\" is not a field"));
        assert_eq!(
            said(&o, &json!({"a": ""})),
            "f.a: found \"\", expected a string of at least 1 characters"
        );
        assert_eq!(
            said(&o, &json!({"a": null})),
            "f.a: found null, expected a string of at least 1 characters"
        );
    }

    #[test]
    fn branches_are_told_apart_by_type_or_by_a_field() {
        let text = json!({"type": "object", "additionalProperties": false, "required": ["type", "text"],
            "properties": {"type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}}});
        let plain = json!({"type": "object", "additionalProperties": false,
            "properties": {"type": {"type": "string", "enum": ["plain"]}, "n": {"type": "boolean"}}});
        let any = json!({"anyOf": [text, plain], "x-by": "type"});
        assert_eq!(said(&any, &json!({"type": "text", "text": "x"})), "");
        assert_eq!(said(&any, &json!({"n": true})), "");
        assert_eq!(said(&any, &json!({"type": "text"})), "f.text is missing");
        assert_eq!(
            said(&any, &json!({"type": "image_url"})),
            "f.type: found \"image_url\", expected \"text\" or \"plain\""
        );
        let lists = json!({"anyOf": [{"type": "array", "items": {"type": "string"}},
            {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}}}]});
        assert_eq!(said(&lists, &json!([[true]])), "");
        assert!(said(&lists, &json!([[3]])).starts_with("f[0][0]: found 3"));
        assert!(said(&lists, &json!(3)).contains("expected a list"));
    }
}
