//! Writes GGUF files, version 3: header and tables first, then tensor data as it comes. Deterministic: the
//! same input gives the same bytes. It must not know what is worth writing.

use std::io::{self, Write};

use crate::error::quoted;
use crate::reader;
use crate::{Array, Error, Metadata, TensorType, Value};

/// A file to be written: its metadata and the shapes of its tensors, in order.
#[derive(Debug)]
pub struct GgufWriter<'a> {
    metadata: &'a Metadata,
    alignment: u64,
    tensors: Vec<Entry>,
    /// Bytes of tensor data so far, padded.
    data_len: u64,
}

#[derive(Debug)]
struct Entry {
    name: String,
    ty: TensorType,
    dims: Vec<u64>,
    offset: u64,
    len: u64,
}

/// The data part of a file whose header has been written: takes the bytes of the tensors in order.
#[derive(Debug)]
pub struct DataWriter<W> {
    out: W,
    alignment: u64,
    /// Names and lengths of the tensors that are not complete.
    expected: std::vec::IntoIter<(String, u64)>,
    /// The tensor being written, and how many of its bytes have come.
    current: Option<(String, u64, u64)>,
}

impl<'a> GgufWriter<'a> {
    /// A file with these keys and values and, so far, no tensors. `general.alignment` is honoured.
    ///
    /// # Errors
    /// `is_malformed` where `general.alignment` is none.
    pub fn new(metadata: &'a Metadata) -> Result<GgufWriter<'a>, Error> {
        let alignment = u64::from(reader::alignment(metadata)?);
        Ok(GgufWriter { metadata, alignment, tensors: Vec::new(), data_len: 0 })
    }

    /// Adds a tensor; `dims` fastest first. Its data follows in the same order.
    ///
    /// # Errors
    /// `is_argument` for a shape or a name that a reader would refuse.
    pub fn tensor(&mut self, name: &str, ty: TensorType, dims: &[u64]) -> Result<(), Error> {
        if name.is_empty() || name.len() > 65_535 {
            return Err(Error::argument(format!("adding tensor {}: unfit name", quoted(name))));
        }
        if dims.is_empty() || dims.len() > 4 || dims.contains(&0) {
            return Err(Error::argument(format!(
                "adding tensor {}: shape {dims:?}, expected 1 to 4 dimensions, none of them 0",
                quoted(name)
            )));
        }
        let argument = |e: Error| Error::argument(e.to_string());
        let len = reader::tensor_len(name, ty, dims).map_err(argument)?;
        let offset = self.data_len;
        self.data_len = offset
            .checked_add(len)
            .and_then(|end| end.checked_next_multiple_of(self.alignment))
            .ok_or_else(|| Error::argument(format!("adding tensor {}: too large", quoted(name))))?;
        let (name, dims) = (name.to_owned(), dims.to_vec());
        self.tensors.push(Entry { name, ty, dims, offset, len });
        Ok(())
    }

    /// Bytes of all tensors with their padding.
    pub fn data_len(&self) -> u64 {
        self.data_len
    }

    /// Writes the header and the tables to `out`.
    ///
    /// # Errors
    /// `is_io` where `out` fails, `is_argument` for a value that the format cannot hold.
    pub fn begin<W: Write>(self, mut out: W) -> Result<DataWriter<W>, Error> {
        let mut names: Vec<&str> = self.tensors.iter().map(|t| &*t.name).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            let name = quoted(pair[0]);
            return Err(Error::argument(format!("writing a GGUF file: tensor {name} comes twice")));
        }
        let mut head = Vec::new();
        head.extend_from_slice(b"GGUF");
        head.extend_from_slice(&3u32.to_le_bytes());
        head.extend_from_slice(&(self.tensors.len() as u64).to_le_bytes());
        head.extend_from_slice(&(self.metadata.len() as u64).to_le_bytes());
        for (key, value) in self.metadata.iter() {
            if key.is_empty() || key.len() > 65_535 {
                return Err(Error::argument(format!("writing key {}: unfit name", quoted(key))));
            }
            put_string(&mut head, key.as_bytes());
            put_value(&mut head, value);
        }
        for t in &self.tensors {
            put_string(&mut head, t.name.as_bytes());
            head.extend_from_slice(&(t.dims.len() as u32).to_le_bytes());
            for dim in &t.dims {
                head.extend_from_slice(&dim.to_le_bytes());
            }
            head.extend_from_slice(&t.ty.id().to_le_bytes());
            head.extend_from_slice(&t.offset.to_le_bytes());
        }
        head.resize(head.len().next_multiple_of(self.alignment as usize), 0);
        out.write_all(&head).map_err(write_error)?;
        let expected: Vec<_> = self.tensors.into_iter().map(|t| (t.name, t.len)).collect();
        let mut writer = DataWriter {
            out,
            alignment: self.alignment,
            expected: expected.into_iter(),
            current: None,
        };
        writer.advance();
        Ok(writer)
    }
}

