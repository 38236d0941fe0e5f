//! Instant restore: a machine runs from a snapshot while its images are filled.
//!
//! A server of Holdfast provides the disks: the snapshot, with the guest's writes in persistent overlay files on top.
//! The hypervisor copies each disk to its image and switches the machine to the image; after that, nothing of the
//! instant restore remains. The state of the job is in a folder beside the images, which the machine's configuration
//! names. If the process dies, [`resume_instantly`] continues the job. See `docs/design/0006-instant-restore.md`.

mod attempts;
mod fill;
mod folder;
mod rate;
mod server;

use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_host::domain_xml::{Medium, ServedDisks, served_folder, with_served_disks};
use holdfast_host::{ExecutionState, LiveDisks};
use holdfast_repo::{Environment, Repository, SnapshotId};

pub use self::fill::FillOptions;
use self::fill::{DiskFill, JobLock};
use self::folder::{NewJobFolder, name_until_complete, remove_left};
pub(crate) use self::folder::{is_still_unfinished, unfinished_folders};
pub use self::rate::FillRate;
pub use self::server::serve_instantly;
use super::instant_job::MadeFile;
pub use super::instant_job::{InstantDisk, InstantJob};
use super::machine::{FileContent, FileWay, MachineRestorePlan, MadeFiles, write_companions};
use crate::job::error::InstantError;
use crate::job::error::Refusal;
use crate::job::{Error, Job, Result};
use crate::machine::place_note::{HeldSnapshotNote, PlaceJournal, PlaceNote};

/// How long requests of a machine wait for a server that has died, before the machine is paused.
const PATIENCE: Duration = Duration::from_secs(60);

/// Starts the server of a job as a process that outlives this one, and waits until clients can connect.
pub type ServerLauncher<'a> = dyn Fn(&InstantJob) -> Result<()> + 'a;

/// What to restore, and from where.
pub struct InstantRestore<'a> {
    /// The repository.
    pub repository: &'a Repository,
    /// The absolute path of the repository.
    pub location: &'a Path,
    /// The plan; it must be one for a new machine.
    pub plan: &'a MachineRestorePlan,
    /// The folder for overlays with the guest's writes; by default beside the images.
    pub storage: Option<&'a Path>,
    /// How its disks are filled.
    pub fill: &'a FillOptions<'a>,
    /// When the user requested the restore, on the job's clock.
    pub since: Duration,
    /// The journal of the folders in which files are created.
    pub places: Option<PlaceJournal>,
}

/// A machine whose disks were filled while it ran.
#[derive(Debug, Clone)]
pub struct InstantReport {
    /// The machine.
    pub machine: String,
    /// Its UUID.
    pub uuid: String,
    /// The time from the request until the machine ran; none if it already ran, or an interrupted process was to
    /// start it.
    pub runs_after: Option<Duration>,
    /// The size of all its disks in bytes.
    pub size_bytes: u64,
    /// How long this process took to fill them.
    pub fill_duration: Duration,
}

/// Starts the machine of a plan from the snapshot, and fills its disks.
///
/// # Errors
/// If this fails before the machine runs, everything that was created is removed. Later failures remove nothing:
/// [`resume_instantly`] continues the job.
pub fn restore_instantly(
    request: &InstantRestore<'_>,
    hypervisor: &dyn LiveDisks,
    environment: &Environment,
    job: Job<'_>,
) -> Result<InstantReport> {
    let plan = request.plan;
    let definition = plan.definition.as_ref().filter(|_| plan.machine.is_new);
    let definition = &definition.expect("the plan is of a new machine").text;
    let mut instant = job_of(request, hypervisor, environment, definition)?;
    let served = served(&instant, definition)?;
    // The machine runs from the snapshot, so the snapshot must not be removed meanwhile.
    let noted = note_place(request, &instant, job);
    let hold = SnapshotHold::take(request.repository, plan.snapshot.id, instant.hold)?;
    let (mut made, folder, lock) = make(request, hypervisor, &mut instant, environment, job)?;
    let instant = instant;
    let begin = || -> Result<()> {
        (request.fill.launch)(&instant)?;
        // Before this step a killed process leaves a machine that the hypervisor does not know and that never ran.
        // After it, the machine's configuration names the folder.
        hypervisor.define(&served)?;
        let begun = instant.begin();
        let started = begun.and_then(|()| Ok(hypervisor.start(&instant.uuid)?));
        started.inspect_err(|_| {
            if !may_run(hypervisor, &instant)
                && let Err(error) = hypervisor.undefine(&instant.uuid)
            {
                let machine = &instant.machine;
                job.progress.warning(&format!(
                    "{machine} stays defined, without its disks: {error}; virsh undefine {machine} takes it away"
                ));
            }
        })?;
        Ok(())
    };
    if let Err(error) = begin() {
        if may_run(hypervisor, &instant) {
            // The machine is defined; only the reply was lost.
            made.keep();
            folder.keep();
            hold.keep();
            instant.warn_of_resume(job);
            return Err(error);
        }
        server::stop(&instant, job.clock);
        return Err(error);
    }
    made.keep();
    folder.keep();
    hold.keep();
    drop(noted);
    let runs_after = job.clock.now().saturating_sub(request.since);
    job.progress.note(&format!(
        "{} runs after {:.1} s; its disks are being filled",
        instant.machine,
        runs_after.as_secs_f64()
    ));
    let report = DiskFill::new(hypervisor, &instant, request.fill, job).run(lock)?;
    release_snapshot(request.repository, &instant, job);
    Ok(InstantReport {
        runs_after: Some(runs_after),
        ..report
    })
}

