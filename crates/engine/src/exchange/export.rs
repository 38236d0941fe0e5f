//! `export`: a machine in a snapshot becomes an archive that another hypervisor takes in, or a folder of images.

mod archives;
mod to_pool;
mod virtualbox;

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use holdfast_archive::{PackOptions, Packed};
use holdfast_block::BlockDevice;
use holdfast_hardware::{DiskKind, Dropped, Machine, Translated, libvirt};
use holdfast_image::{BlockOptions, Format, OpenOptions, Qcow2Options, Storage};
use holdfast_repo::{DiskContent, DiskRecord, Manifest, Repository, Surroundings};
use jiff::Timestamp;
use jiff::tz::TimeZone;

use archives::Sink;
pub use to_pool::{ExportToPool, ExportedToPool, export_to_pool};
use virtualbox::OfVirtualBox;

use super::error::ExchangeError;
use super::import::{NewFolder, write_file};
use super::machine::{unknown, unknown_disk};
use super::store::DOMAIN;
use crate::convert::{ConvertRequest, ConvertSource, VerifyImage, convert};
use crate::error::{Error, Result};
use crate::job::Job;
use crate::machine_backup::is_memory;
use crate::machine_restore::bytes_of;
use crate::new_file::{Existing, NewFile};
use crate::new_image::Overwrite;
use crate::repository::find_snapshot;
use crate::{SnapshotReference, Unit};

/// What to export, and how.
pub struct ExportRequest {
    /// The snapshot.
    pub snapshot: SnapshotReference,
    /// Disks that are left out, by name.
    pub left_out: Vec<String>,
    /// Where to.
    pub target: ExportTarget,
    /// What the machine is called there; as here where not given.
    pub name: Option<String>,
    /// The host that exports.
    pub host: String,
    /// Now.
    pub time: Timestamp,
    /// In which times of the snapshot's name are meant.
    pub zone: TimeZone,
}

/// What is made of a machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ExportFormat {
    /// An archive of XenServer and XCP-ng.
    Xva(PackOptions),
    /// A package of VMware, VirtualBox and others, whose images are compressed.
    Ova {
        /// How hard: 1 to 12; a good default where not given.
        level: Option<u32>,
    },
    /// A backup of Proxmox VE.
    Vma(PackOptions),
}

/// Where an export goes.
pub enum ExportTarget {
    /// An archive as a stream.
    Stream(Box<dyn Write + Send>, ExportFormat),
    /// An archive in a file.
    File {
        /// Where.
        path: PathBuf,
        /// What to do about a file that is there.
        overwrite: Overwrite,
        /// What it is.
        format: ExportFormat,
    },
    /// Images in a folder, with the configuration of libvirt.
    Folder {
        /// Where.
        path: PathBuf,
        /// The format of the images.
        format: Format,
        /// Whether they are compressed.
        storage: Storage,
    },
    /// A folder of VirtualBox's: settings, and images.
    VirtualBox {
        /// Where.
        path: PathBuf,
        /// Who the machine is there.
        identity: VirtualBoxIdentity,
    },
}

/// Who a machine is at VirtualBox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VirtualBoxIdentity {
    /// The one that it was: VirtualBox takes it in where that is gone.
    Same,
    /// Another one, with another UUID and other addresses.
    New,
}

/// What was exported.
#[derive(Debug)]
pub struct ExportReport {
    /// The snapshot.
    pub snapshot: Manifest,
    /// What the machine is called there.
    pub name: String,
    /// Each disk: its name, what it is called there, and its size.
    pub disks: Vec<(String, String, u64)>,
    /// Bytes of the archive, or of the disks in a folder.
    pub written_bytes: u64,
    /// Bytes of the archive before it was packed.
    pub unpacked_bytes: u64,
    /// What has no meaning there, and what took its place.
    pub dropped: Vec<Dropped>,
    /// How long it took.
    pub duration: Duration,
    /// The settings of a machine of VirtualBox.
    pub settings_file: Option<PathBuf>,
}

