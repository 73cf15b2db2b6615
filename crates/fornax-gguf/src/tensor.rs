//! One row of the tensor table, with sizes already checked. It must not know what a tensor is for.

use crate::TensorType;

/// A tensor of an opened file: its shape, its type and where its bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name, unique in the file and in its split set.
    pub name: String,
    /// The element type.
    pub ty: TensorType,
    /// One to four dimensions, none of them 0, fastest first: `dims[0]` is the length of a row.
    pub dims: Vec<u64>,
    /// Where the bytes start, counted from the start of the mapping of its shard.
    pub offset: u64,
    /// Bytes of the tensor; `offset + len` lies within the mapping.
    pub len: u64,
    /// Which file of a split set holds the bytes; 0 for a single file.
    pub shard: usize,
}

impl TensorInfo {
    /// Number of elements.
    pub fn n_elements(&self) -> u64 {
        self.dims.iter().product()
    }

    /// Length of a row: the fastest dimension.
    pub fn cols(&self) -> u64 {
        self.dims[0]
    }

    /// Number of rows: the product of all dimensions but the fastest.
    pub fn rows(&self) -> u64 {
        self.dims[1..].iter().product()
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> u64 {
        self.len / self.rows()
    }
}
