//! The server over real sockets: every endpoint, hostile requests, clients that leave, and many at once. Answers come
//! from a tiny model, or from a script where what comes must be known.

mod attack;
mod client;
mod disconnect;
mod fixture;
mod hostile;
mod openai;
mod protocols;
mod script;
mod server;
mod stalled;
mod streams;
