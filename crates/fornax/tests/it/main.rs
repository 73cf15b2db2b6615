//! The fornax binary from outside: what it prints, where, and with which exit code. Needs no network and no real model.
//! Must not know how the binary is built inside.

mod cli;
mod hub;
mod program;
mod pull;
