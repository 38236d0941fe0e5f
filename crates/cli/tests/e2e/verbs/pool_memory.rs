//! Machines of pools that resume from their memory. The stand-in resumes a machine only from its own undamaged memory,
//! with the matching record: the memory image has a checksum, which is also in that record.

use std::process::Stdio;

use holdfast_xapi_server::Fault;
use serde_json::Value;

use super::pools::{MIB, World, with_login};
use crate::program::{stderr, stdout};
use crate::rig::noise;
use crate::schedules::wait_until;

const DEVICES: [&str; 2] = ["xvda", "xvdb"];

/// The properties of a machine that are visible in the pool.
#[derive(Debug, PartialEq)]
struct MachineProperties {
    name: Value,
    uuid: Value,
    mac: Value,
    platform: Value,
    seed: Value,
    tags: Value,
}

fn properties_of(world: &World) -> MachineProperties {
    let machine = world.pool.record("VM", &world.vm).unwrap();
    let macs = world.pool.addresses_of(&world.vm);
    MachineProperties {
        name: machine["name_label"].clone(),
        uuid: machine["uuid"].clone(),
        mac: macs.into(),
        platform: machine["platform"].clone(),
        seed: machine["other_config"]["mac_seed"].clone(),
        tags: machine["tags"].clone(),
    }
}

fn disks(world: &World) -> Vec<Vec<u8>> {
    DEVICES.map(|device| world.pool.disk_bytes(&world.vm, device)).to_vec()
}

/// A machine that was backed up with its memory, has run further, and is lost; its properties and disks at the point in
/// time.
fn backed_up_and_lost(options: &[&str]) -> (World, MachineProperties, Vec<Vec<u8>>) {
    let world = World::new();
    world.pool.add_tag(&world.vm, "nightly");
    let before = (properties_of(&world), disks(&world));
    let report = world.back_up(&[&["--with-memory"], options].concat());
    assert_eq!(report["consistency"], "memory", "{report}");
    assert!(report["memory_bytes"].as_u64().unwrap() > 0, "{report}");
    world.write("xvda", 9 * MIB, 4000, 77);
    world.pool.set_power_state(&world.vm, "Halted");
    world.pool.destroy(&world.vm).unwrap();
    (world, before.0, before.1)
}

/// The memory in the newest snapshot.
fn memory(world: &World) -> Vec<u8> {
    world.rig.ok(&["restore", "web1:xen-memory", "memory", "--force"]);
    world.rig.read("memory")
}

/// Asserts that the machine is in the pool in its old state, suspended with its memory, and can be resumed.
fn assert_resumes(world: &World, before: &MachineProperties, disks_before: &[Vec<u8>]) {
    assert_eq!(properties_of(world), *before);
    let machine = world.pool.record("VM", &world.vm).unwrap();
    assert_eq!(machine["power_state"], "Suspended");
    assert_eq!(machine["is_a_template"], false);
    assert_eq!(machine["is_a_snapshot"], false);
    assert_eq!(machine["snapshot_info"], serde_json::json!({}));
    for (device, (before, after)) in DEVICES.iter().zip(disks_before.iter().zip(disks(world))) {
        // A pool allocates space in blocks of 2 MiB.
        let (same, more) = after.split_at(before.len());
        assert!(before == same && more.iter().all(|byte| *byte == 0), "{device}");
    }
    let kept = world.pool.memory_of(&world.vm).unwrap();
    assert!(world.pool.vdi_bytes(&kept) == memory(world), "the memory differs");
    world.pool.resume(&world.vm).unwrap();
    assert_eq!(world.pool.record("VM", &world.vm).unwrap()["power_state"], "Running");
}

/// Asserts that the pool has nothing of the machine.
fn assert_pool_is_empty(world: &World) {
    assert_eq!(world.pool.vms(), []);
    let disks: Vec<_> = world.pool.vdis().into_iter().filter(|vdi| !vdi.is_a_snapshot).collect();
    assert_eq!(disks, []);
    assert_eq!(world.pool.tasks(), []);
    assert_eq!(world.pool.session_count(), 0);
}

