//! JSON schemas in the one form that is enforced: every keyword known, every reference to a definition at the top,
//! everything that says nothing left out. What cannot be enforced is refused here, by keyword and place. It knows
//! nothing of tokens.

use std::collections::HashMap;

use serde_json::{Map, Number, Value, json};

use super::disjoint::Disjoint;
use super::refs::Refs;
use super::{limits, literal};
use crate::{Error, Result};

/// Between two tokens of JSON: nothing, a space, or a line's end with indentation. Bounded, so that a model cannot
/// emit white space until its limit.
const WHITESPACE: &str = r" |\n {0,32}|\n\t{0,8}";
/// Without `u`, a string has one way to be written, so that the name of a property cannot come in disguise.
const ESCAPES: &str = "nrbtf\\\"";

/// Comparisons of schemas for all `oneOf` of a document; past them nothing counts as disjoint.
const COMPARISONS: u32 = 1_000_000;

/// Say nothing of what is valid.
const ANNOTATIONS: &[&str] = &[
    "$anchor",
    "$comment",
    "$defs",
    "$schema",
    "contentEncoding",
    "contentMediaType",
    "default",
    "definitions",
    "deprecated",
    "description",
    "discriminator",
    "example",
    "examples",
    "externalDocs",
    "readOnly",
    "title",
    "writeOnly",
    "xml",
];
/// Values of `format` that strings are held to by the compiler.
const FORMATS: &[&str] = &["duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"];
/// Those that it takes too lightly (29 February of any year, leap seconds at any minute), as patterns.
const DATED: &[&str] = &["date", "date-time", "time"];
/// RFC 3339 full-date. The 29th of February is there in years that four divides, and of full hundreds in those of
/// which it divides the hundred.
const DATE: &str = "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)\
    |02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)";
/// RFC 3339 full-time, without leap seconds.
const TIME: &str = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
const TYPES: &[&str] = &["array", "boolean", "integer", "null", "number", "object", "string"];

/// A schema as the compiler takes it, with the options that this module counts on.
///
/// # Errors
/// `is_unsupported` for what cannot be enforced, `is_request` for what is no schema.
pub(super) fn prepare(schema: &Value) -> Result<Value> {
    let mut reader = Reader {
        refs: Refs::new(schema),
        known: HashMap::new(),
        definitions: Vec::new(),
        waiting: Vec::new(),
        intersections: false,
        multiples: Vec::new(),
        read: 0,
        comparisons: COMPARISONS,
    };
    let top = Place::root();
    let root = reader.schema(schema, &top)?;
    while let Some((number, part, name)) = reader.waiting.pop() {
        // The document itself may have an `$id`, its parts not.
        let up = (!std::ptr::eq(part, schema)).then_some(&top);
        let read = reader.schema(part, &Place { up, name })?;
        reader.definitions[number] = read;
    }
    reader.check_multiples()?;
    cycles(&reader.definitions)?;
    let mut out = match root {
        Value::Object(map) => map,
        Value::Bool(true) => Map::new(),
        _ => return Err(Error::request("reading the JSON schema: `false` accepts nothing")),
    };
    let named = reader.definitions.into_iter().enumerate();
    let named: Map<String, Value> = named.map(|(i, schema)| (format!("d{i}"), schema)).collect();
    if !named.is_empty() {
        out.insert("$defs".into(), Value::Object(named));
    }
    out.insert(
        "x-guidance".into(),
        json!({"whitespace_pattern": WHITESPACE, "json_allowed_escapes": ESCAPES}),
    );
    Ok(Value::Object(out))
}

/// Where in the schema something stands, for messages.
pub(super) struct Place<'a> {
    up: Option<&'a Place<'a>>,
    name: String,
}

impl<'a> Place<'a> {
    fn root() -> Place<'static> {
        Place { up: None, name: String::new() }
    }

    fn at(&'a self, name: impl Into<String>) -> Place<'a> {
        Place { up: Some(self), name: name.into() }
    }

    /// As a JSON pointer.
    pub(super) fn path(&self) -> String {
        let path = match self.up {
            Some(up) if up.up.is_none() && self.name.starts_with('#') => self.name.clone(),
            Some(up) => format!("{}/{}", up.path().trim_end_matches('/'), self.name),
            None => self.name.clone(),
        };
        if path.is_empty() { "/".into() } else { path }
    }

    pub(super) fn wrong(&self, what: &str) -> Error {
        Error::request(format!("reading the JSON schema at {}: {what}", self.path()))
    }

    pub(super) fn refused(&self, what: &str) -> Error {
        Error::unsupported(format!("the JSON schema cannot be enforced at {}: {what}", self.path()))
    }
}

