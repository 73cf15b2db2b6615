//! The CPU provider through the boundary alone.
#![allow(clippy::unwrap_used, reason = "a test stops where it fails")]

mod heads;
mod invariance;
mod program;
mod prompt;
