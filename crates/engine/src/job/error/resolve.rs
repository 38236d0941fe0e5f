//! A name selects no snapshot, or several.

use std::fmt::Write as _;

use jiff::Timestamp;

/// Fewest digits of an id that select a snapshot.
pub(crate) const PREFIX_DIGITS_MIN: usize = 4;

/// Why a name selects no snapshot, or not a single one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ResolveError {
    /// The list is empty.
    #[error("there is no snapshot yet")]
    NoSnapshots,
    /// The word is the start of more than one id, or of an id and also the name of a machine.
    #[error("{word:?} is ambiguous: it could be {}", listed(matches, *match_count))]
    Ambiguous {
        /// The word as given.
        word: String,
        /// The possible snapshots, newest first, one line each; at most 10.
        matches: Vec<String>,
        /// Number of possible snapshots in all.
        match_count: usize,
    },
    /// No machine has this name, and no id starts with it.
    #[error("no snapshot and no machine is called {word:?}{}", suggested(nearest))]
    Unknown {
        /// The word as given.
        word: String,
        /// The most similar names of machines; may be empty.
        nearest: Vec<String>,
    },
    /// Several machines have this name, and more than one has a matching snapshot.
    #[error("{machine:?} is the name of several machines: it could be {}", listed(matches, *match_count))]
    SeveralMachines {
        /// The name as given.
        machine: String,
        /// The newest matching snapshot of each machine, newest first, one line each; at most 10.
        matches: Vec<String>,
        /// Number of matching machines in all.
        match_count: usize,
    },
    /// The id has fewer than 4 digits.
    #[error("{word:?} names no machine and is too short for an id, which needs at least {PREFIX_DIGITS_MIN} digits")]
    PrefixTooShort {
        /// The word as given.
        word: String,
    },
    /// No machine has this name.
    #[error("no machine is called {machine:?}{}", suggested(nearest))]
    UnknownMachine {
        /// The name as given.
        machine: String,
        /// The most similar names of machines; may be empty.
        nearest: Vec<String>,
    },
    /// No machine has a name that matches.
    #[error("no machine matches {pattern:?}")]
    NoMatch {
        /// The pattern as given.
        pattern: String,
    },
    /// No snapshot has this tag.
    #[error("no snapshot has the tag {tag:?}{}", suggested(nearest))]
    UnknownTag {
        /// The tag as given.
        tag: String,
        /// The most similar tags; may be empty.
        nearest: Vec<String>,
    },
    /// All snapshots of the machine are newer.
    #[error("{machine:?} has no snapshot at or before {limit}; its oldest is {oldest_id} of {oldest_time}")]
    NothingBefore {
        /// The machine.
        machine: String,
        /// The requested time.
        limit: Timestamp,
        /// Id of the machine's oldest snapshot.
        oldest_id: String,
        /// Time of the machine's oldest snapshot.
        oldest_time: Timestamp,
    },
    /// The time is outside the years -9999 to 9999.
    #[error("the time asked of {machine:?} is out of range")]
    TimeOutOfRange {
        /// The machine.
        machine: String,
    },
}

/// `a, b or 3 more`.
fn listed(matches: &[String], match_count: usize) -> String {
    let more = match_count.saturating_sub(matches.len());
    let mut text = String::new();
    for (index, item) in matches.iter().enumerate() {
        let separator = match index {
            0 => "",
            _ if index + 1 == matches.len() && more == 0 => " or ",
            _ => ", ",
        };
        text.push_str(separator);
        text.push_str(item);
    }
    if more > 0 {
        write!(text, " or {more} more").expect("writing to a string does not fail");
    }
    text
}

/// `; did you mean "a" or "b"`, or nothing.
fn suggested(nearest: &[String]) -> String {
    if nearest.is_empty() {
        return String::new();
    }
    let quoted: Vec<String> = nearest.iter().map(|name| format!("{name:?}")).collect();
    format!("; similar names: {}", quoted.join(", "))
}
