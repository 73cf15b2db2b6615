//! A bounds-checked place in bytes, with errors that say what was being read and where. It must not know
//! the format beyond how it stores numbers and strings.

use std::fmt::Display;

use crate::Error;

/// What is being read, in words that follow "reading"; made only for a message.
pub(crate) type Doing<'a> = &'a dyn Fn() -> String;

/// Bytes that header, metadata and tensor table may have together. Vocabularies take some 20 MiB; a file may
/// be sparse, so that its length alone does not bound what reading it takes.
const HEAD_LEN_MAX: usize = 256 << 20;

/// Longest key or tensor name in bytes; the specification's bound for keys.
const NAME_LEN_MAX: u64 = 65_535;

pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Whether there are bytes past the bound.
    bounded: bool,
}

impl<'a> Cursor<'a> {
    /// A cursor at the start of a file, for its head.
    pub(crate) fn new(file: &'a [u8]) -> Cursor<'a> {
        let bytes = &file[..file.len().min(HEAD_LEN_MAX)];
        Cursor { bytes, at: 0, bounded: bytes.len() < file.len() }
    }

    pub(crate) fn at(&self) -> usize {
        self.at
    }

    pub(crate) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The next `len` bytes.
    pub(crate) fn take(&mut self, len: usize, doing: Doing<'_>) -> Result<&'a [u8], Error> {
        match self.bytes[self.at..].get(..len) {
            Some(taken) => {
                self.at += len;
                Ok(taken)
            }
            None => Err(self.cut(len as u64, doing)),
        }
    }

    pub(crate) fn array<const N: usize>(&mut self, doing: Doing<'_>) -> Result<[u8; N], Error> {
        match self.bytes[self.at..].first_chunk::<N>() {
            Some(taken) => {
                self.at += N;
                Ok(*taken)
            }
            None => Err(self.cut(N as u64, doing)),
        }
    }

    pub(crate) fn u32(&mut self, doing: Doing<'_>) -> Result<u32, Error> {
        self.array(doing).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, doing: Doing<'_>) -> Result<u64, Error> {
        self.array(doing).map(u64::from_le_bytes)
    }

    /// A string of any bytes. Its length is compared with the bytes that are left before anything else.
    pub(crate) fn string(&mut self, doing: Doing<'_>) -> Result<&'a [u8], Error> {
        let len = self.u64(doing)?;
        match usize::try_from(len) {
            Ok(len) if len <= self.left() => self.take(len, doing),
            _ => Err(self.cut(len, doing)),
        }
    }

    /// The name of a key or a tensor: UTF-8, not empty, of bounded length.
    pub(crate) fn name(&mut self, doing: Doing<'_>) -> Result<&'a str, Error> {
        let start = self.at;
        let raw = self.string(doing)?;
        let fault = if raw.is_empty() {
            "it is empty"
        } else if raw.len() as u64 > NAME_LEN_MAX {
            "it is longer than 65535 bytes"
        } else {
            match std::str::from_utf8(raw) {
                Ok(name) => return Ok(name),
                Err(_) => "it is not UTF-8",
            }
        };
        Err(Error::malformed(format!("reading {} at byte {start}: {fault}", doing())))
    }

    /// `count` numbers of `N` bytes each.
    pub(crate) fn numbers<const N: usize, T>(
        &mut self,
        count: usize,
        doing: Doing<'_>,
        from: fn([u8; N]) -> T,
    ) -> Result<Vec<T>, Error> {
        let Some(len) = count.checked_mul(N) else { return Err(self.cut(u64::MAX, doing)) };
        let (chunks, _) = self.take(len, doing)?.as_chunks::<N>();
        Ok(chunks.iter().map(|&chunk| from(chunk)).collect())
    }

    /// The error for `needed` bytes, or something that takes at least as many, where there are fewer.
    pub(crate) fn cut(&self, needed: impl Display, doing: Doing<'_>) -> Error {
        let (doing, at, left) = (doing(), self.at, self.left());
        if self.bounded {
            return Error::unsupported(format!(
                "reading {doing} at byte {at}: {needed} bytes needed, but metadata and tensor table may not reach \
                 past {HEAD_LEN_MAX} bytes; the file is damaged"
            ));
        }
        Error::malformed(format!(
            "reading {doing} at byte {at}: {needed} bytes needed, {left} left; the file is cut or damaged, fetch it \
             again"
        ))
    }
}
