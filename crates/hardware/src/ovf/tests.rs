use std::collections::BTreeMap;

use super::package::unit_bytes;
use super::{DiskFile, OvfOptions, OvfPackage, STREAM_OPTIMIZED, read, write};
use crate::libvirt::tests::specimen;
use crate::{Bus, CardModel, Disk, DiskKind, Error, Firmware, Machine, Topology, Translated};

const ESXI: &str = include_str!("../../tests/samples/esxi.ovf");
const VIRTUALBOX: &str = include_str!("../../tests/samples/virtualbox.ovf");
const XENSERVER: &str = include_str!("../../tests/samples/xenserver.ovf");
const OVIRT: &str = include_str!("../../tests/samples/ovirt.ovf");

/// Key, kind, bus, position and boot order of each disk.
pub(crate) fn layout(machine: &Machine) -> Vec<(&str, DiskKind, Bus, u32, Option<u32>)> {
    let disks = machine.disks.iter();
    disks
        .map(|disk| {
            let key = disk.key.as_str();
            (key, disk.kind, disk.bus, disk.position, disk.boot_order)
        })
        .collect()
}

/// The dropped features, without the reasons.
pub(crate) fn what<T>(translated: &Translated<T>) -> Vec<&str> {
    translated.dropped.iter().map(|dropped| dropped.what.as_str()).collect()
}

#[test]
fn a_machine_of_esxi_is_read() {
    let read = read(ESXI).unwrap();
    let expected = [
        "the medium in CD drive (CD/DVD drive 2)",
        "USB controller (USB xHCI Controller)",
        "serial port (Serial port 1)",
        "1 properties of the appliance",
        "variables of the firmware",
    ];
    assert_eq!(what(&read), expected);
    let machine = read.value;
    assert_eq!(
        (machine.name.as_str(), machine.description.as_str(), &machine.uuid),
        ("web server", "shop & mail", &None)
    );
    assert_eq!((machine.processor_count, machine.memory_bytes), (4, 4 << 30));
    let topology = Topology {
        socket_count: 2,
        core_count: 2,
        thread_count: 1,
    };
    assert_eq!(machine.topology, Some(topology));
    assert_eq!((machine.firmware, machine.has_tpm), (Firmware::UefiSecure, true));
    let expected = [
        ("vmdisk2", DiskKind::Disk, Bus::Scsi, 1, None),
        ("vmdisk1", DiskKind::Disk, Bus::Scsi, 0, Some(1)),
        ("scratch", DiskKind::Disk, Bus::Nvme, 0, None),
        ("", DiskKind::Cdrom, Bus::Sata, 0, Some(2)),
        ("file4", DiskKind::Cdrom, Bus::Ide, 3, None),
        ("", DiskKind::Floppy, Bus::Floppy, 0, None),
    ];
    assert_eq!(layout(&machine), expected);
    assert_eq!(machine.disks[1].size_bytes, Some(16 << 30));
    let cards: Vec<_> = machine
        .cards
        .iter()
        .map(|card| (&card.model, card.mac.as_deref(), card.network.as_deref()))
        .collect();
    let expected = [
        (&CardModel::Vmxnet3, None, Some("VM Network")),
        (&CardModel::Pcnet, Some("00:50:56:aa:bb:cc"), Some("VM Network")),
    ];
    assert_eq!(cards, expected);
}

