//! The description of the interface: one text from which `/openapi.json`, the tables of the documentation
//! and the check of every request are made. Knows what fields are called, not what they do.

pub(crate) mod body;
mod document;
pub(crate) mod shape;
#[cfg(test)]
mod tables;

pub(crate) use body::Body;
pub(crate) use document::Document;
