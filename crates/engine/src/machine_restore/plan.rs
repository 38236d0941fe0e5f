//! What a restore of a machine will do: a value that changes nothing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use holdfast_block::{BlockDevice as _, FileDeviceMut, IoMode};
use holdfast_host::domain_xml::{DiskChange, Identity, Medium};
use holdfast_host::{DiskKind, DiskSource, HypervisorMut, MachineDisk, TpmStore, Uuid};
use holdfast_image::{Format, ImageMut, OpenOptions};
use holdfast_repo::{Manifest, Repository, Surroundings};
use jiff::tz::TimeZone;
use rustix::fs::{Access, access};

use super::neighbours::{Neighbours, chain_of};
use super::places::{check_rooms, rooms};
use super::refusal::Refusal;
use super::resumption::{self, PlannedResumption};
use super::stored::StoredMachine;
use super::{in_place, new_machine};
use crate::block_target::is_block_device;
use crate::contents::Contents;
use crate::error::{Error, Result};
use crate::exchange::VIRTUALBOX_NVRAM;
use crate::job::Job;
use crate::new_image::Overwrite;
use crate::repository::find_snapshot;
use crate::source::OpenSource;
use crate::{MachineName, SnapshotName, Unit};

/// What to restore, and as what.
#[derive(Debug, Clone)]
pub struct MachineRestoreRequest {
    /// The snapshot.
    pub name: SnapshotName,
    /// As what.
    pub restore_as: RestoreAs,
    /// What comes after.
    pub after: AfterRestore,
    /// A folder for the pipe through which a hypervisor gets memory.
    pub runtime: PathBuf,
    /// In which times of the snapshot's name are meant.
    pub zone: TimeZone,
}

/// What a snapshot becomes.
#[derive(Debug, Clone)]
pub enum RestoreAs {
    /// A machine that is not there.
    NewMachine(NewMachineWish),
    /// The machine that is there goes back in time.
    InPlace(InPlaceWish),
}

/// How a new machine is to be.
#[derive(Debug, Clone)]
pub struct NewMachineWish {
    /// What it is called; otherwise a name is made from that in the snapshot.
    pub name: Option<MachineName>,
    /// Who it is.
    pub identity: NewMachineIdentity,
    /// The folder for its images; otherwise they go beside the originals.
    pub storage: Option<PathBuf>,
    /// The format of its new images; otherwise that of the originals.
    pub format: Option<Format>,
    /// New files or block devices for single disks.
    pub places: BTreeMap<String, PathBuf>,
    /// Whether what is in these files and on these block devices may be lost.
    pub overwrite: Overwrite,
}

/// Who a new machine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NewMachineIdentity {
    /// Another one: new UUID, new addresses of network cards, so that both can run.
    #[default]
    New,
    /// The one in the snapshot, which must not be there.
    Keep,
}

/// What is to be done to a machine that is there.
#[derive(Debug, Clone)]
pub struct InPlaceWish {
    /// The machine; otherwise the one that the snapshot is of.
    pub machine: Option<String>,
    /// What becomes of its configuration.
    pub configuration: ConfigurationChoice,
    /// Whether it may run while this is planned.
    pub presence: Presence,
}

/// Whether a machine that is there may run while it is planned what becomes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Presence {
    /// It is shut off.
    #[default]
    ShutOff,
    /// It will be switched off before anything is written; what would be refused then is refused now.
    SwitchedOffFirst,
}

/// What becomes of the configuration of a machine that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ConfigurationChoice {
    /// It stays as it is.
    #[default]
    Keep,
    /// The snapshot's takes its place.
    Restore,
}

/// What comes after a restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AfterRestore {
    /// The machine stays shut off.
    #[default]
    LeaveOff,
    /// It is started.
    Start,
    /// It goes on from the memory in the snapshot.
    Resume,
}

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
    /// The room that they need.
    pub rooms: Vec<Room>,
    /// What a person may want to know.
    pub notes: Vec<String>,
    /// What a person should look at.
    pub warnings: Vec<String>,
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

/// A file or block device that will be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedFile {
    /// What it holds.
    pub content: Content,
    /// Where that was when it was backed up.
    pub from: Option<PathBuf>,
    /// Where it will be.
    pub to: PathBuf,
    /// How it holds it.
    pub format: Format,
    /// How it is written.
    pub way: FileWay,
    /// Where the file that is there now is kept, with [`FileWay::SetAside`].
    pub kept_at: Option<PathBuf>,
    /// Its size as the machine sees it, in bytes.
    pub size_bytes: u64,
    /// Bytes of that which are not zero, about.
    pub data_bytes: u64,
}

impl PlannedFile {
    /// What it will be. The device of a volume that will be cloned is not there yet.
    pub(crate) fn medium(&self) -> Medium {
        let is_device = self.way == FileWay::BlockDevice
            || is_block_device(&self.to)
            || (self.way == FileWay::Cloned && self.to.starts_with("/dev"));
        if is_device { Medium::BlockDevice } else { Medium::File }
    }
}

/// What a file of a machine holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// A disk, by its name.
    Disk(String),
    /// The firmware's variables.
    FirmwareVariables,
    /// The permanent state of its TPM.
    TpmState(TpmStore),
}

/// How a file is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileWay {
    /// It is new.
    NewFile,
    /// What is on the block device is written over.
    BlockDevice,
    /// What differs is written into what is there.
    InPlace,
    /// It takes the place of the one that is there, which stays until then.
    Replace,
    /// It is new; the file that is there, which cannot be used, is kept under another name.
    SetAside,
    /// It is new, and shares its blocks with a host snapshot: nothing is written.
    Shared,
    /// It is in a clone of its dataset, which is made before: nothing is written.
    Cloned,
}

impl FileWay {
    /// A word for scripts.
    pub fn word(self) -> &'static str {
        match self {
            Self::NewFile => "new",
            Self::BlockDevice => "overwrite",
            Self::InPlace => "in-place",
            Self::Replace => "replace",
            Self::SetAside => "set-aside",
            Self::Shared => "shared",
            Self::Cloned => "cloned",
        }
    }
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
    let rooms = rooms(&drafted.files)?;
    check_rooms(&rooms)?;
    let (mut notes, mut warnings) = (drafted.notes, drafted.warnings);
    if resumption.is_none() && super::stored::has_memory(&snapshot) {
        notes.push("its memory is not restored, and it starts as after a power cut: --resume lets it go on".to_owned());
    }
    if snapshot.disks.iter().any(|record| record.name == VIRTUALBOX_NVRAM) {
        notes.push(
            "the variables of its firmware are VirtualBox's, and stay behind: it looks for what to start anew"
                .to_owned(),
        );
    }
    if let Some(definition) = &drafted.definition
        && let Some(reason) = planner.hypervisor.check(&definition.text)?
    {
        warnings.push(format!("it would not start as things are now: {reason}"));
    }
    Ok(MachineRestorePlan {
        machine: drafted.machine,
        definition: drafted.definition,
        files: drafted.files,
        rooms,
        notes,
        warnings,
        after,
        resumption,
        snapshot,
    })
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
