//! Rounds of clients of every kind, over and over: what the process holds on its heap afterwards does not depend on how
//! many there were. A process of its own, because its allocator counts.
#![allow(dead_code, reason = "the other tests' modules, of which this needs a part")]

#[path = "../it/client.rs"]
mod client;
#[path = "../../../fornax-plan/tests/counting/mod.rs"]
mod counting;
#[path = "../it/fixture.rs"]
mod fixture;
#[path = "../it/script.rs"]
mod script;
#[path = "../it/server.rs"]
mod server;

use std::io::{BufReader, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fornax_engine::serve::{EngineHandle, ServeOptions};
use fornax_plan::sample::uniform;
use fornax_server::Options;
use serde_json::{Value, json};

use crate::client::{chunk, connect, head, request};
use crate::counting::live;
use crate::server::{Server, engine, served};

const CHAT: &str = "/v1/chat/completions";
const JSON: [(&str, &str); 1] = [("content-type", "application/json")];
const CLIENTS: u64 = 8;
/// Requests of each client in a round.
const EACH: u32 = 24;
/// Rounds before anything is measured: pools, caches and tables reach their sizes.
const WARM: u32 = 2;

/// Bytes and allocations by which looks differ. A round has sixteen requests of each kind.
const LOOSE: (i64, i64) = (32 << 10, 24);

/// Rounds that are measured; `FORNAX_LEAK_ROUNDS` makes them more.
fn rounds() -> u32 {
    std::env::var("FORNAX_LEAK_ROUNDS").ok().and_then(|s| s.parse().ok()).unwrap_or(3)
}

/// A request of a kind that its number decides, and whether its client stays for the answer.
fn ask(server: &Server, client: u64, number: u32) {
    let draw = |k: u32| uniform(client * 1000 + 7, number * 16 + k);
    let words = 1 + (draw(0) * 60.0) as usize;
    let mut body = json!({
        "messages": [{ "role": "user", "content": format!("{client} {number} {}", "word ".repeat(words)) }],
        "max_tokens": 1 + (draw(1) * 12.0) as u32,
        "seed": number,
    });
    let kind = number % 12;
    let extra = match kind {
        1 => json!({ "n": 2, "stop": ["the end", "\n\n"] }),
        2 => json!({ "logprobs": true, "top_logprobs": 3 }),
        3 => json!({ "response_format": { "type": "json_object" } }),
        // Each time another grammar: more than are kept.
        4 => {
            let regex = format!("(yes|no), [a-z ]{{1,20}}{client}-{number}");
            json!({ "response_format": { "type": "regex", "regex": regex } })
        }
        5 => json!({ "frequency_penalty": 0.5, "logit_bias": { "7": 3 }, "dry_multiplier": 0.8 }),
        6 => json!({ "temperature": "hot" }),
        7 => json!({ "priority": 1, "user": format!("user {number}") }),
        _ => json!({}),
    };
    for (name, value) in extra.as_object().into_iter().flatten() {
        body[name] = value.clone();
    }
    body["stream"] = (draw(2) < 0.5 && kind != 6).into();
    match kind {
        6 => assert_eq!(server.post(CHAT, &body).status, 400),
        8 => leave(server, &body, (draw(3) * 4.0) as usize),
        9 => {
            let texts = json!({ "input": [format!("{number}"), "word ".repeat(words)] });
            server.ok("/v1/embeddings", &texts);
        }
        10 => {
            assert_eq!(server.get("/metrics").status, 200);
            assert_eq!(server.get(&format!("/nothing/{client}/{number}")).status, 404);
        }
        _ => assert_eq!(server.post(CHAT, &body).status, 200, "{body}"),
    }
}

/// Leaves before the head, after it, or after some events.
fn leave(server: &Server, body: &Value, after: usize) {
    let body = {
        let mut body = body.clone();
        body["stream"] = true.into();
        body
    };
    let socket = connect(server.addr);
    let bytes = request("POST", CHAT, &JSON, body.to_string().as_bytes());
    (&socket).write_all(&bytes).expect("a connection");
    let mut reader = BufReader::new(&socket);
    if after > 0 {
        assert_eq!(head(&mut reader).0, 200);
    }
    for _ in 1..after {
        if chunk(&mut reader).is_none() {
            return;
        }
    }
}

/// What is on the heap when nothing is asked: bytes and allocations, the least of some looks.
fn at_rest(handle: &EngineHandle) -> (i64, i64) {
    let began = Instant::now();
    let is_busy = || {
        let stats = handle.stats();
        stats.running + stats.waiting > 0
    };
    while is_busy() {
        assert!(began.elapsed() < Duration::from_secs(60), "still busy: {:?}", handle.stats());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(handle.stats().kv_blocks_used, 0);
    // Tasks of connections end a little later.
    let looks = (0..20).map(|_| {
        std::thread::sleep(Duration::from_millis(10));
        live()
    });
    looks.min().expect("there are looks")
}

fn resident_kb() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split(' ').nth(1).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0) * 4
}

#[test]
fn what_requests_allocate_goes_with_them() {
    let options = ServeOptions {
        max_running: 4,
        max_queue: 64,
        kv_tokens: Some(2048),
        ..ServeOptions::default()
    };
    let handle = engine(&options);
    let server = Server::new(vec![served("tiny", Arc::new(handle.clone()))], Options::default());
    let mut seen = Vec::new();
    for round in 0..WARM + rounds() {
        std::thread::scope(|scope| {
            for client in 0..CLIENTS {
                let server = &server;
                scope.spawn(move || {
                    (0..EACH).for_each(|i| ask(server, client, round * EACH + i));
                });
            }
        });
        let (bytes, count) = at_rest(&handle);
        println!(
            "round {round}: {bytes} bytes in {count} allocations, {} KB resident",
            resident_kb()
        );
        seen.push((bytes, count));
    }
    let measured = &seen[WARM as usize - 1..];
    for (bytes, count) in measured {
        let (more, many) = (bytes - measured[0].0, count - measured[0].1);
        assert!(
            more <= LOOSE.0 && many <= LOOSE.1,
            "{more} bytes in {many} allocations stay: {seen:?}"
        );
    }
}
