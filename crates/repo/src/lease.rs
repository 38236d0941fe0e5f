//! Writers at work.
//!
//! Whoever writes, or deletes, puts an object under `writers/` first and deletes it last. It is how gc knows whose packs are
//! not referred to *yet*. The object says who the writer is and which snapshot it is going to commit, so that a writer taken
//! for dead can be kept from ever committing: its place is taken by a mark. `docs/locking.md` has the whole argument.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::id::{SnapshotId, WriterId};
use crate::manifest::{MANIFEST_BYTES_MAX, encode_revoked, snapshot_name};
use crate::repository::Vault;
use crate::store::{ObjectKind, ObjectName, StoreError};
use crate::surroundings::{Liveness, ProcessIdentity};

const LEASE_BYTES_MAX: u64 = 64 << 10;

/// A writer that cannot be seen from here is taken for dead after this long: a week.
const UNSEEN_AGE_MS: i64 = 7 * 24 * 3600 * 1000;

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
}

impl Work {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Backup => "a backup",
            Self::Gc => "gc",
            Self::Repair => "repair",
        }
    }

    /// Whether only one writer at a time may do this.
    fn is_exclusive(self) -> bool {
        match self {
            Self::Backup => false,
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
        let record = WriterRecord {
            writer: WriterId::from_bytes(vault.surroundings.draw()?),
            work,
            snapshot,
            process: vault.surroundings.processes.this(),
            time_ms: (vault.surroundings.now_ms)(),
        };
        let bytes = serde_json::to_vec(&record).expect("a record is made of strings and numbers");
        vault.put_sealed(&writer_name(record.writer), &bytes)?;
        let lease = Self { vault, record };
        if work.is_exclusive() {
            // Everybody announces first and looks second, so of two that come at once at least one sees the other.
            let (others, errors) = readable_writers(vault)?;
            // What cannot be read may be a rival. Repair has to go on, because it is what clears it away.
            if let Some(error) = errors.into_iter().next().filter(|_| work != Work::Repair) {
                lease.release()?;
                return Err(error);
            }
            let rival = others.into_iter().find(|other| {
                other.work.is_exclusive() && other.writer != lease.record.writer && !is_dead(vault, other)
            });
            if let Some(rival) = rival {
                lease.release()?;
                return Err(Error::Locked {
                    what: rival.work.name(),
                    who: rival.describe(),
                });
            }
        }
        Ok(lease)
    }

    /// Ends the work.
    pub(crate) fn release(self) -> Result<()> {
        Ok(self.vault.store.delete(&writer_name(self.record.writer))?)
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
pub(crate) fn revoke(vault: &Vault, record: &WriterRecord) -> Result<()> {
    if let Some(snapshot) = record.snapshot {
        vault.put_sealed(&snapshot_name(snapshot), encode_revoked())?;
    }
    Ok(())
}

/// Forgets a writer that was revoked, or has committed.
pub(crate) fn forget_writer(vault: &Vault, record: &WriterRecord) -> Result<()> {
    Ok(vault.store.delete(&writer_name(record.writer))?)
}
