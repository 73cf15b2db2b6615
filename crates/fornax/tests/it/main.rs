//! The fornax binary from outside: what it prints, where, and with which exit code. Needs no network and no real model.
//! Must not know how the binary is built inside.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

#[cfg(unix)]
mod against;
mod cli;
mod files;
mod generate;
mod held;
mod hub;
mod kills;
mod metal;
mod modes;
mod program;
mod pull;
#[cfg(unix)]
mod serve;
