//! Kinds of errors, as scripts tell them apart.

/// What kind of error it is; `docs/json.md` explains the words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Options that contradict each other.
    Usage,
    /// No repository is given.
    NoRepository,
    /// No password is given, and there is no terminal to ask at.
    NoPassword,
    /// The password cannot be had from where it should come.
    Password,
    /// A machine, disk or snapshot cannot have this name.
    BadName,
    /// There is nothing of that name.
    NotFound,
    /// More than one snapshot could be meant.
    Ambiguous,
    /// A person or the system stopped the job.
    Interrupted,
    /// The operating system, or a connection, refused.
    Io,
    /// The target is full.
    NoSpace,
    /// The user, or the medium, may not be read or written.
    Permission,
    /// The medium or a format lacks what is needed.
    Unsupported,
    /// There is no repository where it should be.
    NoSuchRepository,
    /// The password, key file or paper key does not open the repository.
    WrongPassword,
    /// Another failure about keys.
    Key,
    /// Written by a newer program.
    NewerFormat,
    /// It would do harm that cannot be intended.
    Refused,
    /// There is something already where something new should be made.
    Exists,
    /// A new password that is found at once.
    WeakPassword,
    /// Another process is at work.
    Locked,
    /// Stored data is damaged.
    Damage,
}

impl Kind {
    /// All of them.
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

    /// The word in JSON documents: it never changes.
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

    /// What the documents describe is what there is: no word more, none less.
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
