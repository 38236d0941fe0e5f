use super::value::Value;
use super::{SuspendedMachine, XenOptions, XenRecords, read, suspended_machine, write};
use crate::libvirt::tests::specimen;
use crate::{Bus, CardModel, Clock, DiskKind, Firmware, Machine, Platform, Topology, adapt};

pub(crate) fn written(machine: &Machine) -> super::XenExport {
    let mut number = 0;
    let mut options = XenOptions {
        host_name: "host",
        time: "20261123T09:30:00Z",
        new_uuid: &mut || {
            number += 1;
            format!("00000000-0000-4000-8000-{number:012}")
        },
        original: None,
    };
    write(machine, &mut options).value
}

/// Features that XenServer supports survive a round trip.
#[test]
fn a_machine_survives_a_round_trip_through_its_records() {
    let machine = specimen();
    let exported = written(&machine);
    let keys: Vec<&str> = exported.disks.iter().map(|(key, _)| key.as_str()).collect();
    assert_eq!(keys, ["vda", "sda"]);
    assert!(exported.disks[0].1 < exported.disks[1].1, "XAPI sorts the ids as text");
    let again = read(&exported.xml).unwrap();
    assert_eq!(again.dropped, []);
    let again = again.value;
    assert_eq!(again.name, machine.name);
    assert_eq!(again.uuid, machine.uuid);
    assert_eq!(again.description, machine.description);
    assert_eq!(again.processor_count, machine.processor_count);
    assert_eq!(again.memory_bytes, machine.memory_bytes);
    assert_eq!(again.firmware, machine.firmware);
    assert_eq!(again.clock, machine.clock);
    assert_eq!(again.has_tpm, machine.has_tpm);
    assert_eq!(
        again.topology,
        Some(Topology {
            socket_count: 1,
            core_count: 4,
            thread_count: 1
        })
    );
    let disks: Vec<_> = again
        .disks
        .iter()
        .map(|disk| (disk.kind, disk.bus, disk.size_bytes))
        .collect();
    let expected = [
        (DiskKind::Disk, Bus::Xen, Some(10 << 30)),
        (DiskKind::Disk, Bus::Xen, Some(3 << 30)),
        (DiskKind::Cdrom, Bus::Xen, None),
    ];
    assert_eq!(disks, expected);
    assert_eq!(again.disks[0].key, exported.disks[0].1);
    assert_eq!(again.disks[0].boot_order, Some(1));
    assert_eq!(again.cards[0].mac, machine.cards[0].mac);
    assert_eq!(
        (&again.cards[0].model, &again.cards[0].network),
        (&CardModel::Xen, &machine.cards[0].network)
    );
    let sizes: Vec<u64> = XenRecords::parse(&exported.xml)
        .unwrap()
        .disks()
        .unwrap()
        .iter()
        .map(|disk| disk.size_bytes)
        .collect();
    assert_eq!(sizes, [10 << 30, 3 << 30]);
}

/// XenServer boots from the first disk, and its BIOS sees four of them.
#[test]
fn the_boot_disk_is_moved_first() {
    let mut machine = specimen();
    (machine.disks[0].boot_order, machine.disks[1].boot_order) = (Some(2), Some(1));
    let places = |machine: &Machine| -> Vec<(Option<u64>, u32)> {
        let again = read(&written(machine).xml).unwrap().value;
        let disks = again.disks.iter().filter(|disk| disk.kind == DiskKind::Disk);
        disks.map(|disk| (disk.size_bytes, disk.position)).collect()
    };
    assert_eq!(places(&machine), [(Some(3 << 30), 0), (Some(10 << 30), 1)]);
    machine.disks.remove(0);
    machine.disks[0].position = 5;
    assert_eq!(places(&machine), [(Some(3 << 30), 0)]);
}

