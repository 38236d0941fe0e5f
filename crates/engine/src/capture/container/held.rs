//! The snapshot of a container that a backup reads, and the one that it leaves for the next.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::time::Duration;

use holdfast_block::error_text;
use holdfast_image::{ContainerTree, ImageId, PointInTime, SnapshotEntry};
use jiff::Timestamp;

use super::changes::{ChangesBase, NotedLayer, changed_ranges};
use super::{
    ContainerCapture, ContainerChange, ContainerConfiguration, ContainerReading, DISK, METHOD, consistency_of,
};
use crate::capture::store::{DiskToStore, MachineToStore, OtherToStore, store_machine};
use crate::container::{
    REPOSITORY_PROPERTY, SnapshotRequest, TakenSnapshot, delete_snapshots, open_snapshot, take_snapshot,
};
use crate::job::rate_limit::RateLimit;
use crate::job::{Error, Interrupt, Job, Result, Unit};
use crate::notes::{
    NOTE_CONSISTENCY, NOTE_CONTAINER, NOTE_CONTAINER_LAYER, NOTE_FORMAT, NOTE_HYPERVISOR, NOTE_METHOD, NOTE_PATH,
    NOTE_UUID, STREAM_CONTAINER, STREAM_DISK_DESCRIPTOR,
};

/// The property of a snapshot with the name that its backups are listed under.
const MACHINE_PROPERTY: &str = "backup.machine";

/// The snapshot of a container that a backup reads.
pub(crate) struct HeldContainer {
    pub(super) taken: TakenSnapshot,
    pub(super) time: Timestamp,
    tree: ContainerTree,
    /// Dropped before layers are merged: it prevents that.
    pub(super) point: Option<PointInTime>,
}

/// A snapshot of a container that a backup has taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BackupLayer {
    /// Its layer.
    pub(crate) id: ImageId,
    /// The id of the repository.
    pub(crate) repository: String,
    /// The name that backups are listed under.
    pub(crate) machine: String,
    /// When it was taken, in seconds since 1970.
    pub(crate) created_s: Option<u64>,
}

/// Whether a backup has taken this snapshot, and the next one is compared with it.
pub fn is_kept_for_backup(entry: &SnapshotEntry) -> bool {
    entry.properties.contains_key(REPOSITORY_PROPERTY)
}

/// The snapshots that backups have taken.
pub(crate) fn backup_layers(tree: &ContainerTree) -> Vec<BackupLayer> {
    let layers = tree.snapshots().into_iter().filter_map(|(id, entry)| {
        Some(BackupLayer {
            id,
            repository: entry.properties.get(REPOSITORY_PROPERTY)?.clone(),
            machine: entry.properties.get(MACHINE_PROPERTY)?.clone(),
            created_s: entry.created_s,
        })
    });
    layers.collect()
}

