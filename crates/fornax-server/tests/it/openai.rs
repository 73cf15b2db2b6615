//! OpenAI's endpoints on the tiny model: that every field does what it says.

use std::sync::Arc;

use fornax_engine::serve::ServeOptions;
use fornax_server::Options;
use serde_json::{Value, json};

use crate::server::{Server, engine, served};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn user(text: &str) -> Value {
    json!([{ "role": "user", "content": text }])
}

fn text(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().expect("text")
}

#[test]
fn a_chat_is_answered() {
    let server = Server::real();
    let answer =
        server.ok(CHAT, &json!({ "messages": user("hi"), "max_tokens": 8, "temperature": 0 }));
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], "tiny");
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["role"], "assistant");
    assert!(choice["message"]["content"].is_string());
    let usage = &answer["usage"];
    let n = usage["completion_tokens"].as_u64().expect("a number");
    assert!(n <= 8 && (n == 8) == (choice["finish_reason"] == "length"));
    assert_eq!(usage["total_tokens"].as_u64(), usage["prompt_tokens"].as_u64().map(|p| p + n));
    let again =
        server.ok(CHAT, &json!({ "messages": user("hi"), "max_tokens": 8, "temperature": 0 }));
    assert_eq!(text(&again), text(&answer));
    let cached = again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    assert!(cached < usage["prompt_tokens"].as_u64());
}

#[test]
fn seeds_decide_whatever_runs_beside() {
    let server = Server::real();
    let body = |seed: u64| json!({ "messages": user("count"), "max_tokens": 24, "temperature": 1, "seed": seed });
    let alone = text(&server.ok(CHAT, &body(42))).to_owned();
    for _ in 0..2 {
        assert_eq!(text(&server.ok(CHAT, &body(42))), alone);
    }
    assert_ne!(text(&server.ok(CHAT, &body(43))), alone);
    std::thread::scope(|scope| {
        let others: Vec<_> = (0..7)
            .map(|s| {
                scope.spawn({
                    let (server, body) = (&server, body(100 + s));
                    move || server.ok(CHAT, &body)
                })
            })
            .collect();
        assert_eq!(text(&server.ok(CHAT, &body(42))), alone);
        for other in others {
            other.join().expect("a client");
        }
    });
    let two = server
        .ok(CHAT, &json!({ "messages": user("count"), "max_tokens": 24, "seed": 42, "n": 2 }));
    assert_eq!(two["choices"][0]["message"]["content"], alone);
    assert_ne!(two["choices"][1]["message"]["content"], alone);
    for seed in [json!(0), json!(-1), json!(1u64 << 32), json!(1u64 << 63)] {
        let body = json!({ "messages": user("x"), "max_tokens": 1, "seed": seed });
        server.ok(CHAT, &body);
    }
}

#[test]
fn sampling_fields_have_an_effect() {
    let server = Server::real();
    let run = |extra: Value| {
        let mut body = json!({ "prompt": "the quick", "max_tokens": 24, "seed": 5 });
        for (name, value) in extra.as_object().expect("fields") {
            body[name] = value.clone();
        }
        server.ok(COMPLETIONS, &body)["choices"][0]["text"].as_str().expect("text").to_owned()
    };
    let greedy = run(json!({ "temperature": 0 }));
    for same in [
        json!({ "top_k": 1 }),
        json!({ "top_p": 0 }),
        json!({ "min_p": 1 }),
        json!({ "temperature": 0, "top_k": -1 }),
        json!({ "temperature": 0, "top_k": 1_000_000_000, "top_p": 0.5, "seed": 9 }),
    ] {
        assert_eq!(run(same.clone()), greedy, "{same}");
    }
    for different in [
        json!({ "temperature": 2 }),
        json!({ "temperature": 0, "repetition_penalty": 5 }),
        json!({ "temperature": 0, "repeat_penalty": 5, "repeat_last_n": 4 }),
        json!({ "temperature": 0, "frequency_penalty": 2 }),
        json!({ "temperature": 0, "presence_penalty": 2 }),
    ] {
        assert_ne!(run(different.clone()), greedy, "{different}");
    }
    let forced = run(json!({ "temperature": 0, "logit_bias": { "5": 100 } }));
    assert_eq!(forced, "&".repeat(24));
    for (field, bad) in [
        ("temperature", json!(-1)),
        ("temperature", json!(2.5)),
        ("top_p", json!(1.5)),
        ("top_p", json!(-0.1)),
        ("min_p", json!(2)),
        ("top_k", json!(-2)),
        ("repetition_penalty", json!(0)),
        ("logit_bias", json!({ "999999": 1 })),
        ("logit_bias", json!({ "x": 1 })),
        ("logit_bias", json!({ "5": 101 })),
        ("n", json!(0)),
        ("seed", json!(1.5)),
    ] {
        let response = server.post(COMPLETIONS, &json!({ "prompt": "x", field: bad }));
        assert_eq!(response.status, 400, "{field}: {bad}");
        let param = response.json()["error"]["param"].as_str().map(str::to_owned);
        assert!(param.is_some_and(|p| p.starts_with(field)), "{field}: {bad}");
    }
    let both = json!({ "prompt": "x", "repetition_penalty": 2, "repeat_penalty": 2 });
    assert_eq!(server.post(COMPLETIONS, &both).status, 400);
}

