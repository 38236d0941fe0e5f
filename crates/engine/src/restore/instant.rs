//! A machine that runs from a snapshot at once, and whose images are filled while it runs.
//!
//! A server of our own gives its disks: the snapshot, and over it, in files that last, what the guest writes. The hypervisor
//! copies each disk to its image, has the machine go over to it, and then nothing of the instant restore is left. What is to be known of it
//! is in a folder beside the images, which the machine's own configuration names; if the process dies in between, [`resume_instantly`]
//! goes on. See `docs/design/0006-instant-restore.md`.

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

/// How long requests of a machine wait for a server that is gone, before it is paused.
const PATIENCE: Duration = Duration::from_secs(60);

/// Starts a server for a job, as a process that outlives this one, and waits until clients can connect.
pub type ServerLauncher<'a> = dyn Fn(&InstantJob) -> Result<()> + 'a;

/// What is to be restored, and from where.
pub struct InstantRestore<'a> {
    /// The repository.
    pub repository: &'a Repository,
    /// Where it is, from the root on.
    pub location: &'a Path,
    /// What is to be done; of a new machine.
    pub plan: &'a MachineRestorePlan,
    /// Where what the guest writes is kept for the time being; beside its images otherwise.
    pub storage: Option<&'a Path>,
    /// How its disks are filled.
    pub fill: &'a FillOptions<'a>,
    /// When the person asked, on the job's clock.
    pub since: Duration,
    /// Where the places are noted in which it makes something.
    pub places: Option<PlaceJournal>,
}

/// A machine whose disks were filled while it ran.
#[derive(Debug, Clone)]
pub struct InstantReport {
    /// The machine.
    pub machine: String,
    /// Its UUID.
    pub uuid: String,
    /// How long it took until it ran; none where it ran already, or was to run before.
    pub runs_after: Option<Duration>,
    /// Bytes of its disks.
    pub size_bytes: u64,
    /// How long it took to fill them, this time.
    pub fill_duration: Duration,
}

/// Starts the machine of a plan from the snapshot, and fills its disks.
///
/// # Errors
/// Before it runs, what was made is taken away again. After that, nothing is: [`resume_instantly`] goes on.
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
    // The machine runs from the snapshot: it must not be removed meanwhile.
    let noted = note_place(request, &instant, job);
    let hold = SnapshotHold::take(request.repository, plan.snapshot.id, instant.hold)?;
    let (mut made, folder, lock) = make(request, hypervisor, &mut instant, environment, job)?;
    let instant = instant;
    let begin = || -> Result<()> {
        (request.fill.launch)(&instant)?;
        // Killed before this, the machine is unknown and never ran; killed after it, its configuration names the folder.
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
            // Only the answer was lost.
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

/// Notes where the folder and the images are made, and what is held, until the machine's configuration names the folder.
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

/// Makes the images, with nothing in them, and what is noted of the job.
fn make(
    request: &InstantRestore<'_>,
    hypervisor: &dyn LiveDisks,
    instant: &mut InstantJob,
    environment: &Environment,
    job: Job<'_>,
) -> Result<(MadeFiles, NewJobFolder, JobLock)> {
    let mut noted = None;
    remove_left(&instant.folder);
    // The images of a restore that was killed must be recognised.
    let mut note = |files: &[(&Path, &Path)]| {
        let made = files
            .iter()
            .filter_map(|(name, partial)| Some(MadeFile::at(partial)?.called(name)));
        instant.made = made.collect();
        // The folder is visible only when all of this is in it.
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

/// The job, before anything is made for it.
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

/// The machines whose disks are not filled yet, of this name, or all.
///
/// # Errors
/// The machine that is named has no such job, or one that cannot be read.
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
            // It has ended while we looked.
            Err(holdfast_host::Error::NoSuchMachine { .. }) if machine.is_none() => continue,
            other => other?,
        };
        let folders = configuration.iter().map(|(_, bytes)| {
            let text = std::str::from_utf8(bytes).ok()?;
            served_folder(text)
        });
        let folders: Vec<Option<PathBuf>> = folders.collect();
        // The first is how it will start the next time. That it runs with the folder's name means nothing once that is gone.
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

/// Brings the server of an instant restore back, and lets its machine run; its disks are to be filled later.
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

/// Goes on where an instant restore was left: brings its server back, lets its machine run, and fills its disks.
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

/// Releases the snapshot of a machine that does not run from it any more.
///
/// Where that fails the snapshot stays protected, and a warning says so; the job itself has succeeded.
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

/// A snapshot that is held for a job, and not any more when this goes, unless it is kept.
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
            // Another error brought us here; a snapshot that stays protected is no loss.
            drop(repository.release(snapshot, holder));
        }
    }
}

/// How an instant restore is, by what is in its folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InstantState {
    /// A process creates it, or fills its disks.
    pub(crate) is_attended: bool,
    /// Its server serves.
    pub(crate) has_server: bool,
    /// Its machine may have run.
    pub(crate) has_begun: bool,
}

impl InstantJob {
    /// How it is. Nothing is changed.
    pub(crate) fn state(&self) -> Result<InstantState> {
        Ok(InstantState {
            is_attended: self.is_locked(fill::LOCK)?,
            has_server: server::lives(self)?,
            has_begun: self.has_begun(),
        })
    }

    /// Takes away all that was made for a machine that never ran; but for files that `is_used` by another.
    pub(crate) fn abandon(&self, is_used: &dyn Fn(&Path) -> bool, clock: &dyn Clock) -> Result<()> {
        server::stop(self, clock);
        // Another file may have come there since.
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

/// The disks of a plan, and where they go.
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

/// Whether the machine of a job runs, or that is not known.
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

/// A folder of the machine's own, in the one that was chosen or beside its first image.
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

/// The configuration of the machine as long as its disks come from the server.
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

/// How often is looked how far things are.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

fn pause(clock: &dyn Clock) {
    clock.sleep(LOOK_INTERVAL);
}
