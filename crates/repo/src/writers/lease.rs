//! Leases of writers.
//!
//! Every process that writes or deletes puts an object under `writers/` first and deletes it last, so that gc knows
//! whose packs are not referenced *yet*. The object names the writer and the snapshot that it is going to commit, so
//! that a writer considered dead can be prevented from ever committing: a mark is put in place of its snapshot.
//! `docs/locking.md` has the full argument.
//!
//! An active writer puts a new object `writers/<writer>.<number>` every half hour, a *heartbeat*. The age of the last
//! one, by the clock of the store, is how long the writer has been silent. Clocks of hosts are not used.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::environment::{Liveness, ProcessIdentity};
use crate::error::{Error, Result};
use crate::format::manifest::{MANIFEST_BYTES_MAX, encode_revoked, snapshot_name};
use crate::id::{SnapshotId, WriterId};
use crate::store::{ObjectKind, ObjectName, Put, StoreError};
use crate::vault::Vault;

pub(crate) const LEASE_BYTES_MAX: u64 = 64 << 10;

/// A writer whose process is not visible is considered dead after this silence: a week.
const SILENT_AGE: Duration = Duration::from_secs(7 * 24 * 3600);

/// The same for a writer of an earlier release, which puts no heartbeats: a month.
const UNRENEWED_AGE: Duration = Duration::from_secs(30 * 24 * 3600);

/// The mark that prevents a writer from committing is kept for a month after it was put, however long the writer was
/// silent before: it may resume and try to commit. A process is known to have ended only if its host can be trusted; a
/// host that was cloned while it ran, for example, exists twice.
const MARK_AGE: Duration = Duration::from_secs(30 * 24 * 3600);

/// Interval of heartbeats: half an hour, by the writer's clock.
const HEARTBEAT_MS: u64 = 30 * 60 * 1000;

/// Number of heartbeats of a writer that exist at a time: a listing that is made while one is added and one is
/// deleted always contains another.
const HEARTBEAT_COUNT: u64 = 2;

/// The kind of work of a writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Work {
    /// It creates a snapshot.
    Backup,
    /// It frees space; only one runs at a time.
    Gc,
    /// A repair; only one runs at a time.
    Repair,
    /// It removes a snapshot. This needs no lease: it is announced among the protections.
    Forget,
}

impl Work {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Backup => "a backup",
            Self::Gc => "gc",
            Self::Repair => "repair",
            Self::Forget => "forget",
        }
    }

    /// Whether only one writer at a time may do this.
    fn is_exclusive(self) -> bool {
        match self {
            Self::Backup | Self::Forget => false,
            Self::Gc | Self::Repair => true,
        }
    }
}

/// The announcement of a writer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct WriterRecord {
    pub(crate) writer: WriterId,
    pub(crate) work: Work,
    /// The snapshot that it is going to commit.
    pub(crate) snapshot: Option<SnapshotId>,
    pub(crate) process: ProcessIdentity,
    pub(crate) time_ms: i64,
    /// Whether it puts heartbeats. Earlier releases do not.
    #[serde(default)]
    renews: bool,
    /// How long it had been silent when it was read, by the clock of the store, if known.
    #[serde(skip)]
    silent: Option<Duration>,
}

impl WriterRecord {
    /// A record of this process, with a new id.
    pub(crate) fn new(vault: &Vault, work: Work, snapshot: Option<SnapshotId>) -> Result<Self> {
        Ok(Self {
            writer: WriterId::from_bytes(vault.environment.draw()?),
            work,
            snapshot,
            process: vault.environment.processes.this(),
            time_ms: (vault.environment.now_ms)(),
            renews: true,
            silent: None,
        })
    }

    /// Whether only one writer at a time may do its work.
    pub(crate) fn is_exclusive(&self) -> bool {
        self.work.is_exclusive()
    }

    /// Sets how long the writer has been silent.
    pub(crate) fn silent_for(mut self, silent: Option<Duration>) -> Self {
        self.silent = silent;
        self
    }

