//! The journal of a target, locked while a receiver uses it.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::{Clock, LockOutcome, lock_file, sync_folder_of};
use holdfast_transfer::JournalState;

use crate::error::{Error, Result};
use crate::request::{InterruptedCopy, ReceiveRequest};

/// How long to wait for another receiver of the same target. One whose sender is gone ends in this time.
const LOCK_PATIENCE: Duration = Duration::from_secs(45);
const LOCK_INTERVAL: Duration = Duration::from_millis(100);

/// A journal that no other receiver uses.
pub(super) struct LockedJournal {
    path: PathBuf,
    file: File,
    _lock: LockOutcome,
}

impl LockedJournal {
    /// Locks the journal at `path`, and reads the state of an interrupted copy, unless it is to be deleted.
    pub(super) fn open(
        path: &Path,
        request: &ReceiveRequest,
        clock: &dyn Clock,
    ) -> Result<(Self, Option<JournalState>)> {
        let mut journal = Self::lock(path, &request.target, clock)?;
        if request.interrupted == InterruptedCopy::Delete {
            journal.clear()?;
        }
        let state = journal.state(request)?;
        Ok((journal, state))
    }

    /// Appends bytes, durably.
    pub(super) fn append(&self, bytes: &[u8]) -> Result<()> {
        let mut file = &self.file;
        let written = file.write_all(bytes).and_then(|()| file.sync_data());
        written.map_err(|source| self.failed("write", source))
    }

    pub(super) fn delete(self) -> Result<()> {
        let removed = std::fs::remove_file(&self.path).and_then(|()| sync_folder_of(&self.path));
        removed.map_err(|source| self.failed("delete", source))
    }

    fn lock(path: &Path, target: &Path, clock: &dyn Clock) -> Result<Self> {
        let failed = |action, source| Error::File {
            action,
            path: path.to_owned(),
            source,
        };
        let until = clock.now() + LOCK_PATIENCE;
        loop {
            let opened = OpenOptions::new().read(true).append(true).create(true).open(path);
            let file = opened.map_err(|source| failed("open", source))?;
            let lock = lock_file(&file).map_err(|source| failed("lock", source))?;
            // A receiver that has finished deletes its journal while others wait for the lock.
            let is_present = path.symlink_metadata().is_ok_and(|named| {
                file.metadata()
                    .is_ok_and(|ours| (ours.dev(), ours.ino()) == (named.dev(), named.ino()))
            });
            match lock {
                LockOutcome::HeldElsewhere if clock.now() >= until => {
                    return Err(Error::TargetBusy {
                        path: target.to_owned(),
                    });
                }
                LockOutcome::HeldElsewhere => clock.sleep(LOCK_INTERVAL),
                _ if !is_present => {}
                lock => {
                    let journal = Self {
                        path: path.to_owned(),
                        file,
                        _lock: lock,
                    };
                    sync_folder_of(path).map_err(|source| failed("make durable", source))?;
                    return Ok(journal);
                }
            }
        }
    }

    fn failed(&self, action: &'static str, source: std::io::Error) -> Error {
        Error::File {
            action,
            path: self.path.clone(),
            source,
        }
    }

    /// The state of an interrupted copy. An entry that was cut off is removed, and the rest is durable afterwards.
    fn state(&mut self, request: &ReceiveRequest) -> Result<Option<JournalState>> {
        let mut bytes = Vec::new();
        let read = self
            .file
            .seek(SeekFrom::Start(0))
            .and_then(|_| self.file.read_to_end(&mut bytes));
        read.map_err(|source| self.failed("read", source))?;
        let state = JournalState::decode(&bytes).map_err(|error| Error::Journal {
            path: self.path.clone(),
            reason: error.to_string(),
        })?;
        let valid_bytes = state.as_ref().map_or(0, |state| state.valid_bytes);
        let cut = self.file.set_len(valid_bytes).and_then(|()| self.file.sync_all());
        cut.map_err(|source| self.failed("shorten", source))?;
        if let Some(state) = &state
            && state.copy.layout.size_bytes() != request.size_bytes
        {
            return Err(Error::OtherSize {
                path: request.target.clone(),
                found_bytes: state.copy.layout.size_bytes(),
                size_bytes: request.size_bytes,
            });
        }
        Ok(state)
    }

    pub(super) fn clear(&mut self) -> Result<()> {
        let cleared = self.file.set_len(0).and_then(|()| self.file.sync_all());
        cleared.map_err(|source| self.failed("shorten", source))
    }

    /// Deletes a journal without a state, before an error is returned.
    pub(super) fn discard_without(&self, state: Option<&JournalState>) {
        if state.is_none() {
            // The error that follows matters more.
            std::fs::remove_file(&self.path).ok();
        }
    }
}
