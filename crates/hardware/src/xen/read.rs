//! Converts the records of XenServer to a machine.

use super::value::Value;
use crate::{
    Bus, CardModel, Clock, Disk, DiskKind, Error, Firmware, Machine, NetworkCard, Result, Topology, Translated,
    Untranslated,
};

const FORM: &str = "ova.xml of an XVA";
const OBJECT_COUNT_MAX: usize = 10_000;

/// The objects of an `ova.xml`, by their ids in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XenRecords {
    objects: Vec<Object>,
    export_version: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Object {
    class: String,
    id: String,
    record: Value,
}

/// A disk with content in an XVA.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XenDisk {
    /// The id in the names of the archive's members: `Ref:7`.
    pub id: String,
    /// The size in bytes.
    pub size_bytes: u64,
}

impl XenRecords {
    /// Reads an `ova.xml`.
    pub fn parse(text: &str) -> Result<Self> {
        let value = Value::parse(text, FORM)?;
        let objects = value.get("objects").map(Value::as_array).unwrap_or_default();
        if objects.is_empty() || objects.len() > OBJECT_COUNT_MAX {
            return Err(wrong(format!("it has {} objects", objects.len())));
        }
        let object = |object: &Value| {
            let record = object.get("snapshot").cloned();
            Ok(Object {
                class: object.text_of("class").to_owned(),
                id: object.text_of("id").to_owned(),
                record: record.ok_or_else(|| wrong(format!("the object {:?} has no record", object.text_of("id"))))?,
            })
        };
        let version = value.get("version").map(|version| version.text_of("export_vsn"));
        Ok(Self {
            objects: objects.iter().map(object).collect::<Result<_>>()?,
            export_version: version.and_then(|version| version.parse().ok()).unwrap_or_default(),
        })
    }

    /// Format version of the archive; from 1 on, blocks have checksums.
    pub fn export_version(&self) -> u32 {
        self.export_version
    }

    /// Ids of images that are only in CD drives: archives may omit them.
    pub fn drives(&self) -> Vec<String> {
        let is_in_drive = |id: &str| {
            let mut vbds = self
                .of_class("VBD")
                .filter(|vbd| vbd.record.text_of("VDI") == id)
                .peekable();
            vbds.peek().is_some() && vbds.all(|vbd| vbd.record.text_of("type") == "CD")
        };
        let ids = self.of_class("VDI").map(|vdi| vdi.id.clone());
        ids.filter(|id| is_in_drive(id)).collect()
    }

    /// The disks, in the order of their content in the archive: by id.
    pub fn disks(&self) -> Result<Vec<XenDisk>> {
        let mut disks = Vec::new();
        let drives = self.drives();
        for vdi in self.of_class("VDI").filter(|vdi| !drives.contains(&vdi.id)) {
            let size = vdi.record.text_of("virtual_size");
            let size_bytes = size.parse().ok().filter(|size| i64::try_from(*size).is_ok());
            disks.push(XenDisk {
                id: vdi.id.clone(),
                size_bytes: size_bytes.ok_or_else(|| wrong(format!("the disk {} has {size:?} bytes", vdi.id)))?,
            });
        }
        disks.sort_by(|one, other| one.id.cmp(&other.id));
        Ok(disks)
    }

    fn of_class<'a>(&'a self, class: &'a str) -> impl Iterator<Item = &'a Object> {
        self.objects.iter().filter(move |object| object.class == class)
    }

    /// The records of a class.
    pub(super) fn records<'a>(&'a self, class: &'a str) -> impl Iterator<Item = &'a Value> {
        self.of_class(class).map(|object| &object.record)
    }

    pub(super) fn find(&self, class: &str, id: &str) -> Option<&Value> {
        self.objects
            .iter()
            .find(|object| object.class == class && object.id == id)
            .map(|object| &object.record)
    }

    /// The record of the machine, not of its snapshots.
    pub(super) fn machine_record(&self) -> Result<&Value> {
        self.machine().map(|machine| &machine.record)
    }

    /// The attachments (VBDs) of the machine's disks, by position.
    pub(super) fn disks_of_machine(&self) -> Vec<&Value> {
        self.of_machine("VBD", "userdevice")
    }

    /// The machine's network cards, in their order.
    pub(super) fn cards_of_machine(&self) -> Vec<&Value> {
        self.of_machine("VIF", "device")
    }

