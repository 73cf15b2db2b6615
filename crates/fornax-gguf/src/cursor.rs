//! A bounds-checked place in bytes, with errors that say what was being read and where. It must not know
//! the format beyond how it stores numbers and strings.

use crate::Error;

/// What is being read, in words that follow "reading"; made only for a message.
pub(crate) type Doing<'a> = &'a dyn Fn() -> String;

/// Longest key or tensor name in bytes; the specification's bound for keys.
const NAME_LEN_MAX: u64 = 65_535;

pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Cursor<'a> {
        Cursor { bytes, at: 0 }
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

    fn cut(&self, needed: u64, doing: Doing<'_>) -> Error {
        Error::malformed(format!(
            "reading {} at byte {}: {needed} bytes needed, {} left; the file is cut or damaged, fetch it again",
            doing(),
            self.at,
            self.left()
        ))
    }
}
