//! What a check says: one line, and how bad it is, as Nagios has it.

/// What a check has found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// How bad it is.
    pub level: Level,
    /// The check's one line.
    pub line: String,
}

/// How bad it is; what is worse is greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// All is well.
    Ok,
    /// Somebody should look.
    Warning,
    /// It could not be found out. What is known to be critical is worse, what is known to be late is not.
    Unknown,
    /// Somebody must look.
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

    /// The word for it.
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
    /// Nothing could be found out.
    pub fn unknown(reason: &str) -> Self {
        Self {
            level: Level::Unknown,
            line: format!("{}: {}", Level::Unknown.word(), plain(reason)),
        }
    }
}

/// A reason on one line, without the mark after which Nagios expects figures.
pub(super) fn plain(reason: &str) -> String {
    let reason = reason.replace('|', "/");
    let lines: Vec<&str> = reason.lines().map(str::trim).collect();
    lines.join("; ")
}

#[cfg(test)]
mod tests {
    use super::{Check, Level};

    #[test]
    fn levels_are_those_of_nagios_and_what_is_worse_is_greater() {
        let all = [Level::Ok, Level::Warning, Level::Unknown, Level::Critical];
        assert!(all.is_sorted());
        assert_eq!(all.map(Level::code), [0, 1, 3, 2]);
    }

    #[test]
    fn a_reason_is_one_line_without_figures() {
        assert_eq!(Check::unknown("a | b\n c").line, "UNKNOWN: a / b; c");
    }
}
