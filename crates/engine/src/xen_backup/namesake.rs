//! Two machines of one name are not stored as one.

use holdfast_host::xapi::XapiError;
use holdfast_repo::Manifest;

use super::{NOTE_DISK, XenBackup, XenBackupError};
use crate::error::Result;
use crate::namesake::Predecessor;

impl XenBackup<'_> {
    /// Refuses to store under a name that snapshots of another machine have, which is there still, or is of another pool or of no pool. Who says the
    /// name himself means it.
    pub(super) fn refuse_namesake(&self, manifests: &[Manifest]) -> Result<()> {
        if self.request.is_name_chosen {
            return Ok(());
        }
        let Some(other) = Predecessor::of(manifests, self.name.as_str()) else {
            return Ok(());
        };
        if other.is(&self.machine.summary.uuid) {
            self.tell_of_another_pool(&other);
            return Ok(());
        }
        let is_elsewhere = other.pool != Some(&self.request.pool.title());
        let is_there = || match self.request.pool.machine(other.uuid) {
            Ok(_) => Ok(true),
            Err(XapiError::NoMachine { .. }) => Ok(false),
            Err(error) => Err(error),
        };
        // One that was brought back as another machine goes on where the one ended that is gone.
        if !is_elsewhere && !is_there()? {
            return Ok(());
        }
        Err(XenBackupError::Namesake {
            name: self.name.to_string(),
            uuid: other.uuid.to_owned(),
            place: other.place().to_owned(),
        }
        .into())
    }

    /// A machine that has moved to another pool keeps its UUID, and so does a copy of it that is kept there for disasters. Its disks are others there: the
    /// same ones are those of this pool, by another of its addresses.
    fn tell_of_another_pool(&self, other: &Predecessor<'_>) {
        let title = self.request.pool.title();
        let mut known = other
            .snapshot
            .disks
            .iter()
            .filter_map(|record| record.notes.get(NOTE_DISK));
        let has_disks = known.any(|uuid| self.taken.iter().any(|taken| taken.live.uuid == *uuid));
        if let Some(pool) = other.pool.filter(|pool| **pool != title && !has_disks) {
            self.job.progress.warning(&format!(
                "the snapshots that are listed as {name} are of {pool} so far, where a machine has the same UUID, and go on with that of {title}: if both are \
                 in use, --machine NAME keeps them apart",
                name = self.name
            ));
        }
    }
}
