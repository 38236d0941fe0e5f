//! The disks of a machine in host snapshots.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use holdfast_block::{BlockDevice, DirtyBitmap, to_usize};
use holdfast_host::provider::{HostSnapshotName, ProviderKind, can_clone_to, clone_file, volume_device};
use holdfast_image::Format;
use holdfast_repo::{DiskRecord, TargetState};

use super::PlannedClone;
use crate::host_snapshot::Providers;
use crate::host_snapshot::compare_images::{Answered, TwoStates, below};
use crate::host_snapshot::states::KeptDisk;
use crate::image::apply_differences::Differences;
use crate::image::source::OpenSource;
use crate::job::{Error, Job, Result};
use crate::restore::machine::is_same;
use crate::restore::source::StoredContents;
use crate::restore::target::{DiskTarget, RestoredDisk};

/// A point in time, and the host snapshots of the state before the rollback.
pub(super) struct EarlierState<'a> {
    pub(super) point: &'a HostContents,
    pub(super) providers: &'a Providers,
    pub(super) safety: &'a [HostSnapshotName],
    /// Names the temporary views of the snapshots.
    pub(super) run: u32,
}

/// Number of samples that are compared in ranges reported as equal.
const SPOT_COUNT: u64 = 64;
const SPOT_BYTES: u64 = 64 << 10;

/// An open disk in a host snapshot.
pub(super) struct HostDisk {
    pub(super) kept: KeptDisk,
    /// The snapshot.
    pub(super) snapshot: HostSnapshotName,
    pub(super) source: OpenSource,
    /// The image in the view of the snapshot, and the folder of the view.
    pub(super) path: PathBuf,
    pub(super) root: PathBuf,
    /// The present folder of the dataset; none for a volume.
    pub(super) present_root: Option<PathBuf>,
    /// Whether the image is based on another one.
    pub(super) is_based: bool,
    /// Its path in a clone of its dataset.
    pub(super) cloned: Option<PathBuf>,
}

/// All disks of a point in time, by their names in the machine.
#[derive(Default)]
pub(crate) struct HostContents {
    pub(super) disks: BTreeMap<String, HostDisk>,
}

impl HostContents {
    fn disk(&self, record: &DiskRecord) -> Result<&HostDisk> {
        let found = self.disks.get(&record.name);
        found.ok_or_else(|| Error::Unreachable {
            disk: record.name.clone(),
            place: "nowhere".to_owned(),
        })
    }

    /// Writes a disk to a target, using what is known of the changes since.
    pub(super) fn write_since(
        &self,
        record: &DiskRecord,
        target: &DiskTarget<'_>,
        since: Option<&EarlierState<'_>>,
        job: Job<'_>,
    ) -> Result<RestoredDisk> {
        let disk = self.disk(record)?;
        let places = disk.places(target, since);
        if let (Err(why), TargetState::Similar) = (&places, target.state) {
            let name = &record.name;
            job.progress.note(&format!("disk {name}: all of it is compared: {why}"));
        }
        target.check_size(record)?;
        let differences = Differences {
            from: &*disk.source.device,
            onto: target.device,
            state: target.state,
            places: places.as_ref().ok(),
        };
        let written = differences.write(job).inspect_err(|_| target.warn_of_mixture(job))?;
        target.warn_of_spare(record, job);
        Ok(RestoredDisk {
            name: record.name.clone(),
            target: Some(target.path.to_owned()),
            size_bytes: record.size_bytes,
            written_bytes: written.written_bytes,
            equal_bytes: record.size_bytes.saturating_sub(written.written_bytes),
            zero_bytes: written.zero_bytes,
        })
    }

    /// Sets the paths of the disks that will be in clones of these datasets.
    pub(super) fn clone_datasets(&mut self, clones: &[PlannedClone]) {
        for disk in self.disks.values_mut() {
            let clone = clones.iter().find(|clone| clone.snapshot == disk.snapshot);
            disk.cloned = clone.map(|clone| below(&clone.folder, &disk.kept.place.path));
        }
    }
}

