//! Kinds of errors, for scripts.

/// The kind of an error; `docs/json.md` explains the words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Options that contradict each other.
    Usage,
    /// No repository is given.
    NoRepository,
    /// No password is given, and there is no terminal to ask at.
    NoPassword,
    /// The password cannot be read from its source.
    Password,
    /// A machine, disk or snapshot cannot have this name.
    BadName,
    /// Nothing has this name.
    NotFound,
    /// More than one snapshot matches.
    Ambiguous,
    /// The user or the system stopped the job.
    Interrupted,
    /// The operating system or a connection reported an error.
    Io,
    /// The target is full.
    NoSpace,
    /// Reading or writing is not permitted.
    Permission,
    /// The medium or a format lacks what is needed.
    Unsupported,
    /// There is no repository at the location.
    NoSuchRepository,
    /// The password, key file or paper key does not open the repository.
    WrongPassword,
    /// Another failure about keys.
    Key,
    /// Written by a newer program.
    NewerFormat,
    /// The request would do harm that is probably unintended.
    Refused,
    /// The target exists already.
    Exists,
    /// A new password that is easy to guess.
    WeakPassword,
    /// Another process holds the lock.
    Locked,
    /// Stored data is damaged.
    Damage,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 21] = [
        Self::Usage,
        Self::NoRepository,
        Self::NoPassword,
        Self::Password,
        Self::BadName,
        Self::NotFound,
        Self::Ambiguous,
        Self::Interrupted,
        Self::Io,
        Self::NoSpace,
        Self::Permission,
        Self::Unsupported,
        Self::NoSuchRepository,
        Self::WrongPassword,
        Self::Key,
        Self::NewerFormat,
        Self::Refused,
        Self::Exists,
        Self::WeakPassword,
        Self::Locked,
        Self::Damage,
    ];

    /// The word in JSON documents; it never changes.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Usage => "usage",
            Self::NoRepository => "no-repository",
            Self::NoPassword => "no-password",
            Self::Password => "password",
            Self::BadName => "bad-name",
            Self::NotFound => "not-found",
            Self::Ambiguous => "ambiguous",
            Self::Interrupted => "interrupted",
            Self::Io => "io",
            Self::NoSpace => "no-space",
            Self::Permission => "permission",
            Self::Unsupported => "unsupported",
            Self::NoSuchRepository => "no-such-repository",
            Self::WrongPassword => "wrong-password",
            Self::Key => "key",
            Self::NewerFormat => "newer-format",
            Self::Refused => "refused",
            Self::Exists => "exists",
            Self::WeakPassword => "weak-password",
            Self::Locked => "locked",
            Self::Damage => "damage",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Kind;

    /// The documentation lists exactly the existing words.
    #[test]
    fn every_word_is_documented() {
        let text = include_str!("../../../../docs/json.md");
        let (_, table) = text.split_once("| `kind` | meaning |").unwrap();
        let documented: Vec<&str> = table
            .lines()
            .skip(2)
            .map_while(|line| line.strip_prefix("| `")?.split('`').next())
            .collect();
        assert_eq!(documented, Kind::ALL.map(Kind::word));
    }
}
