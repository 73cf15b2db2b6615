//! The two other protocols, and calls of tools in all three, on scripts.

use serde_json::{Value, json};

use crate::client::Response;
use crate::script::{Script, Scripted};
use crate::server::Server;
use fornax_engine::serve::Finish;

const CHAT: &str = "/v1/chat/completions";
const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";

const CALLS: &str = "Let me see.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Köln \\\"🙂\\\"\"}}\n</tool_call>\n\
<tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>";

fn functions() -> Value {
    let schema = json!({ "type": "object", "properties": { "city": { "type": "string" } } });
    json!([
        { "name": "weather", "description": "of a city", "parameters": schema },
        { "name": "time", "parameters": { "type": "object", "properties": {} } },
    ])
}

fn chat_tools() -> Value {
    functions()
        .as_array()
        .expect("a list")
        .iter()
        .map(|f| json!({ "type": "function", "function": f }))
        .collect()
}

fn anthropic_tools() -> Value {
    let one = |f: &Value| json!({ "name": f["name"], "description": "x", "input_schema": f["parameters"] });
    functions().as_array().expect("a list").iter().map(one).collect()
}

fn named(response: &Response) -> Vec<(String, Value)> {
    let parse = |(name, data): (String, String)| (name, serde_json::from_str(&data).expect("JSON"));
    response.events().into_iter().map(parse).collect()
}

#[test]
fn two_calls_in_a_chat_stream_and_whole() {
    let (server, engine) = Server::scripted();
    let body = json!({ "messages": [{ "role": "user", "content": "x" }], "tools": chat_tools() });
    engine.say(CALLS);
    let choice = server.ok(CHAT, &body)["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "tool_calls");
    let calls = choice["message"]["tool_calls"].as_array().expect("calls").clone();
    assert_eq!(calls.len(), 2);
    assert_eq!(calls[0]["function"]["name"], "weather");
    let arguments: Value =
        serde_json::from_str(calls[0]["function"]["arguments"].as_str().expect("text"))
            .expect("JSON");
    assert_eq!(arguments, json!({ "city": "Köln \"🙂\"" }));
    assert_eq!(calls[1]["function"], json!({ "name": "time", "arguments": "{}" }));
    assert_ne!(calls[0]["id"], calls[1]["id"]);

    engine.say(CALLS);
    let mut streaming = body.clone();
    streaming["stream"] = true.into();
    let chunks = server.post(CHAT, &streaming).chunks();
    let mut joined: Vec<(Value, String)> = Vec::new();
    let mut content = String::new();
    for chunk in &chunks {
        let delta = &chunk["choices"][0]["delta"];
        content += delta["content"].as_str().unwrap_or_default();
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().expect("an index") as usize;
            if call["id"].is_string() {
                assert_eq!(index, joined.len());
                assert_eq!(
                    (&call["type"], &call["function"]["arguments"]),
                    (&json!("function"), &json!(""))
                );
                joined.push((call["function"]["name"].clone(), String::new()));
            } else {
                joined[index].1 += call["function"]["arguments"].as_str().expect("a fragment");
            }
        }
    }
    assert_eq!(content, choice["message"]["content"].as_str().unwrap_or_default());
    for (call, (name, arguments)) in calls.iter().zip(&joined) {
        assert_eq!(
            (&call["function"]["name"], call["function"]["arguments"].as_str()),
            (name, Some(&**arguments))
        );
    }
    assert_eq!(chunks.last().expect("an end")["choices"][0]["finish_reason"], "tool_calls");
}

