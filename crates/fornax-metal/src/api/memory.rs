//! Buffers of the stand-in: shared words, or a file's bytes. It knows no command.

use std::ops::Range;
use std::sync::Arc;

use fornax_gguf::Mapping;

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

#[derive(Debug, Default)]
pub(crate) struct Memory {
    stores: Vec<Store>,
}

#[derive(Debug)]
enum Store {
    Words(Vec<u32>),
    Mapped(Arc<Mapping>, usize),
}

/// What a command sees of one argument: a copy, so that it cannot reach beyond.
#[derive(Clone, Debug)]
pub(crate) enum View {
    Words(Vec<u32>),
    Mapped(Arc<Mapping>, Range<usize>),
}

impl Memory {
    pub(crate) fn add(&mut self, words: usize) -> Buffer {
        self.stores.push(Store::Words(vec![0; words]));
        Buffer { id: self.stores.len() as u32 - 1, len_bytes: 4 * words }
    }

    pub(crate) fn wrap(&mut self, map: &Arc<Mapping>, offset: usize, len: usize) -> Buffer {
        self.stores.push(Store::Mapped(Arc::clone(map), offset));
        Buffer { id: self.stores.len() as u32 - 1, len_bytes: len }
    }

    pub(crate) fn words_mut(&mut self, buffer: Buffer) -> &mut [u32] {
        match &mut self.stores[buffer.id as usize] {
            Store::Words(words) => words,
            Store::Mapped(..) => &mut [],
        }
    }

    pub(crate) fn view(&self, slice: &Slice) -> View {
        let bytes = slice.bytes.clone();
        match &self.stores[slice.buffer.id as usize] {
            Store::Words(words) => View::Words(words[bytes.start / 4..bytes.end / 4].to_vec()),
            Store::Mapped(map, offset) => {
                View::Mapped(Arc::clone(map), offset + bytes.start..offset + bytes.end)
            }
        }
    }

    pub(crate) fn store(&mut self, slice: &Slice, words: &[u32]) {
        let at = slice.bytes.start / 4;
        self.words_mut(slice.buffer)[at..at + words.len()].copy_from_slice(words);
    }
}
