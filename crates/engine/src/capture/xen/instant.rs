//! The pool's snapshot, which is removed in any case.
//!
//! Its name is `holdfast HOST PLACE RUN`. PLACE identifies the folder of locks on this host. The lock there excludes
//! other backups of the machine, so an existing snapshot with the same HOST and PLACE was left by a killed backup.
//! Other hosts of the same name, and other users, have another PLACE.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::error_text;
use holdfast_host::xapi::{BaseDisk, DiskForm, Pool, Reference, VirtualDisk, XapiResult, XenMachine, XenSnapshot};
use jiff::Timestamp;

use super::{XenBackupRequest, XenTransfer};
use crate::job::{Job, Result};
use crate::machine::lock::place_digits;

/// The prefix of Holdfast's snapshots, followed by a space.
pub(crate) const LABEL: &str = "holdfast";

fn prefix_of(request: &XenBackupRequest<'_>) -> String {
    prefix(&request.capture.host, &place_digits(request.capture.journal.as_ref()))
}

/// The prefix of snapshots created by backups of this host whose locks are at `place`.
pub(crate) fn prefix(host: &str, place: &str) -> String {
    format!("{LABEL} {host} {place} ")
}

/// Whether Holdfast created the snapshot of this name: a user may choose a similar name.
pub(crate) fn is_of_run(label: &str, prefix: &str) -> bool {
    let run = label.strip_prefix(prefix).unwrap_or_default();
    run.len() == 8 && run.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Removes the machine's snapshots that a killed backup of this host has left. The machine must be locked.
pub(super) fn clear_up(request: &XenBackupRequest<'_>, machine: &XenMachine, job: Job<'_>) -> Result<()> {
    let prefix = prefix_of(request);
    for snapshot in request.pool.snapshots_labelled(machine, &prefix)? {
        let label = snapshot.label.clone();
        if !is_of_run(&label, &prefix) {
            continue;
        }
        match remove_left(&request.pool, &snapshot) {
            Ok(()) => job.progress.note(&format!(
                "removed the snapshot {label:?}, which a killed backup had left"
            )),
            Err(error) => job.progress.warning(&format!(
                "the snapshot {label:?}, which a killed backup had left, cannot be removed: {}",
                error_text(&error)
            )),
        }
    }
    Ok(())
}

/// Removes a leftover snapshot. Its disks that are already marked to be kept stay: the backup had finished, and the
/// next one is compared with them.
pub(crate) fn remove_left(pool: &Arc<Pool>, snapshot: &XenSnapshot) -> XapiResult<()> {
    let kept: Vec<Reference> = pool.base_disks()?.into_iter().map(|disk| disk.reference).collect();
    pool.remove_snapshot(snapshot, &kept)
}

/// A snapshot of the pool.
pub(super) struct PoolSnapshot<'a> {
    pool: Arc<Pool>,
    /// A session that is not interrupted, for cleanup.
    cleaner: Arc<Pool>,
    machine: &'a str,
    snapshot: XenSnapshot,
    is_removed: bool,
    has_remains: bool,
    kept: Vec<Reference>,
    time: Timestamp,
    duration: Duration,
}

impl<'a> PoolSnapshot<'a> {
    /// Takes the snapshot. If this fails halfway, the incomplete snapshot is removed.
    pub(super) fn take(request: &XenBackupRequest<'a>, machine: &'a XenMachine, job: Job<'_>) -> Result<Self> {
        let label = format!("{}{:08x}", prefix_of(request), request.capture.run);
        job.progress.phase(
            &format!("taking a snapshot of {}", machine.summary.name),
            crate::Unit::Items,
        );
        let (start, time) = (job.clock.now(), (request.capture.now)());
        let taken = if request.with_memory {
            request.pool.take_checkpoint(machine, &label)
        } else {
            request.pool.take_snapshot(machine, &label)
        };
        let duration = job.clock.now().saturating_sub(start);
        match taken {
            Ok(mut snapshot) => {
                // The memory of a suspended machine is its own.
                snapshot.memory = snapshot.memory.filter(|_| request.with_memory);
                Ok(Self {
                    pool: Arc::clone(&request.pool),
                    cleaner: Arc::new(request.pool.for_cleanup()),
                    machine: &machine.summary.name,
                    snapshot,
                    is_removed: false,
                    has_remains: false,
                    kept: Vec::new(),
                    time,
                    duration,
                })
            }
            Err(error) => {
                remove_labelled(&request.pool, machine, &label, job);
                Err(error.into())
            }
        }
    }

    pub(super) fn time(&self) -> Timestamp {
        self.time
    }

    pub(super) fn duration(&self) -> Duration {
        self.duration
    }

    /// Whether it could not be removed, which a warning has reported.
    pub(super) fn has_remains(&self) -> bool {
        self.has_remains
    }

    /// The first of its disks that is a snapshot of none of `known`, or has another size.
    pub(super) fn disk_beside(&self, known: &[VirtualDisk]) -> Option<&VirtualDisk> {
        let is_known = |disk: &VirtualDisk| {
            let is_of = |live: &VirtualDisk| live.reference == disk.snapshot_of && live.size_bytes == disk.size_bytes;
            known.iter().any(|live| is_of(live) || live.reference == disk.reference)
        };
        self.snapshot.disks.iter().find(|disk| !is_known(disk))
    }

    /// The snapshot of a disk of the machine.
    pub(super) fn snapshot_of(&self, disk: &VirtualDisk) -> Option<&VirtualDisk> {
        let mut disks = self.snapshot.disks.iter();
        disks.find(|of| of.snapshot_of == disk.reference)
    }

