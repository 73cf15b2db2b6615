//! One GET over HTTP with redirects, and its bytes into a `.part` file that a later attempt can go on with.
//! Knows no model, no cache layout and no hub.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use ureq::Agent;
use ureq::http::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, ETAG, IF_RANGE, LOCATION};
use ureq::http::header::{HeaderMap, HeaderName, RANGE};
use ureq::http::{Response, StatusCode, Uri};
use ureq::tls::{RootCerts, TlsConfig};

use super::progress::Progress;
use crate::flags::high::Config;

/// Looking up the name, and then connecting, may each take this long.
const REACH: Duration = Duration::from_secs(5);
/// The first byte of an answer may take this long.
const ANSWER: Duration = Duration::from_secs(20);
/// A body that brings nothing for this long is given up.
const STALL: Duration = Duration::from_secs(10);
const REDIRECTS_MAX: usize = 10;
/// A broken transfer is continued so often before the source is given up.
const ATTEMPTS: usize = 4;

/// A URL to get. Not `Debug`: a token must not reach a log.
#[derive(Clone)]
pub(crate) struct Remote {
    pub(crate) url: String,
    /// Sent to the host of `url` alone, never to where it redirects.
    pub(crate) token: Option<String>,
}

/// What a finished transfer learned.
#[derive(Clone, Debug, Default)]
pub(crate) struct Learned {
    /// The digest that the hub keeps for a large file.
    pub(crate) sha256: Option<String>,
}

/// An HTTP client; cheap to make, remembers connections.
#[derive(Debug)]
pub(crate) struct Client {
    agent: Agent,
    stall: Duration,
}

/// What is remembered of a `.part` file, to know whether it may be continued.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct PartNote {
    url: String,
    etag: Option<String>,
    sha256: Option<String>,
}

/// An answer after all redirects.
struct Answer {
    response: Response<ureq::Body>,
    learned: Learned,
}

impl Client {
    /// Proxies come from the usual variables, trusted roots from the system.
    pub(crate) fn new() -> Client {
        let tls = TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build();
        let agent = Agent::config_builder()
            .timeout_resolve(Some(REACH))
            .timeout_connect(Some(REACH))
            .timeout_recv_response(Some(ANSWER))
            .http_status_as_error(false)
            .max_redirects(0)
            .user_agent(concat!("fornax/", env!("CARGO_PKG_VERSION")))
            .tls_config(tls)
            .build()
            .new_agent();
        Client { agent, stall: STALL }
    }

    /// The body of a small answer.
    ///
    /// # Errors
    /// When the server cannot be reached, says no, or sends more than 16 MiB.
    pub(crate) fn text(&self, remote: &Remote) -> Result<String> {
        let Answer { response, .. } = self.get(remote, &[])?;
        refuse(remote, response.status())?;
        let mut body = response.into_body();
        let text = body.with_config().limit(16 << 20).read_to_string();
        text.with_context(|| format!("could not read the answer of {}", remote.url))
    }

    /// Brings `remote` to `part`, going on with what is there where that is safe. On success the file is
    /// complete by the server's own account and on disk.
    ///
    /// # Errors
    /// When the server cannot be reached or says no, the transfer breaks again and again or stalls, or
    /// the disk is full. What came so far stays in `part`.
    pub(crate) fn download(
        &self,
        config: &Config,
        remote: &Remote,
        part: &Path,
        name: &str,
    ) -> Result<Learned> {
        let mut attempts = 1;
        loop {
            let before = len(part);
            match self.attempt(config, remote, part, name) {
                Ok(learned) => return Ok(learned),
                // Only a transfer that moved is worth another attempt.
                Err(e) if attempts == ATTEMPTS || len(part) <= before => return Err(e),
                Err(_) => attempts += 1,
            }
        }
    }

    fn attempt(
        &self,
        config: &Config,
        remote: &Remote,
        part: &Path,
        name: &str,
    ) -> Result<Learned> {
        let note = PartNote::load(part).filter(|n| n.url == remote.url);
        let have = match &note {
            Some(PartNote { etag: Some(_), .. }) => len(part),
            _ => 0,
        };
        let etag = note.and_then(|n| n.etag);
        let mut headers = Vec::new();
        if let (1.., Some(etag)) = (have, &etag) {
            headers.push((RANGE, format!("bytes={have}-")));
            headers.push((IF_RANGE, etag.clone()));
        }
        let mut answer = self.get(remote, &headers)?;
        if have > 0 && answer.response.status() == StatusCode::RANGE_NOT_SATISFIABLE {
            // All of it was there already, or the file became shorter: only a fresh start tells.
            answer = self.get(remote, &[])?;
        }
        let Answer { response, learned } = answer;
        refuse(remote, response.status())?;
        let start = start_of(response.status(), response.headers(), have, remote)?;
        let total = number(response.headers(), &CONTENT_LENGTH).map(|n| n + start);
        PartNote {
            url: remote.url.clone(),
            // A weak tag (W/"…") does not promise equal bytes.
            etag: header(response.headers(), &ETAG).filter(|e| e.starts_with('"')),
            sha256: learned.sha256.clone(),
        }
        .store(part)?;
        let into = Into { config, remote, part, name, start, total };
        self.body_into(response.into_body(), &into)?;
        Ok(learned)
    }

