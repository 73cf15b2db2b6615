//! Streams whose tokens are written down: characters and stop strings across tokens, framing, errors after the head.

use fornax_engine::serve::Finish;
use serde_json::{Value, json};

use crate::script::Script;
use crate::server::Server;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn chat(extra: &Value) -> Value {
    let mut body = json!({ "messages": [{ "role": "user", "content": "hi" }] });
    for (name, value) in extra.as_object().into_iter().flatten() {
        body[name] = value.clone();
    }
    body
}

/// The text of a chat's stream, the chunks, and why it ended.
fn streamed(server: &Server, extra: &Value) -> (String, Vec<Value>, String) {
    let mut body = chat(extra);
    body["stream"] = true.into();
    let chunks = server.post(CHAT, &body).chunks();
    let mut text = String::new();
    let mut finish = None;
    for chunk in &chunks {
        let Some(choice) = chunk["choices"].get(0) else { continue };
        text += choice["delta"]["content"].as_str().unwrap_or_default();
        if let Some(reason) = choice["finish_reason"].as_str() {
            assert!(finish.is_none(), "two ends");
            finish = Some(reason.to_owned());
        }
    }
    (text, chunks, finish.expect("an end"))
}

fn whole(server: &Server, extra: &Value) -> (String, String) {
    let answer = server.ok(CHAT, &chat(extra));
    let choice = &answer["choices"][0];
    let text = choice["message"]["content"].as_str().expect("text").to_owned();
    (text, choice["finish_reason"].as_str().expect("an end").to_owned())
}

#[test]
fn characters_come_whole_however_tokens_cut_them() {
    let (server, engine) = Server::scripted();
    let family = "👨‍👩‍👧".as_bytes();
    for (bytes, limit, expected) in [
        (&b"\xf0\x9f\x98\x8a"[..], 100, "😊"),
        (b"a\xe6\xad\xaab", 100, "a歪b"),
        (b"\xf0A", 100, "\u{fffd}A"),
        (b"ok\xf0\x9f", 100, "ok\u{fffd}"),
        (b"ok\xf0\x9f\x98\x8a", 4, "ok\u{fffd}"),
        (b"\xe2\x80A", 100, "\u{fffd}A"),
        (b"\xed\xa0\x80", 100, "\u{fffd}\u{fffd}\u{fffd}"),
        (b"\xff\xfe.", 100, "\u{fffd}\u{fffd}."),
        (b"a\0b", 100, "a\0b"),
        (family, 100, "👨‍👩‍👧"),
    ] {
        let extra = json!({ "max_tokens": limit });
        engine.say_pieces(&[bytes]);
        let (text, chunks, _) = streamed(&server, &extra);
        assert_eq!(text, expected, "{bytes:?}");
        engine.say_pieces(&[bytes]);
        assert_eq!(whole(&server, &extra).0, expected, "{bytes:?}");
        // A replacement stands for bytes that are no character, never for one that is about to come.
        if !expected.contains('\u{fffd}') {
            let early = chunks.iter().any(|c| c.to_string().contains('\u{fffd}'));
            assert!(!early, "{bytes:?}");
        }
    }
}

#[test]
fn stop_strings_end_the_text_wherever_tokens_are_cut() {
    let (server, engine) = Server::scripted();
    let pieces: [&[u8]; 4] = [b"al", b"pha be", b"ta ga", b"mma"];
    let five = json!(["1", "2", "3", "4", "pha"]);
    for (stop, expected, reason) in [
        (json!(["beta gamma"]), "alpha ", "stop"),
        (json!(["ta g", "zzz"]), "alpha be", "stop"),
        (json!(["beta gamma delta"]), "alpha beta gamma", "stop"),
        (json!([]), "alpha beta gamma", "stop"),
        (Value::Null, "alpha beta gamma", "stop"),
        (json!("a b"), "alph", "stop"),
        (five, "al", "stop"),
        (json!(["gamma", "a g"]), "alpha bet", "stop"),
    ] {
        let extra = json!({ "stop": stop });
        engine.say_pieces(&pieces);
        let (text, _, finish) = streamed(&server, &extra);
        assert_eq!((&*text, &*finish), (expected, reason), "{stop}");
        engine.say_pieces(&pieces);
        assert_eq!(whole(&server, &extra), (expected.to_owned(), reason.to_owned()), "{stop}");
    }
    // A held tail comes when the limit ends the answer, and a stop string may begin inside a character's bytes.
    engine.say("alpha bet");
    let limited = json!({ "stop": ["beta gamma"], "max_tokens": 9 });
    assert_eq!(whole(&server, &limited), ("alpha bet".into(), "stop".into()));
    engine.say("xé漢y");
    assert_eq!(whole(&server, &json!({ "stop": "漢" })).0, "xé");
    for bad in [json!([""]), json!(""), json!([1]), json!({}), json!(vec!["x"; 17])] {
        assert_eq!(server.post(CHAT, &chat(&json!({ "stop": bad }))).status, 400, "{bad}");
    }
}