impl ContainerCapture<'_> {
    /// The properties of this backup's snapshots.
    fn properties(&self) -> BTreeMap<String, String> {
        let repository = self
            .sink
            .history()
            .map(|history| history.repository.config().id.to_string());
        BTreeMap::from([
            (REPOSITORY_PROPERTY.to_owned(), repository.unwrap_or_default()),
            (MACHINE_PROPERTY.to_owned(), self.request.capture.name.to_string()),
        ])
    }

    /// The snapshots of earlier backups under the same name to the same repository, except those in `kept`.
    fn earlier(&self, kept: &[ImageId]) -> Result<Vec<String>> {
        let own = self.properties();
        let is_own = |layer: &BackupLayer| {
            own.get(REPOSITORY_PROPERTY) == Some(&layer.repository) && own.get(MACHINE_PROPERTY) == Some(&layer.machine)
        };
        let layers = backup_layers(&self.request.tree()?).into_iter();
        let earlier = layers.filter(|layer| is_own(layer) && !kept.contains(&layer.id));
        Ok(earlier.map(|layer| layer.id.to_string()).collect())
    }

    /// Deletes the snapshots of killed backups: no snapshot of the repository is compared with them.
    pub(super) fn clear_up(&self) {
        let Some(history) = self.sink.history() else { return };
        let needed = history.newest.into_iter().chain(history.parent);
        let needed: Vec<ImageId> = needed.filter_map(NotedLayer::of).map(|noted| noted.layer).collect();
        self.delete(self.earlier(&needed), self.job);
    }

    /// Deletes snapshots. Returns whether that is complete; a failure is a warning, since it does not affect the backup.
    fn delete(&self, names: Result<Vec<String>>, job: Job<'_>) -> bool {
        let deleted = names.and_then(|names| {
            if names.is_empty() {
                return Ok(());
            }
            job.progress
                .phase("merging the layers of the backup before", Unit::Bytes);
            delete_snapshots(&self.request.place, &names, job).map(drop)
        });
        if let Err(error) = &deleted {
            self.job.progress.warning(&format!(
                "{}: a snapshot that a backup has taken is not merged yet, which the next backup or holdfast container merge does: {}",
                self.request.place.folder.display(),
                error_text(error)
            ));
        }
        deleted.is_ok()
    }

    /// Takes the snapshot.
    pub(super) fn take(&self) -> Result<HeldContainer> {
        let options = &self.request.capture;
        let state = self.summary.state;
        let time = (options.now)();
        let request = SnapshotRequest {
            name: None,
            comment: format!("kept for the next backup of {}", options.name),
            created_s: u64::try_from(time.as_second()).unwrap_or(0),
            properties: self.properties(),
            consistency: self.request.consistency,
        };
        let taken = self
            .hooks
            .pre_freeze(state)
            .and_then(|()| take_snapshot(&self.request.place, &request, self.job));
        self.hooks.post_thaw(state, None);
        let taken = taken?;
        match self.open(&taken) {
            Ok((tree, point)) => Ok(HeldContainer {
                taken,
                time,
                tree,
                point: Some(point),
            }),
            Err(error) => {
                self.delete_own(&taken);
                Err(error)
            }
        }
    }

    /// Opens the snapshot; its layers are not merged as long as it is open.
    fn open(&self, taken: &TakenSnapshot) -> Result<(ContainerTree, PointInTime)> {
        let place = &self.request.place;
        let id: ImageId = taken.id.parse().map_err(|error| Error::from(error).on(&place.folder))?;
        let point = open_snapshot(place, id, self.job)?;
        Ok((self.request.tree()?, point))
    }

    /// Deletes the snapshot of this backup, also after an interruption.
    fn delete_own(&self, taken: &TakenSnapshot) {
        let never = Interrupt::new();
        let job = Job {
            interrupt: &never,
            ..self.job
        };
        self.delete(Ok(vec![taken.id.clone()]), job);
    }

    /// Stores the disk and the configuration.
    pub(super) fn store(&self, held: &HeldContainer, point: &PointInTime) -> Result<ContainerReading> {
        let chain: Vec<ImageId> = held
            .tree
            .chain_of(held.taken.id.parse()?)
            .iter()
            .map(|layer| layer.id)
            .collect();
        let parent = self.parent();
        let (changed, change) = match ChangesBase::find(parent, &self.request.place.id, &chain, &held.tree) {
            ChangesBase::None(reason) => (None, ContainerChange::Everything(reason)),
            ChangesBase::Layer(base) => {
                let known = parent.and_then(|parent| parent.disk(Some(DISK)).ok());
                let known_bytes = known.map_or(0, |disk| disk.size_bytes);
                match changed_ranges(point, base, known_bytes)? {
                    Some(changed) => {
                        let changed_bytes = changed.dirty_bytes();
                        (Some(changed), ContainerChange::Since { changed_bytes })
                    }
                    None => (
                        None,
                        ContainerChange::Everything("its layers were merged meanwhile".to_owned()),
                    ),
                }
            }
        };
        let total_bytes = match &changed {
            Some(changed) => changed.dirty_bytes(),
            None => Self::data_bytes(point)?,
        };
        let pace = RateLimit::new(self.request.bytes_per_second, self.job);
        let machine = MachineToStore {
            time: held.time,
            notes: self.notes(held),
            disks: vec![DiskToStore {
                name: DISK.to_owned(),
                device: point,
                changed: changed.as_ref(),
                notes: self.disk_notes(held),
            }],
            others: self.others(held)?,
            total_bytes: Some(total_bytes),
        };
        self.job
            .progress
            .phase(&self.sink.phase(&self.request.capture.name), Unit::Bytes);
        let duration = store_machine(self.sink, machine, &pace, self.job)?;
        Ok(ContainerReading {
            state: held.taken.state,
            paused: Duration::from_micros(held.taken.paused_us),
            disk: DISK.to_owned(),
            change,
            waited: pace.waited(duration),
            has_remains: false,
        })
    }

    fn others(&self, held: &HeldContainer) -> Result<Vec<OtherToStore<'static>>> {
        let configuration = ContainerConfiguration::of(&held.tree).encode();
        let mut others = vec![OtherToStore::stream(STREAM_CONTAINER, Cursor::new(configuration))];
        if held.tree.is_parallels() {
            let path = self.request.place.folder.join(STREAM_DISK_DESCRIPTOR);
            let descriptor = std::fs::read(&path).map_err(|source| Error::File {
                action: "read",
                path,
                source,
            })?;
            others.push(OtherToStore::stream(STREAM_DISK_DESCRIPTOR, Cursor::new(descriptor)));
        }
        Ok(others)
    }

    /// Notes of the snapshot.
    fn notes(&self, held: &HeldContainer) -> BTreeMap<String, String> {
        let notes = [
            (NOTE_HYPERVISOR, "container"),
            (NOTE_UUID, &self.request.place.id),
            (NOTE_METHOD, METHOD),
            (NOTE_CONSISTENCY, consistency_of(held.taken.state)),
        ];
        notes.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
    }

    fn disk_notes(&self, held: &HeldContainer) -> BTreeMap<String, String> {
        BTreeMap::from([
            (
                NOTE_FORMAT.to_owned(),
                ContainerConfiguration::of(&held.tree).format.to_string(),
            ),
            (NOTE_PATH.to_owned(), self.request.place.folder.display().to_string()),
            (NOTE_CONTAINER.to_owned(), self.request.place.id.clone()),
            (NOTE_CONTAINER_LAYER.to_owned(), held.taken.id.clone()),
        ])
    }

    /// Deletes the snapshots that no later backup is compared with: the earlier ones, or that of a failed backup.
    pub(super) fn release_layers(
        &self,
        held: HeldContainer,
        read: Result<ContainerReading>,
    ) -> Result<ContainerReading> {
        let HeldContainer { taken, point, .. } = held;
        drop(point);
        let mut reading = read.inspect_err(|_| self.delete_own(&taken))?;
        let own: ImageId = taken.id.parse()?;
        reading.has_remains = !self.delete(self.earlier(&[own]), self.job);
        Ok(reading)
    }
}