    /// Process and host, for messages.
    pub(crate) fn describe(&self) -> String {
        format!(
            "{} by process {} on {}",
            self.work.name(),
            self.process.process,
            self.process.host
        )
    }
}

pub(crate) fn writer_name(writer: WriterId) -> ObjectName {
    ObjectName::new(ObjectKind::Writer, &writer.to_string()).expect("hex digits are a name")
}

fn heartbeat_name(writer: WriterId, number: u64) -> ObjectName {
    ObjectName::new(ObjectKind::Writer, &format!("{writer}.{number:016x}")).expect("hex digits and a dot are a name")
}

/// The writer of a heartbeat object.
pub(crate) fn heartbeat_writer(name: &ObjectName) -> Option<WriterId> {
    let (writer, number) = name.name().split_once('.')?;
    let writer: WriterId = writer.parse().ok()?;
    let number = u64::from_str_radix(number, 16).ok()?;
    (heartbeat_name(writer, number) == *name).then_some(writer)
}

/// The announcement of an active writer.
///
/// If it is dropped without [`release`](Lease::release), the object remains, and the next gc finds that its
/// process has ended.
pub(crate) struct Lease<'a> {
    pub(crate) vault: &'a Vault,
    pub(crate) record: WriterRecord,
    /// The time of the last heartbeat, by the clock of this host.
    heartbeat_ms: AtomicI64,
    heartbeat_count: AtomicU64,
}

impl<'a> Lease<'a> {
    pub(crate) fn new(vault: &'a Vault, record: WriterRecord) -> Self {
        Self {
            vault,
            heartbeat_ms: AtomicI64::new(record.time_ms),
            heartbeat_count: AtomicU64::new(0),
            record,
        }
    }

    /// Announces a writer. [`Error::Locked`] if its work is exclusive and another process does exclusive
    /// work.
    pub(crate) fn take(vault: &'a Vault, work: Work, snapshot: Option<SnapshotId>) -> Result<Self> {
        let record = WriterRecord::new(vault, work, snapshot)?;
        let bytes = serde_json::to_vec(&record).expect("a record is made of strings and numbers");
        let lease = Self::new(vault, record);
        let announced = vault.put_sealed(&writer_name(lease.record.writer), &bytes);
        match announced.and_then(|_| lease.rival()) {
            Ok(None) => Ok(lease),
            Ok(Some(rival)) => {
                lease.release()?;
                Err(Error::Locked {
                    what: rival.work.name(),
                    who: rival.describe(),
                })
            }
            Err(error) => {
                // A put that failed may have taken effect.
                drop(lease.release());
                Err(error)
            }
        }
    }

    /// Another process with exclusive work, if this work is exclusive.
    fn rival(&self) -> Result<Option<WriterRecord>> {
        if !self.record.work.is_exclusive() {
            return Ok(None);
        }
        // All announce first and check second, so of two that start at the same time at least one sees the
        // other.
        let (others, errors) = readable_writers(self.vault)?;
        // An unreadable announcement may be that of a rival. Repair must continue, because it removes such
        // objects.
        if let Some(error) = errors.into_iter().next().filter(|_| self.record.work != Work::Repair) {
            return Err(error);
        }
        Ok(others.into_iter().find(|other| {
            other.work.is_exclusive() && other.writer != self.record.writer && !is_dead(self.vault, other)
        }))
    }