#[test]
fn prompts_come_as_text_as_ids_and_as_lists_of_both() {
    let server = Server::real();
    let ids = server.ok("/tokenize", &json!({ "content": "hello world" }))["tokens"].clone();
    let run = |prompt: Value| {
        server.ok(COMPLETIONS, &json!({ "prompt": prompt, "max_tokens": 4, "temperature": 0 }))
    };
    let one = run(json!("hello world"));
    let text = one["choices"][0]["text"].clone();
    assert_eq!(run(ids.clone())["choices"][0]["text"], text);
    let two = run(json!([ids, [5, 6, 7]]));
    assert_eq!(two["choices"][0]["text"], text);
    assert_eq!(two["choices"][1]["index"], 1);
    assert_eq!(
        two["usage"]["prompt_tokens"].as_u64(),
        one["usage"]["prompt_tokens"].as_u64().map(|p| p + 3)
    );
    let body = json!({ "prompt": ["hello world", "hello world"], "n": 2, "max_tokens": 3, "stream": true,
        "stream_options": { "include_usage": true }, "seed": 1 });
    let chunks = server.post(COMPLETIONS, &body).chunks();
    let ends = chunks.iter().filter(|c| c["choices"][0]["finish_reason"].is_string());
    let mut indices: Vec<u64> = ends.filter_map(|c| c["choices"][0]["index"].as_u64()).collect();
    indices.sort_unstable();
    assert_eq!(indices, [0, 1, 2, 3]);
    let usage = &chunks.last().expect("a chunk")["usage"];
    let single = one["usage"]["prompt_tokens"].as_u64().expect("a number");
    assert_eq!(usage["prompt_tokens"].as_u64(), Some(2 * single));
}

#[test]
fn text_and_tokens_go_both_ways() {
    let server = Server::real();
    for content in ["", " ", "hello world", "漢字🙂é", "a\u{0}b", "<|im_start|>user", "  x\n\n"]
    {
        let tokens = server.ok("/tokenize", &json!({ "content": content }))["tokens"].clone();
        assert_eq!(server.ok("/detokenize", &json!({ "tokens": tokens }))["content"], content);
        let plain = json!({ "content": content, "parse_special": false, "with_pieces": true });
        let pieces = server.ok("/tokenize", &plain)["tokens"].clone();
        let bytes: Vec<u8> = pieces
            .as_array()
            .expect("a list")
            .iter()
            .flat_map(|p| match &p["piece"] {
                Value::String(text) => text.clone().into_bytes(),
                list => list
                    .as_array()
                    .expect("bytes")
                    .iter()
                    .map(|b| b.as_u64().expect("a byte") as u8)
                    .collect(),
            })
            .collect();
        assert_eq!(bytes, content.as_bytes());
    }
    assert_eq!(
        server.ok("/tokenize", &json!({ "content": "<|im_start|>" }))["tokens"],
        json!([380])
    );
    assert_eq!(server.post("/detokenize", &json!({ "tokens": [384] })).status, 400);
}

#[test]
fn embeddings_are_unit_vectors() {
    let server = Server::real();
    let run = |body: Value| server.ok("/v1/embeddings", &body);
    let answer = run(json!({ "input": ["hello world", "hello world", "other"] }));
    let vector = |i: usize| -> Vec<f64> {
        let list = answer["data"][i]["embedding"].as_array().expect("a list");
        list.iter().map(|v| v.as_f64().expect("a number")).collect()
    };
    assert_eq!(vector(0).len(), 64);
    assert_eq!(vector(0), vector(1));
    assert_ne!(vector(0), vector(2));
    let length: f64 = vector(0).iter().map(|v| v * v).sum();
    assert!((length - 1.0).abs() < 1e-5, "{length}");
    assert_eq!(answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]);
    let last = run(json!({ "input": "hello world", "pooling": "last" }));
    assert_ne!(last["data"][0]["embedding"], answer["data"][0]["embedding"]);
    let base64 =
        run(json!({ "input": "hello world", "encoding_format": "base64", "dimensions": 64 }));
    let text = base64["data"][0]["embedding"].as_str().expect("text");
    assert_eq!(text.len(), (64 * 4usize).div_ceil(3) * 4);
    for (field, bad) in [
        ("dimensions", json!(32)),
        ("pooling", json!("cls")),
        ("input", json!([])),
        ("encoding_format", json!("int8")),
    ] {
        let mut body = json!({ "input": "x" });
        body[field] = bad;
        let response = server.post("/v1/embeddings", &body);
        assert_eq!(response.status, 400);
        assert_eq!(response.json()["error"]["param"], field);
    }
}

