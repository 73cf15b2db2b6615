//! Room for the bytes that travel with dispatches, each piece in an address window of its own. It knows no dispatch.

use std::ptr::null_mut;

use crate::Error;
use crate::dispatch::INLINE_BYTES;
use crate::ffi::Binding;

/// A window: the bytes in the middle third.
const STRIDE: usize = 3 * INLINE_BYTES;

#[derive(Debug)]
pub(crate) struct Arena {
    room: Vec<u128>,
    used: usize,
}

impl Arena {
    /// Room for `pieces` pieces.
    pub(crate) fn new(pieces: usize) -> Result<Arena, Error> {
        Ok(Arena { room: vec![0; pieces * STRIDE / 16], used: 0 })
    }

    /// Copies a piece in; the arena must have been made with room for it.
    pub(crate) fn add(&mut self, bytes: &[u8]) -> Binding {
        let at = self.used * STRIDE / 16;
        self.used += 1;
        let window = &mut self.room[at..at + STRIDE / 16];
        let start = window.as_mut_ptr() as usize;
        for (word, piece) in window[INLINE_BYTES / 16..].iter_mut().zip(bytes.chunks(16)) {
            let mut whole = [0; 16];
            whole[..piece.len()].copy_from_slice(piece);
            *word = u128::from_ne_bytes(whole);
        }
        Binding {
            window: start,
            window_len: STRIDE as u64,
            low: start + INLINE_BYTES,
            len: bytes.len() as u64,
            in_buffer: 0,
            written: null_mut(),
            cells: null_mut(),
            read_set: null_mut(),
            write_set: null_mut(),
            writable: 0,
            index: 0,
            loads: 0,
            load_bytes: 0,
            stores: 0,
            store_bytes: 0,
        }
    }
}
