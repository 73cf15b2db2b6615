//! Buffers: the emulator's memory, or the system's. It knows no command.

use std::ops::Range;
use std::sync::Arc;

use fornax_gguf::Mapping;
use fornax_plan::{Error, Result};

use super::health::Live;
use super::system;

/// A buffer's handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    pub(crate) id: u32,
    /// Length in bytes.
    pub len_bytes: usize,
}

impl Buffer {
    /// All of it.
    pub fn all(self) -> Slice {
        Slice { buffer: self, bytes: 0..self.len_bytes }
    }

    /// The words `range` of it.
    pub fn words(self, range: Range<usize>) -> Slice {
        Slice { buffer: self, bytes: 4 * range.start..4 * range.end }
    }
}

/// A range of a buffer, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// The buffer.
    pub buffer: Buffer,
    /// The bytes, within the buffer.
    pub bytes: Range<usize>,
}

/// Bytes of what stands for an argument that is not there: as long as the largest element that a kernel points to, which is
/// checked where it is bound. Arguments may not overlap, so that each slot has its own.
pub(super) const NOTHING_BYTES: usize = 64;

/// Bytes of a page on Apple silicon.
pub(super) const PAGE: usize = 16 * 1024;

/// Whole pages of a map of `total` bytes that hold `range`: all of it where a buffer may be that long, else from the
/// range's first page on; none where the range alone is longer.
#[cfg_attr(
    not(any(target_os = "macos", test)),
    allow(dead_code, reason = "for the system's Metal")
)]
pub(super) fn window(total: usize, longest: usize, range: Range<usize>) -> Option<Range<usize>> {
    let (total, longest) = (total.next_multiple_of(PAGE), longest / PAGE * PAGE);
    if total <= longest {
        return Some(0..total);
    }
    let start = range.start / PAGE * PAGE;
    let end = (start + longest).min(total);
    (range.end <= end).then_some(start..end)
}

#[derive(Debug, Default)]
pub(crate) struct Memory {
    stores: Vec<Store>,
    /// Counts each of them that is there.
    live: Vec<Option<Live>>,
    released: u64,
    /// Whole maps that the emulator has wrapped, each once.
    wrapped: Vec<(Arc<Mapping>, fornax_msl::Buffer)>,
    /// Pages of maps that the system has wrapped, and where in the map they begin.
    pub(super) pages: Vec<(Arc<Mapping>, usize, system::Buffer)>,
}

/// A map's bytes as the emulator takes them.
struct Bytes(Arc<Mapping>);

impl AsRef<[u8]> for Bytes {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

#[derive(Debug)]
enum Store {
    /// One that was let go of: its number is not used again.
    Gone,
    /// A buffer of the emulator's and where this one begins in it.
    Emulated(fornax_msl::Buffer, usize),
    /// A buffer of the system's and where this one begins in it.
    System(system::Buffer, usize),
}

impl Memory {
    /// Keeps the count of a buffer as long as the buffer.
    pub(crate) fn keep(&mut self, live: Live) {
        self.live.push(Some(live));
    }

    /// Forgets a buffer.
    pub(crate) fn release(&mut self, buffer: Buffer) {
        self.stores[buffer.id as usize] = Store::Gone;
        self.live[buffer.id as usize] = None;
        self.released += 1;
    }

    /// Buffers that were let go of so far.
    #[cfg_attr(not(target_os = "macos"), allow(dead_code, reason = "for the system's Metal"))]
    pub(super) fn released(&self) -> u64 {
        self.released
    }

    /// Buffers made so far.
    pub(crate) fn made(&self) -> u64 {
        self.stores.len() as u64
    }

    /// Memory of the emulator's, which counts as never written.
    pub(crate) fn add_emulated(&mut self, label: &str, words: usize) -> Result<Buffer> {
        let buffer = fornax_msl::Buffer::new(label, 4 * words).map_err(|e| host(&e))?;
        Ok(self.emulated_store(buffer, 0, 4 * words))
    }

    pub(crate) fn wrap_emulated(
        &mut self,
        map: &Arc<Mapping>,
        offset: usize,
        len: usize,
    ) -> Result<Buffer> {
        let known = self.wrapped.iter().find(|(m, _)| Arc::ptr_eq(m, map)).map(|(_, b)| b.clone());
        let whole = match known {
            Some(whole) => whole,
            None => {
                let owner: fornax_msl::Owner = Arc::new(Bytes(Arc::clone(map)));
                let whole = fornax_msl::Buffer::wrap("weights", &owner).map_err(|e| host(&e))?;
                self.wrapped.push((Arc::clone(map), whole.clone()));
                whole
            }
        };
        Ok(self.emulated_store(whole, offset, len))
    }

