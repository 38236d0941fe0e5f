//! Writes the original settings of a machine with other images, and keeps the settings that only VirtualBox has.

use std::collections::BTreeMap;

use roxmltree::Node;

use super::media::{FORM, MediumKind, machine, media, uuid, wrong};
use super::write::{Image, media_registry};
use crate::xml::{self, Edits, child, children};
use crate::{Result, Translated, Untranslated, identity, xml_characters};

/// Options for restoring settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RestoredOptions {
    /// The name of the restored machine.
    pub name: String,
    /// Whether the machine keeps its identity.
    pub identity: RestoredIdentity,
    /// The image of each disk, by the UUID of the original image. Disks without an image are left out; drives are
    /// empty.
    pub disks: BTreeMap<String, Image>,
    /// The file with the firmware variables, if there is one.
    pub nvram: Option<String>,
}

/// The identity of a restored machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RestoredIdentity {
    /// The original identity.
    Same,
    /// A new identity with this UUID; VirtualBox generates new MAC addresses.
    New(String),
}

/// Returns the settings `text` with other images, without snapshots and memory.
pub fn restored(text: &str, options: &RestoredOptions) -> Result<Translated<String>> {
    let document = xml::parse(text, FORM)?;
    let machine = machine(&document)?;
    let mut edits = Edits::new(text);
    let mut dropped = Vec::new();
    let mut name = options.name.clone();
    xml_characters::remove(&mut name, "the name", &mut dropped);
    edits.set_attribute(machine, "name", &name);
    if let RestoredIdentity::New(uuid) = &options.identity {
        let uuid = identity::uuid(uuid).ok_or_else(|| wrong(format!("{uuid:?} is no UUID of a machine")))?;
        edits.set_attribute(machine, "uuid", &format!("{{{uuid}}}"));
    }
    // An absolute path would be the folder of the original machine, and snapshots are not restored.
    edits.set_attribute(machine, "snapshotFolder", "Snapshots");
    for gone in ["currentSnapshot", "stateFile", "aborted", "currentStateModified"] {
        edits.remove_attribute(machine, gone);
    }
    if let Some(snapshot) = child(machine, "Snapshot") {
        edits.remove_element(snapshot);
        dropped.push(Untranslated::new(
            "snapshots of VirtualBox",
            "only the state of the backup is carried over",
        ));
    }
    for medium in media(text)?.iter().filter(|medium| medium.parent.is_none()) {
        let kind = match medium.kind {
            MediumKind::Normal | MediumKind::ReadOnly => continue,
            kind => kind.name(),
        };
        dropped.push(Untranslated::new(
            format!("type {kind} of the disk {}", medium.location),
            "it is a normal disk now: change the type with VBoxManage modifymedium",
        ));
    }
    let hardware = child(machine, "Hardware").ok_or_else(|| wrong("its machine has no hardware"))?;
    if matches!(options.identity, RestoredIdentity::New(_)) {
        // The UUID that the guest sees; without it, VirtualBox uses the machine's.
        edits.remove_attribute(hardware, "uuid");
    }
    let attached = attach(machine, hardware, options, &mut edits, &mut dropped)?;
    register(machine, hardware, &attached, &mut edits);
    put_nvram(hardware, options, &mut edits);
    if options.identity != RestoredIdentity::Same {
        let cards = child(hardware, "Network");
        for card in cards.iter().flat_map(|network| children(*network, "Adapter")) {
            edits.remove_attribute(card, "MACAddress");
        }
    }
    Ok(Translated {
        value: edits.apply(),
        dropped,
    })
}

/// Sets the image of each disk; returns the used images.
fn attach<'w>(
    machine: Node<'_, '_>,
    hardware: Node<'_, '_>,
    options: &'w RestoredOptions,
    edits: &mut Edits<'_>,
    dropped: &mut Vec<Untranslated>,
) -> Result<Vec<&'w Image>> {
    let mut attached: Vec<&Image> = Vec::new();
    let controllers = child(hardware, "StorageControllers").or_else(|| child(machine, "StorageControllers"));
    for controller in controllers.iter().flat_map(|node| children(*node, "StorageController")) {
        let name = controller.attribute("name").unwrap_or_default();
        for device in children(controller, "AttachedDevice") {
            let Some(image) = child(device, "Image") else { continue };
            let place = device.attribute("port").unwrap_or_default();
            match device.attribute("type") {
                Some("DVD" | "Floppy") => {
                    edits.remove_element(image);
                    dropped.push(Untranslated::new(
                        format!("the medium in drive {name} {place}"),
                        "the drive is empty",
                    ));
                }
                _ => match options.disks.get(&uuid(image)?) {
                    Some(new) if !attached.contains(&new) => {
                        edits.set_attribute(image, "uuid", &format!("{{{}}}", new.uuid));
                        attached.push(new);
                    }
                    _ => {
                        edits.remove_element(device);
                        dropped.push(Untranslated::new(
                            format!("disk {name} {place}"),
                            "its content is missing",
                        ));
                    }
                },
            }
        }
    }
    Ok(attached)
}

/// Replaces the list of images.
fn register(machine: Node<'_, '_>, hardware: Node<'_, '_>, images: &[&Image], edits: &mut Edits<'_>) {
    let registry = media_registry(images.iter().copied());
    match child(machine, "MediaRegistry") {
        Some(node) => edits.replace_element(node, &registry),
        None => edits.insert_before(hardware, &registry),
    }
}

