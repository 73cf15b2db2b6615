//! Bytes on raw sockets, and fields at the edges of what numbers and lists can be: each gets an answer below 500 or the end of
//! its connection, in time, and the server is as well afterwards as before.

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fornax_engine::serve::ServeOptions;
use fornax_server::{Options, Served};
use serde_json::{Map, Value, json};

use crate::client::{connect, request};
use crate::server::{Server, engine, served};

const CHAT: &str = "/v1/chat/completions";
const HEAD: &str =
    "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";

/// Status of the first answer to raw bytes; none where the connection just ended.
fn raw(server: &Server, bytes: &[u8]) -> Option<u16> {
    let mut stream = connect(server.addr);
    // What it refuses early it need not read to the end.
    let _ = stream.write_all(bytes);
    // Waiting for the answer, it may be asked whether it is still there.
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = answer.strip_prefix(b"HTTP/1.1 100 Continue\r\n\r\n").unwrap_or(&answer);
    let line = String::from_utf8_lossy(&answer[..answer.len().min(12)]).into_owned();
    let status = line.strip_prefix("HTTP/1.1 ").or_else(|| line.strip_prefix("HTTP/1.0 "));
    status.map(|s| s.parse().unwrap_or_else(|_| panic!("no status: {line:?}")))
}

fn is_well(server: &Server) {
    assert_eq!(server.get("/health").status, 200);
    let body = json!({ "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 1 });
    assert_eq!(server.post(CHAT, &body).status, 200);
}

#[test]
fn framing_that_is_none_is_refused_or_ends_the_connection() {
    let server = Server::real();
    let chunked = format!("{HEAD}transfer-encoding: chunked\r\n\r\n");
    let body = r#"{"content":"x"}"#;
    let mut attacks: Vec<Vec<u8>> = [
        "zz\r\n",
        "-1\r\nx\r\n0\r\n\r\n",
        "ffffffffffffffff\r\n{}\r\n0\r\n\r\n",
        "ffffffffffffffffffffffff\r\n{}",
        "f\n{\"content\":\"x\"}\n0\n\n",
        "5\r\n{\"content\":\"x\"}\r\n0\r\n\r\n",
        "f;a=b\r\n{\"content\":\"x\"}\r\n0\r\nx: y\r\nx\r\n",
        "0\r\n",
        "",
    ]
    .iter()
    .map(|rest| format!("{chunked}{rest}").into_bytes())
    .collect();
    attacks.push(format!("{chunked}f;{}\r\n{body}\r\n0\r\n\r\n", "x".repeat(1 << 20)).into_bytes());
    attacks.push(
        format!("{chunked}f\r\n{body}\r\n0\r\n{}\r\n", "a: b\r\n".repeat(50_000)).into_bytes(),
    );
    for head in [
        "content-length: 15\r\ntransfer-encoding: chunked\r\n",
        "content-length: 15\r\ncontent-length: 16\r\n",
        "content-length: 15, 16\r\n",
        "content-length: -1\r\n",
        "content-length: 1e3\r\n",
        "content-length: 99999999999999999999999999\r\n",
        "transfer-encoding: gzip\r\n",
        "transfer-encoding: chunked, identity\r\n",
        "expect: 100-continue\r\ncontent-length: 15\r\n",
        "expect: the unexpected\r\ncontent-length: 15\r\n",
        "upgrade: h2c\r\nconnection: upgrade\r\ncontent-length: 15\r\n",
        " folded: x\r\ncontent-length: 15\r\n",
        "na me: x\r\ncontent-length: 15\r\n",
        "nul: a\0b\r\ncontent-length: 15\r\n",
        "content-length : 15\r\n",
    ] {
        attacks.push(format!("{HEAD}{head}\r\n{body}").into_bytes());
    }
    attacks.push(format!("{HEAD}x: {}\r\n\r\n", "y".repeat(4 << 20)).into_bytes());
    attacks.push(format!("{HEAD}{}\r\n", "x: y\r\n".repeat(20_000)).into_bytes());
    attacks.push(
        format!("GET /{} HTTP/1.1\r\nhost: localhost\r\n\r\n", "a".repeat(1 << 20)).into_bytes(),
    );
    for line in [
        "GET /health HTTP/0.9",
        "GET  /health  HTTP/1.1",
        "GET http://evil.example/health HTTP/1.1",
        "GET //localhost/health HTTP/1.1",
        "GET /health#x HTTP/1.1",
        "GET /he\0alth HTTP/1.1",
        "GET /%ff%00%2e%2e HTTP/1.1",
        "CONNECT localhost:80 HTTP/1.1",
        "OPTIONS * HTTP/1.1",
        "TRACE / HTTP/1.1",
        "PRI * HTTP/2.0",
        "G\u{c8}T / HTTP/1.1",
        "",
    ] {
        attacks.push(format!("{line}\r\nhost: localhost\r\n\r\n").into_bytes());
    }
    attacks.push(b"GET / HTTP/1.1\r\nhost: \xff\xfe\r\n\r\n".to_vec());
    attacks.push(b"GET / HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n".to_vec());
    for attack in attacks {
        let began = Instant::now();
        let status = raw(&server, &attack);
        let shown = String::from_utf8_lossy(&attack[..attack.len().min(200)]).into_owned();
        assert!(status.is_none_or(|s| s < 500), "{status:?} for {shown:?}");
        assert!(began.elapsed() < Duration::from_secs(20), "{:?} for {shown:?}", began.elapsed());
    }
    is_well(&server);
    // One request behind another on one connection: each gets its own answer, in order.
    let one = |word: &str| {
        let body = format!("{{\"content\":\"{word}\"}}");
        format!("{HEAD}content-length: {}\r\n\r\n{body}", body.len())
    };
    let both = one("a")
        + &one("no such {")
        + "GET /none HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    let mut stream = connect(server.addr);
    stream.write_all(both.as_bytes()).expect("a connection");
    let mut answers = String::new();
    stream.read_to_string(&mut answers).expect("UTF-8");
    let statuses: Vec<&str> =
        answers.match_indices("HTTP/1.1 ").map(|(at, _)| &answers[at + 9..at + 12]).collect();
    assert_eq!(statuses, ["200", "200", "404"], "{answers}");
}

/// A body that is right but for what is to be tried.
fn right(path: &str) -> Map<String, Value> {
    let body = match path {
        "/v1/completions" => json!({ "prompt": "a", "max_tokens": 1 }),
        "/v1/responses" => json!({ "input": "a", "max_output_tokens": 1 }),
        "/v1/embeddings" => json!({ "input": "a" }),
        "/tokenize" => json!({ "content": "a" }),
        "/detokenize" => json!({ "tokens": [1] }),
        "/apply-template" | "/v1/messages/count_tokens" => {
            json!({ "messages": [{ "role": "user", "content": "a" }] })
        }
        _ => json!({ "messages": [{ "role": "user", "content": "a" }], "max_tokens": 1 }),
    };
    body.as_object().cloned().expect("an object")
}

#[test]
fn fields_at_the_edges_of_numbers_and_lists_never_fail_the_server() {
    // So little room that no answer is long.
    let engine = Arc::new(engine(&ServeOptions::default()));
    let server =
        Server::new(vec![Served { context: 48, ..served("tiny", engine) }], Options::default());
    let description = server.get("/openapi.json").json();
    let schemas = &description["components"]["schemas"];
    let numbers = [
        "0",
        "-0",
        "-1",
        "-2",
        "1.0",
        "1.5",
        "1e-400",
        "1e300",
        "4294967296",
        "2147483648",
        "9223372036854775808",
        "-9223372036854775809",
        "18446744073709551616",
        "\"1\"",
        "true",
        "null",
        "{}",
        "\"\"",
        "[\"\",\"\\u0000\"]",
    ];
    let mut tried = 0;
    for (path, operations) in description["paths"].as_object().expect("paths") {
        let schema =
            &operations["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"];
        let Some(name) = schema.as_str().and_then(|r| r.rsplit('/').next()) else { continue };
        for field in schemas[name]["properties"].as_object().expect("fields").keys() {
            for number in numbers {
                let mut body = right(path);
                body.remove(field);
                let rest = Value::from(body).to_string();
                let rest = rest.trim_start_matches('{').trim_end_matches('}');
                let comma = if rest.is_empty() { "" } else { "," };
                // Written by hand: a JSON writer would tidy the number up.
                let text = format!("{{\"{field}\":{number}{comma}{rest}}}");
                let began = Instant::now();
                let response = server.post_bytes(path, text.as_bytes());
                assert!(
                    response.status < 500 || response.status == 503,
                    "{path} {text}: {} {}",
                    response.status,
                    String::from_utf8_lossy(&response.body)
                );
                assert!(began.elapsed() < Duration::from_secs(30), "{path} {text}");
                tried += 1;
            }
        }
    }
    assert!(tried > 1500, "{tried} requests");
    is_well(&server);
}

#[test]
fn lists_without_end_are_refused_and_messages_quote_little() {
    let server = Server::real();
    let many = |n: usize, item: Value| Value::Array(vec![item; n]);
    let bias: Map<String, Value> = (0..200_000).map(|i| (i.to_string(), json!(1))).collect();
    let letters = "x".repeat(1 << 20);
    for (path, field, value) in [
        (CHAT, "n", json!(1_000_000_000u64)),
        (CHAT, "stop", many(10_000, json!("a"))),
        (CHAT, "stop", json!(letters)),
        (CHAT, "stop", json!([""])),
        (CHAT, "logit_bias", bias.into()),
        (CHAT, "logit_bias", json!({ "-1": 1 })),
        (CHAT, "logit_bias", json!({ "99999999999999999999": 1 })),
        (CHAT, "logit_bias", json!({ "1": 1e9 })),
        (CHAT, "logit_bias", json!({ letters.clone(): 1 })),
        (CHAT, letters.as_str(), json!(1)),
        (CHAT, "model", json!(letters)),
        (CHAT, "tool_choice", json!({ "type": "function", "function": { "name": letters } })),
        (CHAT, "messages", many(1, json!({ "role": letters, "content": "x" }))),
        ("/v1/completions", "prompt", many(1 << 20, json!(1))),
        ("/v1/completions", "prompt", json!([many(3, json!(4_000_000_000u64))])),
        ("/v1/embeddings", "input", many(1 << 20, json!("a"))),
        ("/v1/messages", "stop_sequences", many(10_000, json!("a"))),
        ("/detokenize", "tokens", json!([u64::MAX])),
    ] {
        let mut body = right(path);
        body.insert(field.to_owned(), value);
        let began = Instant::now();
        let response = server.post(path, &body.into());
        let short = &field[..field.len().min(40)];
        assert!(
            [400, 404, 413, 429].contains(&response.status),
            "{path} {short}: {}",
            response.status
        );
        assert!(response.body.len() < 20_000, "{path} {short}: {} bytes", response.body.len());
        assert!(began.elapsed() < Duration::from_secs(20), "{path} {short}");
    }
    is_well(&server);
}

#[test]
fn a_crowd_that_sends_nonsense_and_leaves_holds_nobody_up() {
    // Some read without having sent a request; they are let go this much earlier than in earnest.
    let limit = Duration::from_secs(2);
    let options = Options { head_timeout: limit, body_timeout: limit, ..Options::default() };
    let tiny = served("tiny", Arc::new(engine(&ServeOptions::default())));
    let server = Server::new(vec![tiny], options);
    let good = json!({ "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 40, "stream": true });
    let good =
        request("POST", CHAT, &[("content-type", "application/json")], good.to_string().as_bytes());
    std::thread::scope(|scope| {
        for client in 0..24usize {
            let (server, good) = (&server, &good);
            scope.spawn(move || {
                for round in 0..12 {
                    let mut stream = connect(server.addr);
                    match (client + round) % 4 {
                        0 => drop(stream.write_all(&good[..good.len() / 2])),
                        1 => drop(stream.write_all(good)),
                        2 => drop(stream.write_all(b"\0\xff{}\r\n\r\n")),
                        // Opened, and not a word.
                        _ => {}
                    }
                    if round % 3 == 0 {
                        let _ = stream.read(&mut [0; 64]);
                    }
                }
            });
        }
        for _ in 0..5 {
            is_well(&server);
        }
    });
    is_well(&server);
}
