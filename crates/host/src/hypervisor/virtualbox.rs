//! VirtualBox, through `VBoxManage`: machines, their states and their snapshots.
//!
//! Machines of VirtualBox belong to a user, and the user's `VBoxManage` lists them. Their configuration is in
//! settings files, which [`holdfast_hardware::virtualbox`] reads. This module handles only information that is not in
//! files. Owners of machines choose parts of the output of `VBoxManage`: names and descriptions may contain quotes
//! and line ends. So a line that could be such a part is not trusted (`answers.rs`).
//!
//! When Holdfast is interrupted, a running `VBoxManage` is allowed to finish: a half-deleted snapshot is worse than a
//! leftover one.

mod answers;
#[cfg(feature = "hostile")]
pub(crate) mod hostile;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::Clock;

use crate::hypervisor::error::{Error, Result};
use crate::system::process::{Answer, LocalTools, ToolError, Tools};
use answers::{ErrorMessage, info_of, machines_of, snapshot_of};
pub use answers::{ListedMachine, MachineInfo, VirtualBoxState};

/// The name of the program.
pub const PROGRAM: &str = "VBoxManage";
/// The environment variable of the user's VirtualBox folder.
pub const HOME_VARIABLE: &str = "VBOX_USER_HOME";
/// Timeout of a query. The first query starts a service.
const SHORT_TIME_OUT: Duration = Duration::from_secs(120);
/// Timeout for taking or deleting a snapshot, which writes memory or merges images. After the timeout, VirtualBox
/// continues the operation.
const LONG_TIME_OUT: Duration = Duration::from_secs(24 * 3600);

/// What the machine's processors do while a snapshot is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotMode {
    /// The processors continue to run.
    Live,
    /// The processors are paused. A machine that is already paused or off remains so.
    Paused,
}

/// VirtualBox, through its `VBoxManage`.
pub struct VBoxManage {
    program: String,
    short_calls: Arc<dyn Tools>,
    long_calls: Arc<dyn Tools>,
}

impl VBoxManage {
    /// Uses the program at a path. `home` is the user's VirtualBox folder, if it is not the default folder.
    pub fn new(program: &Path, home: Option<&Path>, clock: &Arc<dyn Clock>) -> Self {
        let tools = |time_out| {
            let tools = LocalTools::new(Arc::clone(clock), time_out);
            Arc::new(match home {
                Some(home) => tools.with_variable(HOME_VARIABLE, OsString::from(home)),
                None => tools,
            })
        };
        Self {
            program: program.display().to_string(),
            short_calls: tools(SHORT_TIME_OUT),
            long_calls: tools(LONG_TIME_OUT),
        }
    }

    /// Uses other tools, for tests.
    pub fn with_tools(program: &str, tools: &Arc<dyn Tools>) -> Self {
        Self {
            program: program.to_owned(),
            short_calls: Arc::clone(tools),
            long_calls: Arc::clone(tools),
        }
    }

    /// The path of the program.
    pub fn program(&self) -> &str {
        &self.program
    }

    /// The version of VirtualBox, such as `7.0.26r168464`. Warnings before it are skipped.
    pub fn version(&self) -> Result<String> {
        let answer = self.ask(&*self.short_calls, "", "query the version of", &["--version"])?;
        Ok(answer.output.lines().last().unwrap_or_default().trim().to_owned())
    }

    /// The user's machines.
    pub fn machines(&self) -> Result<Vec<ListedMachine>> {
        let answer = self.ask(&*self.short_calls, "", "list", &["list", "vms"])?;
        machines_of(&answer.output).map_err(|detail| Error::Configuration {
            machine: PROGRAM.to_owned(),
            detail,
        })
    }

    /// A machine, by UUID or name.
    ///
    /// # Errors
    /// There is no such machine, or the answer is ambiguous.
    pub fn info(&self, machine: &str) -> Result<MachineInfo> {
        let arguments = ["showvminfo", machine, "--machinereadable"];
        let answer = self.ask(&*self.short_calls, machine, "describe", &arguments)?;
        info_of(&answer.output).map_err(|detail| Error::Configuration {
            machine: machine.to_owned(),
            detail,
        })
    }

    /// Takes a snapshot of a machine, and returns its UUID.
    ///
    /// # Errors
    /// VirtualBox reports a failure. A snapshot of that name may exist nevertheless.
    pub fn take_snapshot(&self, machine: &str, name: &str, description: &str, mode: SnapshotMode) -> Result<String> {
        let mut arguments = vec!["snapshot", machine, "take", name, "--description", description];
        if mode == SnapshotMode::Live {
            arguments.push("--live");
        }
        let answer = self.ask(&*self.long_calls, machine, "take a snapshot of", &arguments)?;
        snapshot_of(&answer.output).ok_or_else(|| Error::Configuration {
            machine: machine.to_owned(),
            detail: "VBoxManage does not print the UUID of the new snapshot".to_owned(),
        })
    }

    /// Deletes a snapshot by UUID. VirtualBox merges the later writes into the image below.
    pub fn delete_snapshot(&self, machine: &str, snapshot: &str) -> Result<()> {
        let arguments = ["snapshot", machine, "delete", snapshot];
        let action = "delete a snapshot of";
        self.ask(&*self.long_calls, machine, action, &arguments).map(drop)
    }

    /// Adds a machine to the user's list, by its settings file.
    pub fn register(&self, settings: &Path) -> Result<()> {
        let path = settings.display().to_string();
        self.ask(&*self.short_calls, &path, "register", &["registervm", &path])
            .map(drop)
    }

    /// Removes a machine from the user's list. Its files are kept.
    pub fn unregister(&self, machine: &str) -> Result<()> {
        self.ask(&*self.short_calls, machine, "unregister", &["unregistervm", machine])
            .map(drop)
    }

    fn ask(&self, tools: &dyn Tools, machine: &str, action: &'static str, arguments: &[&str]) -> Result<Answer> {
        let answer = tools
            .ask(&self.program, arguments)
            .map_err(|error| self.silent(error))?;
        if answer.is_success {
            return Ok(answer);
        }
        let stderr = ErrorMessage::of(&answer.stderr);
        let machine = machine.to_owned();
        Err(if stderr.is_not_found() && action == "describe" {
            Error::NoSuchMachine {
                hypervisor: "VirtualBox".to_owned(),
                name: machine,
            }
        } else if stderr.is_busy() {
            Error::Busy {
                machine,
                holder: stderr.message,
            }
        } else {
            Error::Refused {
                action,
                machine,
                reason: stderr.message,
            }
        })
    }

    fn silent(&self, error: ToolError) -> Error {
        Error::Unreachable {
            address: self.program.clone(),
            source: Box::new(error),
        }
    }
}

/// The user's VirtualBox folder: the configured folder, or the first default folder that exists.
///
/// `configurations` is the user's configuration folder, `home` the home folder.
pub fn home_folder(configured: Option<&Path>, home: Option<&Path>, configurations: Option<&Path>) -> Option<PathBuf> {
    if let Some(configured) = configured {
        return Some(configured.to_owned());
    }
    // Versions before 4.3 used this folder, and later versions still use it if it exists.
    let old = home
        .map(|home| home.join(".VirtualBox"))
        .filter(|folder| folder.is_dir());
    old.or_else(|| configurations.map(|folder| folder.join("VirtualBox")))
}
