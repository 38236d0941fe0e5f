//! The state of the disk in a snapshot.

/// The property of a snapshot with its [`SnapshotState`].
pub(super) const CONSISTENCY_PROPERTY: &str = "consistency";

/// The property of a snapshot with the id of the repository whose backups need it.
pub(crate) const REPOSITORY_PROPERTY: &str = "backup.repository";

/// The property of a snapshot with the process that clones it and deletes it afterwards, as JSON.
pub(crate) const CLONE_PROCESS_PROPERTY: &str = "clone.process";

/// The state of the disk in a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotState {
    /// The container was not mounted.
    Unmounted,
    /// Its file system was frozen.
    Frozen,
    /// As after a power failure.
    Crash,
}

impl SnapshotState {
    /// The word for programs.
    pub fn word(self) -> &'static str {
        match self {
            Self::Unmounted => "unmounted",
            Self::Frozen => "frozen",
            Self::Crash => "crash",
        }
    }
}