#[test]
fn answers_have_the_form_that_was_asked_for() {
    let server = Server::real();
    let schema = json!({
        "type": "object", "additionalProperties": false, "required": ["kind", "size", "ok"],
        "properties": {
            "kind": { "enum": ["cat", "dog"] },
            "size": { "type": "integer", "minimum": 1, "maximum": 9 },
            "ok": { "type": "boolean" },
        },
    });
    for seed in 0..3 {
        let body = json!({
            "messages": user("an animal"), "seed": seed, "max_tokens": 200,
            "response_format": { "type": "json_schema", "json_schema": { "name": "animal", "schema": schema } },
        });
        let answer = server.ok(CHAT, &body);
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        let value: Value = serde_json::from_str(text(&answer)).expect("JSON");
        assert!(["cat", "dog"].contains(&value["kind"].as_str().expect("a word")));
        assert!(value["size"].as_i64().is_some_and(|n| (1..=9).contains(&n)));
        assert!(value["ok"].is_boolean());
        assert_eq!(value.as_object().map(serde_json::Map::len), Some(3));
    }
    let regex = json!({ "prompt": "x", "max_tokens": 50,
        "response_format": { "type": "regex", "regex": "[ab]{3}-[0-9]{2}" } });
    let answer = server.ok(COMPLETIONS, &regex);
    let found = answer["choices"][0]["text"].as_str().expect("text");
    assert_eq!(found.len(), 6);
    assert_eq!(found.as_bytes()[3], b'-');
    let gbnf = json!({ "prompt": "x", "max_tokens": 50,
        "response_format": { "type": "gbnf", "grammar": "root ::= \"yes\" | \"no\"" } });
    let answer = server.ok(COMPLETIONS, &gbnf);
    assert!(["yes", "no"].contains(&answer["choices"][0]["text"].as_str().expect("text")));
}

#[test]
fn several_models_are_told_apart_by_name() {
    let make = || Arc::new(engine(&ServeOptions { max_running: 2, ..ServeOptions::default() }));
    let server =
        Server::new(vec![served("one", make()), served("two", make())], Options::default());
    let list = server.get("/v1/models").json();
    let ids: Vec<&str> =
        list["data"].as_array().expect("a list").iter().filter_map(|m| m["id"].as_str()).collect();
    assert_eq!(ids, ["one", "two"]);
    for model in ["one", "two"] {
        let body = json!({ "model": model, "messages": user("x"), "max_tokens": 1 });
        assert_eq!(server.ok(CHAT, &body)["model"], model);
    }
    assert_eq!(server.ok(CHAT, &json!({ "messages": user("x"), "max_tokens": 1 }))["model"], "one");
    let missing = server.post(CHAT, &json!({ "model": "three", "messages": user("x") }));
    let said = missing.json()["error"]["message"].to_string();
    assert!(said.contains("three") && said.contains("one, two"), "{said}");
    assert_eq!(server.get("/health").json()["models"].as_array().map(Vec::len), Some(2));
}

#[test]
fn figures_are_counted() {
    let server = Server::real();
    server
        .ok(CHAT, &json!({ "messages": user("hi"), "max_tokens": 5, "logit_bias": { "5": 100 } }));
    server.post(CHAT, &json!({}));
    let response = server.get("/metrics");
    assert!(response.header("content-type").is_some_and(|t| t.starts_with("text/plain")));
    let page = response.text();
    for line in [
        "fornax_generated_tokens_total 5",
        "fornax_time_to_first_token_seconds_count 1",
        "fornax_inter_token_seconds_count 4",
        "fornax_request_seconds_count 1",
        "fornax_http_answers_total{endpoint=\"/v1/chat/completions\",status=\"200\"} 1",
        "fornax_http_answers_total{endpoint=\"/v1/chat/completions\",status=\"400\"} 1",
        "fornax_running_requests{model=\"tiny\"} 0",
        "fornax_healthy{model=\"tiny\"} 1",
    ] {
        assert!(page.lines().any(|l| l == line), "{line} is not in\n{page}");
    }
    // Every sample has a type, and buckets never fall.
    let mut last = (String::new(), 0.0);
    for line in page.lines().filter(|l| !l.starts_with('#')) {
        let (name, value) = line.rsplit_once(' ').expect("a sample");
        let value: f64 = value.parse().expect("a number");
        let base = name.split('{').next().expect("a name");
        let family = ["_bucket", "_sum", "_count"].iter().fold(base, |n, s| n.trim_end_matches(s));
        assert!(page.contains(&format!("# TYPE {family} ")), "{line}");
        if base.ends_with("_bucket") && last.0 == base {
            assert!(value >= last.1, "{line}");
        }
        last = (base.to_owned(), value);
    }
}
