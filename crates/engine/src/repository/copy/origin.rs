//! Finds which snapshots of two repositories are the same.
//!
//! A copy notes the original snapshot and its repository; a copy of a copy notes the same original. So two snapshots
//! are the same if their origins are equal, through any chain of copies. A snapshot that was removed on one side must
//! not be copied again: each copy therefore also notes which snapshots of its machine were copied before. A snapshot
//! that is listed there but missing was removed.

use crate::notes::{NOTE_COPIED, NOTE_ORIGIN};
use std::collections::{BTreeMap, HashMap, HashSet};

use holdfast_repo::{Manifest, RepositoryId, SnapshotId};

/// Most snapshots that a note lists, the newest first: far more than are kept of one machine.
const LISTED_COUNT_MAX: usize = 4096;

/// The original of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CopyOrigin {
    pub(super) repository: RepositoryId,
    pub(super) snapshot: SnapshotId,
}

/// The noted origin of a snapshot; none if it is not a copy.
pub(super) fn noted_origin(manifest: &Manifest) -> Option<CopyOrigin> {
    let (repository, snapshot) = manifest.notes.get(NOTE_ORIGIN)?.split_once('/')?;
    Some(CopyOrigin {
        repository: repository.parse().ok()?,
        snapshot: snapshot.parse().ok()?,
    })
}

/// The id of the original: the same for a snapshot and all its copies.
pub(super) fn identity(manifest: &Manifest) -> SnapshotId {
    noted_origin(manifest).map_or(manifest.id, |origin| origin.snapshot)
}

/// The first digits of an id, as used in the note.
fn start_of(id: SnapshotId) -> String {
    let mut text = id.to_string();
    text.truncate(16);
    text
}

/// The snapshots that a repository has or had, among those that may be copied to it.
pub(super) struct TargetHoldings {
    repository: RepositoryId,
    /// By the id of their originals.
    present: HashMap<SnapshotId, Manifest>,
    /// The ids of all known snapshots.
    known: HashSet<SnapshotId>,
    copied: HashSet<String>,
}

/// Whether the target has a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CopyPresence {
    /// The target has it, under this id.
    Present(SnapshotId),
    /// The target had it, and it was removed.
    Removed,
    /// The target never had it, as far as is known.
    Missing,
}

impl TargetHoldings {
    pub(super) fn new(repository: RepositoryId, manifests: Vec<Manifest>) -> Self {
        let mut holdings = Self {
            repository,
            present: HashMap::new(),
            known: HashSet::new(),
            copied: HashSet::new(),
        };
        for manifest in manifests {
            holdings.add(manifest);
        }
        holdings
    }

    /// Adds a snapshot.
    pub(super) fn add(&mut self, manifest: Manifest) {
        if let Some(list) = manifest.notes.get(NOTE_COPIED) {
            self.copied.extend(list.split_whitespace().map(str::to_owned));
        }
        self.known.insert(manifest.id);
        self.present.insert(identity(&manifest), manifest);
    }

    /// The ids of all known snapshots.
    pub(super) fn known(&self) -> &HashSet<SnapshotId> {
        &self.known
    }

    /// The snapshot with the same original as `manifest`, if there is one.
    pub(super) fn counterpart(&self, manifest: &Manifest) -> Option<&Manifest> {
        self.present.get(&identity(manifest))
    }

    /// Removes the counterpart of a snapshot, which turned out to be missing.
    pub(super) fn remove(&mut self, manifest: &Manifest) {
        self.present.remove(&identity(manifest));
    }

    pub(super) fn standing(&self, manifest: &Manifest) -> CopyPresence {
        if let Some(there) = self.counterpart(manifest) {
            return CopyPresence::Present(there.id);
        }
        let was_there = self.copied.contains(&start_of(identity(manifest)))
            || noted_origin(manifest).is_some_and(|origin| origin.repository == self.repository);
        if was_there {
            CopyPresence::Removed
        } else {
            CopyPresence::Missing
        }
    }

    /// The notes for a copy of `manifest` from the repository `from`; `others` are its other snapshots, oldest first.
    pub(super) fn notes_of_copy(
        &self,
        manifest: &Manifest,
        from: RepositoryId,
        others: &[Manifest],
    ) -> BTreeMap<String, String> {
        let origin = noted_origin(manifest).unwrap_or(CopyOrigin {
            repository: from,
            snapshot: manifest.id,
        });
        let of_machine = others.iter().rev().filter(|other| other.machine == manifest.machine);
        let copied =
            of_machine.filter(|other| other.id != manifest.id && self.standing(other) != CopyPresence::Missing);
        let ids = std::iter::once(origin.snapshot).chain(copied.map(identity));
        let list: Vec<String> = ids.take(LISTED_COUNT_MAX).map(start_of).collect();
        let mut notes = manifest.notes.clone();
        notes.insert(
            NOTE_ORIGIN.to_owned(),
            format!("{}/{}", origin.repository, origin.snapshot),
        );
        notes.insert(NOTE_COPIED.to_owned(), list.join(" "));
        notes
    }
}