    /// Appends a body to `part` from `start` on and makes sure that it is all there.
    fn body_into(&self, body: ureq::Body, into: &Into<'_>) -> Result<()> {
        let Into { part, start, total, .. } = *into;
        let on_disk = || format!("could not write {}", part.display());
        let mut out = OpenOptions::new()
            .create(true)
            .write(true)
            .truncate(false)
            .open(part)
            .with_context(on_disk)?;
        out.set_len(start).and_then(|()| out.seek(SeekFrom::Start(start))).with_context(on_disk)?;
        let progress = Progress::bytes(into.config, into.name, total);
        let chunks = chunks(body);
        let mut done = start;
        let end = loop {
            progress.at(done);
            match chunks.recv_timeout(self.stall) {
                Ok(Ok(chunk)) => {
                    out.write_all(&chunk).with_context(on_disk)?;
                    done += chunk.len() as u64;
                }
                Ok(Err(e)) => break Err(anyhow!("the connection broke: {e}")),
                Err(mpsc::RecvTimeoutError::Disconnected) => break Ok(()),
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    break Err(anyhow!("nothing came for {} s", self.stall.as_secs()));
                }
            }
        };
        // Also after a break: what came must survive for the next attempt.
        out.sync_all().with_context(on_disk)?;
        end.and_then(|()| match total {
            Some(total) if done != total => Err(anyhow!("the transfer ended early")),
            _ => Ok(()),
        })
        .with_context(|| {
            let of = total.map_or(String::new(), |t| format!(" of {t}"));
            format!("{done}{of} bytes came from {}", into.remote.url)
        })
    }

    /// Follows redirects by hand: the hub names digest and size on the way, and a token must stay home.
    fn get(&self, remote: &Remote, headers: &[(HeaderName, String)]) -> Result<Answer> {
        let mut url = remote.url.clone();
        let mut learned = Learned::default();
        for _ in 0..=REDIRECTS_MAX {
            let mut request = self.agent.get(&url);
            for (name, value) in headers {
                request = request.header(name, value);
            }
            if let Some(token) = remote.token.as_ref().filter(|_| same_host(&url, &remote.url)) {
                request = request.header(AUTHORIZATION, format!("Bearer {token}"));
            }
            let response = request.call().map_err(|e| anyhow!("could not reach {url}: {e}"))?;
            if let Some(tag) = response.headers().get("x-linked-etag") {
                let tag = tag.to_str().unwrap_or_default().trim_matches('"').to_ascii_lowercase();
                if tag.len() == 64 && tag.bytes().all(|b| b.is_ascii_hexdigit()) {
                    learned.sha256 = Some(tag);
                }
            }
            if !response.status().is_redirection() {
                return Ok(Answer { response, learned });
            }
            let to = header(response.headers(), &LOCATION)
                .with_context(|| format!("{url} redirects without saying where to"))?;
            url = absolute(&url, &to)?;
        }
        bail!("{} redirects more than {REDIRECTS_MAX} times", remote.url)
    }
}

/// Where a body goes.
struct Into<'a> {
    config: &'a Config,
    remote: &'a Remote,
    part: &'a Path,
    name: &'a str,
    /// Bytes of `part` that are kept.
    start: u64,
    /// Bytes of the whole file, where the server says.
    total: Option<u64>,
}

/// Turns a server's no into advice.
fn refuse(remote: &Remote, status: StatusCode) -> Result<()> {
    let advice = match status.as_u16() {
        200..=299 => return Ok(()),
        401 | 403 if remote.token.is_some() => {
            "the token is not allowed to read this; accept the model's terms on its page"
        }
        401 | 403 => "it wants a token; set HF_TOKEN",
        404 => "no such file; check the spelling",
        429 => "too many requests; wait a while",
        _ => "the server cannot answer now",
    };
    bail!("{} said {status}: {advice}", remote.url)
}