/// Notes where the folder and the images are created and which snapshot is held, until the machine's configuration
/// names the folder.
fn note_place(request: &InstantRestore<'_>, instant: &InstantJob, job: Job<'_>) -> Vec<PlaceNote> {
    let Some(journal) = &request.places else {
        return Vec::new();
    };
    let held = HeldSnapshotNote {
        repository: request.repository.config().id.to_string(),
        snapshot: instant.snapshot.clone(),
        holder: instant.hold,
        folder: instant.folder.clone(),
    };
    let beside = instant.folder.parent().map(Path::to_owned);
    let images = instant.made_files_folders().into_iter();
    let images = images
        .filter(|place| beside.as_ref() != Some(place))
        .map(|place| (place, None));
    let of_folder = beside.clone().map(|place| (place, Some(held)));
    let mut noted = Vec::new();
    let mut number = instant.hold;
    for (place, held) in of_folder.into_iter().chain(images) {
        match PlaceNote::holding(journal, &place, number, held) {
            Ok(note) => noted.push(note),
            Err(error) => job.progress.note(&format!("not noted for holdfast doctor: {error}")),
        }
        number = number.wrapping_add(1);
    }
    noted
}

/// Creates empty images and the job's folder.
fn make(
    request: &InstantRestore<'_>,
    hypervisor: &dyn LiveDisks,
    instant: &mut InstantJob,
    environment: &Environment,
    job: Job<'_>,
) -> Result<(MadeFiles, NewJobFolder, JobLock)> {
    let mut noted = None;
    remove_left(&instant.folder);
    // A later cleanup must recognise the images of a killed restore.
    let mut note = |files: &[(&Path, &Path)]| {
        let made = files
            .iter()
            .filter_map(|(name, partial)| Some(MadeFile::at(partial)?.called(name)));
        instant.made = made.collect();
        // The folder gets its final name only when it is complete.
        let place = instant.folder.clone();
        instant.folder = name_until_complete(&place, instant.hold);
        let mut folder = NewJobFolder::make(&instant.folder)?;
        let lock = fill::lock(instant)?;
        instant.write()?;
        folder.rename(&place)?;
        instant.folder = place;
        noted = Some((folder, lock));
        Ok(())
    };
    let made = write_companions(
        request.repository,
        hypervisor,
        request.plan,
        environment,
        job,
        &mut note,
    )?;
    let (folder, lock) = noted.expect("files have their names only when they were noted");
    Ok((made, folder, lock))
}

/// Builds the job before anything is created for it.
fn job_of(
    request: &InstantRestore<'_>,
    hypervisor: &dyn LiveDisks,
    environment: &Environment,
    definition: &str,
) -> Result<InstantJob> {
    let plan = request.plan;
    // Another machine of the same UUID may run from the same snapshot, on another host.
    let mut hold = [0; 4];
    environment.randomness.fill(&mut hold)?;
    Ok(InstantJob {
        repository: request.location.to_owned(),
        snapshot: plan.snapshot.id.to_string(),
        listed: plan.snapshot.machine.clone(),
        machine: plan.machine.name.clone(),
        uuid: plan.machine.uuid.clone(),
        definition: definition.to_owned(),
        disks: disks(plan),
        user_of_machines: hypervisor.user_of_machines()?,
        folder: folder(request)?,
        made: Vec::new(),
        hold: u32::from_be_bytes(hold),
    })
}

