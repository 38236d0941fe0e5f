//! Converts a descriptor to a machine.

use roxmltree::Node;

use super::hardware::Hardware;
use super::package::{FORM, OvfPackage, envelope, section, sections, text_of, wrong};
use crate::xml::{self, children, named};
use crate::{Clock, Error, Firmware, Machine, Result, Translated, Untranslated, identity, virtualbox};

/// Limit of names in an error.
const NAMES_COUNT_MAX: usize = 20;
/// Limit of the length of a name in characters.
const NAME_LENGTH_MAX: usize = 80;

/// Reads the machine of a descriptor; the key of a disk is that of [`OvfPackage::disks`].
///
/// A descriptor with several machines is [`Error::SeveralMachines`].
pub fn read(text: &str) -> Result<Translated<Machine>> {
    let document = xml::parse(text, FORM)?;
    let envelope = envelope(&document)?;
    let package = OvfPackage::of(envelope)?;
    let system = only_machine(envelope)?;
    let hardware = section(system, "VirtualHardwareSection");
    let hardware = hardware.ok_or_else(|| wrong("its machine has no hardware"))?;
    let items = Hardware::new(envelope, hardware, &package)?;
    let mut dropped = Vec::new();
    let (processor_count, topology) = items.processors()?;
    let mut machine = Machine {
        name: name_of(system).to_owned(),
        // Some hypervisors write the UUID as the id, others the name.
        uuid: named(system, "id").and_then(identity::uuid),
        description: description(system),
        processor_count,
        topology,
        memory_bytes: items.memory(&mut dropped)?,
        firmware: firmware(system, hardware),
        clock: Clock::Utc,
        disks: items.disks(&mut dropped)?,
        cards: items.cards(),
        has_tpm: items.has_tpm(),
    };
    if let Some(extension) = section(system, "Machine") {
        virtualbox::read_ovf_extension(&mut machine, extension);
    }
    items.note_unsupported(&mut dropped);
    for disk in &package.disks {
        if machine.disks.iter().all(|other| other.key != disk.key) {
            let what = format!("disk {}", disk.key);
            dropped.push(Untranslated::new(
                what,
                "it is in the package, but not attached to the machine",
            ));
        }
    }
    note_sections(system, hardware, &mut dropped);
    let value = machine.checked(FORM)?;
    Ok(Translated { value, dropped })
}

fn only_machine<'a, 'input>(envelope: Node<'a, 'input>) -> Result<Node<'a, 'input>> {
    let is_machine = |node: &Node<'_, '_>| match node.tag_name().name() {
        "VirtualSystem" => true,
        "Content" => named(*node, "type").is_some_and(|kind| kind.ends_with("VirtualSystem_Type")),
        _ => false,
    };
    let machines: Vec<Node<'a, 'input>> = envelope.descendants().filter(is_machine).collect();
    match machines.as_slice() {
        [machine] => Ok(*machine),
        [] => Err(wrong("it has no machine")),
        several => {
            let short = |machine: &Node<'_, '_>| name_of(*machine).chars().take(NAME_LENGTH_MAX).collect();
            let mut names: Vec<String> = several.iter().take(NAMES_COUNT_MAX).map(short).collect();
            if several.len() > NAMES_COUNT_MAX {
                names.push("...".to_owned());
            }
            Err(Error::SeveralMachines {
                form: FORM,
                count: several.len(),
                names: names.join(", "),
            })
        }
    }
}

fn name_of<'a>(system: Node<'a, '_>) -> &'a str {
    match text_of(system, "Name") {
        "" => named(system, "id").unwrap_or_default(),
        name => name,
    }
}

fn description(system: Node<'_, '_>) -> String {
    let annotation = section(system, "AnnotationSection").map(|section| text_of(section, "Annotation"));
    let text = annotation.unwrap_or_else(|| text_of(system, "Description"));
    text.to_owned()
}

fn firmware(system: Node<'_, '_>, hardware: Node<'_, '_>) -> Firmware {
    let configured = |key: &str| {
        children(hardware, "Config")
            .find(|config| named(*config, "key") == Some(key))
            .and_then(|config| named(config, "value"))
    };
    let of_xen = |name: &str| {
        let other = hardware
            .descendants()
            .find(|node| named(*node, "Name") == Some(name) && node.tag_name().name().ends_with("ConfigurationData"));
        let texts = other.map(|other| other.descendants().filter_map(|node| node.text()).collect::<String>());
        texts.unwrap_or_default()
    };
    // oVirt's BiosType: 3 is UEFI, 4 is UEFI with Secure Boot.
    let of_ovirt = text_of(system, "BiosType");
    let is_uefi = configured("firmware").is_some_and(|firmware| firmware.eq_ignore_ascii_case("efi"))
        || matches!(of_ovirt, "3" | "4")
        || of_xen("HVM_boot_params").contains("firmware=uefi");
    let is_secure = configured("bootOptions.efiSecureBootEnabled") == Some("true")
        || of_ovirt == "4"
        || of_xen("platform").contains("secureboot=true");
    let kind = section(hardware, "System").map(|system| text_of(system, "VirtualSystemType"));
    match (is_uefi, is_secure) {
        _ if kind.is_some_and(|kind| kind.starts_with("xen-")) => Firmware::Paravirtual,
        (true, true) => Firmware::UefiSecure,
        (true, false) => Firmware::Uefi,
        (false, _) => Firmware::Bios,
    }
}

/// Adds a note for each dropped section that is not an item.
fn note_sections(system: Node<'_, '_>, hardware: Node<'_, '_>, dropped: &mut Vec<Untranslated>) {
    let properties = sections(system, "ProductSection").flat_map(|product| children(product, "Property"));
    let property_count = properties.count();
    if property_count > 0 {
        dropped.push(Untranslated::new(
            format!("{property_count} properties of the appliance"),
            "they are not passed to the guest",
        ));
    }
    if children(hardware, "ExtraConfig").any(|config| named(config, "key") == Some("nvram")) {
        dropped.push(Untranslated::new(
            "variables of the firmware",
            "the machine starts with defaults",
        ));
    }
    let machine = section(system, "Machine");
    if machine.is_some_and(|machine| section(machine, "Snapshot").is_some()) {
        dropped.push(Untranslated::new("snapshots", "only the current state is carried over"));
    }
}
