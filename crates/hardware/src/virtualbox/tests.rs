use super::{
    Image, Medium, MediumKind, NetworkAttachment, RegisteredMachine, Snapshot, VirtualBoxOptions, media, read, read_at,
    registry, settings, write,
};
use crate::libvirt::tests::specimen;
use crate::ovf::tests::{layout, what};
use crate::{Bus, CardModel, Clock, Disk, DiskKind, Firmware, Machine, NetworkCard};

const LAB: &str = include_str!("../../tests/samples/machine.vbox");
const ROOT: &str = "6b7c3b3d-4075-4e54-8e6f-4b8c68e2c2b2";
const DATA: &str = "7c8d4c4e-5186-4f65-9f70-5c9d79f3d3c3";
const ISO: &str = "0f8d2a8b-90f4-4e9b-8f6e-1c2d3e4f5a6b";

fn cards(machine: &Machine) -> Vec<(&CardModel, Option<&str>, Option<&str>)> {
    let cards = machine.cards.iter();
    cards
        .map(|card| (&card.model, card.mac.as_deref(), card.network.as_deref()))
        .collect()
}

#[test]
fn a_machine_is_read() {
    let read = read(LAB).unwrap();
    let expected = [
        "the drive /dev/fd0",
        "a shared folder (home)",
        "1 forwarded ports",
        "variables of UEFI",
        "1 snapshots",
        "its memory",
    ];
    assert_eq!(what(&read), expected);
    let machine = read.value;
    assert_eq!(
        (machine.name.as_str(), machine.description.as_str()),
        ("lab", "two\nlines & more")
    );
    assert_eq!(machine.uuid.as_deref(), Some("9f6d1b8e-1f2a-4c3d-8e4f-5a6b7c8d9e0f"));
    assert_eq!((machine.processor_count, machine.memory_bytes), (2, 2 << 30));
    assert_eq!(
        (machine.firmware, machine.clock, machine.has_tpm),
        (Firmware::Uefi, Clock::Utc, true)
    );
    let expected = [
        (ISO, DiskKind::Cdrom, Bus::Ide, 2, Some(1)),
        ("", DiskKind::Cdrom, Bus::Ide, 3, None),
        (ROOT, DiskKind::Disk, Bus::Sata, 0, Some(2)),
        (DATA, DiskKind::Disk, Bus::Nvme, 0, None),
        ("", DiskKind::Floppy, Bus::Floppy, 0, None),
    ];
    assert_eq!(layout(&machine), expected);
    let expected = [
        (&CardModel::E1000, Some("08:00:27:bb:14:75"), Some("NAT")),
        (&CardModel::Virtio, Some("08:00:27:dd:5a:df"), Some("eth0")),
        (&CardModel::Pcnet, Some("08:00:27:bb:14:76"), None),
    ];
    assert_eq!(cards(&machine), expected);
}

/// The image of a disk with snapshots is the last image of a chain.
#[test]
fn images_have_their_parents() {
    let medium = |uuid: &str, location: &str, format: &str, parent: Option<&str>, is_encrypted| Medium {
        uuid: uuid.to_owned(),
        location: location.to_owned(),
        format: format.to_owned(),
        parent: parent.map(str::to_owned),
        is_encrypted,
        kind: MediumKind::Normal,
    };
    let base = "5a6b2a2c-3f64-4d43-9d5e-3a7b57d1b1a1";
    let expected = [
        medium(base, "lab.vdi", "VDI", None, false),
        medium(ROOT, &format!("Snapshots/{{{ROOT}}}.vdi"), "VDI", Some(base), false),
        medium(DATA, "/srv/data.vmdk", "VMDK", None, true),
        medium(ISO, "/srv/iso/debian.iso", "", None, false),
    ];
    assert_eq!(media(LAB).unwrap(), expected);
}