/// Members of an OVA have the order of the references, not of the disks.
#[test]
fn disks_have_the_order_of_their_files() {
    let package = OvfPackage::parse(ESXI).unwrap();
    let files: Vec<&str> = package.files.iter().map(|file| file.href.as_str()).collect();
    assert_eq!(
        files,
        [
            "web%20server-1.vmdk",
            "web%20server-2.vmdk",
            "web%20server-3.nvram",
            "tools.iso"
        ]
    );
    assert_eq!(
        package.files[0].names(),
        ["web%20server-1.vmdk", "web server-1.vmdk"],
        "readers try both"
    );
    assert_eq!(package.files[3].names(), ["tools.iso"]);
    let disks: Vec<_> = package
        .disks
        .iter()
        .map(|disk| {
            let file = disk.file.as_ref();
            let size = file.and_then(|file| file.size_bytes);
            (
                disk.key.as_str(),
                file.map(|file| file.id.as_str()),
                size,
                disk.capacity_bytes,
            )
        })
        .collect();
    let expected = [
        ("vmdisk1", Some("file1"), Some(1_473_872_384), Some(16 << 30)),
        ("vmdisk2", Some("file2"), Some(71_680), Some(100 << 20)),
        ("file4", Some("file4"), Some(374_784), Some(374_784)),
        ("scratch", None, None, Some(8 << 30)),
    ];
    assert_eq!(disks, expected);
    assert_eq!(package.disks[0].format, STREAM_OPTIMIZED);
    assert_eq!(package.disks[0].populated_bytes, Some(3_521_118_208));
    assert_eq!(package.files[1].chunk_bytes, Some(7 << 30));
    assert_eq!(
        (&package.files[1].compression, &package.disks[2].format),
        (&None, &String::new())
    );
}

#[test]
fn a_machine_of_virtualbox_is_read() {
    let read = read(VIRTUALBOX).unwrap();
    let expected = [
        "the medium in CD drive (cdrom1)",
        "USB controller (usb)",
        "sound card (sound)",
    ];
    assert_eq!(what(&read), expected);
    let machine = read.value;
    assert_eq!(machine.name, "lab");
    assert_eq!(machine.uuid.as_deref(), Some("9f6d1b8e-1f2a-4c3d-8e4f-5a6b7c8d9e0f"));
    assert_eq!((machine.processor_count, machine.memory_bytes), (2, 2 << 30));
    assert_eq!(machine.firmware, Firmware::Uefi);
    let places: Vec<_> = machine
        .disks
        .iter()
        .map(|disk| (disk.key.as_str(), disk.bus, disk.position, disk.size_bytes))
        .collect();
    let expected = [
        ("vmdisk1", Bus::Sata, 0, Some(20 << 30)),
        ("vmdisk2", Bus::Ide, 2, None),
    ];
    assert_eq!(places, expected);
    assert_eq!(machine.cards[0].model, CardModel::E1000);
    // MAC address and firmware are in VirtualBox's extension.
    assert_eq!(machine.cards[0].mac.as_deref(), Some("08:00:27:a1:e6:15"));
    let order: Vec<_> = machine.disks.iter().map(|disk| disk.boot_order).collect();
    assert_eq!(order, [Some(1), Some(2)]);
}

#[test]
fn a_machine_of_xenserver_is_read() {
    let read_it = read(XENSERVER).unwrap();
    assert_eq!(read_it.dropped, []);
    let machine = read_it.value;
    assert_eq!(machine.name, "mail");
    assert_eq!(machine.uuid.as_deref(), Some("7c0bd2a4-0d5e-4f0f-9d2e-5b1c6a7d8e9f"));
    assert_eq!((machine.processor_count, machine.memory_bytes), (3, 1 << 30));
    assert_eq!(machine.firmware, Firmware::UefiSecure);
    let expected = [
        ("VDI-6f2b", DiskKind::Disk, Bus::Xen, 0, None),
        ("", DiskKind::Cdrom, Bus::Xen, 3, None),
    ];
    assert_eq!(layout(&machine), expected);
    let card = &machine.cards[0];
    assert_eq!(card.network.as_deref(), Some("Pool-wide network"));
    assert_eq!(
        (&card.model, card.mac.as_deref()),
        (&CardModel::Xen, Some("aa:bb:cc:00:11:22"))
    );
    let paravirtual = XENSERVER.replace("Type>hvm-3.0-unknown", "Type>xen-3.0-unknown");
    assert_eq!(read(&paravirtual).unwrap().value.firmware, Firmware::Paravirtual);
}