#[test]
fn a_call_that_is_cut_ends_by_length_and_no_tools_mean_text() {
    let (server, engine) = Server::scripted();
    let base = json!({ "messages": [{ "role": "user", "content": "x" }] });
    engine.say(CALLS);
    let choice = server.ok(CHAT, &base)["choices"][0].clone();
    assert_eq!(choice["message"]["content"], CALLS);
    let mut none = base.clone();
    none["tools"] = chat_tools();
    none["tool_choice"] = "none".into();
    engine.say(CALLS);
    assert_eq!(server.ok(CHAT, &none)["choices"][0]["message"]["content"], CALLS);
    let mut cut = base.clone();
    cut["tools"] = chat_tools();
    cut["max_tokens"] = 75.into();
    engine.say(CALLS);
    let choice = server.ok(CHAT, &cut)["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "length");
    let mut one = base.clone();
    one["tools"] = chat_tools();
    one["parallel_tool_calls"] = false.into();
    engine.say(CALLS);
    let choice = server.ok(CHAT, &one)["choices"][0].clone();
    assert_eq!(choice["message"]["tool_calls"].as_array().map(Vec::len), Some(1));
    for (field, bad) in [
        ("tool_choice", json!("required")),
        ("tool_choice", json!({ "type": "function", "function": { "name": "none" } })),
        ("tools", json!([{ "type": "function" }])),
        ("tools", json!([{ "type": "function", "function": { "name": "a b" } }])),
        ("tools", json!([{ "type": "web_search" }])),
    ] {
        let mut body = base.clone();
        body[field] = bad;
        assert_eq!(server.post(CHAT, &body).status, 400, "{body}");
    }
}

#[test]
fn forced_calls_are_calls() {
    let server = Server::real();
    for seed in 0..3 {
        let body = json!({
            "messages": [{ "role": "user", "content": "x" }], "seed": seed, "max_tokens": 400,
            "tools": [{ "type": "function", "function": { "name": "pick", "strict": true, "parameters": {
                "type": "object", "additionalProperties": false, "required": ["n"],
                "properties": { "n": { "type": "integer", "minimum": 1, "maximum": 5 } } } } }],
            "tool_choice": "required", "parallel_tool_calls": false,
        });
        let choice = server.ok(CHAT, &body)["choices"][0].clone();
        assert_eq!(choice["finish_reason"], "tool_calls", "{choice}");
        let function = &choice["message"]["tool_calls"][0]["function"];
        assert_eq!(function["name"], "pick");
        let arguments: Value =
            serde_json::from_str(function["arguments"].as_str().expect("text")).expect("JSON");
        assert!(arguments["n"].as_i64().is_some_and(|n| (1..=5).contains(&n)), "{arguments}");
    }
}

#[test]
fn thoughts_are_told_apart() {
    let (server, engine) = Server::scripted();
    let body = json!({ "messages": [{ "role": "user", "content": "x" }] });
    engine.say("<think>\nhm\n</think>\n\nYes.");
    let answer = server.ok(CHAT, &body);
    let message = &answer["choices"][0]["message"];
    assert_eq!(
        (&message["reasoning_content"], &message["content"]),
        (&json!("hm"), &json!("Yes."))
    );
    assert!(
        answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
            .as_u64()
            .is_some_and(|n| n > 0)
    );
    // They go back in as they came out.
    let history = json!({ "messages": [{ "role": "user", "content": "x" }, message, { "role": "user", "content": "y" }] });
    let prompt = server.ok("/apply-template", &history)["prompt"].clone();
    assert!(
        prompt.as_str().is_some_and(|p| p.contains("<think>\nhm\n</think>\n\nYes.")),
        "{prompt}"
    );
}

fn message(extra: &Value) -> Value {
    let mut body = json!({ "model": "tiny", "max_tokens": 500, "messages": [{ "role": "user", "content": "hi" }] });
    for (name, value) in extra.as_object().into_iter().flatten() {
        body[name] = value.clone();
    }
    body
}

#[test]
fn anthropic_answers_have_blocks() {
    let (server, engine) = Server::scripted();
    engine.say("<think>\nhm\n</think>\n\nHello.");
    let answer = server.ok(MESSAGES, &message(&json!({ "system": "be nice" })));
    assert_eq!((&answer["type"], &answer["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!(
        answer["content"][0],
        json!({ "type": "thinking", "thinking": "hm", "signature": "" })
    );
    assert_eq!(answer["content"][1], json!({ "type": "text", "text": "Hello." }));
    assert_eq!(
        (&answer["stop_reason"], &answer["stop_sequence"]),
        (&json!("end_turn"), &Value::Null)
    );
    engine.say("a STOP b");
    let answer = server.ok(MESSAGES, &message(&json!({ "stop_sequences": ["x", "STOP"] })));
    assert_eq!(
        (&answer["stop_reason"], &answer["stop_sequence"]),
        (&json!("stop_sequence"), &json!("STOP"))
    );
    assert_eq!(answer["content"][0]["text"], "a ");
    engine.say("long");
    let answer = server.ok(MESSAGES, &message(&json!({ "max_tokens": 2 })));
    assert_eq!(answer["stop_reason"], "max_tokens");
    engine.say(CALLS);
    let answer = server.ok(MESSAGES, &message(&json!({ "tools": anthropic_tools() })));
    assert_eq!(answer["stop_reason"], "tool_use");
    let uses: Vec<&Value> = answer["content"]
        .as_array()
        .expect("blocks")
        .iter()
        .filter(|b| b["type"] == "tool_use")
        .collect();
    assert_eq!(
        (&uses[0]["name"], &uses[0]["input"]),
        (&json!("weather"), &json!({ "city": "Köln \"🙂\"" }))
    );
    assert_eq!((&uses[1]["name"], &uses[1]["input"]), (&json!("time"), &json!({})));
    // The same conversation, told onwards.
    let history = json!({ "messages": [
        { "role": "user", "content": [{ "type": "text", "text": "hi", "cache_control": { "type": "ephemeral" } }] },
        { "role": "assistant", "content": answer["content"] },
        { "role": "user", "content": [
            { "type": "tool_result", "tool_use_id": uses[0]["id"], "content": "rain" },
            { "type": "tool_result", "tool_use_id": uses[1]["id"], "content": [{ "type": "text", "text": "noon" }], "is_error": true },
            { "type": "text", "text": "go on" }] },
    ], "tools": anthropic_tools() });
    let count = server.ok(
        "/v1/messages/count_tokens",
        &json!({ "messages": history["messages"], "tools": history["tools"] }),
    );
    engine.say("ok");
    let answer = server.ok(MESSAGES, &message(&history));
    assert_eq!(answer["usage"]["input_tokens"], count["input_tokens"]);
    let seen = engine.seen().pop().expect("a request");
    assert_eq!(Some(seen.prompt.len() as u64), count["input_tokens"].as_u64());
}

#[test]
fn anthropic_streams_open_and_close_what_they_send() {
    let (server, engine) = Server::scripted();
    engine.say(&format!("<think>\nhm\n</think>\n\n{CALLS}"));
    let body = message(&json!({ "stream": true, "tools": anthropic_tools() }));
    let events = named(&server.post(MESSAGES, &body));
    let mut open: Option<Value> = None;
    let mut blocks: Vec<(Value, String)> = Vec::new();
    for (name, event) in &events {
        assert_eq!(event["type"], name.as_str());
        match name.as_str() {
            "content_block_start" => {
                assert!(open.is_none(), "a block in a block");
                assert_eq!(event["index"].as_u64(), Some(blocks.len() as u64));
                open = Some(event["index"].clone());
                blocks.push((event["content_block"].clone(), String::new()));
            }
            "content_block_delta" => {
                assert_eq!(open.as_ref(), Some(&event["index"]));
                let delta = &event["delta"];
                let text =
                    ["text", "thinking", "partial_json"].iter().find_map(|f| delta[*f].as_str());
                blocks.last_mut().expect("a block").1 += text.unwrap_or_default();
            }
            "content_block_stop" => assert_eq!(open.take().as_ref(), Some(&event["index"])),
            _ => {}
        }
    }
    let kinds: Vec<&Value> = blocks.iter().map(|(b, _)| &b["type"]).collect();
    assert_eq!(kinds, ["thinking", "text", "tool_use", "tool_use"]);
    assert_eq!(blocks[0].1, "hm");
    assert_eq!(
        serde_json::from_str::<Value>(&blocks[2].1).expect("JSON"),
        json!({ "city": "Köln \"🙂\"" })
    );
    let order: Vec<&str> = events.iter().map(|(n, _)| n.as_str()).collect();
    assert_eq!((order[0], order[order.len() - 1]), ("message_start", "message_stop"));
    let end = &events[events.len() - 2].1;
    assert_eq!(end["delta"]["stop_reason"], "tool_use");
    assert!(end["usage"]["output_tokens"].as_u64().is_some_and(|n| n > 0));
    // An error in the middle.
    engine.script(Script { tokens: engine.bytes(b"x"), finish: None, hold_after: None });
    let events = named(&server.post(MESSAGES, &message(&json!({ "stream": true }))));
    assert_eq!(events.last().map(|(n, _)| n.as_str()), Some("error"));
}

#[test]
fn anthropic_requests_are_checked() {
    let (server, engine) = Server::scripted();
    for (extra, word) in [
        (json!({ "max_tokens": 0 }), "max_tokens"),
        (json!({ "max_tokens": null }), "max_tokens"),
        (json!({ "temperature": 1.5 }), "temperature"),
        (json!({ "messages": [{ "role": "system", "content": "x" }] }), "role"),
        (
            json!({ "messages": [{ "role": "user", "content": "x" }, { "role": "assistant", "content": "y" }] }),
            "last",
        ),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image", "source": {} }] }] }),
            "image",
        ),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "tool_use", "id": "a", "name": "b", "input": {} }] }] }),
            "cannot have",
        ),
        (json!({ "tools": [{ "type": "bash_20250124", "name": "bash" }] }), "type"),
        (json!({ "mcp_servers": [] }), "connectors"),
        (json!({ "tool_choice": { "type": "any" } }), "no tools"),
    ] {
        let response = server.post(MESSAGES, &message(&extra));
        assert_eq!(response.status, 400, "{extra}");
        let body = response.json();
        assert_eq!(body["error"]["type"], "invalid_request_error");
        assert!(
            body["error"]["message"].as_str().is_some_and(|m| m.contains(word)),
            "{extra}: {body}"
        );
    }
    engine.say("x");
    let fine = json!({ "metadata": { "user_id": "u" }, "thinking": { "type": "enabled", "budget_tokens": 100 },
        "top_k": 5, "service_tier": "auto" });
    server.ok(MESSAGES, &message(&fine));
    engine.say("{}");
    let format = json!({ "output_config": { "format": { "type": "json_schema", "schema": { "type": "object" } } } });
    server.ok(MESSAGES, &message(&format));
    assert!(engine.seen().pop().expect("a request").constrained);
}