struct Reader<'a> {
    refs: Refs<'a>,
    /// Numbers of definitions by where in memory they are: one may be named in many ways.
    known: HashMap<*const Value, usize>,
    definitions: Vec<Value>,
    /// Definitions that were referred to and not read yet, with where they are.
    waiting: Vec<(usize, &'a Value, String)>,
    /// Whether some schemas have to hold at once.
    intersections: bool,
    multiples: Vec<f64>,
    /// Values that were read, and comparisons that are left; what is referred to is read again for each definition
    /// that it lies in.
    read: usize,
    comparisons: u32,
}

impl<'a> Reader<'a> {
    /// # Errors
    /// `is_request` where all that was read is too much.
    fn charge(&mut self, values: usize, at: &Place<'_>) -> Result<()> {
        self.read += values;
        if self.read > limits::SCHEMA_READ {
            return Err(at.wrong("too much is referred to too often"));
        }
        Ok(())
    }

    fn schema(&mut self, schema: &'a Value, at: &Place<'_>) -> Result<Value> {
        self.charge(1, at)?;
        let map = match schema {
            Value::Bool(_) => return Ok(schema.clone()),
            Value::Object(map) => map,
            _ => return Err(at.wrong("expected a schema: an object or a boolean")),
        };
        let mut out = Map::new();
        for (key, value) in map {
            if let Some(read) = self.keyword(map, key, value, at)? {
                out.insert(key.clone(), read);
            }
        }
        old_items(&mut out);
        dated(&mut out);
        self.one_of(map, &mut out, at)?;
        check_together(&out, at)?;
        // What combines whole schemas comes last; the compiler intersects in the order that it finds.
        let (whole, mut own): (Map<_, _>, Map<_, _>) =
            out.into_iter().partition(|(key, _)| IN_PLACE.contains(&key.as_str()));
        let own_says = own.keys().any(|key| key != "type" || !whole.is_empty());
        self.intersections |=
            whole.len() + usize::from(own_says) > 1 || whole.contains_key("allOf");
        own.extend(whole);
        Ok(Value::Object(own))
    }

    /// One keyword, read; nothing where it says nothing.
    fn keyword(
        &mut self,
        map: &'a Map<String, Value>,
        key: &str,
        value: &'a Value,
        at: &Place<'_>,
    ) -> Result<Option<Value>> {
        let here = at.at(key);
        if matches!(key, "enum" | "const" | "required" | "type") {
            self.charge(literal::values(value), &here)?;
        }
        Ok(Some(match key {
            _ if ANNOTATIONS.contains(&key) || key.starts_with("x-") => return Ok(None),
            "$id" | "id" => {
                let moves = value.as_str().is_none_or(|id| !id.starts_with('#'));
                if at.up.is_some() && moves {
                    return Err(
                        here.refused("an `$id` inside the schema changes what `$ref` means")
                    );
                }
                return Ok(None);
            }
            "$ref" => Value::String(self.reference(value, &here)?),
            "type" => types(value, &here)?,
            "enum" => literal::list(value, &here)?,
            "const" => {
                literal::check(value, &here)?;
                value.clone()
            }
            "allOf" | "anyOf" | "oneOf" | "prefixItems" => self.list(value, &here)?,
            "items" if value.is_array() => self.list(value, &here)?,
            "items" | "additionalItems" | "additionalProperties" => self.schema(value, &here)?,
            "properties" | "patternProperties" => self.map(key, value, &here)?,
            "required" => literal::names(value, &here)?,
            "minItems" | "maxItems" | "minLength" | "maxLength" | "minProperties"
            | "maxProperties" => count(value, &here)?,
            "pattern" => pattern(value, &here)?,
            "format" => format(value, &here)?,
            "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" => {
                literal::bound(map, key, value, &here)?
            }
            "multipleOf" => {
                self.multiples.push(literal::multiple(value, &here)?);
                value.clone()
            }
            "uniqueItems" | "nullable" if value == &Value::Bool(false) => return Ok(None),
            "unevaluatedItems" | "unevaluatedProperties" | "contains" | "propertyNames"
                if value == &Value::Bool(true) && key != "contains" =>
            {
                return Ok(None);
            }
            "nullable" => {
                return Err(at.refused(
                    "`nullable` is not of JSON schema; write `\"type\": [\"…\", \"null\"]`",
                ));
            }
            _ => return Err(at.refused(&format!("the keyword `{key}`"))),
        }))
    }

