//! Snapshots that are missing without a record of their removal.
//!
//! The last map pack of every snapshot carries a copy of the manifest. If its snapshot neither exists nor is recorded
//! as removed, and its writer has ended, the copy belongs to a lost snapshot; or to a backup that failed at the very
//! last step, which is equally complete.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::error::Result;
use crate::format::manifest::{Manifest, SnapshotObject, decode_snapshot, snapshot_name};
use crate::format::pack::{Directory, pack_name};
use crate::id::{PackId, SnapshotId, WriterId};
use crate::repository::Repository;
use crate::vault::{Vault, exists};
use crate::writers::forget::forgotten_name;
use crate::writers::lease::writer_name;

/// Copies of manifests by snapshot.
#[derive(Default, Clone)]
pub(crate) struct ManifestCopies {
    found: BTreeMap<SnapshotId, (PackId, WriterId)>,
}

impl ManifestCopies {
    /// Adds the copy in a pack, if it has one.
    pub(crate) fn add(&mut self, pack: PackId, directory: &Directory) {
        if let Some(id) = copied_snapshot(&directory.attachment) {
            self.found.insert(id, (pack, directory.writer));
        }
    }

    /// The lost snapshots, each with the pack that has the copy.
    ///
    /// Checks in an order in which a running backup or a removal is never reported as a loss: a writer that has ended
    /// had committed before, a removal is recorded before the snapshot is deleted, and the record is kept until the
    /// pack is deleted.
    pub(crate) fn lost(&self, vault: &Vault) -> Result<Vec<(SnapshotId, PackId)>> {
        let mut lost = Vec::new();
        for (snapshot, (pack, writer)) in &self.found {
            let is_lost = !exists(vault, &writer_name(*writer))?
                && !exists(vault, &snapshot_name(*snapshot))?
                && !exists(vault, &forgotten_name(*snapshot))?
                && exists(vault, &pack_name(*pack))?;
            if is_lost {
                lost.push((*snapshot, *pack));
            }
        }
        Ok(lost)
    }

    /// The pack that has a copy of the manifest of `snapshot`.
    pub(crate) fn of(&self, snapshot: SnapshotId) -> Option<PackId> {
        self.found.get(&snapshot).map(|(pack, _)| *pack)
    }
}

impl Repository {
    /// The copies of manifests in all packs with readable directories; reads all of these directories.
    pub(crate) fn copies(&self) -> Result<ManifestCopies> {
        let mut copies = ManifestCopies::default();
        for pack in self.vault.pack_ids()? {
            match self.packs.reader(pack) {
                Ok(reader) => copies.add(pack, &reader.directory),
                Err(error) if error.is_about_one_object() || error.is_unreadable() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(copies)
    }
}

/// The manifest of which a directory contains a copy.
pub(crate) fn copied_manifest(directory: &Directory) -> Option<Manifest> {
    let id = copied_snapshot(&directory.attachment)?;
    match decode_snapshot(&directory.attachment, id) {
        Ok(SnapshotObject::Committed(manifest)) => Some(*manifest),
        _ => None,
    }
}

fn copied_snapshot(attachment: &[u8]) -> Option<SnapshotId> {
    #[derive(Deserialize)]
    struct ManifestIdentity {
        id: SnapshotId,
    }
    let identity: ManifestIdentity = serde_json::from_slice(attachment).ok()?;
    Some(identity.id)
}
