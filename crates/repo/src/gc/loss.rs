//! Evidence of loss.
//!
//! A snapshot that gc does not see was not necessarily removed on purpose: a folder may be lost, or not yet
//! copied. Before it deletes anything, gc therefore compares what it is about to delete with the records that
//! should explain the deletion:
//!
//! | evidence | explained by |
//! |---|---|
//! | a pack to be deleted has a copy of a manifest | its snapshot, a record of its removal, a mark, or an active writer
//! |
//! | a map pack to be deleted is unreadable | nothing: it may contain such a copy |
//! | a snapshot needs a pack that does not exist | a damage record with the pack's content: repair has searched for it
//! |
//! | there are packs but no snapshots | a writer; or a record that a snapshot was removed, if the index lists no
//! missing pack |
//!
//! Anything unexplained stops gc with [`Error::Loss`] until it is explained, or until the user accepts the loss. The
//! acceptance is durable: a snapshot gets a record of removal, packs get an object `scrub/accepted.<random>` with the
//! plaintext of a list of condemned packs.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use crate::check::scrub::{ManifestCopies, copied_manifest, exists};
use crate::error::{Error, Result};
use crate::format::index::SegmentReader;
use crate::format::manifest::Manifest;
use crate::format::pack::{PACK_BYTES_MIN, PackKind, pack_name, read_displaced_directory, read_kind};
use crate::gc::mark::Marks;
use crate::gc::request::Sizes;
use crate::id::{PackId, SnapshotId};
use crate::losses::{Loss, LostSnapshot};
use crate::progress::job::JobProgress;
use crate::repository::Repository;
use crate::repository::accepted_losses::{ACCEPTED_START, accepted_packs, is_accepted_record, read_accepted};
use crate::repository::damage_records::{damage_names, read_damage};
use crate::repository::pending_deletes::{condemned_packs, encode_condemned};
use crate::store::{ObjectKind, ObjectName, StoreError};
use crate::writers::emergency_space::with_room;
use crate::writers::forget::{ForgottenRecord, forgotten, forgotten_name};
use crate::writers::lease;

const ACCEPTED_REASON: &str = "it was lost, and the loss was accepted";
/// The last map pack of a backup is usually far smaller than a full pack.
const LIKELY_BYTES_MAX: u64 = 40 << 20;

/// Which losses are accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AcceptedLoss {
    /// These lost snapshots.
    Snapshots(Vec<SnapshotId>),
    /// Everything that gc finds lost now.
    All,
}

/// Which packs are searched for copies of manifests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LostSearch {
    /// Packs that are smaller than a full one. This finds nearly all copies, and opens few packs.
    Likely,
    /// All packs.
    Thorough,
}

/// The input of the search for losses.
pub(crate) struct Evidence<'a> {
    pub(crate) sizes: &'a Sizes,
    pub(crate) marks: &'a Marks,
    /// Packs that gc is about to delete.
    pub(crate) doomed: &'a BTreeSet<PackId>,
    pub(crate) has_snapshots: bool,
    /// Whether a writer is active, or died and was not cleared yet.
    pub(crate) has_writers: bool,
}

/// The result of the search.
pub(crate) struct Losses {
    pub(crate) list: Vec<Loss>,
    /// The copies of manifests in the packs that gc is about to delete.
    pub(crate) copies: ManifestCopies,
    /// Missing packs that snapshots need, accepted or not.
    pub(crate) missing: Vec<PackId>,
}

impl Losses {
    /// The missing packs, if every loss is explained or accepted.
    pub(crate) fn accepted(self) -> Result<Vec<PackId>> {
        if self.list.is_empty() {
            Ok(self.missing)
        } else {
            Err(Error::Loss { losses: self.list })
        }
    }
}

