//! An opened GGUF file or split set: metadata, one tensor table, the mappings. It must not know what the
//! tensors are for.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::quoted;
use crate::reader::{self, Header};
use crate::split;
use crate::{Error, Mapping, Metadata, TensorInfo};

/// A GGUF file, or a set of files that a model was split into, memory-mapped.
///
/// Opening reads the headers only; a weight's page is read when somebody reads the weight.
pub struct Gguf {
    shards: Vec<Shard>,
    tensors: Vec<TensorInfo>,
    /// Indices of `tensors`, sorted by name.
    by_name: Vec<u32>,
}

/// One file of the set.
pub(crate) struct Shard {
    pub(crate) path: Option<PathBuf>,
    pub(crate) mapping: Arc<Mapping>,
    pub(crate) header: Header,
}

impl Shard {
    pub(crate) fn open(path: &Path) -> Result<Shard, Error> {
        Shard::parse(Mapping::open(path)?, Some(path.to_path_buf())).map_err(|e| e.in_file(path))
    }

    fn parse(mapping: Mapping, path: Option<PathBuf>) -> Result<Shard, Error> {
        let header = reader::parse(mapping.bytes())?;
        Ok(Shard { path, mapping: Arc::new(mapping), header })
    }
}

impl Gguf {
    /// Opens the file at `path`, and with it all files of its split set, whichever of them `path` is.
    ///
    /// The files of a set are looked for beside `path` by the names that the format prescribes:
    /// `NAME-00001-of-00003.gguf` and so on.
    ///
    /// # Errors
    /// `is_io`, `is_malformed` and `is_unsupported` as for any reading; `is_missing` where a file of a split
    /// set is not there. Messages name the file.
    pub fn open(path: &Path) -> Result<Gguf, Error> {
        let shards = split::complete(Shard::open(path)?)?;
        Gguf::from_shards(shards).map_err(|e| e.in_file(path))
    }

    /// Parses a file that is in memory. The bytes are copied once, to a page-aligned address.
    ///
    /// # Errors
    /// As for [`Gguf::open`]; a file of a split set is `is_missing`, as its fellows cannot be found.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Gguf, Error> {
        Gguf::from_shards(split::complete(Shard::parse(Mapping::from_vec(bytes), None)?)?)
    }

    fn from_shards(mut shards: Vec<Shard>) -> Result<Gguf, Error> {
        let mut tensors = Vec::new();
        for (index, shard) in shards.iter_mut().enumerate() {
            let first = tensors.len();
            tensors.append(&mut shard.header.tensors);
            for tensor in &mut tensors[first..] {
                tensor.shard = index;
            }
        }
        let mut by_name: Vec<u32> = (0..tensors.len() as u32).collect();
        by_name.sort_unstable_by(|&a, &b| tensors[a as usize].name.cmp(&tensors[b as usize].name));
        for pair in by_name.windows(2) {
            let (a, b) = (&tensors[pair[0] as usize], &tensors[pair[1] as usize]);
            if a.name == b.name {
                let error = Error::malformed(format!(
                    "reading the tensor table: tensor {} comes twice, names have to be unique",
                    quoted(&a.name)
                ));
                return Err(match &shards[a.shard.max(b.shard)].path {
                    Some(path) => error.in_file(path),
                    None => error,
                });
            }
        }
        Ok(Gguf { shards, tensors, by_name })
    }

    /// Keys and values; those of the first file where there are several.
    pub fn metadata(&self) -> &Metadata {
        &self.shards[0].header.metadata
    }

    /// All tensors: file after file, in the order of each table.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        let at = self
            .by_name
            .binary_search_by(|&i| self.tensors[i as usize].name.as_str().cmp(name))
            .ok()?;
        Some(&self.tensors[self.by_name[at] as usize])
    }

    /// The bytes of the file that holds `tensor`.
    ///
    /// # Panics
    /// If `tensor` is of another `Gguf` with more files.
    pub fn mapping(&self, tensor: &TensorInfo) -> &Arc<Mapping> {
        &self.shards[tensor.shard].mapping
    }

    /// The bytes of `tensor`, in the block format of its type.
    ///
    /// # Panics
    /// If `tensor` is of another `Gguf` and does not fit this one.
    pub fn data(&self, tensor: &TensorInfo) -> &[u8] {
        let start = tensor.offset as usize;
        &self.mapping(tensor).bytes()[start..start + tensor.len as usize]
    }

    /// Version of the format: 2 or 3.
    pub fn version(&self) -> u32 {
        self.shards[0].header.version
    }

    /// Alignment of tensor data in bytes.
    pub fn alignment(&self) -> u32 {
        self.shards[0].header.alignment
    }

    /// Number of files.
    pub fn n_shards(&self) -> usize {
        self.shards.len()
    }

    /// The files in the order of the set; none if opened from memory.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().filter_map(|s| s.path.as_deref())
    }

    /// The mappings in the order of the set.
    pub fn mappings(&self) -> impl ExactSizeIterator<Item = &Arc<Mapping>> {
        self.shards.iter().map(|s| &s.mapping)
    }

    /// Bytes of all files together.
    pub fn file_bytes(&self) -> u64 {
        self.shards.iter().map(|s| s.mapping.len() as u64).sum()
    }

    /// Bytes of all tensors together.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.len).sum()
    }

    /// Elements of all tensors together.
    pub fn n_elements(&self) -> u64 {
        self.tensors.iter().map(TensorInfo::n_elements).sum()
    }
}

impl fmt::Debug for Gguf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gguf")
            .field("paths", &self.paths().collect::<Vec<_>>())
            .field("version", &self.version())
            .field("keys", &self.metadata().len())
            .field("tensors", &self.tensors.len())
            .finish()
    }
}
