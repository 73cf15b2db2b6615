//! Calls that are understood only when all of them is there: JSON, Python, or tags inside a block. It knows no marks
//! around the block.

use serde_json::{Map, Value};

use super::{Tool, Written, python};

/// The calls of a block, however they are written. None where there are none, or something else.
pub(super) fn calls(text: &str, tools: &[Tool]) -> Option<Vec<Written>> {
    let text = text.trim();
    if text.starts_with('<') {
        return tagged(text, tools);
    }
    if text.starts_with('{') || text.starts_with("[{") || text.starts_with("[\n") {
        let mut values = Vec::new();
        for value in serde_json::Deserializer::from_str(text).into_iter::<Value>() {
            match value.ok()? {
                Value::Array(items) => values.extend(items),
                value => values.push(value),
            }
        }
        let calls: Option<Vec<_>> = values.iter().map(call).collect();
        return calls.filter(|calls| !calls.is_empty());
    }
    python::calls(text, tools)
}

fn call(value: &Value) -> Option<Written> {
    let value = value.get("function").filter(|f| f.is_object()).unwrap_or(value);
    let name = value.get("name")?.as_str()?.to_owned();
    let arguments = match value.get("arguments").or_else(|| value.get("parameters")) {
        None | Some(Value::Null) => "{}".into(),
        Some(Value::String(text)) => {
            serde_json::from_str::<Map<String, Value>>(text).ok()?;
            text.clone()
        }
        Some(arguments @ Value::Object(_)) => arguments.to_string(),
        Some(_) => return None,
    };
    Some(Written { name, arguments })
}

/// `<function=name>` with `<parameter=key>` inside, as Qwen3-Coder writes calls. Values are texts; what they are
/// otherwise is said by the function's schema.
fn tagged(mut text: &str, tools: &[Tool]) -> Option<Vec<Written>> {
    let mut calls = Vec::new();
    while let Some(rest) = text.strip_prefix("<function=") {
        let (name, rest) = rest.split_once('>')?;
        let (mut body, after) = rest.split_once("</function>")?;
        let name = name.trim().to_owned();
        let tool = tools.iter().find(|tool| tool.name == name);
        let mut arguments = Map::new();
        body = body.trim_start();
        while let Some(rest) = body.strip_prefix("<parameter=") {
            let (key, rest) = rest.split_once('>')?;
            let (value, after) = rest.split_once("</parameter>")?;
            let value = value.strip_prefix('\n').unwrap_or(value);
            let value = value.strip_suffix('\n').unwrap_or(value);
            let key = key.trim();
            arguments.insert(key.to_owned(), typed(value, tool, key));
            body = after.trim_start();
        }
        if !body.is_empty() || name.is_empty() {
            return None;
        }
        calls.push(Written { name, arguments: Value::Object(arguments).to_string() });
        text = after.trim_start();
    }
    (text.is_empty() && !calls.is_empty()).then_some(calls)
}

fn typed(value: &str, tool: Option<&Tool>, key: &str) -> Value {
    let schema = tool.and_then(|tool| tool.parameters.get("properties")?.get(key));
    let is_text = schema.is_none_or(|schema| schema["type"] == "string");
    let read = serde_json::from_str(value.trim()).ok();
    match (is_text, read) {
        (false, Some(read)) => read,
        _ => Value::String(value.to_owned()),
    }
}
