//! Converts a machine to the records of XenServer.
//!
//! XAPI requires every field that has no default in its data model. Unused fields have the value of a newly created
//! machine.

use super::records::{network_record, storage_record, structure, vbd_record, vdi_record, vif_record, vm_record};
use super::value::Value;
use crate::bus_address::{AddressAllocator, move_first};
use crate::machine::POSITION_COUNT;
use crate::xen::raw_records::RawRecords;
use crate::xen::write_options::{NULL, XenOptions};
use crate::{Clock, Disk, DiskKind, Machine, NetworkCard, Platform, Translated, Untranslated, adapt};

/// A machine as `ova.xml`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XenExport {
    /// The text of `ova.xml`.
    pub xml: String,
    /// The disks whose content must be in the archive, in this order: the key of each, and its id in the names of the
    /// archive's members.
    pub disks: Vec<(String, String)>,
}

/// The last position that a BIOS can boot from: emulated IDE has four positions.
const BIOS_PLACE_MAX: u32 = 3;

/// Writes the records of a machine. Each disk must have a key and a size; drives are written empty.
///
/// Ids are `Ref:1`, `Ref:2` and so on, all padded to the same number of digits, because XAPI sorts them as text.
pub fn write(machine: &Machine, options: &mut XenOptions<'_>) -> Translated<XenExport> {
    let Translated {
        value: machine,
        mut dropped,
    } = adapt(machine, Platform::Xen);
    if machine.has_tpm {
        dropped.push(Untranslated::new(
            "the state of the TPM",
            "TPM state cannot move to another hypervisor; the new TPM is empty",
        ));
    }
    if machine.topology.is_some_and(|topology| topology.thread_count > 1) {
        dropped.push(Untranslated::new(
            "threads per core",
            "XenServer has only sockets and cores",
        ));
    }
    let original = options.original.and_then(RawRecords::of);
    if machine.clock == Clock::LocalTime && original.is_none() {
        dropped.push(Untranslated::new(
            "its clock in local time",
            "XenServer stores the offset of a guest's clock from UTC: set it in the guest, or by xe vm-param-set platform:timeoffset=SECONDS",
        ));
    }
    let places = places(&machine, original.is_some(), &mut dropped);
    if let Some(original) = &original {
        let disks: Vec<(&Disk, u32)> = machine.disks.iter().zip(places.iter().copied()).collect();
        for place in original.missing_positions(&disks) {
            dropped.push(Untranslated::new(
                format!("the disk at place {place}"),
                "no disk returns to that position: it was left out or moved",
            ));
        }
    }
    let mut records = Records::new(&machine, original);
    for (number, disk) in machine.disks.iter().enumerate() {
        if disk.kind == DiskKind::Floppy {
            dropped.push(Untranslated::new(
                format!("floppy drive {}", number + 1),
                "XenServer has none",
            ));
        } else {
            if records.had_medium_at(disk, places[number]) {
                dropped.push(Untranslated::new(
                    format!("medium in the drive at place {}", places[number]),
                    "it belongs to the pool: insert one with xe vm-cd-insert",
                ));
            }
            records.add_disk(disk, places[number], options);
        }
    }
    for (number, card) in machine.cards.iter().enumerate() {
        records.add_card(card, number, options);
    }
    let disks = records.contents.clone();
    let xml = records.finish(&machine, options);
    Translated {
        value: XenExport { xml, disks },
        dropped,
    }
}

/// The position of each disk and drive. A machine that was on XenServer keeps its positions. Other machines boot from
/// their first disk, which must be among the first four positions: a BIOS sees no others.
fn places(machine: &Machine, is_original: bool, dropped: &mut Vec<Untranslated>) -> Vec<u32> {
    let wanted = |disk: &Disk| {
        let has_place = disk.kind != DiskKind::Floppy && disk.position < POSITION_COUNT;
        has_place.then_some(((), disk.position))
    };
    let mut addresses = AddressAllocator::new(&machine.disks, wanted, |()| 0..u32::MAX);
    let numbers = 0..machine.disks.len();
    let allocate = |number: usize| match machine.disks[number].kind {
        // XenServer has no floppy drives.
        DiskKind::Floppy => u32::MAX,
        // There are more positions than disks.
        _ => addresses.allocate(number, (), 0..u32::MAX).unwrap_or(u32::MAX),
    };
    let mut places: Vec<u32> = numbers.clone().map(allocate).collect();
    let hard_disks: Vec<usize> = numbers
        .filter(|number| machine.disks[*number].kind == DiskKind::Disk)
        .collect();
    let named = |disk: usize| machine.disks[hard_disks[disk]].boot_order;
    let wished = (0..hard_disks.len()).filter(|disk| named(*disk).is_some());
    let first = wished.min_by_key(|disk| named(*disk));
    let mut of_disks: Vec<u32> = hard_disks.iter().map(|number| places[*number]).collect();
    let first = first.or_else(|| (0..of_disks.len()).min_by_key(|disk| of_disks[*disk]));
    let Some(first) = first.filter(|_| !is_original) else {
        return places;
    };
    let mut is_moved = move_first(&mut of_disks, first);
    if of_disks[first] > BIOS_PLACE_MAX
        && let Some(free) = (0..=BIOS_PLACE_MAX).find(|place| !places.contains(place))
    {
        of_disks[first] = free;
        is_moved = true;
    }
    for (number, place) in hard_disks.iter().zip(of_disks) {
        places[*number] = place;
    }
    if is_moved {
        let disk = &machine.disks[hard_disks[first]];
        let name = if disk.label.is_empty() { &disk.key } else { &disk.label };
        dropped.push(Untranslated::new(
            format!("the place of disk {name}"),
            "it is the first disk now: XenServer boots from the first",
        ));
    }
    places
}

