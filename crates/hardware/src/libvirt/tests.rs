use std::collections::BTreeMap;

use super::{DiskPlace, LibvirtOptions, read, write};
use crate::{Bus, CardModel, Clock, Disk, DiskKind, Firmware, Machine, NetworkCard, Platform, Topology, adapt};

/// A machine with one of most kinds of devices.
pub(crate) fn specimen() -> Machine {
    let disk = |key: &str, kind, bus, position, size_bytes, boot_order| Disk {
        key: key.to_owned(),
        label: key.to_owned(),
        kind,
        bus,
        position,
        size_bytes,
        boot_order,
        is_read_only: false,
    };
    Machine {
        name: "web <1>".to_owned(),
        uuid: Some("7c0bd2a4-0d5e-4f0f-9d2e-5b1c6a7d8e9f".to_owned()),
        description: "shop & mail".to_owned(),
        processor_count: 4,
        topology: Some(Topology {
            socket_count: 1,
            core_count: 4,
            thread_count: 1,
        }),
        memory_bytes: 2 << 30,
        firmware: Firmware::UefiSecure,
        clock: Clock::Utc,
        disks: vec![
            disk("vda", DiskKind::Disk, Bus::Virtio, 0, Some(10 << 30), Some(1)),
            disk("sda", DiskKind::Disk, Bus::VirtioScsi, 0, Some(3 << 30), None),
            disk("", DiskKind::Cdrom, Bus::Sata, 1, None, Some(2)),
        ],
        cards: vec![NetworkCard {
            mac: Some("52:54:00:12:34:56".to_owned()),
            network: Some("default".to_owned()),
            model: CardModel::Virtio,
        }],
        has_tpm: true,
    }
}

fn options(keys: &[&str]) -> LibvirtOptions {
    let place = |key: &&str| {
        let path = format!("/images/{key}.qcow2");
        let format = "qcow2".to_owned();
        ((*key).to_owned(), DiskPlace { path, format })
    };
    LibvirtOptions {
        domain_type: "qemu".to_owned(),
        disks: keys.iter().map(place).collect::<BTreeMap<_, _>>(),
        network: "default".to_owned(),
    }
}

/// libvirt puts `sdp` on its third controller, and creates that with another model unless it is defined.
#[test]
fn all_controllers_of_virtio_scsi_are_written() {
    let mut machine = specimen();
    for (place, count) in [(0, 1), (6, 1), (7, 2), (15, 3)] {
        machine.disks[1].position = place;
        let written = write(&machine, &options(&["vda", "sda"])).value;
        assert_eq!(
            written.matches("model='virtio-scsi'").count(),
            count,
            "{place}: {written}"
        );
    }
    machine.disks.remove(1);
    assert!(!write(&machine, &options(&["vda"])).value.contains("virtio-scsi"));
}

/// Disks are stored under the names of the adapted machine. Otherwise, with a drive or a disk on IDE, a wrong disk
/// would be restored under a name.
#[test]
fn disks_have_the_names_of_the_adapted_machine() {
    let disk = |key: &str, bus, position| Disk {
        key: key.to_owned(),
        label: key.to_owned(),
        kind: if key.is_empty() {
            DiskKind::Cdrom
        } else {
            DiskKind::Disk
        },
        bus,
        position,
        size_bytes: Some(1 << 20),
        boot_order: None,
        is_read_only: false,
    };
    for (firmware, disks, expected, board) in [
        (
            Firmware::Bios,
            vec![disk("", Bus::Ide, 0), disk("a", Bus::Sata, 0)],
            &["sdb", "sda"][..],
            "q35",
        ),
        (
            Firmware::Bios,
            vec![disk("", Bus::Ide, 2), disk("a", Bus::Sata, 0)],
            &["sdc", "sda"],
            "q35",
        ),
        (
            Firmware::Uefi,
            vec![disk("a", Bus::Ide, 0), disk("b", Bus::Sata, 0)],
            &["sda", "sdb"],
            "q35",
        ),
        (
            Firmware::Uefi,
            vec![disk("a", Bus::Ide, 0), disk("b", Bus::Ide, 3)],
            &["sda", "sdd"],
            "q35",
        ),
        (
            Firmware::Bios,
            vec![disk("a", Bus::Ide, 0), disk("", Bus::Ide, 2), disk("b", Bus::Sata, 7)],
            &["hda", "hdc", "sdh"],
            "pc",
        ),
        (
            Firmware::Paravirtual,
            vec![disk("a", Bus::Xen, 0), disk("b", Bus::Xen, 5)],
            &["sda", "sdf"],
            "q35",
        ),
    ] {
        let machine = Machine {
            firmware,
            disks,
            ..specimen()
        };
        let written = write(&machine, &options(&["a", "b"])).value;
        let there = adapt(&machine, Platform::Qemu).value;
        assert_eq!(there.targets(), expected);
        assert!(written.contains(&format!("machine='{board}'")), "{written}");
        for (disk, target) in there
            .disks
            .iter()
            .zip(expected)
            .filter(|(disk, _)| !disk.key.is_empty())
        {
            let source = format!(
                "<source file='/images/{}.qcow2'/>\n      <target dev='{target}' ",
                disk.key
            );
            assert!(written.contains(&source), "{source} in {written}");
        }
    }
}

