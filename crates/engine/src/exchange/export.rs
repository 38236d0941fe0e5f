//! `export`: writes a machine, from a snapshot or in its present state, as an archive for another hypervisor, or as a folder of images.

mod archives;
mod content;
mod folder;
mod now;
mod plan;
mod planned;
mod reads;
mod suspended;
mod to_pool;
mod virtualbox;

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use holdfast_archive::PackOptions;
use holdfast_block::BlockDevice as _;
use holdfast_hardware::xen::XenRecords;
use holdfast_hardware::{DiskKind, Machine, Translated, Untranslated, libvirt};
use holdfast_image::{Format, Storage};
use holdfast_repo::{Environment, Manifest, Repository};
use jiff::Timestamp;
use jiff::tz::TimeZone;

use archives::ArchiveSink;
use content::{ContentDisk, MachineContent};
pub use plan::plan_export;
pub use planned::{ExportPlan, PlannedExportDisk};
use reads::DiskReads;
use suspended::Suspended;
pub use to_pool::{ExportToPool, ExportedToPool, PoolReturn, export_to_pool, plan_export_to_pool};
use virtualbox::VirtualBoxStreams;

use crate::SnapshotReference;
use crate::capture::foreign_machine::{unknown, unknown_disk};
use crate::capture::qemu::{MachineReadRequest, MachineReading};
use crate::files::atomic_file::{Existing, NewFile};
use crate::files::block_target::Overwrite;
use crate::image::new_folder::NewFolder;
use crate::job::error::ExchangeError;
use crate::job::{Error, Job, Result, Unit};
use crate::repository::open::find_snapshot;

/// The source of an export.
pub enum ExportFrom<'a> {
    /// The machine in a snapshot.
    Snapshot {
        /// The repository with the snapshot.
        repository: &'a Repository,
        /// The snapshot.
        reference: SnapshotReference,
        /// Time zone of times in its name.
        zone: TimeZone,
        /// Disks to exclude, by name.
        left_out: Vec<String>,
    },
    /// A machine in its present state, read from its hypervisor.
    Now(Box<MachineReadRequest<'a>>),
}

/// Target and options of an export.
pub struct ExportRequest {
    /// The target.
    pub target: ExportTarget,
    /// Name of the machine in the export; unchanged if not given.
    pub name: Option<String>,
    /// The host that exports.
    pub host: String,
    /// The current time.
    pub time: Timestamp,
}

/// Format of an archive.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ExportFormat {
    /// An archive of XenServer and XCP-ng.
    Xva(XvaExport),
    /// A package for VMware, VirtualBox and others, with compressed images.
    Ova {
        /// Compression level, 1 to 12; a good default if not given.
        level: Option<u32>,
    },
    /// A backup of Proxmox VE.
    Vma(PackOptions),
}

/// An archive of XenServer and XCP-ng.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct XvaExport {
    /// Its compression.
    pub packing: PackOptions,
    /// Whether the memory is included, so that the machine resumes from it instead of booting.
    pub resumes: bool,
}

/// The target of an export.
pub enum ExportTarget {
    /// An archive as a stream.
    Stream(Box<dyn Write + Send>, ExportFormat),
    /// An archive in a file.
    File {
        /// Its path.
        path: PathBuf,
        /// What to do if the file exists.
        overwrite: Overwrite,
        /// Its format.
        format: ExportFormat,
    },
    /// A folder with images and a libvirt configuration.
    Folder {
        /// Its path.
        path: PathBuf,
        /// The format of the images.
        format: Format,
        /// Whether they are compressed.
        storage: Storage,
    },
    /// A VirtualBox folder: settings and images.
    VirtualBox {
        /// Its path.
        path: PathBuf,
        /// The identity of the machine in VirtualBox.
        identity: VirtualBoxIdentity,
    },
}

impl ExportTarget {
    /// The options of an XVA, if the target is one.
    fn xva(&self) -> Option<XvaExport> {
        match self {
            Self::Stream(_, ExportFormat::Xva(xva))
            | Self::File {
                format: ExportFormat::Xva(xva),
                ..
            } => Some(*xva),
            _ => None,
        }
    }
}

/// The identity of a machine in VirtualBox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VirtualBoxIdentity {
    /// The original identity: VirtualBox accepts it only if the original is not registered.
    Same,
    /// A new one, with a new UUID and new addresses.
    New,
}

/// Result of an export.
#[derive(Debug)]
pub struct ExportReport {
    /// The snapshot; none for a machine in its present state.
    pub snapshot: Option<Manifest>,
    /// How the machine was read; none for a snapshot.
    pub reading: Option<MachineReading>,
    /// The original name of the machine.
    pub machine: String,
    /// The name of the machine in the export.
    pub name: String,
    /// Each disk: its name, its name in the export, and its size.
    pub disks: Vec<(String, String, u64)>,
    /// Bytes of the archive, or of the disks in the folder.
    pub written_bytes: u64,
    /// Bytes of the archive before compression.
    pub unpacked_bytes: u64,
    /// Settings that the target does not support, and their replacements.
    pub dropped: Vec<Untranslated>,
    /// How long it took.
    pub duration: Duration,
    /// The VirtualBox settings file.
    pub settings_file: Option<PathBuf>,
    /// Bytes of the memory from which the machine resumes; none if it boots.
    pub memory_bytes: Option<u64>,
    /// For each network card, the network named in the records of an XVA.
    pub(crate) networks: Vec<String>,
}

