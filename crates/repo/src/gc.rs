//! Garbage collection: marks what snapshots refer to, and deletes unreferenced packs.
//!
//! Writers may run meanwhile. Gc never waits for them and never harms them:
//!
//! 1. Announce, like every writer. Dead writers are prevented from ever committing (see `lease`).
//! 2. Mark: everything that any snapshot refers to.
//! 3. Condemn: record durably which packs are going to be deleted. A writer that begins later does not refer to them.
//! 4. Look for active writers. A writer that began earlier may refer to condemned packs; if there is one, stop here,
//!    and let the next run continue. If there was one and it has ended, the next step sees its snapshot.
//! 5. Mark again what was committed meanwhile, and spare what that refers to.
//! 6. Repack: move live data out of packs that are mostly dead; relocations record its new location; all durable.
//! 7. Delete the packs, then what only served them: index entries, relocations, records of removed snapshots.
//!
//! It may be interrupted after any step: the next run continues. `docs/locking.md` proves that nothing alive is
//! deleted.

pub(crate) mod auxiliary;
pub(crate) mod compact;
pub(crate) mod dead_writers;
pub(crate) mod loss;
pub(crate) mod mark;
pub(crate) mod repack;
pub(crate) mod request;
pub(crate) mod statistics;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::check::scrub::exists;
use crate::error::{Error, Result};
use crate::format::index::write_segment;
use crate::format::manifest::Manifest;
use crate::format::pack::{Directory, pack_name};
use crate::gc::auxiliary::AuxiliaryObjects;
use crate::gc::loss::Evidence;
use crate::gc::mark::{Marks, live_ranges};
use crate::gc::repack::repack;
use crate::gc::request::{GcPlan, GcReport, GcRequest, Sizes};
use crate::id::{PackId, SegmentId, WriterId};
use crate::progress::job::{JobProgress, NoProgress, check_cancelled};
use crate::repository::Repository;
use crate::repository::pending_deletes::{condemned_name, encode_condemned, waits_name};
use crate::store::{ObjectKind, StoreError};
use crate::writers::emergency_space::with_room;
use crate::writers::lease;
use crate::writers::lease::{Lease, Work, WriterRecord};
use crate::writers::moves::move_of;

/// Packs whose living bytes are moved at once; bounds the memory for their ranges.
const REPACK_BATCH_COUNT: usize = 64;
/// Packs that are deleted before gc looks again whether it was taken for dead.
const DELETE_BATCH_COUNT: usize = 32;
const WAITS_BYTES_MAX: u64 = 1 << 20;
/// Unfinished objects are removed after a day if no writer is active: an active writer would have been announced
/// before. With active writers they are kept for a week, because a backup that finds nothing new for days adds nothing
/// to its pack.
const UNFINISHED_AGE: Duration = Duration::from_secs(24 * 3600);
const UNFINISHED_BESIDE_WRITERS_AGE: Duration = Duration::from_secs(7 * 24 * 3600);

/// Writers that a gc run had to leave packs to.
#[derive(Serialize, Deserialize)]
pub(crate) struct Waits {
    pub(crate) writers: Vec<WriterId>,
}

struct Chosen {
    dead: BTreeSet<PackId>,
    sparse: BTreeSet<PackId>,
}

impl Chosen {
    /// All packs that gc is going to delete.
    fn doomed(&self) -> BTreeSet<PackId> {
        self.dead.union(&self.sparse).copied().collect()
    }
}

impl Repository {
    /// What [`gc`](Self::gc) would do now.
    pub fn gc_plan(&self, request: GcRequest) -> Result<GcPlan> {
        self.gc_plan_with_progress(request, &NoProgress::default())
    }

    /// [`gc_plan`](Self::gc_plan) with progress and cancellation.
    pub fn gc_plan_with_progress(&self, request: GcRequest, progress: &dyn JobProgress) -> Result<GcPlan> {
        let writers = lease::writers(&self.vault)?;
        let mut plan = self.with_all_snapshots(|snapshots| {
            let sizes = self.pack_sizes()?;
            let marks = self.mark(snapshots, progress)?;
            let chosen = self.choose(request, &sizes, &marks)?;
            let losses = self.losses(&Evidence {
                sizes: &sizes,
                marks: &marks,
                doomed: &chosen.doomed(),
                has_snapshots: !snapshots.is_empty(),
                has_writers: !writers.is_empty(),
            })?;
            let mut plan = plan_of(&sizes, &chosen);
            plan.missing_packs = losses.accepted()?;
            Ok(plan)
        })?;
        plan.writers = writers.iter().map(WriterRecord::describe).collect();
        Ok(plan)
    }

