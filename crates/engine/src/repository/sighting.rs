//! Records what this host has seen of a repository, to detect its replacement or an older state of it.
//!
//! An attacker with write access to the storage can put an old copy of a repository there, or another one that the same
//! password opens, or one without a password, to which the next backup would write everything in plain text. The
//! repository itself cannot show this. So the identity of the repository at each location, whether it has a password,
//! and the ids of its snapshots are kept in the state folder of the user:
//!
//! ```text
//! holdfast-sighting 1
//! <identity> encrypted | open
//! <id of a snapshot>, one a line
//! ```
//!
//! Each repository seen at a location has its own file: disks that are mounted there in turn are accepted once each.
//!
//! This is an aid, not a part of the repository: if it cannot be read or written, nothing is detected and nothing fails.

use std::collections::{BTreeSet, HashSet};
use std::fs::{DirBuilder, File};
use std::io::Read as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use holdfast_repo::{LostSearch, Repository, SnapshotId};

use crate::files::state_file::write_note;
use crate::job::error::Exchanged;
use crate::job::{Progress, Result};
use crate::{Location, Protection};

const FIRST_LINE: &str = "holdfast-sighting 1";
/// Most snapshots recorded.
const SNAPSHOT_COUNT_MAX: usize = 1 << 16;
const NOTE_BYTES_MAX: u64 = (SNAPSHOT_COUNT_MAX as u64 + 2) * 80;

/// What was recorded of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Sighting {
    identity: String,
    protection: Protection,
    snapshots: BTreeSet<SnapshotId>,
}

impl Sighting {
    fn read(path: &Path) -> Option<Self> {
        let mut text = String::new();
        let file = File::open(path).ok()?;
        file.take(NOTE_BYTES_MAX).read_to_string(&mut text).ok()?;
        let mut lines = text.lines();
        if lines.next()? != FIRST_LINE {
            return None;
        }
        let (identity, protection) = lines.next()?.split_once(' ')?;
        Some(Self {
            identity: identity.to_owned(),
            protection: match protection {
                "encrypted" => Protection::Encrypted,
                "open" => Protection::Open,
                _ => return None,
            },
            snapshots: lines.filter_map(|line| line.parse().ok()).collect(),
        })
    }

    fn text(&self) -> String {
        let protection = match self.protection {
            Protection::Encrypted => "encrypted",
            Protection::Open => "open",
        };
        let snapshots = self.snapshots.iter().take(SNAPSHOT_COUNT_MAX);
        let lines: Vec<String> = snapshots.map(ToString::to_string).collect();
        format!("{FIRST_LINE}\n{} {protection}\n{}\n", self.identity, lines.join("\n"))
    }

    fn write(&self, path: &Path) {
        let folder = path.parent().unwrap_or(path);
        let half = path.with_extension(format!("partial-{}", std::process::id()));
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)
            .and_then(|()| write_note(path, &half, self.text().as_bytes()))
            .ok();
    }

    fn described(&self) -> String {
        match self.protection {
            Protection::Encrypted => self.identity.clone(),
            Protection::Open => format!("{} without a password", self.identity),
        }
    }
}

