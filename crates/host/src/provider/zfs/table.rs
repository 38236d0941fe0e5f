//! What `zfs get -Hp -o name,property,value,source` answers.

use std::collections::BTreeMap;

use super::super::{ProviderError, ProviderResult};

/// The properties of a dataset, or of a snapshot: each with its value, and where that comes from.
#[derive(Debug, Default)]
pub(super) struct Properties {
    /// Its number in the answer: snapshots of a dataset come in the order in which they were made.
    pub(super) number_in_answer: usize,
    values: BTreeMap<String, (String, String)>,
}

impl Properties {
    pub(super) fn value(&self, key: &str) -> Option<&str> {
        self.values.get(key).map(|(value, _)| &value[..])
    }

    /// A value that is its own, and not one of a dataset above.
    pub(super) fn own(&self, key: &str) -> Option<&str> {
        let (value, source) = self.values.get(key)?;
        matches!(&source[..], "local" | "received").then_some(&value[..])
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

/// All datasets and snapshots of an answer.
pub(super) fn parse(answer: &str) -> ProviderResult<BTreeMap<String, Properties>> {
    if !answer.is_empty() && !answer.ends_with('\n') {
        return Err(ProviderError::Senseless {
            program: super::ZFS,
            detail: "its answer is cut short".to_owned(),
        });
    }
    let mut found: BTreeMap<String, Properties> = BTreeMap::new();
    for line in answer.lines() {
        // The value of a user's property may hold anything, also what separates the others.
        let fields = line.split_once('\t').and_then(|(name, rest)| {
            let (property, rest) = rest.split_once('\t')?;
            let (value, source) = rest.rsplit_once('\t')?;
            Some((name, property, value, source))
        });
        let Some((name, property, value, source)) = fields else {
            return Err(ProviderError::Senseless {
                program: super::ZFS,
                detail: format!("the line {line:?} is not a name, a property, a value and a source"),
            });
        };
        let number_in_answer = found.len();
        let properties = found.entry(name.to_owned()).or_insert_with(|| Properties {
            number_in_answer,
            ..Properties::default()
        });
        properties
            .values
            .insert(property.to_owned(), (value.to_owned(), source.to_owned()));
    }
    Ok(found)
}
