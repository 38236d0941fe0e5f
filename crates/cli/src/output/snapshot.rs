//! Snapshots as answers show them, to people and in documents.

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
    /// The instant, in UTC.
    pub time: String,
    /// Words to find it by.
    pub tags: Vec<String>,
    /// The snapshot that it was compared with.
    pub parent: Option<String>,
    /// The host that wrote it.
    pub host: String,
    /// The program that wrote it.
    pub program: String,
    /// Of what kind its instant is; null where it is of images.
    pub consistency: Option<String>,
    /// How its machine was read; null where it is of images.
    pub method: Option<String>,
    /// The repository and the snapshot that it is a copy of, with a `/` in between; null where it is none.
    pub origin: Option<String>,
    /// Its disks.
    pub disks: Vec<DiskDocument>,
}

/// A snapshot of a repository that was looked through.
#[derive(Debug, Serialize)]
pub struct ListedSnapshot {
    /// What it is.
    #[serde(flatten)]
    pub snapshot: SnapshotDocument,
    /// Whether it is kept from being removed.
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
    /// What the backup found.
    #[serde(flatten)]
    pub statistics: DiskStatistics,
    /// What was kept with it: its path, its format.
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

/// Bytes of disks that a backup found changed.
pub fn changed_bytes(statistics: &DiskStatistics) -> u64 {
    statistics.known_bytes.saturating_add(statistics.new_bytes)
}
