//! Many clients at once: whatever they do, everything is answered once, and nothing is left behind. A process of its own,
//! because it asks how much memory the process has: other tests would be counted with it.
#![allow(dead_code, reason = "the other tests' modules, of which this needs a part")]

#[path = "../it/client.rs"]
mod client;
#[path = "../it/fixture.rs"]
mod fixture;
#[path = "../it/script.rs"]
mod script;
#[path = "../it/server.rs"]
mod server;

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fornax_engine::serve::{EngineHandle, ServeOptions};
use fornax_plan::sample::uniform;
use fornax_server::Options;
use serde_json::json;

use crate::client::{connect, request};
use crate::server::{Server, engine, served};

const CHAT: &str = "/v1/chat/completions";
const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

/// Held by each test: one after the other.
static ALONE: Mutex<()> = Mutex::new(());

/// Seconds of the mixed load; `FORNAX_LOAD_S` makes it longer.
fn seconds() -> u64 {
    std::env::var("FORNAX_LOAD_S").ok().and_then(|s| s.parse().ok()).unwrap_or(5)
}

fn settled(handle: &EngineHandle) -> u32 {
    let began = Instant::now();
    loop {
        let stats = handle.stats();
        if stats.running + stats.waiting == 0 {
            assert!(stats.healthy);
            return stats.kv_blocks_used;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "still busy: {stats:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Memory of this process in pages; none where the system does not say.
fn resident() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    text.split(' ').nth(1)?.parse().ok()
}

#[test]
fn mixed_clients_leave_nothing_behind() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let handle =
        engine(&ServeOptions { max_running: 16, max_queue: 64, ..ServeOptions::default() });
    let server = Server::new(vec![served("tiny", Arc::new(handle.clone()))], Options::default());
    let baseline = settled(&handle);
    let until = Instant::now() + Duration::from_secs(seconds());
    let (good, refused, left, bad) =
        (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    let mut half = None;
    std::thread::scope(|scope| {
        for client in 0..64u64 {
            let (server, good, refused, left, bad) = (&server, &good, &refused, &left, &bad);
            scope.spawn(move || {
                for round in 0.. {
                    if Instant::now() >= until {
                        return;
                    }
                    let draw = |k: u32| uniform(client * 1000 + 7, round * 8 + k);
                    let words = 1 + (draw(0) * 60.0) as usize;
                    let body = json!({
                        "messages": [{ "role": "user", "content": "word ".repeat(words) }],
                        "max_tokens": 1 + (draw(1) * 40.0) as u32,
                        "stream": draw(2) < 0.5,
                        "n": if draw(3) < 0.1 { 2 } else { 1 },
                    });
                    match draw(4) {
                        x if x < 0.15 => {
                            let mut socket = connect(server.addr);
                            let bytes = request("POST", CHAT, &JSON, body.to_string().as_bytes());
                            let _ = socket.write_all(&bytes);
                            std::thread::sleep(Duration::from_millis((draw(5) * 20.0) as u64));
                            left.fetch_add(1, SeqCst);
                        }
                        x if x < 0.3 => {
                            let response =
                                server.post(CHAT, &json!({ "messages": [], "n": draw(5) }));
                            assert_eq!(response.status, 400);
                            bad.fetch_add(1, SeqCst);
                        }
                        _ => {
                            let response = server.post(CHAT, &body);
                            match response.status {
                                200 if body["stream"] == true => {
                                    let chunks = response.chunks();
                                    let ends = chunks
                                        .iter()
                                        .filter(|c| c["choices"][0]["finish_reason"].is_string());
                                    assert_eq!(
                                        ends.count() as u64,
                                        body["n"].as_u64().unwrap_or(1)
                                    );
                                    good.fetch_add(1, SeqCst);
                                }
                                200 => {
                                    let choices =
                                        response.json()["choices"].as_array().map(Vec::len);
                                    assert_eq!(choices.map(|n| n as u64), body["n"].as_u64());
                                    good.fetch_add(1, SeqCst);
                                }
                                429 => {
                                    assert!(response.header("retry-after").is_some());
                                    refused.fetch_add(1, SeqCst);
                                    std::thread::sleep(Duration::from_millis(20));
                                }
                                other => panic!("{other}: {}", response.text()),
                            }
                        }
                    }
                }
            });
        }
        std::thread::sleep(Duration::from_secs(seconds()) / 2);
        half = resident();
    });
    assert_eq!(settled(&handle), baseline);
    let counts = [&good, &refused, &left, &bad].map(|c| c.load(SeqCst));
    println!("good, refused, left, bad: {counts:?}");
    assert!(counts[0] > 0 && counts[2] > 0 && counts[3] > 0, "{counts:?}");
    assert_eq!(server.get("/health").status, 200);
    // Threads of clients are gone; what is left is what serving keeps. Pages of 4 KiB or more.
    if let (Some(half), Some(end)) = (half, resident()) {
        let grown = end.saturating_sub(half);
        assert!(grown < 16_384, "{grown} pages more than at half time");
    }
}

#[test]
fn ten_thousand_queued_requests_are_all_answered_once() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let handle =
        engine(&ServeOptions { max_running: 64, max_queue: 10_000, ..ServeOptions::default() });
    let server = Server::new(vec![served("tiny", Arc::new(handle.clone()))], Options::default());
    let answers = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for client in 0..100 {
            let (server, answers) = (&server, &answers);
            scope.spawn(move || {
                let prompts: Vec<[u32; 2]> = (0..100).map(|i| [client, 100 + i]).collect();
                let body =
                    json!({ "prompt": prompts, "max_tokens": 1, "logit_bias": { "7": 100 } });
                let answer = server.ok("/v1/completions", &body);
                let choices = answer["choices"].as_array().expect("choices");
                for (i, choice) in choices.iter().enumerate() {
                    assert_eq!(choice["index"].as_u64(), Some(i as u64));
                    assert_eq!(choice["text"], "(");
                }
                answers.fetch_add(choices.len(), SeqCst);
            });
        }
    });
    assert_eq!(answers.load(SeqCst), 10_000);
    assert_eq!(settled(&handle), 0);
}
