//! The integration tests of `fornax-gguf`. They know bytes and fixtures; they must not know models.

mod blocks;
