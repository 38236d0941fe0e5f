//! How a snapshot is made, and what is reported of it.

use std::time::Duration;

use holdfast_repo::Manifest;
use jiff::tz::TimeZone;

use crate::job::{Bottleneck, Result};
use crate::repository::calendar::Calendar;
use crate::repository::name_conflict::{Continuation, GrantedName};
use crate::repository::open::find_in;
use crate::repository::snapshot_name::SnapshotReference;

/// Options for a snapshot, for all kinds of machines.
#[derive(Debug, Clone)]
pub struct SnapshotOptions {
    /// The snapshot to compare with.
    pub parent: ParentChoice,
    /// Whether snapshots under the name may be of another machine.
    pub continuation: Continuation,
    /// Tags of the snapshot.
    pub tags: Vec<String>,
    /// The host that makes the snapshot.
    pub host: String,
    /// The program that makes it.
    pub program: String,
    /// The time zone of times in `parent`.
    pub zone: TimeZone,
}

/// The snapshot that a backup is compared with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ParentChoice {
    /// The newest of the same machine.
    Newest,
    /// The one that the user names.
    Named(SnapshotReference),
    /// None: every chunk is looked up.
    None,
}

/// The result of a backup.
#[derive(Debug, Clone)]
pub struct BackupReport {
    /// The snapshot.
    pub snapshot: Manifest,
    /// The growth of the repository in bytes.
    pub stored_bytes: u64,
    /// How long it took.
    pub duration: Duration,
    /// The slowest stage, if that is clear.
    pub bottleneck: Option<Bottleneck>,
}

/// The snapshot that a new one is compared with.
pub(crate) fn choose_parent<'m>(
    choice: &ParentChoice,
    calendar: Calendar<'_>,
    manifests: &'m [Manifest],
    granted: &GrantedName<'m>,
) -> Result<Option<&'m Manifest>> {
    match choice {
        ParentChoice::None => Ok(None),
        ParentChoice::Named(reference) => Ok(Some(&manifests[find_in(manifests, reference, calendar)?])),
        ParentChoice::Newest => Ok(granted.newest(calendar)),
    }
}