#[test]
fn a_machine_of_ovirt_is_read() {
    let read = read(OVIRT).unwrap();
    assert_eq!(what(&read), ["USB controller (USB Controller)"]);
    let machine = read.value;
    assert_eq!(
        (machine.name.as_str(), machine.description.as_str()),
        ("db", "the data base")
    );
    assert_eq!((machine.processor_count, machine.memory_bytes), (4, 8 << 30));
    assert_eq!(machine.topology.map(|topology| topology.socket_count), Some(2));
    assert_eq!(machine.firmware, Firmware::UefiSecure);
    let expected = [
        ("4d1e", DiskKind::Disk, Bus::VirtioScsi, 0, Some(1)),
        ("", DiskKind::Cdrom, Bus::Sata, 0, Some(2)),
    ];
    assert_eq!(layout(&machine), expected);
    assert_eq!(machine.disks[0].size_bytes, Some(40 << 30));
    assert_eq!(machine.cards[0].model, CardModel::Virtio);
    assert_eq!(machine.cards[0].mac.as_deref(), Some("56:6f:1a:2b:3c:4d"));
    let package = OvfPackage::parse(OVIRT).unwrap();
    assert_eq!(
        package.disks[0].file.as_ref().map(|file| file.href.as_str()),
        Some("c9a7/4d1e")
    );
    assert_eq!(package.disks[0].parent_ref, None);
}

/// Only the default configuration is read, without minimum and maximum items.
#[test]
fn the_default_configuration_is_read() {
    let quantity = "<rasd:VirtualQuantity>4</rasd:VirtualQuantity>";
    let item = |attribute: &str, count: u32| {
        format!(
            "<Item {attribute}><rasd:InstanceID>1</rasd:InstanceID><rasd:ResourceType>3</rasd:ResourceType>\
             <rasd:VirtualQuantity>{count}</rasd:VirtualQuantity></Item>"
        )
    };
    let items = [
        item("ovf:configuration='small'", 1),
        item("ovf:configuration='large huge'", 16),
        item("ovf:bound='max'", 64),
    ];
    assert!(ESXI.contains(quantity));
    let options = "<DeploymentOptionSection><Configuration ovf:id='small'/><Configuration ovf:id='huge' ovf:default='true'/>\
                   </DeploymentOptionSection><VirtualSystem ";
    let text = ESXI.replacen("<VirtualSystem ", options, 1).replace(
        "<vmw:Config ovf:required=\"false\" vmw:key=\"cpuHot",
        &format!("{}<vmw:Config vmw:key=\"cpuHot", items.concat()),
    );
    assert_eq!(read(&text).unwrap().value.processor_count, 16);
    let first = text.replace(" ovf:default='true'", "");
    assert_eq!(read(&first).unwrap().value.processor_count, 1);
}

fn several(count: usize) -> String {
    let start = ESXI.find("<VirtualSystem ").unwrap();
    let end = ESXI.find("</VirtualSystem>").unwrap() + "</VirtualSystem>".len();
    let machine = &ESXI[start..end];
    format!(
        "{}<VirtualSystemCollection ovf:id='all'><Info/>{}</VirtualSystemCollection></Envelope>",
        &ESXI[..start],
        machine.repeat(count)
    )
}

#[test]
fn several_machines_are_an_error() {
    assert_eq!(read(&several(1)).unwrap().value.name, "web server");
    let error = read(&several(3)).unwrap_err();
    assert!(matches!(error, Error::SeveralMachines { count: 3, .. }));
    assert_eq!(
        error.to_string(),
        "this OVF descriptor has 3 machines, not one: web server, web server, web server"
    );
    read(&several(0)).unwrap_err();
    // The files are listed although the machine cannot be read.
    assert_eq!(OvfPackage::parse(&several(3)).unwrap().disks.len(), 4);
}