/// A snapshot refers to the images that have not changed since it was taken.
#[test]
fn snapshots_have_the_earlier_state_of_the_machine() {
    let said = settings(LAB).unwrap();
    assert_eq!((&said.name[..], &said.snapshot_folder[..]), ("lab", "Snapshots"));
    assert_eq!(said.uuid, "9f6d1b8e-1f2a-4c3d-8e4f-5a6b7c8d9e0f");
    assert_eq!(
        said.state_file.as_deref(),
        Some("Snapshots/2026-02-03T04-05-06-000000000Z.sav")
    );
    assert_eq!(said.nvram.as_deref(), Some("lab.nvram"));
    let snapshot = Snapshot {
        uuid: "11111111-2222-4333-8444-555555555555".to_owned(),
        name: "before".to_owned(),
        state_file: None,
        nvram: None,
    };
    assert_eq!(said.snapshots, [snapshot]);
    let then = read_at(LAB, &said.snapshots[0].uuid).unwrap().value;
    assert_eq!(
        (&then.name[..], then.processor_count, then.memory_bytes),
        ("lab", 1, 512 << 20)
    );
    let base = "5a6b2a2c-3f64-4d43-9d5e-3a7b57d1b1a1";
    assert_eq!(layout(&then), [(base, DiskKind::Disk, Bus::Sata, 0, Some(3))]);
    read_at(LAB, "11111111-2222-4333-8444-555555555556").unwrap_err();

    // Snapshots are nested to any depth and width.
    let inner = "<Snapshots><Snapshot uuid='{22222222-2222-4333-8444-555555555555}' name='a' stateFile='x.sav'/>                 <Snapshot uuid='{33333333-2222-4333-8444-555555555555}' name='a'/></Snapshots></Snapshot>";
    let text = LAB.replacen("</Snapshot>", inner, 1);
    let said = settings(&text).unwrap();
    assert_eq!(said.snapshots.len(), 3);
    assert_eq!(said.snapshots[1].state_file.as_deref(), Some("x.sav"));
    settings(&text.replace("{2222", "{222")).unwrap_err();
    assert_eq!(what(&read(&text).unwrap())[4], "3 snapshots");
}

#[test]
fn the_registry_is_read() {
    let text = "<VirtualBox xmlns='http://www.virtualbox.org/' version='1.12-linux'><Global><ExtraData/><MachineRegistry>\
                <MachineEntry uuid='{9F6D1B8E-1f2a-4c3d-8e4f-5a6b7c8d9e0f}' src='/home/ana/VirtualBox VMs/lab/lab.vbox'/>\
                <MachineEntry uuid='{9F6D1B8E-1f2a-4c3d-8e4f-5a6b7c8d9e00}' src='two.vbox'/></MachineRegistry><MediaRegistry>\
                <HardDisks><HardDisk uuid='{5a6b2a2c-3f64-4d43-9d5e-3a7b57d1b1a1}' location='/a.vdi' format='VDI' type='Immutable'/>\
                </HardDisks></MediaRegistry><SystemProperties defaultMachineFolder='/home/ana/VirtualBox VMs'/></Global></VirtualBox>";
    let found = registry(text).unwrap();
    let machine = RegisteredMachine {
        uuid: "9f6d1b8e-1f2a-4c3d-8e4f-5a6b7c8d9e0f".to_owned(),
        settings: "/home/ana/VirtualBox VMs/lab/lab.vbox".to_owned(),
    };
    assert_eq!((found.machines.len(), &found.machines[0]), (2, &machine));
    assert_eq!(found.machine_folder.as_deref(), Some("/home/ana/VirtualBox VMs"));
    assert_eq!((found.media.len(), found.media[0].kind), (1, MediumKind::Immutable));
    assert!(found.media[0].kind.has_snapshots() && !MediumKind::Shareable.has_snapshots());
    for wrong in [LAB, "", "<VirtualBox/>", &text.replace("{9F6D", "{9F6")] {
        registry(wrong).unwrap_err();
    }
}

/// Before version 1.17, controllers were outside the hardware; defaults are not written.
#[test]
fn old_settings_are_read() {
    let text = "<VirtualBox xmlns='http://www.virtualbox.org/' version='1.12-linux'><Machine uuid='x' name='old'><Hardware>\
                <Memory RAMSize='256'/></Hardware><StorageControllers>\
                <StorageController name='A' type='LsiLogicSas'><AttachedDevice type='HardDisk' port='3'>\
                <Image uuid='{5a6b2a2c-3f64-4d43-9d5e-3a7b57d1b1a1}'/></AttachedDevice><AttachedDevice type='HardDisk'/>\
                </StorageController><StorageController name='B' type='BusLogic'><AttachedDevice type='DVD' port='1'/>\
                </StorageController><StorageController name='C' type='Newer'/>\
                <StorageController name='D' type='Newest'><AttachedDevice type='HardDisk'>\
                <Image uuid='{5a6b2a2c-3f64-4d43-9d5e-3a7b57d1b1a2}'/></AttachedDevice></StorageController></StorageControllers></Machine></VirtualBox>";
    let read = read(text).unwrap();
    assert_eq!(
        what(&read),
        [
            "disk A 0",
            "an empty controller \"Newer\"",
            "disks on the storage controller \"Newest\""
        ]
    );
    let machine = read.value;
    assert_eq!((machine.processor_count, &machine.uuid), (1, &None));
    assert_eq!((machine.firmware, machine.clock), (Firmware::Bios, Clock::LocalTime));
    let expected = [
        (
            "5a6b2a2c-3f64-4d43-9d5e-3a7b57d1b1a1",
            DiskKind::Disk,
            Bus::Scsi,
            3,
            Some(3),
        ),
        ("", DiskKind::Cdrom, Bus::Scsi, 17, Some(2)),
    ];
    assert_eq!(layout(&machine), expected);
    assert_eq!(media(text).unwrap(), []);
}

