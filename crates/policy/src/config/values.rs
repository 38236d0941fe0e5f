//! Checks the keys and values of a section.

use std::collections::BTreeMap;

use crate::config::document::{Entry, Section};
use crate::config::form::{Form, Value};
use crate::config::section_names::ROOT;
use crate::config::{ConfigError, keys};
use crate::nearest::nearest;

/// The checked values of a section, by key, each with its line.
pub(super) type Values = BTreeMap<String, (u32, Value)>;

/// The section as it is called in messages.
pub(super) fn place(section: &Section) -> String {
    if section.group == ROOT {
        "the first lines".to_owned()
    } else {
        format!("[{}]", section.title())
    }
}

/// Checks the values of a section; `form_of` returns the form of a key.
pub(super) fn values(
    section: &Section,
    form_of: impl Fn(&str) -> Option<Form>,
    known: impl Iterator<Item = &'static str>,
    errors: &mut Vec<ConfigError>,
) -> Values {
    let known: Vec<_> = known.collect();
    let mut values = Values::new();
    for entry in &section.entries {
        let Some(form) = form_of(&entry.key) else {
            errors.push(unknown(section, entry, known.iter().copied()));
            continue;
        };
        match form.read(&entry.value) {
            Ok(value) => drop(values.insert(entry.key.clone(), (entry.line, value))),
            Err(wanted) => errors.push(ConfigError::Value {
                line: entry.line,
                place: place(section),
                key: entry.key.clone(),
                wanted,
            }),
        }
    }
    values
}

pub(super) fn unknown(section: &Section, entry: &Entry, known: impl Iterator<Item = &'static str>) -> ConfigError {
    ConfigError::UnknownKey {
        line: entry.line,
        place: place(section),
        key: entry.key.clone(),
        nearest: nearest(&entry.key, known).map(str::to_owned),
    }
}

/// Checks the values of a section that has these `keys`.
pub(super) fn values_of(section: &Section, keys: &'static [keys::ConfigKey], errors: &mut Vec<ConfigError>) -> Values {
    let names = keys.iter().map(|key| key.name);
    values(section, |name| keys::form_in(keys, name), names, errors)
}

pub(super) fn count(values: &Values, key: &str) -> Option<usize> {
    match values.get(key) {
        Some((_, Value::Count(count))) => usize::try_from(*count).ok(),
        _ => None,
    }
}

pub(super) fn text(values: &Values, key: &str) -> Option<String> {
    match values.get(key) {
        Some((_, Value::Text(text))) => Some(text.clone()),
        _ => None,
    }
}