#[test]
fn a_machine_survives_a_round_trip_through_domain_xml() {
    let machine = specimen();
    let written = write(&machine, &options(&["vda", "sda"]));
    let what: Vec<&str> = written.dropped.iter().map(|dropped| dropped.what.as_str()).collect();
    assert_eq!(what, ["the state of the TPM"]);
    let again = read(&written.value).unwrap();
    assert_eq!(again.dropped, []);
    let mut expected = machine.clone();
    for (disk, target) in expected.disks.iter_mut().zip(["vda", "sda", "sdb"]) {
        disk.label = target.to_owned();
        disk.size_bytes = None;
        disk.is_read_only = disk.kind == DiskKind::Cdrom;
    }
    assert_eq!(again.value, expected);
}

#[test]
fn a_machine_of_another_hypervisor_gets_compatible_devices() {
    let mut machine = specimen();
    machine.firmware = Firmware::Bios;
    machine.topology = Some(Topology {
        socket_count: 3,
        core_count: 1,
        thread_count: 1,
    });
    machine.disks[0].bus = Bus::Xen;
    machine.disks[1].bus = Bus::Scsi;
    machine.cards[0].model = CardModel::Vmxnet3;
    machine.cards[0].network = Some("VM Network".to_owned());
    let written = write(&machine, &options(&["vda"]));
    let notes: Vec<String> = written.dropped.iter().map(ToString::to_string).collect();
    for expected in [
        "disk 1 (vda) on Xen: is on SATA now",
        "network card 1 (vmxnet3): is an e1000e now",
        "network VM Network of card 1: is plugged into default now",
        "a topology of 3 processors",
        "disk sda: its content is missing",
    ] {
        assert!(
            notes.iter().any(|line| line.starts_with(expected)),
            "{expected}: {notes:#?}"
        );
    }
    let again = read(&written.value).unwrap().value;
    let disks: Vec<_> = again.disks.iter().map(|disk| (disk.label.as_str(), disk.bus)).collect();
    assert_eq!(disks, [("sda", Bus::Sata), ("sdc", Bus::Sata)]);
    assert!(again.topology.is_none());
}

/// The guest may support only IDE, so the machine keeps a machine type with IDE.
#[test]
fn ide_disks_stay_with_a_bios() {
    let mut machine = specimen();
    machine.disks[0].bus = Bus::Ide;
    machine.firmware = Firmware::Bios;
    let written = write(&machine, &options(&["vda", "sda"])).value;
    assert!(
        written.contains("machine='pc'") && written.contains("dev='hda' bus='ide'"),
        "{written}"
    );
    machine.firmware = Firmware::Uefi;
    let written = write(&machine, &options(&["vda", "sda"]));
    assert!(written.value.contains("machine='q35'") && !written.value.contains("bus='ide'"));
    assert!(written.dropped.iter().any(|dropped| dropped.what == "disk vda on IDE"));
}

