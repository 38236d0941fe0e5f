//! The plan of a machine's restore; making it changes nothing.

use std::path::Path;

use holdfast_host::HypervisorMut;
use holdfast_host::domain_xml::{Identity, Rewrite, rewrite};
use holdfast_repo::{DiskRecord, Environment, Manifest, Repository};

use super::draft::{Definition, PlannedMachine, Planner};
use super::host_needs::{HostPreparations, PlannedFolder};
use super::places::SpaceNeeded;
use super::places::{check_rooms, rooms};
use super::planned_file::PlannedFile;
use super::request::{AfterRestore, MachineRestoreRequest, RestoreAs};
use super::resumption;
use super::resumption::PlannedResumption;
use super::{in_place, new_machine};
use crate::job::error::Refusal;
use crate::job::{Job, Result, Unit};
use crate::notes::STREAM_VIRTUALBOX_NVRAM;
use crate::repository::open::find_snapshot;

/// The domain type that every host supports.
const EMULATED: &str = "qemu";

/// What a restore will do.
#[derive(Debug, Clone)]
pub struct MachineRestorePlan {
    /// The snapshot to restore.
    pub snapshot: Manifest,
    /// The resulting machine.
    pub machine: PlannedMachine,
    /// The configuration that will be defined; none if it stays unchanged.
    pub definition: Option<Definition>,
    /// The files that will be written: disks, and everything else that a machine keeps in files.
    pub files: Vec<PlannedFile>,
    /// Folders that will be created, for logs and sockets.
    pub folders: Vec<PlannedFolder>,
    /// The space that the files need.
    pub rooms: Vec<SpaceNeeded>,
    /// Notes for the user.
    pub notes: Vec<String>,
    /// Warnings for the user.
    pub warnings: Vec<String>,
    /// Why the machine could not start at present, as text; each is a warning, too.
    pub unmet: Vec<String>,
    /// What happens after the restore.
    pub after: AfterRestore,
    /// The memory that the machine resumes from, if it does.
    pub resumption: Option<PlannedResumption>,
}

/// Plans a restore, and checks everything it needs.
///
/// # Errors
/// The restore is impossible; usually a [`Refusal`].
pub fn plan_machine_restore(
    repository: &Repository,
    hypervisor: &dyn HypervisorMut,
    request: &MachineRestoreRequest,
    environment: &Environment,
    job: Job<'_>,
) -> Result<MachineRestorePlan> {
    refuse_foreign(hypervisor)?;
    let snapshot = find_snapshot(repository, &request.name.snapshot, &request.zone, job.progress)?;
    let planner = Planner {
        repository,
        contents: repository,
        hypervisor,
        environment,
    };
    plan_point(
        &planner,
        snapshot,
        &request.restore_as,
        request.after,
        &request.runtime,
        job,
    )
}

/// Refuses a hypervisor whose files cannot be written: they are on another host, or another user controls their paths.
fn refuse_foreign(hypervisor: &dyn HypervisorMut) -> Result<()> {
    if hypervisor.is_of_this_host() {
        return match hypervisor.rights().other_user() {
            None => Ok(()),
            Some(user) => Err(Refusal::OtherUser {
                hypervisor: hypervisor.title().to_owned(),
                user,
            }
            .into()),
        };
    }
    Err(Refusal::OtherHost {
        hypervisor: hypervisor.title().to_owned(),
    }
    .into())
}