pub(crate) fn options(keys: &[&str]) -> OvfOptions {
    let file = |(number, key): (u64, &&str)| {
        let file = DiskFile {
            href: format!("{key} & co.vmdk"),
            size_bytes: Some(1000 + number),
            capacity_bytes: (number + 1) << 30,
            populated_bytes: Some(500),
        };
        ((*key).to_owned(), file)
    };
    OvfOptions {
        disks: (0..).zip(keys).map(file).collect::<BTreeMap<_, _>>(),
    }
}

/// Features that VMware supports survive a round trip.
#[test]
fn a_machine_survives_a_round_trip_through_a_descriptor() {
    let mut machine = read(ESXI).unwrap().value;
    machine.disks.retain(|disk| disk.key != "file4");
    machine.has_tpm = false;
    let written = write(&machine, &options(&["vmdisk2", "vmdisk1", "scratch"]));
    assert_eq!(what(&written), ["UEFI"]);
    let again = read(&written.value).unwrap();
    assert_eq!(again.dropped, []);
    let mut expected = machine;
    for (disk, (number, key)) in expected
        .disks
        .iter_mut()
        .filter(|disk| disk.kind == DiskKind::Disk)
        .zip((1_u64..).zip(["vmdisk1", "vmdisk2", "vmdisk3"]))
    {
        disk.key = key.to_owned();
        disk.size_bytes = Some(number << 30);
    }
    assert_eq!(again.value, expected);
    let package = OvfPackage::parse(&written.value).unwrap();
    let file = package.disks[0].file.clone().unwrap();
    assert_eq!(
        (file.href.as_str(), file.id.as_str(), file.size_bytes),
        ("vmdisk2 & co.vmdk", "file1", Some(1000))
    );
    assert_eq!(package.disks[0].format, STREAM_OPTIMIZED);
    assert_eq!(package.disks[0].populated_bytes, Some(500));
}

#[test]
fn a_machine_of_another_hypervisor_gets_devices_of_vmware() {
    let mut machine = specimen();
    machine.disks[1].key = "lost".to_owned();
    machine.disks[2].key = "disc".to_owned();
    machine.memory_bytes += 1;
    let written = write(&machine, &options(&["vda"]));
    let notes: Vec<String> = written.dropped.iter().map(ToString::to_string).collect();
    for expected in [
        "disk 1 (vda) on virtio: is on SATA now",
        "network card 1 (virtio): is an e1000 now",
        "disk sda: its content is missing",
        "its UUID: ",
        "its TPM: ",
        "UEFI: ",
        "the exact memory size: ",
        "the medium in drive ",
    ] {
        assert!(
            notes.iter().any(|line| line.starts_with(expected)),
            "{expected}: {notes:#?}"
        );
    }
    let again = read(&written.value).unwrap().value;
    assert_eq!(again.name, "web <1>");
    assert_eq!(again.memory_bytes, (2 << 30) + (4 << 20));
    let expected = [
        ("vmdisk1", DiskKind::Disk, Bus::Sata, 0, Some(1)),
        ("", DiskKind::Cdrom, Bus::Sata, 2, Some(2)),
    ];
    assert_eq!(layout(&again), expected);
    assert_eq!(again.cards[0].mac, machine.cards[0].mac);
}

/// A SCSI controller occupies a unit itself, and not all disks fit.
#[test]
fn disks_have_distinct_units() {
    let mut machine = specimen();
    let disk = Disk {
        bus: Bus::Scsi,
        position: 7,
        boot_order: None,
        ..machine.disks[0].clone()
    };
    let keys: Vec<String> = (0..250).map(|number| format!("d{number}")).collect();
    let numbered = |key: &String| Disk {
        key: key.clone(),
        ..disk.clone()
    };
    machine.disks = keys.iter().map(numbered).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let written = write(&machine, &options(&keys));
    let again = read(&written.value).unwrap().value;
    let mut places: Vec<_> = again
        .disks
        .iter()
        .map(|disk| (disk.bus.name(), disk.position))
        .collect();
    let count = places.len();
    assert_eq!(count, 60 + 120, "four controllers of each");
    places.sort_unstable();
    places.dedup();
    assert_eq!(places.len(), count);
    assert!(
        places
            .iter()
            .all(|(bus, position)| *bus != "SCSI" || position % 16 != 7)
    );
    let left_out = written
        .dropped
        .iter()
        .filter(|dropped| dropped.why == "no free position on its controllers");
    assert_eq!(left_out.count(), 250 - count);
}

