//! Clusters past the virtual size: a program shrank the disk and left them, or the size is damaged.

use super::super::entry::DataLocation;
use super::{Checker, L2Use};
use crate::Result;

impl Checker<'_> {
    /// Counts what is stored of the disk at `disk_offset`, which is none in a snapshot, by an entry that leads to `host`. False where that is
    /// not on the disk.
    ///
    /// Behind its end QEMU keeps the state of a machine for a snapshot, and leaves it in the active state when it goes back to that. Then it is the
    /// snapshot's, and takes no room for nothing.
    pub(super) fn count_shown(&mut self, disk_offset: Option<u64>, used: L2Use, host: u64) -> Result<bool> {
        let Some(disk_offset) = disk_offset else {
            return Ok(false);
        };
        if disk_offset < self.header.size_bytes {
            self.report.allocated_count += 1;
            return Ok(true);
        }
        let may_be_shared = self.place() == DataLocation::Inside && self.header.snapshot_count > 0;
        let is_alone = !may_be_shared || (used.count == 1 && self.stored.of(self.geometry.cluster_of(host))? == 1);
        self.behind_count += u64::from(is_alone);
        Ok(false)
    }
}
