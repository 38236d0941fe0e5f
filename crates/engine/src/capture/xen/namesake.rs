//! Warns about a machine with the same UUID in another pool.

use holdfast_repo::Manifest;

use super::XenCapture;
use crate::notes::{NOTE_POOL, NOTE_XEN_DISK, note};
use crate::repository::name_conflict::MachineIdentity;

impl XenCapture<'_> {
    /// A machine that was moved to another pool keeps its UUID, and so does a copy for disaster recovery. Its disks
    /// have other UUIDs there. If they have the same ones, it is this pool under another address.
    pub(super) fn warn_of_another_pool(&self, newest: &Manifest) {
        if MachineIdentity::of(newest) != MachineIdentity::of_uuid(&self.machine.summary.uuid) {
            return;
        }
        let title = self.request.pool.title();
        let mut known = newest
            .disks
            .iter()
            .filter_map(|record| note(&record.notes, NOTE_XEN_DISK));
        let has_disks = known.any(|uuid| self.taken.iter().any(|taken| taken.live.uuid == *uuid));
        let pool = newest.notes.get(NOTE_POOL);
        if let Some(pool) = pool.filter(|pool| **pool != title && !has_disks) {
            self.job.progress.warning(&format!(
                "the snapshots that are listed as {name} are of {pool} so far, where a machine has the same UUID, and go on with that of {title}: if both are \
                 in use, --machine NAME keeps them apart",
                name = self.request.capture.name
            ));
        }
    }
}
