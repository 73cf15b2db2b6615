//! Metadata values: scalars, and arrays in compact form (one allocation for all strings of a vocabulary).
//! It must not know which keys exist.

/// A metadata value, with the type that the file gave it.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // Named as the format names its types.
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    /// A string in UTF-8.
    Str(Box<str>),
    /// What the file calls a string, but is not UTF-8.
    Bytes(Box<[u8]>),
    Array(Array),
}

/// An array value; all elements have one type.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // Named as the format names its types.
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    /// Strings, all of them in UTF-8.
    Str(StrArray),
    /// Strings, at least one of which is not UTF-8.
    Bytes(BytesArray),
    /// Arrays of arrays; the elements may differ in type.
    Nested(Vec<Array>),
}

impl Value {
    /// The value as an integer, whatever integer type it has; `None` for anything else (booleans too).
    pub fn as_integer(&self) -> Option<i128> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::I8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::I16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::I32(v) => Some(v.into()),
            Value::U64(v) => Some(v.into()),
            Value::I64(v) => Some(v.into()),
            _ => None,
        }
    }

    /// The value as a float, from either float type; `None` for anything else.
    pub fn as_float(&self) -> Option<f64> {
        match *self {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            _ => None,
        }
    }

    /// What the value is, in the format's words: `u32`, `string`, `array of f32`.
    pub fn type_name(&self) -> String {
        match self {
            Value::U8(_) => "u8".into(),
            Value::I8(_) => "i8".into(),
            Value::U16(_) => "u16".into(),
            Value::I16(_) => "i16".into(),
            Value::U32(_) => "u32".into(),
            Value::I32(_) => "i32".into(),
            Value::U64(_) => "u64".into(),
            Value::I64(_) => "i64".into(),
            Value::F32(_) => "f32".into(),
            Value::F64(_) => "f64".into(),
            Value::Bool(_) => "bool".into(),
            Value::Str(_) => "string".into(),
            Value::Bytes(_) => "string that is not UTF-8".into(),
            Value::Array(a) => format!("array of {}", a.element_name()),
        }
    }
}

impl Array {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::F64(v) => v.len(),
            Array::Bool(v) => v.len(),
            Array::Str(v) => v.len(),
            Array::Bytes(v) => v.len(),
            Array::Nested(v) => v.len(),
        }
    }

    /// True for an array without elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element `i` as an integer, whatever integer type the array has.
    pub fn integer(&self, i: usize) -> Option<i128> {
        match self {
            Array::U8(v) => v.get(i).map(|&x| x.into()),
            Array::I8(v) => v.get(i).map(|&x| x.into()),
            Array::U16(v) => v.get(i).map(|&x| x.into()),
            Array::I16(v) => v.get(i).map(|&x| x.into()),
            Array::U32(v) => v.get(i).map(|&x| x.into()),
            Array::I32(v) => v.get(i).map(|&x| x.into()),
            Array::U64(v) => v.get(i).map(|&x| x.into()),
            Array::I64(v) => v.get(i).map(|&x| x.into()),
            _ => None,
        }
    }

    /// Element `i` as a float, from either float type.
    pub fn float(&self, i: usize) -> Option<f64> {
        match self {
            Array::F32(v) => v.get(i).map(|&x| x.into()),
            Array::F64(v) => v.get(i).copied(),
            _ => None,
        }
    }

    /// What the elements are, in the format's words.
    pub fn element_name(&self) -> &'static str {
        match self {
            Array::U8(_) => "u8",
            Array::I8(_) => "i8",
            Array::U16(_) => "u16",
            Array::I16(_) => "i16",
            Array::U32(_) => "u32",
            Array::I32(_) => "i32",
            Array::U64(_) => "u64",
            Array::I64(_) => "i64",
            Array::F32(_) => "f32",
            Array::F64(_) => "f64",
            Array::Bool(_) => "bool",
            Array::Str(_) => "string",
            Array::Bytes(_) => "strings that are not UTF-8",
            Array::Nested(_) => "arrays",
        }
    }
}

/// Strings in one piece of memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StrArray {
    text: String,
    /// Where each string ends in `text`; it starts where the one before ends.
    ends: Vec<u32>,
}

/// Byte strings in one piece of memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BytesArray {
    bytes: Vec<u8>,
    ends: Vec<u32>,
}

impl StrArray {
    /// Number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// True for an array without strings.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// String `i`, or `None` past the end.
    pub fn get(&self, i: usize) -> Option<&str> {
        let end = *self.ends.get(i)? as usize;
        let start = if i == 0 { 0 } else { self.ends[i - 1] as usize };
        Some(&self.text[start..end])
    }

    /// All strings in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> + DoubleEndedIterator + Clone {
        (0..self.len()).map(|i| self.get(i).unwrap_or_default())
    }
}

impl<S: AsRef<str>> FromIterator<S> for StrArray {
    /// Collects strings.
    ///
    /// # Panics
    /// If they have more than 4 GiB together.
    fn from_iter<T: IntoIterator<Item = S>>(strings: T) -> StrArray {
        let mut array = StrArray::default();
        for s in strings {
            array.text.push_str(s.as_ref());
            let end = u32::try_from(array.text.len()).expect("invariant: strings below 4 GiB");
            array.ends.push(end);
        }
        array
    }
}

impl BytesArray {
    /// Number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// True for an array without strings.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// String `i`, or `None` past the end.
    pub fn get(&self, i: usize) -> Option<&[u8]> {
        let end = *self.ends.get(i)? as usize;
        let start = if i == 0 { 0 } else { self.ends[i - 1] as usize };
        Some(&self.bytes[start..end])
    }

    /// All strings in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> + DoubleEndedIterator + Clone {
        (0..self.len()).map(|i| self.get(i).unwrap_or_default())
    }

    /// The index of the first string that is not UTF-8.
    pub(crate) fn first_invalid(&self) -> Option<usize> {
        self.iter().position(|s| std::str::from_utf8(s).is_err())
    }

    /// Appends a string; false if all of them together would have more than 4 GiB.
    pub(crate) fn push(&mut self, string: &[u8]) -> bool {
        let Ok(end) = u32::try_from(self.bytes.len() + string.len()) else { return false };
        self.bytes.extend_from_slice(string);
        self.ends.push(end);
        true
    }

    /// As text where every string is UTF-8 by itself.
    pub(crate) fn into_array(self) -> Array {
        match String::from_utf8(self.bytes) {
            Ok(text) if self.ends.iter().all(|&end| text.is_char_boundary(end as usize)) => {
                Array::Str(StrArray { text, ends: self.ends })
            }
            Ok(text) => Array::Bytes(BytesArray { bytes: text.into_bytes(), ends: self.ends }),
            Err(e) => Array::Bytes(BytesArray { bytes: e.into_bytes(), ends: self.ends }),
        }
    }
}

macro_rules! from_scalar {
    ($($ty:ty => $variant:ident),*) => {
        $(impl From<$ty> for Value {
            fn from(v: $ty) -> Value { Value::$variant(v) }
        }
        impl From<Vec<$ty>> for Value {
            fn from(v: Vec<$ty>) -> Value { Value::Array(Array::$variant(v)) }
        })*
    };
}

from_scalar!(u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, u64 => U64,
    i64 => I64, f32 => F32, f64 => F64, bool => Bool);

impl From<&str> for Value {
    fn from(v: &str) -> Value {
        Value::Str(v.into())
    }
}

impl From<String> for Value {
    fn from(v: String) -> Value {
        Value::Str(v.into())
    }
}

impl From<StrArray> for Value {
    fn from(v: StrArray) -> Value {
        Value::Array(Array::Str(v))
    }
}
