//! Snapshots as text and in JSON documents.

use std::collections::BTreeMap;

use holdfast_engine::{NOTE_CONSISTENCY, NOTE_METHOD, NOTE_ORIGIN, time_of};
use holdfast_repo::{DiskContent, DiskRecord, DiskStatistics, Manifest};
use serde::Serialize;

/// A snapshot in a document.
#[derive(Debug, Clone, Serialize)]
pub struct SnapshotDocument {
    /// All digits of its id.
    pub id: String,
    /// Its machine.
    pub machine: String,
    /// The point in time, in UTC.
    pub time: String,
    /// Its tags.
    pub tags: Vec<String>,
    /// The snapshot that it was compared with.
    pub parent: Option<String>,
    /// The host that created it.
    pub host: String,
    /// The program that created it.
    pub program: String,
    /// The consistency of its point in time; null for images.
    pub consistency: Option<String>,
    /// How its machine was read; null for images.
    pub method: Option<String>,
    /// The repository and the snapshot of which it is a copy, separated by a `/`; null if it is no copy.
    pub origin: Option<String>,
    /// Its disks.
    pub disks: Vec<DiskDocument>,
}

/// A snapshot in a listing of a repository.
#[derive(Debug, Serialize)]
pub struct ListedSnapshot {
    /// The snapshot.
    #[serde(flatten)]
    pub snapshot: SnapshotDocument,
    /// Whether it is protected from removal.
    pub is_protected: bool,
}

/// A disk in a document.
#[derive(Debug, Clone, Serialize)]
pub struct DiskDocument {
    /// Its name.
    pub name: String,
    /// Its size.
    pub size_bytes: u64,
    /// "blocks" or "stream".
    pub content: DiskContent,
    /// Statistics of the backup.
    #[serde(flatten)]
    pub statistics: DiskStatistics,
    /// Notes stored with it: its path, its format.
    pub notes: BTreeMap<String, String>,
}

impl From<&Manifest> for SnapshotDocument {
    fn from(manifest: &Manifest) -> Self {
        Self {
            id: manifest.id.to_string(),
            machine: manifest.machine.clone(),
            time: time_of(manifest).to_string(),
            tags: manifest.tags.clone(),
            parent: manifest.parent.map(|parent| parent.to_string()),
            host: manifest.host.clone(),
            program: manifest.program.clone(),
            consistency: manifest.notes.get(NOTE_CONSISTENCY).cloned(),
            method: manifest.notes.get(NOTE_METHOD).cloned(),
            origin: manifest.notes.get(NOTE_ORIGIN).cloned(),
            disks: manifest.disks.iter().map(DiskDocument::from).collect(),
        }
    }
}

impl From<&DiskRecord> for DiskDocument {
    fn from(disk: &DiskRecord) -> Self {
        Self {
            name: disk.name.clone(),
            size_bytes: disk.size_bytes,
            content: disk.content,
            statistics: disk.statistics,
            notes: disk.notes.clone(),
        }
    }
}

/// Bytes of disks that changed according to the backup.
pub fn changed_bytes(statistics: &DiskStatistics) -> u64 {
    statistics.known_bytes.saturating_add(statistics.new_bytes)
}
