//! The process that freezes the file system of a container.
//!
//! A freeze waits until the disk has written everything. If the worker that serves the disk froze it itself and were
//! killed, the system would wait for the worker before it ends the process, and the supervisor for the end of the
//! process before it starts a successor. So another process freezes. It thaws when the worker closes its pipe, for
//! whatever reason.

use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_host::LineProcess;
use holdfast_host::freeze::{FrozenFileSystem, sync_file_system, thaw_file_system};
use holdfast_host::grace_periods;

use crate::job::{Error, Result};

/// How long a busy disk may take to write what is pending.
const PATIENCE: Duration = Duration::from_secs(300);

const SYNC: &str = "sync";
const FREEZE: &str = "freeze";
const THAW: &str = "thaw";
const DONE: &str = "done";

/// Starts the process that freezes the file system at a mount point.
pub type FreezerLauncher<'a> = dyn Fn(&Path) -> std::io::Result<LineProcess> + Sync + 'a;

/// The file system at a mount point, in the hands of another process.
pub(super) struct Freezer {
    process: LineProcess,
}

impl Freezer {
    /// Starts the process, and lets it write what is pending, so that the freeze has little to do.
    pub(super) fn start(point: &Path, launch: &FreezerLauncher<'_>) -> std::io::Result<Self> {
        let mut freezer = Self {
            process: launch(point)?,
        };
        freezer.sync()?;
        Ok(freezer)
    }

    /// Writes what is pending.
    pub(super) fn sync(&mut self) -> std::io::Result<()> {
        self.ask(SYNC)
    }

    /// Freezes the file system.
    pub(super) fn freeze(&mut self) -> std::io::Result<()> {
        self.ask(FREEZE)
    }

    /// Thaws the file system. If the process was killed, another one does it.
    pub(super) fn thaw(mut self, point: &Path, launch: &FreezerLauncher<'_>) -> std::io::Result<()> {
        if self.ask(THAW).is_ok() {
            return self.process.close();
        }
        let mut other = Self {
            process: launch(point)?,
        };
        other.ask(THAW)?;
        other.process.close()
    }

    fn ask(&mut self, word: &str) -> std::io::Result<()> {
        self.process.send_line(word)?;
        match self.process.receive_line(PATIENCE) {
            Some(answer) if answer == DONE => Ok(()),
            Some(reason) => Err(std::io::Error::other(reason)),
            None => Err(std::io::ErrorKind::BrokenPipe.into()),
        }
    }
}

/// Executes the words of a [`Freezer`]: the work of the other process. The file system is thawed when `input` ends.
///
/// # Errors
/// The file system cannot be thawed at the end.
pub fn serve_freezer(point: &Path, input: &mut dyn BufRead, output: &mut dyn Write) -> Result<()> {
    let failed = |source| Error::File {
        action: "thaw the file system on",
        path: PathBuf::from(point),
        source,
    };
    // Also after a predecessor that was killed while it froze.
    grace_periods::reset_abandoned(Path::new(grace_periods::SWITCH)).ok();
    let mut frozen = None;
    let mut line = String::new();
    while input.read_line(&mut line).is_ok_and(|count| count > 0) {
        let done = match line.trim_end() {
            SYNC => sync_file_system(point),
            FREEZE => FrozenFileSystem::freeze(point).map(|new| frozen = Some(new)),
            THAW => match frozen.take() {
                Some(frozen) => frozen.thaw(),
                None => thaw_file_system(point).map(drop),
            },
            other => Err(std::io::Error::other(format!("{other:?} is not a request"))),
        };
        let answer = done.map_or_else(|error| error.to_string(), |()| DONE.to_owned());
        if writeln!(output, "{answer}").and_then(|()| output.flush()).is_err() {
            break;
        }
        line.clear();
    }
    frozen.map_or(Ok(()), FrozenFileSystem::thaw).map_err(failed)
}