/// A backup of a suspended machine leaves its suspended state unchanged.
#[test]
fn a_suspended_machine_can_be_resumed_after_a_backup() {
    for with_memory in [false, true] {
        let (world, before, disks) = backed_up_and_lost(&[]);
        world.report(&["export", "web1", &world.address(), "--with-memory"]);
        let report = world.back_up(if with_memory { &["--with-memory"] } else { &[] });
        assert_eq!(report["memory_bytes"].is_null(), !with_memory, "{report}");
        if with_memory {
            assert_resumes(&world, &before, &disks);
        } else {
            world.pool.resume(&world.vm).unwrap();
        }
    }
}

#[test]
fn a_machine_resumes_from_its_memory_in_the_pool() {
    for read in ["nbd", "vhd"] {
        let (world, before, disks) = backed_up_and_lost(&["--pool-read", read]);
        let report = world.report(&["export", "web1", &world.address(), "--with-memory"]);
        assert_eq!(report["uuid"], before.uuid, "{report}");
        assert_eq!(report["memory_bytes"], memory(&world).len());
        assert_eq!(report["dropped"], serde_json::json!([]));
        assert_eq!(report["disks"].as_array().unwrap().len(), 2, "{report}");
        assert_resumes(&world, &before, &disks);
        assert_eq!(world.pool.tasks(), []);
        // Later backups of the machine work as before.
        world.back_up(&[]);
    }
}

#[test]
fn a_resumed_machine_may_have_another_name() {
    let (world, before, disks) = backed_up_and_lost(&[]);
    let address = world.address();
    let output = world.run(&["export", "web1", &address, "--with-memory", "--name", "web1 <again>"]);
    let text = stdout(&output);
    assert!(text.contains("suspended with 4.0 MiB of memory"), "{text}");
    assert!(text.contains(&format!("xe vm-resume uuid={}", world.vm)), "{text}");
    let renamed = MachineProperties {
        name: "web1 <again>".into(),
        ..before
    };
    assert_resumes(&world, &renamed, &disks);
}

#[test]
fn an_archive_with_memory_is_imported_by_the_pool() {
    let (world, before, disks) = backed_up_and_lost(&[]);
    let rig = &world.rig;
    let report = rig.report(&["export", "web1", "web1.xva", "--with-memory"]);
    assert_eq!(report["memory_bytes"], memory(&world).len());
    let page = rig.ok(&["export", "web1", "web1.xva", "--with-memory", "--force"]);
    assert!(page.contains("xe vm-import preserve=true filename=web1.xva"), "{page}");
    // An independent reader finds the disks and the memory.
    std::fs::create_dir(rig.path("found")).unwrap();
    rig.write("xva_reader.py", include_bytes!("xva_reader.py"));
    system(
        "/usr/bin/python3",
        &rig.path("xva_reader.py"),
        &[&rig.path("web1.xva"), &rig.path("found")],
    );
    let names = rig.names("found");
    assert_eq!(names.len(), 3, "{names:?}");
    let found = |bytes: &[u8]| names.iter().any(|name| rig.read(&format!("found/{name}")) == bytes);
    assert!(found(&memory(&world)), "the memory");
    assert!(found(&disks[0]) && found(&disks[1]), "the disks");
    // Holdfast itself imports it as a machine, and reports what is not imported.
    let imported = rig.report(&["import", "web1.xva", "--machine", "again"]);
    let dropped = imported["dropped"].to_string();
    assert!(
        dropped.contains("its memory") && !dropped.contains("in no slot"),
        "{imported}"
    );

    let url = format!("https://{}/import?restore=true", world.pool.address());
    let user = format!("{}:{}", world.pool.user(), world.pool.password());
    let archive = rig.path("web1.xva");
    let words = [
        "--insecure",
        "--silent",
        "--show-error",
        "--user",
        &user,
        "--upload-file",
    ];
    system_in(
        "/usr/bin/curl",
        &[&words[..], &[archive.to_str().unwrap(), &url]].concat(),
    );
    assert_resumes(&world, &before, &disks);
}