    /// Gives back the space of what no snapshot refers to.
    pub fn gc(&self, request: GcRequest) -> Result<GcReport> {
        self.gc_with_progress(request, &NoProgress::default())
    }

    /// [`gc`](Self::gc) with progress and cancellation: cancelled between two steps, it has freed a part, and the next
    /// run continues.
    pub fn gc_with_progress(&self, request: GcRequest, progress: &dyn JobProgress) -> Result<GcReport> {
        let lease = with_room(&self.vault, || Lease::take(&self.vault, Work::Gc, None))?;
        let result = self.gc_under(&lease, request, progress);
        match &result {
            Err(_) => drop(lease.release()),
            Ok(_) => lease.release()?,
        }
        result
    }

    fn gc_under(&self, lease: &Lease<'_>, request: GcRequest, progress: &dyn JobProgress) -> Result<GcReport> {
        let mut report = GcReport::default();
        let dead_writers = self.revoke_dead_writers(lease, &mut report)?;
        // First of all, because it makes room.
        let age = match &self.other_writers(lease, &dead_writers)?[..] {
            [] => UNFINISHED_AGE,
            _ => UNFINISHED_BESIDE_WRITERS_AGE,
        };
        report.unfinished_bytes = self.vault.store.clean(age)?;
        self.finish_forgetting()?;
        // Listed before they are read: the mark knows all listed objects, and later ones are not for this run to delete.
        let leftovers = AuxiliaryObjects::list(&self.vault)?;
        // Without a relocation, what it leads to passes for dead.
        if let Some(error) = self.packs.refresh()?.errors.into_iter().next() {
            return Err(error);
        }

        // Listed before the mark: a pack that appears later is not considered.
        let sizes = self.pack_sizes()?;
        let snapshots = self.standing_snapshots()?;
        let mut marks = self.mark(&snapshots, progress)?;
        let mut chosen = self.choose(request, &sizes, &marks)?;
        report.plan = plan_of(&sizes, &chosen);
        let losses = self.losses(&Evidence {
            sizes: &sizes,
            marks: &marks,
            doomed: &chosen.doomed(),
            has_snapshots: !snapshots.is_empty(),
            has_writers: !dead_writers.is_empty() || !self.other_writers(lease, &dead_writers)?.is_empty(),
        })?;
        let copies = losses.copies.clone();
        report.plan.missing_packs = losses.accepted()?;
        let freed_before = self.carry_over(&mut chosen, &mut marks, (lease, &dead_writers))?;
        self.delete_packs(&freed_before, lease, &sizes, (&mut report, progress))?;

        // What is deleted already stays on a list until the index does not list it any more.
        let condemned: Vec<PackId> = chosen.doomed().union(&freed_before).copied().collect();
        let own = condemned_name(lease.record.writer);
        if !condemned.is_empty() {
            let list = encode_condemned(&condemned);
            with_room(&self.vault, || self.vault.put_sealed(&own, &list))?;
        }
        self.forget_old_condemnations(lease)?;

        let others = self.other_writers(lease, &dead_writers)?;
        if !others.is_empty() && !condemned.is_empty() {
            let writers = others.iter().map(|record| record.writer).collect();
            let bytes = serde_json::to_vec(&Waits { writers }).expect("a list of identities");
            self.vault.put_sealed(&waits_name(lease.record.writer), &bytes)?;
            report.waiting_for = others.iter().map(WriterRecord::describe).collect();
        } else {
            self.sweep(lease, request, &sizes, (&mut marks, chosen), (&mut report, progress))?;
        }
        lease.check()?;
        self.clear_writers(&dead_writers, &copies)?;
        self.tidy_up(&marks, &leftovers)?;
        if report.waiting_for.is_empty() {
            self.vault.store.delete(&own)?;
        }
        Ok(report)
    }

    /// Steps 5 to 7, when no writer is at work that began before the packs were condemned.
    fn sweep(
        &self,
        lease: &Lease<'_>,
        request: GcRequest,
        sizes: &Sizes,
        (marks, mut chosen): (&mut Marks, Chosen),
        (report, progress): (&mut GcReport, &dyn JobProgress),
    ) -> Result<()> {
        let snapshots = self.mark_again(marks)?;
        self.check_condemned(lease, &chosen)?;
        chosen.dead.retain(|pack| !marks.is_live(*pack));
        let sparse: Vec<PackId> = chosen.sparse.iter().copied().collect();
        // What is dead goes first: moving what is alive takes room.
        self.delete_packs(&chosen.dead, lease, sizes, (report, progress))?;
        progress.items("rewriting packs", sparse.len() as u64);
        for batch in sparse.chunks(REPACK_BATCH_COUNT) {
            check_cancelled(progress)?;
            let moved = self.move_living(lease, request, (batch, &snapshots), marks, report)?;
            self.refresh()?;
            // What was moved is deleted in any case, or it would be there twice.
            self.delete_packs(&moved, lease, sizes, (report, &NoProgress::default()))?;
            progress.advance(batch.len() as u64);
        }
        Ok(())
    }

