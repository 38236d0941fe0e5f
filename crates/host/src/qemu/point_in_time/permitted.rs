//! The last check whether the request would trigger a defect of this QEMU.

use super::{DiskRequest, QemuDisk, SnapshotBuilder};
use crate::qemu::no_filter;
use crate::qemu::qmp::{MonitorError, Result};
use crate::qemu::serving::refuse_unserved;

impl SnapshotBuilder<'_> {
    /// The caller must choose which disks are not exported. This check refuses a wrong choice before QEMU is changed.
    pub(super) fn check_exported(&self, disks: &[DiskRequest]) -> Result<()> {
        let all: Vec<&QemuDisk> = disks.iter().map(|disk| &disk.disk).collect();
        if let (Some(first), Some(why)) = (all.first(), no_filter(self.monitor, &all)?) {
            return Err(MonitorError::Dangerous {
                device: first.device.clone(),
                why,
            });
        }
        let served = disks.iter().filter(|disk| disk.spool.is_none());
        let served: Vec<&QemuDisk> = served.map(|disk| &disk.disk).collect();
        refuse_unserved(self.monitor, &served)
    }
}
