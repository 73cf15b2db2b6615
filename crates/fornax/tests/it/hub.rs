//! A model hub small enough to misbehave on demand: one thread a connection, one request a connection.
//! Knows HTTP/1.1 as far as the tests need it.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// One request as it came in.
#[derive(Clone, Debug, Default)]
pub(crate) struct Request {
    pub(crate) path: String,
    pub(crate) host: String,
    /// First byte of an open range.
    pub(crate) from: Option<usize>,
    pub(crate) if_range: Option<String>,
    pub(crate) authorization: Option<String>,
}

/// What to send back.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
    /// Send so much of the body, then close.
    cut: Option<usize>,
    /// Send so much of the body, then nothing, with the connection open.
    hang: Option<usize>,
    /// Pause after each so many bytes.
    pace: Option<(usize, Duration)>,
}

impl Reply {
    pub(crate) fn status(status: u16) -> Reply {
        Reply { status, headers: Vec::new(), body: Vec::new(), cut: None, hang: None, pace: None }
    }

    pub(crate) fn text(text: &str) -> Reply {
        Reply { body: text.as_bytes().to_vec(), ..Reply::status(200) }
    }

    /// All of `bytes`, or the rest where the request says so and its tag matches.
    pub(crate) fn file(request: &Request, bytes: &[u8], etag: &str) -> Reply {
        let tag = ("ETag", etag.to_owned());
        let Some(from) = request.from.filter(|_| request.if_range.as_deref() == Some(etag)) else {
            return Reply { body: bytes.to_vec(), ..Reply::status(200) }.header(tag.0, tag.1);
        };
        if from >= bytes.len() {
            return Reply::status(416);
        }
        let range = format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len());
        Reply { body: bytes[from..].to_vec(), ..Reply::status(206) }
            .header("Content-Range", range)
            .header(tag.0, tag.1)
    }

    pub(crate) fn redirect(to: impl Into<String>) -> Reply {
        Reply::status(302).header("Location", to.into())
    }

    pub(crate) fn header(mut self, name: &'static str, value: impl Into<String>) -> Reply {
        self.headers.push((name, value.into()));
        self
    }

    pub(crate) fn cut(self, at: usize) -> Reply {
        Reply { cut: Some(at), ..self }
    }

    pub(crate) fn hang(self, at: usize) -> Reply {
        Reply { hang: Some(at), ..self }
    }

    pub(crate) fn pace(self, bytes: usize, pause: Duration) -> Reply {
        Reply { pace: Some((bytes, pause)), ..self }
    }

    fn send(&self, mut to: TcpStream) -> std::io::Result<()> {
        write!(to, "HTTP/1.1 {} Mock\r\nConnection: close\r\n", self.status)?;
        write!(to, "Content-Length: {}\r\n", self.body.len())?;
        for (name, value) in &self.headers {
            write!(to, "{name}: {value}\r\n")?;
        }
        to.write_all(b"\r\n")?;
        let end = self.cut.or(self.hang).unwrap_or(self.body.len()).min(self.body.len());
        let (piece, pause) = self.pace.unwrap_or((self.body.len().max(1), Duration::ZERO));
        for chunk in self.body[..end].chunks(piece) {
            to.write_all(chunk)?;
            to.flush()?;
            thread::sleep(pause);
        }
        if self.hang.is_some() {
            thread::sleep(Duration::from_secs(60));
        }
        Ok(())
    }
}

/// A running hub; its threads end with the process.
pub(crate) struct Hub {
    pub(crate) port: u16,
    log: Arc<Mutex<Vec<Request>>>,
}

impl Hub {
    /// `answer` sees the request and how many came for the same path before.
    pub(crate) fn start(answer: impl Fn(&Request, usize) -> Reply + Send + Sync + 'static) -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let log = Arc::new(Mutex::new(Vec::<Request>::new()));
        let (seen, answer) = (Arc::clone(&log), Arc::new(answer));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (seen, answer) = (Arc::clone(&seen), Arc::clone(&answer));
                thread::spawn(move || {
                    let Some(request) = read(&stream) else { return };
                    let before = {
                        let mut seen = seen.lock().unwrap();
                        seen.push(request.clone());
                        seen.iter().filter(|r| r.path == request.path).count() - 1
                    };
                    // The other side may have been killed on purpose.
                    let _ = answer(&request, before).send(stream);
                });
            }
        });
        Hub { port, log }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub(crate) fn requests(&self) -> Vec<Request> {
        self.log.lock().unwrap().clone()
    }
}

fn read(stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next()?.ok()?;
    let mut request = Request { path: first.split(' ').nth(1)?.to_owned(), ..Request::default() };
    for line in lines {
        let line = line.ok()?;
        let Some((name, value)) = line.split_once(':') else { break };
        let value = value.trim();
        match name.to_ascii_lowercase().as_str() {
            "host" => request.host = value.to_owned(),
            "if-range" => request.if_range = Some(value.to_owned()),
            "authorization" => request.authorization = Some(value.to_owned()),
            "range" => {
                request.from = value.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok();
            }
            _ => {}
        }
    }
    Some(request)
}
