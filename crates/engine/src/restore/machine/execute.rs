//! Executes a restore plan.

use std::path::Path;
use std::time::Duration;

use holdfast_block::{FileLock, error_text};
use holdfast_host::{Error as HostError, HypervisorMut, MachineState};
use holdfast_image::{CreateOptions, Format};
use holdfast_repo::{DiskRecord, Environment, Repository, TargetState};

use super::draft::Planner;
use super::host_folders::HostFolders;
use super::made_files::MadeFiles;
use super::observer::{NoObserver, RestoreObserver};
use super::output::{OutputDevice, open_present, write_whole};
use super::plan::MachineRestorePlan;
use super::planned_file::{FileContent, FileWay, PlannedFile};
use super::present_image::open_image;
use super::request::AfterRestore;
use super::resumption::Resumed;
use super::stored;
use super::tpm;
use super::tpm::MadeFolders;
use crate::files::atomic_file::{Existing, NewFile, clear_left};
use crate::files::block_target::lock;
use crate::job::error::Refusal;
use crate::job::{Error, Job, Result, Unit};
use crate::restore::small_stream::bytes_of;
use crate::restore::source::StoredContents;
use crate::restore::target::{DiskTarget, RestoredDisk};

/// The result of a machine's restore.
#[derive(Debug, Clone)]
pub struct MachineRestoreReport {
    /// The restored disks.
    pub disks: Vec<RestoredDisk>,
    /// Whether the machine runs.
    pub started: Started,
    /// How long the restore took.
    pub duration: Duration,
}

/// Whether a restored machine runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Started {
    /// The start was not requested.
    NotAsked,
    /// It runs.
    Yes,
    /// It resumed from its memory.
    Resumed(Resumed),
    /// It was restored but does not start; the reason as text.
    Failed(String),
}

/// Executes a plan.
///
/// If this fails, the files and the definition that it created are removed. What it changed in place cannot be undone:
/// repeating the restore completes it, and a warning says so. A machine that was restored but does not start is not a
/// failure: it is kept.
pub fn restore_machine(
    repository: &Repository,
    hypervisor: &dyn HypervisorMut,
    plan: &MachineRestorePlan,
    environment: &Environment,
    job: Job<'_>,
) -> Result<MachineRestoreReport> {
    let planner = Planner {
        repository,
        contents: repository,
        hypervisor,
        environment,
    };
    restore_point(&planner, plan, &mut NoObserver, job)
        .map_err(|error| error.unless_removed(repository, plan.snapshot.id))
}

/// Executes the plan for any point in time.
pub(crate) fn restore_point(
    planner: &Planner<'_>,
    plan: &MachineRestorePlan,
    observer: &mut dyn RestoreObserver,
    job: Job<'_>,
) -> Result<MachineRestoreReport> {
    let start = job.clock.now();
    let execution = RestoreExecution {
        repository: planner.repository,
        contents: planner.contents,
        hypervisor: planner.hypervisor,
        plan,
        environment: planner.environment,
        job,
    };
    execution.clear_left();
    let outputs = execution.open()?;
    // Files that are open here are locked: from now on no QEMU can start with them.
    execution.check_machine()?;
    observer.about_to_write()?;
    let disks = execution.write(&outputs)?;
    execution.check_alone(&outputs)?;
    observer.about_to_name(&new_files(&outputs))?;
    let mut made = MadeFiles::with(HostFolders::make(&plan.folders)?);
    // Until all files are of one point in time, the machine must not start with some of them.
    let (mut locked, mut locked_new) = (Vec::new(), Vec::new());
    for output in outputs {
        let to_lock = execution.new_disk_in_place(&output);
        locked.extend(finish(output, &mut made)?);
        if let Some(path) = to_lock {
            locked_new.push(lock(path)?);
        }
    }
    if plan.machine.is_new {
        // The hypervisor does not know the machine yet, so nothing can start with these files.
        locked.clear();
        locked_new.clear();
        observer.has_files()?;
    } else {
        // These files belong to an existing machine, even if its configuration cannot be changed.
        made.keep();
    }
    execution.define(&mut made)?;
    drop(locked);
    drop(locked_new);
    made.keep();
    Ok(MachineRestoreReport {
        disks,
        started: execution.start(),
        duration: job.clock.now().saturating_sub(start),
    })
}