    /// The network names of the machine's network cards, in their order; empty for a card without a network.
    pub fn networks(&self) -> Vec<String> {
        let name = |card: &Value| {
            let network = self.find("network", card.text_of("network"));
            network.map_or_else(String::new, |network| network.text_of("name_label").to_owned())
        };
        self.cards_of_machine().into_iter().map(name).collect()
    }

    /// The machine's records of a class, by the numbers in a field.
    fn of_machine(&self, class: &str, field: &str) -> Vec<&Value> {
        let id = self.machine().map(|machine| machine.id.as_str()).unwrap_or_default();
        let mut records: Vec<&Value> = self
            .objects
            .iter()
            .filter(|object| object.class == class)
            .map(|object| &object.record)
            .collect();
        records.retain(|record| record.text_of("VM") == id);
        records.sort_by_key(|record| number_in(record, field));
        records
    }

    /// The record of the only machine.
    pub(super) fn only_machine(&self) -> Result<&Value> {
        match self.records("VM").count() {
            1 => self.machine_record(),
            count => Err(wrong(format!("it has {count} machines"))),
        }
    }

    /// The machine, not one of its snapshots in the archive.
    fn machine(&self) -> Result<&Object> {
        let mut machines = self
            .of_class("VM")
            .filter(|machine| !machine.record.is_true("is_a_snapshot"));
        // A snapshot that was exported alone counts as the machine.
        let machine = machines.next().or_else(|| self.of_class("VM").next());
        machine.ok_or_else(|| wrong("it has no machine".to_owned()))
    }
}

pub(super) fn wrong(detail: String) -> Error {
    Error::Malformed { form: FORM, detail }
}

/// Reads the machine of an `ova.xml`; the key of a disk is the id of its VDI.
pub fn read(text: &str) -> Result<Translated<Machine>> {
    let records = XenRecords::parse(text)?;
    let vm = records.machine_record()?;
    let mut dropped = Vec::new();
    let platform = vm.get("platform").cloned().unwrap_or(Value::Struct(Vec::new()));
    let processor_count = vm.text_of("VCPUs_at_startup").parse().map_err(|_| {
        wrong(format!(
            "the number of processors is {:?}",
            vm.text_of("VCPUs_at_startup")
        ))
    })?;
    // The dynamic maximum is the memory that it runs with; the static maximum may be higher.
    let memory = [vm.text_of("memory_dynamic_max"), vm.text_of("memory_static_max")];
    let memory = memory
        .iter()
        .find_map(|text| text.parse().ok().filter(|bytes| *bytes > 0));
    for what in ["VGPUs", "attached_PCIs", "VUSBs"] {
        if vm.get(what).is_some_and(|value| !value.as_array().is_empty()) {
            dropped.push(Untranslated::new(
                format!("host devices ({what})"),
                "are specific to the source host",
            ));
        }
    }
    let snapshot_count = vm.get("snapshots").map_or(0, |snapshots| snapshots.as_array().len());
    if snapshot_count > 0 {
        dropped.push(Untranslated::new(
            format!("{snapshot_count} snapshots"),
            "only the current state is carried over",
        ));
    }
    if matches!(vm.get("NVRAM"), Some(Value::Struct(members)) if !members.is_empty()) {
        dropped.push(Untranslated::new(
            "variables of the firmware",
            "another hypervisor starts with defaults and searches for a boot loader",
        ));
    }
    if !matches!(vm.text_of("suspend_VDI"), "" | "OpaqueRef:NULL") {
        dropped.push(Untranslated::new(
            "its memory",
            "another hypervisor cannot resume from it",
        ));
    }
    let value = Machine {
        name: vm.text_of("name_label").to_owned(),
        uuid: Some(vm.text_of("uuid").to_owned()).filter(|uuid| !uuid.is_empty()),
        description: vm.text_of("name_description").to_owned(),
        processor_count,
        topology: topology(processor_count, &platform),
        memory_bytes: memory.ok_or_else(|| wrong("the memory size is missing".to_owned()))?,
        firmware: firmware(vm, &platform),
        clock: clock(&platform),
        disks: disks(&records, vm, &mut dropped),
        cards: cards(&records),
        has_tpm: platform.is_true("vtpm") || vm.get("VTPMs").is_some_and(|tpms| !tpms.as_array().is_empty()),
    };
    let value = value.checked(FORM)?;
    Ok(Translated { value, dropped })
}

