//! The two streams: stdout carries the product and nothing else, stderr everything else and never matters.
//! Knows nothing of what is written.

use std::io::{self, IsTerminal, Write};

use anyhow::{Context, Result};
use serde::Serialize;

use crate::flags::high::{Config, Volume};

/// The reader of stdout went away: a quiet end, not a failure.
#[derive(Debug)]
struct ReaderLeft;

impl std::fmt::Display for ReaderLeft {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the reader of standard output went away")
    }
}

impl std::error::Error for ReaderLeft {}

/// Whether `error` only says that nobody reads stdout any more.
pub(crate) fn reader_left(error: &anyhow::Error) -> bool {
    error.is::<ReaderLeft>()
}

/// Writes product bytes and hands them on at once, so that streaming streams.
///
/// # Errors
/// A closed pipe is told apart by [`reader_left`]; anything else (a full disk) is a failure.
pub(crate) fn product(bytes: &[u8]) -> Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Err(ReaderLeft.into()),
        Err(e) => Err(e).context("could not write to standard output"),
    }
}

/// One JSON object and a newline.
///
/// # Errors
/// As [`product`].
pub(crate) fn json(value: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_vec(value).context("could not write the result as JSON")?;
    text.push(b'\n');
    product(&text)
}

/// A line on stderr unless `--quiet`. A closed stderr is nobody's problem.
pub(crate) fn note(config: &Config, line: &str) {
    if config.volume >= Volume::Normal {
        say(line);
    }
}

/// A line on stderr under `--verbose`.
pub(crate) fn detail(config: &Config, line: &str) {
    if config.volume >= Volume::Verbose {
        say(line);
    }
}

/// The last line of a command that failed.
pub(crate) fn complain(error: &anyhow::Error) {
    say(&format!("fornax: {error:#}"));
}

fn say(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// More than any context holds; a pipe without an end must not take all memory.
const STDIN_BYTES_MAX: u64 = 256 << 20;

/// All of stdin.
///
/// # Errors
/// When stdin is a terminal (`what` names what was left out), cannot be read, or does not end in time.
pub(crate) fn stdin_bytes(what: &str) -> Result<Vec<u8>> {
    let input = io::stdin().lock();
    if input.is_terminal() {
        let advice = format!("no {what} was given: put it on the command line or pipe it in");
        return Err(crate::cmd::Usage(advice).into());
    }
    let mut bytes = Vec::new();
    let mut input = io::Read::take(input, STDIN_BYTES_MAX + 1);
    io::Read::read_to_end(&mut input, &mut bytes).context("could not read standard input")?;
    if bytes.len() as u64 > STDIN_BYTES_MAX {
        anyhow::bail!(
            "standard input has more than {STDIN_BYTES_MAX} bytes, the most that is read"
        );
    }
    Ok(bytes)
}

/// All of stdin as text; bytes that are no UTF-8 become U+FFFD, one for each maximal subpart.
///
/// # Errors
/// As [`stdin_bytes`].
pub(crate) fn stdin_text(what: &str) -> Result<String> {
    Ok(String::from_utf8_lossy(&stdin_bytes(what)?).into_owned())
}