/// Compares an opened repository with what was recorded for its location, and records its present state.
///
/// Warns about snapshots that are missing without a removal, each time until `accepted` is the identity of the
/// repository. Missing snapshots are not checked if new snapshots exist: another host may have removed some, and gc the
/// records of their removal.
///
/// # Errors
/// It is another repository, and `accepted` is not its identity.
pub fn check_sighting(
    location: &Location,
    repository: &Repository,
    protection: Protection,
    accepted: Option<&str>,
    progress: &dyn Progress,
) -> Result<()> {
    let Some(path) = location.sighting_path() else {
        return Ok(());
    };
    let mut now = Sighting {
        identity: repository.config().id.to_string(),
        protection,
        snapshots: BTreeSet::new(),
    };
    let before = Sighting::read(&file_of(&path, &now.identity));
    let known = before.as_ref().filter(|_| accepted != Some(&now.identity));
    let other = || other_sighting(&path).filter(|_| accepted != Some(&now.identity));
    if let Some(known) = before.clone().filter(|_| known.is_some()).or_else(other) {
        let is_opened = known.protection == Protection::Encrypted && protection == Protection::Open;
        if known.identity != now.identity || is_opened {
            return Err(Exchanged {
                store: repository.describe(),
                found: now.described(),
                known: known.described(),
            }
            .into());
        }
    }
    // The error is reported by the job that uses the repository.
    let Ok((there, removed)) = repository.snapshot_ids() else {
        return Ok(());
    };
    let seen = known.map(|known| known.snapshots.clone()).unwrap_or_default();
    let known_ids: HashSet<SnapshotId> = seen.iter().copied().collect();
    let Ok((fresh, _)) = repository.snapshots_except(&known_ids) else {
        return Ok(());
    };
    let gone: Vec<SnapshotId> = seen
        .iter()
        .filter(|id| !there.contains(id) && !removed.contains(id))
        .copied()
        .collect();
    let gone = without_lost(repository, gone);
    now.snapshots = seen.into_iter().filter(|id| there.contains(id)).collect();
    now.snapshots.extend(fresh.iter().map(|manifest| manifest.id));
    if let (Some(first), true) = (gone.first(), fresh.is_empty()) {
        progress.warning(&format!(
            "{}: {} of the snapshots that this host saw are gone and were not removed, such as {}: an older state of the repository was put \
             in its place, or they are lost; HOLDFAST_ACCEPT_REPOSITORY={} accepts what is there",
            repository.describe(),
            gone.len(),
            first.short(),
            now.identity
        ));
        now.snapshots.extend(gone);
    }
    if before.as_ref() != Some(&now) {
        now.write(&file_of(&path, &now.identity));
    }
    Ok(())
}

/// Path of the record for a repository at a location.
fn file_of(place: &Path, identity: &str) -> PathBuf {
    place.with_extension(identity)
}

/// The record of any repository at a location.
fn other_sighting(place: &Path) -> Option<Sighting> {
    let entries = std::fs::read_dir(place.parent()?).ok()?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.file_stem() == place.file_name());
    paths.sort();
    paths.iter().find_map(|path| Sighting::read(path))
}

/// The snapshots of `gone` without any trace in the repository. Those with a trace are known to be lost, and every verb
/// that looks for losses reports them.
fn without_lost(repository: &Repository, mut gone: Vec<SnapshotId>) -> Vec<SnapshotId> {
    if gone.is_empty() {
        return gone;
    }
    let lost = repository
        .snapshots()
        .and_then(|(manifests, _)| repository.lost_snapshots(&manifests, LostSearch::Thorough));
    let lost: HashSet<SnapshotId> = lost.into_iter().flatten().map(|lost| lost.id).collect();
    gone.retain(|id| !lost.contains(id));
    gone
}

/// Records a repository that was just created.
pub(crate) fn note_new(location: &Location, repository: &Repository, protection: Protection) {
    if let Some(path) = location.sighting_path() {
        let new = Sighting {
            identity: repository.config().id.to_string(),
            protection,
            snapshots: BTreeSet::new(),
        };
        new.write(&file_of(&path, &new.identity));
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::{File, Protection, Sighting};

    #[test]
    fn a_sighting_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/note");
        assert_eq!(Sighting::read(&path), None);
        let mut sighting = Sighting {
            identity: "ab".repeat(16),
            protection: Protection::Encrypted,
            snapshots: ["01".repeat(16), "02".repeat(16)]
                .iter()
                .map(|id| id.parse().unwrap())
                .collect(),
        };
        sighting.write(&path);
        assert_eq!(Sighting::read(&path), Some(sighting.clone()));
        sighting.protection = Protection::Open;
        sighting.snapshots.clear();
        sighting.write(&path);
        assert_eq!(Sighting::read(&path), Some(sighting));
        File::create(&path).unwrap().write_all(b"something else\n").unwrap();
        assert_eq!(Sighting::read(&path), None);
    }
}
