//! Clients that are there and do nothing: they send no head, half a body, or take nothing of their answer.

use std::io::{BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use fornax_engine::serve::Finish;
use fornax_server::Options;
use serde_json::{Value, json};

use crate::client::{PATIENCE, chunk, connect, head, receive, request};
use crate::script::{Script, Scripted};
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

/// A request that runs and is held after `text`, of a client that has said so in `version`.
fn held(server: &Server, engine: &Scripted, version: &str, stream: bool, text: &[u8]) -> TcpStream {
    engine.script(Script {
        tokens: engine.bytes(&[text, b"x"].concat()),
        finish: Some(Finish::Stop),
        hold_after: Some(text.len()),
    });
    let body = json!({ "messages": [{ "role": "user", "content": "hi" }], "stream": stream });
    let bytes = request("POST", CHAT, &JSON, body.to_string().as_bytes());
    let bytes = String::from_utf8(bytes).expect("a request is text").replace("HTTP/1.1", version);
    let mut socket = connect(server.addr);
    socket.write_all(bytes.as_bytes()).expect("a connection");
    let began = Instant::now();
    while engine.running.load(SeqCst) == 0 {
        assert!(began.elapsed() < PATIENCE, "it does not run");
        std::thread::sleep(Duration::from_millis(2));
    }
    socket
}

#[test]
fn who_sends_no_more_still_gets_his_answer() {
    // Before the head, after it, and in the middle of the text.
    for (stream, text) in [(false, &b""[..]), (false, b"ab"), (true, b""), (true, b"ab")] {
        let (server, engine) = Server::scripted();
        let socket = held(&server, &engine, "HTTP/1.1", stream, text);
        socket.shutdown(Shutdown::Write).expect("a connection");
        // Long enough for him to be asked, and to be looked at.
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(engine.running.load(SeqCst), 1, "stream {stream}, after {text:?}");
        engine.release();
        let response = receive(socket);
        assert_eq!(response.status, 200);
        let said: String = if stream {
            assert!(response.text().contains("\n\n: still here\n\n"), "{}", response.text());
            let part = |c: &Value| c["choices"][0]["delta"]["content"].as_str().map(str::to_owned);
            response.chunks().iter().filter_map(part).collect()
        } else {
            let answer = response.json();
            answer["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned()
        };
        assert_eq!(said.as_bytes(), [text, b"x"].concat());
    }
}

#[test]
fn who_sends_no_more_and_then_leaves_has_left() {
    for (stream, reads) in [(false, false), (false, true), (true, false), (true, true)] {
        let (server, engine) = Server::scripted();
        let mut socket = held(&server, &engine, "HTTP/1.1", stream, b"");
        socket.shutdown(Shutdown::Write).expect("a connection");
        std::thread::sleep(Duration::from_millis(100));
        if reads {
            // He has taken all that there was: no word of him comes when he goes.
            let mut bytes = [0; 4096];
            assert!(socket.read(&mut bytes).is_ok_and(|n| n > 0));
        }
        assert_eq!(engine.running.load(SeqCst), 1, "stream {stream}");
        drop(socket);
        engine.wait_for_cancels(1);
    }
}

#[test]
fn who_sends_no_more_in_the_older_protocol_has_left() {
    let (server, engine) = Server::scripted();
    let socket = held(&server, &engine, "HTTP/1.0", false, b"");
    socket.shutdown(Shutdown::Write).expect("a connection");
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