/// Exports a machine. A file or folder is there whole, or not at all; of a folder, the configuration comes last.
pub fn export(
    repository: &Repository,
    request: ExportRequest,
    surroundings: &Surroundings,
    job: Job<'_>,
) -> Result<ExportReport> {
    let start = job.clock.now();
    let snapshot = find_snapshot(repository, &request.snapshot, &request.zone, job.progress)?;
    let mut exported = Exported::read(repository, &snapshot, &request, job)?;
    job.progress
        .phase(&format!("exporting {}", snapshot.machine), Unit::Bytes);
    job.progress
        .total(exported.disks.iter().map(|disk| disk.record.size_bytes).sum());
    let of_now = (&request.host[..], request.time);
    let written = match request.target {
        ExportTarget::Stream(stream, format) => {
            exported.write_archive(Sink::Stream(stream), format, of_now, surroundings, job)?
        }
        ExportTarget::File {
            path,
            overwrite,
            format,
        } => {
            let existing = match overwrite {
                Overwrite::Refuse => Existing::Keep,
                Overwrite::Replace => Existing::Replace,
            };
            let new = NewFile::begin(&path, existing, surroundings)?;
            new.tell_of_cleared(job.progress);
            let failed = |source| Error::File {
                action: "write",
                path: path.clone(),
                source,
            };
            let file = new.create_private().map_err(failed)?;
            let durable = file.try_clone().map_err(failed)?;
            let written = exported.write_archive(Sink::File(file), format, of_now, surroundings, job)?;
            durable.sync_all().map_err(failed)?;
            new.finish()?;
            written
        }
        ExportTarget::Folder { path, format, storage } => {
            exported.write_folder(&path, (format, storage), surroundings, job)?
        }
        ExportTarget::VirtualBox { path, identity } => {
            exported.of_virtualbox = OfVirtualBox::read(repository, &snapshot)?;
            exported.write_virtualbox(&path, identity, surroundings, job)?
        }
    };
    Ok(ExportReport {
        name: exported.machine.name,
        disks: exported.names,
        written_bytes: written.written_bytes,
        unpacked_bytes: written.unpacked_bytes,
        dropped: exported.dropped,
        duration: job.clock.now().saturating_sub(start),
        settings_file: exported.settings_file,
        snapshot,
    })
}

/// A disk that is exported.
pub(super) struct ExportedDisk<'m> {
    record: &'m DiskRecord,
    device: Arc<dyn BlockDevice>,
}

/// A machine on its way.
struct Exported<'m> {
    machine: Machine,
    disks: Vec<ExportedDisk<'m>>,
    /// The configuration as it was, where the snapshot has it.
    text: Option<String>,
    names: Vec<(String, String, u64)>,
    dropped: Vec<Dropped>,
    of_virtualbox: OfVirtualBox,
    settings_file: Option<PathBuf>,
}

impl<'m> Exported<'m> {
    fn read(repository: &Repository, snapshot: &'m Manifest, request: &ExportRequest, job: Job<'_>) -> Result<Self> {
        let is_disk = |record: &&DiskRecord| record.content == DiskContent::Blocks && !is_memory(record);
        let present: Vec<&DiskRecord> = snapshot.disks.iter().filter(is_disk).collect();
        if let Some(name) = request
            .left_out
            .iter()
            .find(|name| present.iter().all(|record| record.name != **name))
        {
            return Err(ExchangeError::NoSuchDisk {
                snapshot: snapshot.id.to_string(),
                name: name.clone(),
                present: present.iter().map(|record| record.name.clone()).collect(),
            }
            .into());
        }
        let is_chosen = |record: &&DiskRecord| !request.left_out.contains(&record.name);
        let disks: Vec<ExportedDisk<'_>> = snapshot
            .disks
            .iter()
            .filter(is_disk)
            .filter(is_chosen)
            .map(|record| ExportedDisk {
                record,
                device: Arc::new(repository.device_checking_prints(record)),
            })
            .collect();
        if disks.is_empty() {
            return Err(ExchangeError::NoDisk {
                snapshot: snapshot.id.to_string(),
            }
            .into());
        }
        let text = snapshot.disks.iter().find(|record| record.name == DOMAIN);
        let text = text.map(|record| bytes_of(repository, record)).transpose()?;
        let text = text.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let Translated { value, dropped } = if let Some(text) = &text {
            libvirt::read(text)?
        } else {
            job.progress.warning(
                "the snapshot is of images only: nobody knows what the machine consists of, so it gets one processor and 2 GiB of memory",
            );
            Translated {
                value: unknown(&snapshot.machine),
                dropped: Vec::new(),
            }
        };
        let mut exported = Self {
            machine: value,
            disks,
            text,
            names: Vec::new(),
            dropped,
            of_virtualbox: OfVirtualBox::default(),
            settings_file: None,
        };
        if let Some(name) = &request.name {
            exported.machine.name.clone_from(name);
        }
        exported.attach();
        exported.tell_of_streams(snapshot);
        Ok(exported)
    }