#[cfg(test)]
mod tests {
    use crate::notes::{NOTE_COPIED, NOTE_ORIGIN};
    use holdfast_repo::{Manifest, RepositoryId, SnapshotId};

    use super::{CopyPresence, LISTED_COUNT_MAX, TargetHoldings, identity, noted_origin};

    const HERE: RepositoryId = RepositoryId::from_bytes([1; 16]);
    const THERE: RepositoryId = RepositoryId::from_bytes([2; 16]);

    fn id(number: u16) -> SnapshotId {
        let [high, low] = number.to_be_bytes();
        let mut bytes = [7; 16];
        (bytes[0], bytes[1]) = (high, low);
        SnapshotId::from_bytes(bytes)
    }

    fn snapshot(number: u16, machine: &str, notes: &[(&str, &str)]) -> Manifest {
        let id = id(number).to_string();
        let notes: serde_json::Map<String, serde_json::Value> = notes
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).into()))
            .collect();
        let value = serde_json::json!({ "format": 1, "id": id, "machine": machine, "time_ms": number, "disks": [],
                                        "copy": id, "notes": notes });
        serde_json::from_value(value).unwrap()
    }

    /// The copy of a snapshot, under a new id.
    fn arrived(number: u16, original: &Manifest, notes: std::collections::BTreeMap<String, String>) -> Manifest {
        let mut manifest = snapshot(number, &original.machine, &[]);
        manifest.notes = notes;
        manifest
    }

    #[test]
    fn a_copy_is_the_same_as_its_original_however_often_it_is_copied() {
        let original = snapshot(1, "m", &[("method", "filter")]);
        let there = TargetHoldings::new(THERE, Vec::new());
        let copy = arrived(2, &original, there.notes_of_copy(&original, HERE, &[]));
        assert_eq!(copy.notes["method"], "filter");
        let again = arrived(3, &copy, there.notes_of_copy(&copy, THERE, &[]));
        for copy in [&copy, &again] {
            assert_eq!(identity(copy), original.id);
            assert_eq!(noted_origin(copy).unwrap().repository, HERE);
            let holdings = TargetHoldings::new(THERE, vec![copy.clone()]);
            assert_eq!(holdings.standing(&original), CopyPresence::Present(copy.id));
            // In its original repository the snapshot is present, or was removed.
            assert_eq!(
                TargetHoldings::new(HERE, vec![original.clone()]).standing(copy),
                CopyPresence::Present(original.id)
            );
            assert_eq!(
                TargetHoldings::new(HERE, Vec::new()).standing(copy),
                CopyPresence::Removed
            );
        }
    }

    #[test]
    fn what_was_copied_and_is_not_there_was_removed_and_what_was_not_is_missing() {
        let all: Vec<Manifest> = (1..5).map(|number| snapshot(number, "m", &[])).collect();
        let mut there = TargetHoldings::new(THERE, Vec::new());
        let mut copies = Vec::new();
        // The second snapshot cannot be read, and is not copied.
        for number in [0, 2, 3] {
            let copy = arrived(10 + number, &all[usize::from(number)], {
                there.notes_of_copy(&all[usize::from(number)], HERE, &all)
            });
            there.add(copy.clone());
            copies.push(copy);
        }
        let newest = TargetHoldings::new(THERE, vec![copies.pop().unwrap()]);
        let standings: Vec<CopyPresence> = all.iter().map(|manifest| newest.standing(manifest)).collect();
        let newest_copy = CopyPresence::Present(id(13));
        assert_eq!(
            standings,
            [
                CopyPresence::Removed,
                CopyPresence::Missing,
                CopyPresence::Removed,
                newest_copy
            ]
        );
        // When the last copy is removed, the list of copied snapshots is lost with it.
        assert_eq!(
            TargetHoldings::new(THERE, Vec::new()).standing(&all[0]),
            CopyPresence::Missing
        );
    }

    #[test]
    fn notes_that_make_no_sense_are_none_and_lists_are_bounded() {
        for text in ["", "/", "x/y", "01/02"] {
            let manifest = snapshot(1, "m", &[(NOTE_ORIGIN, text)]);
            assert_eq!((noted_origin(&manifest), identity(&manifest)), (None, id(1)), "{text}");
        }
        let many: Vec<Manifest> = (0..5000).map(|number| snapshot(number, "m", &[])).collect();
        let there = TargetHoldings::new(THERE, many.clone());
        let notes = there.notes_of_copy(&many[4999], HERE, &many);
        assert_eq!(notes[NOTE_COPIED].split(' ').count(), LISTED_COUNT_MAX);
    }
}
