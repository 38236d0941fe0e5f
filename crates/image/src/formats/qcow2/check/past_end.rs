//! Clusters past the virtual size: a program shrank the disk and left them, or the size is damaged.

use super::super::entry::DataLocation;
use super::{Checker, L2Use};
use crate::Result;

impl Checker<'_> {
    /// Counts stored clusters of the disk at `disk_offset`, which is none in a snapshot, by an entry that refers to
    /// `host`. False if the offset is past the end of the disk.
    ///
    /// QEMU stores the machine state of a snapshot past the end of the disk, and leaves it in the active state after
    /// reverting to the snapshot. Then it belongs to the snapshot, and is not wasted.
    pub(super) fn count_inside_disk(&mut self, disk_offset: Option<u64>, used: L2Use, host: u64) -> Result<bool> {
        let Some(disk_offset) = disk_offset else {
            return Ok(false);
        };
        if disk_offset < self.header.size_bytes {
            self.report.allocated_count += 1;
            return Ok(true);
        }
        let may_be_shared = self.place() == DataLocation::Inside && self.header.snapshot_count > 0;
        let is_alone = !may_be_shared || (used.count == 1 && self.stored.of(self.geometry.cluster_of(host))? == 1);
        self.past_end_count += u64::from(is_alone);
        Ok(false)
    }
}
