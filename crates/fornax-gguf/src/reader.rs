//! Parses the header, the metadata and the tensor table of one file, all of it hostile. It must not know
//! where the bytes come from, nor of other files.
//!
//! ```text
//! "GGUF" u32 version  u64 n_tensors  u64 n_kv
//! n_kv      × { string key, u32 type, value }
//! n_tensors × { string name, u32 n_dims, u64 dims[n_dims], u32 type, u64 offset }
//! padding to general.alignment, then the data that the offsets count from
//! string = u64 length, bytes;  array = u32 element type, u64 count, elements
//! ```

use crate::cursor::{Cursor, Doing};
use crate::error::quoted;
use crate::value::BytesArray;
use crate::{Array, Error, Metadata, TensorInfo, TensorType, Value};

/// Alignment of tensor data where a file does not say.
pub(crate) const ALIGNMENT_DEFAULT: u32 = 32;
/// Largest alignment accepted; the specification has no bound, real files use 32.
const ALIGNMENT_MAX: u32 = 64 * 1024;
/// Largest number of dimensions.
const DIMS_MAX: u32 = 4;
/// Arrays within arrays; the specification has no bound, known files nest once.
const DEPTH_MAX: u32 = 16;
/// Smallest encodings, which bound the counts by the bytes that are left: an empty name and one byte of
/// value; a tensor of no dimension.
const KV_LEN_MIN: u64 = 8 + 4 + 1;
const TENSOR_LEN_MIN: u64 = 8 + 4 + 4 + 8;
/// Elements reserved before the first is read. Growth beyond follows what was really there.
const RESERVE_MAX: usize = 4096;

/// What one file says before its data.
#[derive(Debug)]
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) alignment: u32,
    pub(crate) metadata: Metadata,
    /// In the order of the file, offsets from the start of the file, ranges checked.
    pub(crate) tensors: Vec<TensorInfo>,
}

/// Parses the start of `bytes`, which are the whole file, and checks that every tensor lies within it.
///
/// Reads the header and the tables only; no byte of tensor data is touched.
pub(crate) fn parse(bytes: &[u8]) -> Result<Header, Error> {
    let mut cursor = Cursor::new(bytes);
    let version = read_version(&mut cursor)?;
    let n_tensors = cursor.u64(&|| "the number of tensors".into())?;
    let n_kv = cursor.u64(&|| "the number of metadata keys".into())?;
    let needed = u128::from(n_tensors) * u128::from(TENSOR_LEN_MIN)
        + u128::from(n_kv) * u128::from(KV_LEN_MIN);
    if needed > cursor.left() as u128 {
        return Err(cursor.cut(needed, &|| format!("{n_kv} metadata keys and {n_tensors} tensors")));
    }
    let metadata = read_metadata(&mut cursor, n_kv)?;
    let alignment = alignment(&metadata)?;
    let mut tensors = Vec::with_capacity((n_tensors as usize).min(RESERVE_MAX));
    for index in 0..n_tensors {
        tensors.push(read_tensor(&mut cursor, index)?);
    }
    let data_start = (cursor.at() as u64)
        .checked_next_multiple_of(u64::from(alignment))
        .ok_or_else(|| Error::malformed("reading the tensor table: it has no end"))?;
    place_tensors(&mut tensors, alignment, data_start, bytes.len() as u64)?;
    Ok(Header { version, alignment, metadata, tensors })
}