#[test]
fn a_stop_string_cancels_what_is_left() {
    let (server, engine) = Server::scripted();
    let tokens = engine.bytes(b"one END two");
    engine.script(Script { tokens, finish: Some(Finish::Stop), hold_after: Some(8) });
    let answer = server.ok(CHAT, &chat(&json!({ "stop": "END" })));
    assert_eq!(answer["choices"][0]["message"]["content"], "one ");
    assert_eq!(answer["usage"]["completion_tokens"], 7);
    engine.wait_for_cancels(1);
}

#[test]
fn limits_are_exact_and_an_end_of_turn_is_none_of_the_text() {
    let (server, engine) = Server::scripted();
    for limit in [1, 2, 3, 5] {
        engine.say("hello");
        let answer =
            server.ok(CHAT, &chat(&json!({ "max_completion_tokens": limit, "max_tokens": 9 })));
        assert_eq!(answer["usage"]["completion_tokens"], limit);
        let reason = if limit < 5 { "length" } else { "stop" };
        assert_eq!(answer["choices"][0]["finish_reason"], reason);
    }
    let all = json!({ "max_tokens": -1 });
    engine.say("hello");
    assert_eq!(whole(&server, &all), ("hello".into(), "stop".into()));
    for limit in [json!(u32::MAX), json!(i64::MAX), Value::Null] {
        engine.say("hello");
        assert_eq!(whole(&server, &json!({ "max_tokens": limit })).0, "hello");
    }
    for bad in [json!(0), json!(-2), json!(1.5), json!("1"), json!(1e30), json!(true)] {
        let response = server.post(CHAT, &chat(&json!({ "max_tokens": bad })));
        assert_eq!(response.status, 400, "{bad}");
    }
}

#[test]
fn a_stream_has_one_head_one_usage_and_one_end() {
    let (server, engine) = Server::scripted();
    engine.say("hey");
    let (text, chunks, finish) =
        streamed(&server, &json!({ "stream_options": { "include_usage": true } }));
    assert_eq!((&*text, &*finish), ("hey", "stop"));
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({ "role": "assistant", "content": "" }));
    for field in ["id", "created", "model", "object", "system_fingerprint"] {
        assert!(chunks.iter().all(|c| c[field] == chunks[0][field]), "{field} changes");
    }
    let usages: Vec<&Value> = chunks.iter().filter(|c| !c["usage"].is_null()).collect();
    assert_eq!(usages.len(), 1);
    assert_eq!(usages[0], chunks.last().unwrap());
    assert_eq!(usages[0]["choices"], json!([]));
    assert_eq!(usages[0]["usage"]["completion_tokens"], 3);
    for options in [json!({}), json!({ "include_usage": false }), Value::Null] {
        engine.say("hey");
        let (_, chunks, _) = streamed(&server, &json!({ "stream_options": options }));
        assert!(chunks.iter().all(|c| c["usage"].is_null() && c["choices"] != json!([])));
    }
    let bad = server.post(CHAT, &chat(&json!({ "stream": "true" })));
    assert_eq!(bad.status, 400);
    let bad = server.post(CHAT, &chat(&json!({ "stream_options": { "include_usage": true } })));
    assert_eq!(bad.json()["error"]["param"], "stream_options");
}

#[test]
fn an_error_after_the_head_is_an_event_and_the_end() {
    let (server, engine) = Server::scripted();
    engine.script(Script { tokens: engine.bytes(b"so far"), finish: None, hold_after: None });
    let response = server.post(CHAT, &chat(&json!({ "stream": true })));
    assert_eq!(response.status, 200);
    let events = response.events();
    let (_, last) = events.last().expect("events");
    let last: Value = serde_json::from_str(last).expect("JSON");
    assert_eq!(last["error"]["type"], "server_error");
    engine.script(Script { tokens: engine.bytes(b"so far"), finish: None, hold_after: None });
    let response = server.post(CHAT, &chat(&json!({})));
    assert_eq!(response.status, 500);
    assert_eq!(response.json()["error"]["type"], "server_error");
    engine.say("fine");
    assert_eq!(whole(&server, &json!({})).0, "fine");
}

