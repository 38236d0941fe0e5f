//! Garbage collection: marks what snapshots refer to, and deletes unreferenced packs.
//!
//! Writers may run concurrently. Gc does not wait for them and does not affect them:
//!
//! 1. Announce, as every writer does. Prevent dead writers from ever committing (see `lease`).
//! 2. Mark: everything that any snapshot refers to.
//! 3. Condemn: record durably which packs are going to be deleted. Writers that begin later do not refer to them.
//! 4. Look for active writers. A writer that began earlier may refer to condemned packs; if there is one, stop here,
//!    and let the next run continue. If there was one and it has ended, the next step sees its snapshot.
//! 5. Mark snapshots that were committed meanwhile, and spare the packs that they refer to.
//! 6. Repack: move live data out of packs that are mostly dead, and record the new locations in relocations; make
//!    everything durable.
//! 7. Delete the packs, then their auxiliary objects: index entries, relocations, records of removed
//!    snapshots.
//!
//! Gc may be interrupted after any step: the next run continues. `docs/locking.md` proves that no live data is
//! deleted.

pub(crate) mod auxiliary;
pub(crate) mod compact;
pub(crate) mod dead_writers;
pub(crate) mod loss;
pub(crate) mod mark;
pub(crate) mod repack;
pub(crate) mod request;
mod run;
pub(crate) mod statistics;

use std::collections::{BTreeSet, HashSet};

use crate::error::{Error, Result};
use crate::format::index::write_segment;
use crate::format::manifest::Manifest;
use crate::format::pack::Directory;
use crate::gc::loss::Evidence;
use crate::gc::mark::Marks;
use crate::gc::request::{GcPlan, GcReport, GcRequest, Sizes};
#[cfg(feature = "hostile")]
pub(crate) use crate::gc::run::Waits;
use crate::id::{PackId, SegmentId};
use crate::progress::job::{JobProgress, NoProgress, check_cancelled};
use crate::repository::Repository;
use crate::store::ObjectKind;
use crate::writers::emergency_space::with_room;
use crate::writers::lease;
use crate::writers::lease::{Lease, Work, WriterRecord};

/// The packs that gc is going to delete.
struct Chosen {
    /// Packs without any live data.
    dead: BTreeSet<PackId>,
    /// Packs that are mostly dead: their live data is moved first.
    sparse: BTreeSet<PackId>,
}

impl Chosen {
    /// All packs that gc is going to delete.
    fn doomed(&self) -> BTreeSet<PackId> {
        self.dead.union(&self.sparse).copied().collect()
    }
}

impl Repository {
    /// The plan of [`gc`](Self::gc) at this moment.
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

    /// Frees the space of data that no snapshot refers to.
    pub fn gc(&self, request: GcRequest) -> Result<GcReport> {
        self.gc_with_progress(request, &NoProgress::default())
    }

    /// [`gc`](Self::gc) with progress and cancellation: after a cancellation some space is freed, and the next run
    /// continues.
    pub fn gc_with_progress(&self, request: GcRequest, progress: &dyn JobProgress) -> Result<GcReport> {
        let lease = with_room(&self.vault, || Lease::take(&self.vault, Work::Gc, None))?;
        let result = self.gc_under(&lease, request, progress);
        match &result {
            Err(_) => drop(lease.release()),
            Ok(_) => lease.release()?,
        }
        result
    }

    /// All snapshots that are not forgotten. An unreadable one is an error, so that gc deletes nothing.
    pub(crate) fn all_snapshots(&self) -> Result<Vec<Manifest>> {
        let (snapshots, errors) = self.snapshots()?;
        all_readable(snapshots, errors)
    }

    /// The same, including those that are being forgotten. A forget may be undone, so the data of a snapshot is kept as
    /// long as its object exists.
    fn stored_snapshots(&self) -> Result<Vec<Manifest>> {
        let (snapshots, errors) = self.stored_snapshots_except(&HashSet::new())?;
        all_readable(snapshots, errors)
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
                // Damaged packs are left to repair.
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
            // A pack with the copy of a live manifest is kept.
            let is_copy = marks.copies.contains(pack);
            // Rewriting a fully live pack frees nothing.
            if alive < total && alive * 100 <= total * u64::from(request.repack_below_percent) && !is_copy {
                chosen.sparse.insert(*pack);
            }
        }
        Ok(chosen)
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
}

/// The snapshots that were read; an error if any is unreadable.
fn all_readable(manifests: Vec<Manifest>, errors: Vec<Error>) -> Result<Vec<Manifest>> {
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
