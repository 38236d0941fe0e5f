//! Why a snapshot is kept or removed.

use std::fmt;

use crate::{Period, Span};

/// Why a snapshot is kept or removed; its text is one line that a user can verify.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// The policy has no rule, and keeps everything.
    EmptyPolicy,
    /// It is protected.
    Protected,
    /// Its time is later than now: a clock was, or is, wrong. It is kept and does not count in the rules.
    Future,
    /// It is the newest that is not in the future, which is always kept.
    Newest,
    /// It is one of the newest.
    Last {
        /// Its position, from 1 for the newest.
        place: u32,
        /// The count of the rule.
        count: u32,
    },
    /// It is the newest of its calendar period.
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
    /// It is at most this much older than the newest.
    Within {
        /// The span of the rule.
        span: Span,
    },
    /// It has a tag that the policy keeps.
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
