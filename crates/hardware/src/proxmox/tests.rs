use super::{ProxmoxOptions, read, write};
use crate::libvirt::tests::specimen;
use crate::ovf::tests::{layout, what};
use crate::{Bus, CardModel, Clock, Disk, DiskKind, Firmware, Machine, Topology};

const VMA: &str = include_str!("../../tests/samples/proxmox.conf");

#[test]
fn a_machine_of_a_backup_is_read() {
    let read = read(VMA).unwrap();
    let expected = [
        "the drive of cloud-init (ide0)",
        "disk scsi1 (tank:vm-100-disk-2)",
        "VLAN 20 of network card 0",
        "variables of UEFI (local-lvm:vm-100-disk-1)",
        "QEMU arguments",
        "a host device (PCI)",
        "disk local-lvm:vm-100-disk-9",
        "settings of cloud-init",
        "1 snapshots",
        "pending changes",
    ];
    assert_eq!(what(&read), expected);
    let machine = read.value;
    assert_eq!(
        (machine.name.as_str(), machine.description.as_str()),
        ("web", " Web server\n100% \u{fc}ber port 80")
    );
    assert_eq!(machine.uuid.as_deref(), Some("7c0bd2a4-0d5e-4f0f-9d2e-5b1c6a7d8e9f"));
    assert_eq!((machine.processor_count, machine.memory_bytes), (8, 4 << 30));
    let topology = Topology {
        socket_count: 2,
        core_count: 4,
        thread_count: 1,
    };
    assert_eq!(machine.topology, Some(topology));
    assert_eq!(
        (machine.firmware, machine.clock, machine.has_tpm),
        (Firmware::UefiSecure, Clock::LocalTime, true)
    );
    let expected = [
        ("", DiskKind::Cdrom, Bus::Ide, 2, Some(2)),
        ("", DiskKind::Cdrom, Bus::Sata, 1, None),
        ("drive-scsi0", DiskKind::Disk, Bus::VirtioScsi, 0, Some(1)),
        ("drive-virtio3", DiskKind::Disk, Bus::Virtio, 3, None),
    ];
    assert_eq!(layout(&machine), expected);
    let sizes: Vec<_> = machine.disks.iter().map(|disk| disk.size_bytes).collect();
    assert_eq!(sizes, [None, Some(629 << 20), Some(32 << 30), Some(528 << 10)]);
    assert!(machine.disks[3].is_read_only && !machine.disks[2].is_read_only);
    let cards: Vec<_> = machine
        .cards
        .iter()
        .map(|card| (&card.model, card.mac.as_deref(), card.network.as_deref()))
        .collect();
    let expected = [
        (&CardModel::Virtio, Some("bc:24:11:0a:1b:2c"), Some("vmbr0")),
        (&CardModel::E1000, Some("bc:24:11:0a:1b:2d"), Some("vmbr1")),
    ];
    assert_eq!(cards, expected);
}

/// A configuration outside an archive, with all disks, and with the boot order of older versions.
#[test]
fn a_configuration_outside_an_archive_is_read() {
    let text = "#vzdump#x\n#qmdump#y\nboot: dc\nbootdisk: ide1\ndescription: two%0Alines\nide0: a:1\nide1: a:2\nide2: local:iso/x.iso,media=cdrom\n\
                memory: current=1024\nnet0: virtio\nscsi0: file=a:3\nvcpus: 2\nsockets: 4\nlocaltime: 0\nostype: wxp\nstrange: 1\n";
    let read = read(text).unwrap();
    assert_eq!(what(&read), ["the setting strange"]);
    let machine = read.value;
    let expected = [
        ("drive-ide0", DiskKind::Disk, Bus::Ide, 0, None),
        ("drive-ide1", DiskKind::Disk, Bus::Ide, 1, Some(2)),
        ("drive-ide2", DiskKind::Cdrom, Bus::Ide, 2, Some(1)),
        ("drive-scsi0", DiskKind::Disk, Bus::Scsi, 0, None),
    ];
    assert_eq!(layout(&machine), expected);
    assert_eq!(machine.description, "two\nlines");
    assert_eq!((machine.processor_count, machine.memory_bytes), (2, 1 << 30));
    assert_eq!(machine.clock, Clock::Utc);
    assert_eq!(
        (&machine.cards[0].model, &machine.cards[0].mac),
        (&CardModel::Virtio, &None)
    );
    assert_eq!(super::read("cores: 1").unwrap().value.memory_bytes, 512 << 20);
}

/// Without a boot order, Proxmox uses its default; `bootdisk` alone is sufficient.
#[test]
fn the_default_boot_disk_is_found() {
    let first = |more: &str| {
        let text = format!("#qmdump#x\nmemory: 512\nname: a\nsata0: a:1\nscsi1: a:2\nvirtio1: a:3\n{more}");
        let machine = read(&text).unwrap().value;
        let disk = machine.disks.into_iter().find(|disk| disk.boot_order == Some(1));
        disk.map(|disk| disk.label).unwrap_or_default()
    };
    assert_eq!(first(""), "scsi1");
    assert_eq!(first("bootdisk: virtio1\n"), "virtio1");
    assert_eq!(first("boot: order=sata0\n"), "sata0");
}