/// Machines whose job cannot be read, and why.
pub type UnreadableJobs = Vec<(String, Error)>;

/// The machines whose disks are not filled yet: the one of this name, or all.
///
/// # Errors
/// The named machine has no such job, or its job cannot be read.
pub fn instant_jobs(hypervisor: &dyn LiveDisks, machine: Option<&str>) -> Result<(Vec<InstantJob>, UnreadableJobs)> {
    let names = if let Some(name) = machine {
        vec![(name.to_owned(), name.to_owned())]
    } else {
        let machines = hypervisor.machines()?.into_iter();
        machines.map(|machine| (machine.uuid, machine.name)).collect()
    };
    let (mut jobs, mut unreadable) = (Vec::new(), Vec::new());
    for (id, name) in names {
        let configuration = match hypervisor.machine(&id).and_then(|machine| machine.configuration()) {
            // The machine ended meanwhile.
            Err(holdfast_host::Error::NoSuchMachine { .. }) if machine.is_none() => continue,
            other => other?,
        };
        let folders = configuration.iter().map(|(_, bytes)| {
            let text = std::str::from_utf8(bytes).ok()?;
            served_folder(text)
        });
        let folders: Vec<Option<PathBuf>> = folders.collect();
        // The first configuration is the persistent one. If only the running configuration names the folder, the folder
        // is no longer needed.
        let is_needed = folders.first().is_some_and(Option::is_some);
        match folders
            .into_iter()
            .flatten()
            .find(|folder| is_needed || folder.exists())
        {
            Some(folder) => match InstantJob::read(&folder) {
                Ok(job) => jobs.push(job),
                Err(error) if machine.is_some() => return Err(error),
                Err(error) => unreadable.push((name, error)),
            },
            None if machine.is_some() => return Err(InstantError::NotFilled { machine: name }.into()),
            None => {}
        }
    }
    Ok((jobs, unreadable))
}

/// Restarts the server of an instant restore and resumes its machine; the disks are filled later.
pub fn revive_instantly(
    hypervisor: &dyn LiveDisks,
    instant: &InstantJob,
    options: &FillOptions<'_>,
    job: Job<'_>,
) -> Result<()> {
    let _lock = fill::lock(instant)?;
    instant.begin()?;
    DiskFill::new(hypervisor, instant, options, job).revive()
}

/// Continues an interrupted instant restore: restarts its server, resumes its machine, and fills its disks.
pub fn resume_instantly(
    hypervisor: &dyn LiveDisks,
    instant: &InstantJob,
    options: &FillOptions<'_>,
    job: Job<'_>,
) -> Result<InstantReport> {
    let lock = fill::lock(instant)?;
    instant.begin()?;
    DiskFill::new(hypervisor, instant, options, job).run(lock)
}

/// Releases the snapshot of a machine that no longer runs from it.
///
/// If that fails, the snapshot stays protected and a warning says so; the job itself has succeeded.
pub fn release_snapshot(repository: &Repository, instant: &InstantJob, job: Job<'_>) {
    let released = match instant.snapshot.parse() {
        Ok(snapshot) => repository.release(snapshot, instant.hold),
        Err(_) => Ok(()),
    };
    if let Err(error) = released {
        let snapshot = &instant.snapshot;
        job.progress.warning(&format!(
            "the snapshot stays protected: {error}; holdfast unprotect --held {snapshot} ends it"
        ));
    }
}

/// Holds a snapshot for a job. Dropping it releases the hold, unless it was kept.
struct SnapshotHold<'r>(Option<(&'r Repository, SnapshotId, u32)>);

impl<'r> SnapshotHold<'r> {
    fn take(repository: &'r Repository, snapshot: SnapshotId, holder: u32) -> Result<Self> {
        repository.hold(snapshot, holder)?;
        Ok(Self(Some((repository, snapshot, holder))))
    }

    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for SnapshotHold<'_> {
    fn drop(&mut self) {
        if let Some((repository, snapshot, holder)) = self.0 {
            // This runs after another error; a snapshot that stays protected loses no data.
            drop(repository.release(snapshot, holder));
        }
    }
}

