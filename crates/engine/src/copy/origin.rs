//! Which snapshot of one repository is which of another.
//!
//! A copy notes the snapshot that it is a copy of, and the first repository that it was in; a copy of a copy notes the same. So two
//! snapshots are the same if their origins are, whichever way they came. What somebody removed on one side is not to come back with
//! the next copy: each copy also notes which snapshots of its machine have been copied before, so that what is in this list and not
//! there any more is known to have been removed.

use std::collections::{HashMap, HashSet};

use holdfast_repo::{Manifest, RepositoryId, SnapshotId};

/// Note of a snapshot that is a copy: the repository and the snapshot that it was first, with a `/` in between.
pub const NOTE_ORIGIN: &str = "origin";
/// Note of a snapshot that is a copy: the starts of the ids of those of its machine that had been copied by then.
pub(super) const NOTE_COPIED: &str = "copied";

/// Snapshots that a note lists, the newest: far more than anybody keeps of one machine.
const LISTED_COUNT_MAX: usize = 4096;

/// What a snapshot is a copy of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Origin {
    pub(super) repository: RepositoryId,
    pub(super) snapshot: SnapshotId,
}

/// What a snapshot says that it is a copy of; none where it is none.
pub(super) fn noted_origin(manifest: &Manifest) -> Option<Origin> {
    let (repository, snapshot) = manifest.notes.get(NOTE_ORIGIN)?.split_once('/')?;
    Some(Origin {
        repository: repository.parse().ok()?,
        snapshot: snapshot.parse().ok()?,
    })
}

/// What is the same for a snapshot and all its copies: the id of the first.
pub(super) fn identity(manifest: &Manifest) -> SnapshotId {
    noted_origin(manifest).map_or(manifest.id, |origin| origin.snapshot)
}

/// The start of an id, as a list has it.
fn start_of(id: SnapshotId) -> String {
    let mut text = id.to_string();
    text.truncate(16);
    text
}

/// What a repository has, and had, of what may be copied to it.
pub(super) struct Holdings {
    repository: RepositoryId,
    /// By what they are the same with.
    present: HashMap<SnapshotId, Manifest>,
    /// All that is known, by their own ids.
    known: HashSet<SnapshotId>,
    copied: HashSet<String>,
}

/// Where a snapshot stands in the other repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// It is there, under this id.
    Present(SnapshotId),
    /// It was there, and was removed.
    Removed,
    /// It was never there, as far as is known.
    Missing,
}

impl Holdings {
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

    /// Takes in a snapshot.
    pub(super) fn add(&mut self, manifest: Manifest) {
        if let Some(list) = manifest.notes.get(NOTE_COPIED) {
            self.copied.extend(list.split_whitespace().map(str::to_owned));
        }
        self.known.insert(manifest.id);
        self.present.insert(identity(&manifest), manifest);
    }

    /// The snapshots that are known, by their own ids.
    pub(super) fn known(&self) -> &HashSet<SnapshotId> {
        &self.known
    }

    /// The same as `manifest`, where it is there.
    pub(super) fn counterpart(&self, manifest: &Manifest) -> Option<&Manifest> {
        self.present.get(&identity(manifest))
    }

    /// A counterpart that turned out to be gone.
    pub(super) fn remove(&mut self, manifest: &Manifest) {
        self.present.remove(&identity(manifest));
    }

    pub(super) fn standing(&self, manifest: &Manifest) -> Standing {
        if let Some(there) = self.counterpart(manifest) {
            return Standing::Present(there.id);
        }
        let was_there = self.copied.contains(&start_of(identity(manifest)))
            || noted_origin(manifest).is_some_and(|origin| origin.repository == self.repository);
        if was_there {
            Standing::Removed
        } else {
            Standing::Missing
        }
    }

    /// The notes of a copy of `manifest`, which is in the repository `from` beside `others`, oldest first.
    pub(super) fn notes_of_copy(
        &self,
        manifest: &Manifest,
        from: RepositoryId,
        others: &[Manifest],
    ) -> std::collections::BTreeMap<String, String> {
        let origin = noted_origin(manifest).unwrap_or(Origin {
            repository: from,
            snapshot: manifest.id,
        });
        let of_machine = others.iter().rev().filter(|other| other.machine == manifest.machine);
        let copied = of_machine.filter(|other| other.id != manifest.id && self.standing(other) != Standing::Missing);
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
