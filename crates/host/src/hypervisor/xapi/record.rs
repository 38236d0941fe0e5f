//! Records of the XenAPI in JSON: numbers as strings or numbers, references as strings.

use std::fmt;

use serde_json::Value;

use super::{XapiError, XapiResult};

/// The null reference.
const NULL: &str = "OpaqueRef:NULL";

/// A reference to an object: `OpaqueRef:…`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reference(pub String);

impl Reference {
    /// Whether this is the null reference.
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
    /// The reference to the object.
    pub reference: Reference,
    value: Value,
}

impl XapiRecord {
    pub(super) fn new(class: &'static str, reference: Reference, value: Value) -> Self {
        Self {
            class,
            reference,
            value,
        }
    }

    /// The string in a field; empty if the field is missing.
    pub fn text(&self, field: &str) -> &str {
        self.value.get(field).and_then(Value::as_str).unwrap_or_default()
    }

    /// The reference in a field.
    pub fn reference(&self, field: &str) -> Reference {
        Reference(self.text(field).to_owned())
    }

    /// The references in a field.
    pub fn references(&self, field: &str) -> Vec<Reference> {
        let list = self.value.get(field).and_then(Value::as_array);
        let texts = list.into_iter().flatten().filter_map(Value::as_str);
        texts.map(|text| Reference(text.to_owned())).collect()
    }

    /// Whether a field is true.
    pub fn is(&self, field: &str) -> bool {
        self.value.get(field).and_then(Value::as_bool).unwrap_or_default()
    }

    /// The number in a field.
    pub fn number(&self, field: &'static str) -> XapiResult<u64> {
        let value = self.value.get(field);
        let number = value.and_then(|value| value.as_u64().or_else(|| value.as_str()?.parse().ok()));
        number.ok_or_else(|| XapiError::Record {
            class: self.class,
            reference: self.reference.to_string(),
            field,
        })
    }

    /// The fraction in a field; 0 if the field is missing.
    pub(super) fn fraction(&self, field: &str) -> f64 {
        let value = self.value.get(field);
        let number = value.and_then(|value| value.as_f64().or_else(|| value.as_str()?.parse().ok()));
        number.filter(|number: &f64| number.is_finite()).unwrap_or_default()
    }

    /// The strings in a field.
    pub(super) fn texts(&self, field: &str) -> Vec<String> {
        self.references(field).into_iter().map(|text| text.0).collect()
    }

    /// The value of a key in a map field.
    pub fn entry(&self, field: &str, key: &str) -> Option<&str> {
        self.value.get(field)?.get(key)?.as_str()
    }
}