/// The position in a field: a number, or a device name as in older versions (`xvdb`, `hdb`). Other texts sort last.
fn number_in(record: &Value, field: &str) -> u32 {
    let text = record.text_of(field);
    let letter = || {
        let letter = ["xvd", "hd", "sd"]
            .iter()
            .find_map(|prefix| text.strip_prefix(*prefix))?;
        match letter.as_bytes() {
            [letter @ b'a'..=b'z'] => Some(u32::from(letter - b'a')),
            _ => None,
        }
    };
    text.parse().ok().or_else(letter).unwrap_or(u32::MAX)
}

fn topology(processor_count: u32, platform: &Value) -> Option<Topology> {
    let core_count = platform
        .text_of("cores-per-socket")
        .parse()
        .ok()
        .filter(|cores| *cores > 0)?;
    processor_count.is_multiple_of(core_count).then(|| Topology {
        socket_count: processor_count / core_count,
        core_count,
        thread_count: 1,
    })
}

fn firmware(vm: &Value, platform: &Value) -> Firmware {
    let is_paravirtual = match vm.text_of("domain_type") {
        "pv" => true,
        "" | "unspecified" => vm.text_of("HVM_boot_policy").is_empty(),
        _ => false,
    };
    let is_uefi = vm
        .get("HVM_boot_params")
        .is_some_and(|boot| boot.text_of("firmware") == "uefi");
    match (is_paravirtual, is_uefi, platform.is_true("secureboot")) {
        (true, ..) => Firmware::Paravirtual,
        (false, true, true) => Firmware::UefiSecure,
        (false, true, false) => Firmware::Uefi,
        (false, false, _) => Firmware::Bios,
    }
}

/// XenServer stores the offset of a guest's clock from UTC: whole quarters of an hour mean a time zone.
fn clock(platform: &Value) -> Clock {
    let offset: i64 = platform.text_of("timeoffset").parse().unwrap_or(0);
    if offset.abs() >= 15 * 60 {
        Clock::LocalTime
    } else {
        Clock::Utc
    }
}

fn disks(records: &XenRecords, vm: &Value, dropped: &mut Vec<Untranslated>) -> Vec<Disk> {
    let order = vm
        .get("HVM_boot_params")
        .map(|boot| boot.text_of("order"))
        .unwrap_or_default();
    let place_of = |letter: char| {
        order
            .chars()
            .position(|found| found == letter)
            .and_then(|at| u32::try_from(at + 1).ok())
    };
    let mut disks: Vec<Disk> = Vec::new();
    for vbd in records.disks_of_machine() {
        let kind = match vbd.text_of("type") {
            "CD" => DiskKind::Cdrom,
            "Floppy" => DiskKind::Floppy,
            _ => DiskKind::Disk,
        };
        let vdi = records
            .find("VDI", vbd.text_of("VDI"))
            .filter(|_| !vbd.is_true("empty"));
        if kind == DiskKind::Disk && vdi.is_none() {
            dropped.push(Untranslated::new(
                format!("disk {}", vbd.text_of("userdevice")),
                "the archive does not have it",
            ));
            continue;
        }
        let is_first = disks.iter().all(|other| other.kind != kind);
        disks.push(Disk {
            key: vdi.map(|_| vbd.text_of("VDI").to_owned()).unwrap_or_default(),
            label: vdi.map(|vdi| vdi.text_of("name_label").to_owned()).unwrap_or_default(),
            kind,
            bus: if kind == DiskKind::Floppy {
                Bus::Floppy
            } else {
                Bus::Xen
            },
            position: number_in(vbd, "userdevice"),
            size_bytes: vdi.and_then(|vdi| vdi.text_of("virtual_size").parse().ok()),
            boot_order: match kind {
                _ if !is_first => None,
                // Machines with a BIOS or UEFI use only the boot order; paravirtual ones use the bootable flag.
                DiskKind::Disk if !order.is_empty() => place_of('c'),
                DiskKind::Disk => vbd.is_true("bootable").then_some(1),
                DiskKind::Cdrom => place_of('d'),
                DiskKind::Floppy => place_of('a'),
            },
            is_read_only: vbd.text_of("mode") == "RO",
        });
    }
    disks
}

fn cards(records: &XenRecords) -> Vec<NetworkCard> {
    let card = |vif: &Value| NetworkCard {
        mac: Some(vif.text_of("MAC").to_ascii_lowercase()).filter(|mac| !mac.is_empty()),
        network: records
            .find("network", vif.text_of("network"))
            .map(|network| network.text_of("name_label").to_owned())
            .filter(|name| !name.is_empty()),
        model: CardModel::Xen,
    };
    records.cards_of_machine().into_iter().map(card).collect()
}