/// Exports a machine. A file or folder appears complete or not at all; in a folder, the configuration is written last.
pub fn export(
    from: ExportFrom<'_>,
    request: ExportRequest,
    environment: &Environment,
    job: Job<'_>,
) -> Result<ExportReport> {
    let start = job.clock.now();
    // Errors of the target are detected before a machine is disturbed.
    let xva = request.target.xva();
    let target = ExportDestination::open(request.target, environment, job)?;
    let of = ExportContext {
        name: request.name,
        host: request.host,
        time: request.time,
        environment,
        job,
    };
    let (report, snapshot, reading) = match from {
        ExportFrom::Snapshot {
            repository,
            reference,
            zone,
            left_out,
        } => {
            let snapshot = find_snapshot(repository, &reference, &zone, job.progress)?;
            job.progress
                .phase(&format!("exporting {}", snapshot.machine), Unit::Bytes);
            let written = content::of_snapshot(repository, &snapshot, &left_out, xva, of.name.as_deref())
                .and_then(|content| of.write(content, target))
                .and_then(|(report, made)| made.finish().map(|()| report));
            let report = written.map_err(|error| error.unless_removed(repository, snapshot.id))?;
            (report, Some(snapshot), None)
        }
        ExportFrom::Now(request) => {
            let (report, reading) = now::export(*request, of, target)?;
            (report, None, Some(reading))
        }
    };
    Ok(ExportReport {
        snapshot,
        reading,
        duration: job.clock.now().saturating_sub(start),
        ..report
    })
}

/// An opened target of an export.
enum ExportDestination {
    Stream(Box<dyn Write + Send>, ExportFormat),
    File(NewFile, PathBuf, ExportFormat),
    Folder(NewFolder, Format, Storage),
    VirtualBox(NewFolder, VirtualBoxIdentity),
}

impl ExportDestination {
    fn open(target: ExportTarget, environment: &Environment, job: Job<'_>) -> Result<Self> {
        Ok(match target {
            ExportTarget::Stream(stream, format) => Self::Stream(stream, format),
            ExportTarget::File {
                path,
                overwrite,
                format,
            } => {
                let existing = match overwrite {
                    Overwrite::Refuse => Existing::Keep,
                    Overwrite::Replace => Existing::Replace,
                };
                let new = NewFile::begin(&path, existing, environment).map_err(taken)?;
                new.report_cleared(job.progress);
                Self::File(new, path, format)
            }
            ExportTarget::Folder { path, format, storage } => Self::Folder(NewFolder::make(&path)?, format, storage),
            ExportTarget::VirtualBox { path, identity } => {
                // VBoxManage resolves the path relative to another folder.
                let absolute = std::path::absolute(&path).map_err(|source| Error::File {
                    action: "find",
                    path,
                    source,
                })?;
                Self::VirtualBox(NewFolder::make(&absolute)?, identity)
            }
        })
    }
}

/// The output of an export; it is removed if this is dropped.
enum ExportOutput {
    Stream,
    File(NewFile),
    Folder(NewFolder),
}

impl ExportOutput {
    /// Keeps the output.
    fn finish(self) -> Result<()> {
        match self {
            Self::Stream => Ok(()),
            Self::File(new) => new.finish().map_err(taken),
            Self::Folder(new) => {
                new.keep();
                Ok(())
            }
        }
    }
}

/// Parameters of a running export.
struct ExportContext<'a> {
    name: Option<String>,
    host: String,
    time: Timestamp,
    environment: &'a Environment,
    job: Job<'a>,
}

impl ExportContext<'_> {
    fn write(self, content: MachineContent<'_>, target: ExportDestination) -> Result<(ExportReport, ExportOutput)> {
        let (environment, job) = (self.environment, self.job);
        let machine = content.machine.clone();
        let mut exported = Exported::new(content, self.name.clone(), job)?;
        let memory_bytes = exported.suspended.as_ref().map(Suspended::memory_bytes);
        let disks_bytes: u64 = exported.disks.iter().map(|disk| disk.device.size_bytes()).sum();
        job.progress.total(disks_bytes + memory_bytes.unwrap_or_default());
        // A folder gets the original configuration.
        if !matches!(target, ExportDestination::Folder(..)) {
            exported.dropped.splice(0..0, std::mem::take(&mut exported.lost));
        }
        let (written, made) = match target {
            ExportDestination::Stream(stream, format) => {
                let written = exported
                    .write_archive(ArchiveSink::Stream(stream), format, &self)
                    .map_err(|error| not_written(error, Error::Stdout))?;
                (written, ExportOutput::Stream)
            }
            ExportDestination::File(new, path, format) => {
                let failed = |source| Error::File {
                    action: "write",
                    path: path.clone(),
                    source,
                };
                let file = new.create_private().map_err(failed)?;
                let durable = file.try_clone().map_err(failed)?;
                let written = exported
                    .write_archive(ArchiveSink::File(file), format, &self)
                    .map_err(|error| not_written(error, failed))?;
                durable.sync_all().map_err(failed)?;
                (written, ExportOutput::File(new))
            }
            ExportDestination::Folder(mut made, format, storage) => {
                let written = exported.write_folder(&mut made, format, storage, environment, job)?;
                (written, ExportOutput::Folder(made))
            }
            ExportDestination::VirtualBox(mut made, identity) => {
                let written = exported.write_virtualbox(&mut made, identity, environment, job)?;
                (written, ExportOutput::Folder(made))
            }
        };
        let report = ExportReport {
            snapshot: None,
            reading: None,
            machine,
            name: exported.machine.name,
            disks: exported.names,
            written_bytes: written.written_bytes,
            unpacked_bytes: written.unpacked_bytes,
            dropped: exported.dropped,
            duration: Duration::ZERO,
            settings_file: exported.settings_file,
            memory_bytes,
            networks: exported.networks,
        };
        Ok((report, made))
    }
}