    /// The name that a reference has in what comes out.
    fn reference(&mut self, value: &'a Value, at: &Place<'_>) -> Result<String> {
        let Some(reference) = value.as_str() else {
            return Err(at.wrong("expected a text"));
        };
        let target = self.refs.resolve(reference, &at.path())?;
        let number = match self.known.get(&std::ptr::from_ref(target)) {
            Some(&number) => number,
            None => {
                let number = self.definitions.len();
                self.definitions.push(Value::Null);
                self.known.insert(std::ptr::from_ref(target), number);
                self.waiting.push((number, target, reference.to_owned()));
                number
            }
        };
        Ok(format!("#/$defs/d{number}"))
    }

    fn list(&mut self, value: &'a Value, at: &Place<'_>) -> Result<Value> {
        let Some(items) = value.as_array().filter(|items| !items.is_empty()) else {
            return Err(at.wrong("expected a list of schemas that is not empty"));
        };
        let items = items.iter().enumerate();
        let items = items.map(|(i, item)| self.schema(item, &at.at(i.to_string())));
        Ok(Value::Array(items.collect::<Result<_>>()?))
    }

    /// `oneOf` says what `anyOf` does where no value meets two of its schemas; the compiler has the latter alone.
    fn one_of(
        &mut self,
        map: &'a Map<String, Value>,
        out: &mut Map<String, Value>,
        at: &Place<'_>,
    ) -> Result<()> {
        let Some(alternatives) = map.get("oneOf").and_then(Value::as_array) else { return Ok(()) };
        let mut disjoint = Disjoint::new(&self.refs, self.comparisons);
        let certain = disjoint.all(alternatives);
        self.comparisons = disjoint.left();
        if !certain {
            return Err(at.refused(
                "`oneOf` between schemas that are not plainly disjoint: by type, by `const` or `enum`, or by a required \
                 property of which that holds; write `anyOf`",
            ));
        }
        let any = out.shift_remove("oneOf").unwrap_or_default();
        match out.remove("anyOf") {
            None => out.insert("anyOf".into(), any),
            // Both have to hold.
            Some(other) => {
                let mut all = vec![json!({"anyOf": other}), json!({"anyOf": any})];
                if let Some(Value::Array(more)) = out.remove("allOf") {
                    all.extend(more);
                }
                out.insert("allOf".into(), Value::Array(all))
            }
        };
        Ok(())
    }

    fn map(&mut self, key: &str, value: &'a Value, at: &Place<'_>) -> Result<Value> {
        let Some(map) = value.as_object() else {
            return Err(at.wrong("expected an object whose values are schemas"));
        };
        let mut out = Map::new();
        for (name, schema) in map {
            let here = at.at(name.clone());
            if key == "patternProperties" {
                pattern(&Value::String(name.clone()), &here)?;
            }
            out.insert(name.clone(), self.schema(schema, &here)?);
        }
        Ok(Value::Object(out))
    }

    /// The compiler finds common multiples in 32 bits, without looking whether they fit.
    fn check_multiples(&self) -> Result<()> {
        let mut distinct = self.multiples.clone();
        distinct.sort_by(f64::total_cmp);
        distinct.dedup();
        let scaled: f64 = distinct.iter().map(|m| m * 1e4).product();
        if self.intersections && distinct.len() > 1 && scaled > 4e9 {
            return Err(Error::unsupported(
                "the JSON schema cannot be enforced: several `multipleOf` whose common multiples are too large",
            ));
        }
        Ok(())
    }
}

/// Combine whole schemas at one place.
const IN_PLACE: &[&str] = &["$ref", "allOf", "anyOf", "enum", "const"];

/// Lists of items by position, as drafts before 2020-12 write them.
fn old_items(out: &mut Map<String, Value>) {
    if out.get("items").is_some_and(Value::is_array) {
        let positions = out.shift_remove("items").unwrap_or_default();
        let rest = out.shift_remove("additionalItems");
        out.insert("prefixItems".into(), positions);
        out.extend(rest.map(|rest| ("items".into(), rest)));
    } else {
        // Without a list, it says nothing.
        out.shift_remove("additionalItems");
    }
}

