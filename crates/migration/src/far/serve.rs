//! The side of the other host: answers requests until its input ends.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::{Clock, error_text};
use holdfast_engine::{is_memory_socket, store_tpm_state};
use holdfast_host::{
    Autostart, Description, DiskSource, ExecutionState, LiveDisks, LiveMigration, Machine, MachineDisk, MachineHistory,
    MachineState, MachineSummary, ProcessInfo, ProcessorFit, TpmPlace, agent, users_of_file,
};
use holdfast_image::Format;
use holdfast_live_copy::{name_early, remove_early_name, remove_journal};

use super::file_checks::{is_taken_for, missing_files, no_place, no_space};
use super::file_users::{is_in_use, needs_file, open_disk};
use super::named_copies::NamedCopies;
use super::{BACKING, CheckRequest, DiskForm, FarAnswer, FarRequest, FarState, FormerDisk, NVRAM, TpmContent};
use crate::machine_files::{MachineFiles, own_disks};
use crate::request_link::serve_requests;

/// How long the agent of the guest may take to set the clock.
const CLOCK_DEADLINE: Duration = Duration::from_secs(3);
/// How long the machine may take until it runs.
const START_PATIENCE: Duration = Duration::from_secs(5);
const START_INTERVAL: Duration = Duration::from_millis(2);

/// How long the hypervisor may take to close the disks of a machine that stays at the source.
const RELEASE_PATIENCE: Duration = Duration::from_secs(5);
const RELEASE_INTERVAL: Duration = Duration::from_millis(20);

/// A hypervisor to which machines can move.
pub trait MovingHypervisor: LiveDisks + LiveMigration {}

impl<T: LiveDisks + LiveMigration> MovingHypervisor for T {}

/// What answers need of their host.
pub struct FarTools<'a> {
    /// Its hypervisor.
    pub hypervisor: &'a dyn MovingHypervisor,
    /// Name and version of the program.
    pub program: String,
    /// The clock for waits.
    pub clock: Arc<dyn Clock>,
    /// The time of day, in milliseconds since 1970.
    pub now_ms: &'a (dyn Fn() -> i64 + Sync),
    /// The folder for disks that come; none for the default of the hypervisor.
    pub image_folder: Option<PathBuf>,
    /// Gets the report of the migration as a JSON document, if the source sends it.
    pub report: &'a (dyn Fn(serde_json::Value) + Sync),
}

/// Answers requests until `input` ends.
///
/// # Errors
/// A line is not a request, or an answer cannot be sent.
pub fn serve_far(input: impl std::io::Read, output: impl Write, tools: &FarTools<'_>) -> std::io::Result<()> {
    let mut named = NamedCopies::default();
    serve_requests(input, output, |request| {
        tools
            .answer(request, &mut named)
            .unwrap_or_else(|reason| FarAnswer::Refused { reason })
    })
}

pub(super) type Answered = Result<FarAnswer, String>;

