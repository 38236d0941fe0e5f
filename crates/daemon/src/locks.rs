//! Locks: a file for the one daemon of a folder, and one for each job.
//!
//! A job's file is locked while the job runs, by the job's program, which has the file as its standard input. So if a
//! daemon is killed and the program continues, the next daemon finds the job locked. To start a job, a process holds
//! `starting.lock` briefly, checks that no job that excludes it is running, and locks the job's file. The operating
//! system releases each lock when its holder ends.

use std::fs::File;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use holdfast_host::{LOCK_HOLDER, Wait};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use holdfast_engine::{Error, Result};

/// Creates the folders of the scheduler's state, accessible only to its user.
pub(super) fn make_folders(state: &Path) -> Result<()> {
    for folder in [state.to_owned(), state.join("jobs"), state.join("locks")] {
        let mut builder = std::fs::DirBuilder::new();
        let made = builder.recursive(true).mode(0o700).create(&folder);
        made.map_err(|source| Error::File {
            action: "create the folder",
            path: folder,
            source,
        })?;
    }
    Ok(())
}

/// Locks the folder for this daemon; dropping the file releases the lock.
pub(super) fn lock_daemon(state: &Path) -> Result<File> {
    let path = state.join("daemon.lock");
    match try_lock(&path)? {
        Some(file) => Ok(file),
        None => Err(Error::DaemonBusy { lock: path }),
    }
}

/// Locks a job that is about to start; `None` if it, or one of `excluded`, is running.
pub(super) fn lock_job<'j>(state: &Path, job: &str, excluded: impl Iterator<Item = &'j str>) -> Result<Option<File>> {
    let _starting = lock(&state.join("starting.lock"))?;
    for other in excluded {
        if is_locked(state, other)? {
            return Ok(None);
        }
    }
    try_lock(&path_of(state, job))
}

/// Whether a job is running, in any process.
pub(super) fn is_locked(state: &Path, job: &str) -> Result<bool> {
    Ok(try_lock(&path_of(state, job))?.is_none())
}

fn path_of(state: &Path, job: &str) -> PathBuf {
    state.join("locks").join(job)
}

fn open(path: &Path) -> Result<File> {
    let mut options = File::options();
    let opened = options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path);
    opened.map_err(|source| failed(path, source))
}

fn failed(path: &Path, source: std::io::Error) -> Error {
    Error::File {
        action: "lock",
        path: path.to_owned(),
        source,
    }
}

/// Waits for a lock that is held only briefly.
pub(super) fn lock(path: &Path) -> Result<File> {
    let file = open(path)?;
    let _wait = Wait::for_answer(LOCK_HOLDER);
    loop {
        match flock(&file, FlockOperation::LockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::INTR) => {}
            Err(error) => return Err(failed(path, error.into())),
        }
    }
}

fn try_lock(path: &Path) -> Result<Option<File>> {
    let file = open(path)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(failed(path, error.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::{is_locked, lock_daemon, lock_job, make_folders};
    use holdfast_engine::Error;

    #[test]
    fn an_excluded_job_does_not_start() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path();
        make_folders(state).unwrap();
        let lock = |job: &str, excluded: &[&str]| lock_job(state, job, excluded.iter().copied()).unwrap();
        let first = lock("a", &["b"]).unwrap();
        assert!(lock("a", &[]).is_none() && lock("b", &["c", "a"]).is_none());
        assert!(is_locked(state, "a").unwrap() && !is_locked(state, "b").unwrap());
        assert!(lock("c", &["b"]).is_some());
        drop(first);
        assert!(lock("b", &["a"]).is_some());

        let daemon = lock_daemon(state).unwrap();
        assert!(matches!(lock_daemon(state), Err(Error::DaemonBusy { .. })));
        drop(daemon);
        lock_daemon(state).unwrap();
    }
}