/// A callback for new files. It receives the final path and the temporary path of each.
pub(crate) type BeforeNames<'a> = dyn FnMut(&[(&Path, &Path)]) -> Result<()> + 'a;

/// Writes a new machine's files other than disks, and creates its disks empty. Dropping the result deletes the created
/// files, unless [`keep`](Made::keep) was called. `before_names` receives all new files before the first of them gets
/// its final name.
pub(crate) fn write_companions(
    repository: &Repository,
    hypervisor: &dyn HypervisorMut,
    plan: &MachineRestorePlan,
    environment: &Environment,
    job: Job<'_>,
    before_names: &mut BeforeNames<'_>,
) -> Result<MadeFiles> {
    let execution = RestoreExecution {
        repository,
        contents: repository,
        hypervisor,
        plan,
        environment,
        job,
    };
    execution.clear_left();
    let outputs = execution.open()?;
    execution.check_machine()?;
    for output in &outputs {
        match &output.device {
            None => execution.write_bytes(output)?,
            Some(device) => device.as_device().flush()?,
        }
    }
    before_names(&new_files(&outputs))?;
    let mut made = MadeFiles::with(HostFolders::make(&plan.folders)?);
    for output in outputs {
        finish(output, &mut made)?;
    }
    Ok(made)
}

/// The files that did not exist before: the final and the temporary path of each.
fn new_files<'o>(outputs: &'o [Output<'_>]) -> Vec<(&'o Path, &'o Path)> {
    let is_new = |output: &&Output<'_>| matches!(output.file.way, FileWay::NewFile | FileWay::Shared);
    let new = outputs.iter().filter(is_new);
    new.filter_map(|output| Some((output.file.to.as_path(), output.new.as_ref()?.partial())))
        .collect()
}

/// A file that is being written.
struct Output<'p> {
    file: &'p PlannedFile,
    record: &'p DiskRecord,
    /// The file under its temporary name.
    new: Option<NewFile>,
    /// The folders that were created for it.
    folders: MadeFolders,
    device: Option<OutputDevice>,
    /// Prevents others from using the file that this one replaces.
    _lock: Option<FileLock>,
}

struct RestoreExecution<'a> {
    repository: &'a Repository,
    contents: &'a dyn StoredContents,
    hypervisor: &'a dyn HypervisorMut,
    plan: &'a MachineRestorePlan,
    environment: &'a Environment,
    job: Job<'a>,
}

impl<'a> RestoreExecution<'a> {
    /// Removes leftovers of a killed restore under these names; they only take up space.
    fn clear_left(&self) {
        let new = self.plan.files.iter();
        let new = new.filter(|file| {
            matches!(
                file.way,
                FileWay::NewFile | FileWay::Replace | FileWay::SetAside | FileWay::Shared
            )
        });
        let paths: Vec<&Path> = new.map(|file| file.to.as_path()).collect();
        clear_left(&paths, self.job.progress);
    }

