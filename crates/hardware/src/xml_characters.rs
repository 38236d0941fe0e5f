//! Characters in the texts of a machine that its XML cannot represent.

use crate::xml::is_representable;
use crate::{Machine, Platform, Untranslated};

/// Removes unrepresentable characters from the texts that `platform` writes into XML, with one note for each field.
///
/// Names for libvirt are not changed here: the writer for libvirt replaces these and more characters. Proxmox does not
/// use XML.
pub(crate) fn remove_unrepresentable(machine: &mut Machine, platform: Platform, dropped: &mut Vec<Untranslated>) {
    if platform == Platform::Proxmox {
        return;
    }
    if platform != Platform::Qemu {
        remove(&mut machine.name, "the name", dropped);
    }
    remove(&mut machine.description, "the description", dropped);
    if !matches!(platform, Platform::Xen | Platform::Ovf) {
        return;
    }
    for (number, disk) in (1..).zip(&mut machine.disks) {
        remove(&mut disk.label, &format!("the label of disk {number}"), dropped);
    }
    for (number, card) in (1..).zip(&mut machine.cards) {
        if let Some(network) = &mut card.network {
            remove(network, &format!("the network name of card {number}"), dropped);
        }
    }
}

/// Removes unrepresentable characters from the text of one `field`, with a note.
pub(crate) fn remove(text: &mut String, field: &str, dropped: &mut Vec<Untranslated>) {
    let length = text.len();
    text.retain(is_representable);
    if text.len() != length {
        dropped.push(Untranslated::new(
            format!("control characters in {field}"),
            "XML cannot represent them: they are removed",
        ));
    }
}

#[cfg(test)]
mod tests {
    use crate::libvirt::tests::specimen;
    use crate::ovf::tests::what;
    use crate::{Platform, adapt, ovf};

    const TEXT: &str = "a\u{1}b\u{fffe}\tc";

    #[test]
    fn each_field_with_unrepresentable_characters_is_noted_once() {
        let mut machine = specimen();
        machine.name = TEXT.to_owned();
        machine.description = TEXT.to_owned();
        machine.disks[0].label = TEXT.to_owned();
        machine.cards[0].network = Some(TEXT.to_owned());
        let [name, description, label, network] = [
            "control characters in the name",
            "control characters in the description",
            "control characters in the label of disk 1",
            "control characters in the network name of card 1",
        ];
        for (platform, expected) in [
            (Platform::Qemu, &[description][..]),
            (Platform::Proxmox, &[]),
            (Platform::VirtualBox, &[name, description]),
            (Platform::Xen, &[name, description, label, network]),
            (Platform::Ovf, &[name, description, label, network]),
        ] {
            let adapted = adapt(&machine, platform);
            let mut noted = what(&adapted);
            noted.retain(|what| what.starts_with("control characters"));
            assert_eq!(noted, expected, "{platform:?}");
        }
        let written = ovf::write(&machine, &ovf::tests::options(&[]));
        assert!(what(&written).contains(&description), "{:?}", written.dropped);
        let again = ovf::read(&written.value).unwrap().value;
        assert_eq!((&again.name[..], &again.description[..]), ("ab\tc", "ab\tc"));
    }
}
