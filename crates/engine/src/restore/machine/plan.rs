//! What a restore of a machine will do: a value that changes nothing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use holdfast_block::{BlockDevice as _, FileDeviceMut, IoMode};
use holdfast_host::domain_xml::{DiskChange, Identity, Rewrite, rewrite};
use holdfast_host::{DiskKind, DiskSource, HypervisorMut, MachineDisk, Uuid};
use holdfast_image::{Format, ImageMut, OpenOptions};
use holdfast_repo::{DiskRecord, Manifest, Repository, Surroundings};
use rustix::fs::{Access, access};

use super::host_needs::{HostPreparations, PlannedFolder};
use super::neighbours::{Neighbours, chain_of};
use super::places::{check_rooms, rooms};
use super::planned_file::PlannedFile;
use super::request::{AfterRestore, MachineRestoreRequest, RestoreAs};
use super::resumption;
use super::resumption::PlannedResumption;
use super::stored::StoredMachine;
use super::{in_place, new_machine};
use crate::files::block_target::is_block_device;
use crate::image::source::OpenSource;
use crate::job::error::Refusal;
use crate::job::{Error, Job, Result, Unit};
use crate::notes::STREAM_VIRTUALBOX_NVRAM;
use crate::repository::open::find_snapshot;
use crate::restore::source::Contents;

/// The domain type that every host can have.
const EMULATED: &str = "qemu";

/// What will be done.
#[derive(Debug, Clone)]
pub struct MachineRestorePlan {
    /// The snapshot.
    pub snapshot: Manifest,
    /// The machine.
    pub machine: PlannedMachine,
    /// What will be defined; none where the configuration stays as it is.
    pub definition: Option<Definition>,
    /// What will be written: disks, and everything else that a machine keeps in files.
    pub files: Vec<PlannedFile>,
    /// Folders that will be made, for logs and sockets.
    pub folders: Vec<PlannedFolder>,
    /// The room that they need.
    pub rooms: Vec<Room>,
    /// What a person may want to know.
    pub notes: Vec<String>,
    /// What a person should look at.
    pub warnings: Vec<String>,
    /// What keeps the machine from starting as things are now, in words; each is a warning too.
    pub unmet: Vec<String>,
    /// What comes after.
    pub after: AfterRestore,
    /// What it goes on from, where it does.
    pub resumption: Option<PlannedResumption>,
}

/// A machine that will be there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedMachine {
    /// Its name.
    pub name: String,
    /// Its UUID.
    pub uuid: String,
    /// Whether it is there already.
    pub is_new: bool,
}

/// A configuration that will be defined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Definition {
    /// What it is compared with: the snapshot's configuration for a new machine, in place that of today.
    pub before: String,
    /// What will be defined.
    pub text: String,
}

/// What a file system has to hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Room {
    /// A folder of it.
    pub folder: PathBuf,
    /// Bytes that will be written, at least.
    pub needed_bytes: u64,
    /// Bytes that are free.
    pub free_bytes: u64,
}

/// Looks at everything, and tells what a restore would do.
///
/// # Errors
/// Why it cannot be done: mostly a [`Refusal`].
pub fn plan_machine_restore(
    repository: &Repository,
    hypervisor: &dyn HypervisorMut,
    request: &MachineRestoreRequest,
    surroundings: &Surroundings,
    job: Job<'_>,
) -> Result<MachineRestorePlan> {
    refuse_foreign(hypervisor)?;
    let snapshot = find_snapshot(repository, &request.name.snapshot, &request.zone, job.progress)?;
    let planner = Planner {
        repository,
        contents: repository,
        hypervisor,
        surroundings,
    };
    let wish = (&request.restore_as, request.after, &*request.runtime);
    plan_point(&planner, snapshot, wish, job)
}

/// Refuses a hypervisor whose files cannot be written: they are on another host, or another user names them.
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