#[test]
fn host_specific_settings_are_listed_and_harmless_ones_are_not() {
    let text = "<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'><name>a</name>\
        <memory unit='GiB'>1</memory><currentMemory>1</currentMemory><vcpu current='2'>8</vcpu><cputune/>\
        <os><type>hvm</type><boot dev='cdrom'/><boot dev='hd'/></os><clock offset='variable' basis='localtime'/>\
        <devices><disk type='block' device='disk'><source dev='/dev/vg/a'/><target dev='hda'/></disk>\
        <disk type='file' device='cdrom'><target dev='hdc' bus='ide'/><readonly/></disk>\
        <disk type='file'><source file='/x'/><target dev='vdab' bus='virtio'/></disk>\
        <hostdev type='pci'/><filesystem><target dir='share'/></filesystem><controller/><video/><sound/>\
        <interface type='bridge'><source bridge='br0'/></interface></devices>\
        <qemu:commandline/></domain>";
    let read = read(text).unwrap();
    let machine = read.value;
    assert_eq!((machine.processor_count, machine.memory_bytes), (2, 1 << 30));
    assert_eq!((machine.clock, machine.firmware), (Clock::LocalTime, Firmware::Bios));
    let disks: Vec<_> = machine
        .disks
        .iter()
        .map(|disk| (disk.key.as_str(), disk.bus, disk.position, disk.boot_order))
        .collect();
    let expected = [
        ("hda", Bus::Ide, 0, Some(2)),
        ("", Bus::Ide, 2, Some(1)),
        ("vdab", Bus::Virtio, 27, None),
    ];
    assert_eq!(disks, expected);
    assert_eq!(machine.cards[0].network.as_deref(), Some("br0"));
    let what: Vec<&str> = read.dropped.iter().map(|dropped| dropped.what.as_str()).collect();
    let expected = [
        "up to 8 processors",
        "CPU pinning and weights",
        "a host device (pci)",
        "a shared folder (share)",
        "QEMU arguments",
    ];
    assert_eq!(what, expected);
}

/// Reads a machine with these elements.
fn with(os: &str, devices: &str) -> crate::Translated<Machine> {
    let text = format!(
        "<domain type='kvm'><name>a</name><memory>1024</memory><vcpu current='2'>8</vcpu><os>{os}</os><devices>{devices}</devices></domain>"
    );
    read(&text).unwrap()
}

#[test]
fn scsi_disks_have_the_model_of_their_controller() {
    let devices = "<controller type='scsi' index='0' model='lsilogic'/><controller type='scsi' index='1' model='virtio-scsi'/>\
        <disk><target dev='sda' bus='scsi'/><address type='drive' controller='0' unit='0'/></disk>\
        <disk><target dev='sdh' bus='scsi'/><address type='drive' controller='1' unit='0'/></disk>";
    let disks = with("", devices).value.disks;
    assert_eq!([disks[0].bus, disks[1].bus], [Bus::Scsi, Bus::VirtioScsi]);
}

#[test]
fn firmware_loaded_as_rom_is_recognized_by_its_file_name() {
    let loader = |path: &str| {
        with(&format!("<loader type='rom'>/usr/share/{path}</loader>"), "")
            .value
            .firmware
    };
    assert_eq!(loader("OVMF/OVMF_CODE.fd"), Firmware::Uefi);
    assert_eq!(loader("edk2/ovmf/a.fd"), Firmware::Uefi);
    assert_eq!(loader("seabios/bios.bin"), Firmware::Bios);
}

#[test]
fn dropped_processors_and_host_cards_are_listed() {
    let devices = "<interface type='user'/><interface type='hostdev'><mac address='52:54:00:00:00:01'/></interface>";
    let dropped = with("", devices).dropped;
    let notes: Vec<&str> = dropped.iter().map(|dropped| &dropped.what[..]).collect();
    assert_eq!(notes, ["up to 8 processors", "a host device as network card 2"]);
}

#[test]
fn malformed_xml_is_an_error() {
    let domain = |inside: &str| format!("<domain><memory>1</memory>{inside}</domain>");
    read(&domain("")).unwrap();
    let disks = "<disk><target dev='vda'/></disk>".repeat(300);
    for wrong in [
        "",
        "<a/>",
        "<domain/>",
        "<domain><memory>0</memory></domain>",
        "<domain><memory unit='bushel'>1</memory></domain>",
        "<domain><memory unit='TiB'>999999999999</memory></domain>",
        &domain("<vcpu>0</vcpu>"),
        &domain("<vcpu>1000000</vcpu>"),
        &domain("<vcpu>many</vcpu>"),
        &domain(&format!("<devices>{disks}</devices>")),
        "<!DOCTYPE d [<!ENTITY a 'b'>]><domain><memory>1</memory></domain>",
    ] {
        read(wrong).unwrap_err();
    }
}

