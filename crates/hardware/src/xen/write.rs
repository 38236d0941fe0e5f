//! From a machine to the records of XenServer.
//!
//! XAPI wants every field of a record that has no default in its data model; those that say nothing here have the value of a machine that was
//! just made.

use super::original::Original;
use super::read::XenRecords;
use super::records::{network_record, storage_record, structure, vbd_record, vdi_record, vif_record, vm_record};
use super::value::Value;
use crate::machine::PLACE_COUNT;
use crate::{Card, Disk, DiskKind, Dropped, Machine, Place, Translated, adapt};

/// What the records say beside the machine.
pub struct Wish<'a> {
    /// The host that writes them.
    pub host_name: &'a str,
    /// When, as `20261123T09:30:00Z`.
    pub time: &'a str,
    /// Gives a new UUID, as text, with each call.
    pub new_uuid: &'a mut dyn FnMut() -> String,
    /// The records that the machine comes from, if it was one of XenServer: what nobody else has a word for is in them.
    pub original: Option<&'a XenRecords>,
}

/// A machine as an `ova.xml`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    /// The text.
    pub xml: String,
    /// The disks whose content belongs into the archive, in the order in which it has to come: the key of each, and the id by which the
    /// members of the archive are called.
    pub disks: Vec<(String, String)>,
}

pub(super) const NULL: &str = "OpaqueRef:NULL";

/// Writes the records of a machine. Each disk must have a key and a size; drives are empty.
///
/// Ids are `Ref:1`, `Ref:2`, ... with as many digits as the largest: XAPI sorts them as text.
pub fn write(machine: &Machine, wish: &mut Wish<'_>) -> Translated<Exported> {
    let Translated {
        value: machine,
        mut dropped,
    } = adapt(machine, Place::Xen);
    if machine.has_tpm {
        dropped.push(Dropped::new(
            "what the TPM holds",
            "a TPM does not leave its hypervisor; the new one is empty",
        ));
    }
    if machine.topology.is_some_and(|topology| topology.thread_count > 1) {
        dropped.push(Dropped::new(
            "threads of its cores",
            "XenServer knows sockets and cores only",
        ));
    }
    let original = wish.original.and_then(Original::of);
    let mut records = Records::new(&machine, original);
    let mut taken = Vec::new();
    for (number, disk) in machine.disks.iter().enumerate() {
        if disk.kind == DiskKind::Floppy {
            dropped.push(Dropped::new(
                format!("floppy drive {}", number + 1),
                "XenServer has none",
            ));
        } else {
            let place = disk.place_of(PLACE_COUNT, |place| !taken.contains(&place));
            taken.push(place);
            records.add_disk(disk, place, wish);
        }
    }
    for (number, card) in machine.cards.iter().enumerate() {
        records.add_card(card, number, wish);
    }
    let disks = records.contents.clone();
    let xml = records.finish(&machine, wish);
    Translated {
        value: Exported { xml, disks },
        dropped,
    }
}

struct Records<'o> {
    original: Option<Original<'o>>,
    objects: Vec<Value>,
    count: usize,
    digits: usize,
    vm: String,
    storage: String,
    networks: Vec<Network>,
    vbds: Vec<Value>,
    vdis: Vec<Value>,
    vifs: Vec<Value>,
    contents: Vec<(String, String)>,
}

/// A network with the cards that are plugged into it.
struct Network {
    name: String,
    id: String,
    vifs: Vec<Value>,
}

impl<'o> Records<'o> {
    fn new(machine: &Machine, original: Option<Original<'o>>) -> Self {
        // Machine and storage, two for each disk, and for each card, which may have a network of its own.
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

    fn add_disk(&mut self, disk: &Disk, place: u32, wish: &mut Wish<'_>) {
        let is_empty = disk.kind != DiskKind::Disk || disk.key.is_empty();
        let vbd = self.next_id();
        let vdi = if is_empty { NULL.to_owned() } else { self.next_id() };
        let record = vbd_record((disk, place), (&self.vm, &vdi), wish);
        self.add("VBD", &vbd, record);
        self.vbds.push(Value::text(vbd.as_str()));
        if !is_empty {
            let mut record = vdi_record(disk, (&self.storage, &vbd), wish);
            if let Some(original) = &self.original {
                original.describe_disk(place, &mut record);
            }
            self.add("VDI", &vdi, record);
            self.vdis.push(Value::text(vdi.as_str()));
            self.contents.push((disk.key.clone(), vdi));
        }
    }

    fn add_card(&mut self, card: &Card, number: usize, wish: &mut Wish<'_>) {
        let vif = self.next_id();
        let original = self.original.as_ref();
        let network = original
            .and_then(|original| original.network_of(number))
            .or(card.network.as_deref());
        let network = network.unwrap_or_default().to_owned();
        let known = self.networks.iter().position(|known| known.name == network);
        let known = known.unwrap_or_else(|| {
            let id = self.next_id();
            self.networks.push(Network {
                name: network,
                id,
                vifs: Vec::new(),
            });
            self.networks.len() - 1
        });
        self.networks[known].vifs.push(Value::text(vif.as_str()));
        let mut record = vif_record((card, number), (&self.vm, &self.networks[known].id), wish);
        if let Some(original) = &self.original {
            original.describe_card(number, &mut record);
        }
        self.add("VIF", &vif, record);
        self.vifs.push(Value::text(vif));
    }

    fn finish(mut self, machine: &Machine, wish: &mut Wish<'_>) -> String {
        let storage = storage_record(std::mem::take(&mut self.vdis), wish);
        for network in std::mem::take(&mut self.networks) {
            let mut record = network_record(&network.name, network.vifs, wish);
            if let Some(original) = &self.original {
                original.describe_network(&network.name, &mut record);
            }
            self.add("network", &network.id, record);
        }
        let mut vm = vm_record(machine, (&self.vbds, &self.vifs), wish);
        if let Some(original) = &self.original {
            original.describe_machine(&mut vm);
        }
        let (vm_id, storage_id) = (self.vm.clone(), self.storage.clone());
        self.add("SR", &storage_id, storage);
        self.add("VM", &vm_id, vm);
        let version = structure([
            ("hostname", Value::text(wish.host_name)),
            ("date", Value::text(wish.time)),
            ("product_version", Value::text("8.2.0")),
            ("product_brand", Value::text("XCP-ng")),
            ("build_number", Value::text("")),
            ("xapi_major", Value::text("1")),
            ("xapi_minor", Value::text("20")),
            ("export_vsn", Value::text("2")),
        ]);
        structure([("version", version), ("objects", Value::Array(self.objects))]).to_xml()
    }
}
