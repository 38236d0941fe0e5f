//! Checks entries that refer to an external data file.

use super::Checker;
use crate::ProblemKind;

impl Checker<'_> {
    /// Checks an entry that refers to `host` of the data file; `disk_offset` is none in a snapshot.
    pub(super) fn check_in_data_file(&mut self, host: u64, disk_offset: Option<u64>) {
        let Some(disk_offset) = disk_offset else { return };
        if disk_offset != host {
            let detail = format!("it refers to {host} of the data file, which belongs to another cluster");
            self.corruption(ProblemKind::Entry { disk_offset, detail });
            return;
        }
        // Clusters past the end of the disk need not exist.
        let of_disk = self.header.size_bytes.saturating_sub(disk_offset);
        let end = host + self.geometry.cluster_bytes().min(of_disk);
        if let Some(bytes) = self.data_bytes.filter(|bytes| end > *bytes) {
            let detail = format!("it refers to {host} of the data file, which ends at {bytes}");
            self.corruption(ProblemKind::Entry { disk_offset, detail });
        }
    }
}