    /// The system's memory, `len` bytes from `offset` on.
    pub(crate) fn add_system(&mut self, b: system::Buffer, offset: usize, len: usize) -> Buffer {
        self.stores.push(Store::System(b, offset));
        Buffer { id: self.stores.len() as u32 - 1, len_bytes: len }
    }

    /// The system's buffer behind a slice, and the first byte.
    #[cfg_attr(not(target_os = "macos"), allow(dead_code, reason = "for the system's Metal"))]
    pub(crate) fn system(&self, slice: &Slice) -> Option<(&system::Buffer, usize)> {
        match &self.stores[slice.buffer.id as usize] {
            Store::System(buffer, offset) => Some((buffer, offset + slice.bytes.start)),
            _ => None,
        }
    }

    /// The system's buffers from number `first` on.
    #[cfg_attr(not(target_os = "macos"), allow(dead_code, reason = "for the system's Metal"))]
    pub(super) fn system_buffers(&self, first: usize) -> impl Iterator<Item = &system::Buffer> {
        self.stores[first..].iter().filter_map(|s| match s {
            Store::System(buffer, _) => Some(buffer),
            _ => None,
        })
    }

    /// Buffers of all kinds.
    #[cfg_attr(not(target_os = "macos"), allow(dead_code, reason = "for the system's Metal"))]
    pub(super) fn count(&self) -> usize {
        self.stores.len()
    }

    fn emulated_store(&mut self, b: fornax_msl::Buffer, offset: usize, len: usize) -> Buffer {
        self.stores.push(Store::Emulated(b, offset));
        Buffer { id: self.stores.len() as u32 - 1, len_bytes: len }
    }

    /// The emulator's buffer behind a slice, and the first byte.
    pub(crate) fn emulated(&self, slice: &Slice) -> Option<(&fornax_msl::Buffer, usize)> {
        match &self.stores[slice.buffer.id as usize] {
            Store::Emulated(buffer, offset) => Some((buffer, offset + slice.bytes.start)),
            _ => None,
        }
    }

    /// Copies words in, from word `at` on.
    pub(crate) fn write(&mut self, buffer: Buffer, at: usize, from: &[u32]) {
        match &mut self.stores[buffer.id as usize] {
            Store::Emulated(b, offset) => {
                b.write(*offset + 4 * at, bytes_of(from)).expect(KNOWN);
            }
            Store::System(b, offset) => b.write(*offset + 4 * at, from),
            Store::Gone => {
                unreachable!("invariant: nobody keeps the handle of a buffer that is gone")
            }
        }
    }

    /// Copies words out, from word `at` on.
    pub(crate) fn read(&self, buffer: Buffer, at: usize, to: &mut [u32]) {
        match &self.stores[buffer.id as usize] {
            Store::Emulated(b, offset) => {
                b.read(offset + 4 * at, bytes_of_mut(to)).expect(KNOWN);
            }
            Store::System(b, offset) => b.read(offset + 4 * at, to),
            Store::Gone => {
                unreachable!("invariant: nobody keeps the handle of a buffer that is gone")
            }
        }
    }
}

const KNOWN: &str = "invariant: the host knows its buffers";

fn bytes_of(words: &[u32]) -> &[u8] {
    // SAFETY: the words' own bytes, for as long as the words are borrowed; any byte is one.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
}

fn bytes_of_mut(words: &mut [u32]) -> &mut [u8] {
    // SAFETY: as above, borrowed for writing; any four bytes are a word.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), size_of_val(words)) }
}

fn host(e: &fornax_msl::Error) -> Error {
    Error::unsupported(format!("metal emulator: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_whole_pages_that_hold_the_range() {
        assert_eq!(window(100, 1 << 30, 3..50), Some(0..PAGE));
        assert_eq!(
            window(10 * PAGE + 1, 11 * PAGE, 0..5),
            Some(0..11 * PAGE),
            "the last page is whole"
        );
        let longest = 4 * PAGE + 77;
        assert_eq!(window(10 * PAGE, longest, 5 * PAGE + 3..6 * PAGE), Some(5 * PAGE..9 * PAGE));
        assert_eq!(window(10 * PAGE, longest, 9 * PAGE..10 * PAGE), Some(9 * PAGE..10 * PAGE));
        assert_eq!(
            window(10 * PAGE, longest, 5 * PAGE + 3..9 * PAGE + 4),
            None,
            "one page too long"
        );
    }
}
