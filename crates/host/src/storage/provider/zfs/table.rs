//! What `zfs get -Hp` answers.
//!
//! Fields are separated by tabs, answers by line feeds, and a property that a user has made may hold both. So only properties that no
//! user can give any value are read as a table ([`parse`]); our records, which anybody may have written, are asked for by themselves
//! ([`records`]), and whatever they say is about nothing else.

use std::collections::BTreeMap;

use super::super::{ProviderError, ProviderResult};

/// The properties of a dataset, or of a snapshot.
#[derive(Debug, Default)]
pub(super) struct Properties {
    /// Its number in the answer: snapshots of a dataset come in the order in which they were made.
    pub(super) number_in_answer: usize,
    values: BTreeMap<String, String>,
    sources: BTreeMap<String, String>,
}

impl Properties {
    pub(super) fn value(&self, key: &str) -> Option<&str> {
        self.values.get(key).map(|value| &value[..])
    }

    /// Whence it has its value: `default`, `local`, `inherited from tank`.
    pub(super) fn source(&self, key: &str) -> Option<&str> {
        self.sources.get(key).map(|source| &source[..])
    }

    pub(super) fn number(&self, key: &str) -> Option<u64> {
        self.value(key)?.parse().ok()
    }
}

/// A ratio as ZFS writes it, `1.50x` or `1.50`, in hundredths.
pub(super) fn percent(text: &str) -> Option<u64> {
    let (whole, part) = text.trim_end_matches('x').split_once('.')?;
    let part = format!("{part:0<2}");
    let part: u64 = part.get(..2)?.parse().ok()?;
    whole.parse::<u64>().ok()?.checked_mul(100)?.checked_add(part)
}

/// All datasets and snapshots of an answer with names, properties, values and sources.
pub(super) fn parse(answer: &str) -> ProviderResult<BTreeMap<String, Properties>> {
    let senseless = |detail| ProviderError::Senseless {
        program: super::ZFS,
        detail,
    };
    if !answer.is_empty() && !answer.ends_with('\n') {
        return Err(senseless("its answer is cut short".to_owned()));
    }
    let mut found: BTreeMap<String, Properties> = BTreeMap::new();
    for line in answer.lines() {
        let fields: Vec<&str> = line.split('\t').collect();
        let [name, property, value, source] = fields[..] else {
            let detail = format!("the line {line:?} is not a name, a property, a value and a source");
            return Err(senseless(detail));
        };
        let number_in_answer = found.len();
        let properties = found.entry(name.to_owned()).or_insert_with(|| Properties {
            number_in_answer,
            ..Properties::default()
        });
        properties.sources.insert(property.to_owned(), source.to_owned());
        let known = properties.values.insert(property.to_owned(), value.to_owned());
        if known.is_some() {
            return Err(senseless(format!("{name} has {property} twice")));
        }
    }
    Ok(found)
}

/// Records, of an answer with names, values and sources, by name. Of each name the first line counts, and what is no line is passed over.
pub(super) fn records(answer: &str) -> BTreeMap<String, String> {
    let mut records: BTreeMap<String, String> = BTreeMap::new();
    for line in answer.lines() {
        let fields = line.split_once('\t').and_then(|(name, rest)| {
            let (value, source) = rest.rsplit_once('\t')?;
            Some((name, value, source))
        });
        // One that is inherited is that of a dataset above.
        if let Some((name, value, "local" | "received")) = fields {
            records.entry(name.to_owned()).or_insert_with(|| value.to_owned());
        }
    }
    records
}