/// The records of the machine with fields that only XenServer has.
fn as_its_pool_has_it(machine: &Machine) -> String {
    let list = |text: &str| format!("<value><array><data><value>{text}</value></data></array></value>");
    let map =
        |text: &str| format!("<value><struct><member><name>{text}</name><value>x</value></member></struct></value>");
    let place = |number: &str| format!("<name>userdevice</name><value>{number}</value>");
    written(machine)
        .xml
        // A machine that moves to XenServer boots from its first disk; a machine created there need not.
        .replace(&place("0"), &place("x"))
        .replace(&place("5"), &place("0"))
        .replace(&place("x"), &place("5"))
        .replace(
            "<name>tags</name><value><array><data></data></array></value>",
            &format!("<name>tags</name>{}", list("nightly")),
        )
        .replace(
            "<name>NVRAM</name><value><struct></struct></value>",
            &format!("<name>NVRAM</name>{}", map("EFI-variables")),
        )
        .replace(
            "<name>VDI</name><value>OpaqueRef:NULL</value>",
            "<name>VDI</name><value>OpaqueRef:medium</value>",
        )
        .replace(
            "<name>empty</name><value><boolean>1</boolean></value>",
            "<name>empty</name><value><boolean>0</boolean></value>",
        )
        .replace(
            "<name>VCPUs_max</name><value>4</value>",
            "<name>VCPUs_max</name><value>8</value>",
        )
        .replace(
            "<name>ha_restart_priority</name><value></value>",
            "<name>ha_restart_priority</name><value>restart</value>",
        )
        .replace(
            "<name>blocked_operations</name><value><struct></struct></value>",
            &format!("<name>blocked_operations</name>{}", map("destroy")),
        )
        .replace(
            "<name>xenstore_data</name><value><struct></struct></value>",
            &format!("<name>xenstore_data</name>{}", map("vm-data")),
        )
        .replace(
            "<name>bridge</name><value>xenbr0</value>",
            "<name>bridge</name><value>xenbr7</value>",
        )
}

/// Positions of disks and fields that only XenServer has are restored.
#[test]
fn a_machine_of_xenserver_is_restored_unchanged() {
    let mut machine = specimen();
    let cards = machine.cards.clone();
    machine.cards.extend(cards);
    machine.cards[0].network = Some("lan".to_owned());
    machine.cards[1].network = Some("dmz".to_owned());
    // A paravirtual machine boots from the disk with the bootable flag, which need not be the first.
    (machine.disks[0].boot_order, machine.disks[1].boot_order) = (None, Some(1));
    machine.disks[1].is_read_only = true;
    let places = [0, 5, 3];
    for (disk, place) in machine.disks.iter_mut().zip(places) {
        disk.position = place;
    }
    let original = as_its_pool_has_it(&machine);
    let records = XenRecords::parse(&original).unwrap();
    let there = read(&original).unwrap();
    assert!(
        there
            .dropped
            .iter()
            .any(|dropped| dropped.what == "variables of the firmware"),
        "{:?}",
        there.dropped
    );
    // The machine moves through QEMU, where disks are named by position, and networks differ.
    let mut here = adapt(&there.value, Platform::Qemu).value;
    let targets = here.targets();
    assert_eq!(targets, ["sda", "sdd", "sdf"]);
    for card in &mut here.cards {
        card.network = Some("default".to_owned());
    }
    let mut options = XenOptions {
        host_name: "host",
        time: "20261123T09:30:00Z",
        new_uuid: &mut || "00000000-0000-4000-8000-000000000001".to_owned(),
        original: Some(&records),
    };
    let crate::Translated { value: back, dropped } = write(&here, &mut options);
    let media: Vec<_> = dropped
        .iter()
        .filter(|dropped| dropped.what.contains("medium"))
        .collect();
    assert_eq!(media.len(), 1, "{dropped:?}");
    let back = XenRecords::parse(&back.xml).unwrap();
    let of = |class: &str, field: &str| -> Vec<String> {
        let mut texts: Vec<String> = back
            .records(class)
            .map(|record| record.text_of(field).to_owned())
            .collect();
        texts.sort();
        texts
    };
    assert_eq!(of("VBD", "userdevice"), ["0", "3", "5"]);
    let marked = |records: &XenRecords| -> Vec<(String, bool, String)> {
        let vbds = records.disks_of_machine().into_iter();
        vbds.map(|vbd| {
            (
                vbd.text_of("userdevice").to_owned(),
                vbd.is_true("bootable"),
                vbd.text_of("mode").to_owned(),
            )
        })
        .collect()
    };
    assert_eq!(marked(&back), marked(&records));
    assert!(marked(&back).contains(&("5".to_owned(), true, "RO".to_owned())));
    assert_eq!(of("network", "name_label"), ["dmz", "lan"]);
    assert_eq!(of("network", "bridge"), ["xenbr7", "xenbr7"]);
    assert_eq!(of("VDI", "name_label"), {
        let mut labels: Vec<_> = records
            .records("VDI")
            .map(|vdi| vdi.text_of("name_label").to_owned())
            .collect();
        labels.sort();
        labels
    });
    let vm = back.machine_record().unwrap();
    assert_eq!(vm.get("tags").unwrap().as_array().len(), 1);
    assert_eq!(vm.get("NVRAM").unwrap().text_of("EFI-variables"), "x");
    assert_eq!(vm.text_of("ha_restart_priority"), "restart");
    assert_eq!(vm.get("blocked_operations").unwrap().text_of("destroy"), "x");
    for vdi in back.records("VDI") {
        assert_eq!(vdi.get("xenstore_data").unwrap().text_of("vm-data"), "x");
    }
    assert_eq!((vm.text_of("VCPUs_max"), vm.text_of("VCPUs_at_startup")), ("8", "4"));
    for vif in back.cards_of_machine() {
        assert!(back.find("network", vif.text_of("network")).is_some());
    }
}

