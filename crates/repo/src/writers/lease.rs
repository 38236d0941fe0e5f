//! Leases of writers.
//!
//! Every process that writes or deletes puts an object under `writers/` first and deletes it last, so that gc knows
//! whose packs are not referred to *yet*. The object names the writer and the snapshot that it is going to commit, so
//! that a writer considered dead can be prevented from ever committing: a mark takes the place of its snapshot.
//! `docs/locking.md` has the full argument.
//!
//! An active writer puts a new object `writers/<writer>.<number>` every half hour, a *heartbeat*. The age of the last
//! one, by the clock of the store, is how long the writer has been silent. Clocks of hosts do not count.

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

/// A writer that cannot be seen from here is taken for dead when it was silent for longer: a week.
const SILENT_AGE: Duration = Duration::from_secs(7 * 24 * 3600);

/// The same of a writer of an earlier release, which is always silent: a month.
const UNRENEWED_AGE: Duration = Duration::from_secs(30 * 24 * 3600);

/// The mark that keeps a writer from committing stays for a month after it was put, however long the writer was silent before: it may wake and
/// commit. That a process is gone is certain only as far as a host can be believed; a host that was copied while it ran, say, is two.
const MARK_AGE: Duration = Duration::from_secs(30 * 24 * 3600);

/// How often a writer says that it is at work: each half an hour, by its own clock.
const HEARTBEAT_MS: u64 = 30 * 60 * 1000;

/// So many beats of a writer are there at once: a list that is made while one comes and one goes always has another.
const HEARTBEAT_COUNT: u64 = 2;

/// What a writer does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Work {
    /// It makes a snapshot.
    Backup,
    /// It gives back space; only one does at a time.
    Gc,
    /// A repair; only one runs at a time.
    Repair,
    /// It removes a snapshot. This needs no lease: it is announced where snapshots are protected.
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
    /// Whether it puts beats. Earlier releases do not.
    #[serde(default)]
    renews: bool,
    /// How long it was silent when it was read, by the clock of the store, where that is known.
    #[serde(skip)]
    silent: Option<Duration>,
}

impl WriterRecord {
    /// A record of this process, under a new identity.
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

    /// Whether its work is such that only one does at a time.
    pub(crate) fn is_exclusive(&self) -> bool {
        self.work.is_exclusive()
    }

    /// The record as it was put so long ago.
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

/// The writer that an object is a beat of.
pub(crate) fn heartbeat_writer(name: &ObjectName) -> Option<WriterId> {
    let (writer, number) = name.name().split_once('.')?;
    let writer: WriterId = writer.parse().ok()?;
    let number = u64::from_str_radix(number, 16).ok()?;
    (heartbeat_name(writer, number) == *name).then_some(writer)
}

/// A writer's object, while it works.
///
/// Dropped without [`release`](Lease::release) it stays: the next gc finds that its process is gone.
pub(crate) struct Lease<'a> {
    pub(crate) vault: &'a Vault,
    pub(crate) record: WriterRecord,
    /// When the last beat was put, by our own clock.
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

    /// Announces a writer. [`Error::Locked`] if its work is exclusive and another process does such work.
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
                // A put that failed may have happened.
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
        // All announce first and look second, so of two that start at once at least one sees the other.
        let (others, errors) = readable_writers(self.vault)?;
        // What cannot be read may be a rival. Repair has to go on, because it is what clears it away.
        if let Some(error) = errors.into_iter().next().filter(|_| self.record.work != Work::Repair) {
            return Err(error);
        }
        Ok(others.into_iter().find(|other| {
            other.work.is_exclusive() && other.writer != self.record.writer && !is_dead(self.vault, other)
        }))
    }

    /// Whether the announcement still exists. Repair removes a damaged one; gc removes that of a writer considered
    /// dead, at the latest with the mark in place of its snapshot; then nothing it refers to is spared any more.
    pub(crate) fn is_announced(&self) -> Result<bool> {
        match self.vault.store.length(&writer_name(self.record.writer)) {
            Ok(_) => Ok(true),
            Err(StoreError::NotFound { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// An error when the announcement is gone: the writer was taken for dead, and may delete and commit nothing any more.
    pub(crate) fn check(&self) -> Result<()> {
        if self.is_announced()? {
            return Ok(());
        }
        Err(Error::Revoked {
            writer: self.record.writer,
        })
    }

    /// Says that the writer is at work, if it has not said so for a while. To be called as often as work goes on.
    ///
    /// A beat that cannot be put is put later. [`Error::Revoked`] when the writer was taken for dead meanwhile.
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
                // What stays goes with the announcement.
                self.vault.store.delete(&heartbeat_name(self.record.writer, old)).ok();
            }
        }
        Ok(())
    }

    /// Ends the work.
    ///
    /// Gc waits for a writer whose object stays for as long as its process lives, so this tries twice.
    pub(crate) fn release(self) -> Result<()> {
        let (store, name) = (&self.vault.store, writer_name(self.record.writer));
        let count = self.heartbeat_count.load(Ordering::Relaxed);
        for number in count.saturating_sub(HEARTBEAT_COUNT)..count {
            // One that stays is cleared away by gc.
            store.delete(&heartbeat_name(self.record.writer, number)).ok();
        }
        Ok(store.delete(&name).or_else(|_| store.delete(&name))?)
    }
}

/// All writers that announced themselves and have not ended; one that cannot be read is an error.
pub(crate) fn writers(vault: &Vault) -> Result<Vec<WriterRecord>> {
    let (records, errors) = readable_writers(vault)?;
    errors.into_iter().next().map_or(Ok(records), Err)
}

/// All writers that can be read, with how long they have been silent; and the errors of those that cannot.
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
            // It ended while we looked.
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
    let is_ours = |record: &WriterRecord| record.work == Work::Repair && record.process == this;
    let mut others = records.iter().filter(|record| !is_ours(record));
    Ok(!errors.is_empty() || others.any(|record| !is_dead(vault, record)))
}

/// Whether a writer has certainly stopped, or cannot be seen and was silent for so long that it is taken for dead.
pub(crate) fn is_dead(vault: &Vault, record: &WriterRecord) -> bool {
    let limit = if record.renews { SILENT_AGE } else { UNRENEWED_AGE };
    match vault.environment.processes.liveness(&record.process) {
        Liveness::Alive => false,
        Liveness::Dead => true,
        Liveness::Unknown => record.silent.is_some_and(|silent| silent > limit),
    }
}

/// Whether a writer has stopped, beyond doubt.
pub(crate) fn is_certainly_dead(vault: &Vault, record: &WriterRecord) -> bool {
    vault.environment.processes.liveness(&record.process) == Liveness::Dead
}

/// Snapshots whose objects of this kind were put more than a month ago: the process that put one is gone by now. In the place of a
/// snapshot, the object may be a mark.
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

/// Whether the place of the snapshot that a writer was going to commit is taken by a mark.
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

/// Forgets a writer that was revoked, or has committed.
pub(crate) fn forget_writer(vault: &Vault, record: &WriterRecord) -> Result<()> {
    vault.store.delete(&writer_name(record.writer))?;
    delete_heartbeats(vault, |writer| Ok(writer == record.writer))
}

/// Deletes the beats of writers that have no announcement.
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