struct Records<'o> {
    original: Option<RawRecords<'o>>,
    objects: Vec<Value>,
    count: usize,
    digits: usize,
    vm: String,
    storage: String,
    networks: Vec<XenNetwork>,
    vbds: Vec<Value>,
    vdis: Vec<Value>,
    vifs: Vec<Value>,
    contents: Vec<(String, String)>,
}

/// A network with its cards.
struct XenNetwork {
    name: String,
    id: String,
    vifs: Vec<Value>,
}

impl<'o> Records<'o> {
    fn new(machine: &Machine, original: Option<RawRecords<'o>>) -> Self {
        // The machine, its storage, two objects for each disk, and two for each card, which may have its own network.
        let most = 2 + machine.disks.len() * 2 + machine.cards.len() * 2;
        let mut records = Self {
            original,
            objects: Vec::new(),
            count: 0,
            digits: most.to_string().len(),
            vm: String::new(),
            storage: String::new(),
            networks: Vec::new(),
            vbds: Vec::new(),
            vdis: Vec::new(),
            vifs: Vec::new(),
            contents: Vec::new(),
        };
        records.vm = records.next_id();
        records.storage = records.next_id();
        records
    }

    fn next_id(&mut self) -> String {
        self.count += 1;
        format!("Ref:{:0width$}", self.count, width = self.digits)
    }

    fn add(&mut self, class: &str, id: &str, record: Value) {
        self.objects.push(structure([
            ("class", Value::text(class)),
            ("id", Value::text(id)),
            ("snapshot", record),
        ]));
    }

    fn had_medium_at(&self, drive: &Disk, place: u32) -> bool {
        let original = self.original.as_ref().filter(|_| drive.kind == DiskKind::Cdrom);
        original.is_some_and(|original| original.has_medium_at(place))
    }

    fn add_disk(&mut self, disk: &Disk, place: u32, options: &mut XenOptions<'_>) {
        let is_empty = disk.kind != DiskKind::Disk || disk.key.is_empty();
        let vbd = self.next_id();
        let vdi = if is_empty { NULL.to_owned() } else { self.next_id() };
        let mut record = vbd_record(disk, place, &self.vm, &vdi, options);
        if let Some(original) = &self.original {
            original.copy_attachment_fields(disk, place, &mut record);
        }
        self.add("VBD", &vbd, record);
        self.vbds.push(Value::text(vbd.as_str()));
        if !is_empty {
            let mut record = vdi_record(disk, &self.storage, &vbd, options);
            if let Some(original) = &self.original {
                original.copy_disk_fields(disk, place, &mut record);
            }
            self.add("VDI", &vdi, record);
            self.vdis.push(Value::text(vdi.as_str()));
            self.contents.push((disk.key.clone(), vdi));
        }
    }

    fn add_card(&mut self, card: &NetworkCard, number: usize, options: &mut XenOptions<'_>) {
        let vif = self.next_id();
        let original = self.original.as_ref();
        let network = original
            .and_then(|original| original.network_of(number))
            .or(card.network.as_deref());
        let network = network.unwrap_or_default().to_owned();
        let known = self.networks.iter().position(|known| known.name == network);
        let known = known.unwrap_or_else(|| {
            let id = self.next_id();
            self.networks.push(XenNetwork {
                name: network,
                id,
                vifs: Vec::new(),
            });
            self.networks.len() - 1
        });
        self.networks[known].vifs.push(Value::text(vif.as_str()));
        let mut record = vif_record(card, number, &self.vm, &self.networks[known].id, options);
        if let Some(original) = &self.original {
            original.copy_card_fields(number, &mut record);
        }
        self.add("VIF", &vif, record);
        self.vifs.push(Value::text(vif));
    }

    fn finish(mut self, machine: &Machine, options: &mut XenOptions<'_>) -> String {
        let storage = storage_record(std::mem::take(&mut self.vdis), options);
        for network in std::mem::take(&mut self.networks) {
            let mut record = network_record(&network.name, network.vifs, options);
            if let Some(original) = &self.original {
                original.copy_network_fields(&network.name, &mut record);
            }
            self.add("network", &network.id, record);
        }
        let mut vm = vm_record(machine, &self.vbds, &self.vifs, options);
        if let Some(original) = &self.original {
            original.copy_machine_fields(&mut vm);
        }
        let (vm_id, storage_id) = (self.vm.clone(), self.storage.clone());
        self.add("SR", &storage_id, storage);
        self.add("VM", &vm_id, vm);
        let version = structure([
            ("hostname", Value::text(options.host_name)),
            ("date", Value::text(options.time)),
            ("product_version", Value::text("8.2.0")),
            ("product_brand", Value::text("XCP-ng")),
            ("build_number", Value::text("")),
            ("xapi_major", Value::text("1")),
            ("xapi_minor", Value::text("20")),
            ("export_vsn", Value::text("2")),
        ]);
        structure([("version", version), ("objects", Value::Array(self.objects))])
            .to_element()
            .to_string()
    }
}
