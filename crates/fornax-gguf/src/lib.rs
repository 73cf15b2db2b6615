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
//!
//! ```
//! use fornax_gguf::{Gguf, GgufWriter, Metadata, TensorType, blocks};
//!
//! let mut metadata = Metadata::new();
//! metadata.set("general.architecture", "example");
//! let mut writer = GgufWriter::new(&metadata)?;
//! writer.tensor("w", TensorType::Q8_0, &[32, 2])?;
//! let mut packed = vec![0; 68];
//! blocks::quantize(TensorType::Q8_0, &[0.5; 64], &mut packed)?;
//! let mut data = writer.begin(Vec::new())?;
//! data.write(&packed)?;
//!
//! let gguf = Gguf::from_bytes(data.finish()?)?;
//! assert_eq!(gguf.metadata().str("general.architecture")?, Some("example"));
//! let w = gguf.tensor("w").expect("it was written");
//! let mut weights = vec![0.0; w.n_elements() as usize];
//! blocks::dequantize(w.ty, gguf.data(w), &mut weights)?;
//! assert!(weights.iter().all(|w| (w - 0.5).abs() < 0.001));
//! # Ok::<(), fornax_gguf::Error>(())
//! ```

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
