//! Changes the identities of a disk, as a copy in the same folder needs.

use std::collections::BTreeMap;

use super::{DiskDescriptor, FILE_NAME};
use crate::{Error, ImageId, Result};

impl DiskDescriptor {
    /// Replaces all identities by new ones from `new_id`: that of the disk, and the GUIDs of all deltas.
    ///
    /// Reserved ones stay: [`TOP`](Self::TOP), [`BACKUP`](Self::BACKUP), and the nil GUID of a missing parent. Files
    /// keep their names, even if these contain a GUID. `Snapshots.xml`, in which Parallels describes snapshots, is
    /// another file and does not change.
    pub fn renewed(&self, mut new_id: impl FnMut() -> Result<ImageId>) -> Result<Self> {
        let mut new = BTreeMap::new();
        for (id, _) in &self.ids {
            if !has_meaning(*id) && !new.contains_key(id) {
                new.insert(*id, new_id()?);
            }
        }
        self.with_ids(&new)
    }

    /// Replaces identities by those that `new` maps them to; others stay.
    ///
    /// # Errors
    /// One of them is reserved ([`TOP`](Self::TOP), [`BACKUP`](Self::BACKUP)), or belongs to another delta.
    pub fn with_ids(&self, new: &BTreeMap<ImageId, ImageId>) -> Result<Self> {
        if let Some(id) = new
            .iter()
            .flat_map(|(old, new)| [old, new])
            .find(|id| has_meaning(**id))
        {
            return Err(Error::InvalidOption {
                option: "uuid",
                detail: format!("{id} is reserved in {FILE_NAME}; choose another identity"),
            });
        }
        let mut edits = Vec::new();
        for (id, place) in &self.ids {
            let Some(new) = new.get(id) else { continue };
            edits.push((place.clone(), self.spelled(place, *new)));
        }
        self.edited(edits)
    }
}

fn has_meaning(id: ImageId) -> bool {
    id.is_nil() || id == DiskDescriptor::TOP || id == DiskDescriptor::BACKUP
}
