//! Suspended machines: the records of their pool, from which they are resumed.
//!
//! Source: xen-api, `ocaml/xapi/export.ml`, `import.ml` and `xapi_vm_clone.ml`. A checkpoint is exported as a template
//! with its own name and UUID and the power state `Suspended`; `suspend_VDI` names the disk with the memory, and
//! `last_booted_record` has further data for the hypervisor. None of this can be translated, so the text is kept, and
//! only the ranges that turn the template into the machine are edited.

use roxmltree::Node;

use super::read::{XenDisk, XenRecords, wrong};
use super::value::Value;
use crate::xen::write_options::NULL;
use crate::xml::Edits;
use crate::xml::{child, children};
use crate::{Error, Result, xml};

const FORM: &str = "ova.xml of a suspended machine";
/// The power state of a machine that can be resumed.
const SUSPENDED: &str = "Suspended";
/// The format version of archives with a checksum behind each block.
const EXPORT_VERSION: &str = "2";
/// Fields in which a checkpoint differs from its machine.
const OF_THE_MACHINE: [&str; 5] = ["uuid", "name_label", "start_delay", "shutdown_delay", "order"];

/// The requirements for resuming a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SuspendedMachine {
    /// The name of the machine.
    pub name: String,
    /// The disk with the memory.
    pub memory: XenDisk,
    /// The other disks.
    pub disks: Vec<SuspendedDisk>,
    /// The vendor of the processors that the machine ran on, if known: the machine can only be resumed on processors of
    /// the same vendor.
    pub processor_vendor: Option<String>,
}

/// A disk of a suspended machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SuspendedDisk {
    /// The disk.
    pub disk: XenDisk,
    /// The UUID in the original pool.
    pub uuid: String,
    /// The device name in the machine: `xvda`.
    pub device: String,
    /// The display name.
    pub label: String,
}

impl SuspendedMachine {
    /// Reads the records of a suspended machine.
    ///
    /// # Errors
    /// The machine is not suspended, or there are several.
    pub fn read(text: &str) -> Result<Self> {
        let records = XenRecords::parse(text)?;
        let machine = records.only_machine()?;
        if machine.text_of("power_state") != SUSPENDED {
            let detail = format!("the power state is {:?}", machine.text_of("power_state"));
            return Err(wrong(detail));
        }
        let id = machine.text_of("suspend_VDI");
        let all = records.disks()?;
        let memory = all.iter().find(|disk| disk.id == id).cloned();
        let memory = memory.ok_or_else(|| wrong(format!("the disk {id:?} with the memory is not there")))?;
        let mut disks = Vec::new();
        for vbd in records.records("VBD").filter(|vbd| vbd.text_of("type") != "CD") {
            let id = vbd.text_of("VDI");
            let (Some(vdi), Some(disk)) = (records.find("VDI", id), all.iter().find(|disk| disk.id == id)) else {
                continue;
            };
            let storage = records.find("SR", vdi.text_of("SR"));
            // Media in an ISO library are not in the archive.
            if storage.is_some_and(|storage| storage.text_of("content_type") == "iso") {
                continue;
            }
            disks.push(SuspendedDisk {
                disk: disk.clone(),
                uuid: vdi.text_of("uuid").to_owned(),
                device: device_of(vbd),
                label: vdi.text_of("name_label").to_owned(),
            });
        }
        let vendor = machine.get("last_boot_CPU_flags").map(|flags| flags.text_of("vendor"));
        Ok(Self {
            name: machine.text_of("name_label").to_owned(),
            memory,
            disks,
            processor_vendor: vendor.filter(|vendor| !vendor.is_empty()).map(str::to_owned),
        })
    }
}

/// The device name of a disk, derived from its position if the record has none.
fn device_of(vbd: &Value) -> String {
    match (vbd.text_of("device"), vbd.text_of("userdevice").parse::<u8>()) {
        ("", Ok(place @ 0..26)) => format!("xvd{}", char::from(b'a' + place)),
        ("", _) => format!("xvd{}", vbd.text_of("userdevice")),
        (device, _) => device.to_owned(),
    }
}

