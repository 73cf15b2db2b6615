//! A request's object after its check, and typed access to its fields. Knows no meaning.

use std::cell::RefCell;

use serde_json::{Map, Value};

use super::Document;
use super::shape::{Shape, integer};
use crate::refusal::Refusal;

/// A checked object. In debug builds it remembers what was read, so that no field that is described as
/// having an effect can be forgotten.
#[derive(Debug)]
pub(crate) struct Body {
    map: Map<String, Value>,
    name: &'static str,
    read: RefCell<Vec<&'static str>>,
}

impl Body {
    /// Checks `value` against the description called `name`.
    ///
    /// # Errors
    /// 400, naming the field.
    pub(crate) fn check(value: Value, name: &'static str) -> Result<Body, Refusal> {
        Document::get().shape(name).check(&value, "")?;
        match value {
            Value::Object(map) => Ok(Body { map, name, read: RefCell::default() }),
            _ => Err(Refusal::field("", "the body is not an object")),
        }
    }

    /// A field that is there and not null.
    pub(crate) fn get(&self, field: &'static str) -> Option<&Value> {
        if cfg!(debug_assertions) {
            self.read.borrow_mut().push(field);
        }
        self.map.get(field).filter(|v| !v.is_null())
    }

    pub(crate) fn text(&self, field: &'static str) -> Option<&str> {
        self.get(field).and_then(Value::as_str)
    }

    pub(crate) fn flag(&self, field: &'static str) -> Option<bool> {
        self.get(field).and_then(Value::as_bool)
    }

    pub(crate) fn number(&self, field: &'static str) -> Option<f32> {
        self.get(field).and_then(Value::as_f64).map(|v| v as f32)
    }

    pub(crate) fn integer(&self, field: &'static str) -> Option<i128> {
        self.get(field).and_then(integer)
    }

    /// The items of a list; nothing where it is absent.
    pub(crate) fn list(&self, field: &'static str) -> &[Value] {
        self.get(field).and_then(Value::as_array).map_or(&[], Vec::as_slice)
    }

    /// Called when everything was read: in debug builds a field with an effect that nobody asked for
    /// is a bug.
    pub(crate) fn finish(&self) {
        if cfg!(debug_assertions)
            && let Shape::Object(object) = Document::get().shape(self.name)
        {
            let read = self.read.borrow();
            for field in object.fields.iter().filter(|f| !f.ignored) {
                debug_assert!(
                    read.contains(&field.name.as_str()),
                    "{}: nobody reads {}",
                    self.name,
                    field.name
                );
            }
        }
    }
}