fn system(program: &str, script: &std::path::Path, arguments: &[&std::path::Path]) {
    let arguments: Vec<&str> = std::iter::once(&script)
        .chain(arguments)
        .map(|path| path.to_str().unwrap())
        .collect();
    system_in(program, &arguments);
}

#[expect(clippy::disallowed_methods, reason = "others judge what was written")]
fn system_in(program: &str, arguments: &[&str]) {
    let output = std::process::Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program}: {}", stderr(&output));
}

#[test]
fn a_machine_without_its_memory_is_exported_with_a_hint() {
    let (world, ..) = backed_up_and_lost(&[]);
    let address = world.address();
    let report = world.report(&["export", "web1", &address]);
    assert_eq!(report["memory_bytes"], Value::Null);
    let dropped = report["dropped"].to_string();
    assert!(
        dropped.contains("memory") && dropped.contains("--with-memory"),
        "{dropped}"
    );
    assert_eq!(world.pool.record("VM", &world.vm).unwrap()["power_state"], "Halted");
    let report = world.rig.report(&["export", "web1", "web1.ova"]);
    let dropped = report["dropped"].to_string();
    assert!(
        dropped.contains("another hypervisor cannot resume from it"),
        "{dropped}"
    );
}

#[test]
fn an_export_that_could_not_be_resumed_is_refused() {
    let (world, ..) = backed_up_and_lost(&[]);
    let address = world.address();
    let wrong: [(i32, &str, &[&str], &str); 4] = [
        (2, "usage", &["--new-identity"], "contains its old addresses"),
        (
            1,
            "refused",
            &["--exclude", "sdb"],
            "cannot be resumed without the disk sdb",
        ),
        (2, "usage", &["--format", "xva"], "does not apply to a pool"),
        (1, "not-found", &["--exclude", "sdz"], "no disk sdz"),
    ];
    for (code, kind, options, words) in wrong {
        let all = [&["export", "web1", &address, "--with-memory"], options].concat();
        let (found, message) = world.fails(code, &all);
        assert!(message.contains(words), "{options:?}: {message}");
        assert_eq!(found, kind, "{options:?}");
    }
    for format in ["ova", "vma", "dir"] {
        let words = ["export", "web1", "made", "--format", format, "--with-memory"];
        let (_, message) = world.rig.error(2, &words);
        assert!(message.contains("pools and --format xva only"), "{message}");
    }
    // With another processor, nothing is sent: the pool would refuse only after the transfer.
    world.pool.set_processors("AuthenticAMD");
    world.pool.forget_calls();
    let (kind, message) = world.fails(1, &["export", "web1", &address, "--with-memory"]);
    assert!(
        message.contains("GenuineIntel") && message.contains("AuthenticAMD"),
        "{message}"
    );
    assert_eq!(kind, "refused");
    assert!(
        !world.pool.calls().iter().any(|call| call.contains("/import")),
        "{:?}",
        world.pool.calls()
    );
    assert_pool_is_empty(&world);
    // A machine without its memory is created and starts.
    world.report(&["export", "web1", &address]);
    // The machine exists now.
    world.pool.set_processors("GenuineIntel");
    let (kind, message) = world.fails(1, &["export", "web1", &address, "--with-memory"]);
    assert!(message.contains("has this machine: web1"), "{message}");
    assert_eq!(kind, "exists");
}

