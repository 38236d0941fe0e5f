//! `export`: a machine in a snapshot becomes an archive that another hypervisor takes in, or a folder of images.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use holdfast_archive::{
    OvaDisk, OvaOutput, OvaWriteOptions, PackOptions, Packed, Packer, VmaDisk, VmaWriteOptions, XvaDisk,
    XvaWriteOptions, write_ova, write_vma, write_xva,
};
use holdfast_block::BlockDevice;
use holdfast_hardware::{DiskKind, Dropped, Machine, Translated, libvirt, ovf, proxmox, xen};
use holdfast_host::Uuid;
use holdfast_image::{BlockOptions, Format, ImageId, OpenOptions, Qcow2Options, Storage};
use holdfast_repo::{DiskContent, DiskRecord, Manifest, Repository, Surroundings};
use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::error::ExchangeError;
use super::import::{NewFolder, threads, write_file};
use super::machine::{file_name, unknown, unknown_disk};
use super::sectors::WholeSectors;
use crate::convert::{ConvertRequest, ConvertSource, VerifyImage, convert};
use crate::error::{Error, Result};
use crate::job::Job;
use crate::machine_backup::is_memory;
use crate::machine_restore::bytes_of;
use crate::new_file::{Existing, NewFile};
use crate::new_image::Overwrite;
use crate::repository::find_snapshot;
use crate::{SnapshotReference, Unit};

const DOMAIN: &str = "domain.xml";
/// What Proxmox calls the first machine, its first storage and bridge, where its installer was not told otherwise. Whoever restores a backup says where
/// to.
const PROXMOX_NUMBER: u32 = 100;
const PROXMOX_STORAGE: &str = "local-lvm";
const PROXMOX_BRIDGE: &str = "vmbr0";

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

/// Where an archive is written.
enum Sink {
    File(File),
    Stream(Box<dyn Write + Send>),
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
}

impl Sink {
    fn into_stream(self) -> Box<dyn Write + Send> {
        match self {
            Self::File(file) => Box::new(file),
            Self::Stream(stream) => stream,
        }
    }
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
    };
    Ok(ExportReport {
        name: exported.machine.name,
        disks: exported.names,
        written_bytes: written.written_bytes,
        unpacked_bytes: written.unpacked_bytes,
        dropped: exported.dropped,
        duration: job.clock.now().saturating_sub(start),
        snapshot,
    })
}

/// Who is told how far it is, and may stop it.
type Told<'t> = dyn FnMut(u64) -> std::io::Result<()> + 't;

fn seconds(time: Timestamp) -> u64 {
    u64::try_from(time.as_second()).unwrap_or_default()
}

/// A disk that is exported.
struct ExportedDisk<'m> {
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
}