#[test]
fn names_are_changed_to_what_libvirt_accepts() {
    for (name, called) in [
        ("", "machine"),
        ("..", "machine"),
        ("a/b\nc", "a-b-c"),
        ("a\u{1}b\u{fffe}c", "a-b-c"),
    ] {
        let machine = Machine {
            name: name.to_owned(),
            ..specimen()
        };
        let written = write(&machine, &options(&["vda", "sda"]));
        let line = format!("<name>{called}</name>");
        assert!(written.value.contains(&line), "{}", written.value);
        let is_name = |what: &str| what.starts_with("its name");
        assert!(written.dropped.iter().any(|dropped| is_name(&dropped.what)));
    }
    let written = write(&specimen(), &options(&["vda", "sda"]));
    assert!(!written.dropped.iter().any(|dropped| dropped.what.contains("its name")));
}

#[test]
fn dies_and_clusters_are_listed() {
    let text = "<domain><name>x</name><memory>1024</memory><vcpu>8</vcpu>\
                <cpu><topology sockets='1' dies='2' clusters='2' cores='2' threads='1'/></cpu></domain>";
    let there = read(text).unwrap();
    assert_eq!(there.value.topology.map(|topology| topology.core_count), Some(8));
    let notes: Vec<&str> = there.dropped.iter().map(|dropped| &dropped.what[..]).collect();
    assert_eq!(notes, ["2 dies in each socket", "2 clusters in each socket"]);
}

#[test]
fn boot_and_device_settings_that_are_dropped_are_listed() {
    let devices = "<disk><target dev='vda'/><blockio logical_block_size='4096'/><serial>A1</serial></disk>\
        <interface type='network'><link state='down'/><vlan><tag id='7'/></vlan><mtu size='9000'/><boot order='1'/></interface>";
    let head = "<kernel>/boot/vmlinuz</kernel>";
    let text = format!(
        "<domain><memory>1024</memory><os>{head}</os><clock offset='timezone' timezone='Europe/Berlin'/><devices>{devices}</devices></domain>"
    );
    let dropped = read(&text).unwrap().dropped;
    let notes: Vec<&str> = dropped.iter().map(|dropped| &dropped.what[..]).collect();
    assert_eq!(
        notes,
        [
            "direct kernel boot",
            "booting from the network",
            "its clock in the time zone Europe/Berlin",
            "sectors of 4096 bytes of disk vda",
            "the serial number of disk vda",
            "network card 1 with its link down",
            "VLAN tags of network card 1",
            "the MTU of network card 1",
        ]
    );
}

#[test]
fn features_of_the_hypervisor_are_listed() {
    let of = |middle: &str| -> Vec<String> {
        let text = format!("<domain><memory>1024</memory>{middle}</domain>");
        let dropped = read(&text).unwrap().dropped;
        dropped.into_iter().map(|dropped| dropped.what).collect()
    };
    assert_eq!(
        of(
            "<vcpu cpuset='0-1'>2</vcpu><os><type arch='aarch64'>hvm</type><smbios mode='host'/></os>\
            <features><hyperv><relaxed state='on'/></hyperv></features><clock offset='variable' adjustment='7200' basis='utc'/>\
            <devices><disk><target dev='vda'/><transient/><iotune><read_bytes_sec>1</read_bytes_sec></iotune></disk></devices>"
        ),
        [
            "CPU pinning and weights",
            "processors of aarch64",
            "Hyper-V enlightenments",
            "disabled ACPI",
            "SMBIOS strings",
            "its clock that is 7200 seconds off",
            "disk vda is transient",
            "limits of disk vda",
        ]
    );
    let pinned = "<vcpu cpuset='0'>1</vcpu><cputune><shares>2</shares></cputune>";
    assert_eq!(of(pinned), ["CPU pinning and weights"]);
    let plain =
        "<os><type arch='x86_64'>hvm</type></os><features><acpi/></features><clock offset='variable' adjustment='0'/>";
    assert_eq!(of(plain), [""; 0]);
    assert_eq!(
        of("<clock offset='absolute' start='0'/>"),
        ["its clock with an absolute start time"]
    );
}

/// libvirt refuses a machine with two devices at one position of the boot order.
#[test]
fn the_boot_order_has_no_ties() {
    let mut machine = specimen();
    for disk in &mut machine.disks {
        disk.boot_order = Some(1);
    }
    let written = write(&machine, &options(&["vda", "sda"])).value;
    let again = read(&written).unwrap().value;
    let mut order: Vec<_> = again.disks.iter().map(|disk| disk.boot_order).collect();
    assert_eq!(order.pop(), Some(Some(3)), "the drive is last: {written}");
    order.sort_unstable();
    assert_eq!(order, [Some(1), Some(2)]);
}
