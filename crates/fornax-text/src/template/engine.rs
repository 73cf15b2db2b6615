//! The Jinja environment that templates run in: Hugging Face's settings, filters and functions over
//! minijinja. It must not know messages or tokens.

use std::fmt;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{
    AutoEscape, Environment, ErrorKind, State, UndefinedBehavior, Value, escape_formatter,
};
use serde_json::Map;

use super::{clock, json, pystr, source};
use crate::Error;

/// Steps that one rendering may take. A chat of 4,000 turns needs under half a million; a template that loops
/// for ever needs all.
const FUEL: u64 = 4_000_000;
/// Stack for one rendering, reserved and not touched unless needed. A hostile template can nest values as deep
/// as its steps allow, and taking those apart recurses: this is enough for it, where a usual stack is not
/// and an overflow would end the process.
const STACK_BYTES: usize = 512 << 20;
/// The variable that holds the guard mark; no template can write a name with a space.
const MARK: &str = "guard mark";
/// The variable that holds the time.
const TIME: &str = "unix time";
const NAME: &str = "chat_template";

/// A parsed template in its environment.
#[derive(Debug)]
pub(super) struct Engine {
    environment: Environment<'static>,
    /// Seconds since 1970 for `strftime_now`; `None` asks the system.
    pub(super) time: Option<i64>,
}

/// The template's own refusal, told from other failures by its type.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

impl Engine {
    /// # Errors
    /// `is_template` if the source does not parse.
    pub(super) fn new(template: &str) -> Result<Engine, Error> {
        source::check_size(template)?;
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(|e| Error::template(format!("preparing a chat template: {e}")))?;
        environment.set_syntax(syntax);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(pystr::method);
        environment.set_formatter(|out, state, value| {
            match json::float_of(value) {
                // Floats print as Python prints them.
                Some(float) => escape_formatter(out, state, &json::python_float(float).into()),
                None => {
                    check_printed(value)?;
                    escape_formatter(out, state, value)
                }
            }
        });
        environment.add_filter("tojson", tojson);
        environment.add_filter("default", default);
        environment.add_filter("d", default);
        environment.add_filter("trim", trim);
        environment.add_test("iterable", is_iterable);
        environment.add_test("sequence", is_sequence);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment
            .add_template_owned(NAME, source::without_generation_tags(template))
            .map_err(|e| Error::template(format!("parsing the chat template: {}", describe(&e))))?;
        Ok(Engine { environment, time: None })
    }

    /// # Errors
    /// `is_raised` for the template's own refusal, `is_template` for everything else.
    pub(super) fn render(
        &self,
        mut variables: Map<String, serde_json::Value>,
        mark: Option<char>,
    ) -> Result<String, Error> {
        if let Some(mark) = mark {
            variables.insert(MARK.into(), mark.to_string().into());
        }
        if let Some(time) = self.time {
            variables.insert(TIME.into(), time.into());
        }
        let render = || {
            let rendered = self
                .environment
                .get_template(NAME)
                .and_then(|t| t.render(from_json(variables.into())));
            rendered.map_err(|e| match raised(&e) {
                Some(message) => Error::raised(message),
                None => Error::template(format!("rendering the chat template: {}", describe(&e))),
            })
        };
        std::thread::scope(|scope| {
            std::thread::Builder::new()
                .name("chat template".to_owned())
                .stack_size(STACK_BYTES)
                .spawn_scoped(scope, render)
                .map_err(|e| {
                    Error::template(format!("rendering the chat template: no thread: {e}"))
                })?
                .join()
                .unwrap_or_else(|_| {
                    Err(Error::template("rendering the chat template: it panicked"))
                })
        })
    }
}

/// A JSON value as a template's value, keys in their order.
fn from_json(value: serde_json::Value) -> Value {
    use serde_json::Value as Json;
    match value {
        Json::Null => Value::from(()),
        Json::Bool(v) => v.into(),
        Json::Number(n) => match (n.as_i64(), n.as_u64(), n.as_f64()) {
            (Some(v), _, _) => v.into(),
            (_, Some(v), _) => v.into(),
            (_, _, v) => v.unwrap_or(f64::NAN).into(),
        },
        Json::String(v) => v.into(),
        Json::Array(items) => items.into_iter().map(from_json).collect::<Vec<Value>>().into(),
        Json::Object(map) => Value::from_pairs(map.into_iter().map(|(k, v)| (k, from_json(v)))),
    }
}

/// The message of `raise_exception`, wherever in the chain of causes it is.
fn raised(error: &minijinja::Error) -> Option<String> {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(Raised(message)) = error.downcast_ref() {
            return Some(message.clone());
        }
        cause = error.source();
    }
    None
}

fn describe(error: &minijinja::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

fn raise_exception(message: &str) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, "raised by the template")
        .with_source(Raised(message.to_owned())))
}