#[test]
fn a_missing_disk_is_noted_and_a_different_one_does_not_replace_it() {
    let mut machine = specimen();
    machine.disks.truncate(2);
    machine.has_tpm = false;
    let original = written(&machine).xml;
    let records = XenRecords::parse(&original).unwrap();
    let there = read(&original).unwrap().value;
    let back = |machine: &Machine| {
        let mut options = XenOptions {
            host_name: "host",
            time: "20261123T09:30:00Z",
            new_uuid: &mut || "00000000-0000-4000-8000-000000000001".to_owned(),
            original: Some(&records),
        };
        let written = write(machine, &mut options);
        let notes: Vec<String> = written.dropped.into_iter().map(|dropped| dropped.what).collect();
        let again = read(&written.value.xml).unwrap().value;
        (
            notes,
            again.disks.into_iter().map(|disk| disk.label).collect::<Vec<_>>(),
        )
    };
    assert_eq!(back(&there), (vec![], vec!["vda".to_owned(), "sda".to_owned()]));
    let mut one = there.clone();
    one.disks.pop();
    assert_eq!(
        back(&one),
        (vec!["the disk at place 1".to_owned()], vec!["vda".to_owned()])
    );
    // A disk of another size counts as a different disk.
    let mut other = there;
    (other.disks[1].size_bytes, other.disks[1].label) = (Some(1 << 20), "other".to_owned());
    let (notes, labels) = back(&other);
    assert_eq!(notes, ["the disk at place 1"]);
    assert_eq!(labels, ["vda", "other"]);
}

/// Modeled on exports of XenServer 7: untyped numbers, a snapshot, an empty drive.
fn records_of_xenserver() -> String {
    let object = |class: &str, id: &str, members: &[(&str, &str)]| {
        let members: Vec<String> = members
            .iter()
            .map(|(name, value)| format!("<member><name>{name}</name><value>{value}</value></member>"))
            .collect();
        format!(
            "<value><struct><member><name>class</name><value>{class}</value></member><member><name>id</name>\
             <value>{id}</value></member><member><name>snapshot</name><value><struct>{}</struct></value></member>\
             </struct></value>",
            members.concat()
        )
    };
    let boot = "<struct><member><name>order</name><value>dc</value></member></struct>";
    let platform = "<struct><member><name>timeoffset</name><value>7200</value></member>\
                    <member><name>cores-per-socket</name><value>2</value></member></struct>";
    let vm = |id: &str, is_snapshot: &str| {
        object(
            "VM",
            id,
            &[
                ("name_label", "web"),
                ("VCPUs_at_startup", "4"),
                ("VCPUs_max", "8"),
                ("memory_static_max", "2147483648"),
                ("is_a_snapshot", is_snapshot),
                ("HVM_boot_policy", "BIOS order"),
                ("HVM_boot_params", boot),
                ("platform", platform),
                ("suspend_VDI", "OpaqueRef:NULL"),
            ],
        )
    };
    let objects = [
        vm("Ref:9", "<boolean>1</boolean>"),
        vm("Ref:0", "<boolean>0</boolean>"),
        object("VDI", "Ref:20", &[("virtual_size", "1048576"), ("name_label", "root")]),
        object("VDI", "Ref:3", &[("virtual_size", "2097152")]),
        object(
            "VBD",
            "Ref:5",
            &[("VM", "Ref:0"), ("VDI", "Ref:3"), ("userdevice", "1"), ("type", "Disk")],
        ),
        object(
            "VBD",
            "Ref:6",
            &[
                ("VM", "Ref:0"),
                ("VDI", "Ref:20"),
                ("userdevice", "0"),
                ("type", "Disk"),
            ],
        ),
        object(
            "VBD",
            "Ref:7",
            &[
                ("VM", "Ref:0"),
                ("userdevice", "3"),
                ("type", "CD"),
                ("empty", "<boolean>1</boolean>"),
            ],
        ),
        object(
            "VBD",
            "Ref:8",
            &[("VM", "Ref:9"), ("VDI", "Ref:3"), ("userdevice", "0"), ("type", "Disk")],
        ),
        object(
            "VIF",
            "Ref:1",
            &[
                ("VM", "Ref:0"),
                ("device", "0"),
                ("MAC", "AA:BB:CC:00:11:22"),
                ("network", "Ref:2"),
            ],
        ),
        object("network", "Ref:2", &[("name_label", "Pool-wide network")]),
    ];
    format!(
        "<?xml version='1.0'?><value><struct><member><name>version</name><value><struct></struct></value></member><member>\
         <name>objects</name><value><array><data>{}</data></array></value></member></struct></value>",
        objects.concat()
    )
}