impl HostDisk {
    fn format(&self) -> Option<Format> {
        // libvirt treats a disk without a format as raw.
        Format::from_name(self.kept.format.as_deref().unwrap_or("raw"))
    }

    /// Ranges in which the present image may differ from the one in the snapshot, as far as the file system can tell.
    fn places(&self, target: &DiskTarget<'_>, since: Option<&EarlierState<'_>>) -> Answered<DirtyBitmap> {
        if target.state != TargetState::Similar {
            return Err("the target is another image".to_owned());
        }
        if target.format != self.format() {
            return Err("its image has another format now".to_owned());
        }
        if self.kept.place.dataset.provider == ProviderKind::Lvm {
            return Err("LVM does not tell what has changed in a volume since".to_owned());
        }
        let present = match &self.present_root {
            Some(root) => root.clone(),
            None => volume_device(&self.kept.place.dataset.name),
        };
        if !is_same(target.path, &below(&present, &self.kept.place.path)) {
            return Err("its image is elsewhere now".to_owned());
        }
        let places = if self.kept.place.dataset.provider == ProviderKind::Zfs {
            let since = since.ok_or("it is not known what has changed since")?;
            since.places(self, target, &present)?
        } else {
            let now = below(&present, &self.kept.place.path);
            let states = TwoStates {
                format: self.kept.format.as_deref(),
                images: (&self.path, &now),
                roots: (&self.root, &present),
                today: self.present_root.as_deref(),
                size_bytes: self.source.device.size_bytes(),
            };
            states.changed()?
        };
        match self.spot_that_differs(target, &places) {
            None => Ok(places),
            Some(offset) => Err(format!("offset {offset} is said to be equal, and is not")),
        }
    }

    /// Compares samples of the ranges that are reported as equal; returns the offset of a difference.
    fn spot_that_differs(&self, target: &DiskTarget<'_>, places: &DirtyBitmap) -> Option<u64> {
        let (size_bytes, length) = (self.source.device.size_bytes(), to_usize(SPOT_BYTES));
        let (mut then, mut now) = (vec![0; length], vec![0; length]);
        let spots = (0..SPOT_COUNT).map(|number| size_bytes / SPOT_COUNT * number / SPOT_BYTES * SPOT_BYTES);
        let spots = spots.filter(|at| at + SPOT_BYTES <= size_bytes && !places.is_dirty(*at..at + SPOT_BYTES));
        spots.into_iter().find(|at| {
            let then_read = self.source.device.read_at(&mut then, *at);
            let now_read = target.device.read_at(&mut now, *at);
            then_read.is_err() || now_read.is_err() || then != now
        })
    }
}

impl StoredContents for HostContents {
    fn device(&self, record: &DiskRecord) -> Result<Box<dyn BlockDevice + '_>> {
        Ok(Box::new(&*self.disk(record)?.source.device))
    }

    fn write(&self, record: &DiskRecord, target: &DiskTarget<'_>, job: Job<'_>) -> Result<RestoredDisk> {
        self.write_since(record, target, None, job)
    }

    fn cloned(&self, record: &DiskRecord) -> Option<&Path> {
        self.disks.get(&record.name)?.cloned.as_deref()
    }

    /// Whether blocks can be shared with the folder. Only a trial shows whether a file system can clone to another place.
    fn can_share(&self, record: &DiskRecord, folder: &Path) -> bool {
        let Ok(disk) = self.disk(record) else { return false };
        if disk.is_based || !disk.path.is_file() {
            return false;
        }
        can_clone_to(&disk.path, folder, &std::process::id().to_string())
    }

    fn share(&self, record: &DiskRecord, path: &Path) -> Result<()> {
        let failed = |source| Error::File {
            action: "clone",
            path: path.to_owned(),
            source,
        };
        clone_file(&self.disk(record)?.path, path).map_err(failed)?;
        std::fs::File::open(path)
            .and_then(|file| file.sync_all())
            .map_err(failed)
    }
}
