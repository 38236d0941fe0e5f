//! Defining, starting and removing machines, and the saved states that libvirt keeps for them.

use holdfast_host::{Error, Hypervisor as _, HypervisorMut as _, KeptStates, MachineState};

use holdfast_test_kit::libvirt::LibvirtLab;

fn configuration(lab: &LibvirtLab, name: &str) -> String {
    let (_, text) = lab
        .connect()
        .machine(name)
        .unwrap()
        .configuration()
        .unwrap()
        .swap_remove(0);
    String::from_utf8(text).unwrap()
}

#[test]
fn a_machine_is_checked_defined_started_and_undefined() {
    let lab = LibvirtLab::new();
    let libvirt = lab.connect();
    assert!(libvirt.is_of_this_host());
    lab.define("web1", &["qcow2"]);
    let text = configuration(&lab, "web1");
    lab.virsh(&["undefine", "web1"]);
    assert_eq!(libvirt.check(&text).unwrap(), None);
    let machine_type = text
        .split("machine='")
        .nth(1)
        .and_then(|rest| rest.split('\'').next())
        .unwrap();
    for (before, after) in [
        (machine_type, "pc-i440fx-99.0"),
        ("<domain type='qemu'>", "<domain type='xen'>"),
        ("</devices>", ""),
    ] {
        let broken = text.replace(before, after);
        let checked = libvirt.check(&broken);
        assert!(
            matches!(checked, Err(Error::Refused { action: "define", .. })),
            "{after}: {checked:?}"
        );
    }
    assert!(libvirt.machines().unwrap().is_empty(), "a check changes nothing");

    libvirt.define(&text).unwrap();
    assert_eq!(configuration(&lab, "web1"), text);
    libvirt.start("web1").unwrap();
    assert_eq!(libvirt.machines().unwrap()[0].state, MachineState::Running);
    assert!(libvirt.start("web1").is_err());
    lab.virsh(&["destroy", "web1"]);
    libvirt.undefine("web1").unwrap();
    assert!(libvirt.machines().unwrap().is_empty());
    assert!(lab.path("web1-a").exists());
    assert!(matches!(libvirt.undefine("web1"), Err(Error::NoSuchMachine { .. })));
}

#[test]
fn kept_states_of_a_machine_are_counted() {
    let lab = LibvirtLab::new();
    let libvirt = lab.connect();
    lab.define("web1", &["qcow2"]);
    assert_eq!(libvirt.kept_states("web1").unwrap(), KeptStates::default());
    lab.virsh(&["snapshot-create-as", "web1", "before"]);
    lab.virsh(&["start", "web1"]);
    lab.virsh(&["checkpoint-create-as", "web1", "c1", "--diskspec", "vda"]);
    let kept = libvirt.kept_states("web1").unwrap();
    assert_eq!(
        kept,
        KeptStates {
            is_transient: false,
            snapshot_count: 1,
            checkpoint_count: 1,
            has_saved_memory: false
        }
    );
    lab.virsh(&["managedsave", "web1"]);
    assert!(libvirt.kept_states("web1").unwrap().has_saved_memory);
}