/// Sets or removes the file with the firmware variables.
fn put_nvram(hardware: Node<'_, '_>, options: &RestoredOptions, edits: &mut Edits<'_>) {
    for outer in ["Firmware", "BIOS"] {
        let Some(node) = child(hardware, outer).and_then(|outer| child(outer, "NVRAM")) else {
            continue;
        };
        match &options.nvram {
            Some(path) => edits.set_attribute(node, "path", path),
            None => edits.remove_element(node),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Image, media, read, settings};
    use super::{RestoredIdentity, RestoredOptions, restored};

    const LAB: &str = include_str!("../../tests/samples/machine.vbox");
    const ROOT: &str = "6b7c3b3d-4075-4e54-8e6f-4b8c68e2c2b2";
    const DATA: &str = "7c8d4c4e-5186-4f65-9f70-5c9d79f3d3c3";
    const NEW_UUID: &str = "00000000-0000-4000-8000-000000000009";

    fn options(keys: &[&str]) -> RestoredOptions {
        let image = |(number, key): (u32, &&str)| {
            let image = Image {
                uuid: format!("00000000-0000-4000-8000-{number:012}"),
                location: format!("a & \"b\" {number}.vdi"),
                format: "VDI".to_owned(),
            };
            ((*key).to_owned(), image)
        };
        RestoredOptions {
            name: "lab \"2\"".to_owned(),
            identity: RestoredIdentity::Same,
            disks: (1..).zip(keys).map(image).collect(),
            nvram: Some("lab 2.nvram".to_owned()),
        }
    }

    fn what(dropped: &[crate::Untranslated]) -> Vec<&str> {
        dropped.iter().map(|dropped| dropped.what.as_str()).collect()
    }

    #[test]
    fn settings_are_restored_with_other_images() {
        let written = restored(LAB, &options(&[ROOT, DATA])).unwrap();
        assert_eq!(
            what(&written.dropped),
            ["snapshots of VirtualBox", "the medium in drive IDE 1"]
        );
        let text = written.value;
        for kept in [
            "<SharedFolder name=\"home\"",
            "<Display controller=\"VMSVGA\"",
            "IDE0MasterEmulationPort",
            "DO NOT EDIT",
            "MACAddress=\"080027BB1475\"",
            "lastStateChange=\"2026-02-03T04:05:06Z\"",
        ] {
            assert!(text.contains(kept), "{kept}\n{text}");
        }
        for gone in ["stateFile", "currentSnapshot", "<Snapshot ", "CRYPT", "debian.iso"] {
            assert!(!text.contains(gone), "{gone}\n{text}");
        }
        let said = settings(&text).unwrap();
        assert_eq!((&said.name[..], &said.snapshots[..]), ("lab \"2\"", &[][..]));
        assert_eq!(said.nvram.as_deref(), Some("lab 2.nvram"));
        let media = media(&text).unwrap();
        let locations: Vec<&str> = media.iter().map(|medium| &medium.location[..]).collect();
        assert_eq!(locations, ["a & \"b\" 1.vdi", "a & \"b\" 2.vdi"]);
        let (before, after) = (read(LAB).unwrap().value, read(&text).unwrap().value);
        assert_eq!((&before.cards, &before.uuid), (&after.cards, &after.uuid));
        assert_eq!(after.disks[2].key, media[0].uuid);
        assert_eq!(after.disks[3].key, media[1].uuid);
        // Restored settings can be restored again.
        let keys: Vec<&str> = media.iter().map(|medium| &medium.uuid[..]).collect();
        let again = restored(&text, &options(&keys)).unwrap();
        assert_eq!((again.value, again.dropped), (text, Vec::new()));
    }

    #[test]
    fn a_new_identity_has_another_uuid_and_other_addresses() {
        let options = RestoredOptions {
            name: "lab\u{1}".to_owned(),
            identity: RestoredIdentity::New(NEW_UUID.to_owned()),
            nvram: None,
            ..options(&[DATA])
        };
        let written = restored(LAB, &options).unwrap();
        assert!(what(&written.dropped).contains(&"disk SATA 0"));
        assert!(what(&written.dropped).contains(&"control characters in the name"));
        let machine = read(&written.value).unwrap().value;
        assert_eq!(machine.uuid.as_deref(), Some(NEW_UUID));
        assert!(machine.cards.len() == 3 && machine.cards.iter().all(|card| card.mac.is_none()));
        assert_eq!(settings(&written.value).unwrap().nvram, None);
        assert_eq!(machine.disks.iter().filter(|disk| !disk.key.is_empty()).count(), 1);
        let nonsense = RestoredOptions {
            identity: RestoredIdentity::New("x".to_owned()),
            ..options
        };
        restored(LAB, &nonsense).unwrap_err();
    }

    /// Old settings list no images: they use the list in the registry.
    #[test]
    fn a_machine_without_a_list_of_images_gets_one() {
        let start = LAB.find("    <MediaRegistry>").unwrap();
        let end = LAB.find("</MediaRegistry>").unwrap() + "</MediaRegistry>\n".len();
        let text = format!("{}{}", &LAB[..start], &LAB[end..]);
        assert_eq!(media(&text).unwrap(), []);
        let written = restored(&text, &options(&[ROOT])).unwrap().value;
        assert_eq!(media(&written).unwrap().len(), 1);
        read(&written).unwrap();
    }
}
