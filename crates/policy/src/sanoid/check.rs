//! The result of a Nagios check: one line and a level.

/// The result of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// The level.
    pub level: Level,
    /// The output line.
    pub line: String,
}

/// The level of a result, in ascending order of severity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// No problem.
    Ok,
    /// A warning.
    Warning,
    /// The state is unknown: worse than a warning, better than critical.
    Unknown,
    /// A critical problem.
    Critical,
}

impl Level {
    /// The exit code of the check.
    pub const fn code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::Warning => 1,
            Self::Critical => 2,
            Self::Unknown => 3,
        }
    }

    /// The word for the level.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::Warning => "WARNING",
            Self::Critical => "CRITICAL",
            Self::Unknown => "UNKNOWN",
        }
    }
}

impl Check {
    /// An unknown state.
    pub fn unknown(reason: &str) -> Self {
        Self {
            level: Level::Unknown,
            line: format!("{}: {}", Level::Unknown.word(), one_line(reason)),
        }
    }
}

/// The reason as one line, without the character after which Nagios expects performance data.
pub(super) fn one_line(reason: &str) -> String {
    let reason = reason.replace('|', "/");
    let lines: Vec<&str> = reason.lines().map(str::trim).collect();
    lines.join("; ")
}

#[cfg(test)]
mod tests {
    use super::{Check, Level};

    #[test]
    fn levels_match_nagios_and_are_ordered_by_severity() {
        let all = [Level::Ok, Level::Warning, Level::Unknown, Level::Critical];
        assert!(all.is_sorted());
        assert_eq!(all.map(Level::code), [0, 1, 3, 2]);
    }

    #[test]
    fn a_reason_is_one_line_without_figures() {
        assert_eq!(Check::unknown("a | b\n c").line, "UNKNOWN: a / b; c");
    }
}
