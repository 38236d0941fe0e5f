//! Programs that continue when this process and its terminal end.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, ExitStatus, Stdio};

use super::command;

/// A program without input, in a process group of its own.
pub(crate) struct DetachedProcess {
    child: Child,
}

impl DetachedProcess {
    /// Starts a program in a folder. `messages` gets what it prints.
    pub(crate) fn start(
        program: &OsString,
        arguments: &[OsString],
        folder: &Path,
        messages: File,
    ) -> std::io::Result<Self> {
        let child = command(program)
            .args(arguments)
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(messages.try_clone()?)
            .stderr(messages)
            .process_group(0)
            .spawn()?;
        Ok(Self { child })
    }

    /// How it ended; none while it runs.
    pub(crate) fn status(&mut self) -> std::io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Kills it. It is of no use.
    pub(crate) fn kill(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