/// The state of an instant restore, read from its folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InstantState {
    /// A process is creating it or filling its disks.
    pub(crate) is_attended: bool,
    /// Its server is running.
    pub(crate) has_server: bool,
    /// Its machine may have run.
    pub(crate) has_begun: bool,
}

impl InstantJob {
    /// Reads the state. Nothing is changed.
    pub(crate) fn state(&self) -> Result<InstantState> {
        Ok(InstantState {
            is_attended: self.is_locked(fill::LOCK)?,
            has_server: server::lives(self)?,
            has_begun: self.has_begun(),
        })
    }

    /// Removes everything that was created for a machine that never ran, except files that `is_used` reports as in use.
    pub(crate) fn abandon(&self, is_used: &dyn Fn(&Path) -> bool, clock: &dyn Clock) -> Result<()> {
        server::stop(self, clock);
        // Another file may have taken the path since.
        let unused = self.made.iter().filter(|made| made.is_there() && !is_used(&made.path));
        let files = unused.map(|made| (&made.path, std::fs::remove_file(&made.path)));
        let folder = std::iter::once_with(|| (&self.folder, std::fs::remove_dir_all(&self.folder)));
        for (path, removed) in files.chain(folder) {
            if let Err(source) = removed
                && source.kind() != std::io::ErrorKind::NotFound
            {
                return Err(Error::File {
                    action: "remove",
                    path: path.clone(),
                    source,
                });
            }
        }
        Ok(())
    }
}

/// The disks of a plan, and their targets.
fn disks(plan: &MachineRestorePlan) -> Vec<InstantDisk> {
    let disks = plan.files.iter().filter_map(|file| match &file.content {
        FileContent::Disk(name) => Some(InstantDisk {
            name: name.clone(),
            target: file.to.clone(),
            format: file.format.qemu_name().to_owned(),
            is_block_device: medium(file.way) == Medium::BlockDevice,
            size_bytes: file.size_bytes,
        }),
        FileContent::FirmwareVariables | FileContent::TpmState(_) => None,
    });
    disks.collect()
}

/// Whether the machine of a job runs or may run.
fn may_run(hypervisor: &dyn LiveDisks, instant: &InstantJob) -> bool {
    !matches!(
        hypervisor.execution_state(&instant.uuid),
        Ok(ExecutionState::ShutOff) | Err(holdfast_host::Error::NoSuchMachine { .. })
    )
}

fn medium(way: FileWay) -> Medium {
    match way {
        FileWay::BlockDevice => Medium::BlockDevice,
        FileWay::NewFile
        | FileWay::InPlace
        | FileWay::Replace
        | FileWay::SetAside
        | FileWay::Shared
        | FileWay::Cloned => Medium::File,
    }
}

/// A folder for this machine, in the chosen folder or beside its first image.
fn folder(request: &InstantRestore<'_>) -> Result<PathBuf> {
    let is_file = |file: &&crate::PlannedFile| matches!(file.way, FileWay::NewFile | FileWay::Replace);
    let mut files = request.plan.files.iter().filter(is_file);
    let beside = || {
        files
            .find(|file| matches!(file.content, FileContent::Disk(_)))?
            .to
            .parent()
    };
    let storage = request.storage.or_else(beside).ok_or_else(|| Refusal::NoPlace {
        disk: "for what the guest writes".to_owned(),
        place: "no file".to_owned(),
    })?;
    let storage = std::path::absolute(storage).map_err(|source| Error::File {
        action: "find",
        path: storage.to_owned(),
        source,
    })?;
    Ok(storage.join(format!(".{}.holdfast", request.plan.machine.name)))
}

/// The configuration of the machine while the server provides its disks.
fn served(instant: &InstantJob, definition: &str) -> Result<String> {
    let exports = instant
        .disks
        .iter()
        .map(|disk| (disk.name.clone(), instant.export(disk)));
    let served = ServedDisks {
        socket: instant.socket(),
        patience: PATIENCE,
        exports: exports.collect(),
        folder: instant.folder.clone(),
    };
    let text = with_served_disks(definition, &served).map_err(|detail| Refusal::Configuration {
        machine: instant.machine.clone(),
        detail,
    })?;
    Ok(text)
}

/// The interval between two checks of the progress.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

fn pause(clock: &dyn Clock) {
    clock.sleep(LOOK_INTERVAL);
}