impl FarTools<'_> {
    fn answer(&self, request: FarRequest, named: &mut NamedCopies) -> Answered {
        match request {
            FarRequest::Describe {} => Ok(FarAnswer::Described {
                program: self.program.clone(),
                socket: self.hypervisor.socket(),
                image_folder: self.image_folder.clone().or_else(|| self.hypervisor.image_folder()),
            }),
            FarRequest::FormerDisks { uuid } => self.former_disks(&uuid),
            FarRequest::FormerFiles { uuid } => self.former_files(&uuid),
            FarRequest::Path { path } => Ok(path_answer(&path, DiskForm::Copy)),
            FarRequest::OverlayPath { path } => Ok(path_answer(&path, DiskForm::Overlay)),
            FarRequest::Check(request) => self.check(&request),
            FarRequest::NameDisks { paths } => name_disks(&paths, named),
            FarRequest::UnnameDisks { paths } => for_all(&paths, |path| self.unname(path, named)),
            FarRequest::MakeOverlays { disks } => self.make_overlays(&disks),
            FarRequest::DeleteOverlays { paths } => for_all(&paths, |path| self.delete_overlay(path)),
            FarRequest::PullState { uuid } => self.pull_state(&uuid),
            FarRequest::Pull { uuid } => self.pull(&uuid),
            FarRequest::EndPull {
                uuid,
                configuration,
                obsolete_files,
            } => self.delete_all(&obsolete_files, self.end_pull(&uuid, &configuration)),
            FarRequest::ReceiveMemory {
                configuration, socket, ..
            } => self.receive_memory(&configuration, &socket),
            FarRequest::Start { uuid } => self.start(&uuid),
            FarRequest::RemoveSocket { path } => remove_socket(&path),
            FarRequest::VerifyDisks { uuid, paths } => for_all(&paths, |path| self.verify(&uuid, path)),
            FarRequest::State { uuid } => Ok(FarAnswer::State {
                state: self.state(&uuid)?,
            }),
            FarRequest::AwaitStart { uuid } => self.await_start(&uuid),
            FarRequest::Define {
                uuid,
                configuration,
                history,
                tpm,
            } => {
                self.check_absence(&uuid)?;
                if let Some(tpm) = tpm {
                    self.store_tpm(&configuration, &tpm)?;
                }
                self.define(&uuid, &configuration, &history)
            }
            FarRequest::Complete {
                uuid,
                state,
                starts_with_host,
                obsolete_files,
            } => {
                let autostart = if starts_with_host {
                    Autostart::On
                } else {
                    Autostart::Off
                };
                let completed = self.complete(&uuid, state, autostart);
                self.delete_all(&obsolete_files, completed)
            }
            FarRequest::PowerOff { uuid } => self.power_off(&uuid),
            FarRequest::Report { document } => {
                (self.report)(document);
                Ok(FarAnswer::Done {})
            }
        }
    }

    fn check(&self, request: &CheckRequest) -> Answered {
        let (mut obstacles, mut notes) = (Vec::new(), Vec::new());
        let known = self.hypervisor.machines().map_err(|error| error_text(&error))?;
        for machine in &known {
            let is_same = machine.uuid == request.uuid;
            if is_same && machine.state == MachineState::ShutOff {
                notes.push(format!(
                    "{} was there before: its definition there is replaced",
                    machine.name
                ));
                obstacles.extend(self.saved_memory(machine)?);
            } else if is_same || machine.name == request.name {
                obstacles.push(format!(
                    "a machine {} exists there, and is {}",
                    machine.name, machine.state
                ));
            }
        }
        match self.hypervisor.check(&request.configuration) {
            Ok(None) => {}
            Ok(Some(reason)) => obstacles.push(reason),
            Err(error) => obstacles.push(error_text(&error)),
        }
        if self.hypervisor.processor_fit(&request.configuration) == ProcessorFit::Lacks {
            obstacles.push("the processor there lacks features of the machine's processor".to_owned());
        }
        let needs = self.hypervisor.needs(&request.configuration)?;
        obstacles.extend(self.hypervisor.missing_resources(&needs));
        obstacles.extend(missing_files(&needs, request));
        obstacles.extend(request.disks.iter().filter_map(no_place));
        obstacles.extend(no_space(request));
        Ok(FarAnswer::Checked { obstacles, notes })
    }

    /// The saved memory of a former definition would be resumed with the disks that come.
    fn saved_memory(&self, former: &MachineSummary) -> Result<Option<String>, String> {
        let kept = self.hypervisor.kept_states(&former.uuid);
        let kept = kept.map_err(|error| error_text(&error))?;
        Ok(kept.has_saved_memory.then(|| {
            format!(
                "the memory of {} was saved there, and the machine would resume with it: delete it with virsh \
                 managedsave-remove",
                former.name
            )
        }))
    }

    /// A definition of the machine that is shut off.
    fn former(&self, uuid: &str) -> Result<Option<Description>, String> {
        let description = self.machine(uuid)?.and_then(|machine| machine.describe().ok());
        Ok(description.filter(|description| description.summary.state == MachineState::ShutOff))
    }

    fn former_disks(&self, uuid: &str) -> Answered {
        let Some(former) = self.former(uuid)? else {
            return Ok(FarAnswer::FormerDisks { disks: Vec::new() });
        };
        let variables = former_variables(&former);
        let disks = own_disks(former.disks).into_iter().filter_map(|disk| {
            let (DiskSource::File(path) | DiskSource::Device(path)) = disk.source else {
                return None;
            };
            let format = disk.format.as_deref().and_then(Format::from_name);
            // A seed that cannot be read would prevent the migration.
            let is_readable = open_disk(&path, format).is_ok();
            is_readable.then(|| FormerDisk {
                disk: disk.target,
                path,
                format: format.map(|format| format.name().to_owned()),
            })
        });
        Ok(FarAnswer::FormerDisks {
            disks: disks.chain(variables).collect(),
        })
    }

    fn former_files(&self, uuid: &str) -> Answered {
        let Some(former) = self.former(uuid)? else {
            return Ok(FarAnswer::FormerDisks { disks: Vec::new() });
        };
        let history = self.hypervisor.history(uuid).map_err(|error| error_text(&error))?;
        let variables = former_variables(&former);
        let found = MachineFiles::find(&own_disks(former.disks), &history);
        let files = found.files.into_iter().filter_map(|file| {
            let name = file.path.file_name()?.to_str()?.to_owned();
            Some(FormerDisk {
                disk: if file.is_named { name } else { BACKING.to_owned() },
                path: file.path,
                format: Some(Format::Raw.name().to_owned()),
            })
        });
        Ok(FarAnswer::FormerDisks {
            disks: files.chain(variables).collect(),
        })
    }

    /// Undoes the name of an incomplete copy. A copy that became complete in a handover that failed is deleted, since the
    /// machine runs on with its disk at the source.
    fn unname(&self, path: &Path, named: &NamedCopies) -> Result<(), String> {
        remove_early_name(path).map_err(|error| error_text(&error))?;
        if !named.is_complete(path) {
            return Ok(());
        }
        self.wait_for_release(path);
        self.delete_obsolete(path)?;
        remove_journal(path).map_err(|error| error_text(&error))
    }

    /// After a migration has failed, the hypervisor here may not have ended its process yet.
    pub(super) fn wait_for_release(&self, path: &Path) {
        let until = self.clock.now() + RELEASE_PATIENCE;
        while is_in_use(path) && self.clock.now() < until {
            self.clock.sleep(RELEASE_INTERVAL);
        }
    }

    /// Whether the QEMU of a machine has a file open. A copy into a file that it does not use would be of no use.
    fn verify(&self, uuid: &str, path: &Path) -> Result<(), String> {
        let users = users_of_file(path);
        let is_its = |process: &ProcessInfo| self.hypervisor.is_process_of(uuid, process);
        if users.found.iter().any(is_its) {
            return Ok(());
        }
        let reason = if users.is_complete {
            "its hypervisor has another file open"
        } else {
            "which files its hypervisor has open is not visible: holdfast must run as root there"
        };
        Err(format!("{}: {reason}", path.display()))
    }

    fn receive_memory(&self, configuration: &str, socket: &Path) -> Answered {
        if !is_memory_socket(socket) {
            return Err(format!("{} is not a socket of a migration", socket.display()));
        }
        let received = self.hypervisor.receive(configuration, socket);
        received
            .map(|()| FarAnswer::Done {})
            .map_err(|error| error_text(&error))
    }

    fn start(&self, uuid: &str) -> Answered {
        let started = self.hypervisor.unpause(uuid);
        started.map_err(|error| error_text(&error))?;
        self.await_start(uuid)
    }

    fn power_off(&self, uuid: &str) -> Answered {
        let ended = self.hypervisor.power_off(uuid);
        ended.map(|()| FarAnswer::Done {}).map_err(|error| error_text(&error))
    }

    /// Deletes former disks after a step. All reasons are reported.
    fn delete_all(&self, paths: &[PathBuf], step: Result<(), String>) -> Answered {
        let deleted = paths.iter().map(|path| self.delete_obsolete(path));
        let reasons = std::iter::once(step).chain(deleted).filter_map(Result::err);
        let reasons: Vec<String> = reasons.collect();
        if reasons.is_empty() {
            Ok(FarAnswer::Done {})
        } else {
            Err(reasons.join("; "))
        }
    }

    /// Deletes a file that nothing uses any more.
    pub(super) fn delete_obsolete(&self, path: &Path) -> Result<(), String> {
        let kept = |reason: &str| Err(format!("{} is kept: {reason}", path.display()));
        let found = match path.symlink_metadata() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            found => found.map_err(|error| format!("{}: {error}", path.display()))?,
        };
        if !found.is_file() {
            return kept("it is not a file");
        }
        if is_in_use(path) {
            return kept("a process may use it");
        }
        let known = self.hypervisor.machines().map_err(|error| error_text(&error))?;
        for summary in known {
            let Some(machine) = self.machine(&summary.uuid)? else {
                continue;
            };
            let description = machine.describe().map_err(|error| error_text(&error))?;
            let needs_it = |disk: &MachineDisk| needs_file(disk, &found);
            if description.nvram.as_deref() == Some(path) || description.disks.iter().any(needs_it) {
                return kept(&format!("{} may need it", summary.name));
            }
        }
        let deleted = std::fs::remove_file(path);
        deleted.map_err(|error| format!("{} is kept: {error}", path.display()))
    }

    fn machine(&self, uuid: &str) -> Result<Option<Box<dyn Machine>>, String> {
        match self.hypervisor.machine(uuid) {
            Ok(machine) => Ok(Some(machine)),
            Err(holdfast_host::Error::NoSuchMachine { .. }) => Ok(None),
            Err(error) => Err(error_text(&error)),
        }
    }

    pub(super) fn state(&self, uuid: &str) -> Result<FarState, String> {
        let Some(machine) = self.machine(uuid)? else {
            return Ok(FarState::Absent);
        };
        match machine.describe() {
            Ok(description) => Ok(match description.summary.state {
                MachineState::Running => FarState::Running,
                MachineState::ShutOff => FarState::ShutOff,
                MachineState::Paused | MachineState::Between => FarState::Paused,
            }),
            Err(holdfast_host::Error::NoSuchMachine { .. }) => Ok(FarState::Absent),
            Err(error) => Err(error_text(&error)),
        }
    }

    fn await_start(&self, uuid: &str) -> Answered {
        let start = self.clock.now();
        while self.state(uuid)? != FarState::Running {
            if self.clock.now().saturating_sub(start) > START_PATIENCE {
                return Err("the machine does not run there".to_owned());
            }
            self.clock.sleep(START_INTERVAL);
        }
        Ok(FarAnswer::Done {})
    }

    /// It may be defined there, if it is shut off.
    fn check_absence(&self, uuid: &str) -> Result<(), String> {
        match self.state(uuid)? {
            FarState::Absent | FarState::ShutOff => Ok(()),
            state => Err(format!("the machine is {state} there")),
        }
    }

    fn store_tpm(&self, configuration: &str, tpm: &TpmContent) -> Result<(), String> {
        let file = match self.hypervisor.tpm_place(configuration) {
            Some(TpmPlace::At(file)) => file,
            Some(TpmPlace::Unknown(reason)) => {
                return Err(format!(
                    "the place for the state of its TPM is not known there: {reason}"
                ));
            }
            None => return Err("its configuration has no emulated TPM".to_owned()),
        };
        let bytes = tpm.bytes_for(file.store)?;
        store_tpm_state(&file, &bytes).map_err(|error| error_text(&error))
    }

    fn define(&self, uuid: &str, configuration: &str, history: &MachineHistory) -> Answered {
        let defined = self.hypervisor.define(configuration);
        defined.map_err(|error| error_text(&error))?;
        self.replace_history(uuid, history)?;
        Ok(FarAnswer::Done {})
    }

    /// The snapshots and checkpoints of a former definition are not in the disks that have come.
    fn replace_history(&self, uuid: &str, history: &MachineHistory) -> Result<(), String> {
        let replaced = self.hypervisor.replace_history(uuid, history);
        replaced.map_err(|error| error_text(&error))
    }

    fn complete(&self, uuid: &str, state: FarState, autostart: Autostart) -> Result<(), String> {
        if state == FarState::Running
            && let Err(reason) = self.await_start(uuid)
        {
            let execution = self.hypervisor.execution_state(uuid);
            // It was started, and a part of a disk that is pulled is missing.
            let waits_for_disk = execution.is_ok_and(|execution| execution == ExecutionState::StoppedByDisk);
            if !waits_for_disk {
                return Err(reason);
            }
        }
        let set = self.hypervisor.set_autostart(uuid, autostart);
        set.map_err(|error| error_text(&error))?;
        let machine = self.machine(uuid)?.ok_or("the machine is not there any more")?;
        let has_agent = state == FarState::Running
            && machine
                .describe()
                .is_ok_and(|description| description.has_agent_channel);
        if has_agent {
            // A guest without an agent that answers sets its clock itself.
            agent::set_clock(&*machine, (self.now_ms)(), CLOCK_DEADLINE).ok();
        }
        if state == FarState::Running {
            self.replace_history(uuid, &MachineHistory::default())?;
        }
        Ok(())
    }
}

fn former_variables(former: &Description) -> Option<FormerDisk> {
    let path = former.nvram.clone().filter(|path| path.exists())?;
    Some(FormerDisk {
        disk: NVRAM.to_owned(),
        path,
        format: Some(Format::Raw.name().to_owned()),
    })
}

fn path_answer(path: &Path, form: DiskForm) -> FarAnswer {
    FarAnswer::Path {
        is_free: !is_taken_for(path, form),
    }
}

fn for_all(paths: &[PathBuf], work: impl Fn(&Path) -> Result<(), String>) -> Answered {
    paths.iter().try_for_each(|path| work(path))?;
    Ok(FarAnswer::Done {})
}

fn name_disks(paths: &[PathBuf], named: &mut NamedCopies) -> Answered {
    let answer = for_all(paths, |path| name_early(path).map_err(|error| error_text(&error)));
    for path in paths {
        named.note(path);
    }
    answer
}

/// libvirt leaves the socket of a migration that has failed.
fn remove_socket(path: &Path) -> Answered {
    if !is_memory_socket(path) {
        return Err(format!("{} is not a socket of a migration", path.display()));
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(format!("{}: {error}", path.display())),
        _ => Ok(FarAnswer::Done {}),
    }
}