/// The same for any point in time. Its disks are the planner's contents, all else of it is in the repository.
pub(crate) fn plan_point(
    planner: &Planner<'_>,
    snapshot: Manifest,
    (restore_as, after, runtime): (&RestoreAs, AfterRestore, &Path),
    job: Job<'_>,
) -> Result<MachineRestorePlan> {
    refuse_foreign(planner.hypervisor)?;
    job.progress.phase("planning", Unit::Items);
    let mut drafted = match restore_as {
        RestoreAs::NewMachine(wish) => new_machine::draft(planner, &snapshot, wish)?,
        RestoreAs::InPlace(wish) => in_place::draft(planner, &snapshot, wish)?,
    };
    let resumption = match after {
        AfterRestore::Resume => Some(resumption::plan(planner, (&snapshot, runtime), &mut drafted)?),
        AfterRestore::LeaveOff | AfterRestore::Start => None,
    };
    let resumed = resumption.as_ref();
    let memory = resumed.and_then(|resumption| resumption.room(planner.hypervisor));
    let rooms = rooms(&drafted.files, memory)?;
    check_rooms(&rooms)?;
    let (mut notes, warnings) = (drafted.notes, drafted.warnings);
    if resumption.is_none() && super::stored::has_memory(&snapshot) {
        notes.push("its memory is not restored, and it starts as after a power cut: --resume lets it go on".to_owned());
    }
    let is_of_virtualbox = |record: &DiskRecord| record.name == STREAM_VIRTUALBOX_NVRAM;
    if snapshot.disks.iter().any(is_of_virtualbox) {
        notes.push(
            "the variables of its firmware are VirtualBox's, and stay behind: it looks for what to start anew"
                .to_owned(),
        );
    }
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
        host.add((text, then.unwrap_or(text)), planner.hypervisor, &drafted.files);
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
    Ok(plan.with_unmet_told())
}

impl MachineRestorePlan {
    /// Refuses a machine that is to be started, and could not be.
    ///
    /// # Errors
    /// Why it could not.
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

    fn with_unmet_told(mut self) -> Self {
        let told = self
            .unmet
            .iter()
            .map(|reason| format!("it would not start as things are now: {reason}"));
        self.warnings.extend(told);
        self
    }
}

/// What both kinds of plans need.
pub(crate) struct Planner<'a> {
    /// Where all is that is no disk.
    pub(crate) repository: &'a Repository,
    /// The disks.
    pub(crate) contents: &'a dyn Contents,
    pub(crate) hypervisor: &'a dyn HypervisorMut,
    pub(crate) surroundings: &'a Surroundings,
}

/// A plan on its way.
pub(super) struct Draft {
    pub(super) machine: PlannedMachine,
    /// Who it is, seen from the snapshot's configuration.
    pub(super) identity: Identity,
    pub(super) definition: Option<Definition>,
    /// The configuration that it will have, also where that stays as it is.
    pub(super) configuration: Option<String>,
    /// The one in the snapshot.
    pub(super) before: Option<String>,
    /// Where the state of its TPM goes, where its configuration says so.
    pub(super) tpm: Option<PathBuf>,
    pub(super) files: Vec<PlannedFile>,
    pub(super) notes: Vec<String>,
    pub(super) warnings: Vec<String>,
}

impl Draft {
    pub(super) fn new(machine: PlannedMachine) -> Self {
        Self {
            machine,
            identity: Identity::Keep,
            definition: None,
            configuration: None,
            before: None,
            tpm: None,
            files: Vec::new(),
            notes: Vec::new(),
            warnings: Vec::new(),
        }
    }

    /// Decides about the disks of a configuration that the snapshot does not have.
    pub(super) fn disks_left_out(
        &mut self,
        stored: &StoredMachine<'_>,
        neighbours: &Neighbours,
    ) -> BTreeMap<String, DiskChange> {
        let mut changes = BTreeMap::new();
        for disk in &stored.xml.disks {
            if super::stored::disks(stored.snapshot).any(|record| record.name == disk.target) {
                continue;
            }
            let target = &disk.target;
            match decide(disk, neighbours) {
                LeftOut::AsItIs => {}
                LeftOut::Kept(place) => self.notes.push(format!("{target} stays at {place}")),
                LeftOut::Emptied(place) => {
                    self.notes
                        .push(format!("the drive {target} becomes empty: {place} is not there"));
                    changes.insert(target.clone(), DiskChange::Empty);
                }
                LeftOut::Dropped(why) => {
                    self.warnings.push(format!(
                        "disk {target}, which the snapshot does not have, is left out: {why}"
                    ));
                    changes.insert(target.clone(), DiskChange::Remove);
                }
            }
        }
        changes
    }
}