fn options(keys: &[&str]) -> ProxmoxOptions {
    ProxmoxOptions {
        vm_id: 107,
        storage: "local-lvm".to_owned(),
        bridge: "vmbr0".to_owned(),
        disks: keys.iter().map(|key| ((*key).to_owned(), 32 << 30)).collect(),
    }
}

#[test]
fn a_machine_survives_a_round_trip_through_its_configuration() {
    let mut machine = read(VMA).unwrap().value;
    machine.firmware = Firmware::Uefi;
    machine.has_tpm = false;
    machine.cards.truncate(1);
    machine.description = "two\n#qmdump#map:a:b:c:\nthree".to_owned();
    let written = write(&machine, &options(&["drive-scsi0", "drive-virtio3"]));
    assert_eq!(what(&written), ["variables of UEFI"]);
    let exported = written.value;
    let pair = |one: &str, other: &str| (one.to_owned(), other.to_owned());
    assert_eq!(
        exported.disks,
        [
            pair("drive-scsi0", "drive-scsi0"),
            pair("drive-virtio3", "drive-virtio3")
        ]
    );
    for line in [
        "scsi0: local-lvm:vm-107-disk-0,size=32G\n",
        "net0: virtio=BC:24:11:0A:1B:2C,bridge=vmbr0\n",
        "boot: order=scsi0;ide2\n",
        "#qmdump#map:scsi0:drive-scsi0:local-lvm:raw:\n",
    ] {
        assert!(exported.config.contains(line), "{line} {}", exported.config);
    }
    let again = read(&exported.config).unwrap();
    assert_eq!(again.dropped, []);
    machine.disks[1].size_bytes = None;
    machine.disks[3].size_bytes = Some(32 << 30);
    assert_eq!(again.value, machine);
}

#[test]
fn a_machine_of_another_hypervisor_gets_compatible_devices() {
    let mut machine = specimen();
    machine.disks[1].bus = Bus::Scsi;
    machine.disks[1].label = "sda\nmemory: 1".to_owned();
    machine.disks[2].bus = Bus::Usb;
    let disk = Disk {
        bus: Bus::Sata,
        key: "more".to_owned(),
        label: String::new(),
        boot_order: None,
        ..machine.disks[0].clone()
    };
    machine.disks.push(Disk {
        kind: DiskKind::Floppy,
        ..disk.clone()
    });
    let numbered = |number: u32| Disk {
        key: format!("more{number}"),
        ..disk.clone()
    };
    machine.disks.extend((0..60).map(numbered));
    machine.cards[0].model = CardModel::Vmxnet3;
    let keys: Vec<String> = machine.disks.iter().map(|disk| disk.key.clone()).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let written = write(&machine, &options(&keys));
    let reported: Vec<String> = written.dropped.iter().map(ToString::to_string).collect();
    for expected in [
        "disk 2 (sda",
        "network card 1 (vmxnet3): is an e1000e now",
        "network default of card 1: is plugged into vmbr0 now",
        "its name \"web <1>\": it is web--1 now",
        "floppy drive ",
        "its TPM",
        "Secure Boot",
    ] {
        assert!(
            reported.iter().any(|line| line.starts_with(expected)),
            "{expected}: {reported:#?}"
        );
    }
    let again = read(&written.value.config).unwrap().value;
    assert_eq!(again.disks.len(), 1 + 6 + 4 + 31, "virtio, SATA, IDE and SCSI");
    assert_eq!(
        written.value.disks.len(),
        again.disks.len() - 1,
        "one of them is a drive"
    );
    assert_eq!(again.memory_bytes, machine.memory_bytes);
    assert_eq!(again.cards[0].mac, machine.cards[0].mac);
    let no_room = reported
        .iter()
        .filter(|line| line.ends_with("no free position on its controllers"));
    assert_eq!(no_room.count(), 62 + 1 - again.disks.len());
}

#[test]
fn names_are_changed_to_host_names() {
    for (name, expected) in [
        ("web.example.org", "web.example.org"),
        ("-web-.-.x_y", "web.x-y"),
        ("B\u{fc}ro 1", "B-ro-1"),
        ("web\nmemory: 1", "web-memory--1"),
        ("...", "machine"),
        ("", "machine"),
    ] {
        let machine = Machine {
            name: name.to_owned(),
            ..specimen()
        };
        let config = write(&machine, &options(&[])).value.config;
        assert!(config.contains(&format!("name: {expected}\n")), "{config}");
    }
}

#[test]
fn malformed_configurations_are_errors() {
    for wrong in [
        "",
        "# nothing",
        "[snapshot]\ncores: 1",
        "cores 1",
        "cores: many",
        "cores: 0",
        "cores: 70000\nsockets: 70000",
        "memory: much",
        "memory: 0",
        "memory: 99999999999999999",
        "scsi0: a:b,size=1X",
        "scsi0: a:b,size=99999999999T",
        "cores: 1\n#qmdump#map:scsi0",
        "cores: 1\n#qmdump#map:scsi0::local:",
    ] {
        read(wrong).unwrap_err();
    }
    let disks: Vec<String> = (0..300).map(|number| format!("virtio{number}: a:b")).collect();
    read(&disks[..200].join("\n")).unwrap();
    read(&disks.join("\n")).unwrap_err();
}