    /// The pool's records of it, as an archive without disks.
    pub(super) fn records(&self) -> Result<Vec<u8>> {
        Ok(self.pool.metadata(&self.snapshot.reference)?)
    }

    /// Its memory and the size in bytes, if it has memory.
    pub(super) fn memory(&self) -> Option<(Box<dyn Read + Send>, u64)> {
        let memory = self.snapshot.memory.as_ref()?;
        let reader = PoolMemory {
            pool: Arc::clone(&self.pool),
            disk: memory.reference.clone(),
            left: memory.size_bytes,
            download: None,
        };
        Some((Box::new(reader), memory.size_bytes))
    }

    /// Keeps its disks for the next backup to compare with; with NBD only the metadata of their changes.
    ///
    /// Returns whether all are kept.
    pub(super) fn keep(&mut self, bases: &[Reference], way: XenTransfer, mark: &str, job: Job<'_>) -> bool {
        let pool = Arc::clone(&self.cleaner);
        for base in bases {
            if let Err(error) = pool.mark_base(base, mark) {
                job.progress.warning(&format!(
                    "the next backup of {} will read everything: the pool does not keep what it would be compared with: {}",
                    self.machine,
                    error_text(&error)
                ));
                return false;
            }
        }
        self.kept = bases.to_vec();
        self.remove(job);
        if way == XenTransfer::Nbd {
            for base in bases {
                if let Err(error) = pool.remove_data(base) {
                    job.progress.warning(&format!(
                        "the snapshot of a disk of {} takes more room than it needs until the next backup: {}",
                        self.machine,
                        error_text(&error)
                    ));
                }
            }
        }
        true
    }

    /// Removes the disks that earlier runs kept.
    pub(super) fn remove_older_or_warn(&self, mark: &str, job: Job<'_>) {
        if let Err(error) = self.remove_older(mark) {
            job.progress.warning(&format!(
                "what the backup before this was compared with stays in the pool, and is tried to be removed again by the next one: {}",
                error_text(&error)
            ));
        }
    }

    fn remove_older(&self, mark: &str) -> XapiResult<()> {
        let is_older = |disk: &&BaseDisk| disk.purpose == mark && !self.kept.contains(&disk.reference);
        for disk in self.cleaner.base_disks()?.iter().filter(is_older) {
            self.cleaner.remove_disk(&disk.reference)?;
        }
        Ok(())
    }

    /// Removes the snapshot; warns if that fails.
    pub(super) fn remove(&mut self, job: Job<'_>) {
        if self.is_removed {
            return;
        }
        self.is_removed = true;
        if let Err(error) = self.cleaner.remove_snapshot(&self.snapshot, &self.kept) {
            self.warn_of_remains(&error.into(), job);
        }
    }

    fn warn_of_remains(&mut self, error: &crate::Error, job: Job<'_>) {
        self.has_remains = true;
        job.progress.warning(&format!(
            "the snapshot {:?} of {} cannot be removed: {}; the next backup tries again",
            self.snapshot.label,
            self.machine,
            error_text(error)
        ));
    }
}

impl Drop for PoolSnapshot<'_> {
    /// A panic must not leave a snapshot behind.
    fn drop(&mut self) {
        if !self.is_removed && std::thread::panicking() {
            drop(self.cleaner.remove_snapshot(&self.snapshot, &[]));
        }
    }
}

/// Removes a snapshot whose reply was lost, or that is incomplete.
fn remove_labelled(pool: &Arc<Pool>, machine: &XenMachine, label: &str, job: Job<'_>) {
    let pool = Arc::new(pool.for_cleanup());
    let removed = pool.snapshots_labelled(machine, label).and_then(|snapshots| {
        let mut snapshots = snapshots.iter();
        snapshots.try_for_each(|snapshot| pool.remove_snapshot(snapshot, &[]))
    });
    if let Err(error) = removed {
        job.progress.warning(&format!(
            "whether there is a snapshot {label:?} of {} is not known: {}; the next backup removes it",
            machine.summary.name,
            error_text(&error)
        ));
    }
}

/// The memory of a snapshot, which is downloaded on the first read.
struct PoolMemory {
    pool: Arc<Pool>,
    disk: Reference,
    left: u64,
    download: Option<holdfast_host::xapi::Download>,
}

impl Read for PoolMemory {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        if count == 0 {
            return match self.download.take() {
                Some(download) => download.finish().map(|()| 0).map_err(std::io::Error::other),
                None => Ok(0),
            };
        }
        let download = if let Some(download) = &mut self.download {
            download
        } else {
            let begun = self.pool.download_disk(&self.disk, &DiskForm::Raw);
            self.download.insert(begun.map_err(std::io::Error::other)?)
        };
        let read = download.read(&mut buffer[..count])?;
        self.left -= read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::{is_of_run, prefix};

    /// Regression test: a user's snapshot named "holdfast vm before upgrade" was removed.
    #[test]
    fn snapshots_with_other_names_are_kept() {
        let place = prefix("vm", "01234567");
        assert!(is_of_run(&format!("{place}0123abcd"), &place));
        for run in ["before upgrade", "", "0123ABCD", "0123abcd ", "0123abcde"] {
            assert!(!is_of_run(&format!("{place}{run}"), &place), "{run}");
        }
        // Snapshots of another host of this name, or of another user, are kept, too: their backups may be running.
        for other in [
            prefix("vm", "01234568"),
            prefix("vm2", "01234567"),
            "holdfast vm ".to_owned(),
            String::new(),
        ] {
            assert!(!is_of_run(&format!("{other}0123abcd"), &place), "{other}");
        }
    }
}
