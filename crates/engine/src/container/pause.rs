//! The pause of a container of runc, so that a process that is killed leaves no container paused.
//!
//! Two files in the runtime folder of the container:
//! - `pause.lock` is locked by the process that pauses, and by runc and CRIU, which inherit the lock: CRIU freezes again
//!   what is resumed before its end. The file keeps its name, so there is one pause at a time.
//! - `paused` is the note: what is paused. If there is a note and the lock is free, all of these processes have ended,
//!   and the worker of the container resumes it.

use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use holdfast_block::{FileLock, LockOutcome, lock_file};
use holdfast_host::Tools;
use serde::{Deserialize, Serialize};

use super::place::ContainerPlace;
use super::runtime::RuntimeRequest;
use crate::job::error::ContainerError;
use crate::job::{Error, Result};

/// Limit of a note.
const NOTE_BYTES_MAX: u64 = 64 << 10;
/// What runc calls a container whose processes are frozen.
const PAUSED: &str = "paused";

/// What is needed to resume the container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredPause {
    runc: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    root: Option<PathBuf>,
    id: String,
}

/// A container whose pause has ended, or could not be ended.
pub(super) struct EndedPause {
    /// Its name for runc.
    pub(super) id: String,
    pub(super) result: Result<()>,
}

/// The right to pause the container of a runtime. The note of a pause outlives it, unless it is
/// [resolved](Self::resolve).
pub(super) struct PauseLock {
    note: PathBuf,
    file: File,
    _lock: FileLock,
}

impl PauseLock {
    /// Takes the lock; none if another process has it.
    ///
    /// # Errors
    /// The container is not mounted, or the lock cannot be created.
    pub(super) fn take(place: &ContainerPlace) -> Result<Option<Self>> {
        let path = place.pause_lock();
        let opened = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path);
        let file = match opened {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(ContainerError::NotMounted {
                    container: place.folder.clone(),
                }
                .into());
            }
            opened => opened,
        };
        let failed = |source| Error::File {
            action: "lock",
            path: path.clone(),
            source,
        };
        let file = file.map_err(failed)?;
        match lock_file(&file).map_err(failed)? {
            LockOutcome::Locked(lock) => Ok(Some(Self {
                note: place.pause_note(),
                file,
                _lock: lock,
            })),
            LockOutcome::HeldElsewhere => Ok(None),
            LockOutcome::Unsupported => Err(failed(ErrorKind::Unsupported.into())),
        }
    }

    /// Writes the note, before the pause. Child processes inherit the lock from now on.
    pub(super) fn note(&self, runtime: &RuntimeRequest<'_>) -> Result<()> {
        let stored = StoredPause {
            runc: runtime.runc.clone(),
            root: runtime.root.clone(),
            id: runtime.id.clone(),
        };
        let text = serde_json::to_vec(&stored).expect("the paths were checked to be UTF-8");
        let partial = self.note.with_extension("new");
        // The folder does not survive the host, so nothing is synced.
        rustix::io::fcntl_setfd(&self.file, rustix::io::FdFlags::empty())
            .map_err(std::io::Error::from)
            .and_then(|()| File::create(&partial)?.write_all(&text))
            .and_then(|()| std::fs::rename(&partial, &self.note))
            .map_err(|source| Error::File {
                action: "write",
                path: self.note.clone(),
                source,
            })
    }

    /// Deletes the note: nothing is paused.
    pub(super) fn resolve(&self) {
        std::fs::remove_file(&self.note).ok();
    }

    /// Resumes the container of the note, which another process has left. None if there is no note, or nothing was
    /// paused.
    pub(super) fn end_abandoned(&self, tools: &dyn Tools) -> Option<EndedPause> {
        let stored = load(&self.note)?;
        let runtime = RuntimeRequest {
            id: stored.id.clone(),
            root: stored.root,
            runc: stored.runc,
            criu: "criu".to_owned(),
            tools,
        };
        let resumed = runtime.resume();
        let state = match runtime.state() {
            Ok(state) => state,
            // It may still be paused: the note is kept.
            Err(error) => {
                return Some(EndedPause {
                    id: stored.id,
                    result: Err(error),
                });
            }
        };
        if state.is_some_and(|state| state.status == PAUSED) {
            return resumed.is_err().then_some(EndedPause {
                id: stored.id,
                result: resumed,
            });
        }
        self.resolve();
        resumed.is_ok().then_some(EndedPause {
            id: stored.id,
            result: Ok(()),
        })
    }
}

fn load(note: &Path) -> Option<StoredPause> {
    let mut text = Vec::new();
    let file = File::open(note).ok()?;
    file.take(NOTE_BYTES_MAX).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

/// Resumes the container that a process has paused that has ended. None if there is none.
pub(super) fn end_abandoned_pause(place: &ContainerPlace, tools: &dyn Tools) -> Option<EndedPause> {
    if !place.pause_note().exists() {
        return None;
    }
    PauseLock::take(place).ok()??.end_abandoned(tools)
}

/// Whether a process runs that has paused the container of a runtime.
pub(super) fn is_paused_by_process(place: &ContainerPlace) -> bool {
    // A query, so that a process that pauses now is not refused.
    let is_held = || File::open(place.pause_lock()).and_then(|file| holdfast_block::is_locked(&file));
    place.pause_note().exists() && is_held().unwrap_or(false)
}

/// Whether runc says that the container is paused, or does not say that it is not.
pub(super) fn may_be_paused(runtime: &RuntimeRequest<'_>) -> bool {
    match runtime.state() {
        Ok(state) => state.is_some_and(|state| state.status == PAUSED),
        Err(_) => true,
    }
}
