//! One run of gc, from its announcement to its report: the steps that the parent module lists.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::check::scrub::exists;
use crate::error::{Error, Result};
use crate::format::manifest::Manifest;
use crate::format::pack::pack_name;
use crate::gc::auxiliary::AuxiliaryObjects;
use crate::gc::loss::Evidence;
use crate::gc::mark::{Marks, live_ranges};
use crate::gc::repack::repack;
use crate::gc::request::{GcReport, GcRequest, Sizes};
use crate::gc::{Chosen, plan_of};
use crate::id::{PackId, WriterId};
use crate::progress::job::{JobProgress, NoProgress, check_cancelled};
use crate::repository::Repository;
use crate::repository::pending_deletes::{condemnations, condemned_name, encode_condemned, waits_name};
use crate::store::{ObjectKind, StoreError};
use crate::writers::emergency_space::with_room;
use crate::writers::lease::{Lease, WriterRecord};
use crate::writers::moves::move_of;

/// Number of packs whose live bytes are moved in one batch; limits the memory for their ranges.
const REPACK_BATCH_COUNT: usize = 64;
/// Number of packs that are deleted between two checks whether gc was considered dead.
const DELETE_BATCH_COUNT: usize = 32;
const WAITS_BYTES_MAX: u64 = 1 << 20;
/// Unfinished objects are removed after a day if no writer is active: an active writer would have been announced
/// before. With active writers they are kept for a week, because a backup that finds nothing new for days adds nothing
/// to its pack.
const UNFINISHED_AGE: Duration = Duration::from_secs(24 * 3600);
const UNFINISHED_BESIDE_WRITERS_AGE: Duration = Duration::from_secs(7 * 24 * 3600);

/// Writers that a gc run had to wait for.
#[derive(Serialize, Deserialize)]
pub(crate) struct Waits {
    pub(crate) writers: Vec<WriterId>,
}

/// A run of gc that has prevented dead writers from committing, and listed the packs.
struct GcRun<'a> {
    repository: &'a Repository,
    lease: &'a Lease<'a>,
    request: GcRequest,
    progress: &'a dyn JobProgress,
    dead_writers: Vec<WriterRecord>,
    /// The packs that may be deleted; later ones are not considered.
    sizes: Sizes,
    report: GcReport,
}

impl Repository {
    /// Runs gc under its lease.
    pub(super) fn gc_under(
        &self,
        lease: &Lease<'_>,
        request: GcRequest,
        progress: &dyn JobProgress,
    ) -> Result<GcReport> {
        let mut report = GcReport::default();
        let dead_writers = self.revoke_dead_writers(lease, &mut report)?;
        // First, because it frees space.
        let age = match &self.other_writers(lease, &dead_writers)?[..] {
            [] => UNFINISHED_AGE,
            _ => UNFINISHED_BESIDE_WRITERS_AGE,
        };
        report.unfinished_bytes = self.vault.store.clean(age)?;
        self.finish_forgetting()?;
        // Listed before reading: the marks cover all listed objects, and later ones are not deleted in this run.
        let leftovers = AuxiliaryObjects::list(&self.vault)?;
        // Without a relocation, the data at its destination would appear dead.
        if let Some(error) = self.packs.refresh()?.errors.into_iter().next() {
            return Err(error);
        }
        // Listed before marking.
        let sizes = self.pack_sizes()?;
        let mut run = GcRun {
            repository: self,
            lease,
            request,
            progress,
            dead_writers,
            sizes,
            report,
        };
        run.collect(&leftovers)?;
        Ok(run.report)
    }
}