/// The offset at which the body of an answer begins.
fn start_of(status: StatusCode, headers: &HeaderMap, have: u64, remote: &Remote) -> Result<u64> {
    if status != StatusCode::PARTIAL_CONTENT {
        return Ok(0);
    }
    let range = header(headers, &CONTENT_RANGE).unwrap_or_default();
    let start = range.strip_prefix("bytes ").and_then(|r| r.split('-').next()?.parse::<u64>().ok());
    match start {
        Some(start) if start == have => Ok(start),
        _ => bail!("{} was asked for bytes from {have} on and sent {range:?}", remote.url),
    }
}

/// A reader on its own thread, so that silence can be told from slowness. The channel closes at the end
/// of the body; a thread stuck in a silent read ends with its connection or the process.
fn chunks(body: ureq::Body) -> mpsc::Receiver<std::io::Result<Vec<u8>>> {
    let (send, receive) = mpsc::sync_channel(8);
    std::thread::spawn(move || {
        let mut reader = body.into_reader();
        let mut buffer = vec![0_u8; 256 << 10];
        loop {
            let chunk = match reader.read(&mut buffer) {
                Ok(0) => return,
                Ok(n) => Ok(buffer[..n].to_vec()),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(e) => Err(e),
            };
            let last = chunk.is_err();
            if send.send(chunk).is_err() || last {
                return;
            }
        }
    });
    receive
}

impl PartNote {
    fn path(part: &Path) -> PathBuf {
        let mut name = part.as_os_str().to_owned();
        name.push(".json");
        PathBuf::from(name)
    }

    fn load(part: &Path) -> Option<PartNote> {
        serde_json::from_slice(&fs::read(PartNote::path(part)).ok()?).ok()
    }

    fn store(&self, part: &Path) -> Result<()> {
        let path = PartNote::path(part);
        let text = serde_json::to_vec(self).context("could not write a note as JSON")?;
        let write = || -> std::io::Result<()> {
            let mut out = File::create(&path)?;
            out.write_all(&text)?;
            out.sync_all()
        };
        write().with_context(|| format!("could not write {}", path.display()))
    }
}

/// Removes an unfinished download and what is remembered of it.
pub(crate) fn discard(part: &Path) {
    let _ = fs::remove_file(part);
    let _ = fs::remove_file(PartNote::path(part));
}

/// Removes what is remembered of a download that became something else.
pub(crate) fn forget(part: &Path) {
    let _ = fs::remove_file(PartNote::path(part));
}

fn len(file: &Path) -> u64 {
    fs::metadata(file).map_or(0, |m| m.len())
}

fn header(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    headers.get(name)?.to_str().ok().map(str::to_owned)
}

fn number(headers: &HeaderMap, name: &HeaderName) -> Option<u64> {
    header(headers, name)?.trim().parse().ok()
}

fn same_host(a: &str, b: &str) -> bool {
    let authority = |u: &str| u.parse::<Uri>().ok().and_then(|u| u.authority().cloned());
    let scheme = |u: &str| u.parse::<Uri>().ok().and_then(|u| u.scheme().cloned());
    authority(a).is_some() && authority(a) == authority(b) && scheme(a) == scheme(b)
}

/// A redirect's target, which may leave out what it shares with `base`.
fn absolute(base: &str, to: &str) -> Result<String> {
    if to.starts_with("http://") || to.starts_with("https://") {
        return Ok(to.to_owned());
    }
    let uri: Uri = base.parse().with_context(|| format!("{base} is no URL"))?;
    let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
        bail!("{base} is no complete URL");
    };
    if let Some(rest) = to.strip_prefix("//") {
        return Ok(format!("{scheme}://{rest}"));
    }
    if to.starts_with('/') {
        return Ok(format!("{scheme}://{authority}{to}"));
    }
    if to.contains("://") {
        bail!("{base} redirects to {to}, which is not HTTP");
    }
    let folder = uri.path().rsplit_once('/').map_or("", |(folder, _)| folder);
    Ok(format!("{scheme}://{authority}{folder}/{to}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_may_be_relative_but_not_leave_http() {
        let base = "https://hub.example/a/b?x=1";
        for (to, want) in [
            ("https://cdn.example/f", "https://cdn.example/f"),
            ("//cdn.example/f", "https://cdn.example/f"),
            ("/c/d?y=2", "https://hub.example/c/d?y=2"),
            ("f", "https://hub.example/a/f"),
        ] {
            assert_eq!(absolute(base, to).unwrap(), want);
        }
        assert!(absolute(base, "file:///etc/passwd").is_err());
    }

    #[test]
    fn a_token_stays_with_its_host_port_and_scheme() {
        let home = "https://hub.example/m";
        assert!(same_host("https://hub.example/other", home));
        for other in ["https://cdn.example/m", "http://hub.example/m", "https://hub.example:444/m"]
        {
            assert!(!same_host(other, home), "{other}");
        }
    }
}
