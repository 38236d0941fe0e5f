//! Another identity for a disk: what a copy needs that is to be beside its origin.

use std::collections::BTreeMap;

use super::{DiskDescriptor, FILE_NAME};
use crate::{Error, ImageId, Result};

impl DiskDescriptor {
    /// The same disk with new identities from `new_id`: its own, and the GUIDs of all deltas, wherever they stand.
    ///
    /// Those that have a meaning stay what they are: [`TOP`](Self::TOP), [`BACKUP`](Self::BACKUP), and that of no
    /// parent. Files keep their names, also where these contain a GUID; the description of snapshots that Parallels
    /// keeps beside the descriptor (`Snapshots.xml`) is another file, and as it was.
    pub fn renewed(&self, mut new_id: impl FnMut() -> Result<ImageId>) -> Result<Self> {
        let mut new = BTreeMap::new();
        for (id, _) in &self.ids {
            if !has_meaning(*id) && !new.contains_key(id) {
                new.insert(*id, new_id()?);
            }
        }
        self.with_ids(&new)
    }

    /// The same disk with these identities in the place of others, wherever they stand. What is not named stays.
    ///
    /// # Errors
    /// One of them has a meaning ([`TOP`](Self::TOP), [`BACKUP`](Self::BACKUP)), or is that of another delta already.
    pub fn with_ids(&self, new: &BTreeMap<ImageId, ImageId>) -> Result<Self> {
        if let Some(id) = new
            .iter()
            .flat_map(|(old, new)| [old, new])
            .find(|id| has_meaning(**id))
        {
            return Err(Error::InvalidOption {
                option: "uuid",
                detail: format!("{id} has a meaning in {FILE_NAME}, and is no identity"),
            });
        }
        let mut edits = Vec::new();
        for (id, place) in &self.ids {
            let Some(new) = new.get(id) else { continue };
            let is_in_braces = self.text.get(place.clone()).is_some_and(|text| text.starts_with('{'));
            let new = if is_in_braces {
                format!("{{{new}}}")
            } else {
                new.to_string()
            };
            edits.push((place.clone(), new));
        }
        self.edited(edits)
    }
}

fn has_meaning(id: ImageId) -> bool {
    id.is_nil() || id == DiskDescriptor::TOP || id == DiskDescriptor::BACKUP
}
