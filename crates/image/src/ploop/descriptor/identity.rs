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
        let mut places: Vec<_> = self
            .ids
            .iter()
            .filter_map(|(id, at)| Some((at, new.get(id)?)))
            .collect();
        places.sort_by_key(|(at, _)| at.start);
        let (mut text, mut done) = (String::with_capacity(self.text.len()), 0);
        for (at, id) in places {
            text.push_str(&self.text[done..at.start]);
            let is_in_braces = self.text[at.clone()].starts_with('{');
            let (open, close) = if is_in_braces { ("{", "}") } else { ("", "") };
            text.extend([open, &id.to_string(), close]);
            done = at.end;
        }
        text.push_str(&self.text[done..]);
        Self::parse(text.as_bytes(), FILE_NAME)
    }
}

fn has_meaning(id: ImageId) -> bool {
    id.is_nil() || id == DiskDescriptor::TOP || id == DiskDescriptor::BACKUP
}
