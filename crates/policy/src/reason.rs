//! Why a snapshot is kept or removed.

use std::fmt;

use crate::{Period, Span};

/// Why a snapshot is kept or removed; its text is one line that a user can verify.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// The policy has no rule, and keeps everything.
    EmptyPolicy,
    /// The snapshot is protected.
    Protected,
    /// The time of the snapshot is later than now, because a clock is or was wrong. The snapshot is kept and does not
    /// count in the rules.
    Future,
    /// The newest snapshot that is not in the future. It is always kept.
    Newest,
    /// One of the newest snapshots.
    Last {
        /// Its position, from 1 for the newest.
        place: u32,
        /// The count of the rule.
        count: u32,
    },
    /// The newest snapshot of its calendar period.
    LastOfPeriod {
        /// The kind of period.
        period: Period,
        /// The position of the period, from 1 for the newest that has a snapshot.
        place: u32,
        /// The count of the rule.
        count: u32,
        /// The name of the period: "2026-11-20", "2026-W47".
        name: String,
    },
    /// A snapshot at most this much older than the newest one.
    Within {
        /// The span of the rule.
        span: Span,
    },
    /// The snapshot has a tag that the policy keeps.
    Tag {
        /// The tag.
        tag: String,
    },
    /// No rule keeps it: the only reason for removal.
    NoRule,
}

impl Reason {
    /// The rule in one word: "daily", "within".
    pub fn rule(&self) -> &'static str {
        match self {
            Self::EmptyPolicy => "all",
            Self::Protected => "protected",
            Self::Future => "future",
            Self::Newest => "newest",
            Self::Last { .. } => "last",
            Self::LastOfPeriod { period, .. } => period.adverb(),
            Self::Within { .. } => "within",
            Self::Tag { .. } => "tag",
            Self::NoRule => "none",
        }
    }

    /// The rule and the position: "daily 2".
    pub fn brief(&self) -> String {
        let rule = self.rule();
        match self {
            Self::Last { place, .. } | Self::LastOfPeriod { place, .. } => format!("{rule} {place}"),
            _ => rule.to_owned(),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::EmptyPolicy => write!(f, "empty policy keeps all"),
            Self::Protected => write!(f, "protected"),
            Self::Future => write!(f, "in the future"),
            Self::Newest => write!(f, "newest"),
            Self::Last { place, count } => write!(f, "last {place} of {count}"),
            Self::LastOfPeriod {
                period,
                place,
                count,
                name,
            } => write!(f, "{} {place} of {count}: last of {name}", period.adverb()),
            Self::Within { span } => write!(f, "within {span}"),
            Self::Tag { tag } => write!(f, "tag {tag}"),
            Self::NoRule => write!(f, "no rule keeps it"),
        }
    }
}