/// Turns the records of a checkpoint into those of its machine. The result is no template, and has the UUID and name of
/// the machine in `original`, or another `name`.
///
/// # Errors
/// One of the texts is malformed.
pub fn suspended_machine(text: &str, original: &str, name: Option<&str>) -> Result<String> {
    let machine = SuspendedMachine::read(text)?;
    let original = XenRecords::parse(original)?;
    let original = original.machine_record()?;
    let document = xml::parse(text, FORM)?;
    let top = member(document.root_element(), "version").zip(member(document.root_element(), "objects"));
    let (version, objects) = top.ok_or_else(|| malformed("it has no version or no objects"))?;
    let mut edits = Edits::new(text);
    set_field(version, "export_vsn", &Value::text(EXPORT_VERSION), &mut edits);
    for object in objects_in(objects) {
        let text_of = |name: &str| member(object, name).map(text_in).unwrap_or_default();
        let record = member(object, "snapshot").ok_or_else(|| malformed("an object has no record"))?;
        match text_of("class") {
            "VM" => {
                if member(record, "name_label").is_none() {
                    return Err(malformed("the machine has no name"));
                }
                for field in OF_THE_MACHINE {
                    match (field, name) {
                        ("name_label", Some(name)) => set_field(record, field, &Value::text(name), &mut edits),
                        _ if original.get(field).is_none() => {}
                        _ => set_field(record, field, &Value::text(original.text_of(field)), &mut edits),
                    }
                }
                // Some versions of XAPI omit the tags in snapshots.
                if let Some(tags) = original.get("tags") {
                    set_field(record, "tags", tags, &mut edits);
                }
                clear_checkpoint_fields(record, &mut edits);
            }
            // XAPI imports the memory only with this type.
            "VDI" if text_of("id") == machine.memory.id => {
                set_field(record, "type", &Value::text("suspend"), &mut edits);
            }
            _ => {}
        }
    }
    Ok(edits.apply())
}

/// Clears the fields that mark a template or a snapshot.
fn clear_checkpoint_fields(record: Node<'_, '_>, edits: &mut Edits<'_>) {
    for (field, value) in [
        ("is_a_template", Value::Bool(false)),
        ("is_a_snapshot", Value::Bool(false)),
        ("snapshot_of", Value::text(NULL)),
        ("snapshots", Value::Array(Vec::new())),
        ("snapshot_info", Value::Struct(Vec::new())),
        ("snapshot_metadata", Value::text("")),
        ("transportable_snapshot_id", Value::text("")),
        ("parent", Value::text(NULL)),
    ] {
        set_field(record, field, &value, edits);
    }
}

/// Sets a field if it exists: fields depend on the version of the pool.
fn set_field(record: Node<'_, '_>, field: &str, value: &Value, edits: &mut Edits<'_>) {
    if let Some(node) = member(record, field) {
        edits.replace_element(node, &value.to_element());
    }
}

/// The value of a member of a struct.
fn member<'a, 'input>(value: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    let structure = child(value, "struct")?;
    let mut members = children(structure, "member");
    let member = members.find(|member| child(*member, "name").and_then(|name| name.text()) == Some(name))?;
    child(member, "value")
}

/// The elements of an array.
fn objects_in<'a, 'input>(value: Node<'a, 'input>) -> impl Iterator<Item = Node<'a, 'input>> {
    let data = child(value, "array").and_then(|array| child(array, "data"));
    data.into_iter().flat_map(|data| children(data, "value"))
}

/// The text of a value, with or without a type element around it.
fn text_in<'a>(value: Node<'a, '_>) -> &'a str {
    let typed = value.children().find(Node::is_element);
    typed.unwrap_or(value).text().unwrap_or_default()
}

fn malformed(detail: &str) -> Error {
    Error::Malformed {
        form: FORM,
        detail: detail.to_owned(),
    }
}