impl Repository {
    /// Compares what gc is about to delete with the records that explain it.
    pub(crate) fn losses(&self, evidence: &Evidence<'_>) -> Result<Losses> {
        let accepted = accepted_packs(&self.vault)?;
        let mut known = None;
        let mut list = Vec::new();
        let mut copies = ManifestCopies::default();
        for pack in evidence.doomed {
            match self.add_copy(*pack, &mut copies) {
                Ok(()) => {}
                Err(error) if error.is_about_one_object() || error.is_unreadable() => {
                    let known = match &mut known {
                        Some(known) => known,
                        empty => empty.insert(self.known_packs()?),
                    };
                    if !accepted.contains(pack) && !known.contains(pack) {
                        let reason = error.to_string();
                        list.push(Loss::Unreadable { pack: *pack, reason });
                    }
                }
                Err(error) => return Err(error),
            }
        }
        let lost = self.lost_snapshots_of(&copies)?;
        list.splice(0..0, lost.into_iter().map(Loss::Snapshot));
        if !evidence.doomed.is_empty() && !exists(&self.vault, &ObjectName::config())? {
            list.push(Loss::Config);
        }
        let missing = self.missing_packs(evidence)?;
        if !missing.is_empty() && !evidence.doomed.is_empty() {
            let known = self.known_losses()?;
            let unknown = missing
                .iter()
                .filter(|pack| !accepted.contains(pack) && !known.contains(pack));
            list.extend(unknown.copied().map(Loss::Pack));
        }
        let unexplained: Vec<PackId> = evidence
            .doomed
            .difference(&accepted.into_iter().collect())
            .copied()
            .collect();
        // Without snapshots, an object of the kind `Snapshot` is the mark of a writer that was considered dead.
        let has_any = |kind| Ok::<_, Error>(!self.vault.names(kind)?.is_empty());
        let has_record = || Ok::<_, Error>(has_any(ObjectKind::Forgotten)? || has_any(ObjectKind::Snapshot)?);
        if list.is_empty()
            && !evidence.has_snapshots
            && !evidence.has_writers
            && !unexplained.is_empty()
            && (!has_record()? || self.has_dangling_packs(evidence.sizes)?)
        {
            list.push(Loss::Unexplained(unexplained));
        }
        Ok(Losses { list, copies, missing })
    }