    /// An error when another run has taken our place, or our list is gone: a writer may use what was on it.
    fn check_condemned(&self, lease: &Lease<'_>, chosen: &Chosen) -> Result<()> {
        lease.renew()?;
        lease.check()?;
        if chosen.doomed().is_empty() || exists(&self.vault, &condemned_name(lease.record.writer))? {
            return Ok(());
        }
        Err(Error::Revoked {
            writer: lease.record.writer,
        })
    }

    /// All snapshots that are not forgotten. One that cannot be read keeps gc from deleting anything.
    pub(crate) fn all_snapshots(&self) -> Result<Vec<Manifest>> {
        none_unreadable(self.snapshots()?)
    }

    /// The same with those that are being forgotten. A forget may take its record back, so the data of a snapshot stays as long as its object.
    fn standing_snapshots(&self) -> Result<Vec<Manifest>> {
        none_unreadable(self.standing_snapshots_except(&HashSet::new())?)
    }

    pub(crate) fn mark(&self, snapshots: &[Manifest], progress: &dyn JobProgress) -> Result<Marks> {
        progress.items("looking what snapshots need", snapshots.len() as u64);
        let mut marks = Marks::default();
        for manifest in snapshots {
            check_cancelled(progress)?;
            marks.snapshot(&self.packs, manifest)?;
            progress.advance(1);
        }
        Ok(marks)
    }

    /// Marks what came since; returns all snapshots.
    ///
    /// A backup may also have healed: then snapshots that were marked long ago are found to need other packs than before.
    fn mark_again(&self, marks: &mut Marks) -> Result<Vec<Manifest>> {
        let snapshots = self.standing_snapshots()?;
        let refreshed = self.packs.refresh()?;
        if let Some(error) = refreshed.errors.into_iter().next() {
            return Err(error);
        }
        if refreshed.has_news {
            marks.begin_again();
        }
        snapshots
            .iter()
            .try_for_each(|manifest| marks.snapshot(&self.packs, manifest))?;
        Ok(snapshots)
    }

    pub(crate) fn pack_sizes(&self) -> Result<Sizes> {
        let mut sizes = Sizes::new();
        self.vault.store.list(ObjectKind::Pack, &mut |name, length| {
            if let Ok(pack) = name.name().parse() {
                sizes.insert(pack, length);
            }
            Ok(())
        })?;
        Ok(sizes)
    }

    fn choose(&self, request: GcRequest, sizes: &Sizes, marks: &Marks) -> Result<Chosen> {
        let mut chosen = Chosen {
            dead: BTreeSet::new(),
            sparse: BTreeSet::new(),
        };
        for pack in sizes.keys() {
            let Some(live) = marks.pack(*pack) else {
                chosen.dead.insert(*pack);
                continue;
            };
            if request.repack_below_percent == 0 {
                continue;
            }
            let reader = match self.packs.reader(*pack) {
                // A damaged pack is repair's business.
                Err(error) if error.is_damage() => continue,
                other => other?,
            };
            let frames = reader.directory.frames().iter().zip(0..);
            let (total, alive) = frames.fold((0, 0), |(total, alive), (frame, number)| {
                (
                    total + u64::from(frame.raw_length),
                    alive + live.live_bytes(number, frame.raw_length),
                )
            });
            // A pack that carries the copy of a living manifest keeps it.
            let is_copy = marks.copies.contains(pack);
            // One that is alive as a whole has nothing to give back.
            if alive < total && alive * 100 <= total * u64::from(request.repack_below_percent) && !is_copy {
                chosen.sparse.insert(*pack);
            }
        }
        Ok(chosen)
    }

