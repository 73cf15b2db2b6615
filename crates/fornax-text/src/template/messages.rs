//! Brings messages in the form that templates expect. It must not know any template.

use serde_json::{Map, Value};

use crate::Error;

/// The messages with contents that are text (or parts, if the template takes them) and tool-call
/// arguments that are mappings.
///
/// # Errors
/// `is_malformed` if this is not a list of objects with a role, or has parts that cannot become text.
pub(super) fn prepare(messages: &Value, takes_parts: bool) -> Result<Value, Error> {
    let Value::Array(list) = messages else {
        return Err(Error::malformed(
            "rendering a chat: the messages are no list; expected objects with role and content",
        ));
    };
    let prepared = list.iter().enumerate().map(|(i, message)| {
        let Value::Object(message) = message else {
            return Err(Error::malformed(format!(
                "rendering a chat: message {i} is no object; expected one with role and content"
            )));
        };
        let mut message = message.clone();
        prepare_content(&mut message, i, takes_parts)?;
        if let Some(Value::Array(calls)) = message.get_mut("tool_calls") {
            calls.iter_mut().for_each(parse_arguments);
        }
        Ok(Value::Object(message))
    });
    Ok(Value::Array(prepared.collect::<Result<_, Error>>()?))
}

fn prepare_content(message: &mut Map<String, Value>, i: usize, parts: bool) -> Result<(), Error> {
    match message.get("content") {
        None | Some(Value::Null) => {
            message.insert("content".into(), "".into());
        }
        Some(Value::Array(list)) if !parts => {
            let texts = list.iter().map(|part| match (part, part.get("text")) {
                (Value::String(text), _) | (_, Some(Value::String(text))) => Ok(text.as_str()),
                _ => Err(Error::malformed(format!(
                    "rendering a chat: message {i} has a part without text, and this model's template \
                     takes text alone"
                ))),
            });
            let text = texts.collect::<Result<Vec<_>, _>>()?.join("\n");
            message.insert("content".into(), text.into());
        }
        Some(_) => {}
    }
    Ok(())
}

/// Arguments come as JSON text over the wire; templates walk through them. Text that is no JSON object
/// stays as it is.
fn parse_arguments(call: &mut Value) {
    let slot = match call.get_mut("function") {
        Some(function) => function.get_mut("arguments"),
        None => call.get_mut("arguments"),
    };
    let Some(slot) = slot else { return };
    match slot {
        Value::String(text) if text.trim().is_empty() => *slot = Value::Object(Map::new()),
        Value::String(text) => {
            if let Ok(object @ Value::Object(_)) = serde_json::from_str(text) {
                *slot = object;
            }
        }
        Value::Null => *slot = Value::Object(Map::new()),
        _ => {}
    }
}

/// The messages with the thoughts that assistants' contents start with moved to `reasoning_content`; `None`
/// if there are no such thoughts. Line breaks around the thoughts and characters of `trim` before the answer
/// are dropped.
pub(super) fn split_thoughts(messages: &Value, trim: &str) -> Option<Value> {
    let Value::Array(list) = messages else { return None };
    let mut list = list.clone();
    let mut found = false;
    for message in list.iter_mut().filter_map(Value::as_object_mut) {
        if message.get("role").and_then(Value::as_str) != Some("assistant")
            || message.get("reasoning_content").is_some_and(|v| !v.is_null())
        {
            continue;
        }
        let Some(content) = message.get("content").and_then(Value::as_str) else { continue };
        let thinking = content.trim_start().strip_prefix("<think>");
        let Some((thoughts, answer)) = thinking.and_then(|t| t.split_once("</think>")) else {
            continue;
        };
        let thoughts = thoughts.trim_matches('\n').to_owned();
        let answer = answer.trim_start_matches(|c| trim.contains(c)).to_owned();
        message.insert("reasoning_content".into(), thoughts.into());
        message.insert("content".into(), answer.into());
        found = true;
    }
    found.then_some(Value::Array(list))
}
