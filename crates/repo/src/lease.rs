//! Writers at work.
//!
//! Whoever writes, or deletes, puts an object under `writers/` first and deletes it last. It is how gc knows whose packs are
//! not referred to *yet*. The object says who the writer is and which snapshot it is going to commit, so that a writer taken
//! for dead can be kept from ever committing: its place is taken by a mark. `docs/locking.md` has the whole argument.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::id::{SnapshotId, WriterId};
use crate::manifest::{MANIFEST_BYTES_MAX, encode_revoked, snapshot_name};
use crate::repository::{Repository, Vault};
use crate::store::{ObjectKind, ObjectName, Put, StoreError};
use crate::surroundings::{Liveness, ProcessIdentity};

const LEASE_BYTES_MAX: u64 = 64 << 10;

/// A writer that cannot be seen from here is taken for dead after this long: a week.
const UNSEEN_AGE_MS: i64 = 7 * 24 * 3600 * 1000;

/// The mark that keeps a writer from committing stays this long after the writer began: a month. That a process is gone is
/// certain only as far as a host can be believed; a host that was copied while it ran, say, is two.
const MARK_AGE_MS: i64 = 30 * 24 * 3600 * 1000;

/// What a writer does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Work {
    /// It makes a snapshot.
    Backup,
    /// It gives back space; only one does at a time.
    Gc,
    /// It mends; only one does at a time.
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

/// What a writer says of itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct WriterRecord {
    pub(crate) writer: WriterId,
    pub(crate) work: Work,
    /// The snapshot that it is going to commit.
    pub(crate) snapshot: Option<SnapshotId>,
    pub(crate) process: ProcessIdentity,
    pub(crate) time_ms: i64,
}

impl WriterRecord {
    /// A record of this process, under a new identity.
    pub(crate) fn new(vault: &Vault, work: Work, snapshot: Option<SnapshotId>) -> Result<Self> {
        Ok(Self {
            writer: WriterId::from_bytes(vault.surroundings.draw()?),
            work,
            snapshot,
            process: vault.surroundings.processes.this(),
            time_ms: (vault.surroundings.now_ms)(),
        })
    }

    /// Who and where, for people.
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

/// A writer's object, while it works.
///
/// Dropped without [`release`](Lease::release) it stays: the next gc finds that its process is gone.
pub(crate) struct Lease<'a> {
    vault: &'a Vault,
    pub(crate) record: WriterRecord,
}

