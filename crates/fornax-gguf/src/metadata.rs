//! The ordered keys and values of a file, with getters that tell an absent key from one of the wrong type.
//! It must not know which keys a model needs.

use crate::error::quoted;
use crate::{Array, Error, StrArray, Value};

/// Keys and values in the order of the file; keys are unique.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {
    entries: Vec<(Box<str>, Value)>,
    /// Indices of `entries`, sorted by key.
    by_key: Vec<u32>,
}

/// A value that a file gives once for all layers, or for each layer.
#[derive(Clone, Debug, PartialEq)]
pub enum PerLayer<T> {
    /// One value for every layer.
    Same(T),
    /// A value for each layer, as many as there are layers.
    Each(Box<[T]>),
}

impl<T: Copy> PerLayer<T> {
    /// The value of `layer`.
    ///
    /// # Panics
    /// If there is a value for each layer and `layer` is past the last.
    pub fn get(&self, layer: usize) -> T {
        match self {
            PerLayer::Same(value) => *value,
            PerLayer::Each(values) => values[layer],
        }
    }
}

impl Metadata {
    /// No keys.
    pub fn new() -> Metadata {
        Metadata::default()
    }

    /// Takes entries in the order of a file.
    ///
    /// # Errors
    /// `is_malformed` where a key comes twice.
    pub(crate) fn from_entries(entries: Vec<(Box<str>, Value)>) -> Result<Metadata, Error> {
        let mut by_key: Vec<u32> = (0..entries.len() as u32).collect();
        by_key.sort_unstable_by(|&a, &b| entries[a as usize].0.cmp(&entries[b as usize].0));
        for pair in by_key.windows(2) {
            let key = &entries[pair[0] as usize].0;
            if *key == entries[pair[1] as usize].0 {
                return Err(Error::malformed(format!(
                    "reading metadata: key {} comes twice, keys have to be unique",
                    quoted(key)
                )));
            }
        }
        Ok(Metadata { entries, by_key })
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if there are no keys.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Keys and values in the order of the file.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> + DoubleEndedIterator {
        self.entries.iter().map(|(key, value)| (&**key, value))
    }

    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let at = self.search(key).ok()?;
        Some(&self.entries[self.by_key[at] as usize].1)
    }