/// Since version 1.20, processors and clock have a separate element.
#[test]
fn current_settings_are_read() {
    let clock = "<RTC localOrUTC=\"UTC\"/>";
    assert!(LAB.contains(clock));
    let platform =
        |architecture: &str| format!("<Platform architecture=\"{architecture}\">{clock}<CPU count=\"6\"/></Platform>");
    let text = LAB.replace(clock, &platform("x86"));
    let machine = read(&text).unwrap().value;
    assert_eq!((machine.processor_count, machine.clock), (6, Clock::Utc));
    let text = LAB
        .replace(clock, "")
        .replace("    <MediaRegistry>", &format!("{}<MediaRegistry>", platform("ARM")));
    let read = read(&text).unwrap();
    assert_eq!((read.value.processor_count, read.value.clock), (6, Clock::Utc));
    assert!(what(&read).contains(&"processors of ARM"));
}

fn options(keys: &[&str]) -> VirtualBoxOptions {
    let image = |(number, key): (u32, &&str)| {
        let image = Image {
            uuid: format!("00000000-0000-4000-8000-{number:012}"),
            location: format!("<{key}>.vdi"),
            format: "VDI".to_owned(),
        };
        ((*key).to_owned(), image)
    };
    VirtualBoxOptions {
        uuid: "9f6d1b8e-0000-4000-8000-5a6b7c8d9e0f".to_owned(),
        disks: (1..).zip(keys).map(image).collect(),
        network: NetworkAttachment::Nat,
    }
}

#[test]
fn a_machine_survives_a_round_trip_through_its_settings() {
    let mut machine = read(LAB).unwrap().value;
    let written = write(&machine, &options(&[ROOT, DATA]));
    assert_eq!(what(&written), ["the medium in drive IDE 2", "the state of the TPM"]);
    let again = read(&written.value).unwrap();
    assert_eq!(again.dropped, []);
    machine.disks[0].key = String::new();
    machine.disks[2].key = "00000000-0000-4000-8000-000000000001".to_owned();
    machine.disks[3].key = "00000000-0000-4000-8000-000000000002".to_owned();
    machine.disks[4].label = "floppy 0".to_owned();
    for card in &mut machine.cards {
        card.network = Some("NAT".to_owned());
    }
    assert_eq!(again.value, machine);
    let images: Vec<String> = media(&written.value)
        .unwrap()
        .into_iter()
        .map(|medium| medium.location)
        .collect();
    assert_eq!(images, [format!("<{ROOT}>.vdi"), format!("<{DATA}>.vdi")]);
    let bridged = VirtualBoxOptions {
        network: NetworkAttachment::Bridged("eth0".to_owned()),
        ..options(&[])
    };
    let again = read(&write(&machine, &bridged).value).unwrap().value;
    assert_eq!(again.cards[2].network.as_deref(), Some("eth0"));
}