impl GcRun<'_> {
    fn collect(&mut self, leftovers: &AuxiliaryObjects) -> Result<()> {
        let (repository, lease) = (self.repository, self.lease);
        let vault = &repository.vault;
        let snapshots = repository.stored_snapshots()?;
        let mut marks = repository.mark(&snapshots, self.progress)?;
        let mut chosen = repository.choose(self.request, &self.sizes, &marks)?;
        self.report.plan = plan_of(&self.sizes, &chosen);
        let losses = repository.losses(&Evidence {
            sizes: &self.sizes,
            marks: &marks,
            doomed: &chosen.doomed(),
            has_snapshots: !snapshots.is_empty(),
            has_writers: !self.dead_writers.is_empty() || !self.other_writers()?.is_empty(),
        })?;
        let copies = losses.copies.clone();
        self.report.plan.missing_packs = losses.accepted()?;
        let freed_before = self.take_condemned_before(&mut chosen, &mut marks)?;
        self.delete_packs(&freed_before, self.progress)?;

        // Deleted packs stay on a list until the index does not list them any more.
        let condemned: Vec<PackId> = chosen.doomed().union(&freed_before).copied().collect();
        let own = condemned_name(lease.record.writer);
        if !condemned.is_empty() {
            let list = encode_condemned(&condemned);
            with_room(vault, || vault.put_sealed(&own, &list))?;
        }
        self.delete_earlier_lists()?;

        let others = self.other_writers()?;
        if !others.is_empty() && !condemned.is_empty() {
            let writers = others.iter().map(|record| record.writer).collect();
            let bytes = serde_json::to_vec(&Waits { writers }).expect("a list of identities");
            vault.put_sealed(&waits_name(lease.record.writer), &bytes)?;
            self.report.waiting_for = others.iter().map(WriterRecord::describe).collect();
        } else {
            self.sweep(&mut marks, chosen)?;
        }
        lease.check()?;
        repository.clear_writers(&self.dead_writers, &copies)?;
        repository.tidy_up(&marks, leftovers)?;
        if self.report.waiting_for.is_empty() {
            vault.store.delete(&own)?;
        }
        Ok(())
    }

    fn other_writers(&self) -> Result<Vec<WriterRecord>> {
        self.repository.other_writers(self.lease, &self.dead_writers)
    }

    /// Steps 5 to 7, when no writer is active that began before the packs were condemned.
    fn sweep(&mut self, marks: &mut Marks, mut chosen: Chosen) -> Result<()> {
        let progress = self.progress;
        let snapshots = self.mark_again(marks)?;
        self.check_condemned(&chosen)?;
        chosen.dead.retain(|pack| !marks.is_live(*pack));
        let sparse: Vec<PackId> = chosen.sparse.iter().copied().collect();
        // Dead packs are deleted first, since moving live data needs space.
        self.delete_packs(&chosen.dead, progress)?;
        progress.items("rewriting packs", sparse.len() as u64);
        for batch in sparse.chunks(REPACK_BATCH_COUNT) {
            check_cancelled(progress)?;
            let moved = self.repack_batch(batch, &snapshots, marks)?;
            self.repository.refresh()?;
            // Moved packs are deleted even after a cancellation; otherwise their data would be stored twice.
            self.delete_packs(&moved, &NoProgress::default())?;
            progress.advance(batch.len() as u64);
        }
        Ok(())
    }

    /// An error if another run has replaced this one, or its list is gone: a writer may use the listed packs.
    fn check_condemned(&self, chosen: &Chosen) -> Result<()> {
        let lease = self.lease;
        lease.renew()?;
        lease.check()?;
        if chosen.doomed().is_empty() || exists(&self.repository.vault, &condemned_name(lease.record.writer))? {
            return Ok(());
        }
        Err(Error::Revoked {
            writer: lease.record.writer,
        })
    }

    /// Marks snapshots that were committed since; returns all snapshots.
    ///
    /// A backup may also have healed packs: then snapshots that were marked earlier need other packs than before.
    fn mark_again(&self, marks: &mut Marks) -> Result<Vec<Manifest>> {
        let packs = &self.repository.packs;
        let snapshots = self.repository.stored_snapshots()?;
        let refreshed = packs.refresh()?;
        if let Some(error) = refreshed.errors.into_iter().next() {
            return Err(error);
        }
        if refreshed.has_changes {
            marks.revisit_snapshots();
        }
        snapshots
            .iter()
            .try_for_each(|manifest| marks.snapshot(packs, manifest))?;
        Ok(snapshots)
    }

    /// Removes from `chosen` the packs that an earlier run condemned and that no active writer can refer to any more.
    ///
    /// They can be deleted even while writers are active, because these began after the packs were condemned.
    fn take_condemned_before(&self, chosen: &mut Chosen, marks: &mut Marks) -> Result<BTreeSet<PackId>> {
        let (vault, lease) = (&self.repository.vault, self.lease);
        let active: HashSet<WriterId> = self.other_writers()?.into_iter().map(|record| record.writer).collect();
        let mut free = BTreeSet::new();
        for (gc, packs) in condemnations(vault)? {
            if gc == lease.record.writer {
                continue;
            }
            let waits: Waits = match vault.get_sealed(&waits_name(gc), WAITS_BYTES_MAX) {
                // That run died before it looked for active writers.
                Err(Error::Store(StoreError::NotFound { .. })) => continue,
                other => {
                    let bytes = other?;
                    serde_json::from_slice(&bytes)
                        .map_err(|error| Error::damaged(&waits_name(gc), 0, error.to_string()))?
                }
            };
            if waits.writers.iter().all(|writer| !active.contains(writer)) {
                free.extend(packs);
            }
        }
        if !free.is_empty() {
            // The awaited writers may have committed after the mark phase.
            self.mark_again(marks)?;
            // A dead and condemned pack stays dead, unless this run was considered dead before the check.
            lease.check()?;
        }
        free.retain(|pack| chosen.dead.contains(pack) && !marks.is_live(*pack));
        chosen.dead.retain(|pack| !free.contains(pack));
        Ok(free)
    }

    /// Deletes the lists of earlier runs: the packs in them that are still dead are in the list of this run.
    fn delete_earlier_lists(&self) -> Result<()> {
        let (vault, lease) = (&self.repository.vault, self.lease);
        let own = condemned_name(lease.record.writer);
        let names = vault.names(ObjectKind::Condemned)?;
        // Another gc that considers this run dead puts its list later, so it is not among these.
        lease.check()?;
        for name in names {
            if name != own && move_of(&name).is_none() {
                vault.store.delete(&name)?;
            }
        }
        Ok(())
    }

    /// Copies the live bytes of some packs; returns the packs that are not needed any more.
    fn repack_batch(
        &mut self,
        batch: &[PackId],
        snapshots: &[Manifest],
        marks: &mut Marks,
    ) -> Result<BTreeSet<PackId>> {
        let repository = self.repository;
        let chosen: HashSet<PackId> = batch.iter().copied().collect();
        let ranges = live_ranges(&repository.packs, snapshots, &chosen)?;
        let (writer, thread_count) = (self.lease.record.writer, self.request.thread_count);
        let repacked = repack(repository, writer, &ranges, &HashMap::new(), thread_count)?;
        self.report.rewritten_bytes += repacked.stored_bytes;
        self.report.damaged.extend(
            repacked
                .failed
                .iter()
                .map(|(pack, error)| format!("pack {pack}: {error}")),
        );
        repository.write_index(&repacked.packs)?;
        let moved: Vec<PackId> = repacked.tables.keys().copied().collect();
        repository.commit_moves(self.lease, repacked.tables)?;
        for pack in moved {
            marks.mark_relocated(pack);
        }
        let failed: HashSet<PackId> = repacked.failed.iter().map(|(pack, _)| *pack).collect();
        Ok(batch.iter().copied().filter(|pack| !failed.contains(pack)).collect())
    }

    fn delete_packs(&mut self, doomed: &BTreeSet<PackId>, progress: &dyn JobProgress) -> Result<()> {
        progress.items("deleting packs", doomed.len() as u64);
        for (number, pack) in doomed.iter().enumerate() {
            check_cancelled(progress)?;
            self.lease.renew()?;
            // If the host was suspended for long and this run was considered dead, the check returns an
            // error.
            if number.is_multiple_of(DELETE_BATCH_COUNT) {
                self.lease.check()?;
            }
            self.repository.vault.store.delete(&pack_name(*pack))?;
            self.repository.packs.forget(*pack);
            self.report.deleted_pack_count += 1;
            self.report.freed_bytes += self.sizes.get(pack).copied().unwrap_or_default();
            progress.advance(1);
        }
        Ok(())
    }
}
