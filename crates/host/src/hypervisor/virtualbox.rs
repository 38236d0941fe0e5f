//! VirtualBox, by `VBoxManage`: which machines there are, what they are doing, and their snapshots.
//!
//! Machines of VirtualBox belong to a user, whose `VBoxManage` knows them. What the machines consist of stands in their settings, which
//! [`holdfast_hardware::virtualbox`] reads; here is only what files do not tell. What `VBoxManage` answers is text that the owners of machines
//! choose parts of: names and descriptions have quotes and line ends in them. So nothing is believed that could be such a part (`answers.rs`).
//!
//! A program that is interrupted leaves `VBoxManage` alone until it has ended: a snapshot that is half deleted is worse than one that is
//! there.

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
use answers::{Complaint, info_of, machines_of, snapshot_of};
pub use answers::{ListedMachine, MachineInfo, VirtualBoxState};

/// What the program is called.
pub const PROGRAM: &str = "VBoxManage";
/// The environment variable with VirtualBox's folder of the user.
pub const HOME_VARIABLE: &str = "VBOX_USER_HOME";
/// How long a question may take: the first one starts a service.
const QUESTION_TIME_OUT: Duration = Duration::from_secs(120);
/// How long a snapshot may take: memory is written, or what was written since is brought down. Whoever stops waiting does not end it.
const WORK_TIME_OUT: Duration = Duration::from_secs(24 * 3600);

/// The machine's processors while a snapshot is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotMode {
    /// They continue to run.
    Live,
    /// They are paused. A machine that is paused or off stays so.
    Paused,
}

/// VirtualBox, by its `VBoxManage`.
pub struct VBoxManage {
    program: String,
    questions: Arc<dyn Tools>,
    work: Arc<dyn Tools>,
}

impl VBoxManage {
    /// The program at a path. `home` is where VirtualBox has what belongs to the user, where that is another folder than usual.
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
            questions: tools(QUESTION_TIME_OUT),
            work: tools(WORK_TIME_OUT),
        }
    }

    /// The same, by other means of asking.
    pub fn with_tools(program: &str, tools: &Arc<dyn Tools>) -> Self {
        Self {
            program: program.to_owned(),
            questions: Arc::clone(tools),
            work: Arc::clone(tools),
        }
    }

    /// The program that is asked.
    pub fn program(&self) -> &str {
        &self.program
    }

    /// The version of VirtualBox, as it says it: `7.0.26r168464`. It may have warnings before it.
    pub fn version(&self) -> Result<String> {
        let answer = self.ask(&*self.questions, "", "ask for the version of", &["--version"])?;
        Ok(answer.output.lines().last().unwrap_or_default().trim().to_owned())
    }

    /// The user's machines.
    pub fn machines(&self) -> Result<Vec<ListedMachine>> {
        let answer = self.ask(&*self.questions, "", "list", &["list", "vms"])?;
        machines_of(&answer.output).map_err(|detail| Error::Configuration {
            machine: PROGRAM.to_owned(),
            detail,
        })
    }

    /// A machine, by its UUID or its name.
    ///
    /// # Errors
    /// There is none; or what is said of it could be something else.
    pub fn info(&self, machine: &str) -> Result<MachineInfo> {
        let arguments = ["showvminfo", machine, "--machinereadable"];
        let answer = self.ask(&*self.questions, machine, "describe", &arguments)?;
        info_of(&answer.output).map_err(|detail| Error::Configuration {
            machine: machine.to_owned(),
            detail,
        })
    }

    /// Takes a snapshot of a machine; its UUID.
    ///
    /// # Errors
    /// There may be one all the same, of that name.
    pub fn take_snapshot(
        &self,
        machine: &str,
        (name, description): (&str, &str),
        mode: SnapshotMode,
    ) -> Result<String> {
        let mut arguments = vec!["snapshot", machine, "take", name, "--description", description];
        if mode == SnapshotMode::Live {
            arguments.push("--live");
        }
        let answer = self.ask(&*self.work, machine, "take a snapshot of", &arguments)?;
        snapshot_of(&answer.output).ok_or_else(|| Error::Configuration {
            machine: machine.to_owned(),
            detail: "VBoxManage does not say which snapshot it has taken".to_owned(),
        })
    }

    /// Deletes a snapshot, by its UUID: what was written since is brought down into the image that was kept.
    pub fn delete_snapshot(&self, machine: &str, snapshot: &str) -> Result<()> {
        let arguments = ["snapshot", machine, "delete", snapshot];
        let action = "delete a snapshot of";
        self.ask(&*self.work, machine, action, &arguments).map(drop)
    }

    /// Adds a machine to those of the user, by the file with its settings.
    pub fn register(&self, settings: &Path) -> Result<()> {
        let path = settings.display().to_string();
        self.ask(&*self.questions, &path, "register", &["registervm", &path])
            .map(drop)
    }

    /// Takes a machine from those of the user. Its files stay.
    pub fn unregister(&self, machine: &str) -> Result<()> {
        self.ask(&*self.questions, machine, "unregister", &["unregistervm", machine])
            .map(drop)
    }

    fn ask(&self, tools: &dyn Tools, machine: &str, action: &'static str, arguments: &[&str]) -> Result<Answer> {
        let answer = tools
            .ask(&self.program, arguments)
            .map_err(|error| self.silent(error))?;
        if answer.is_well {
            return Ok(answer);
        }
        let complaint = Complaint::of(&answer.complaint);
        let machine = machine.to_owned();
        Err(if complaint.is_not_found() && action == "describe" {
            Error::NoSuchMachine {
                hypervisor: "VirtualBox".to_owned(),
                name: machine,
            }
        } else if complaint.is_busy() {
            Error::Busy {
                machine,
                holder: complaint.message,
            }
        } else {
            Error::Refused {
                action,
                machine,
                reason: complaint.message,
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

/// Where VirtualBox has what belongs to the user: the folder that the user says, or the first of the usual ones that is there.
///
/// `configurations` is the user's folder for configurations, `home` the user's own.
pub fn home_folder(said: Option<&Path>, home: Option<&Path>, configurations: Option<&Path>) -> Option<PathBuf> {
    if let Some(said) = said {
        return Some(said.to_owned());
    }
    // Versions before 4.3 had it there; where that folder is, later ones use it too.
    let old = home
        .map(|home| home.join(".VirtualBox"))
        .filter(|folder| folder.is_dir());
    old.or_else(|| configurations.map(|folder| folder.join("VirtualBox")))
}