fn read_version(cursor: &mut Cursor<'_>) -> Result<u32, Error> {
    if cursor.left() == 0 {
        return Err(Error::malformed(
            "reading the magic: the file is empty, expected a GGUF file; fetch it again",
        ));
    }
    let magic = cursor.take(4, &|| "the magic".into())?;
    if magic != b"GGUF" {
        let hint = match magic {
            b"FUGG" => {
                "; the bytes are swapped, convert the model again for little-endian machines"
            }
            b"ggml" | b"lmgg" | b"ggjt" | b"tjgg" | b"ggmf" | b"fmgg" | b"ggla" | b"algg" => {
                "; this is a format from before GGUF, convert the model again"
            }
            [0xEF, 0xBB, 0xBF, _] => "; a text editor put a byte order mark before it",
            b"PK\x03\x04" => "; this is a zip archive",
            b"<!DO" | b"<htm" => "; this is a web page, the download went wrong",
            b"vers" => "; this is a Git LFS pointer, fetch the file itself",
            _ => "",
        };
        return Err(Error::unsupported(format!(
            "reading the magic: found {:?}, expected \"GGUF\"{hint}",
            magic.escape_ascii().to_string()
        )));
    }
    let version = cursor.u32(&|| "the version".into())?;
    match version {
        2 | 3 => Ok(version),
        1 => Err(Error::unsupported(
            "reading the version: GGUF version 1 (GGUF V1, with 32-bit counts) is not supported, expected 2 \
             or 3; convert the model again",
        )),
        v if v != 0 && v & 0xFFFF == 0 => Err(Error::unsupported(format!(
            "reading the version: found {v:#010x}, which is version {} of a big-endian file; expected a \
             little-endian one, convert the model again",
            v.swap_bytes()
        ))),
        v => Err(Error::unsupported(format!(
            "reading the version: unsupported version {v}, expected 2 or 3"
        ))),
    }
}

fn read_metadata(cursor: &mut Cursor<'_>, n_kv: u64) -> Result<Metadata, Error> {
    let mut entries = Vec::with_capacity((n_kv as usize).min(RESERVE_MAX));
    for index in 0..n_kv {
        let key = cursor.name(&|| format!("the name of metadata key {index}"))?;
        let doing = || format!("the value of metadata key {}", quoted(key));
        let type_id = cursor.u32(&doing)?;
        let value = read_value(cursor, type_id, &doing)?;
        entries.push((key.into(), value));
    }
    Metadata::from_entries(entries)
}

fn read_value(cursor: &mut Cursor<'_>, type_id: u32, doing: Doing<'_>) -> Result<Value, Error> {
    Ok(match type_id {
        0 => Value::U8(u8::from_le_bytes(cursor.array(doing)?)),
        1 => Value::I8(i8::from_le_bytes(cursor.array(doing)?)),
        2 => Value::U16(u16::from_le_bytes(cursor.array(doing)?)),
        3 => Value::I16(i16::from_le_bytes(cursor.array(doing)?)),
        4 => Value::U32(u32::from_le_bytes(cursor.array(doing)?)),
        5 => Value::I32(i32::from_le_bytes(cursor.array(doing)?)),
        6 => Value::F32(f32::from_le_bytes(cursor.array(doing)?)),
        7 => Value::Bool(read_bool(cursor.array::<1>(doing)?[0], doing)?),
        8 => {
            let raw = cursor.string(doing)?;
            match std::str::from_utf8(raw) {
                Ok(text) => Value::Str(text.into()),
                Err(_) => Value::Bytes(raw.into()),
            }
        }
        9 => Value::Array(read_array(cursor, 1, doing)?),
        10 => Value::U64(u64::from_le_bytes(cursor.array(doing)?)),
        11 => Value::I64(i64::from_le_bytes(cursor.array(doing)?)),
        12 => Value::F64(f64::from_le_bytes(cursor.array(doing)?)),
        other => return Err(unknown_type(other, "value", doing)),
    })
}

fn read_bool(byte: u8, doing: Doing<'_>) -> Result<bool, Error> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Error::malformed(format!(
            "reading {}: found {other} for a bool, expected 0 or 1",
            doing()
        ))),
    }
}

fn unknown_type(id: u32, what: &str, doing: Doing<'_>) -> Error {
    Error::malformed(format!(
        "reading {}: unknown {what} type {id}, expected 0 to 12; the file is damaged or newer than this \
         program",
        doing()
    ))
}

/// Bytes that the smallest value of a type takes.
fn value_len_min(type_id: u32) -> Option<u64> {
    match type_id {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        8 | 10..=12 => Some(8),
        9 => Some(12),
        _ => None,
    }
}