    /// Adds the manifest copy of a pack. Of chunk packs only the headers are read.
    fn add_copy(&self, pack: PackId, copies: &mut ManifestCopies) -> Result<()> {
        match read_kind(&*self.vault.store, pack) {
            Ok(PackKind::Data) | Err(Error::MissingPack { .. }) => return Ok(()),
            // The directory contains the kind as well.
            Ok(PackKind::Tree) | Err(Error::Damaged { .. }) => {}
            Err(error) => return Err(error),
        }
        match self.packs.reader(pack) {
            Ok(reader) => copies.add(pack, &reader.directory),
            Err(Error::MissingPack { .. }) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Whether deleting a pack loses no manifest copy of an unexplained missing snapshot.
    pub(crate) fn is_free_of_lost_copies(&self, pack: PackId) -> Result<bool> {
        let mut copies = ManifestCopies::default();
        match self.add_copy(pack, &mut copies) {
            Ok(()) => Ok(copies.lost(&self.vault)?.is_empty()),
            Err(error) if error.is_about_one_object() || error.is_unreadable() => {
                Ok(self.known_packs()?.contains(&pack)
                    || accepted_packs(&self.vault)?.contains(&pack)
                    || self.cannot_hold_lost_copy(pack)?)
            }
            Err(error) => Err(error),
        }
    }

    /// Whether the bytes of an unreadable pack cannot contain a copy of a lost manifest, so that deleting them loses
    /// nothing: they are too few, or belong to another, readable pack.
    fn cannot_hold_lost_copy(&self, pack: PackId) -> Result<bool> {
        if self.vault.store.length(&pack_name(pack))? < PACK_BYTES_MIN {
            return Ok(true);
        }
        let mut copies = ManifestCopies::default();
        match read_displaced_directory(&*self.vault.store, pack, |other| self.packs.key(other)) {
            Ok(Some(reader)) => copies.add(pack, &reader.directory),
            Ok(None) => return Ok(false),
            Err(error) if error.is_about_one_object() || error.is_unreadable() => return Ok(false),
            Err(error) => return Err(error),
        }
        Ok(copies.lost(&self.vault)?.is_empty())
    }

    /// Unreadable packs that are known to contain no copy of a lost manifest: they contained chunks, or the copy of a
    /// snapshot that exists or was removed.
    fn known_packs(&self) -> Result<HashSet<PackId>> {
        let mut known = self.known_losses()?;
        let (manifests, _) = self.snapshots()?;
        known.extend(manifests.into_iter().map(|manifest| manifest.copy));
        known.extend(forgotten(&self.vault)?.into_iter().filter_map(|record| record.copy));
        Ok(known)
    }

    fn lost_snapshots_of(&self, copies: &ManifestCopies) -> Result<Vec<LostSnapshot>> {
        let mut lost = Vec::new();
        for (id, copy) in copies.lost(&self.vault)? {
            let manifest = match self.packs.reader(copy) {
                Ok(reader) => copied_manifest(&reader.directory),
                Err(error) if error.is_about_one_object() => None,
                Err(error) => return Err(error),
            };
            let (machine, time_ms) = manifest.map_or_else(
                || ("an unknown machine".to_owned(), 0),
                |manifest| (manifest.machine, manifest.time_ms),
            );
            lost.push(LostSnapshot {
                id,
                machine,
                time_ms,
                copy,
            });
        }
        Ok(lost)
    }

    /// Missing packs that snapshots need, after relocations.
    fn missing_packs(&self, evidence: &Evidence<'_>) -> Result<Vec<PackId>> {
        let mut missing = Vec::new();
        for pack in evidence.marks.live_packs() {
            if !evidence.sizes.contains_key(&pack) && self.is_absent(pack)? {
                missing.push(pack);
            }
        }
        missing.sort_unstable();
        Ok(missing)
    }

    /// Whether the index lists missing packs that gc did not delete: they were lost, or are not copied yet.
    fn has_dangling_packs(&self, sizes: &Sizes) -> Result<bool> {
        let mut expected = condemned_packs(&self.vault)?;
        // Repair has recorded that these are missing.
        expected.extend(damage_names(&self.vault)?.into_keys());
        let (segments, _) = self.vault.segments()?;
        for pack in segments.iter().flat_map(SegmentReader::packs) {
            if !sizes.contains_key(pack) && !expected.contains(pack) && self.is_absent(*pack)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Missing packs whose content repair has recorded.
    fn known_losses(&self) -> Result<HashSet<PackId>> {
        let mut known = HashSet::new();
        for (pack, names) in damage_names(&self.vault)? {
            if let (Some(record), _) = read_damage(&self.vault, &names)?
                && !record.chunks.is_empty()
            {
                known.insert(pack);
            }
        }
        Ok(known)
    }

    /// Snapshots that are missing without a record of their removal; `manifests` are all existing ones.
    pub fn lost_snapshots(&self, manifests: &[Manifest], search: LostSearch) -> Result<Vec<LostSnapshot>> {
        let live_copies: HashSet<PackId> = manifests.iter().map(|manifest| manifest.copy).collect();
        let mut copies = ManifestCopies::default();
        for (pack, length) in self.pack_sizes()? {
            if live_copies.contains(&pack) || search == LostSearch::Likely && length > LIKELY_BYTES_MAX {
                continue;
            }
            match self.add_copy(pack, &mut copies) {
                Err(error) if error.is_about_one_object() || error.is_unreadable() => {}
                Err(Error::Store(StoreError::Permission { .. })) => {}
                other => other?,
            }
        }
        self.lost_snapshots_of(&copies)
    }

    /// Records that losses are accepted, so that gc frees the remaining space; returns what was accepted.
    ///
    /// # Errors
    /// [`Error::NoSnapshot`] if a named snapshot is not lost.
    pub fn accept_loss(&self, accepted: &AcceptedLoss, progress: &dyn JobProgress) -> Result<Vec<Loss>> {
        match accepted {
            AcceptedLoss::Snapshots(ids) => {
                let (manifests, _) = self.snapshots()?;
                let lost: BTreeMap<SnapshotId, LostSnapshot> = self
                    .lost_snapshots(&manifests, LostSearch::Thorough)?
                    .into_iter()
                    .map(|lost| (lost.id, lost))
                    .collect();
                let mut found = Vec::new();
                for id in ids {
                    let lost = lost.get(id).ok_or(Error::NoSnapshot { id: *id })?;
                    found.push(Loss::Snapshot(lost.clone()));
                }
                self.record_acceptance(&found)?;
                Ok(found)
            }
            AcceptedLoss::All => {
                let (manifests, _) = self.snapshots()?;
                // Includes snapshots whose pack gc would keep, so that the user is asked only once.
                let mut found: Vec<Loss> = self
                    .lost_snapshots(&manifests, LostSearch::Thorough)?
                    .into_iter()
                    .map(Loss::Snapshot)
                    .collect();
                let others = self.current_losses(progress)?;
                found.extend(others.into_iter().filter(|loss| !matches!(loss, Loss::Snapshot(_))));
                self.record_acceptance(&found)?;
                Ok(found)
            }
        }
    }

    /// The losses that gc would find at this moment.
    fn current_losses(&self, progress: &dyn JobProgress) -> Result<Vec<Loss>> {
        let has_writers = !lease::writers(&self.vault)?.is_empty();
        self.with_all_snapshots(|snapshots| {
            let sizes = self.pack_sizes()?;
            let marks = self.mark(snapshots, progress)?;
            let doomed: BTreeSet<PackId> = sizes.keys().copied().filter(|pack| !marks.is_live(*pack)).collect();
            let evidence = Evidence {
                sizes: &sizes,
                marks: &marks,
                doomed: &doomed,
                has_snapshots: !snapshots.is_empty(),
                has_writers,
            };
            Ok(self.losses(&evidence)?.list)
        })
    }

    fn record_acceptance(&self, losses: &[Loss]) -> Result<()> {
        let mut packs: Vec<PackId> = Vec::new();
        for loss in losses {
            match loss {
                Loss::Snapshot(lost) => self.record_never(lost.id, Some(lost.copy), ACCEPTED_REASON)?,
                Loss::Unreadable { pack, .. } | Loss::Pack(pack) => packs.push(*pack),
                Loss::Unexplained(unexplained) => packs.extend(unexplained),
                // Repair restores it.
                Loss::Config => {}
            }
        }
        if packs.is_empty() {
            return Ok(());
        }
        let number = u64::from_le_bytes(self.vault.environment.draw()?);
        let name =
            ObjectName::new(ObjectKind::Scrub, &format!("{ACCEPTED_START}{number:016x}")).map_err(StoreError::from)?;
        with_room(&self.vault, || self.vault.put_sealed(&name, &encode_condemned(&packs)))?;
        Ok(())
    }

    /// Records that a snapshot will never exist, so that the copy of its manifest is not reported as a lost snapshot.
    pub(crate) fn record_never(&self, snapshot: SnapshotId, copy: Option<PackId>, reason: &str) -> Result<()> {
        let record = ForgottenRecord {
            snapshot,
            copy,
            time_ms: (self.vault.environment.now_ms)(),
            reason: reason.to_owned(),
        };
        let bytes = serde_json::to_vec(&record).expect("a record is made of strings and numbers");
        with_room(&self.vault, || self.vault.put_sealed(&forgotten_name(snapshot), &bytes))?;
        Ok(())
    }

    /// Deletes lists of accepted losses whose packs neither exist nor are needed any more.
    pub(crate) fn drop_old_acceptances(&self, existing: &HashSet<PackId>, marks: &Marks) -> Result<()> {
        for name in self.vault.names(ObjectKind::Scrub)? {
            if !is_accepted_record(&name) {
                continue;
            }
            match read_accepted(&self.vault, &name) {
                Ok(packs) => {
                    if packs
                        .iter()
                        .all(|pack| !existing.contains(pack) && !marks.is_live(*pack))
                    {
                        self.vault.store.delete(&name)?;
                    }
                }
                Err(Error::Store(StoreError::NotFound { .. })) => {}
                // Unreadable lists are left to repair.
                Err(error) if error.is_about_one_object() || error.is_unreadable() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
