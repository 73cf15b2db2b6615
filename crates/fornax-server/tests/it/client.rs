//! An HTTP client as small as tests need: one request on one connection, bytes as they are. It hides nothing, so that
//! framing can be tested.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// Nothing in these tests takes longer, unless it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A response, whole.
#[derive(Clone, Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Response {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.as_str())
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("a body in UTF-8")
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&self.body)))
    }

    /// The events of a stream: name (empty where there is none) and data.
    pub(crate) fn events(&self) -> Vec<(String, String)> {
        assert_eq!(self.header("content-type"), Some("text/event-stream"));
        let text = self.text();
        assert!(text.ends_with("\n\n"), "the last event is not complete: {text:?}");
        let mut all = Vec::new();
        for event in text.trim_end_matches('\n').split("\n\n") {
            let mut name = String::new();
            let mut data = None;
            for line in event.split('\n') {
                if let Some(value) = line.strip_prefix("event: ") {
                    name = value.to_owned();
                } else if let Some(value) = line.strip_prefix("data: ") {
                    assert!(data.is_none(), "two lines of data in one event: {event:?}");
                    data = Some(value.to_owned());
                } else {
                    assert!(line.starts_with(": "), "a line that is nothing: {line:?}");
                }
            }
            all.extend(data.map(|data| (name, data)));
        }
        all
    }

    /// The chunks of one of OpenAI's streams, which must end as it has to.
    pub(crate) fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        let last = events.pop().expect("a stream has events");
        assert_eq!(last, (String::new(), "[DONE]".into()));
        let parse = |(name, data): (String, String)| {
            assert_eq!(name, "");
            serde_json::from_str(&data).expect("data is JSON")
        };
        events.into_iter().map(parse).collect()
    }
}

/// A request's bytes; the length of the body is added.
pub(crate) fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut head = format!("{method} {path} HTTP/1.1\r\n");
    if !headers.iter().any(|(n, _)| n.eq_ignore_ascii_case("host")) {
        head += "host: localhost\r\n";
    }
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    if !body.is_empty() {
        head += &format!("content-length: {}\r\n", body.len());
    }
    head += "connection: close\r\n\r\n";
    [head.into_bytes(), body.to_vec()].concat()
}

pub(crate) fn connect(addr: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(addr).expect("the server listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket has options");
    stream.set_nodelay(true).expect("a socket has options");
    stream
}

pub(crate) fn send(addr: SocketAddr, bytes: &[u8]) -> Response {
    let mut stream = connect(addr);
    // A server that refuses early closes before everything is written.
    let _ = stream.write_all(bytes);
    receive(stream)
}

pub(crate) fn receive(stream: TcpStream) -> Response {
    let mut reader = BufReader::new(stream);
    let (status, headers) = head(&mut reader);
    let find = |name: &str| headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str());
    let mut body = Vec::new();
    if find("transfer-encoding") == Some("chunked") {
        while let Some(chunk) = chunk(&mut reader) {
            body.extend(chunk);
        }
    } else {
        let len = find("content-length").map_or(0, |v| v.parse().expect("a length"));
        body.resize(len, 0);
        reader.read_exact(&mut body).expect("as much as was announced");
    }
    Response { status, headers, body }
}

/// The status and the headers, names in lower case; interim answers are passed over.
pub(crate) fn head(reader: &mut impl BufRead) -> (u16, Vec<(String, String)>) {
    loop {
        let (status, headers) = any_head(reader);
        if status >= 200 {
            return (status, headers);
        }
    }
}

fn any_head(reader: &mut impl BufRead) -> (u16, Vec<(String, String)>) {
    let mut line = || {
        let mut line = String::new();
        reader.read_line(&mut line).expect("a head comes in time");
        line.trim_end_matches("\r\n").to_owned()
    };
    let first = line();
    let status = first.split(' ').nth(1).and_then(|s| s.parse().ok());
    let status = status.unwrap_or_else(|| panic!("no status line: {first:?}"));
    let mut headers = Vec::new();
    loop {
        let line = line();
        if line.is_empty() {
            return (status, headers);
        }
        let (name, value) = line.split_once(": ").expect("a header");
        headers.push((name.to_ascii_lowercase(), value.to_owned()));
    }
}

/// The next chunk of a chunked body; none at its end.
pub(crate) fn chunk(reader: &mut impl BufRead) -> Option<Vec<u8>> {
    let mut size = String::new();
    reader.read_line(&mut size).expect("a chunk comes in time");
    assert!(!size.is_empty(), "the body ended before its last chunk");
    let size = usize::from_str_radix(size.trim(), 16).expect("the size of a chunk");
    let mut data = vec![0; size + 2];
    reader.read_exact(&mut data).expect("as much as was announced");
    assert_eq!(data.split_off(size), b"\r\n");
    (size > 0).then_some(data)
}
