//! The note of a pause: who has paused a container of runc, so that a process that was killed leaves none paused.
//!
//! The note is a file in the runtime folder of the container, locked by the process that has paused, and by runc and CRIU,
//! which inherit the lock: CRIU freezes again what is resumed before its end. If the lock is free, all of them have
//! ended, and the worker of the container resumes it.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use holdfast_block::{FileLock, LockOutcome, lock_file};
use holdfast_host::Tools;
use serde::{Deserialize, Serialize};

use super::place::ContainerPlace;
use super::runtime::RuntimeRequest;
use crate::job::{Error, Result};

/// Limit of a note.
const NOTE_BYTES_MAX: u64 = 64 << 10;

/// What is needed to resume the container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StoredPause {
    runc: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    root: Option<PathBuf>,
    pub(super) id: String,
}

/// The note of this process. It is deleted on drop.
pub(super) struct PauseNote {
    path: PathBuf,
    /// Open, and inherited by child processes.
    _file: File,
    _lock: Option<FileLock>,
    is_kept: bool,
}

impl PauseNote {
    /// Writes the note, before the pause.
    pub(super) fn write(place: &ContainerPlace, runtime: &RuntimeRequest<'_>) -> Result<Self> {
        let path = place.pause_note();
        let stored = StoredPause {
            runc: runtime.runc.clone(),
            root: runtime.root.clone(),
            id: runtime.id.clone(),
        };
        let text = serde_json::to_vec(&stored).expect("strings are valid JSON");
        // It is locked before it has its name: it is never found without its lock.
        let partial = path.with_extension("new");
        let write = || {
            // The folder does not survive the host, so nothing is synced.
            let mut file = File::create(&partial)?;
            file.write_all(&text)?;
            let lock = match lock_file(&file)? {
                LockOutcome::Locked(lock) => Some(lock),
                LockOutcome::Unsupported | LockOutcome::HeldElsewhere => None,
            };
            rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty())?;
            std::fs::rename(&partial, &path)?;
            Ok((file, lock))
        };
        let (file, lock) = write().map_err(|source| Error::File {
            action: "write",
            path: path.clone(),
            source,
        })?;
        Ok(Self {
            path,
            _file: file,
            _lock: lock,
            is_kept: false,
        })
    }

    /// Leaves the note to the worker: the container could not be resumed.
    pub(super) fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for PauseNote {
    fn drop(&mut self) {
        if !self.is_kept {
            std::fs::remove_file(&self.path).ok();
        }
    }
}

/// The note at `path`, if the process that wrote it has ended.
pub(super) fn abandoned_pause(path: &Path) -> Option<(StoredPause, FileLock)> {
    let mut file = File::options().read(true).write(true).open(path).ok()?;
    let LockOutcome::Locked(lock) = lock_file(&file).ok()? else {
        return None;
    };
    let mut text = Vec::new();
    (&mut file).take(NOTE_BYTES_MAX).read_to_end(&mut text).ok()?;
    Some((serde_json::from_slice(&text).ok()?, lock))
}

/// Resumes the container of a note whose process has ended. Returns its name.
pub(super) fn end_abandoned_pause(path: &Path, tools: &dyn Tools) -> Option<std::result::Result<String, String>> {
    let (stored, _lock) = abandoned_pause(path)?;
    let root = stored.root.as_ref().map(|root| root.display().to_string());
    let ask = |verb: &str| {
        let mut words: Vec<&str> = Vec::new();
        if let Some(root) = &root {
            words.extend(["--root", root]);
        }
        words.extend([verb, &stored.id]);
        tools.ask(&stored.runc, &words)
    };
    let resumed = match ask("resume") {
        Ok(answer) if answer.is_success => Ok(stored.id.clone()),
        Ok(answer) => Err(answer.stderr.trim().to_owned()),
        Err(error) => Err(holdfast_block::error_text(&error)),
    };
    // It may have ended, or run.
    let is_paused = ask("state").is_ok_and(|answer| answer.is_success && answer.output.contains("\"paused\""));
    if resumed.is_ok() || !is_paused {
        std::fs::remove_file(path).ok();
    }
    if resumed.is_err() && !is_paused {
        return None;
    }
    Some(resumed)
}
