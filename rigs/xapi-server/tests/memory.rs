//! Exports, imports and resumes suspended machines.

#![allow(clippy::unwrap_used, reason = "all of it is test")]
#![allow(clippy::disallowed_methods, reason = "tests spoil files")]

mod rig;

use std::path::Path;

use serde_json::{Value, json};

use rig::{Rig, download, upload};

const DISK_BYTES: u64 = 5 << 20;

fn reference(value: &Value) -> &str {
    value.as_str().unwrap()
}

/// Uploads an archive; returns the machine that the pool has created, or the error.
fn import(rig: &Rig, file: &Path, query: &[(&str, &str)]) -> Result<String, Vec<String>> {
    let task = rig.task();
    let query: Vec<(&str, &str)> = query.iter().copied().chain([("task_id", &task[..])]).collect();
    upload(file, &rig.url(&rig.server.address(), "/import", &query));
    let result = rig.call("task.get_result", &[json!(task)]);
    let (status, words) = rig.end_of(&task);
    if status != "success" {
        return Err(words);
    }
    let result = reference(&result).to_owned();
    let begin = result.find("OpaqueRef:").unwrap();
    let vm = result[begin..].split('<').next().unwrap();
    Ok(reference(&rig.call("VM.get_uuid", &[json!(vm)])).to_owned())
}

/// Exports a suspended machine; returns the archive, the UUID of the machine, and its memory.
fn suspended(rig: &Rig) -> (std::path::PathBuf, String, Vec<u8>) {
    let vm = rig.add_vm("Running", DISK_BYTES);
    let machine = rig.call("VM.get_by_uuid", &[json!(vm)]);
    rig.call("VM.suspend", &[machine]);
    let memory = rig.server.vdi_bytes(&rig.server.memory_of(&vm).unwrap());
    let file = rig.path("suspended.xva");
    let query = [("uuid", &vm[..]), ("preserve_power_state", "true")];
    let url = rig.url(&rig.server.address(), "/export", &query);
    assert_eq!(download(&url, &file), (0, 200));
    (file, vm, memory)
}

#[test]
fn a_machine_that_is_suspended_goes_out_comes_in_and_goes_on() {
    let rig = Rig::new();
    let (file, vm, memory) = suspended(&rig);
    assert!(memory.starts_with(b"XenSavedDomain\n"));
    let disk = rig.server.disk_bytes(&vm, "xvda");
    // The machine still exists, and is not halted.
    let refused = import(&rig, &file, &[("restore", "true")]).unwrap_err();
    assert_eq!(refused[0], "VM_BAD_POWER_STATE", "{refused:?}");
    rig.server.destroy(&vm).unwrap();
    let uuid = import(&rig, &file, &[("restore", "true")]).unwrap();
    assert_eq!(uuid, vm);
    let kept = rig.server.memory_of(&uuid).unwrap();
    assert!(rig.server.vdi_bytes(&kept) == memory, "the memory is another one");
    assert!(rig.server.disk_bytes(&uuid, "xvda")[..disk.len()] == disk[..]);
    // Its devices are still attached.
    let record = rig.server.record("VM", &uuid).unwrap();
    assert_eq!(record["power_state"], "Suspended");
    let vbd = rig.call("VBD.get_record", &[record["VBDs"][0].clone()]);
    assert_eq!(vbd["currently_attached"], true);
    let vif = rig.call("VIF.get_record", &[record["VIFs"][0].clone()]);
    assert_eq!(vif["currently_attached"], true);
    let vdis = rig.server.vdis().len();
    rig.server.resume(&uuid).unwrap();
    assert_eq!(rig.server.record("VM", &uuid).unwrap()["power_state"], "Running");
    assert_eq!(rig.server.memory_of(&uuid), None);
    assert_eq!(rig.server.vdis().len(), vdis - 1, "the memory was not removed");
}

#[test]
fn a_machine_does_not_go_on_from_anything_but_its_own_memory() {
    let rig = Rig::new();
    let (file, vm, _) = suspended(&rig);
    // Processors of another vendor.
    rig.server.set_processors("AuthenticAMD");
    let refused = rig.server.resume(&vm).unwrap_err();
    assert_eq!(refused[0], "VM_INCOMPATIBLE_WITH_THIS_HOST", "{refused:?}");
    rig.server.set_processors("GenuineIntel");
    rig.server.destroy(&vm).unwrap();

    // A changed byte: the checksum is wrong in the transfer, and the error is overridden.
    let mut bytes = std::fs::read(&file).unwrap();
    let magic = b"XenSavedDomain\n";
    let at = bytes.windows(magic.len()).position(|window| window == magic).unwrap();
    bytes[at + 100_000] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    let refused = import(&rig, &file, &[("restore", "true")]).unwrap_err();
    assert_eq!(refused, ["IMPORT_ERROR_SOME_CHECKSUMS_FAILED"]);
    assert_eq!((rig.server.vms(), rig.server.vdis()), (Vec::new(), Vec::new()));
    let uuid = import(&rig, &file, &[("restore", "true"), ("force", "true")]).unwrap();
    let refused = rig.server.resume(&uuid).unwrap_err();
    assert!(refused[1].contains("last_booted_record"), "{refused:?}");
}

#[test]
fn an_archive_without_a_required_part_is_refused() {
    let rig = Rig::new();
    let (file, vm, _) = suspended(&rig);
    rig.server.destroy(&vm).unwrap();
    let text = |from: &str, to: &str| {
        // The records are the first member; the replacement must have the same length.
        let mut bytes = std::fs::read(&file).unwrap();
        assert_eq!(from.len(), to.len());
        let at = bytes.windows(from.len()).position(|window| window == from.as_bytes());
        let at = at.unwrap_or_else(|| panic!("{from}"));
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        let changed = rig.path("changed.xva");
        std::fs::write(&changed, bytes).unwrap();
        changed
    };
    let memory = "<name>suspend_VDI</name><value>Ref:";
    let refused = import(&rig, &text(memory, "<name>suspend_VDI</name><value>Xyz:"), &[]).unwrap_err();
    assert_eq!(refused[0], "IMPORT_ERROR_FAILED_TO_FIND_OBJECT", "{refused:?}");
    let newer = text("<name>xapi_minor</name><value>20<", "<name>xapi_minor</name><value>21<");
    assert_eq!(import(&rig, &newer, &[]).unwrap_err(), ["IMPORT_INCOMPATIBLE_VERSION"]);
    assert_eq!((rig.server.vms(), rig.server.vdis()), (Vec::new(), Vec::new()));
    // Without `restore`, the import creates another machine, with other addresses.
    let uuid = import(&rig, &file, &[]).unwrap();
    assert_ne!(uuid, vm);
}