    /// Opens or creates all files, so that errors are found before the first byte is written.
    fn open(&self) -> Result<Vec<Output<'a>>> {
        let open = |file| self.open_one(file);
        self.plan.files.iter().map(open).collect()
    }

    fn open_one(&self, file: &'a PlannedFile) -> Result<Output<'a>> {
        let record = match &file.content {
            FileContent::Disk(name) => self.plan.snapshot.disk(Some(name))?,
            FileContent::FirmwareVariables => {
                stored::nvram(&self.plan.snapshot).expect("the plan is made of what the snapshot has")
            }
            FileContent::TpmState(_) => {
                stored::tpm(&self.plan.snapshot).expect("the plan is made of what the snapshot has")
            }
        };
        let (folders, lock) = match file.content {
            FileContent::TpmState(store) => (MadeFolders::make(&file.to)?, tpm::lock(&file.to, store)?),
            FileContent::Disk(_) | FileContent::FirmwareVariables => (MadeFolders::default(), None),
        };
        let existing = match file.way {
            FileWay::Replace | FileWay::SetAside => Existing::Replace,
            _ => Existing::Keep,
        };
        let new = match file.way {
            FileWay::NewFile | FileWay::Replace | FileWay::SetAside | FileWay::Shared => {
                Some(NewFile::begin(&file.to, existing, self.environment)?)
            }
            FileWay::BlockDevice | FileWay::InPlace | FileWay::Cloned => None,
        };
        let device = match (&file.content, &new) {
            (FileContent::FirmwareVariables | FileContent::TpmState(_), _) => None,
            (FileContent::Disk(_), Some(new)) if file.way == FileWay::Shared => {
                self.contents.share(record, new.partial())?;
                None
            }
            (FileContent::Disk(_), Some(new)) if file.format == Format::Raw => {
                Some(OutputDevice::Plain(new.create_sparse(record.size_bytes)?))
            }
            (FileContent::Disk(_), Some(new)) => {
                let options = CreateOptions::new(file.format, record.size_bytes).of_whole_sectors();
                holdfast_image::create(new.partial(), &options)?;
                Some(OutputDevice::Image(open_image(new.partial(), file.format)?))
            }
            (FileContent::Disk(_), None) if file.way == FileWay::Cloned => None,
            (FileContent::Disk(_), None) => Some(open_present(file, record)?),
        };
        Ok(Output {
            file,
            record,
            new,
            folders,
            device,
            _lock: lock,
        })
    }

    /// The path of a disk that is a new file of an existing machine, which could start with it.
    fn new_disk_in_place(&self, output: &Output<'a>) -> Option<&'a Path> {
        let is_new = matches!(output.file.way, FileWay::NewFile | FileWay::SetAside);
        let is_disk = matches!(output.file.content, FileContent::Disk(_));
        (is_new && is_disk && !self.plan.machine.is_new).then_some(&*output.file.to)
    }

    /// Checks that the machine is as the plan found it.
    fn check_machine(&self) -> Result<()> {
        let machine = &self.plan.machine;
        let changed = || {
            Err(Refusal::Changed {
                machine: machine.name.clone(),
            }
            .into())
        };
        let present = match self.hypervisor.machine(&machine.uuid) {
            Err(HostError::NoSuchMachine { .. }) => None,
            other => Some(other?),
        };
        match present {
            None if machine.is_new => Ok(()),
            None => changed(),
            Some(_) if machine.is_new => changed(),
            Some(present) if present.describe()?.summary.state != MachineState::ShutOff => changed(),
            Some(_) => Ok(()),
        }
    }

    /// Checks that no process has begun to use the files. Locks keep machines away from files, but from devices only if
    /// they open the same device file.
    fn check_alone(&self, outputs: &[Output<'_>]) -> Result<()> {
        let devices = outputs.iter().filter_map(|output| match &output.device {
            Some(OutputDevice::BlockDevice(device)) => Some(device),
            _ => None,
        });
        for device in devices {
            device.check_alone()?;
            self.check_machine()?;
        }
        Ok(())
    }

    fn write(&self, outputs: &[Output<'a>]) -> Result<Vec<RestoredDisk>> {
        let name = &self.plan.machine.name;
        self.job.progress.phase(&format!("restoring {name}"), Unit::Bytes);
        let total = outputs.iter().map(|output| output.record.size_bytes).sum();
        self.job.progress.total(total);
        let mut restored = Vec::new();
        for output in outputs {
            self.job
                .interrupt
                .check()
                .map_err(Error::from)
                .and_then(|()| {
                    if let Some(device) = &output.device {
                        restored.push(self.write_disk(output, device)?);
                    } else if matches!(output.file.way, FileWay::Shared | FileWay::Cloned) {
                        restored.push(shared(output));
                    } else {
                        self.write_bytes(output)?;
                    }
                    Ok(())
                })
                .inspect_err(|_| self.warn_of_mixture(&restored))?;
        }
        Ok(restored)
    }

    fn write_disk(&self, output: &Output<'_>, device: &OutputDevice) -> Result<RestoredDisk> {
        let target = DiskTarget {
            path: &output.file.to,
            device: device.as_device(),
            format: Some(output.file.format),
            state: match output.file.way {
                FileWay::NewFile | FileWay::Replace | FileWay::SetAside | FileWay::Shared | FileWay::Cloned => {
                    TargetState::Zeroed
                }
                FileWay::BlockDevice => TargetState::Unknown,
                FileWay::InPlace => TargetState::Similar,
            },
        };
        let written = self.contents.write(output.record, &target, self.job);
        written.map_err(|error| error.on(&output.file.to))
    }

    /// Writes a small file as a whole; if it replaces another file, it gets that file's owner and mode.
    fn write_bytes(&self, output: &Output<'_>) -> Result<()> {
        let new = output.new.as_ref().expect("only disks are written in place");
        let bytes = bytes_of(self.repository, output.record)?;
        let written = match output.file.content {
            FileContent::TpmState(_) => tpm::write(new.partial(), &bytes, &output.file.to),
            FileContent::Disk(_) | FileContent::FirmwareVariables => {
                write_whole(new.partial(), &bytes, &output.file.to)
            }
        };
        written.map_err(|source| Error::File {
            action: "write",
            path: output.file.to.clone(),
            source,
        })?;
        self.job.progress.advance(output.record.size_bytes);
        Ok(())
    }

    /// Warns that complete disks do not make a usable machine if other disks are incomplete.
    fn warn_of_mixture(&self, restored: &[RestoredDisk]) {
        if !self.plan.machine.is_new && !restored.is_empty() {
            let names: Vec<&str> = restored.iter().map(|disk| &disk.name[..]).collect();
            self.job.progress.warning(&format!(
                "of {}, {} are restored and the rest is not: restore again before it is started",
                self.plan.machine.name,
                names.join(", ")
            ));
        }
    }

    fn define(&self, made: &mut MadeFiles) -> Result<()> {
        let machine = &self.plan.machine;
        let Some(definition) = &self.plan.definition else {
            return Ok(());
        };
        // Another process may have defined the machine first; defining it again would change that machine.
        if machine.is_new {
            self.check_machine()?;
        }
        let Err(error) = self.hypervisor.define(&definition.text) else {
            return Ok(());
        };
        if !machine.is_new {
            self.job.progress.warning(&format!(
                "the disks of {} are restored, its configuration is not",
                machine.name
            ));
            return Err(error.into());
        }
        // The reply may have been lost although the machine was defined.
        match self.hypervisor.machine(&machine.uuid) {
            Err(HostError::NoSuchMachine { .. }) => {}
            Ok(_) if self.hypervisor.undefine(&machine.uuid).is_ok() => {}
            _ => {
                made.keep();
                self.job.progress.warning(&format!(
                    "it is not known whether {} is defined now, so its files were left",
                    machine.name
                ));
            }
        }
        Err(error.into())
    }

    fn start(&self) -> Started {
        if self.plan.after == AfterRestore::LeaveOff {
            return Started::NotAsked;
        }
        let uuid = &self.plan.machine.uuid;
        let started = match &self.plan.resumption {
            None => self.hypervisor.start(uuid).map(|()| Started::Yes).map_err(Error::from),
            Some(planned) => {
                let (repository, snapshot) = (self.repository, &self.plan.snapshot);
                let resumed = planned.resume(repository, snapshot, self.hypervisor, uuid, self.environment, self.job);
                resumed.map(Started::Resumed)
            }
        };
        match started {
            Ok(started) => started,
            Err(error) if self.plan.resumption.is_some() => {
                let why = error_text(&error);
                self.job.progress.warning(&format!(
                    "{} is restored, but was not resumed from its memory: {why}; its disks are of the same point in time, so it can be \
                     started as after a power cut",
                    self.plan.machine.name
                ));
                Started::Failed(why)
            }
            Err(error) => {
                self.job.progress.warning(&format!(
                    "{} is restored, and does not start: {error}",
                    self.plan.machine.name
                ));
                Started::Failed(error.to_string())
            }
        }
    }
}

/// The report of a disk for which nothing had to be written.
fn shared(output: &Output<'_>) -> RestoredDisk {
    RestoredDisk {
        name: output.record.name.clone(),
        target: Some(output.file.to.clone()),
        size_bytes: output.record.size_bytes,
        written_bytes: 0,
        equal_bytes: output.record.size_bytes,
        zero_bytes: 0,
    }
}

/// Gives a file its final name. The replaced file stays locked until the result is dropped.
fn finish(output: Output<'_>, made: &mut MadeFiles) -> Result<Option<OutputDevice>> {
    made.folders.push(output.folders);
    let Some(new) = output.new else {
        return Ok(output.device);
    };
    drop(output.device);
    match &output.file.kept_at {
        Some(kept_at) => new.finish_beside(kept_at)?,
        None => new.finish()?,
    }
    if matches!(output.file.way, FileWay::NewFile | FileWay::Shared) {
        made.files.push(output.file.to.clone());
    }
    Ok(None)
}
