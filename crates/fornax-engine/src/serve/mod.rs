//! Many requests at once on one program: an engine thread that owns everything that changes, and
//! a handle through which requests come in and updates go out. It knows tokens alone: no text,
//! no HTTP, no provider.

mod api;
mod bits;
mod choose;
mod core;
mod cost;
mod handle;
mod request;
mod results;
mod schedule;
#[cfg(test)]
mod simulate;
mod size;
mod trial;

pub use api::{
    Constraint, Done, Finish, Generation, Pooling, Publish, Refused, RequestId, ServeOptions,
    Stats, TokenUpdate, Update,
};
pub use bits::BitSet;
pub use handle::{Engine, EngineHandle};
