//! A stored state, and the places of its machine's disks.

use std::collections::BTreeMap;
use std::path::PathBuf;

use holdfast_host::Description;
use holdfast_host::provider::{Dataset, DatasetPath, HostSnapshotName, ProviderKind};
use holdfast_host::qemu::memory::Memory;
use holdfast_repo::{BackupRequest, Manifest, Parent, SnapshotId};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::StateStore;
use crate::host_snapshot::MachinePlaces;
use crate::host_snapshot::places::image_path;
use crate::host_snapshot::record::SetId;
use crate::job::{Counting, Job, Result};
use crate::machine::state::streams::{FirmwareState, sources_of};
use crate::notes::{
    NOTE_CONSISTENCY, NOTE_HOST_SNAPSHOT_DISKS, NOTE_HOST_SNAPSHOT_SET, NOTE_HOST_SNAPSHOTS, NOTE_UUID, STREAM_MEMORY,
    is_memory,
};

/// A state to store.
pub(crate) struct StateToKeep<'a> {
    pub(crate) set: SetId,
    pub(crate) snapshots: &'a [HostSnapshotName],
    pub(crate) description: &'a Description,
    pub(crate) places: &'a MachinePlaces,
    pub(crate) configuration: &'a [(String, Vec<u8>)],
    pub(crate) beside: FirmwareState,
    pub(crate) memory: Option<&'a Memory>,
    pub(crate) time: Timestamp,
    pub(crate) consistency: &'a str,
    pub(crate) program: &'a str,
}

/// A stored state.
#[derive(Debug, Clone)]
pub struct KeptState {
    /// Its snapshot in the store.
    pub manifest: Manifest,
    /// The set that it belongs to.
    pub set: SetId,
    /// The host snapshots that it belongs to.
    pub snapshots: Vec<HostSnapshotName>,
    /// The places of the machine's disks in them.
    pub disks: Vec<KeptDisk>,
}

/// A disk of a machine in a host snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptDisk {
    /// Its name in the machine.
    pub target: String,
    /// Its dataset, and its path in it.
    pub place: DatasetPath,
    /// Its path in the machine's configuration.
    pub file: PathBuf,
    /// The format of its image.
    pub format: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct SnapshotNote {
    provider: String,
    dataset: String,
    name: String,
}

#[derive(Serialize, Deserialize)]
struct DiskNote {
    disk: String,
    provider: String,
    dataset: String,
    path: PathBuf,
    file: PathBuf,
    format: Option<String>,
}

impl KeptDisk {
    /// The disks of a machine.
    pub(crate) fn all_of(description: &Description, places: &MachinePlaces) -> Vec<Self> {
        let kept = |(target, place): &(String, DatasetPath)| {
            let disk = description.disks.iter().find(|disk| disk.target == *target)?;
            Some(Self {
                target: target.clone(),
                place: place.clone(),
                file: image_path(disk).to_owned(),
                format: disk.format.clone(),
            })
        };
        places.disks.iter().filter_map(kept).collect()
    }
}

impl KeptState {
    /// The state of a snapshot in the store; none if it is not a state.
    pub(super) fn of(manifest: Manifest) -> Option<Self> {
        let set = SetId::parse(manifest.notes.get(NOTE_HOST_SNAPSHOT_SET)?)?;
        let snapshots: Vec<SnapshotNote> = serde_json::from_str(manifest.notes.get(NOTE_HOST_SNAPSHOTS)?).ok()?;
        let disks: Vec<DiskNote> = serde_json::from_str(manifest.notes.get(NOTE_HOST_SNAPSHOT_DISKS)?).ok()?;
        let dataset = |provider: &str, name: String| {
            let provider = ProviderKind::from_word(provider)?;
            Some(Dataset { provider, name })
        };
        let snapshot = |note: SnapshotNote| {
            Some(HostSnapshotName {
                dataset: dataset(&note.provider, note.dataset)?,
                name: note.name,
            })
        };
        let disk = |note: DiskNote| {
            Some(KeptDisk {
                target: note.disk,
                place: DatasetPath {
                    dataset: dataset(&note.provider, note.dataset)?,
                    path: note.path,
                },
                file: note.file,
                format: note.format,
            })
        };
        Some(Self {
            set,
            snapshots: snapshots.into_iter().map(snapshot).collect::<Option<_>>()?,
            disks: disks.into_iter().map(disk).collect::<Option<_>>()?,
            manifest,
        })
    }

    /// Whether the machine can be resumed from it.
    pub fn has_memory(&self) -> bool {
        self.manifest.disks.iter().any(is_memory)
    }

    /// The machine's UUID.
    pub fn uuid(&self) -> &str {
        self.manifest.notes.get(NOTE_UUID).map_or("", String::as_str)
    }
}

impl StateToKeep<'_> {
    fn notes(&self) -> BTreeMap<String, String> {
        let snapshots = self.snapshots.iter().map(|name| SnapshotNote {
            provider: name.dataset.provider.word().to_owned(),
            dataset: name.dataset.name.clone(),
            name: name.name.clone(),
        });
        let disks = KeptDisk::all_of(self.description, self.places);
        let disks = disks.into_iter().map(|disk| DiskNote {
            disk: disk.target,
            provider: disk.place.dataset.provider.word().to_owned(),
            dataset: disk.place.dataset.name,
            path: disk.place.path,
            file: disk.file,
            format: disk.format,
        });
        let written = "text and paths that are text can be written";
        let snapshots = serde_json::to_string(&snapshots.collect::<Vec<_>>()).expect(written);
        // A path that is not UTF-8 cannot be found again through its note.
        let disks = serde_json::to_string(&disks.collect::<Vec<_>>()).unwrap_or_else(|_| "[]".to_owned());
        let notes = [
            (NOTE_HOST_SNAPSHOT_SET, self.set.to_string()),
            (NOTE_HOST_SNAPSHOTS, snapshots),
            (NOTE_HOST_SNAPSHOT_DISKS, disks),
            (NOTE_UUID, self.description.summary.uuid.clone()),
            (NOTE_CONSISTENCY, self.consistency.to_owned()),
        ];
        notes.into_iter().map(|(key, text)| (key.to_owned(), text)).collect()
    }
}

impl StateStore {
    /// Stores a state.
    pub(crate) fn keep(&self, state: StateToKeep<'_>, job: Job<'_>) -> Result<SnapshotId> {
        let _shared = self.share(job)?;
        let notes = state.notes();
        let pages = state.memory.map(|(_, pages)| &**pages);
        let streams = state
            .beside
            .rest(state.memory, job.progress)
            .streams(state.configuration);
        let mut readers: Vec<&[u8]> = streams.iter().map(|stream| &stream.bytes[..]).collect();
        let sources = sources_of(pages.as_ref(), &streams, &mut readers).collect();
        let request = BackupRequest {
            machine: state.description.summary.name.clone(),
            time_ms: state.time.as_millisecond(),
            // Memory is large, and may be kept for fewer points in time than the rest: the tag lets prune select it.
            tags: pages.iter().map(|_| STREAM_MEMORY.to_owned()).collect(),
            parent: Parent::None,
            host: String::new(),
            program: state.program.to_owned(),
            notes,
            sources,
            thread_count: job.thread_count,
        };
        let report = self.repository.backup(request, &job.watch(Counting::Elsewhere))?;
        Ok(report.snapshot.id)
    }
}