impl<'a> Lease<'a> {
    /// Announces a writer. [`Error::Locked`] when its work is exclusive and somebody else is at such work.
    pub(crate) fn take(vault: &'a Vault, work: Work, snapshot: Option<SnapshotId>) -> Result<Self> {
        let record = WriterRecord::new(vault, work, snapshot)?;
        let bytes = serde_json::to_vec(&record).expect("a record is made of strings and numbers");
        let lease = Self { vault, record };
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

    /// Somebody else at work that only one may do, if this work is such.
    fn rival(&self) -> Result<Option<WriterRecord>> {
        if !self.record.work.is_exclusive() {
            return Ok(None);
        }
        // Everybody announces first and looks second, so of two that come at once at least one sees the other.
        let (others, errors) = readable_writers(self.vault)?;
        // What cannot be read may be a rival. Repair has to go on, because it is what clears it away.
        if let Some(error) = errors.into_iter().next().filter(|_| self.record.work != Work::Repair) {
            return Err(error);
        }
        Ok(others.into_iter().find(|other| {
            other.work.is_exclusive() && other.writer != self.record.writer && !is_dead(self.vault, other)
        }))
    }

    /// Whether the announcement is still there. A damaged one is removed by repair, and that of a writer that was taken for
    /// dead by gc, at the latest when the mark in the place of its snapshot goes; and then nobody spares what it refers to.
    pub(crate) fn is_announced(&self) -> Result<bool> {
        match self.vault.store.length(&writer_name(self.record.writer)) {
            Ok(_) => Ok(true),
            Err(StoreError::NotFound { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Ends the work.
    ///
    /// Gc waits for a writer whose object stays for as long as its process lives, so this tries twice.
    pub(crate) fn release(self) -> Result<()> {
        let (store, name) = (&self.vault.store, writer_name(self.record.writer));
        Ok(store.delete(&name).or_else(|_| store.delete(&name))?)
    }
}

/// Keeps gc from deleting what it has not begun to delete, as a backup at work does, until it is dropped.
pub struct GcPause<'a>(Option<Lease<'a>>);

impl Repository {
    /// Announces somebody at work who reads, so that what is forgotten meanwhile stays readable.
    pub fn pause_gc(&self) -> Result<GcPause<'_>> {
        Lease::take(&self.vault, Work::Backup, None).map(|lease| GcPause(Some(lease)))
    }
}

/// Work that only one does at a time, of those that call it the same. Gc waits for whoever does it, as for a backup.
///
/// Dropped, it is over. When its process dies, the next who claims it, or gc, takes it away.
pub struct Claim<'a>(Option<Lease<'a>>);

impl Repository {
    /// Announces `work` (for errors: "a push of a template") on `what`.
    ///
    /// # Errors
    /// [`Error::Locked`] when somebody else is at the same.
    pub fn claim(&self, work: &'static str, what: &str) -> Result<Claim<'_>> {
        let mut record = WriterRecord::new(&self.vault, Work::Backup, None)?;
        record.writer = self.claim_id(what);
        let name = writer_name(record.writer);
        let bytes = serde_json::to_vec(&record).expect("a record is made of strings and numbers");
        for _ in 0..2 {
            if self.vault.put_sealed(&name, &bytes)? == Put::Created {
                let vault = &self.vault;
                return Ok(Claim(Some(Lease { vault, record })));
            }
            let other: WriterRecord = match self.vault.get_sealed(&name, LEASE_BYTES_MAX) {
                // It ended while we looked.
                Err(Error::Store(StoreError::NotFound { .. })) => continue,
                other => {
                    serde_json::from_slice(&other?).map_err(|error| Error::damaged(&name, 0, error.to_string()))?
                }
            };
            if !is_dead(&self.vault, &other) {
                return Err(Error::Locked {
                    what: work,
                    who: format!("process {} on {}", other.process.process, other.process.host),
                });
            }
            self.vault.store.delete(&name)?;
        }
        Err(Error::Locked {
            what: work,
            who: "somebody else".to_owned(),
        })
    }

    /// The same for everybody who claims the same here, and for whoever sees the names in the store without meaning.
    fn claim_id(&self, what: &str) -> WriterId {
        let mut text = self.config().id.to_string().into_bytes();
        text.extend_from_slice(what.as_bytes());
        let hash = blake3::derive_key("holdfast 1 claim of work", &text);
        WriterId::from_bytes(std::array::from_fn(|place| hash[place]))
    }
}

impl Claim<'_> {
    /// Whether the announcement is still there, and ours: one that was taken for dead holds nothing any more.
    pub fn holds(&self) -> Result<bool> {
        let Some(lease) = &self.0 else { return Ok(false) };
        let name = writer_name(lease.record.writer);
        match lease.vault.get_sealed(&name, LEASE_BYTES_MAX) {
            Ok(bytes) => {
                let record: WriterRecord =
                    serde_json::from_slice(&bytes).map_err(|error| Error::damaged(&name, 0, error.to_string()))?;
                Ok(record.process == lease.record.process && record.time_ms == lease.record.time_ms)
            }
            Err(Error::Store(StoreError::NotFound { .. })) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        // What somebody else has in its place by now is his.
        if self.holds().unwrap_or(false)
            && let Some(lease) = self.0.take()
        {
            lease.release().ok();
        }
    }
}

impl Drop for GcPause<'_> {
    fn drop(&mut self) {
        // Where it stays, the next gc after this process has ended takes it away.
        if let Some(lease) = self.0.take() {
            lease.release().ok();
        }
    }
}

/// All writers that announced themselves and have not ended; one that cannot be read is an error.
pub(crate) fn writers(vault: &Vault) -> Result<Vec<WriterRecord>> {
    let (records, errors) = readable_writers(vault)?;
    errors.into_iter().next().map_or(Ok(records), Err)
}

/// All writers that can be read; and the errors of those that cannot.
fn readable_writers(vault: &Vault) -> Result<(Vec<WriterRecord>, Vec<Error>)> {
    let (mut records, mut errors) = (Vec::new(), Vec::new());
    for name in vault.names(ObjectKind::Writer)? {
        let read = vault.get_sealed(&name, LEASE_BYTES_MAX).and_then(|bytes| {
            serde_json::from_slice(&bytes).map_err(|error| Error::damaged(&name, 0, error.to_string()))
        });
        match read {
            Ok(record) => records.push(record),
            // It ended while we looked.
            Err(Error::Store(StoreError::NotFound { .. })) => {}
            Err(error) if error.is_about_one_object() => errors.push(error),
            Err(error) => return Err(error),
        }
    }
    Ok((records, errors))
}

/// Whether nobody but `writer` is at work, as far as can be read.
pub(crate) fn is_alone(vault: &Vault, writer: WriterId) -> Result<bool> {
    let (records, errors) = readable_writers(vault)?;
    Ok(errors.is_empty() && records.iter().all(|record| record.writer == writer))
}

/// Whether anybody is at work beside a repair of this process; who cannot be read counts.
pub(crate) fn is_anybody_else_at_work(vault: &Vault) -> Result<bool> {
    let (records, errors) = readable_writers(vault)?;
    let this = vault.surroundings.processes.this();
    let is_ours = |record: &WriterRecord| record.work == Work::Repair && record.process == this;
    let mut others = records.iter().filter(|record| !is_ours(record));
    Ok(!errors.is_empty() || others.any(|record| !is_dead(vault, record)))
}

/// Whether a writer has certainly stopped, or is so old and far away that it is taken for dead.
pub(crate) fn is_dead(vault: &Vault, record: &WriterRecord) -> bool {
    match vault.surroundings.processes.liveness(&record.process) {
        Liveness::Alive => false,
        Liveness::Dead => true,
        Liveness::Unknown => (vault.surroundings.now_ms)().saturating_sub(record.time_ms) > UNSEEN_AGE_MS,
    }
}

/// Whether a writer has stopped, beyond doubt.
pub(crate) fn is_certainly_dead(vault: &Vault, record: &WriterRecord) -> bool {
    vault.surroundings.processes.liveness(&record.process) == Liveness::Dead
}

/// Whether the mark in the place of a dead writer's snapshot has to stay for now, and the writer's record beside it.
pub(crate) fn is_mark_young(vault: &Vault, record: &WriterRecord) -> bool {
    (vault.surroundings.now_ms)().saturating_sub(record.time_ms) <= MARK_AGE_MS
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

/// Makes sure that a writer never commits, unless it has already.
///
/// This is safe even for a writer that is alive: it is told when it tries.
pub(crate) fn revoke(vault: &Vault, record: &WriterRecord) -> Result<Put> {
    match record.snapshot {
        Some(snapshot) => vault.put_sealed(&snapshot_name(snapshot), encode_revoked()),
        None => Ok(Put::Created),
    }
}

/// Forgets a writer that was revoked, or has committed.
pub(crate) fn forget_writer(vault: &Vault, record: &WriterRecord) -> Result<()> {
    Ok(vault.store.delete(&writer_name(record.writer))?)
}
