//! What the program says with its exit code.
//!
//! Scripts depend on these numbers: they do not change from release to release.

use std::process::ExitCode;

use holdfast_policy::sanoid::Level;

/// How the program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Exit {
    /// Done, nothing to report.
    Ok,
    /// Not done, or not all of it.
    Error,
    /// The command line or the environment asks for something that makes no sense; nothing was tried.
    Usage,
    /// Done, and there is something that a person should look at.
    Warnings,
    /// Another process holds a lock; try again later.
    Locked,
    /// Stored data is damaged.
    Damage,
    /// A signal has ended it before all was done; the output says what was done until then.
    Signal(u8),
    /// What a check of `holdfast monitor` says. Its numbers are those of Nagios, and mean something else than all others.
    Check(Level),
}

impl Exit {
    /// All but those of checks and signals, in the order of their codes.
    pub const ALL: [Self; 6] = [
        Self::Ok,
        Self::Error,
        Self::Usage,
        Self::Warnings,
        Self::Locked,
        Self::Damage,
    ];

    /// The number that the shell sees.
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

    /// What it means, in one line of help.
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

    /// This exit, or [`Exit::Warnings`] where this one is [`Exit::Ok`] and there were warnings.
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

    /// Scripts out there test for these numbers and words.
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
