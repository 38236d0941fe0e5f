//! Writes a machine as an archive.

use std::fs::File;
use std::io::Write;
use std::sync::Arc;

use holdfast_archive::{
    OvaDisk, OvaOutput, OvaWriteOptions, PackOptions, Packed, Packer, VmaDisk, VmaWriteOptions, XvaDisk,
    XvaWriteOptions, write_ova, write_vma, write_xva,
};
use holdfast_block::BlockDevice as _;
use holdfast_hardware::xen::XenRecords;
use holdfast_hardware::{Translated, ovf, proxmox, xen};
use holdfast_host::Uuid;
use holdfast_image::ImageId;
use jiff::Timestamp;

use super::content::ContentDisk;
use super::{ExportContext, ExportFormat, Exported};
use crate::capture::foreign_machine::file_name;
use crate::exchange::import::threads;
use crate::image::sectors::WholeSectors;
use crate::job::{Job, Result};

/// Longest prefix, in bytes, that all members of a package share: `-disk123.vmdk` follows, and a tar archive has room for 100 bytes.
const MEMBER_NAME_BYTES_MAX: usize = 80;

/// Defaults of the Proxmox installer: number of the first machine, first storage and first bridge. The user of a
/// restore can choose others.
const PROXMOX_NUMBER: u32 = 100;
const PROXMOX_STORAGE: &str = "local-lvm";
const PROXMOX_BRIDGE: &str = "vmbr0";

/// Where an archive is written.
pub(super) enum ArchiveSink {
    File(File),
    Stream(Box<dyn Write + Send>),
}

impl ArchiveSink {
    fn into_stream(self) -> Box<dyn Write + Send> {
        match self {
            Self::File(file) => Box::new(file),
            Self::Stream(stream) => stream,
        }
    }
}

/// Called with the progress; an error stops the writer.
type WriteCallback<'t> = dyn FnMut(u64) -> std::io::Result<()> + 't;

fn seconds(time: Timestamp) -> u64 {
    u64::try_from(time.as_second()).unwrap_or_default()
}

fn in_sectors<'d>(disk: &ContentDisk<'d>) -> WholeSectors<'d> {
    WholeSectors(Arc::clone(&disk.device))
}

