//! Machines as libvirt describes them.

use holdfast_host::{Decision, DiskChoice, DiskSource, Error, Hypervisor as _, Libvirt, MachineState};

use holdfast_test_kit::libvirt::LibvirtLab;

#[test]
fn machines_are_listed_and_described() {
    let lab = LibvirtLab::new();
    let libvirt = lab.connect();
    assert_eq!(libvirt.machines().unwrap(), []);
    assert!(libvirt.version().is_some_and(|version| version >= [6, 0, 0]));
    lab.define("web1", &["qcow2", "raw"]);
    lab.define("db", &["raw"]);
    lab.virsh(&["start", "web1"]);
    lab.virsh(&["suspend", "web1"]);

    let machines = libvirt.machines().unwrap();
    let found: Vec<_> = machines
        .iter()
        .map(|machine| (&machine.name[..], machine.state))
        .collect();
    assert_eq!(found, [("db", MachineState::ShutOff), ("web1", MachineState::Paused)]);
    let by_uuid = libvirt.machine(&machines[1].uuid).unwrap();
    assert_eq!(by_uuid.name(), "web1");

    let machine = libvirt.machine("web1").unwrap();
    let description = machine.describe().unwrap();
    assert_eq!(description.summary, machines[1]);
    let targets: Vec<_> = description.disks.iter().map(|disk| &disk.target[..]).collect();
    assert_eq!(targets, ["vda", "vdb", "sda"]);
    assert_eq!(description.disks[0].source, DiskSource::File(lab.path("web1-a")));
    assert_eq!(description.disks[0].alias.as_deref(), Some("virtio-disk0"));
    let decisions = description.decide(&DiskChoice::default());
    assert_eq!(decisions[..2], [Decision::Take, Decision::Take]);
    assert_eq!(decisions[2], Decision::Leave("the drive is empty".to_owned()));
    assert!(!description.has_agent_channel && description.tpm.is_none() && description.nvram.is_none());
    assert!(
        machine
            .ask_agent("{\"execute\":\"guest-ping\"}", std::time::Duration::from_secs(1))
            .is_err()
    );

    let files = machine.configuration().unwrap();
    let names: Vec<_> = files.iter().map(|(name, _)| &name[..]).collect();
    assert_eq!(names, ["domain.xml", "domain-live.xml", "domain-migratable.xml"]);
    assert!(
        files
            .iter()
            .all(|(_, text)| String::from_utf8_lossy(text).contains("<name>web1</name>"))
    );
    assert_eq!(libvirt.machine("db").unwrap().configuration().unwrap().len(), 1);
}

#[test]
fn the_metadata_of_a_machine_is_read() {
    let lab = LibvirtLab::new();
    let libvirt = lab.connect();
    lab.define("web1", &["raw", "raw"]);
    let mark = "<backup enabled='no' exclude='vdb'/>";
    let uri = "urn:holdfast:domain:1";
    lab.virsh(&["metadata", "web1", "--uri", uri, "--key", "holdfast", "--set", mark]);
    let description = libvirt.machine("web1").unwrap().describe().unwrap();
    assert!(description.mark.is_left_out);
    assert_eq!(description.mark.left_out_disks, ["vdb"]);
}

#[test]
fn a_missing_machine_or_daemon_is_reported() {
    let lab = LibvirtLab::new();
    let libvirt = lab.connect();
    let error = libvirt.machine("missing").err().unwrap();
    assert!(
        matches!(&error, Error::NoSuchMachine { name, .. } if name == "missing"),
        "{error}"
    );
    let error = Libvirt::connect("qemu+unix:///system?socket=/nonexistent/socket")
        .err()
        .unwrap();
    assert!(
        matches!(&error, Error::Unreachable { address, .. } if address.contains("/nonexistent")),
        "{error}"
    );
}