    /// Whether the announcement still exists. Repair removes a damaged one; gc removes that of a writer considered
    /// dead, at the latest with the mark in place of its snapshot; after that, gc no longer spares what the writer
    /// refers to.
    pub(crate) fn is_announced(&self) -> Result<bool> {
        match self.vault.store.length(&writer_name(self.record.writer)) {
            Ok(_) => Ok(true),
            Err(StoreError::NotFound { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// An error if the announcement is gone: the writer was considered dead, and must not delete or commit anything any
    /// more.
    pub(crate) fn check(&self) -> Result<()> {
        if self.is_announced()? {
            return Ok(());
        }
        Err(Error::Revoked {
            writer: self.record.writer,
        })
    }

    /// Puts a heartbeat, if the last one is old enough. To be called as often as work progresses.
    ///
    /// A failed heartbeat is retried later. [`Error::Revoked`] if the writer was considered dead meanwhile.
    pub(crate) fn renew(&self) -> Result<()> {
        let now_ms = (self.vault.environment.now_ms)();
        if now_ms.abs_diff(self.heartbeat_ms.load(Ordering::Relaxed)) < HEARTBEAT_MS {
            return Ok(());
        }
        self.heartbeat_ms.store(now_ms, Ordering::Relaxed);
        match self.check() {
            Err(error @ Error::Revoked { .. }) => return Err(error),
            Err(_) => return Ok(()),
            Ok(()) => {}
        }
        let number = self.heartbeat_count.load(Ordering::Relaxed);
        let record = WriterRecord {
            time_ms: now_ms,
            ..self.record.clone()
        };
        let bytes = serde_json::to_vec(&record).expect("a record is made of strings and numbers");
        if self
            .vault
            .put_sealed(&heartbeat_name(self.record.writer, number), &bytes)
            .is_ok()
        {
            self.heartbeat_count.store(number + 1, Ordering::Relaxed);
            if let Some(old) = number.checked_sub(HEARTBEAT_COUNT) {
                // Remaining heartbeats are deleted with the announcement.
                self.vault.store.delete(&heartbeat_name(self.record.writer, old)).ok();
            }
        }
        Ok(())
    }

    /// Ends the lease.
    ///
    /// Gc waits for a writer whose object exists as long as its process lives, so the deletion is tried
    /// twice.
    pub(crate) fn release(self) -> Result<()> {
        let (store, name) = (&self.vault.store, writer_name(self.record.writer));
        let count = self.heartbeat_count.load(Ordering::Relaxed);
        for number in count.saturating_sub(HEARTBEAT_COUNT)..count {
            // Gc removes a remaining one.
            store.delete(&heartbeat_name(self.record.writer, number)).ok();
        }
        Ok(store.delete(&name).or_else(|_| store.delete(&name))?)
    }
}

/// All announced writers that have not ended; an unreadable announcement is an error.
pub(crate) fn writers(vault: &Vault) -> Result<Vec<WriterRecord>> {
    let (records, errors) = readable_writers(vault)?;
    errors.into_iter().next().map_or(Ok(records), Err)
}

/// All writers with readable announcements, and how long they have been silent; and the errors of the others.
pub(crate) fn readable_writers(vault: &Vault) -> Result<(Vec<WriterRecord>, Vec<Error>)> {
    let (mut names, mut beats) = (Vec::new(), HashMap::<WriterId, Duration>::new());
    vault.store.ages(ObjectKind::Writer, &mut |name, age| {
        match (heartbeat_writer(&name), age) {
            (None, _) => names.push((name, age)),
            (Some(writer), Some(age)) => {
                let latest = beats.entry(writer).or_insert(age);
                *latest = age.min(*latest);
            }
            (Some(_), None) => {}
        }
        Ok(())
    })?;
    names.sort_unstable();
    let (mut records, mut errors) = (Vec::new(), Vec::new());
    for (name, age) in names {
        let read = vault.get_sealed(&name, LEASE_BYTES_MAX).and_then(|bytes| {
            serde_json::from_slice(&bytes).map_err(|error| Error::damaged(&name, 0, error.to_string()))
        });
        match read {
            Ok(record) => {
                let record: WriterRecord = record;
                let beat = beats.get(&record.writer).copied();
                let silent = age.map(|age| beat.map_or(age, |beat| beat.min(age)));
                records.push(record.silent_for(silent));
            }
            // It ended meanwhile.
            Err(Error::Store(StoreError::NotFound { .. })) => {}
            Err(error) if error.is_about_one_object() || error.is_unreadable() => errors.push(error),
            Err(error) => return Err(error),
        }
    }
    Ok((records, errors))
}

/// Whether no writer but `writer` is active, as far as announcements can be read.
pub(crate) fn is_only_writer(vault: &Vault, writer: WriterId) -> Result<bool> {
    let (records, errors) = readable_writers(vault)?;
    Ok(errors.is_empty() && records.iter().all(|record| record.writer == writer))
}

/// Whether any writer is active besides a repair of this process; unreadable announcements count.
pub(crate) fn is_another_writer_active(vault: &Vault) -> Result<bool> {
    let (records, errors) = readable_writers(vault)?;
    let this = vault.environment.processes.this();
    let is_own = |record: &WriterRecord| record.work == Work::Repair && record.process == this;
    let mut others = records.iter().filter(|record| !is_own(record));
    Ok(!errors.is_empty() || others.any(|record| !is_dead(vault, record)))
}

/// Whether a writer has certainly ended, or is not visible and was silent for so long that it is considered dead.
pub(crate) fn is_dead(vault: &Vault, record: &WriterRecord) -> bool {
    let limit = if record.renews { SILENT_AGE } else { UNRENEWED_AGE };
    match vault.environment.processes.liveness(&record.process) {
        Liveness::Alive => false,
        Liveness::Dead => true,
        Liveness::Unknown => record.silent.is_some_and(|silent| silent > limit),
    }
}

/// Whether a writer has certainly ended.
pub(crate) fn is_certainly_dead(vault: &Vault, record: &WriterRecord) -> bool {
    vault.environment.processes.liveness(&record.process) == Liveness::Dead
}

/// Snapshots whose objects of this kind were put more than a month ago: their processes have ended by now. The object
/// in place of a snapshot may be a mark.
pub(crate) fn old_objects(vault: &Vault, kind: ObjectKind) -> Result<HashSet<SnapshotId>> {
    let mut old = HashSet::new();
    vault.store.ages(kind, &mut |name, age| {
        if age.is_some_and(|age| age > MARK_AGE) {
            old.extend(name.name().parse::<SnapshotId>());
        }
        Ok(())
    })?;
    Ok(old)
}

/// Whether a mark is in place of the snapshot that a writer was going to commit.
pub(crate) fn is_revoked(vault: &Vault, record: &WriterRecord) -> Result<bool> {
    let Some(snapshot) = record.snapshot else {
        return Ok(false);
    };
    match vault.get_sealed(&snapshot_name(snapshot), MANIFEST_BYTES_MAX) {
        Ok(bytes) => Ok(bytes == encode_revoked()),
        Err(Error::Store(StoreError::NotFound { .. })) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Prevents a writer from ever committing, unless it has already.
///
/// This is safe even if the writer is alive: its commit fails.
pub(crate) fn revoke(vault: &Vault, record: &WriterRecord) -> Result<Put> {
    match record.snapshot {
        Some(snapshot) => vault.put_sealed(&snapshot_name(snapshot), encode_revoked()),
        None => Ok(Put::Created),
    }
}

/// Removes the records of a writer that was revoked, or has committed.
pub(crate) fn forget_writer(vault: &Vault, record: &WriterRecord) -> Result<()> {
    vault.store.delete(&writer_name(record.writer))?;
    delete_heartbeats(vault, |writer| Ok(writer == record.writer))
}

/// Deletes the heartbeats of writers without an announcement.
pub(crate) fn delete_orphaned_heartbeats(vault: &Vault) -> Result<()> {
    delete_heartbeats(vault, |writer| {
        let name = writer_name(writer);
        match vault.store.length(&name) {
            Ok(_) => Ok(false),
            Err(StoreError::NotFound { .. }) => Ok(true),
            Err(error) => Err(error.into()),
        }
    })
}

fn delete_heartbeats(vault: &Vault, is_meant: impl Fn(WriterId) -> Result<bool>) -> Result<()> {
    for name in vault.names(ObjectKind::Writer)? {
        if let Some(writer) = heartbeat_writer(&name)
            && is_meant(writer)?
        {
            vault.store.delete(&name)?;
        }
    }
    Ok(())
}
