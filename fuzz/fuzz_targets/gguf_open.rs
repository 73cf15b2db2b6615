//! Opens arbitrary bytes as a GGUF file and does with it what a caller may do. It must not know more of the
//! format than the test that it shares its body with.
#![no_main]
#![allow(dead_code, reason = "the shared body serves two targets")]

#[path = "../../crates/fornax-gguf/tests/it/exercise.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    exercise::open(bytes);
});
