//! What is wrong with a `holdfast.toml`, and what is hardly meant.

use crate::config::section_names::{NAMED, SINGLE};
use crate::nearest::nearest;

/// What is wrong. Lines count from 1.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// It is no TOML.
    #[error("line {line}: {what}")]
    Syntax {
        /// The line.
        line: u32,
        /// What TOML's grammar says to it.
        what: String,
    },
    /// A section that there is not.
    #[error("line {line}: there is no section [{section}]{}", did_you_mean(nearest.as_deref()))]
    UnknownSection {
        /// The line.
        line: u32,
        /// The section.
        section: String,
        /// What may have been meant.
        nearest: Option<String>,
    },
    /// A value where a section should be.
    #[error("line {line}: {group} is a section: write [{}]", section_title(group, name))]
    NoSection {
        /// The line.
        line: u32,
        /// The section's first word.
        group: String,
        /// Its name.
        name: String,
    },
    /// A name that would not do for a file.
    #[error("line {line}: {name:?} is no name: letters, digits, - and _ are, at most 64, and a letter or digit first")]
    Name {
        /// The line.
        line: u32,
        /// The name.
        name: String,
    },
    /// A key that there is not.
    #[error("line {line}: there is no setting {key:?} in {place}{}", did_you_mean(nearest.as_deref()))]
    UnknownKey {
        /// The line.
        line: u32,
        /// Where it stands, in words.
        place: String,
        /// The key.
        key: String,
        /// What may have been meant.
        nearest: Option<String>,
    },
    /// A value that makes no sense for its key.
    #[error("line {line}: {key} in {place}: it should be {wanted}")]
    Value {
        /// The line.
        line: u32,
        /// Where it stands, in words.
        place: String,
        /// The key.
        key: String,
        /// What it should be, in words.
        wanted: String,
    },
    /// A setting without which there is nothing to do.
    #[error("line {line}: {place} needs {what}")]
    Missing {
        /// The line.
        line: u32,
        /// The section.
        place: String,
        /// What it needs, in words.
        what: String,
    },
    /// Something is named that is not there.
    #[error("line {line}: there is no [{group}.{name}], which {place} names{}", did_you_mean(nearest.as_deref()))]
    NoSuch {
        /// The line.
        line: u32,
        /// The section.
        place: String,
        /// `repositories`, `retention`, `notify`.
        group: &'static str,
        /// What is not there.
        name: String,
        /// What may have been meant.
        nearest: Option<String>,
    },
    /// Settings that do not go together.
    #[error("line {line}: {place}: {what}")]
    Together {
        /// The line.
        line: u32,
        /// The section.
        place: String,
        /// What does not fit, in words.
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

/// What is hardly meant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigWarning {
    /// There is nothing to do.
    #[error("there is no job: write a section [jobs.NAME]")]
    NoJob,
    /// Nobody hears of a failure.
    #[error("nobody is told when a job fails: write a section [notify.NAME]")]
    NobodyIsTold,
    /// A job prunes without a rule.
    #[error(
        "line {line}: {place} has no rule of what to keep, so it keeps everything: name a retention, or set keep_daily and the like"
    )]
    KeepsAll {
        /// The line.
        line: u32,
        /// The section.
        place: String,
    },
    /// Two jobs do the same at the same times.
    #[error("line {line}: {place} does the same as [jobs.{other}], at the same times")]
    Twin {
        /// The line.
        line: u32,
        /// The section.
        place: String,
        /// The job that does it already.
        other: String,
    },
    /// Something that nothing names.
    #[error("line {line}: no job uses {place}")]
    Unused {
        /// The line.
        line: u32,
        /// The section.
        place: String,
    },
    /// A calendar without a day to come.
    #[error("line {line}: {place} is never due: {calendar} has no day to come")]
    NeverDue {
        /// The line.
        line: u32,
        /// The section.
        place: String,
        /// The calendar.
        calendar: String,
    },
    /// A job that is begun again before it can have ended.
    #[error("line {line}: {place} may wait up to {jitter}, longer than the {period} from one time to the next")]
    JitterBeyondPeriod {
        /// The line.
        line: u32,
        /// The section.
        place: String,
        /// How long it may wait.
        jitter: String,
        /// How often it is due.
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