    /// The machine has the disks that are exported, and no others.
    fn attach(&mut self) {
        for disk in &mut self.machine.disks {
            let exported = self.disks.iter().find(|exported| exported.record.name == disk.key);
            disk.size_bytes = exported.map(|exported| exported.record.size_bytes);
            if disk.label.is_empty() {
                disk.label.clone_from(&disk.key);
            }
            if disk.kind != DiskKind::Disk && !disk.key.is_empty() {
                self.dropped.push(Dropped {
                    what: format!("medium in drive {}", disk.key),
                    why: "is not in the snapshot".to_owned(),
                });
                disk.key.clear();
            }
        }
        let dropped = &mut self.dropped;
        self.machine.disks.retain(|disk| {
            let stays = disk.kind != DiskKind::Disk || disk.size_bytes.is_some();
            if !stays {
                dropped.push(Dropped {
                    what: format!("disk {}", disk.key),
                    why: "is not in the snapshot, or was left out".to_owned(),
                });
            }
            stays
        });
        for exported in &self.disks {
            let name = &exported.record.name;
            if self.machine.disks.iter().all(|disk| disk.key != *name) {
                let position = u32::try_from(self.machine.disks.len()).unwrap_or(u32::MAX);
                let mut disk = unknown_disk(name, position);
                disk.size_bytes = Some(exported.record.size_bytes);
                self.machine.disks.push(disk);
            }
        }
    }

    fn tell_of_streams(&mut self, snapshot: &Manifest) {
        for (name, what) in [
            (crate::machine_backup::NVRAM, "variables of the firmware"),
            (crate::machine_backup::TPM, "state of the TPM"),
            (super::virtualbox::NVRAM, "variables of the firmware"),
        ] {
            if snapshot.disks.iter().any(|record| record.name == name) {
                self.dropped.push(Dropped {
                    what: what.to_owned(),
                    why: "stays behind: it is of another hypervisor's make".to_owned(),
                });
            }
        }
        if snapshot.disks.iter().any(is_memory) {
            self.dropped.push(Dropped {
                what: "memory".to_owned(),
                why: "another hypervisor cannot go on from it: the machine starts".to_owned(),
            });
        }
    }

    fn write_folder(
        &mut self,
        folder: &std::path::Path,
        (format, storage): (Format, Storage),
        surroundings: &Surroundings,
        job: Job<'_>,
    ) -> Result<Packed> {
        let mut made = NewFolder::make(folder)?;
        let mut written = Packed::default();
        for disk in &self.disks {
            let file = format!("{}.{format}", crate::DiskName::new(disk.record.name.as_str())?);
            let report = convert(
                ConvertSource::Device(&disk.device),
                &ConvertRequest {
                    open: OpenOptions::default(),
                    target: made.file(&file),
                    format,
                    qcow2: Qcow2Options::default(),
                    blocks: BlockOptions::default(),
                    storage,
                    overwrite: Overwrite::Refuse,
                    verify: VerifyImage::No,
                },
                surroundings,
                job,
            )?;
            written.unpacked_bytes += report.size_bytes;
            written.written_bytes += report.allocated_bytes.unwrap_or_default();
            self.names.push((disk.record.name.clone(), file, report.size_bytes));
        }
        if let Some(text) = &self.text {
            write_file(&made.file(DOMAIN), text.as_bytes(), surroundings)?;
        }
        made.keep();
        Ok(written)
    }
}