#[test]
fn incomplete_snapshots_name_the_missing_part() {
    let world = World::new();
    let address = world.address();
    world.back_up(&[]);
    let (kind, message) = world.fails(1, &["export", "web1", &address, "--with-memory"]);
    assert!(
        message.contains("has no memory that a pool can resume from"),
        "{message}"
    );
    assert_eq!(kind, "unsupported");
    // A snapshot of an older version: with the memory, but without the records of the pool.
    world.rig.write("a.raw", &noise(70_000, 5));
    let output = world.rig.run_with(
        &["backup", "--machine", "old", "sda=a.raw", "xen-memory=-"],
        b"XenSavedDomain\n",
    );
    assert!(output.status.success(), "{}", stderr(&output));
    let (kind, message) = world.fails(1, &["export", "old", &address, "--with-memory"]);
    assert!(message.contains("not the records that its pool had then"), "{message}");
    assert!(message.contains("an older version has stored it"), "{message}");
    assert_eq!(kind, "unsupported");
    let report = world.rig.json(3, &["export", "old", "old.xva"])["report"].clone();
    assert!(
        report["dropped"].to_string().contains("lacks what its pool knew"),
        "{report}"
    );
    // The memory refers to a disk that was left out; the warning comes at backup, when it can still be included.
    let machine = world.machine();
    let output = world.run(&["backup", &machine, "--with-memory", "--exclude", "xvdb"]);
    let printed = stderr(&output);
    assert!(
        output.status.code() == Some(3)
            && printed.contains("will start instead of resuming from its memory")
            && printed.contains("xvdb (web1 1)"),
        "{printed}"
    );
    let (kind, message) = world.fails(1, &["export", "web1", &address, "--with-memory"]);
    assert!(
        message.contains("cannot be resumed without the disk xvdb (web1 1), which is not in the snapshot"),
        "{message}"
    );
    assert_eq!(kind, "refused");
}

#[test]
fn a_failed_export_with_memory_leaves_nothing_in_the_pool() {
    let (world, before, disks) = backed_up_and_lost(&[]);
    let address = world.address();
    let faults: [(&str, Fault, &str); 5] = [
        ("the connection is cut", Fault::CutUploadAfter(3 * MIB + 5), ""),
        ("the session expires", Fault::SessionExpiresAfterBytes(2 * MIB), ""),
        ("the host is out of order", Fault::HandlerStatus(500), "500"),
        (
            "the storage is full",
            Fault::CallFails {
                method: "VDI.create".to_owned(),
                error: vec!["SR_BACKEND_FAILURE_44".to_owned(), "full".to_owned()],
            },
            "not enough space",
        ),
        (
            "the pool finds damage",
            Fault::TransferFails(vec!["IMPORT_ERROR_SOME_CHECKSUMS_FAILED".to_owned()]),
            "IMPORT_ERROR_SOME_CHECKSUMS_FAILED",
        ),
    ];
    for (what, fault, words) in faults {
        world.pool.faults().once(fault);
        let (_, message) = world.fails(1, &["export", "web1", &address, "--with-memory"]);
        assert!(message.contains(words), "{what}: {message}");
        // An interrupted program does not wait for the pool to clean up.
        wait_until(what, || world.pool.vms().is_empty());
        assert_pool_is_empty(&world);
    }
    // Killed during the export, without any cleanup.
    world
        .pool
        .faults()
        .once(Fault::TransferDelayed(std::time::Duration::from_secs(2)));
    let fingerprint = world.pool.fingerprint();
    let words = with_login(&["export", "web1", &address, "--with-memory"], &fingerprint);
    let mut command = world.rig.command(&words);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_until("the upload", || {
        world.pool.calls().iter().any(|call| call.starts_with("PUT /import?"))
    });
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("the pool to clear up", || {
        let is_disk = |vdi: &holdfast_xapi_server::VdiInfo| !vdi.is_a_snapshot;
        world.pool.vms().is_empty() && !world.pool.vdis().iter().any(is_disk)
    });
    // The remains do not block the next attempt.
    world.report(&["export", "web1", &address, "--with-memory"]);
    assert_resumes(&world, &before, &disks);
}
