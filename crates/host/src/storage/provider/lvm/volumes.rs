//! The volumes of a group, and which of them are snapshots.

use super::super::{
    Dataset, DatasetState, HostSnapshot, HostSnapshotName, ProviderError, ProviderKind, ProviderResult,
};
use super::names;
#[cfg(feature = "hostile")]
use super::report::parse;
use super::report::{Volume, VolumeKind};

/// A volume that is a host snapshot.
pub(super) struct Snapshot<'a> {
    pub(super) volume: &'a Volume,
    /// The name of the origin.
    pub(super) of: &'a str,
    pub(super) name: &'a str,
}

impl Snapshot<'_> {
    pub(super) fn is_from_holdfast(&self) -> bool {
        self.volume.tags.snapshot.is_some()
    }
}

/// The volumes of a volume group, or of all groups.
pub(super) struct Volumes(pub(super) Vec<Volume>);

impl Volumes {
    pub(super) fn named(&self, group: &str, name: &str) -> Option<&Volume> {
        self.0.iter().find(|one| one.group == group && one.name == name)
    }

    pub(super) fn pool_of(&self, volume: &Volume) -> Option<&Volume> {
        self.named(&volume.group, &volume.pool)
            .filter(|pool| pool.kind == VolumeKind::Pool)
    }

    /// The volume as a snapshot; none if it is not a snapshot.
    pub(super) fn as_snapshot<'a>(&'a self, volume: &'a Volume) -> Option<Snapshot<'a>> {
        if volume.kind != VolumeKind::Thin {
            return None;
        }
        if let (Some(name), Some((uuid, called))) = (&volume.tags.snapshot, &volume.tags.of) {
            // A writable volume is a clone that a user created from the snapshot.
            let origin = self.0.iter().find(|one| one.group == volume.group && one.uuid == *uuid);
            let of = origin.map_or(called, |origin| &origin.name);
            return volume.is_read_only.then_some(Snapshot { volume, of, name });
        }
        let sleeps = volume.skips_activation && !volume.is_active;
        let is_one = !volume.origin.is_empty() && (volume.is_read_only || sleeps);
        is_one.then_some(Snapshot {
            volume,
            of: &volume.origin,
            name: &volume.name,
        })
    }

    /// The snapshots of an existing or removed volume. Holdfast's own precede those of other programs.
    pub(super) fn snapshots_of<'a>(&'a self, group: &'a str, name: &'a str) -> impl Iterator<Item = Snapshot<'a>> {
        let of_group = self.0.iter().filter(move |one| one.group == group);
        let all = of_group
            .filter_map(|one| self.as_snapshot(one))
            .filter(move |one| one.of == name);
        let (own, others): (Vec<_>, Vec<_>) = all.partition(Snapshot::is_from_holdfast);
        own.into_iter().chain(others)
    }

    pub(super) fn snapshot<'a>(&'a self, wanted: &'a HostSnapshotName) -> ProviderResult<Snapshot<'a>> {
        let (group, name) = names_of(&wanted.dataset.name)?;
        let mut all = self.snapshots_of(group, name);
        all.find(|one| one.name == wanted.name)
            .ok_or_else(|| ProviderError::NotFound {
                what: wanted.to_string(),
            })
    }

    pub(super) fn state(&self, volume: &Volume) -> DatasetState {
        let pool = self.pool_of(volume);
        let free = |pool: &Volume| Some(pool.size_bytes.saturating_sub(pool.data_bytes()?));
        let origin = self.named(&volume.group, &volume.origin);
        let origin = origin.map(|origin| match self.as_snapshot(origin) {
            Some(snapshot) => format!("{}/{}@{}", origin.group, snapshot.of, snapshot.name),
            None => origin.full_name(),
        });
        DatasetState {
            referenced_bytes: volume.data_bytes(),
            available_bytes: pool.and_then(free),
            origin,
            ..unknown(&volume.group, &volume.name)
        }
    }
}

/// The state of a volume that does not exist any more.
pub(super) fn unknown(group: &str, name: &str) -> DatasetState {
    DatasetState {
        dataset: dataset(group, name),
        folder: None,
        is_volume: true,
        used_bytes: None,
        referenced_bytes: None,
        snapshots_bytes: None,
        compression_percent: None,
        available_bytes: None,
        origin: None,
    }
}

pub(super) fn dataset(group: &str, name: &str) -> Dataset {
    Dataset {
        provider: ProviderKind::Lvm,
        name: format!("{group}/{name}"),
    }
}

/// The volume group and the volume of a dataset, for use as arguments.
pub(super) fn names_of(dataset: &str) -> ProviderResult<(&str, &str)> {
    names::parts(dataset).ok_or_else(|| ProviderError::Name {
        name: dataset.to_owned(),
        reason: "the dataset must be GROUP/VOLUME, of letters, digits and + _ . -",
    })
}

pub(super) fn found(snapshot: &Snapshot<'_>, dataset: &Dataset) -> HostSnapshot {
    let volume = snapshot.volume;
    HostSnapshot {
        name: HostSnapshotName {
            dataset: dataset.clone(),
            name: snapshot.name.to_owned(),
        },
        time_s: volume.time_s,
        identity: volume.uuid.clone(),
        used_bytes: None,
        referenced_bytes: volume.data_bytes(),
        hold_count: volume.tags.holds.len() as u64,
        record: volume.tags.record().filter(|_| volume.tags.snapshot.is_some()),
    }
}

/// An answer of LVM.
#[cfg(feature = "hostile")]
pub(crate) const SPECIMEN: &str = include_str!("fixtures/lvs.json");

/// Parses an answer of LVM, and returns the datasets and the snapshots.
#[cfg(feature = "hostile")]
pub(crate) fn parse_volumes(answer: &str) -> ProviderResult<(Vec<String>, Vec<String>)> {
    let volumes = Volumes(parse(answer)?);
    let thin = volumes.0.iter().filter(|one| one.kind == VolumeKind::Thin);
    let (mut datasets, mut snapshots) = (Vec::new(), Vec::new());
    for volume in thin {
        match volumes.as_snapshot(volume) {
            None => {
                volumes.state(volume);
                datasets.push(format!("{} {}", volume.uuid, volume.full_name()));
            }
            Some(snapshot) => {
                found(&snapshot, &dataset(&volume.group, snapshot.of));
                snapshots.push(format!("{} {}", volume.uuid, volume.full_name()));
            }
        }
    }
    Ok((datasets, snapshots))
}