/// Converts an error of the output stream to one that names the output.
fn not_written(error: Error, target: impl FnOnce(std::io::Error) -> Error) -> Error {
    match error {
        Error::Archive(holdfast_archive::Error::Write { source, .. }) => target(source),
        other => other,
    }
}

/// Converts an error about an existing file: an archive never overwrites an existing file.
fn taken(error: Error) -> Error {
    match error {
        Error::TargetExists { path } => ExchangeError::FileTaken { path }.into(),
        other => other,
    }
}

/// A machine that is being exported.
struct Exported<'m> {
    machine: Machine,
    disks: Vec<ContentDisk<'m>>,
    /// How often its disks can be read.
    reads: DiskReads,
    /// The original configuration, if known.
    text: Option<String>,
    /// The variables of its firmware, if it is a QEMU machine.
    variables: Option<Vec<u8>>,
    names: Vec<(String, String, u64)>,
    networks: Vec<String>,
    /// Settings of its configuration that other hypervisors do not get.
    lost: Vec<Untranslated>,
    dropped: Vec<Untranslated>,
    of_virtualbox: VirtualBoxStreams,
    of_xen: Option<XenRecords>,
    settings_file: Option<PathBuf>,
    /// Memory and records to resume from; none if the machine boots.
    suspended: Option<Suspended>,
}

impl<'m> Exported<'m> {
    fn new(content: MachineContent<'m>, name: Option<String>, job: Job<'_>) -> Result<Self> {
        let Translated { value, dropped } = if let Some(text) = &content.text {
            libvirt::read(text)?
        } else {
            job.progress.warning(&format!(
                "{}: the hardware of the machine is not known, so it gets one processor and 2 GiB of memory",
                content.why_unknown
            ));
            Translated {
                value: unknown(&content.machine),
                dropped: Vec::new(),
            }
        };
        let mut exported = Self {
            machine: value,
            disks: content.disks,
            reads: content.reads,
            text: content.text,
            variables: content.variables,
            names: Vec::new(),
            networks: Vec::new(),
            lost: dropped,
            dropped: Vec::new(),
            of_virtualbox: content.of_virtualbox,
            of_xen: content.of_xen,
            settings_file: None,
            suspended: content.suspended,
        };
        if let Some(name) = name {
            exported.machine.name = name;
        }
        exported.attach();
        if let Some(suspended) = &exported.suspended {
            exported.machine.name.clone_from(&suspended.machine().name);
            // The pool gets its own records back: nothing was translated.
            exported.dropped.clear();
            exported.lost.clear();
        }
        exported.dropped.extend(content.dropped);
        Ok(exported)
    }

    /// Gives the machine exactly the disks that are exported.
    fn attach(&mut self) {
        for disk in &mut self.machine.disks {
            let exported = self.disks.iter().find(|exported| exported.name == disk.key);
            disk.size_bytes = exported.map(|exported| exported.device.size_bytes());
            if disk.label.is_empty() {
                disk.label.clone_from(&disk.key);
            }
            if disk.kind != DiskKind::Disk && !disk.key.is_empty() {
                self.dropped.push(Untranslated {
                    what: format!("medium in drive {}", disk.key),
                    why: "is not kept".to_owned(),
                });
                disk.key.clear();
            }
        }
        let dropped = &mut self.dropped;
        self.machine.disks.retain(|disk| {
            let stays = disk.kind != DiskKind::Disk || disk.size_bytes.is_some();
            if !stays {
                dropped.push(Untranslated {
                    what: format!("disk {}", disk.key),
                    why: "was left out".to_owned(),
                });
            }
            stays
        });
        for exported in &self.disks {
            let name = &exported.name;
            if self.machine.disks.iter().all(|disk| disk.key != *name) {
                let position = u32::try_from(self.machine.disks.len()).unwrap_or(u32::MAX);
                let mut disk = unknown_disk(name, position);
                disk.size_bytes = Some(exported.device.size_bytes());
                self.machine.disks.push(disk);
            }
        }
    }
}
