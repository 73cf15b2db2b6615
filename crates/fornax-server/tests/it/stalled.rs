//! Clients that are there and do nothing: they send no head, half a body, or take nothing of their answer.

use std::io::{BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use fornax_engine::serve::Finish;
use fornax_server::Options;
use serde_json::json;

use crate::client::{PATIENCE, chunk, connect, head, receive, request};
use crate::script::Script;
use crate::server::Server;

const CHAT: &str = "/v1/chat/completions";
const JSON: [(&str, &str); 1] = [("content-type", "application/json")];
const LIMIT: Duration = Duration::from_millis(300);

/// Waits for the end of a connection, and says how long it took and what came before.
fn ended(mut stream: TcpStream) -> (Duration, Vec<u8>) {
    let began = Instant::now();
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    (began.elapsed(), rest)
}

#[test]
fn who_sends_no_head_is_not_waited_for() {
    let options = Options { head_timeout: LIMIT, ..Options::default() };
    let (server, _) = Server::scripted_with(options);
    for bytes in [&b""[..], b"G", b"GET /health HTTP/1.1\r\nhost: localhost\r\n"] {
        let mut stream = connect(server.addr);
        stream.write_all(bytes).expect("a connection");
        let (after, said) = ended(stream);
        assert!(LIMIT / 2 < after && after < PATIENCE / 2, "{after:?}");
        assert!(said.is_empty() || said.starts_with(b"HTTP/1.1 408"), "{said:?}");
    }
    // And who says nothing after an answer.
    let mut stream = connect(server.addr);
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").expect("a connection");
    let (after, said) = ended(stream);
    assert!(said.starts_with(b"HTTP/1.1 200"));
    assert!(LIMIT / 2 < after && after < PATIENCE / 2, "{after:?}");
}

#[test]
fn half_a_body_is_not_waited_for() {
    let options = Options { body_timeout: LIMIT, ..Options::default() };
    let (server, engine) = Server::scripted_with(options);
    let whole = request("POST", CHAT, &JSON, b"{\"messages\": [1, 2, 3]}");
    let mut stream = connect(server.addr);
    stream.write_all(&whole[..whole.len() - 5]).expect("a connection");
    assert_eq!(receive(stream).status, 408);
    assert!(engine.seen().is_empty());
}

#[test]
fn half_a_connection_closed_counts_as_leaving() {
    let (server, engine) = Server::scripted();
    let script =
        Script { tokens: engine.bytes(b"x"), finish: Some(Finish::Stop), hold_after: Some(0) };
    engine.script(script);
    let body = json!({ "messages": [{ "role": "user", "content": "hi" }] }).to_string();
    let mut stream = connect(server.addr);
    stream.write_all(&request("POST", CHAT, &JSON, body.as_bytes())).expect("a connection");
    let began = Instant::now();
    while engine.running.load(SeqCst) == 0 {
        assert!(began.elapsed() < PATIENCE, "it does not run");
        std::thread::sleep(Duration::from_millis(2));
    }
    stream.shutdown(std::net::Shutdown::Write).expect("a connection");
    engine.wait_for_cancels(1);
}

/// A request whose answer, of enough choices, is larger than what sockets hold, of `room` bytes here.
fn large(server: &Server, n: usize, room: usize) -> TcpStream {
    let body = json!({
        "messages": [{ "role": "user", "content": "hi" }], "stream": true, "n": n,
        "logprobs": true, "top_logprobs": 20,
    });
    let mut socket = connect(server.addr);
    let _ = socket2::SockRef::from(&socket).set_recv_buffer_size(room);
    let bytes = request("POST", CHAT, &JSON, body.to_string().as_bytes());
    socket.write_all(&bytes).expect("a connection");
    socket
}

#[test]
fn who_takes_nothing_of_an_answer_has_left() {
    let options = Options { stall_timeout: LIMIT, ..Options::default() };
    let (server, engine) = Server::scripted_with(options);
    let script = || Script {
        tokens: engine.bytes(&[b'a'; 900]),
        finish: Some(Finish::Stop),
        hold_after: Some(899),
    };
    (0..8).for_each(|_| engine.script(script()));
    let reader = large(&server, 8, 4096);
    let mut reader = BufReader::new(reader);
    assert_eq!(head(&mut reader).0, 200);
    assert!(chunk(&mut reader).is_some());
    // It is connected and reads no more: within a while all its choices are cancelled.
    engine.wait_for_cancels(8);
    let began = Instant::now();
    while engine.running.load(SeqCst) > 0 {
        assert!(began.elapsed() < PATIENCE, "still running");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(reader);
}

#[test]
fn who_reads_slowly_gets_everything() {
    let options = Options { stall_timeout: Duration::from_secs(5), ..Options::default() };
    let (server, engine) = Server::scripted_with(options);
    let tokens = engine.bytes(&[b'a'; 400]);
    engine.script(Script { tokens, finish: Some(Finish::Stop), hold_after: None });
    let mut reader = BufReader::new(large(&server, 1, 64 << 10));
    assert_eq!(head(&mut reader).0, 200);
    let (mut text, mut n) = (Vec::new(), 0);
    while let Some(more) = chunk(&mut reader) {
        text = more;
        n += 1;
        if n % 100 == 0 {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    assert!(text.ends_with(b"data: [DONE]\n\n"));
}