    /// Packs that an earlier run condemned and that no active writer can refer to any more.
    ///
    /// They can be deleted even while writers are active, because those began after the packs were condemned.
    fn carry_over(
        &self,
        chosen: &mut Chosen,
        marks: &mut Marks,
        (lease, dead_writers): (&Lease<'_>, &[WriterRecord]),
    ) -> Result<BTreeSet<PackId>> {
        let others = self.other_writers(lease, dead_writers)?;
        let active: HashSet<WriterId> = others.into_iter().map(|record| record.writer).collect();
        let mut free = BTreeSet::new();
        for (gc, packs) in crate::repository::pending_deletes::condemnations(&self.vault)? {
            if gc == lease.record.writer {
                continue;
            }
            let waits: Waits = match self.vault.get_sealed(&waits_name(gc), WAITS_BYTES_MAX) {
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
            // The writers that were waited for may have committed after we marked.
            self.mark_again(marks)?;
            // What is dead now and condemned stays dead, as long as we were not taken for dead before we looked.
            lease.check()?;
        }
        free.retain(|pack| chosen.dead.contains(pack) && !marks.is_live(*pack));
        chosen.dead.retain(|pack| !free.contains(pack));
        Ok(free)
    }

    /// Drops the lists of earlier runs: what they named and is still dead is in ours.
    fn forget_old_condemnations(&self, lease: &Lease<'_>) -> Result<()> {
        let own = condemned_name(lease.record.writer);
        let names = self.vault.names(ObjectKind::Condemned)?;
        // Another gc that considers us dead puts a list later, which is not among these.
        lease.check()?;
        for name in names {
            if name != own && move_of(&name).is_none() {
                self.vault.store.delete(&name)?;
            }
        }
        Ok(())
    }

    /// Stores what is alive of some packs elsewhere; returns the packs that are needed no more.
    fn move_living(
        &self,
        lease: &Lease<'_>,
        request: GcRequest,
        (batch, snapshots): (&[PackId], &[Manifest]),
        marks: &mut Marks,
        report: &mut GcReport,
    ) -> Result<BTreeSet<PackId>> {
        let chosen: HashSet<PackId> = batch.iter().copied().collect();
        let ranges = live_ranges(&self.packs, snapshots, &chosen)?;
        let repacked = repack(
            self,
            lease.record.writer,
            (&ranges, &HashMap::new()),
            request.thread_count,
        )?;
        report.rewritten_bytes += repacked.stored_bytes;
        report.damaged.extend(
            repacked
                .failed
                .iter()
                .map(|(pack, error)| format!("pack {pack}: {error}")),
        );
        self.write_index(&repacked.packs)?;
        let moved: Vec<PackId> = repacked.tables.keys().copied().collect();
        self.commit_moves(lease, repacked.tables)?;
        for pack in moved {
            marks.moved_out_of(pack);
        }
        let failed: HashSet<PackId> = repacked.failed.iter().map(|(pack, _)| *pack).collect();
        Ok(batch.iter().copied().filter(|pack| !failed.contains(pack)).collect())
    }

    /// Writes a segment about `packs`.
    pub(crate) fn write_index(&self, packs: &[(PackId, Directory)]) -> Result<()> {
        if packs.is_empty() {
            return Ok(());
        }
        let segment = SegmentId::from_bytes(self.vault.environment.draw()?);
        write_segment(&*self.vault.store, &self.vault.segment_keys(), segment, packs)?;
        Ok(())
    }

    fn delete_packs(
        &self,
        doomed: &BTreeSet<PackId>,
        lease: &Lease<'_>,
        sizes: &Sizes,
        (report, progress): (&mut GcReport, &dyn JobProgress),
    ) -> Result<()> {
        progress.items("deleting packs", doomed.len() as u64);
        for (number, pack) in doomed.iter().enumerate() {
            check_cancelled(progress)?;
            lease.renew()?;
            // A host that slept for long, and was taken for dead meanwhile, wakes up to an error.
            if number.is_multiple_of(DELETE_BATCH_COUNT) {
                lease.check()?;
            }
            self.vault.store.delete(&pack_name(*pack))?;
            self.packs.forget(*pack);
            report.deleted_pack_count += 1;
            report.freed_bytes += sizes.get(pack).copied().unwrap_or_default();
            progress.advance(1);
        }
        Ok(())
    }
}

fn none_unreadable((manifests, errors): (Vec<Manifest>, Vec<Error>)) -> Result<Vec<Manifest>> {
    errors.into_iter().next().map_or(Ok(manifests), Err)
}

fn plan_of(sizes: &Sizes, chosen: &Chosen) -> GcPlan {
    let mut plan = GcPlan::default();
    for (pack, bytes) in sizes {
        let (count, sum) = if chosen.dead.contains(pack) {
            (&mut plan.dead_pack_count, &mut plan.dead_bytes)
        } else if chosen.sparse.contains(pack) {
            (&mut plan.sparse_pack_count, &mut plan.sparse_bytes)
        } else {
            (&mut plan.live_pack_count, &mut plan.live_bytes)
        };
        *count += 1;
        *sum += bytes;
    }
    plan
}