/// Optional settings are left to the deployer.
#[test]
fn missing_settings_are_noted() {
    let open = ESXI.replace("<rasd:ResourceType>4<", "<rasd:ResourceType>24<");
    let translated = read(&open).unwrap();
    assert_eq!(translated.value.memory_bytes, 1 << 30);
    assert_eq!(what(&translated)[0], "the amount of memory");
    let open = ESXI.replace("capacity=\"8589934592\"", "capacity=\"${size}\"");
    assert_eq!(read(&open).unwrap().value.disks[2].size_bytes, None);
    assert_eq!(OvfPackage::parse(&open).unwrap().disks[3].capacity_bytes, None);
}

#[test]
fn units_are_read_in_all_spellings() {
    for (unit, bytes) in [
        ("", Some(1)),
        ("byte", Some(1)),
        ("byte * 2^30", Some(1 << 30)),
        ("bytes*2^20", Some(1 << 20)),
        ("byte * 10^9", Some(1_000_000_000)),
        ("byte * 512", Some(512)),
        ("MegaBytes", Some(1 << 20)),
        ("GB", Some(1 << 30)),
        ("byte * 2^64", None),
        ("byte * 2^", None),
        ("byte * x", None),
        ("bushel", None),
    ] {
        assert_eq!(unit_bytes(unit), bytes, "{unit}");
    }
}

#[test]
fn malformed_descriptors_are_errors() {
    let changed = |from: &str, to: &str| {
        assert!(ESXI.contains(from), "{from}");
        ESXI.replacen(from, to, 1)
    };
    for wrong in [
        String::new(),
        "<Envelope/>".to_owned(),
        "<a/>".to_owned(),
        changed("href=\"web%20server-1.vmdk\"", "href=\"../shadow\""),
        changed("href=\"web%20server-1.vmdk\"", "href=\"%2e%2e/shadow\""),
        changed("href=\"web%20server-1.vmdk\"", "href=\"/etc/shadow\""),
        changed("href=\"web%20server-1.vmdk\"", "href=\"https://example.org/a\""),
        changed("href=\"web%20server-1.vmdk\"", "href=\"a\\b\""),
        changed("href=\"web%20server-1.vmdk\"", "href=\"\""),
        changed("ovf:id=\"file2\"", "ovf:id=\"file1\""),
        changed("fileRef=\"file2\"", "fileRef=\"file9\""),
        changed("diskId=\"vmdisk2\"", "diskId=\"vmdisk1\""),
        changed("diskId=\"vmdisk2\"", "diskId=\"file4\""),
        changed("capacity=\"16\"", "capacity=\"17179869184\""),
        changed("capacity=\"16\"", "capacity=\"-1\""),
        changed("capacity=\"16\"", "capacity=\"size\""),
        changed("byte * 2^30", "byte * 2^99"),
        changed("disk/vmdisk1", "disk/vmdisk9"),
        changed(">4096<", ">much<"),
        changed(">4096<", ">99999999999999<"),
        changed("<rasd:VirtualQuantity>4<", "<rasd:VirtualQuantity>0<"),
        changed("<rasd:VirtualQuantity>4<", "<rasd:VirtualQuantity>5000000000<"),
        changed("<rasd:ResourceType>23<", "<rasd:ResourceType>USB<"),
    ] {
        read(&wrong).unwrap_err();
    }
}
