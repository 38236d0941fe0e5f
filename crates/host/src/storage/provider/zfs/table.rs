//! Parses the output of `zfs get -Hp`.
//!
//! Fields are separated by tabs, lines by line feeds, and a user property may contain both. So only properties that
//! users cannot set to any value are read as a table ([`parse`]). Holdfast's records, which any user may have
//! written, are requested separately ([`records`]), so that they cannot change the meaning of other properties.

use std::collections::BTreeMap;

use super::super::{ProviderError, ProviderResult};

/// The properties of a dataset, or of a snapshot.
#[derive(Debug, Default)]
pub(super) struct Properties {
    /// The index in the answer: snapshots of a dataset are listed in the order of their creation.
    pub(super) number_in_answer: usize,
    values: BTreeMap<String, String>,
    sources: BTreeMap<String, String>,
}

impl Properties {
    pub(super) fn value(&self, key: &str) -> Option<&str> {
        self.values.get(key).map(|value| &value[..])
    }

    /// The source of a value: `default`, `local`, `inherited from tank`.
    pub(super) fn source(&self, key: &str) -> Option<&str> {
        self.sources.get(key).map(|source| &source[..])
    }

    pub(super) fn number(&self, key: &str) -> Option<u64> {
        self.value(key)?.parse().ok()
    }
}

/// A ratio as ZFS prints it, `1.50x` or `1.50`, in hundredths.
pub(super) fn percent(text: &str) -> Option<u64> {
    let (whole, part) = text.trim_end_matches('x').split_once('.')?;
    let part = format!("{part:0<2}");
    let part: u64 = part.get(..2)?.parse().ok()?;
    whole.parse::<u64>().ok()?.checked_mul(100)?.checked_add(part)
}

/// The datasets and snapshots of an answer with the columns name, property, value and source.
pub(super) fn parse(answer: &str) -> ProviderResult<BTreeMap<String, Properties>> {
    let invalid = |detail| ProviderError::Invalid {
        program: super::ZFS,
        detail,
    };
    if !answer.is_empty() && !answer.ends_with('\n') {
        return Err(invalid("its output is truncated".to_owned()));
    }
    let mut found: BTreeMap<String, Properties> = BTreeMap::new();
    for line in answer.lines() {
        let fields: Vec<&str> = line.split('\t').collect();
        let [name, property, value, source] = fields[..] else {
            let detail = format!("the line {line:?} is not a name, a property, a value and a source");
            return Err(invalid(detail));
        };
        let number_in_answer = found.len();
        let properties = found.entry(name.to_owned()).or_insert_with(|| Properties {
            number_in_answer,
            ..Properties::default()
        });
        properties.sources.insert(property.to_owned(), source.to_owned());
        let known = properties.values.insert(property.to_owned(), value.to_owned());
        if known.is_some() {
            return Err(invalid(format!("{name} has {property} twice")));
        }
    }
    Ok(found)
}

/// The records in an answer with the columns name, value and source, by name. Only the first line of each name is
/// used, and other text is skipped.
pub(super) fn records(answer: &str) -> BTreeMap<String, String> {
    let mut records: BTreeMap<String, String> = BTreeMap::new();
    for line in answer.lines() {
        let fields = line.split_once('\t').and_then(|(name, rest)| {
            let (value, source) = rest.rsplit_once('\t')?;
            Some((name, value, source))
        });
        // An inherited record belongs to a parent dataset.
        if let Some((name, value, "local" | "received")) = fields {
            records.entry(name.to_owned()).or_insert_with(|| value.to_owned());
        }
    }
    records
}