#[test]
fn records_of_xenserver_are_read() {
    let text = records_of_xenserver();
    let machine = read(&text).unwrap().value;
    assert_eq!((machine.processor_count, machine.memory_bytes), (4, 2 << 30));
    assert_eq!((machine.firmware, machine.clock), (Firmware::Bios, Clock::LocalTime));
    assert_eq!(
        machine.topology,
        Some(Topology {
            socket_count: 2,
            core_count: 2,
            thread_count: 1
        })
    );
    let disks: Vec<_> = machine
        .disks
        .iter()
        .map(|disk| (disk.key.as_str(), disk.boot_order))
        .collect();
    assert_eq!(disks, [("Ref:20", Some(2)), ("Ref:3", None), ("", Some(1))]);
    assert_eq!(machine.cards[0].mac.as_deref(), Some("aa:bb:cc:00:11:22"));
    assert_eq!(machine.cards[0].network.as_deref(), Some("Pool-wide network"));
    let ids: Vec<String> = XenRecords::parse(&text)
        .unwrap()
        .disks()
        .unwrap()
        .into_iter()
        .map(|disk| disk.id)
        .collect();
    assert_eq!(ids, ["Ref:20", "Ref:3"], "sorted as text, as XAPI does");
    for wrong in [
        "<value><struct></struct></value>",
        "<a/>",
        "",
        &text.replace("2147483648", "much"),
    ] {
        read(wrong).unwrap_err();
    }
}

const CHECKPOINT: &str = include_str!("../../tests/samples/suspended-ova.xml");
const RUNNING: &str = include_str!("../../tests/samples/running-ova.xml");

#[test]
fn a_checkpoint_lists_the_requirements_for_resuming() {
    let machine = SuspendedMachine::read(CHECKPOINT).unwrap();
    assert_eq!(
        (&machine.memory.id[..], machine.memory.size_bytes),
        ("Ref:10", 2_810_183_680)
    );
    assert_eq!(machine.processor_vendor.as_deref(), Some("GenuineIntel"));
    let disks: Vec<_> = machine
        .disks
        .iter()
        .map(|disk| (&disk.disk.id[..], &disk.device[..], &disk.label[..]))
        .collect();
    // The medium in the drive belongs to the pool's ISO library.
    assert_eq!(disks, [("Ref:6", "xvda", "till root"), ("Ref:7", "xvdb", "till data")]);
    // The archive also contains the disk with the memory.
    let all = XenRecords::parse(CHECKPOINT).unwrap().disks().unwrap();
    let all: Vec<_> = all.iter().map(|disk| &disk.id[..]).collect();
    assert_eq!(all, ["Ref:10", "Ref:6", "Ref:7"]);

    let wrong = |from: &str, to: &str| {
        assert!(CHECKPOINT.contains(from), "{from}");
        SuspendedMachine::read(&CHECKPOINT.replace(from, to))
            .unwrap_err()
            .to_string()
    };
    assert!(wrong("<value>Suspended<", "<value>Halted<").contains("power state is \"Halted\""));
    assert!(wrong("suspend_VDI</name><value>Ref:10", "suspend_VDI</name><value>Ref:99").contains("Ref:99"));
    assert!(wrong("<value>VM_metrics<", "<value>VM<").contains("2 machines"));
    assert!(SuspendedMachine::read(RUNNING).is_err());
}

