//! Announcements of processes that commit no snapshot: readers that need stable data, and exclusive operations.

use crate::error::{Error, Result};
use crate::id::WriterId;
use crate::repository::Repository;
use crate::store::{Put, StoreError};
use crate::writers::lease::{
    LEASE_BYTES_MAX, Lease, Work, WriterRecord, forget_writer, is_dead, readable_writers, writer_name,
};

/// Prevents gc from deleting anything that it has not begun to delete, like an active backup, until it is
/// dropped.
pub struct GcPause<'a>(Option<Lease<'a>>);

impl Repository {
    /// Announces a reader, so that data that is removed meanwhile stays readable.
    pub fn pause_gc(&self) -> Result<GcPause<'_>> {
        Lease::take(&self.vault, Work::Backup, None).map(|lease| GcPause(Some(lease)))
    }
}

/// An exclusive operation, identified by its name. Gc waits for its holder, as for a backup.
///
/// Dropping it ends it. If its process dies, the next process that claims it, or gc, removes it.
pub struct Claim<'a>(Option<Lease<'a>>);

impl Repository {
    /// Announces `work` (for errors: "a push of a template") on `what`.
    ///
    /// # Errors
    /// [`Error::Locked`] if another process has announced the same.
    pub fn claim(&self, work: &'static str, what: &str) -> Result<Claim<'_>> {
        let mut record = WriterRecord::new(&self.vault, Work::Backup, None)?;
        record.writer = self.claim_id(what);
        let name = writer_name(record.writer);
        let bytes = serde_json::to_vec(&record).expect("a record is made of strings and numbers");
        for _ in 0..2 {
            if self.vault.put_sealed(&name, &bytes)? == Put::Created {
                let vault = &self.vault;
                return Ok(Claim(Some(Lease::new(vault, record))));
            }
            let (others, errors) = readable_writers(&self.vault)?;
            let Some(other) = others.into_iter().find(|other| other.writer == record.writer) else {
                match errors.into_iter().next() {
                    Some(error) => return Err(error),
                    // It ended meanwhile.
                    None => continue,
                }
            };
            if !is_dead(&self.vault, &other) {
                return Err(Error::Locked {
                    what: work,
                    who: format!("process {} on {}", other.process.process, other.process.host),
                });
            }
            forget_writer(&self.vault, &other)?;
        }
        Err(Error::Locked {
            what: work,
            who: "another process".to_owned(),
        })
    }

    /// The same for all processes with the same claim in this repository; the object name does not reveal it.
    fn claim_id(&self, what: &str) -> WriterId {
        let mut text = self.config().id.to_string().into_bytes();
        text.extend_from_slice(what.as_bytes());
        let hash = blake3::derive_key("holdfast 1 claim of work", &text);
        WriterId::from_bytes(std::array::from_fn(|place| hash[place]))
    }
}

impl GcPause<'_> {
    /// Puts a heartbeat of the reader, if the last one is old enough. A reader that was considered dead continues, but
    /// no longer prevents deletions.
    pub fn renew(&self) {
        if let Some(lease) = &self.0 {
            lease.renew().ok();
        }
    }
}

impl Claim<'_> {
    /// Puts a heartbeat, if the last one is old enough.
    pub fn renew(&self) {
        if let Some(lease) = &self.0 {
            lease.renew().ok();
        }
    }

    /// Whether the announcement still exists and is this process's own: a claim that was considered dead is
    /// void.
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
        // An object of another process in its place is not removed.
        if self.holds().unwrap_or(false)
            && let Some(lease) = self.0.take()
        {
            lease.release().ok();
        }
    }
}

impl Drop for GcPause<'_> {
    fn drop(&mut self) {
        // If it remains, the next gc after the end of this process removes it.
        if let Some(lease) = self.0.take() {
            lease.release().ok();
        }
    }
}
