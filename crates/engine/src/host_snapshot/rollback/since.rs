//! How a machine's disks on ZFS changed since the point in time of a rollback.
//!
//! `zfs send -i` shows the changes between that point and the safety snapshot. After the safety snapshot nothing may have been
//! written: files must have the same inode, size and times as in it, and a volume must be unchanged. If anything
//! differs, the whole disk is compared.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use holdfast_block::{BlockDevice, DirtyBitmap};
use holdfast_host::provider::Provider as _;
use holdfast_repo::DiskRecord;

use super::contents::{EarlierState, HostDisk};
use crate::host_snapshot::compare_images::{Answered, TwoStates, ZfsDifference, below};
use crate::job::{Job, Result};
use crate::restore::source::StoredContents;
use crate::restore::target::{DiskTarget, RestoredDisk};

impl EarlierState<'_> {
    /// Ranges in which a present image, in the folder `present` or a volume with that device, may differ from a disk of the point.
    pub(super) fn places(&self, disk: &HostDisk, target: &DiskTarget<'_>, present: &Path) -> Answered<DirtyBitmap> {
        let dataset = &disk.kept.place.dataset;
        let newer = self.safety.iter().find(|snapshot| snapshot.dataset == *dataset);
        let newer = newer.ok_or("without a safety snapshot ZFS does not tell what has changed")?;
        let zfs = self.providers.zfs();
        let sent = ZfsDifference {
            zfs,
            older: &disk.snapshot,
            newer,
        };
        sent.is_worth_it(&disk.source)?;
        let compare = |ask: &dyn Fn(&Path, &Path) -> _| {
            // The same image as the target's, by its path below the folder.
            let now = below(present, &disk.kept.place.path);
            let states = TwoStates {
                format: disk.kept.format.as_deref(),
                images: (&disk.path, &now),
                roots: (&disk.root, present),
                today: disk.present_root.as_deref(),
                size_bytes: disk.source.device.size_bytes(),
            };
            states.changed_by(ask)
        };
        if disk.present_root.is_none() {
            let synced = target.device.flush();
            synced.map_err(|error| error.to_string())?;
            let is_unchanged = zfs.is_volume_unchanged(newer).map_err(|error| error.to_string())?;
            if !is_unchanged {
                return Err("it was written to after the safety snapshot".to_owned());
            }
            return compare(&|old, new| sent.ranges(old, new));
        }
        let label = format!("{:08x}-since-{}", self.run, disk.kept.target);
        let view = zfs.view(newer, &label).map_err(|error| error.to_string())?;
        compare(&|old, new| {
            let inside = new.strip_prefix(present).map_err(|error| error.to_string())?;
            is_as_in(&below(view.path(), inside), new)?;
            sent.ranges(old, new)
        })
    }
}

/// Checks that a file is unchanged since a host snapshot, in which its path is `then`.
fn is_as_in(then: &Path, now: &Path) -> Answered<()> {
    let state = |path: &Path| {
        let found = path.metadata().map_err(|error| error.to_string())?;
        let times = (found.mtime(), found.mtime_nsec(), found.ctime(), found.ctime_nsec());
        Ok::<_, String>((found.ino(), found.len(), times))
    };
    if state(then)? == state(now)? {
        Ok(())
    } else {
        Err(format!("{} was written to after the safety snapshot", now.display()))
    }
}

impl StoredContents for EarlierState<'_> {
    fn device(&self, record: &DiskRecord) -> Result<Box<dyn BlockDevice + '_>> {
        self.point.device(record)
    }

    fn write(&self, record: &DiskRecord, target: &DiskTarget<'_>, job: Job<'_>) -> Result<RestoredDisk> {
        self.point.write_since(record, target, Some(self), job)
    }
}