/// The pool's records are unchanged except for the fields that mark a checkpoint.
#[test]
fn a_checkpoint_is_turned_into_its_machine() {
    let text = suspended_machine(CHECKPOINT, RUNNING, None).unwrap();
    let named = SuspendedMachine {
        name: "till & shop".to_owned(),
        ..SuspendedMachine::read(CHECKPOINT).unwrap()
    };
    assert_eq!(SuspendedMachine::read(&text).unwrap(), named);
    let machine = read(&text).unwrap().value;
    assert_eq!(machine.name, "till & shop");
    assert_eq!(machine.uuid.as_deref(), Some("7c0bd2a4-0d5e-4f0f-9d2e-5b1c6a7d8e9f"));
    assert_eq!(machine.cards[0].mac.as_deref(), Some("0a:1b:2c:3d:4e:5f"));
    let has = |words: &str| assert!(text.contains(words), "{words}");
    has("<name>is_a_template</name><value><boolean>0</boolean></value>");
    has("<name>snapshot_info</name><value><struct></struct></value>");
    has("<name>order</name><value>3</value>");
    has("<name>start_delay</name><value>30</value>");
    has("<name>power_state</name><value>Suspended</value>");
    has("<double>2.5</double>");
    has("{&quot;VmExtra&quot;");
    // Everything else is unchanged.
    let objects = |text: &str| Value::parse(text, "records").unwrap().get("objects").cloned().unwrap();
    let [before, after] = [objects(CHECKPOINT), objects(&text)];
    let members = |object: &Value| match object.get("snapshot") {
        Some(Value::Struct(members)) => members.clone(),
        other => panic!("{other:?}"),
    };
    let mut changed = Vec::new();
    for (before, after) in before.as_array().iter().zip(after.as_array()) {
        let pairs = members(before).into_iter().zip(members(after));
        changed.extend(
            pairs
                .filter(|(before, after)| before != after)
                .map(|(_, (name, _))| name),
        );
    }
    let expected = [
        "uuid",
        "name_label",
        "is_a_template",
        "snapshot_info",
        "snapshot_metadata",
        "start_delay",
        "order",
    ];
    assert_eq!(changed, expected);

    let named = suspended_machine(CHECKPOINT, RUNNING, Some("a<b")).unwrap();
    assert_eq!(read(&named).unwrap().value.name, "a<b");
    suspended_machine(RUNNING, RUNNING, None).unwrap_err();
    suspended_machine(CHECKPOINT, "<value/>", None).unwrap_err();
}

#[test]
fn the_boot_order_overrides_the_bootable_flag_and_positions_may_be_names() {
    let xml = written(&specimen()).xml;
    let order = |order: &str| {
        let from = xml.split("<name>order</name><value>").nth(1).unwrap();
        let old = &from[..from.find('<').unwrap()];
        let text = xml.replace(
            &format!("<name>order</name><value>{old}</value>"),
            &format!("<name>order</name><value>{order}</value>"),
        );
        let disks = read(&text).unwrap().value.disks;
        let of = |kind: DiskKind| disks.iter().find(|disk| disk.kind == kind).unwrap().boot_order;
        (of(DiskKind::Disk), of(DiskKind::Cdrom))
    };
    assert_eq!(order("d"), (None, Some(1)));
    assert_eq!(order("dc"), (Some(2), Some(1)));
    let place = |number: u32| format!("<name>userdevice</name><value>{number}</value>");
    let named = xml.replace(&place(1), "<name>userdevice</name><value>xvdb</value>");
    assert_ne!(named, xml);
    let places = |text: &str| -> Vec<u32> {
        read(text)
            .unwrap()
            .value
            .disks
            .iter()
            .map(|disk| disk.position)
            .collect()
    };
    assert_eq!(places(&named), places(&xml));
}