fn read_array(cursor: &mut Cursor<'_>, depth: u32, doing: Doing<'_>) -> Result<Array, Error> {
    if depth > DEPTH_MAX {
        return Err(Error::malformed(format!(
            "reading {}: arrays nested more than {DEPTH_MAX} deep",
            doing()
        )));
    }
    let type_id = cursor.u32(doing)?;
    let count = cursor.u64(doing)?;
    let Some(len_min) = value_len_min(type_id) else {
        return Err(unknown_type(type_id, "element", doing));
    };
    // After this check a count of elements fits memory, as the bytes it needs are there.
    if count > cursor.left() as u64 / len_min {
        let needed = u128::from(count) * u128::from(len_min);
        return Err(cursor.cut(needed, &|| format!("{count} elements of {}", doing())));
    }
    let count = count as usize;
    Ok(match type_id {
        0 => Array::U8(cursor.numbers(count, doing, u8::from_le_bytes)?),
        1 => Array::I8(cursor.numbers(count, doing, i8::from_le_bytes)?),
        2 => Array::U16(cursor.numbers(count, doing, u16::from_le_bytes)?),
        3 => Array::I16(cursor.numbers(count, doing, i16::from_le_bytes)?),
        4 => Array::U32(cursor.numbers(count, doing, u32::from_le_bytes)?),
        5 => Array::I32(cursor.numbers(count, doing, i32::from_le_bytes)?),
        6 => Array::F32(cursor.numbers(count, doing, f32::from_le_bytes)?),
        7 => {
            let raw = cursor.take(count, doing)?;
            Array::Bool(raw.iter().map(|&byte| read_bool(byte, doing)).collect::<Result<_, _>>()?)
        }
        8 => read_strings(cursor, count, doing)?,
        9 => {
            let mut nested = Vec::with_capacity(count.min(RESERVE_MAX));
            for _ in 0..count {
                nested.push(read_array(cursor, depth + 1, doing)?);
            }
            Array::Nested(nested)
        }
        10 => Array::U64(cursor.numbers(count, doing, u64::from_le_bytes)?),
        11 => Array::I64(cursor.numbers(count, doing, i64::from_le_bytes)?),
        12 => Array::F64(cursor.numbers(count, doing, f64::from_le_bytes)?),
        _ => return Err(unknown_type(type_id, "element", doing)),
    })
}

fn read_strings(cursor: &mut Cursor<'_>, count: usize, doing: Doing<'_>) -> Result<Array, Error> {
    let mut strings = BytesArray::default();
    for _ in 0..count {
        if !strings.push(cursor.string(doing)?) {
            return Err(Error::unsupported(format!(
                "reading {}: strings of more than 4 GiB together",
                doing()
            )));
        }
    }
    Ok(strings.into_array())
}

/// `general.alignment`, or the default where it is absent.
pub(crate) fn alignment(metadata: &Metadata) -> Result<u32, Error> {
    match metadata.get("general.alignment") {
        None => Ok(ALIGNMENT_DEFAULT),
        // The specification asks for a multiple of 8; the readers of other engines for a power of two.
        Some(&Value::U32(v)) if v.is_power_of_two() && (8..=ALIGNMENT_MAX).contains(&v) => Ok(v),
        Some(&Value::U32(v)) => Err(Error::malformed(format!(
            "reading metadata key \"general.alignment\": found {v}, expected a power of two from 8 to \
             {ALIGNMENT_MAX}"
        ))),
        Some(other) => Err(Error::malformed(format!(
            "reading metadata key \"general.alignment\": found {}, expected u32",
            other.type_name()
        ))),
    }
}