impl<W: Write> DataWriter<W> {
    /// Writes the next bytes of the current tensor, all of them or a part; the next tensor begins where one
    /// is complete.
    ///
    /// # Errors
    /// `is_argument` where `bytes` reach past the end of the tensor, `is_io` where the output fails.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let Some((name, done, len)) = &mut self.current else {
            return Err(Error::argument("writing tensor data: all tensors are complete"));
        };
        if bytes.len() as u64 > *len - *done {
            return Err(Error::argument(format!(
                "writing tensor {}: {} bytes given, {} of {len} are left",
                quoted(name),
                bytes.len(),
                *len - *done
            )));
        }
        self.out.write_all(bytes).map_err(write_error)?;
        *done += bytes.len() as u64;
        if done == len {
            let padding = len.next_multiple_of(self.alignment) - *len;
            io::copy(&mut io::Read::take(io::repeat(0), padding), &mut self.out)
                .map_err(write_error)?;
            self.advance();
        }
        Ok(())
    }

    /// Flushes the output and gives it back.
    ///
    /// # Errors
    /// `is_argument` where a tensor is not complete, `is_io` where the output fails.
    pub fn finish(mut self) -> Result<W, Error> {
        if let Some((name, done, len)) = &self.current {
            return Err(Error::argument(format!(
                "writing tensor {}: {done} of {len} bytes were given",
                quoted(name)
            )));
        }
        self.out.flush().map_err(write_error)?;
        Ok(self.out)
    }

    fn advance(&mut self) {
        self.current = self.expected.next().map(|(name, len)| (name, 0, len));
    }
}

fn write_error(source: io::Error) -> Error {
    Error::io("writing a GGUF file", source)
}

fn put_string(out: &mut Vec<u8>, string: &[u8]) {
    out.extend_from_slice(&(string.len() as u64).to_le_bytes());
    out.extend_from_slice(string);
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    macro_rules! put {
        ($id:literal, $v:expr) => {{
            out.extend_from_slice(&($id as u32).to_le_bytes());
            out.extend_from_slice(&$v.to_le_bytes());
        }};
    }
    match value {
        Value::U8(v) => put!(0, v),
        Value::I8(v) => put!(1, v),
        Value::U16(v) => put!(2, v),
        Value::I16(v) => put!(3, v),
        Value::U32(v) => put!(4, v),
        Value::I32(v) => put!(5, v),
        Value::F32(v) => put!(6, v),
        Value::Bool(v) => put!(7, u8::from(*v)),
        Value::U64(v) => put!(10, v),
        Value::I64(v) => put!(11, v),
        Value::F64(v) => put!(12, v),
        Value::Str(v) => {
            out.extend_from_slice(&8u32.to_le_bytes());
            put_string(out, v.as_bytes());
        }
        Value::Bytes(v) => {
            out.extend_from_slice(&8u32.to_le_bytes());
            put_string(out, v);
        }
        Value::Array(v) => {
            out.extend_from_slice(&9u32.to_le_bytes());
            put_array(out, v);
        }
    }
}

fn put_array(out: &mut Vec<u8>, array: &Array) {
    macro_rules! put {
        ($id:literal, $items:expr) => {{
            put_array_head(out, $id, $items.len());
            for item in $items {
                out.extend_from_slice(&item.to_le_bytes());
            }
        }};
    }
    match array {
        Array::U8(v) => put!(0, v),
        Array::I8(v) => put!(1, v),
        Array::U16(v) => put!(2, v),
        Array::I16(v) => put!(3, v),
        Array::U32(v) => put!(4, v),
        Array::I32(v) => put!(5, v),
        Array::F32(v) => put!(6, v),
        Array::U64(v) => put!(10, v),
        Array::I64(v) => put!(11, v),
        Array::F64(v) => put!(12, v),
        Array::Bool(v) => {
            put_array_head(out, 7, v.len());
            out.extend(v.iter().map(|&b| u8::from(b)));
        }
        Array::Str(v) => {
            put_array_head(out, 8, v.len());
            v.iter().for_each(|s| put_string(out, s.as_bytes()));
        }
        Array::Bytes(v) => {
            put_array_head(out, 8, v.len());
            v.iter().for_each(|s| put_string(out, s));
        }
        Array::Nested(v) => {
            put_array_head(out, 9, v.len());
            v.iter().for_each(|inner| put_array(out, inner));
        }
    }
}

fn put_array_head(out: &mut Vec<u8>, type_id: u32, len: usize) {
    out.extend_from_slice(&type_id.to_le_bytes());
    out.extend_from_slice(&(len as u64).to_le_bytes());
}