impl<'m> Exported<'m> {
    fn read(repository: &Repository, snapshot: &'m Manifest, request: &ExportRequest, job: Job<'_>) -> Result<Self> {
        let is_disk = |record: &&DiskRecord| record.content == DiskContent::Blocks && !is_memory(record);
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

    fn write_archive(
        &mut self,
        sink: Sink,
        format: ExportFormat,
        of_now: (&str, Timestamp),
        surroundings: &Surroundings,
        job: Job<'_>,
    ) -> Result<Packed> {
        let mut told = 0;
        let mut progress = |done: u64| {
            job.progress.advance(done - told);
            told = done;
            job.interrupt.check().map_err(std::io::Error::other)
        };
        let written = match format {
            ExportFormat::Xva(packing) => self.write_xva(sink, packing, of_now, (surroundings, job), &mut progress),
            ExportFormat::Vma(packing) => self.write_vma(sink, packing, of_now.1, (surroundings, job), &mut progress),
            ExportFormat::Ova { level } => self.write_ova(sink, level, of_now.1, job, &mut progress),
        };
        if written.is_err() {
            job.interrupt.check()?;
        }
        written
    }

    fn write_xva(
        &mut self,
        sink: Sink,
        packing: PackOptions,
        (host, time): (&str, Timestamp),
        (surroundings, job): (&Surroundings, Job<'_>),
        progress: &mut Told<'_>,
    ) -> Result<Packed> {
        let time_text = time.strftime("%Y%m%dT%H:%M:%SZ").to_string();
        let mut failure = None;
        let mut new_uuid = || {
            let mut random = [0; 16];
            failure = surroundings.randomness.fill(&mut random).err().or(failure.take());
            Uuid::from_random(random).to_string()
        };
        let Translated {
            value: records,
            dropped,
        } = xen::write(
            &self.machine,
            &mut xen::Wish {
                host_name: host,
                time: &time_text,
                new_uuid: &mut new_uuid,
            },
        );
        if let Some(error) = failure {
            return Err(error.into());
        }
        self.dropped.extend(dropped);
        let mut disks = Vec::new();
        for (key, id) in records.disks {
            if let Some(disk) = self.disks.iter().find(|disk| disk.record.name == key) {
                self.names.push((key, id.clone(), disk.record.size_bytes));
                disks.push(XvaDisk {
                    id,
                    device: Arc::clone(&disk.device),
                });
            }
        }
        let mut packer = Packer::new(sink.into_stream(), packing)?;
        let options = XvaWriteOptions {
            threads: threads(job).count,
            time: seconds(time),
        };
        write_xva(&mut packer, &records.xml, &disks, options, progress)?;
        Ok(packer.finish()?)
    }

    fn write_vma(
        &mut self,
        sink: Sink,
        packing: PackOptions,
        time: Timestamp,
        (surroundings, job): (&Surroundings, Job<'_>),
        progress: &mut Told<'_>,
    ) -> Result<Packed> {
        let in_sectors = |disk: &ExportedDisk<'_>| WholeSectors(Arc::clone(&disk.device));
        let sizes = self
            .disks
            .iter()
            .map(|disk| (disk.record.name.clone(), in_sectors(disk).size_bytes()));
        let Translated { value, dropped } = proxmox::write(
            &self.machine,
            &proxmox::Wish {
                vm_id: PROXMOX_NUMBER,
                storage: PROXMOX_STORAGE.to_owned(),
                bridge: PROXMOX_BRIDGE.to_owned(),
                disks: sizes.collect(),
            },
        );
        self.dropped.extend(dropped);
        let mut disks = Vec::new();
        for (key, device_name) in value.disks {
            if let Some(disk) = self.disks.iter().find(|disk| disk.record.name == key) {
                self.names.push((key, device_name.clone(), disk.record.size_bytes));
                disks.push(VmaDisk {
                    device_name,
                    device: Arc::new(in_sectors(disk)),
                });
            }
        }
        let mut uuid = [0; 16];
        surroundings.randomness.fill(&mut uuid)?;
        let options = VmaWriteOptions {
            threads: threads(job).count,
            time: seconds(time),
            uuid,
        };
        let config = [("qemu-server.conf".to_owned(), value.config.into_bytes())];
        let mut packer = Packer::new(sink.into_stream(), packing)?;
        write_vma(&mut packer, &config, &disks, options, progress)?;
        Ok(packer.finish()?)
    }

    fn write_ova(
        &mut self,
        sink: Sink,
        level: Option<u32>,
        time: Timestamp,
        job: Job<'_>,
        progress: &mut Told<'_>,
    ) -> Result<Packed> {
        let name = file_name(&self.machine.name);
        let mut wish = ovf::Wish::default();
        let mut disks = Vec::new();
        let in_order: Vec<String> = self.machine.disks.iter().map(|disk| disk.key.clone()).collect();
        for key in in_order {
            let Some(disk) = self.disks.iter().find(|disk| disk.record.name == key) else {
                continue;
            };
            let href = format!("{name}-disk{}.vmdk", disks.len() + 1);
            // A disk of VMware has whole sectors.
            let capacity_bytes = disk.record.size_bytes.next_multiple_of(512);
            wish.disks.insert(
                key.clone(),
                ovf::DiskFile {
                    href: href.clone(),
                    size_bytes: None,
                    capacity_bytes,
                    populated_bytes: None,
                },
            );
            self.names.push((key, href.clone(), disk.record.size_bytes));
            disks.push(OvaDisk {
                href,
                id: ImageId::random()?,
                device: Arc::clone(&disk.device),
            });
        }
        let Translated { value, dropped } = ovf::write(&self.machine, &wish);
        self.dropped.extend(dropped);
        let output = match sink {
            Sink::File(file) => OvaOutput::File(file),
            Sink::Stream(stream) => OvaOutput::Pipe(stream, std::env::temp_dir()),
        };
        let options = OvaWriteOptions {
            threads: threads(job).count,
            level,
            time: seconds(time),
        };
        let written = write_ova(output, (&name, &value), &disks, options, progress)?;
        Ok(Packed {
            unpacked_bytes: disks.iter().map(|disk| disk.device.size_bytes()).sum(),
            written_bytes: written.bytes,
        })
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
