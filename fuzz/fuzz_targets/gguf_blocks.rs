//! Decodes arbitrary bytes as blocks of any type and encodes the result. It must not know the formats.
#![no_main]
#![allow(dead_code, reason = "the shared body serves two targets")]

#[path = "../../crates/fornax-gguf/tests/it/exercise.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    exercise::blocks(bytes);
});