/// Reads one row of the table; `offset` counts from the start of the data still.
fn read_tensor(cursor: &mut Cursor<'_>, index: u64) -> Result<TensorInfo, Error> {
    let name = cursor.name(&|| format!("the name of tensor {index}"))?;
    let doing: Doing<'_> = &|| format!("the shape of tensor {}", quoted(name));
    let n_dims = cursor.u32(doing)?;
    if n_dims == 0 || n_dims > DIMS_MAX {
        return Err(Error::malformed(format!(
            "reading {}: {n_dims} dimensions, expected 1 to {DIMS_MAX}",
            doing()
        )));
    }
    let mut dims = Vec::with_capacity(n_dims as usize);
    for _ in 0..n_dims {
        dims.push(cursor.u64(doing)?);
    }
    if dims.contains(&0) {
        return Err(Error::malformed(format!("reading {}: a dimension of 0 in {dims:?}", doing())));
    }
    let type_id = cursor.u32(doing)?;
    let Some(ty) = TensorType::from_id(type_id) else {
        return Err(unknown_tensor_type(name, type_id));
    };
    let offset = cursor.u64(doing)?;
    let len = tensor_len(name, ty, &dims)?;
    Ok(TensorInfo { name: name.to_owned(), ty, dims, offset, len, shard: 0 })
}

fn unknown_tensor_type(name: &str, id: u32) -> Error {
    let what = match id {
        4 | 5 | 31..=33 | 36..=38 => {
            "a retired type of earlier GGUF writers; convert the model again"
        }
        _ => "unknown; the file is damaged or newer than this program",
    };
    Error::unsupported(format!("reading tensor {}: its type {id} is {what}", quoted(name)))
}

/// Bytes of a tensor of this shape, or an error where that overflows or a row is not whole blocks.
pub(crate) fn tensor_len(name: &str, ty: TensorType, dims: &[u64]) -> Result<u64, Error> {
    let too_large = || {
        Error::malformed(format!(
            "reading tensor {}: {ty} of shape {dims:?} has more bytes than 64 bits can count",
            quoted(name)
        ))
    };
    // The count of elements has to fit too: sizes are computed from it all over a program.
    let elements = dims.iter().try_fold(1u64, |n, &d| n.checked_mul(d)).ok_or_else(too_large)?;
    if !dims[0].is_multiple_of(ty.block_len() as u64) {
        return Err(Error::malformed(format!(
            "reading tensor {}: rows of {} weights are not whole {ty} blocks of {}",
            quoted(name),
            dims[0],
            ty.block_len()
        )));
    }
    ty.row_bytes(elements).ok_or_else(too_large)
}

/// Turns offsets into offsets from the start of the file, and checks alignment, bounds and overlap.
fn place_tensors(
    tensors: &mut [TensorInfo],
    alignment: u32,
    data_start: u64,
    file_len: u64,
) -> Result<(), Error> {
    for t in tensors.iter_mut() {
        if !t.offset.is_multiple_of(u64::from(alignment)) {
            return Err(Error::malformed(format!(
                "reading tensor {}: its offset {} is not a multiple of the alignment {alignment}",
                quoted(&t.name),
                t.offset
            )));
        }
        let start = data_start.checked_add(t.offset);
        let end = start.and_then(|start| start.checked_add(t.len));
        let (Some(start), Some(true)) = (start, end.map(|end| end <= file_len)) else {
            return Err(Error::malformed(format!(
                "reading tensor {}: {} bytes at offset {} of the data, which starts at byte {data_start}, end \
                 past the file of {file_len} bytes; the file is cut or damaged, fetch it again",
                quoted(&t.name),
                t.len,
                t.offset
            )));
        };
        t.offset = start;
    }
    let mut by_offset: Vec<&TensorInfo> = tensors.iter().collect();
    by_offset.sort_unstable_by_key(|t| t.offset);
    for pair in by_offset.windows(2) {
        if pair[0].offset + pair[0].len > pair[1].offset {
            return Err(Error::malformed(format!(
                "reading the tensor table: the bytes of {} and {} overlap at byte {}",
                quoted(&pair[0].name),
                quoted(&pair[1].name),
                pair[1].offset
            )));
        }
    }
    Ok(())
}
