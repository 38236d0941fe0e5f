//! Why host snapshots failed, and for which datasets: the others may be snapshotted without them.

use holdfast_host::provider::{Dataset, ProviderError};

use super::Group;
use crate::job::Error;

/// Why host snapshots failed.
#[derive(Debug)]
pub(crate) struct NotTaken {
    /// What went wrong.
    pub(crate) error: Box<Error>,
    /// The datasets that cannot be snapshotted; empty if the error is not about datasets.
    pub(crate) culprits: Vec<Dataset>,
}

impl NotTaken {
    /// A provider could not cut a group. If the group has several datasets, the error message shows which failed; if it
    /// names none, any of them may have.
    pub(super) fn of_group(group: &Group<'_>, error: ProviderError) -> Self {
        let all = || group.wanted.iter().map(|one| one.dataset.clone());
        let said = error.to_string();
        let named = all().filter(|dataset| names(&said, &format!("{}@{}", dataset.name, group.cut.name)));
        let named: Vec<Dataset> = named.collect();
        Self {
            culprits: if named.is_empty() { all().collect() } else { named },
            error: Box::new(error.into()),
        }
    }
}

/// Whether a text contains the full name of a host snapshot, and not as a part of a longer name.
fn names(text: &str, full_name: &str) -> bool {
    let is_of_name = |letter: char| letter.is_ascii_alphanumeric() || "_.-/@".contains(letter);
    text.match_indices(full_name).any(|(place, _)| {
        let before = text[..place].chars().next_back();
        let after = text[place + full_name.len()..].chars().next();
        !before.is_some_and(is_of_name) && !after.is_some_and(is_of_name)
    })
}

impl From<Error> for NotTaken {
    fn from(error: Error) -> Self {
        Self {
            error: Box::new(error),
            culprits: Vec::new(),
        }
    }
}

impl From<NotTaken> for Error {
    fn from(not_taken: NotTaken) -> Self {
        *not_taken.error
    }
}

#[cfg(test)]
mod tests {
    use super::names;

    #[test]
    fn a_name_is_found_where_it_stands_by_itself() {
        assert!(names("make tank/db@a: no space is left", "tank/db@a"));
        assert!(names("make x: cannot create snapshot 'db@a': busy", "db@a"));
        for text in [
            "make tank/db@a: no space",
            "make db@ab: no space",
            "make db@a/b",
            "nothing",
        ] {
            assert!(!names(text, "db@a"), "{text}");
        }
    }
}
