//! How a snapshot is made, and what is reported of it.

use std::time::Duration;

use holdfast_repo::Manifest;
use jiff::tz::TimeZone;

use crate::job::{Bottleneck, Result};
use crate::repository::calendar::Calendar;
use crate::repository::name_conflict::{Continuation, GrantedName};
use crate::repository::open::find_in;
use crate::repository::snapshot_name::SnapshotReference;

/// How a snapshot is made, for all kinds of machines.
#[derive(Debug, Clone)]
pub struct SnapshotOptions {
    /// Which snapshot to compare with.
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

/// Which snapshot a backup is compared with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ParentChoice {
    /// The newest of the same machine.
    Newest,
    /// The one that a person names.
    Named(SnapshotReference),
    /// None: everything is looked up.
    None,
}

/// A backup that was made.
#[derive(Debug, Clone)]
pub struct BackupReport {
    /// The snapshot.
    pub snapshot: Manifest,
    /// Bytes that the repository has grown by.
    pub stored_bytes: u64,
    /// How long it took.
    pub duration: Duration,
    /// What it waited for most, where that is clear.
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