#[test]
fn a_machine_of_another_hypervisor_gets_compatible_devices() {
    let mut machine = specimen();
    machine.uuid = None;
    machine.processor_count = 100;
    machine.disks[2].bus = Bus::Nvme;
    let disk = Disk {
        bus: Bus::Scsi,
        boot_order: None,
        ..machine.disks[0].clone()
    };
    let numbered = |number: u32| Disk {
        key: format!("more{number}"),
        ..disk.clone()
    };
    machine.disks.extend((0..60).map(numbered));
    let card = NetworkCard {
        model: CardModel::Vmxnet3,
        mac: None,
        ..machine.cards[0].clone()
    };
    machine.cards.extend(vec![card; 40]);
    let keys: Vec<String> = machine.disks.iter().map(|disk| disk.key.clone()).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).filter(|key| !key.is_empty()).collect();
    let written = write(&machine, &options(&keys));
    let notes: Vec<String> = written.dropped.iter().map(ToString::to_string).collect();
    for expected in [
        "disk 1 (vda) on virtio: is on SATA now",
        "network card 2 (vmxnet3): is an e1000 now",
        "100 processors: ",
        "41 network cards: ",
        "CPU topology: ",
        "Secure Boot: ",
        "the state of the TPM: ",
        "disk  on NVMe: is on SATA now",
    ] {
        assert!(
            notes.iter().any(|line| line.starts_with(expected)),
            "{expected}: {notes:#?}"
        );
    }
    let again = read(&written.value).unwrap().value;
    assert_eq!(again.uuid.as_deref(), Some("9f6d1b8e-0000-4000-8000-5a6b7c8d9e0f"));
    assert_eq!((again.processor_count, again.cards.len()), (64, 36));
    assert_eq!(again.cards[0].model, CardModel::Virtio);
    assert_eq!(again.cards[1].mac, None, "VirtualBox generates one");
    assert!(!written.value.contains("MACAddress=\"\""));
    assert_eq!(again.disks.len(), 15 + 30 + 4 + 1, "SCSI, SATA, IDE and virtio-scsi");
    let mut places: Vec<_> = again
        .disks
        .iter()
        .map(|disk| (disk.bus.name(), disk.position))
        .collect();
    places.sort_unstable();
    places.dedup();
    assert_eq!(places.len(), again.disks.len());
}

/// VirtualBox boots from the first disk of a controller.
#[test]
fn the_boot_disk_is_moved_first() {
    let mut machine = specimen();
    let disk = Disk {
        bus: Bus::Sata,
        boot_order: None,
        ..machine.disks[0].clone()
    };
    let other = |key: &str, bus, position, boot_order| Disk {
        key: key.to_owned(),
        label: key.to_owned(),
        bus,
        position,
        boot_order,
        ..disk.clone()
    };
    machine.disks = vec![
        other("a", Bus::Sata, 0, Some(2)),
        other("b", Bus::Sata, 3, Some(1)),
        other("c", Bus::Scsi, 0, None),
    ];
    let written = write(&machine, &options(&["a", "b", "c"]));
    assert!(what(&written).contains(&"the place of disk b"), "{:?}", written.dropped);
    let again = read(&written.value).unwrap().value;
    let places: Vec<_> = again.disks.iter().map(|disk| (disk.bus, disk.position)).collect();
    assert_eq!(places, [(Bus::Sata, 3), (Bus::Sata, 0), (Bus::Scsi, 0)]);
    let bootable: Vec<&str> = written
        .value
        .split("Bootable=\"")
        .skip(1)
        .map(|text| &text[..4])
        .collect();
    assert_eq!(bootable, ["true", "fals"], "{}", written.value);
    machine.disks[2].bus = Bus::Ide;
    let written = write(&machine, &options(&["a", "b", "c"]));
    assert!(what(&written).contains(&"booting from disk b"), "{:?}", written.dropped);
}

#[test]
fn malformed_settings_are_errors() {
    let changed = |from: &str, to: &str| {
        assert!(LAB.contains(from), "{from}");
        LAB.replace(from, to)
    };
    for wrong in [
        String::new(),
        "<a/>".to_owned(),
        "<VirtualBox/>".to_owned(),
        "<VirtualBox><Global/></VirtualBox>".to_owned(),
        "<VirtualBox><Machine/></VirtualBox>".to_owned(),
        "<VirtualBox><MachineEncrypted/><Machine><Hardware><Memory RAMSize='1'/></Hardware></Machine></VirtualBox>"
            .to_owned(),
        changed("RAMSize=\"2048\"", "RAMSize=\"0\""),
        changed("RAMSize=\"2048\"", "RAMSize=\"much\""),
        changed("RAMSize=\"2048\"", "RAMSize=\"99999999999999\""),
        changed("CPU count=\"2\"", "CPU count=\"0\""),
        changed("CPU count=\"2\"", "CPU count=\"-1\""),
        changed("<Image uuid=\"{6b7c", "<Image uuid=\"{nb7c"),
        changed("port=\"0\"", "port=\"4294967296\""),
    ] {
        read(&wrong).unwrap_err();
    }
    media(&changed("HardDisk uuid=\"{6b7c", "HardDisk uuid=\"{nb7c")).unwrap_err();
    let far = changed("port=\"0\"", "port=\"4294967295\"");
    assert_eq!(read(&far).unwrap().value.disks[2].position, u32::MAX);
}
