//! Dead writers: gc prevents them from committing, and removes their records when none of their objects are
//! left.

use crate::check::scrub::ManifestCopies;
use crate::error::Result;
use crate::format::manifest::snapshot_name;
use crate::gc::request::GcReport;
use crate::repository::Repository;
use crate::store::{ObjectKind, Put};
use crate::writers::lease;
use crate::writers::lease::{Lease, WriterRecord};

pub(crate) const UNFINISHED_REASON: &str = "its backup did not come to its end";

impl Repository {
    /// Prevents dead writers from ever committing.
    pub(crate) fn revoke_dead_writers(&self, lease: &Lease<'_>, report: &mut GcReport) -> Result<Vec<WriterRecord>> {
        let mut dead = Vec::new();
        for record in lease::writers(&self.vault)? {
            if record.writer != lease.record.writer && lease::is_dead(&self.vault, &record) {
                let put = lease::revoke(&self.vault, &record)?;
                // A writer that an earlier run revoked is not reported again.
                if put == Put::Created || !lease::is_revoked(&self.vault, &record)? {
                    report.cleared_writers.push(record.describe());
                }
                dead.push(record);
            }
        }
        self.settle_moves(lease.record.writer, &dead)?;
        // From here on, before the decision what to delete, these writers can detect that they were considered dead.
        for record in &dead {
            if !self.is_kept(record)? {
                lease::forget_writer(&self.vault, record)?;
            }
        }
        self.settle_moves(lease.record.writer, &dead)?;
        lease::delete_orphaned_heartbeats(&self.vault)?;
        Ok(dead)
    }

    /// Replaces the claims of dead writers of exclusive operations.
    pub(crate) fn supersede(&self, lease: &Lease<'_>) -> Result<()> {
        // Repair must continue even if an announcement is damaged.
        let (mut dead, _) = lease::readable_writers(&self.vault)?;
        dead.retain(|record| {
            record.writer != lease.record.writer && record.is_exclusive() && lease::is_dead(&self.vault, record)
        });
        self.settle_moves(lease.record.writer, &dead)?;
        for record in &dead {
            lease::forget_writer(&self.vault, record)?;
        }
        self.settle_moves(lease.record.writer, &dead)
    }

    /// Whether the announcement of a dead writer is kept for now, in addition to the mark in place of its
    /// snapshot.
    fn is_kept(&self, record: &WriterRecord) -> Result<bool> {
        Ok(record.snapshot.is_some()
            && lease::is_certainly_dead(&self.vault, record)
            && lease::is_revoked(&self.vault, record)?)
    }

    /// Removes dead writers, and the marks in place of their snapshots that no writer can claim any more.
    ///
    /// If a pack still has the copy of such a snapshot, a record replaces the mark.
    pub(crate) fn clear_writers(&self, dead: &[WriterRecord], copies: &ManifestCopies) -> Result<()> {
        if dead.is_empty() {
            return Ok(());
        }
        let old_places = lease::old_objects(&self.vault, ObjectKind::Snapshot)?;
        for record in dead {
            let mark = match record.snapshot {
                Some(snapshot) if self.is_kept(record)? => Some(snapshot),
                _ => None,
            };
            if let Some(snapshot) = mark {
                if !old_places.contains(&snapshot) {
                    continue;
                }
                if let Some(copy) = copies.of(snapshot)
                    && !self.is_absent(copy)?
                {
                    self.record_never(snapshot, Some(copy), UNFINISHED_REASON)?;
                }
            }
            // Before the mark: a writer that commits nevertheless checks its announcement afterwards.
            lease::forget_writer(&self.vault, record)?;
            if let Some(snapshot) = mark {
                self.vault.store.delete(&snapshot_name(snapshot))?;
            }
        }
        Ok(())
    }

    pub(crate) fn other_writers(&self, lease: &Lease<'_>, dead: &[WriterRecord]) -> Result<Vec<WriterRecord>> {
        let mut writers = lease::writers(&self.vault)?;
        writers.retain(|record| {
            record.writer != lease.record.writer && dead.iter().all(|other| other.writer != record.writer)
        });
        Ok(writers)
    }
}