#[test]
fn log_probabilities_belong_to_the_text_that_is_shown() {
    let (server, engine) = Server::scripted();
    let extra = json!({ "logprobs": true, "top_logprobs": 2, "stop": "lo!" });
    engine.say("hello!");
    let answer = server.ok(CHAT, &chat(&extra));
    let content = answer["choices"][0]["logprobs"]["content"].as_array().expect("a list").clone();
    let tokens: String = content.iter().filter_map(|t| t["token"].as_str()).collect();
    assert_eq!(tokens, "hel");
    assert_eq!(content[0]["bytes"], json!([104]));
    assert_eq!(content[0]["logprob"], -0.5);
    assert_eq!(content[0]["top_logprobs"].as_array().map(Vec::len), Some(2));
    engine.say("hello!");
    let (_, chunks, _) = streamed(&server, &extra);
    let streamed: Vec<Value> = chunks
        .iter()
        .filter_map(|c| c["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(streamed, content);
    // Tokens of a character that is cut have bytes and no text of their own.
    engine.say("é");
    let answer = server.ok(CHAT, &chat(&json!({ "logprobs": true })));
    let content = &answer["choices"][0]["logprobs"]["content"];
    assert_eq!((&content[0]["bytes"], &content[1]["bytes"]), (&json!([0xc3]), &json!([0xa9])));
    assert_eq!(answer["choices"][0]["message"]["content"], "é");
    assert_eq!(server.post(CHAT, &chat(&json!({ "top_logprobs": 2 }))).status, 400);
}

#[test]
fn choices_have_seeds_of_their_own() {
    let (server, engine) = Server::scripted();
    for _ in 0..6 {
        engine.say("x");
    }
    let answer = server.ok(CHAT, &chat(&json!({ "n": 3, "seed": 42 })));
    let choices = answer["choices"].as_array().expect("a list");
    let indices: Vec<&Value> = choices.iter().map(|c| &c["index"]).collect();
    assert_eq!(indices, [0, 1, 2]);
    let prompt = answer["usage"]["prompt_tokens"].as_u64();
    assert_eq!(answer["usage"]["completion_tokens"], 3);
    server.ok(CHAT, &chat(&json!({ "n": 3, "seed": 42 })));
    let seen = engine.seen();
    let seeds: Vec<u64> = seen.iter().map(|s| s.seed).collect();
    assert_eq!(seeds[0], 42);
    assert!(seeds[1] != seeds[0] && seeds[2] != seeds[0] && seeds[1] != seeds[2]);
    assert_eq!(seeds[..3], seeds[3..]);
    assert_eq!(Some(seen[0].prompt.len() as u64), prompt);
}

#[test]
fn what_the_engine_is_told_is_what_was_asked() {
    let (server, engine) = Server::scripted();
    let seen = |extra: &Value| {
        engine.say("x");
        server.ok(CHAT, &chat(extra));
        engine.seen().pop().expect("a request")
    };
    assert!(!seen(&json!({ "temperature": 0, "top_k": 5, "min_p": 0.1 })).on_host);
    assert!(seen(&json!({ "logit_bias": { "5": -100 } })).on_host);
    assert!(seen(&json!({ "xtc_probability": 0.5 })).on_host);
    assert_eq!(seen(&json!({ "priority": -3 })).priority, -3);
    assert_eq!(seen(&json!({ "seed": -1 })).seed, u64::MAX);
    assert_eq!(seen(&json!({ "seed": 1u64 << 63 })).seed, 1 << 63);
    assert!(seen(&json!({ "response_format": { "type": "json_object" } })).constrained);
    assert!(!seen(&json!({ "response_format": { "type": "text" } })).constrained);
    let plain = seen(&json!({}));
    assert_ne!(plain.seed, seen(&json!({})).seed);
    assert_eq!(plain.max_new as usize + plain.prompt.len(), 1024);
    assert_eq!(seen(&json!({ "max_tokens": 7 })).max_new, 7);
}

#[test]
fn echo_gives_the_prompt_back_with_its_log_probabilities() {
    let server = Server::real();
    let body = json!({
        "prompt": "hello world", "echo": true, "logprobs": 1, "max_tokens": 2, "temperature": 0,
    });
    let answer = server.ok(COMPLETIONS, &body);
    let choice = &answer["choices"][0];
    let text = choice["text"].as_str().expect("text");
    assert!(text.starts_with("hello world"), "{text}");
    let logprobs = &choice["logprobs"];
    let tokens = logprobs["tokens"].as_array().expect("a list");
    let joined: String = tokens.iter().filter_map(Value::as_str).collect();
    assert_eq!(joined, text);
    assert!(logprobs["token_logprobs"][0].is_null());
    assert!(logprobs["token_logprobs"][1].as_f64().is_some_and(|p| p < 0.0));
    assert_eq!(logprobs["text_offset"][0], 0);
    assert_eq!(tokens.len(), logprobs["token_logprobs"].as_array().map_or(0, Vec::len));
    // The prompt alone, as evaluation harnesses ask for it.
    let body = json!({ "prompt": "hello world", "echo": true, "logprobs": 1, "max_tokens": 0 });
    let answer = server.ok(COMPLETIONS, &body);
    assert_eq!(answer["choices"][0]["text"], "hello world");
    assert_eq!(answer["usage"]["completion_tokens"], 0);
    let mut body = body;
    body["stream"] = true.into();
    let chunks = server.post(COMPLETIONS, &body).chunks();
    let text: String =
        chunks.iter().filter_map(|c| c["choices"][0]["text"].as_str().map(str::to_owned)).collect();
    assert_eq!(text, "hello world");
}