/// What becomes of a disk that the snapshot does not have.
enum LeftOut {
    AsItIs,
    Kept(String),
    Emptied(String),
    Dropped(String),
}

fn decide(disk: &MachineDisk, neighbours: &Neighbours) -> LeftOut {
    let is_removable = matches!(disk.kind, DiskKind::Cdrom | DiskKind::Floppy);
    // What several machines may have open, or nobody writes, may be used by another one as well.
    let is_common = disk.is_shared || disk.is_read_only || is_removable;
    let (place, is_there, user) = match &disk.source {
        DiskSource::Empty => return LeftOut::AsItIs,
        DiskSource::File(path) | DiskSource::Device(path) => {
            (path.display().to_string(), path.exists(), neighbours.user_of(path))
        }
        DiskSource::Other(place) => (place.clone(), true, neighbours.user_of_place(place)),
    };
    match user {
        _ if !is_there && is_removable => LeftOut::Emptied(place),
        _ if !is_there => LeftOut::Dropped(format!("{place} is not there")),
        Some(machine) if !is_common => LeftOut::Dropped(format!("{place} is used by the machine {machine}")),
        _ => LeftOut::Kept(place),
    }
}

impl Planner<'_> {
    pub(super) fn random<const N: usize>(&self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.surroundings.randomness.fill(&mut bytes)?;
        Ok(bytes)
    }

    pub(super) fn uuid(&self) -> Result<Uuid> {
        Ok(Uuid::from_random(self.random()?))
    }

    /// What would keep the machine from starting now. One that is refused for what accelerates it only has a way out.
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

/// The configuration cannot be changed so.
pub(super) fn unfit(machine: &str, detail: String) -> Error {
    Refusal::Configuration {
        machine: machine.to_owned(),
        detail,
    }
    .into()
}

/// Opens an image that is there for writing, with a lock that no QEMU takes at the same time.
pub(super) fn open_image(path: &Path, format: Format) -> Result<ImageMut> {
    let options = OpenOptions {
        format: Some(format),
        // QEMU opens them as well, by the same words of the image.
        allow: chain_of(path, Some(format.name())),
        ..OpenOptions::default()
    };
    holdfast_image::open_mut(path, &options).map_err(|error| Error::from(error).on(path))
}

/// The size of what is at a path, in bytes as a machine sees it; it can be written when the machine that writes it now is off.
pub(super) fn size_if_writable_then(path: &Path, format: Format) -> Result<u64> {
    let failed = |error: rustix::io::Errno| Error::File {
        action: "write to",
        path: path.to_owned(),
        source: error.into(),
    };
    access(path, Access::WRITE_OK).map_err(failed)?;
    let options = OpenOptions {
        format: Some(format),
        allow: chain_of(path, Some(format.name())),
        ..OpenOptions::default()
    };
    let source = OpenSource::open_with(path, &options).map_err(|error| error.on(path))?;
    Ok(source.device.size_bytes())
}

/// The size of what is at a path, in bytes as a machine sees it; it can be written, and nobody else writes it.
pub(super) fn size_if_writable(path: &Path, format: Format) -> Result<u64> {
    if is_block_device(path) && format != Format::Raw {
        return Err(Error::DeviceFormat {
            path: path.to_owned(),
            format: format.to_string(),
        });
    }
    if is_block_device(path) {
        // Refused by the operating system where a file system or an array uses it.
        drop(FileDeviceMut::open(path, IoMode::Buffered)?);
    }
    Ok(open_image(path, format)?.size_bytes())
}
