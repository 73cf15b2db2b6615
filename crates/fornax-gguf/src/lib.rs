//! GGUF files: metadata, tensor table, memory map, split sets, block formats and a writer. It must not
//! know what a model or a device is.
//!
//! A file is opened by [`Gguf::open`], which parses the header and the tables and touches no weight page.
//! Everything in a file is hostile until checked: counts are bounded by the bytes that are left before
//! anything is allocated, sizes are computed with checked arithmetic, and a fault is an [`Error`] that
//! names the key or the tensor, never a panic.
//!
//! Layout and constants follow the GGUF specification, versions 2 and 3, little-endian
//! (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>).

pub mod blocks;
mod cursor;
mod error;
mod file;
mod mapping;
mod metadata;
mod reader;
mod split;
mod tensor;
mod tensor_type;
mod value;
mod writer;

pub use error::Error;
pub use file::Gguf;
pub use mapping::Mapping;
pub use metadata::{Metadata, PerLayer};
pub use tensor::TensorInfo;
pub use tensor_type::TensorType;
pub use value::{Array, BytesArray, StrArray, Value};
pub use writer::{DataWriter, GgufWriter};
