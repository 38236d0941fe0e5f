//! Fields of XenServer's records that no other hypervisor has. A machine that is restored to XenServer gets them back.

use super::read::XenRecords;
use super::value::Value;
use crate::xen::write_options::NULL;
use crate::{Disk, DiskKind};

/// Fields of the machine, except its identity, its transient state, and the generation id, which shows the guest that
/// it was restored.
const OF_MACHINE: &[&str] = &[
    "user_version",
    "memory_static_max",
    "memory_static_min",
    "memory_dynamic_max",
    "memory_dynamic_min",
    "VCPUs_params",
    "VCPUs_max",
    "VCPUs_at_startup",
    "actions_after_shutdown",
    "actions_after_reboot",
    "actions_after_crash",
    "actions_after_softreboot",
    "PV_bootloader",
    "PV_kernel",
    "PV_ramdisk",
    "PV_args",
    "PV_bootloader_args",
    "PV_legacy_args",
    "HVM_boot_policy",
    "HVM_boot_params",
    "HVM_shadow_multiplier",
    "platform",
    "other_config",
    "domain_type",
    "has_vendor_device",
    "start_delay",
    "shutdown_delay",
    "order",
    "hardware_platform_version",
    "recommendations",
    "xenstore_data",
    "bios_strings",
    "NVRAM",
    "tags",
    "ha_restart_priority",
    "blocked_operations",
];
/// Fields of a disk.
const OF_DISK: &[&str] = &[
    "name_label",
    "name_description",
    "tags",
    "read_only",
    "sharable",
    "xenstore_data",
    "other_config",
];
/// Fields of the attachment of a disk or drive.
const OF_ATTACHMENT: &[&str] = &[
    "bootable",
    "mode",
    "unpluggable",
    "other_config",
    "qos_algorithm_type",
    "qos_algorithm_params",
];
/// Fields of a network card.
const OF_CARD: &[&str] = &[
    "device",
    "MTU",
    "other_config",
    "qos_algorithm_type",
    "qos_algorithm_params",
    "locking_mode",
    "ipv4_allowed",
    "ipv6_allowed",
];
/// Fields of a network.
const OF_NETWORK: &[&str] = &[
    "uuid",
    "name_description",
    "MTU",
    "other_config",
    "bridge",
    "tags",
    "purpose",
];

/// The original records of the machine that is written.
pub(super) struct RawRecords<'o> {
    records: &'o XenRecords,
    machine: &'o Value,
    cards: Vec<&'o Value>,
}

impl<'o> RawRecords<'o> {
    /// The machine in these records, if there is one.
    pub(super) fn of(records: &'o XenRecords) -> Option<Self> {
        Some(Self {
            records,
            machine: records.machine_record().ok()?,
            cards: records.cards_of_machine(),
        })
    }

    pub(super) fn copy_machine_fields(&self, record: &mut Value) {
        record.copy_members(self.machine, OF_MACHINE);
    }

    /// Copies the fields of the original disk at `place`, if it is this disk.
    pub(super) fn copy_disk_fields(&self, disk: &Disk, place: u32, record: &mut Value) {
        if let Some(vdi) = self.attached_as(disk, place).and_then(|vbd| self.content(vbd)) {
            record.copy_members(vdi, OF_DISK);
        }
    }

    /// Copies the fields of the original attachment at `place`, if it is this disk or drive.
    pub(super) fn copy_attachment_fields(&self, disk: &Disk, place: u32, record: &mut Value) {
        if let Some(vbd) = self.attached_as(disk, place) {
            record.copy_members(vbd, OF_ATTACHMENT);
        }
    }

    /// The positions of original disks that none of `disks` has.
    pub(super) fn missing_positions(&self, disks: &[(&Disk, u32)]) -> Vec<String> {
        let is_back = |vbd: &Value| {
            let mut disks = disks.iter().filter(|(disk, _)| disk.kind == DiskKind::Disk);
            disks.any(|(disk, place)| place.to_string() == vbd.text_of("userdevice") && self.is_content(vbd, disk))
        };
        let vbds = self.records.disks_of_machine().into_iter();
        let lost = vbds.filter(|vbd| matches!(vbd.text_of("type"), "Disk" | "") && !is_back(vbd));
        lost.map(|vbd| vbd.text_of("userdevice").to_owned()).collect()
    }

    fn content(&self, vbd: &Value) -> Option<&'o Value> {
        self.records.find("VDI", vbd.text_of("VDI"))
    }

    /// Whether the disk may be the content of the attachment: both have the same size.
    fn is_content(&self, vbd: &Value, disk: &Disk) -> bool {
        let said = self.content(vbd).map(|vdi| vdi.text_of("virtual_size"));
        said.zip(disk.size_bytes)
            .is_none_or(|(said, size)| said == size.to_string())
    }

    fn attached_as(&self, disk: &Disk, place: u32) -> Option<&'o Value> {
        let vbd = self.attached_at(place, disk.kind)?;
        self.is_content(vbd, disk).then_some(vbd)
    }

    /// Whether the drive at `place` had a medium.
    pub(super) fn has_medium_at(&self, place: u32) -> bool {
        let vbd = self.attached_at(place, DiskKind::Cdrom);
        vbd.is_some_and(|vbd| !vbd.is_true("empty") && !matches!(vbd.text_of("VDI"), "" | NULL))
    }

    fn attached_at(&self, place: u32, kind: DiskKind) -> Option<&'o Value> {
        let place = place.to_string();
        let is_kind = |vbd: &Value| (vbd.text_of("type") == "CD") == (kind == DiskKind::Cdrom);
        let mut vbds = self.records.disks_of_machine().into_iter();
        vbds.find(|vbd| is_kind(vbd) && vbd.text_of("userdevice") == place)
    }

    pub(super) fn copy_card_fields(&self, number: usize, record: &mut Value) {
        if let Some(card) = self.cards.get(number) {
            record.copy_members(card, OF_CARD);
        }
    }

    /// The name of the network that a card was connected to.
    pub(super) fn network_of(&self, number: usize) -> Option<&str> {
        let card = self.cards.get(number)?;
        let name = self
            .records
            .find("network", card.text_of("network"))?
            .text_of("name_label");
        Some(name).filter(|name| !name.is_empty())
    }

    pub(super) fn copy_network_fields(&self, name: &str, record: &mut Value) {
        let mut networks = self.records.records("network");
        if let Some(network) = networks.find(|network| network.text_of("name_label") == name) {
            record.copy_members(network, OF_NETWORK);
        }
    }
}