fn strftime_now(state: &State<'_, '_>, format: &str) -> String {
    let time = state.lookup(TIME).and_then(|v| v.as_i64()).unwrap_or_else(clock::now);
    clock::strftime(format, time)
}

/// `default(value, default_value="", boolean=False)`: also for false values where `boolean`.
#[expect(clippy::needless_pass_by_value, reason = "the form that minijinja calls filters in")]
fn default(
    value: &Value,
    other: Option<Value>,
    boolean: Option<bool>,
    named: Kwargs,
) -> Result<Value, minijinja::Error> {
    let other = other.or(named.get("default_value")?).unwrap_or_else(|| Value::from(""));
    let boolean = boolean.or(named.get("boolean")?).unwrap_or(false);
    named.assert_all_used()?;
    Ok(if value.is_undefined() || boolean && !value.is_true() { other } else { value.clone() })
}

/// Items of a value that is printed, those inside it included: lists can be added to themselves for
/// nothing, and printing, once begun, looks at every item.
const PRINTED_MAX: usize = 1 << 20;
/// Nesting of a value that is printed; what lies deeper counts as one item.
const PRINTED_DEPTH: usize = 64;

fn check_printed(value: &Value) -> Result<(), minijinja::Error> {
    fn count(value: &Value, left: &mut usize, depth: usize) -> Option<()> {
        *left = left.checked_sub(1)?;
        let looks = matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map);
        // What has no length may be a stream that is there only once.
        let (true, Some(len)) = (looks && depth < PRINTED_DEPTH, value.len()) else {
            return Some(());
        };
        if len > *left {
            return None;
        }
        let Ok(mut items) = value.try_iter() else { return Some(()) };
        items.try_for_each(|item| match value.kind() {
            ValueKind::Map => count(&value.get_item(&item).unwrap_or_default(), left, depth + 1),
            _ => count(&item, left, depth + 1),
        })
    }
    let mut left = PRINTED_MAX;
    count(value, &mut left, 0).ok_or_else(|| {
        minijinja::Error::new(ErrorKind::InvalidOperation, "the value is too large to print")
    })
}

/// `trim(value, chars=None)`
#[expect(clippy::needless_pass_by_value, reason = "the form that minijinja calls filters in")]
fn trim(value: &Value, chars: Option<String>, named: Kwargs) -> Result<String, minijinja::Error> {
    let chars = chars.or(named.get("chars")?);
    named.assert_all_used()?;
    check_printed(value)?;
    let text = value.to_string();
    Ok(match chars {
        None => text.trim().to_owned(),
        Some(chars) => text.trim_matches(|c| chars.contains(c)).to_owned(),
    })
}

/// As Jinja has it: none is not iterable, what is undefined is (and empty).
fn is_iterable(value: &Value) -> bool {
    value.is_undefined() || !value.is_none() && value.try_iter().is_ok()
}

/// As Jinja has it: whatever has a length and can be indexed, texts and mappings too.
fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map)
}

/// `tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`, as `json.dumps`.
#[expect(clippy::needless_pass_by_value, reason = "the form that minijinja calls filters in")]
fn tojson(
    state: &State<'_, '_>,
    value: &Value,
    placed: Rest<Value>,
    named: Kwargs,
) -> Result<String, minijinja::Error> {
    let bad = |what: &'static str| minijinja::Error::new(ErrorKind::InvalidOperation, what);
    let argument = |place: usize, name: &str| -> Result<Option<Value>, minijinja::Error> {
        let named = named.get::<Option<Value>>(name)?;
        Ok(placed.get(place).cloned().or(named).filter(|v| !v.is_none()))
    };
    if placed.len() > 4 {
        return Err(minijinja::Error::from(ErrorKind::TooManyArguments));
    }
    let ensure_ascii = argument(0, "ensure_ascii")?;
    let separators = argument(2, "separators")?;
    let sort_keys = argument(3, "sort_keys")?;
    let indent = match argument(1, "indent")? {
        None => None,
        Some(v) if v.kind() == ValueKind::String => v.as_str().map(str::to_owned),
        Some(v) => {
            let spaces = v.as_usize().filter(|&n| n <= 64);
            Some(" ".repeat(spaces.ok_or_else(|| bad("tojson: indent is no small number"))?))
        }
    };
    let (item, key) = match separators {
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
        Some(pair) => {
            let text = |i| -> Result<String, minijinja::Error> {
                let value = pair.get_item_by_index(i)?;
                value
                    .as_str()
                    .map(str::to_owned)
                    .ok_or_else(|| bad("tojson: separators are no texts"))
            };
            (text(0)?, text(1)?)
        }
    };
    let style = json::Style {
        ensure_ascii: ensure_ascii.is_some_and(|v| v.is_true()),
        sort_keys: sort_keys.is_some_and(|v| v.is_true()),
        indent,
        item,
        key,
        keep: state.lookup(MARK).and_then(|v| v.as_str().and_then(|s| s.chars().next())),
    };
    named.assert_all_used()?;
    json::dumps(value, &style)
}
