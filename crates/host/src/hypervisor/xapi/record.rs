//! Records of the XenAPI as they come in JSON: numbers as text or as numbers, references as text.

use std::fmt;

use serde_json::Value;

use super::{XapiError, XapiResult};

/// What a reference to nothing is.
const NULL: &str = "OpaqueRef:NULL";

/// A reference to an object: `OpaqueRef:…`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reference(pub String);

impl Reference {
    /// Whether it leads to nothing.
    pub fn is_null(&self) -> bool {
        self.0.is_empty() || self.0 == NULL
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// A record of an object.
#[derive(Debug, Clone, PartialEq)]
pub struct XapiRecord {
    class: &'static str,
    /// The object.
    pub reference: Reference,
    value: Value,
}

impl XapiRecord {
    /// Makes one of what was answered.
    pub(super) fn new(class: &'static str, reference: Reference, value: Value) -> Self {
        Self {
            class,
            reference,
            value,
        }
    }

    /// Text of a field; empty where there is none.
    pub fn text(&self, field: &str) -> &str {
        self.value.get(field).and_then(Value::as_str).unwrap_or_default()
    }

    /// A reference in a field.
    pub fn reference(&self, field: &str) -> Reference {
        Reference(self.text(field).to_owned())
    }

    /// References in a field.
    pub fn references(&self, field: &str) -> Vec<Reference> {
        let list = self.value.get(field).and_then(Value::as_array);
        let texts = list.into_iter().flatten().filter_map(Value::as_str);
        texts.map(|text| Reference(text.to_owned())).collect()
    }

    /// Whether a field is true.
    pub fn is(&self, field: &str) -> bool {
        self.value.get(field).and_then(Value::as_bool).unwrap_or_default()
    }

    /// A number in a field.
    pub fn number(&self, field: &'static str) -> XapiResult<u64> {
        let value = self.value.get(field);
        let number = value.and_then(|value| value.as_u64().or_else(|| value.as_str()?.parse().ok()));
        number.ok_or_else(|| XapiError::Record {
            class: self.class,
            reference: self.reference.to_string(),
            field,
        })
    }

    /// A fraction in a field, 0 where there is none.
    pub(super) fn fraction(&self, field: &str) -> f64 {
        let value = self.value.get(field);
        let number = value.and_then(|value| value.as_f64().or_else(|| value.as_str()?.parse().ok()));
        number.filter(|number: &f64| number.is_finite()).unwrap_or_default()
    }

    /// Texts in a field.
    pub(super) fn texts(&self, field: &str) -> Vec<String> {
        self.references(field).into_iter().map(|text| text.0).collect()
    }

    /// The value of a key in a field that is a map.
    pub fn entry(&self, field: &str, key: &str) -> Option<&str> {
        self.value.get(field)?.get(key)?.as_str()
    }
}
