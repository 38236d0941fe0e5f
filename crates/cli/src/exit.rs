//! Exit codes of the program.
//!
//! Scripts depend on these numbers; they do not change between releases.

use std::process::ExitCode;

use holdfast_policy::sanoid::Level;

/// The exit status of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Exit {
    /// Everything was done, without warnings.
    Ok,
    /// Not everything was done.
    Error,
    /// The command line or the environment is invalid; nothing was tried.
    Usage,
    /// Everything was done, with warnings.
    Warnings,
    /// Another process holds a lock; try again later.
    Locked,
    /// Stored data is damaged.
    Damage,
    /// A signal ended the program early; the output shows what was done until then.
    Signal(u8),
    /// The result of a check of `holdfast monitor`. Its numbers are those of Nagios, and differ from all others.
    Check(Level),
}

impl Exit {
    /// All except checks and signals, in the order of their codes.
    pub const ALL: [Self; 6] = [
        Self::Ok,
        Self::Error,
        Self::Usage,
        Self::Warnings,
        Self::Locked,
        Self::Damage,
    ];

    /// The numeric exit code.
    pub const fn code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::Error => 1,
            Self::Usage => 2,
            Self::Warnings => 3,
            Self::Locked => 4,
            Self::Damage => 5,
            Self::Signal(number) => 128_u8.saturating_add(number),
            Self::Check(level) => level.code(),
        }
    }

    /// The word for it in JSON documents.
    pub const fn status(self) -> &'static str {
        match self {
            Self::Ok | Self::Check(Level::Ok) => "ok",
            Self::Error | Self::Signal(_) => "error",
            Self::Usage => "usage",
            Self::Warnings => "warnings",
            Self::Locked => "locked",
            Self::Damage => "damage",
            Self::Check(Level::Warning) => "warning",
            Self::Check(Level::Critical) => "critical",
            Self::Check(Level::Unknown) => "unknown",
        }
    }

    /// Its meaning, as one line of help.
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Ok => "done",
            Self::Error => "error: the command failed, or did only a part",
            Self::Usage => "usage error: nothing was done",
            Self::Warnings => "done, with warnings",
            Self::Locked => "busy: another process holds a lock; try again later",
            Self::Damage => "damaged data found",
            Self::Signal(_) => "ended by a signal",
            Self::Check(level) => level.word(),
        }
    }

    /// The section of `holdfast --help` that documents the codes.
    pub fn help() -> String {
        let mut lines: Vec<String> = Self::ALL
            .iter()
            .map(|exit| format!("  {}  {}", exit.code(), exit.meaning()))
            .collect();
        let checks = [Level::Ok, Level::Warning, Level::Critical, Level::Unknown].map(Self::Check);
        let checks = checks.map(|exit| format!("{} {}", exit.code(), exit.meaning()));
        lines.push(format!(
            "Exit codes of monitor snapshots, health, capacity and machines (as in Nagios):\n  {}",
            checks.join(", ")
        ));
        lines.join("\n")
    }

    /// This exit, or [`Exit::Warnings`] if this one is [`Exit::Ok`] and there were warnings.
    #[must_use]
    pub fn with_warning_count(self, warning_count: usize) -> Self {
        match self {
            Self::Ok if warning_count > 0 => Self::Warnings,
            other => other,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

#[cfg(test)]
mod tests {
    use holdfast_policy::sanoid::Level;

    use super::Exit;

    /// Existing scripts test for these numbers and words.
    #[test]
    fn codes_and_words_are_stable() {
        let stable = Exit::ALL.map(|exit| (exit.code(), exit.status()));
        assert_eq!(
            stable,
            [
                (0, "ok"),
                (1, "error"),
                (2, "usage"),
                (3, "warnings"),
                (4, "locked"),
                (5, "damage")
            ]
        );
    }

    #[test]
    fn checks_end_as_nagios_has_it_whatever_else_there_is() {
        let levels = [Level::Ok, Level::Warning, Level::Critical, Level::Unknown];
        let stable = levels.map(|level| {
            let exit = Exit::Check(level).with_warning_count(1);
            (exit.code(), exit.status())
        });
        assert_eq!(stable, [(0, "ok"), (1, "warning"), (2, "critical"), (3, "unknown")]);
    }

    #[test]
    fn warnings_only_change_success() {
        assert_eq!(Exit::Ok.with_warning_count(0), Exit::Ok);
        assert_eq!(Exit::Ok.with_warning_count(2), Exit::Warnings);
        assert_eq!(Exit::Damage.with_warning_count(2), Exit::Damage);
    }
}