impl Exported<'_> {
    pub(super) fn write_archive(
        &mut self,
        sink: ArchiveSink,
        format: ExportFormat,
        of: &ExportContext<'_>,
    ) -> Result<Packed> {
        let (time, job) = (of.time, of.job);
        let mut reported = 0;
        let mut progress = |done: u64| {
            job.progress.advance(done - reported);
            reported = done;
            job.interrupt.check().map_err(std::io::Error::other)
        };
        let written = match format {
            ExportFormat::Xva(xva) => match &self.suspended {
                Some(_) => self.write_suspended(sink, xva.packing, time, job, &mut progress),
                None => self.write_xva(sink, xva.packing, of, &mut progress),
            },
            ExportFormat::Vma(packing) => self.write_vma(sink, packing, of, &mut progress),
            ExportFormat::Ova { level } => self.write_ova(sink, level, time, job, &mut progress),
        };
        if written.is_err() {
            job.interrupt.check()?;
        }
        written
    }

    fn write_xva(
        &mut self,
        sink: ArchiveSink,
        packing: PackOptions,
        of: &ExportContext<'_>,
        progress: &mut WriteCallback<'_>,
    ) -> Result<Packed> {
        let time_text = of.time.strftime("%Y%m%dT%H:%M:%SZ").to_string();
        let mut failure = None;
        let mut new_uuid = || {
            let mut random = [0; 16];
            failure = of.environment.randomness.fill(&mut random).err().or(failure.take());
            Uuid::from_random(random).to_string()
        };
        let Translated {
            value: records,
            dropped,
        } = xen::write(
            &self.machine,
            &mut xen::XenOptions {
                host_name: &of.host,
                time: &time_text,
                new_uuid: &mut new_uuid,
                original: self.of_xen.as_ref(),
            },
        );
        if let Some(error) = failure {
            return Err(error.into());
        }
        self.dropped.extend(dropped);
        self.networks = XenRecords::parse(&records.xml)?.networks();
        let mut disks = Vec::new();
        for (key, id) in records.disks {
            if let Some(disk) = self.disks.iter().find(|disk| disk.name == key) {
                self.names.push((key, id.clone(), disk.device.size_bytes()));
                disks.push(XvaDisk {
                    id,
                    device: Arc::clone(&disk.device),
                });
            }
        }
        let mut packer = Packer::new(sink.into_stream(), packing)?;
        let options = XvaWriteOptions {
            threads: threads(of.job).count,
            time: seconds(of.time),
        };
        write_xva(&mut packer, &records.xml, &disks, options, progress)?;
        Ok(packer.finish()?)
    }

    /// Writes the records of the pool, with the memory among the disks.
    fn write_suspended(
        &mut self,
        sink: ArchiveSink,
        packing: PackOptions,
        time: Timestamp,
        job: Job<'_>,
        progress: &mut WriteCallback<'_>,
    ) -> Result<Packed> {
        let Some(suspended) = &self.suspended else {
            unreachable!("it is asked for where it is there")
        };
        self.networks = XenRecords::parse(suspended.records())?.networks();
        let mut disks = vec![suspended.memory()];
        for (id, name) in suspended.disks() {
            if let Some(disk) = self.disks.iter().find(|disk| disk.name == *name) {
                self.names.push((name.clone(), id.clone(), disk.device.size_bytes()));
                disks.push(XvaDisk {
                    id: id.clone(),
                    device: Arc::clone(&disk.device),
                });
            }
        }
        let mut packer = Packer::new(sink.into_stream(), packing)?;
        let options = XvaWriteOptions {
            threads: threads(job).count,
            time: seconds(time),
        };
        write_xva(&mut packer, suspended.records(), &disks, options, progress)?;
        Ok(packer.finish()?)
    }

    fn write_vma(
        &mut self,
        sink: ArchiveSink,
        packing: PackOptions,
        of: &ExportContext<'_>,
        progress: &mut WriteCallback<'_>,
    ) -> Result<Packed> {
        let sizes = self
            .disks
            .iter()
            .map(|disk| (disk.name.clone(), in_sectors(disk).size_bytes()));
        let Translated { value, dropped } = proxmox::write(
            &self.machine,
            &proxmox::ProxmoxOptions {
                vm_id: PROXMOX_NUMBER,
                storage: PROXMOX_STORAGE.to_owned(),
                bridge: PROXMOX_BRIDGE.to_owned(),
                disks: sizes.collect(),
            },
        );
        self.dropped.extend(dropped);
        let mut disks = Vec::new();
        for (key, device_name) in value.disks {
            if let Some(disk) = self.disks.iter().find(|disk| disk.name == key) {
                self.names.push((key, device_name.clone(), disk.device.size_bytes()));
                disks.push(VmaDisk {
                    device_name,
                    device: Arc::new(in_sectors(disk)),
                });
            }
        }
        let mut uuid = [0; 16];
        of.environment.randomness.fill(&mut uuid)?;
        let options = VmaWriteOptions {
            threads: threads(of.job).count,
            time: seconds(of.time),
            uuid,
        };
        let config = [("qemu-server.conf".to_owned(), value.config.into_bytes())];
        let mut packer = Packer::new(sink.into_stream(), packing)?;
        write_vma(&mut packer, &config, &disks, options, progress)?;
        Ok(packer.finish()?)
    }

    fn write_ova(
        &mut self,
        sink: ArchiveSink,
        level: Option<u32>,
        time: Timestamp,
        job: Job<'_>,
        progress: &mut WriteCallback<'_>,
    ) -> Result<Packed> {
        let name = member_name(&self.machine.name);
        let mut wish = ovf::OvfOptions::default();
        let mut disks = Vec::new();
        let in_order: Vec<String> = self.machine.disks.iter().map(|disk| disk.key.clone()).collect();
        for key in in_order {
            let Some(disk) = self.disks.iter().find(|disk| disk.name == key) else {
                continue;
            };
            let href = format!("{name}-disk{}.vmdk", disks.len() + 1);
            // A VMware disk consists of whole sectors.
            let capacity_bytes = disk.device.size_bytes().next_multiple_of(512);
            wish.disks.insert(
                key.clone(),
                ovf::DiskFile {
                    href: href.clone(),
                    size_bytes: None,
                    capacity_bytes,
                    populated_bytes: None,
                },
            );
            self.names.push((key, href.clone(), disk.device.size_bytes()));
            disks.push(OvaDisk {
                href,
                id: ImageId::random()?,
                device: Arc::clone(&disk.device),
            });
        }
        let Translated { value, dropped } = ovf::write(&self.machine, &wish);
        self.dropped.extend(dropped);
        let output = match sink {
            ArchiveSink::File(file) => OvaOutput::File(file),
            ArchiveSink::Stream(stream) => OvaOutput::Pipe(stream, std::env::temp_dir()),
        };
        let options = OvaWriteOptions {
            threads: threads(job).count,
            level,
            time: seconds(time),
        };
        let written = write_ova(output, &name, &value, &disks, options, progress)?;
        Ok(Packed {
            unpacked_bytes: disks.iter().map(|disk| disk.device.size_bytes()).sum(),
            written_bytes: written.bytes,
        })
    }
}

/// Name prefix of the members of a package: the name of the machine, shortened to fit any tar archive together with the suffix.
fn member_name(machine: &str) -> String {
    let mut name = file_name(machine);
    while name.len() > MEMBER_NAME_BYTES_MAX {
        name.pop();
    }
    name
}

#[cfg(test)]
mod tests {
    use super::{MEMBER_NAME_BYTES_MAX, member_name};

    #[test]
    fn names_of_members_are_not_cut_in_the_middle_of_a_letter() {
        assert_eq!(member_name("web 1"), "web_1");
        for name in ["L".repeat(90), "ä".repeat(60), "a".to_owned() + &"語".repeat(60)] {
            let member = member_name(&name);
            assert!(
                name.starts_with(&member) && member.len() <= MEMBER_NAME_BYTES_MAX,
                "{member}"
            );
            assert!(member.len() > MEMBER_NAME_BYTES_MAX - 4, "{member}");
        }
    }
}
