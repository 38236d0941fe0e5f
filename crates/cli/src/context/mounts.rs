//! What commands share that serve files at a mount point.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_block::error_text;
use holdfast_engine::{ContainerError, MountPlace, ServerFailure};
use holdfast_host::fuse_mount::MountReaders;
use holdfast_serve::fuse::MountEvents;
use rustix::io::Errno;

use super::Context;
use super::server_process::{ServerStart, report_ready, start_server};
use crate::args::MountOptionArgs;
use crate::errors::{Error, Kind};
use crate::exit::Exit;
use crate::output::{Console, Format};

/// Where the messages of a server in the background go.
const NO_LOG: &str = "/dev/null";

/// The absolute path of a mount point, without symbolic links and dots. A folder whose server has ended has no path
/// that the system can resolve; it is used as it is.
pub fn mount_point(path: &Path) -> Result<PathBuf, Error> {
    let failed = |source| Error::File {
        action: "look at",
        path: path.to_owned(),
        source,
    };
    match path.canonicalize() {
        Err(error) if error.raw_os_error() == Some(Errno::NOTCONN.raw_os_error()) => {
            std::path::absolute(path).map_err(failed)
        }
        result => result.map_err(failed),
    }
}

/// Like [`mount_point`], for a new mount.
///
/// # Errors
/// The folder is not empty.
pub fn empty_mount_point(path: &Path) -> Result<PathBuf, Error> {
    let folder = mount_point(path)?;
    let mut entries = std::fs::read_dir(&folder).map_err(|source| Error::File {
        action: "list",
        path: folder.clone(),
        source,
    })?;
    if entries.next().is_none() {
        return Ok(folder);
    }
    Err(Error::refused(
        Kind::Exists,
        format!("{} is not empty", folder.display()),
        "choose an empty folder: a mount would hide what is in this one",
    ))
}

impl Context {
    /// A mount of `source`, which is shown in the list of mounts. Errors of reads are printed as warnings.
    pub fn mount_place(&self, source: &Path, folder: &Path, options: MountOptionArgs) -> MountPlace {
        MountPlace {
            source: format!("holdfast:{}", source.display()),
            folder: folder.to_owned(),
            readers: if options.allow_other {
                MountReaders::Everyone
            } else {
                MountReaders::Owner
            },
            events: self.mount_events(),
        }
    }

    /// Prints errors of reads and writes as warnings.
    pub fn mount_events(&self) -> Arc<dyn MountEvents> {
        Arc::new(RequestErrors(self.shared_console()))
    }

    /// Starts this program with `words` as a server in the background. `secret` is its first line of input.
    ///
    /// Returns an exit if the server ended; it has reported its error.
    pub fn serve_in_background(
        &self,
        mut words: Vec<OsString>,
        folder: &Path,
        secret: Option<&str>,
    ) -> Result<Option<Exit>, Error> {
        if self.output().format() == Format::Json {
            words.push("--json".into());
        }
        let started = start_server(&words, secret, &**self.clock()).map_err(|source| Error::File {
            action: "start a process for",
            path: folder.to_owned(),
            source,
        })?;
        match started {
            ServerStart::Ready => Ok(None),
            ServerStart::Ended { exit, output } => {
                let lines = output
                    .into_iter()
                    .flat_map(|line| OsString::from(line + "\n").into_vec());
                self.output().data(&lines.collect::<Vec<u8>>())?;
                Ok(Some(exit))
            }
            ServerStart::Silent => Err(Error::refused(
                Kind::Io,
                format!("the process that serves {} does not answer", folder.display()),
                "try again with --foreground, which prints what it does",
            )),
        }
    }
}

/// The result of starting a server, as an engine job expects it. A server that has ended has reported its error.
pub fn started(result: Result<Option<Exit>, Error>) -> Result<(), holdfast_engine::Error> {
    let message = match result {
        Ok(None) => return Ok(()),
        Ok(Some(_)) => "the server of the disk has ended".to_owned(),
        Err(error) => error_text(&error),
    };
    Err(ContainerError::Server {
        failure: ServerFailure::Io,
        message,
    }
    .into())
}

/// Called by the worker of a server in the background. A program that reads the output of the command until its end
/// would otherwise wait for the end of the worker.
pub fn leave_stderr() -> Result<(), Error> {
    let log = || File::options().write(true).open(NO_LOG);
    let leave = || log().and_then(|log| Ok(rustix::stdio::dup2_stderr(log)?));
    leave().map_err(|source| Error::File {
        action: "write",
        path: NO_LOG.into(),
        source,
    })
}

/// Called by a server in the background: reports that the files can be read, and detaches from the terminal.
pub fn leave_terminal() -> Result<(), Error> {
    let leave = || report_ready(File::options().write(true).open(NO_LOG)?);
    leave().map_err(|source| Error::File {
        action: "write",
        path: NO_LOG.into(),
        source,
    })
}

struct RequestErrors(Arc<Console>);

impl MountEvents for RequestErrors {
    fn open_failed(&self, file: &str, error: &std::io::Error) {
        self.0.warning(&format!("{file}: {}", error_text(error)));
    }

    fn request_failed(&self, file: &str, error: &holdfast_block::Error) {
        self.0.warning(&format!("{file}: {}", error_text(error)));
    }
}
