//! A machine that is shut off moves with the state of its TPM.

use std::path::PathBuf;

use holdfast_test_kit::libvirt::LibvirtLab;

use super::two_hosts::{TwoHosts, process_of};

fn state_file(lab: &LibvirtLab, uuid: &str) -> PathBuf {
    format!(
        "/proc/{}/root/var/lib/libvirt/swtpm/{uuid}/tpm2/tpm2-00.permall",
        process_of(lab)
    )
    .into()
}

#[test]
fn the_state_of_a_tpm_moves_and_comes_back() {
    let Some(hosts) = TwoHosts::new() else { return };
    let (here, there) = (&hosts.here, &hosts.there);
    here.virsh(&["destroy", "web1"]);
    let tpm = "<tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm><memballoon";
    let configuration = here.virsh(&["dumpxml", "--inactive", "web1"]);
    here.define_xml(&configuration.replacen("<memballoon", tpm, 1));
    let uuid = here.virsh(&["domuuid", "web1"]).trim().to_owned();
    let read = |lab: &LibvirtLab| std::fs::read(state_file(lab, &uuid)).unwrap();
    // It has no state before its first start.
    let plan = hosts.moved(&["--dry-run"]);
    assert_eq!(plan["obstacles"], serde_json::json!([]), "{plan}");
    here.virsh(&["start", "web1"]);
    here.virsh(&["destroy", "web1"]);
    let first = read(here);
    hosts.moved(&[]);
    assert!(read(there) == first);
    // swtpm there takes it, and the machine changes it.
    there.virsh(&["start", "web1"]);
    hosts.console.wait_for_more(20);
    there.virsh(&["destroy", "web1"]);
    let second = read(there);
    hosts.moved(&["--undo"]);
    assert!(read(here) == second);
    here.virsh(&["start", "web1"]);
}
