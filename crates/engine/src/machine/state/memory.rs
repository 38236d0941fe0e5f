//! The memory of a machine in a snapshot: the pages as a device, deduplicated like a disk, and a stream with the device
//! state.

use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::{BlockDeviceMut, FileDeviceMut, IoMode};
use holdfast_host::qemu::memory::{
    MemoryMethod, MemoryMode, MemoryPipe, MemoryReceiver, MemoryStreamError, page_bytes, receive,
};
use holdfast_host::qmp::{Monitor, QmpCommand};
use serde_json::Value;

use super::scratch::unnamed_file;
use crate::job::{Error, Job, Result};

/// How the memory of a machine is captured.
#[derive(Debug, Clone)]
pub struct MemoryOptions {
    /// Whether the machine runs meanwhile.
    pub way: MemoryMethod,
    /// A folder for sockets, which QEMU's user can reach.
    pub runtime: PathBuf,
    /// The folder in which the memory is buffered until it is stored.
    pub scratch: PathBuf,
}

/// If memory is sent while the machine is paused, the watchdog resumes the machine after this time.
pub(crate) const MEMORY_DEADLINE: Duration = Duration::from_secs(3600);
/// If memory is sent while the machine runs, the watchdog resumes it after this time in the final pause, counted from
/// when the machine was last seen running.
pub(crate) const LIVE_MEMORY_DEADLINE: Duration = Duration::from_secs(60);

/// How the memory of a machine is captured; warns if that differs from the request, or if the request is unwise.
fn mode(way: MemoryMethod, monitor: &dyn Monitor, machine: &str, job: Job<'_>) -> Result<MemoryMode> {
    let chosen = way.mode(monitor);
    let (mode, flaw) = chosen.map_err(|source| holdfast_host::Error::Monitor {
        machine: machine.to_owned(),
        source,
    })?;
    let Some(version) = flaw else { return Ok(mode) };
    let what =
        format!("QEMU {version} emulates its processors, and may lose writes where memory is read while it runs");
    match mode {
        MemoryMode::Stopped => job
            .progress
            .note(&format!("{machine} is paused while its memory is read: {what}")),
        MemoryMode::Live => job.progress.warning(&format!(
            "the memory of {machine} may be damaged: {what}; --with-memory=stopped is sure"
        )),
    }
    Ok(mode)
}

/// Starts to receive the memory of a machine, into an unnamed file in `folder`. Also returns how it is captured.
pub(crate) fn begin(
    way: MemoryMethod,
    monitor: &dyn Monitor,
    machine: &str,
    folder: &Path,
    job: Job<'_>,
) -> Result<((MemoryPipe, MemoryMode), MemoryReceiver)> {
    let failed = |source| holdfast_host::Error::Monitor {
        machine: machine.to_owned(),
        source,
    };
    let status = monitor.execute(&QmpCommand::new("query-status", Value::Null));
    if status.map_err(failed)?["status"] == "postmigrate" {
        let machine = machine.to_owned();
        return Err(Error::MemorySentBefore { machine });
    }
    let mode = mode(way, monitor, machine, job)?;
    let page_bytes = page_bytes(monitor).map_err(failed)?;
    let folder = folder.to_owned();
    let started = receive(page_bytes, Box::new(move |size_bytes| store(&folder, size_bytes)));
    let (pipe, receiving) = started.map_err(|source| Error::File {
        action: "take in memory through",
        path: PathBuf::from("a pipe"),
        source,
    })?;
    Ok(((pipe, mode), receiving))
}

/// The error if the memory of a machine could not be kept in `folder`.
pub(crate) fn not_kept(machine: &str, folder: &Path, source: MemoryStreamError) -> Error {
    let machine = machine.to_owned();
    match source {
        MemoryStreamError::Store(_) | MemoryStreamError::Invalid { .. } => Error::MemoryNotKept {
            machine,
            folder: folder.to_owned(),
            source: Box::new(source),
        },
        other => Error::MemoryNotSent {
            machine,
            source: Box::new(other),
        },
    }
}

fn store(folder: &Path, size_bytes: u64) -> holdfast_block::Result<Box<dyn BlockDeviceMut>> {
    let file = unnamed_file(folder, size_bytes).map_err(|source| holdfast_block::Error::Path {
        action: "create a file for the memory in",
        path: folder.to_owned(),
        source,
    })?;
    Ok(Box::new(FileDeviceMut::of_file(file, folder, IoMode::Buffered)?))
}