/// Plans the restore of any point in time. Its disks are the planner's contents; the rest is in the repository.
pub(crate) fn plan_point(
    planner: &Planner<'_>,
    snapshot: Manifest,
    restore_as: &RestoreAs,
    after: AfterRestore,
    runtime: &Path,
    job: Job<'_>,
) -> Result<MachineRestorePlan> {
    refuse_foreign(planner.hypervisor)?;
    job.progress.phase("planning", Unit::Items);
    let mut drafted = match restore_as {
        RestoreAs::NewMachine(wish) => new_machine::draft(planner, &snapshot, wish)?,
        RestoreAs::InPlace(wish) => in_place::draft(planner, &snapshot, wish)?,
    };
    let resumption = match after {
        AfterRestore::Resume => Some(resumption::plan(planner, &snapshot, runtime, &mut drafted)?),
        AfterRestore::LeaveOff | AfterRestore::Start => None,
    };
    let resumed = resumption.as_ref();
    let memory = resumed.and_then(|resumption| resumption.room(planner.hypervisor));
    let rooms = rooms(&drafted.files, memory)?;
    check_rooms(&rooms)?;
    let (mut notes, warnings) = (drafted.notes, drafted.warnings);
    notes.extend(not_restored(&snapshot, resumption.as_ref()));
    let mut host = HostPreparations::default();
    if let Some(definition) = &drafted.definition
        && let Some(reason) = planner.accepts(&definition.text, &drafted.machine)?
    {
        host.lacks(reason);
    }
    let then = drafted.before.as_deref();
    for text in drafted
        .configuration
        .iter()
        .chain(resumption.iter().map(|resumption| &resumption.configuration))
    {
        host.add(text, then.unwrap_or(text), planner.hypervisor, &drafted.files);
    }
    notes.extend(host.folders.iter().map(|folder| {
        format!(
            "the folder {} is not there, and is made for {}",
            folder.path.display(),
            folder.of.display()
        )
    }));
    let plan = MachineRestorePlan {
        machine: drafted.machine,
        definition: drafted.definition,
        files: drafted.files,
        folders: host.folders,
        rooms,
        notes,
        warnings,
        unmet: host.unmet,
        after,
        resumption,
        snapshot,
    };
    if after != AfterRestore::LeaveOff {
        plan.refuse_unmet()?;
    }
    Ok(plan.with_unmet_as_warnings())
}

/// The parts of a snapshot that are not restored.
fn not_restored(snapshot: &Manifest, resumption: Option<&PlannedResumption>) -> Vec<String> {
    let mut notes = Vec::new();
    if resumption.is_none() && super::stored::has_memory(snapshot) {
        notes.push("its memory is not restored, so it starts as after a power cut: --resume resumes it".to_owned());
    }
    let is_of_virtualbox = |record: &DiskRecord| record.name == STREAM_VIRTUALBOX_NVRAM;
    if snapshot.disks.iter().any(is_of_virtualbox) {
        notes.push(
            "the variables of its firmware are VirtualBox's, and stay behind: it looks for what to start anew"
                .to_owned(),
        );
    }
    notes
}

impl MachineRestorePlan {
    /// Refuses a machine that is to be started but could not be.
    ///
    /// # Errors
    /// The reason why it could not start.
    pub fn refuse_unmet(&self) -> Result<()> {
        if self.unmet.is_empty() {
            return Ok(());
        }
        Err(Refusal::WouldNotStart {
            machine: self.machine.name.clone(),
            reasons: self.unmet.clone(),
        }
        .into())
    }

    fn with_unmet_as_warnings(mut self) -> Self {
        let warnings = self
            .unmet
            .iter()
            .map(|reason| format!("it would not start on this host: {reason}"));
        self.warnings.extend(warnings);
        self
    }
}

impl Planner<'_> {
    /// Why the hypervisor would not start the machine now. If only the acceleration is missing, the error names an
    /// alternative.
    fn accepts(&self, text: &str, machine: &PlannedMachine) -> Result<Option<String>> {
        let error = match self.hypervisor.check(text) {
            Ok(reason) => return Ok(reason),
            Err(error) => error,
        };
        let emulated = Rewrite {
            domain_type: Some(EMULATED.to_owned()),
            ..Rewrite::new(Identity::Keep, self.uuid()?)
        };
        match rewrite(text, &emulated) {
            Ok(done) if machine.is_new && done.text != text && self.hypervisor.check(&done.text).is_ok() => {
                Err(Refusal::DomainType {
                    machine: machine.name.clone(),
                    reason: error.to_string(),
                }
                .into())
            }
            _ => Err(error.into()),
        }
    }
}
