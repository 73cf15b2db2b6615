//! Clients that leave, at every stage; servers that end; time that runs out.

use std::io::{BufReader, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use fornax_engine::serve::{Finish, Refused, ServeOptions};
use fornax_server::{Backend, Options};
use serde_json::{Value, json};

use crate::client::{self, chunk, connect, head, request};
use crate::script::{Script, Shared, quiet};
use crate::server::{Server, engine, served};

const CHAT: &str = "/v1/chat/completions";
const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

fn chat(extra: &Value) -> Vec<u8> {
    let mut body = json!({ "messages": [{ "role": "user", "content": "hi" }] });
    for (name, value) in extra.as_object().into_iter().flatten() {
        body[name] = value.clone();
    }
    request("POST", CHAT, &JSON, body.to_string().as_bytes())
}

/// Waits until `done`; a hang is a failure.
fn soon(what: &str, done: impl Fn() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < Duration::from_secs(20), "{what} did not happen");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_client_that_leaves_is_noticed_while_nothing_is_sent() {
    let (server, engine) = Server::scripted();
    for (i, stream) in [true, false].into_iter().enumerate() {
        // Held before the first token: as one that waits, or whose prompt is being read.
        engine.script(Script {
            tokens: engine.bytes(b"x"),
            finish: Some(Finish::Stop),
            hold_after: Some(0),
        });
        let mut socket = connect(server.addr);
        socket.write_all(&chat(&json!({ "stream": stream }))).expect("a connection");
        soon("the start", || engine.running.load(SeqCst) == 1);
        drop(socket);
        engine.wait_for_cancels(i + 1);
        soon("the end", || engine.running.load(SeqCst) == 0);
    }
}

#[test]
fn a_client_that_leaves_after_two_deltas_ends_the_request() {
    let (server, engine) = Server::scripted();
    engine.script(Script {
        tokens: engine.bytes(b"abcdef"),
        finish: Some(Finish::Stop),
        hold_after: Some(2),
    });
    let socket = connect(server.addr);
    (&socket).write_all(&chat(&json!({ "stream": true }))).expect("a connection");
    let mut reader = BufReader::new(&socket);
    let (status, headers) = head(&mut reader);
    assert_eq!(status, 200);
    assert!(headers.iter().any(|(n, v)| n == "content-type" && v == "text/event-stream"));
    let mut seen = String::new();
    while !seen.contains("\"b\"") {
        seen += &String::from_utf8(chunk(&mut reader).expect("more")).expect("UTF-8");
    }
    socket.shutdown(Shutdown::Both).expect("a connection");
    engine.wait_for_cancels(1);
}

#[test]
fn the_head_of_a_stream_comes_before_the_first_token() {
    let (server, engine) = Server::scripted();
    engine.script(Script {
        tokens: engine.bytes(b"x"),
        finish: Some(Finish::Stop),
        hold_after: Some(0),
    });
    let socket = connect(server.addr);
    (&socket).write_all(&chat(&json!({ "stream": true }))).expect("a connection");
    let mut reader = BufReader::new(&socket);
    assert_eq!(head(&mut reader).0, 200);
    let first = String::from_utf8(chunk(&mut reader).expect("a chunk")).expect("UTF-8");
    assert!(first.contains("\"role\":\"assistant\""), "{first}");
    engine.release();
    let mut rest = String::new();
    while let Some(more) = chunk(&mut reader) {
        rest += &String::from_utf8(more).expect("UTF-8");
    }
    assert!(rest.ends_with("data: [DONE]\n\n"), "{rest}");
}

#[test]
fn blocks_are_free_again_after_many_leave() {
    let handle = engine(&ServeOptions { max_running: 2, ..ServeOptions::default() });
    let server = Server::new(vec![served("tiny", Arc::new(handle.clone()))], Options::default());
    let long: String = "word ".repeat(120);
    for i in 0..50 {
        let body = json!({
            "stream": i % 2 == 0, "temperature": 1,
            "messages": [{ "role": "user", "content": if i % 3 == 0 { &long } else { "hi" } }],
        });
        let mut socket = connect(server.addr);
        let bytes = request("POST", CHAT, &JSON, body.to_string().as_bytes());
        socket.write_all(&bytes).expect("a connection");
        if i % 5 == 0 {
            // Some leave while it runs.
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(socket);
    }
    soon("freeing", || {
        let stats = handle.stats();
        stats.running + stats.waiting == 0 && stats.kv_blocks_used == 0
    });
    let answer = server.ok(
        CHAT,
        &json!({
            "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 3,
        }),
    );
    assert!(answer["usage"]["completion_tokens"].as_u64().is_some_and(|n| n <= 3));
}

#[test]
fn all_choices_are_taken_or_none() {
    let (server, engine) = Server::scripted();
    // Two are taken, the third is not.
    for _ in 0..2 {
        engine.script(Script {
            tokens: engine.bytes(b"x"),
            finish: Some(Finish::Stop),
            hold_after: Some(0),
        });
    }
    let handle = std::thread::spawn({
        let addr = server.addr;
        move || client::send(addr, &chat(&json!({ "n": 2 })))
    });
    soon("the start", || engine.running.load(SeqCst) == 2);
    engine.refuse(Refused::QueueFull { retry_after_s: 7 });
    let full = client::send(server.addr, &chat(&json!({ "n": 2 })));
    assert_eq!(full.status, 429);
    assert_eq!(full.header("retry-after"), Some("7"));
    assert_eq!(full.json()["error"]["type"], "rate_limit_error");
    engine.release();
    assert_eq!(handle.join().expect("a client").status, 200);
    engine.refuse(Refused::NeverFits { needs: 2000, has: 1024 });
    let never = client::send(server.addr, &chat(&json!({})));
    assert_eq!(
        (never.status, &never.json()["error"]["code"]),
        (400, &json!("context_length_exceeded"))
    );
    engine.refuse(Refused::Lost("the device is gone".into()));
    let lost = client::send(server.addr, &chat(&json!({})));
    assert_eq!(
        (lost.status, &lost.json()["error"]["message"]),
        (503, &json!("the device is gone"))
    );
}

#[test]
fn a_queue_that_is_full_says_when_to_come_again() {
    let handle = engine(&ServeOptions { max_running: 1, max_queue: 1, ..ServeOptions::default() });
    let server = Server::new(vec![served("tiny", Arc::new(handle.clone()))], Options::default());
    let mut statuses = Vec::new();
    let clients: Vec<_> = (0..12)
        .map(|_| {
            let addr = server.addr;
            std::thread::spawn(move || client::send(addr, &chat(&json!({ "max_tokens": 200 }))))
        })
        .collect();
    for client in clients {
        let response = client.join().expect("a client");
        if response.status == 429 {
            let after = response.header("retry-after").and_then(|v| v.parse::<u32>().ok());
            assert!(after.is_some_and(|s| s >= 1));
        }
        statuses.push(response.status);
    }
    assert!(statuses.contains(&200) && statuses.contains(&429), "{statuses:?}");
    assert!(statuses.iter().all(|s| [200, 429].contains(s)), "{statuses:?}");
}

#[test]
fn a_request_that_takes_too_long_fails() {
    let options =
        Options { request_timeout: Some(Duration::from_millis(300)), ..Options::default() };
    let (server, engine) = Server::scripted_with(options);
    for stream in [false, true] {
        engine.script(Script {
            tokens: engine.bytes(b"x"),
            finish: Some(Finish::Stop),
            hold_after: Some(0),
        });
        let response = client::send(server.addr, &chat(&json!({ "stream": stream })));
        if stream {
            let (_, last) = response.events().pop().expect("events");
            assert!(last.contains("\"timeout\""), "{last}");
        } else {
            assert_eq!(response.status, 504);
        }
    }
    engine.wait_for_cancels(2);
}

#[test]
fn a_server_that_ends_finishes_what_it_began() {
    let (mut server, engine) = Server::scripted();
    engine.script(Script {
        tokens: engine.bytes(b"slow"),
        finish: Some(Finish::Stop),
        hold_after: Some(2),
    });
    let addr = server.addr;
    let client = std::thread::spawn(move || client::send(addr, &chat(&json!({ "stream": true }))));
    soon("the start", || engine.running.load(SeqCst) == 1);
    let stop = server.stop.clone();
    stop.stop();
    soon("the door", || std::net::TcpStream::connect(addr).is_err());
    engine.release();
    let text = client.join().expect("a client");
    assert!(text.text().ends_with("data: [DONE]\n\n"));
    server.end();
}

#[test]
fn a_server_that_ends_does_not_wait_for_ever() {
    let options = Options { drain: Duration::from_millis(200), ..Options::default() };
    let (mut server, engine) = Server::scripted_with(options);
    engine.script(Script {
        tokens: engine.bytes(b"slow"),
        finish: Some(Finish::Stop),
        hold_after: Some(2),
    });
    let mut socket = connect(server.addr);
    socket.write_all(&chat(&json!({ "stream": true }))).expect("a connection");
    soon("the start", || engine.running.load(SeqCst) == 1);
    let began = Instant::now();
    server.end();
    assert!(began.elapsed() < Duration::from_secs(15));
}

#[test]
fn health_says_what_the_engine_does() {
    let (server, engine) = Server::scripted();
    let state = |status: u16| {
        let response = server.get("/health");
        assert_eq!(response.status, status, "{}", response.text());
        response.json()["models"][0]["state"].clone()
    };
    assert_eq!(state(200), "idle");
    let long_ago =
        Instant::now().checked_sub(Duration::from_secs(100)).expect("a clock that began earlier");
    let with = |stats| *engine.stats.lock().unwrap() = Some(stats);
    with(fornax_engine::serve::Stats { step_since: Some(Instant::now()), ..quiet(2) });
    assert_eq!(state(200), "working");
    with(fornax_engine::serve::Stats { step_since: Some(long_ago), ..quiet(2) });
    assert_eq!(state(503), "stuck");
    with(fornax_engine::serve::Stats { last_step: long_ago, ..quiet(1) });
    assert_eq!(state(503), "stuck");
    with(fornax_engine::serve::Stats { last_step: long_ago, ..quiet(0) });
    assert_eq!(state(200), "idle");
    with(fornax_engine::serve::Stats { healthy: false, fault: Some("gone".into()), ..quiet(0) });
    assert_eq!(state(503), "lost");
    assert_eq!(server.get("/health").json()["models"][0]["fault"], "gone");
}

#[test]
fn a_scripted_engine_is_an_engine() {
    let (_server, engine) = Server::scripted();
    assert!(Shared(engine).stats().healthy);
}
