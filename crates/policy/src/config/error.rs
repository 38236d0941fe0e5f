//! Errors and warnings about a `holdfast.toml`.

use crate::config::section_names::{NAMED, SINGLE};
use crate::nearest::nearest;

/// An error in the configuration. Lines count from 1.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Invalid TOML.
    #[error("line {line}: {what}")]
    Syntax {
        /// The line.
        line: u32,
        /// The message of the TOML parser.
        what: String,
    },
    /// An unknown section.
    #[error("line {line}: there is no section [{section}]{}", did_you_mean(nearest.as_deref()))]
    UnknownSection {
        /// The line.
        line: u32,
        /// The section.
        section: String,
        /// The most similar known section.
        nearest: Option<String>,
    },
    /// A value instead of a section.
    #[error("line {line}: {group} is a section: write [{}]", section_title(group, name))]
    NoSection {
        /// The line.
        line: u32,
        /// The first word of the section.
        group: String,
        /// The name of the section.
        name: String,
    },
    /// A section name that cannot be part of a file name.
    #[error(
        "line {line}: {name:?} is not a valid name: use letters, digits, - and _, at most 64, and begin with a letter or digit"
    )]
    Name {
        /// The line.
        line: u32,
        /// The name.
        name: String,
    },
    /// An unknown key.
    #[error("line {line}: there is no setting {key:?} in {place}{}", did_you_mean(nearest.as_deref()))]
    UnknownKey {
        /// The line.
        line: u32,
        /// The section, in words.
        place: String,
        /// The key.
        key: String,
        /// The most similar known key.
        nearest: Option<String>,
    },
    /// An invalid value.
    #[error("line {line}: {key} in {place}: it should be {wanted}")]
    Value {
        /// The line.
        line: u32,
        /// The section, in words.
        place: String,
        /// The key.
        key: String,
        /// What is expected, in words.
        wanted: String,
    },
    /// A required setting is missing.
    #[error("line {line}: {place} needs {what}")]
    Missing {
        /// The line.
        line: u32,
        /// The section.
        place: String,
        /// What is missing, in words.
        what: String,
    },
    /// A reference to something undefined.
    #[error("line {line}: there is no [{group}.{name}], which {place} names{}", did_you_mean(nearest.as_deref()))]
    NoSuch {
        /// The line.
        line: u32,
        /// The section.
        place: String,
        /// `repositories`, `retention`, `notify`.
        group: &'static str,
        /// The undefined name.
        name: String,
        /// The most similar defined name.
        nearest: Option<String>,
    },
    /// Settings that exclude each other.
    #[error("line {line}: {place}: {what}")]
    Together {
        /// The line.
        line: u32,
        /// The section.
        place: String,
        /// The conflict, in words.
        what: String,
    },
}

impl ConfigError {
    /// The line, from 1.
    pub fn line(&self) -> u32 {
        match self {
            Self::Syntax { line, .. }
            | Self::UnknownSection { line, .. }
            | Self::NoSection { line, .. }
            | Self::Name { line, .. }
            | Self::UnknownKey { line, .. }
            | Self::Value { line, .. }
            | Self::Missing { line, .. }
            | Self::NoSuch { line, .. }
            | Self::Together { line, .. } => *line,
        }
    }

    pub(super) fn unknown_section(line: u32, section: &str) -> Self {
        let known = NAMED.iter().chain(&SINGLE).copied();
        Self::UnknownSection {
            line,
            section: section.to_owned(),
            nearest: nearest(section, known).map(str::to_owned),
        }
    }
}

/// A legal but suspicious setting.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigWarning {
    /// There is no job.
    #[error("there is no job: write a section [jobs.NAME]")]
    NoJob,
    /// No notification of failures is configured.
    #[error("no notification of failed jobs is configured: write a section [notify.NAME]")]
    NoNotification,
    /// A job prunes without a retention rule.
    #[error(
        "line {line}: {place} has no retention rule, so it keeps everything: name a retention, or set keep_daily and the like"
    )]
    KeepsAll {
        /// The line.
        line: u32,
        /// The section.
        place: String,
    },
    /// Two jobs do the same at the same times.
    #[error("line {line}: {place} does the same as [jobs.{other}], at the same times")]
    DuplicateJob {
        /// The line.
        line: u32,
        /// The section.
        place: String,
        /// The other job.
        other: String,
    },
    /// A section that nothing refers to.
    #[error("line {line}: no job uses {place}")]
    Unused {
        /// The line.
        line: u32,
        /// The section.
        place: String,
    },
    /// A calendar that never matches again.
    #[error("line {line}: {place} is never due: {calendar} has no future date")]
    NeverDue {
        /// The line.
        line: u32,
        /// The section.
        place: String,
        /// The calendar.
        calendar: String,
    },
    /// A jitter that is longer than the interval.
    #[error("line {line}: {place} may wait up to {jitter}, longer than the {period} from one time to the next")]
    JitterBeyondPeriod {
        /// The line.
        line: u32,
        /// The section.
        place: String,
        /// The jitter.
        jitter: String,
        /// The interval.
        period: String,
    },
}

fn did_you_mean(nearest: Option<&str>) -> String {
    nearest.map_or_else(String::new, |nearest| format!(": did you mean {nearest}?"))
}

fn section_title(group: &str, name: &str) -> String {
    if SINGLE.contains(&group) {
        group.to_owned()
    } else {
        format!("{group}.{name}")
    }
}