    /// Sets `key`: in its old place where it exists, as the last one otherwise.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) {
        match self.search(key) {
            Ok(at) => self.entries[self.by_key[at] as usize].1 = value.into(),
            Err(at) => {
                self.by_key.insert(at, self.entries.len() as u32);
                self.entries.push((key.into(), value.into()));
            }
        }
    }

    /// Removes `key` and gives back its value.
    pub fn remove(&mut self, key: &str) -> Option<Value> {
        let at = self.search(key).ok()?;
        let index = self.by_key.remove(at);
        for other in &mut self.by_key {
            *other -= u32::from(*other > index);
        }
        Some(self.entries.remove(index as usize).1)
    }

    fn search(&self, key: &str) -> Result<usize, usize> {
        self.by_key.binary_search_by(|&i| (*self.entries[i as usize].0).cmp(key))
    }

    /// An unsigned integer of any stored width or signedness, if it fits 32 bits.
    ///
    /// # Errors
    /// `is_malformed` where the key has another type or the value does not fit. So for every getter here;
    /// an absent key is `None` and no error.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, Error> {
        self.integer(key, "an integer that fits u32")
    }

    /// An unsigned integer of any stored width or signedness.
    ///
    /// # Errors
    /// As for [`Metadata::u32`].
    pub fn u64(&self, key: &str) -> Result<Option<u64>, Error> {
        self.integer(key, "an integer that fits u64")
    }

    /// A signed integer of any stored width or signedness, if it fits 32 bits.
    ///
    /// # Errors
    /// As for [`Metadata::u32`].
    pub fn i32(&self, key: &str) -> Result<Option<i32>, Error> {
        self.integer(key, "an integer that fits i32")
    }

    /// A float, stored as f32 or f64. Integers are not taken for floats.
    ///
    /// # Errors
    /// As for [`Metadata::u32`].
    pub fn f32(&self, key: &str) -> Result<Option<f32>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_float() {
            Some(v) => Ok(Some(v as f32)),
            None => Err(wrong_type(key, value, "f32 or f64")),
        }
    }

    /// A boolean.
    ///
    /// # Errors
    /// As for [`Metadata::u32`].
    pub fn bool(&self, key: &str) -> Result<Option<bool>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(v)) => Ok(Some(*v)),
            Some(other) => Err(wrong_type(key, other, "bool")),
        }
    }

    /// A string in UTF-8.
    ///
    /// # Errors
    /// As for [`Metadata::u32`].
    pub fn str(&self, key: &str) -> Result<Option<&str>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Str(v)) => Ok(Some(v)),
            Some(other) => Err(wrong_type(key, other, "string in UTF-8")),
        }
    }

    /// An array of any type.
    ///
    /// # Errors
    /// As for [`Metadata::u32`].
    pub fn array(&self, key: &str) -> Result<Option<&Array>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(v)) => Ok(Some(v)),
            Some(other) => Err(wrong_type(key, other, "array")),
        }
    }

    /// An array of strings, all of them in UTF-8.
    ///
    /// # Errors
    /// As for [`Metadata::u32`]; an entry that is not UTF-8 is named by its index.
    pub fn str_array(&self, key: &str) -> Result<Option<&StrArray>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(Array::Str(v))) => Ok(Some(v)),
            Some(Value::Array(Array::Bytes(v))) => Err(Error::malformed(format!(
                "reading metadata key {}: entry {} is not UTF-8",
                quoted(key),
                v.first_invalid().unwrap_or_default()
            ))),
            Some(other) => Err(wrong_type(key, other, "array of string")),
        }
    }

    /// An array of f32.
    ///
    /// # Errors
    /// As for [`Metadata::u32`].
    pub fn f32_array(&self, key: &str) -> Result<Option<&[f32]>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(Array::F32(v))) => Ok(Some(v)),
            Some(other) => Err(wrong_type(key, other, "array of f32")),
        }
    }

    /// An array of bool.
    ///
    /// # Errors
    /// As for [`Metadata::u32`].
    pub fn bool_array(&self, key: &str) -> Result<Option<&[bool]>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(Array::Bool(v))) => Ok(Some(v)),
            Some(other) => Err(wrong_type(key, other, "array of bool")),
        }
    }

    /// An array of integers of any stored type that all fit u32.
    ///
    /// # Errors
    /// As for [`Metadata::u32`].
    pub fn u32_array(&self, key: &str) -> Result<Option<Vec<u32>>, Error> {
        self.integer_array(key, "array of integers that fit u32")
    }

    /// An array of integers of any stored type that all fit i32.
    ///
    /// # Errors
    /// As for [`Metadata::u32`].
    pub fn i32_array(&self, key: &str) -> Result<Option<Vec<i32>>, Error> {
        self.integer_array(key, "array of integers that fit i32")
    }

    /// An integer for all of `n_layers` layers, or an array with one for each.
    ///
    /// # Errors
    /// As for [`Metadata::u32`], and `is_malformed` where an array has another length than `n_layers`.
    pub fn per_layer_u32(
        &self,
        key: &str,
        n_layers: usize,
    ) -> Result<Option<PerLayer<u32>>, Error> {
        if !matches!(self.get(key), Some(Value::Array(_))) {
            return Ok(self.u32(key)?.map(PerLayer::Same));
        }
        self.each_layer(key, n_layers, self.u32_array(key)?)
    }

    /// A float for all of `n_layers` layers, or an array with one for each.
    ///
    /// # Errors
    /// As for [`Metadata::per_layer_u32`].
    pub fn per_layer_f32(
        &self,
        key: &str,
        n_layers: usize,
    ) -> Result<Option<PerLayer<f32>>, Error> {
        if !matches!(self.get(key), Some(Value::Array(_))) {
            return Ok(self.f32(key)?.map(PerLayer::Same));
        }
        self.each_layer(key, n_layers, self.f32_array(key)?.map(<[f32]>::to_vec))
    }

    /// A boolean for all of `n_layers` layers, or an array with one for each.
    ///
    /// # Errors
    /// As for [`Metadata::per_layer_u32`].
    pub fn per_layer_bool(
        &self,
        key: &str,
        n_layers: usize,
    ) -> Result<Option<PerLayer<bool>>, Error> {
        if !matches!(self.get(key), Some(Value::Array(_))) {
            return Ok(self.bool(key)?.map(PerLayer::Same));
        }
        self.each_layer(key, n_layers, self.bool_array(key)?.map(<[bool]>::to_vec))
    }

    /// [`Metadata::u32`] of a key that has to be there.
    ///
    /// # Errors
    /// As for [`Metadata::u32`], and `is_missing` where the key is absent.
    pub fn require_u32(&self, key: &str) -> Result<u32, Error> {
        self.u32(key)?.ok_or_else(|| missing(key, "an integer"))
    }

    /// [`Metadata::f32`] of a key that has to be there.
    ///
    /// # Errors
    /// As for [`Metadata::require_u32`].
    pub fn require_f32(&self, key: &str) -> Result<f32, Error> {
        self.f32(key)?.ok_or_else(|| missing(key, "a float"))
    }

    /// [`Metadata::str`] of a key that has to be there.
    ///
    /// # Errors
    /// As for [`Metadata::require_u32`].
    pub fn require_str(&self, key: &str) -> Result<&str, Error> {
        self.str(key)?.ok_or_else(|| missing(key, "a string"))
    }

    /// [`Metadata::str_array`] of a key that has to be there.
    ///
    /// # Errors
    /// As for [`Metadata::require_u32`].
    pub fn require_str_array(&self, key: &str) -> Result<&StrArray, Error> {
        self.str_array(key)?.ok_or_else(|| missing(key, "an array of strings"))
    }

    fn integer<T: TryFrom<i128>>(&self, key: &str, expected: &str) -> Result<Option<T>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let integer = value.as_integer().ok_or_else(|| wrong_type(key, value, expected))?;
        T::try_from(integer).map(Some).map_err(|_| out_of_range(key, integer, expected))
    }

    fn integer_array<T: TryFrom<i128>>(
        &self,
        key: &str,
        expected: &str,
    ) -> Result<Option<Vec<T>>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let Value::Array(array) = value else { return Err(wrong_type(key, value, expected)) };
        (0..array.len())
            .map(|i| {
                let integer = array.integer(i).ok_or_else(|| wrong_type(key, value, expected))?;
                T::try_from(integer).map_err(|_| out_of_range(key, integer, expected))
            })
            .collect::<Result<Vec<T>, Error>>()
            .map(Some)
    }

    fn each_layer<T>(
        &self,
        key: &str,
        n_layers: usize,
        values: Option<Vec<T>>,
    ) -> Result<Option<PerLayer<T>>, Error> {
        let Some(values) = values else { return Ok(None) };
        if values.len() != n_layers {
            return Err(Error::malformed(format!(
                "reading metadata key {}: an array of {} values for a model of {n_layers} layers; \
                 expected one value for all layers or one for each",
                quoted(key),
                values.len()
            )));
        }
        Ok(Some(PerLayer::Each(values.into())))
    }
}

fn wrong_type(key: &str, found: &Value, expected: &str) -> Error {
    let found = found.type_name();
    Error::malformed(format!(
        "reading metadata key {}: found {found}, expected {expected}",
        quoted(key)
    ))
}

fn out_of_range(key: &str, found: i128, expected: &str) -> Error {
    Error::malformed(format!(
        "reading metadata key {}: found {found}, expected {expected}",
        quoted(key)
    ))
}

fn missing(key: &str, expected: &str) -> Error {
    Error::missing(format!(
        "reading metadata: key {} is absent, expected {expected}; convert the model again with a current \
         converter",
        quoted(key)
    ))
}