fn items(answer: &Value) -> Vec<&str> {
    answer["output"].as_array().expect("items").iter().filter_map(|i| i["type"].as_str()).collect()
}

/// The kinds of events of a stream, whose numbers and last object are right.
fn response_stream(
    server: &Server,
    engine: &Scripted,
    text: &str,
    body: &Value,
) -> (Vec<String>, Value) {
    engine.say(text);
    let mut body = body.clone();
    body["stream"] = true.into();
    let events = named(&server.post(RESPONSES, &body));
    for (i, (name, event)) in events.iter().enumerate() {
        assert_eq!((&event["type"], &event["sequence_number"]), (&json!(name), &json!(i)));
    }
    let last = events.last().expect("events").1["response"].clone();
    (events.into_iter().map(|(name, _)| name).collect(), last)
}

#[test]
fn responses_have_items() {
    let (server, engine) = Server::scripted();
    let body = json!({ "input": "hi", "instructions": "be brief", "metadata": { "a": "b" }, "store": true });
    engine.say("Hello.");
    let answer = server.ok(RESPONSES, &body);
    assert_eq!((&answer["object"], &answer["status"]), (&json!("response"), &json!("completed")));
    assert_eq!((&answer["store"], &answer["metadata"]), (&json!(false), &json!({ "a": "b" })));
    assert_eq!(answer["output"][0]["content"][0]["text"], "Hello.");
    let (kinds, last) = response_stream(&server, &engine, "Hello.", &body);
    assert_eq!(
        &kinds[..4],
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added"
        ]
    );
    assert_eq!(
        &kinds[kinds.len() - 4..],
        [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed"
        ]
    );
    assert_eq!(last["output"][0]["content"], answer["output"][0]["content"]);
    assert_eq!(last["usage"]["output_tokens"], answer["usage"]["output_tokens"]);
    engine.say("Hello.");
    let short = server.ok(RESPONSES, &json!({ "input": "hi", "max_output_tokens": 2 }));
    assert_eq!(
        (&short["status"], &short["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );

    let tools: Value = functions()
        .as_array()
        .expect("a list")
        .iter()
        .map(|f| {
            let mut f = f.clone();
            f["type"] = "function".into();
            f
        })
        .collect();
    let body = json!({ "input": "hi", "tools": tools });
    let text = format!("<think>\nhm\n</think>\n\n{CALLS}");
    engine.say(&text);
    let answer = server.ok(RESPONSES, &body);
    assert_eq!(items(&answer), ["reasoning", "message", "function_call", "function_call"]);
    let (kinds, last) = response_stream(&server, &engine, &text, &body);
    assert_eq!(items(&last), items(&answer));
    assert_eq!(last["output"][2]["arguments"], answer["output"][2]["arguments"]);
    assert_eq!(kinds.iter().filter(|k| *k == "response.function_call_arguments.done").count(), 2);
    // The answer and the outputs of its calls go back in.
    let mut input =
        vec![json!({ "role": "user", "content": [{ "type": "input_text", "text": "hi" }] })];
    input.extend(answer["output"].as_array().expect("items").iter().cloned());
    for call in &answer["output"].as_array().expect("items")[2..] {
        input.push(
            json!({ "type": "function_call_output", "call_id": call["call_id"], "output": "fine" }),
        );
    }
    engine.say("ok");
    server.ok(RESPONSES, &json!({ "input": input, "tools": tools }));
    for (field, bad) in [
        ("previous_response_id", json!("resp_1")),
        ("conversation", json!("c")),
        ("background", json!(true)),
        ("truncation", json!("auto")),
        ("tools", json!([{ "type": "web_search" }])),
        ("input", json!([])),
        ("input", json!([{ "type": "item_reference", "id": "x" }])),
        ("include", json!(["file_search_call.results"])),
        ("top_logprobs", json!(3)),
    ] {
        let mut body = json!({ "input": "hi" });
        body[field] = bad;
        assert_eq!(server.post(RESPONSES, &body).status, 400, "{body}");
    }
    engine.script(Script { tokens: engine.bytes(b"x"), finish: None, hold_after: None });
    let mut failing = json!({ "input": "hi" });
    failing["stream"] = true.into();
    let events = named(&server.post(RESPONSES, &failing));
    assert_eq!(events.last().map(|(n, _)| n.as_str()), Some("response.failed"));
    engine.script(Script {
        tokens: engine.bytes(b"lp"),
        finish: Some(Finish::Stop),
        hold_after: None,
    });
    let with =
        json!({ "input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1 });
    let answer = server.ok(RESPONSES, &with);
    assert_eq!(answer["output"][0]["content"][0]["logprobs"].as_array().map(Vec::len), Some(2));
}