/// What keywords of one schema say of each other.
fn check_together(out: &Map<String, Value>, at: &Place<'_>) -> Result<()> {
    let count = |key: &str| out.get(key).and_then(Value::as_u64);
    // Names outside `properties` may come twice; they then count as one.
    let required = out.get("required").and_then(Value::as_array).map_or(0, Vec::len) as u64;
    if count("minProperties").is_some_and(|least| least > required + 1) {
        return Err(at.refused(&format!(
            "`minProperties` above the number of `required` ones and one more, {}",
            required + 1
        )));
    }
    Ok(())
}

fn types(value: &Value, at: &Place<'_>) -> Result<Value> {
    let known = |name: &Value| name.as_str().is_some_and(|name| TYPES.contains(&name));
    match value {
        Value::Array(names) if !names.is_empty() && names.iter().all(known) => {}
        _ if known(value) => {}
        _ => {
            return Err(
                at.wrong(&format!("expected one of {} or a list of them", TYPES.join(", ")))
            );
        }
    }
    Ok(value.clone())
}

fn count(value: &Value, at: &Place<'_>) -> Result<Value> {
    // 3.0 is as good as 3.
    let whole = value.as_f64().filter(|v| v.fract() == 0.0 && *v >= 0.0);
    let Some(n) = value.as_u64().or(whole.map(|v| v as u64)) else {
        return Err(at.wrong("expected a number that is whole and not negative"));
    };
    if n > limits::SCHEMA_VALUES as u64 {
        return Err(at.refused(&format!("more than {}", limits::SCHEMA_VALUES)));
    }
    Ok(Value::Number(Number::from(n)))
}

fn pattern(value: &Value, at: &Place<'_>) -> Result<Value> {
    let Some(text) = value.as_str() else {
        return Err(at.wrong("expected a regular expression"));
    };
    limits::regex(&format!("the pattern at {}", at.path()), text)?;
    Ok(value.clone())
}

fn format(value: &Value, at: &Place<'_>) -> Result<Value> {
    match value.as_str() {
        Some(name) if FORMATS.contains(&name) || DATED.contains(&name) => Ok(value.clone()),
        Some(name) => Err(at.refused(&format!(
            "the format {name:?}; strings can be held to {}, {}",
            DATED.join(", "),
            FORMATS.join(", ")
        ))),
        None => Err(at.wrong("expected the name of a format")),
    }
}

/// Formats that are patterns here.
fn dated(out: &mut Map<String, Value>) {
    let pattern = match out.get("format").and_then(Value::as_str) {
        Some("date") => format!("^{DATE}$"),
        Some("time") => format!("^{TIME}$"),
        Some("date-time") => format!("^{DATE}T{TIME}$"),
        _ => return,
    };
    out.shift_remove("format");
    if !out.contains_key("pattern") {
        out.insert("pattern".into(), pattern.into());
        return;
    }
    let pattern = json!({"pattern": pattern});
    match out.get_mut("allOf").and_then(Value::as_array_mut) {
        Some(all) => all.push(pattern),
        None => {
            out.insert("allOf".into(), json!([pattern]));
        }
    }
}

/// Refuses definitions that lead back to themselves without a value between: they say nothing, and nothing can be
/// written that meets them.
fn cycles(definitions: &[Value]) -> Result<()> {
    #[derive(Clone, Copy, PartialEq)]
    enum Seen {
        Never,
        Above,
        Done,
    }
    let mut seen = vec![Seen::Never; definitions.len()];
    for start in 0..definitions.len() {
        // A definition is left when it is met for the second time on the stack.
        let mut open = vec![start];
        while let Some(&number) = open.last() {
            match seen[number] {
                Seen::Never => {
                    seen[number] = Seen::Above;
                    let mut next = Vec::new();
                    in_place(&definitions[number], &mut next);
                    if next.iter().any(|&n| seen[n] == Seen::Above) {
                        return Err(Error::request(
                            "reading the JSON schema: a `$ref` leads back to itself with no value between",
                        ));
                    }
                    open.extend(next);
                }
                Seen::Above => {
                    seen[number] = Seen::Done;
                    open.pop();
                }
                Seen::Done => {
                    open.pop();
                }
            }
        }
    }
    Ok(())
}

/// Numbers of the definitions that a schema is, or has to meet, at the same place.
fn in_place(schema: &Value, out: &mut Vec<usize>) {
    let Some(map) = schema.as_object() else { return };
    let number = map.get("$ref").and_then(Value::as_str);
    out.extend(number.and_then(|r| r.strip_prefix("#/$defs/d")?.parse::<usize>().ok()));
    for key in ["allOf", "anyOf"] {
        for item in map.get(key).and_then(Value::as_array).into_iter().flatten() {
            in_place(item, out);
        }
    }
}
