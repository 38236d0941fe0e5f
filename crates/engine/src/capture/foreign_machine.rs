//! The machine in an archive, and its libvirt configuration.

use std::collections::BTreeMap;

use holdfast_archive::{ArchiveReader, DiskContent, Document, DocumentKind};
use holdfast_hardware::{
    Bus, Disk, DiskKind, Firmware, Machine, Platform, Translated, Untranslated, adapt, libvirt, ovf, proxmox, xen,
    xml_text,
};

use holdfast_image::Format;

use crate::job::error::ExchangeError;
use crate::job::{Job, Result};

/// Options for the libvirt configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Domain {
    /// `kvm`, or `qemu` for emulated processors.
    pub domain_type: String,
    /// The network that its network cards are connected to.
    pub network: String,
}

/// libvirt's default folder for images.
const IMAGES: &str = "/var/lib/libvirt/images";
/// The memory of a machine whose hardware is not known.
const UNKNOWN_MEMORY_BYTES: u64 = 2 << 30;

/// A machine that an archive describes.
pub(crate) struct DescribedMachine {
    pub(crate) machine: Machine,
    pub(crate) dropped: Vec<Untranslated>,
    /// The archive's name of the disk with its memory, if it is suspended.
    memory: Option<String>,
}

/// Reads the document that describes the machine.
pub(crate) fn describe(reader: &dyn ArchiveReader) -> Result<DescribedMachine> {
    let mut memory = None;
    let known = reader.documents().iter().find_map(|document| {
        let text = xml_text(&document.content).unwrap_or_else(|| String::from_utf8_lossy(&document.content));
        match document.kind {
            DocumentKind::XenRecords => {
                memory = xen::SuspendedMachine::read(&text).ok().map(|machine| machine.memory.id);
                Some(xen::read(&text))
            }
            DocumentKind::Ovf => Some(ovf::read(&text)),
            DocumentKind::Proxmox => Some(proxmox::read(&text)),
            DocumentKind::Other => None,
        }
    });
    let translated = known.ok_or_else(|| {
        let names: Vec<&str> = reader.documents().iter().map(|document| &document.name[..]).collect();
        ExchangeError::NoMachine {
            detail: format!(
                "it has {}",
                if names.is_empty() {
                    "no text".to_owned()
                } else {
                    names.join(", ")
                }
            ),
        }
    })?;
    let Translated { value, mut dropped } = translated?;
    dropped.extend(reader.left_out().iter().map(|name| Untranslated {
        what: format!("{name} of the archive"),
        why: "is not a disk".to_owned(),
    }));
    Ok(DescribedMachine {
        machine: value,
        dropped,
        memory,
    })
}

/// A disk of the archive that belongs to the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AttachedDisk {
    /// Its number in the archive.
    pub(crate) number: usize,
    /// Its name in the new configuration: `vda`.
    pub(crate) target: String,
    /// Its key in the archive.
    pub(crate) key: String,
    /// The name that its owner gave it.
    pub(crate) label: String,
    /// Whether the archive describes it as empty and has no data of it.
    pub(crate) is_blank: bool,
}

/// The machine's disks in the archive, in the archive's order; adds a warning about each other disk.
pub(crate) fn attach(reader: &dyn ArchiveReader, described: &mut DescribedMachine) -> Vec<AttachedDisk> {
    let there = adapt(&described.machine, Platform::Qemu).value;
    let targets = there.targets();
    let mut attached = Vec::new();
    for (number, disk) in reader.disks().iter().enumerate() {
        let place = there
            .disks
            .iter()
            .position(|known| known.key == disk.key && known.kind == DiskKind::Disk);
        match place {
            Some(place) => attached.push(AttachedDisk {
                number,
                target: targets[place].clone(),
                key: disk.key.clone(),
                label: there.disks[place].label.clone(),
                is_blank: disk.content == DiskContent::Blank,
            }),
            // A warning about this disk was added before.
            None if described.memory.as_ref() == Some(&disk.key) => {}
            None => described.dropped.push(Untranslated {
                what: format!("disk {} of the archive", disk.key),
                why: "is in no slot of the machine".to_owned(),
            }),
        }
    }
    attached
}

/// Options for the libvirt configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DomainOptions<'a> {
    /// `kvm` or `qemu`.
    pub(crate) domain_type: &'a str,
    /// The network that its network cards are connected to.
    pub(crate) network: &'a str,
    /// The folder of its images.
    pub(crate) folder: Option<&'a str>,
    /// The format of its images.
    pub(crate) format: Format,
}

/// Warns if libvirt does not support the format of a machine's images.
pub(crate) fn warn_of_format(format: Format, job: Job<'_>) {
    if matches!(format, Format::Vhdx | Format::Parallels) {
        job.progress.warning(&format!(
            "libvirt knows no {format} images, and does not define a machine of them: raw, qcow2, vdi, vhd and vmdk are what it knows"
        ));
    }
}

/// The machine's domain XML.
pub(crate) fn domain_xml(machine: &Machine, attached: &[AttachedDisk], wish: &DomainOptions<'_>) -> Translated<String> {
    let place = |disk: &AttachedDisk| {
        let file = match wish.folder {
            Some(folder) => format!("{folder}/{}.{}", disk.target, wish.format),
            None => format!("{IMAGES}/{}-{}.{}", file_name(&machine.name), disk.target, wish.format),
        };
        let place = libvirt::DiskPlace {
            path: file,
            format: wish.format.qemu_name().to_owned(),
        };
        (disk.key.clone(), place)
    };
    let disks: BTreeMap<String, libvirt::DiskPlace> = attached.iter().map(place).collect();
    libvirt::write(
        machine,
        &libvirt::LibvirtOptions {
            domain_type: wish.domain_type.to_owned(),
            disks,
            network: wish.network.to_owned(),
        },
    )
}

/// A file name that does not lead into another folder.
pub(crate) fn file_name(name: &str) -> String {
    name.chars()
        .map(|character| {
            if character.is_alphanumeric() || "-_.".contains(character) {
                character
            } else {
                '_'
            }
        })
        .collect()
}

/// A file name for the copy of a document that is kept beside the disks.
pub(crate) fn kept_name(document: &Document) -> String {
    let name = document.name.rsplit('/').next().unwrap_or_default();
    format!("original-{}", file_name(name))
}

/// A machine whose hardware is not known, only its disks.
pub(crate) fn unknown(name: &str) -> Machine {
    Machine {
        name: name.to_owned(),
        processor_count: 1,
        memory_bytes: UNKNOWN_MEMORY_BYTES,
        firmware: Firmware::Bios,
        ..Machine::default()
    }
}

/// A disk of such a machine.
pub(crate) fn unknown_disk(name: &str, position: u32) -> Disk {
    Disk {
        key: name.to_owned(),
        label: name.to_owned(),
        kind: DiskKind::Disk,
        bus: Bus::Sata,
        position,
        size_bytes: None,
        boot_order: (position == 0).then_some(1),
        is_read_only: false,
    }
}
