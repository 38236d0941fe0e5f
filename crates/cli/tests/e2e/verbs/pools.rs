//! Machines in pools of XenServer and XCP-ng. There is no XenServer here: a stand-in built from its public sources
//! answers (`rigs/xapi-server`).

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Output;

use holdfast_xapi_server::{Fault, Habits, NbdPurpose, NewDisk, NewVm, Server, SrPlace, VhdBitmaps, VhdOrder};
use serde_json::Value;

use crate::program::{stderr, stdout};
use crate::rig::{Rig, noise};

pub(super) const MIB: u64 = 1 << 20;

/// A pool with a machine with two disks.
pub(super) struct World {
    pub(super) rig: Rig,
    pub(super) pool: Server,
    pub(super) vm: String,
    /// The folder in which the pool keeps its disks.
    _folder: tempfile::TempDir,
}

impl World {
    pub(super) fn new() -> Self {
        Self::with_storage_at(SrPlace::Shared)
    }

    /// The second disk is in a storage repository at `place`.
    pub(super) fn with_storage_at(place: SrPlace) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let pool = Server::start(folder.path()).unwrap();
        let mut second = NewDisk::new("xvdb", 5 * MIB);
        second.place = place;
        let vm = pool.add_vm(&NewVm {
            name: "web1".to_owned(),
            disks: vec![NewDisk::new("xvda", 12 * MIB), second],
            power_state: "Running".to_owned(),
        });
        let rig = Rig::new();
        rig.write("password", format!("{}\n", pool.password()).as_bytes());
        std::fs::set_permissions(rig.path("password"), Permissions::from_mode(0o600)).unwrap();
        let world = Self {
            rig,
            pool,
            vm,
            _folder: folder,
        };
        world.write("xvda", 3 * MIB + 700, 3_000_000, 1);
        world.write("xvdb", 0, 100_000, 2);
        world.write("xvdb", 5 * MIB - 512, 512, 3);
        world
    }

    pub(super) fn write(&self, device: &str, offset: u64, length: usize, seed: u64) {
        self.pool.write_disk(&self.vm, device, offset, &noise(length, seed));
    }

    pub(super) fn address(&self) -> String {
        format!("xen://{}", self.pool.address())
    }

    pub(super) fn machine(&self) -> String {
        format!("{}/web1", self.address())
    }

    pub(super) fn report(&self, words: &[&str]) -> Value {
        let fingerprint = self.pool.fingerprint();
        self.rig.report(&with_login(words, &fingerprint))
    }

    pub(super) fn fails(&self, code: i32, words: &[&str]) -> (String, String) {
        let fingerprint = self.pool.fingerprint();
        self.rig.error(code, &with_login(words, &fingerprint))
    }

    pub(super) fn run(&self, words: &[&str]) -> Output {
        let fingerprint = self.pool.fingerprint();
        self.rig.run(&with_login(words, &fingerprint))
    }

    /// Backs the machine up; returns its report.
    pub(super) fn back_up(&self, options: &[&str]) -> Value {
        let machine = self.machine();
        let report = self.report(&[&["backup", &machine[..]], options].concat());
        report["machines"][0].clone()
    }

    /// Asserts that the newest snapshot has the current content of the disks.
    pub(super) fn assert_holds(&self) {
        for (disk, device) in [("sda", "xvda"), ("sdb", "xvdb")] {
            let target = format!("{disk}.raw");
            drop(std::fs::remove_file(self.rig.path(&target)));
            self.rig.ok(&["restore", &format!("web1:{disk}"), &target]);
            assert!(
                self.rig.read(&target) == self.pool.disk_bytes(&self.vm, device),
                "disk {disk}"
            );
        }
    }

    /// Asserts that the pool has no leftovers of backups, only `kept` disks for the next incremental backup.
    pub(super) fn assert_clean(&self, kept: usize) {
        let vms: Vec<_> = self.pool.vms().into_iter().filter(|vm| vm.is_a_snapshot).collect();
        assert_eq!(vms, [], "snapshots of machines");
        let snapshots = self.pool.vdis().into_iter().filter(|vdi| vdi.is_a_snapshot);
        let snapshots: Vec<_> = snapshots.collect();
        assert_eq!(snapshots.len(), kept, "{snapshots:?}");
        assert_eq!(self.pool.tasks(), []);
        assert_eq!(self.pool.session_count(), 0);
    }
}

/// The arguments, with the options for the login.
pub(super) fn with_login<'w>(words: &[&'w str], fingerprint: &'w str) -> Vec<&'w str> {
    let login = ["--pool-password-file", "password", "--pool-certificate", fingerprint];
    [words, &login].concat()
}

fn dirty_bytes(report: &Value) -> Vec<Option<u64>> {
    let disks = report["disks"].as_array().unwrap();
    disks.iter().map(|disk| disk["dirty_bytes"].as_u64()).collect()
}

/// Reports of verbs about pools.
pub(crate) fn reports() -> Vec<(&'static str, Value)> {
    let world = World::new();
    let (address, machine) = (world.address(), world.machine());
    vec![
        ("machines", world.report(&["machines", &address])),
        ("backup", world.report(&["backup", &machine])),
        (
            "export",
            world.report(&["export", "web1", &address, "--new-identity", "--name", "web2"]),
        ),
    ]
}

#[test]
fn changed_blocks_are_read_by_nbd() {
    let world = World::new();
    let first = world.back_up(&[]);
    assert_eq!(first["method"], "nbd", "{first}");
    assert_eq!(dirty_bytes(&first), [None, None]);
    world.assert_holds();
    world.assert_clean(2);
    let kinds: Vec<String> = world
        .pool
        .vdis()
        .into_iter()
        .filter(|vdi| vdi.is_a_snapshot)
        .map(|vdi| vdi.kind)
        .collect();
    assert_eq!(kinds, ["cbt_metadata", "cbt_metadata"], "no room is taken in the pool");

    world.write("xvda", 7 * MIB + 5, 100, 4);
    world.pool.forget_calls();
    let planned = world.back_up(&["--dry-run"]);
    assert_eq!(planned["disks"][0]["reason"], Value::Null, "{planned}");
    let changing = [
        "VM.snapshot",
        "VM.destroy",
        "VDI.destroy",
        "VDI.enable_cbt",
        "VDI.copy",
        "other_config",
    ];
    let calls = world.pool.calls();
    let is_changing = |call: &&String| changing.iter().any(|word| call.contains(word));
    assert_eq!(calls.iter().find(is_changing), None, "{calls:?}");
    let second = world.back_up(&[]);
    assert_eq!(dirty_bytes(&second), [Some(65_536), Some(0)], "{second}");
    assert!(second["read_bytes"].as_u64().unwrap() < MIB, "{second}");
    world.assert_holds();
    world.assert_clean(2);

    // Another program has reset the tracking: everything is read, with the reason.
    let vdis = world.pool.vdis();
    assert!(vdis.iter().any(|vdi| vdi.cbt_enabled));
    world.back_up(&["--pool-keep-nothing"]);
    world.assert_clean(0);
    let machine = world.machine();
    let output = world.run(&["backup", &machine]);
    let text = stdout(&output);
    assert!(text.contains("read everything: the pool was not to keep"), "{text}");
    assert!(text.contains("one instant, by a snapshot of the pool"), "{text}");
}

#[test]
fn changed_blocks_are_read_as_a_vhd() {
    for bitmaps in [VhdBitmaps::Full, VhdBitmaps::Changed] {
        let world = World::new();
        world.pool.set_nbd_purpose(NbdPurpose::None);
        world
            .pool
            .change_habits(|habits: &mut Habits| habits.vhd_bitmaps = bitmaps);
        let first = world.back_up(&[]);
        assert_eq!(first["method"], "vhd", "{first}");
        world.assert_holds();
        world.assert_clean(2);
        world.write("xvda", 9 * MIB + 512, 5000, 4);
        world.write("xvda", 11 * MIB, 70_000, 5);
        let second = world.back_up(&[]);
        assert_eq!(dirty_bytes(&second), [Some(4 * MIB), Some(0)], "{second}");
        world.assert_holds();
        world.assert_clean(2);
        // The VHD was requested relative to the kept disk.
        let calls = world.pool.calls();
        assert!(calls.iter().any(|call| call.contains("base=")), "{calls:?}");
    }
}

/// If the NBD port cannot be reached, disks are read as VHDs.
#[test]
fn disks_are_read_as_vhds_if_nbd_cannot_be_reached() {
    let world = World::new();
    world
        .pool
        .change_habits(|habits: &mut Habits| habits.has_closed_nbd = true);
    let output = world.run(&["backup", &world.machine()]);
    assert!(stderr(&output).contains("cannot be reached"), "{}", stderr(&output));
    assert!(output.status.success());
    world.assert_holds();
    world.assert_clean(2);
    let (_, message) = world.fails(1, &["backup", &world.machine(), "--pool-read", "nbd"]);
    assert!(message.contains("--pool-read vhd"), "{message}");
    world.assert_clean(2);
}

/// Otherwise two machines in two pools would have one history, each a parent of the other.
#[test]
fn a_machine_of_another_pool_does_not_continue_the_history() {
    let (world, other) = (World::new(), World::new());
    world.back_up(&[]);
    let machine = other.machine();
    let fingerprint = other.pool.fingerprint();
    let password = other.rig.path("password").display().to_string();
    let login = ["--pool-password-file", &password, "--pool-certificate", &fingerprint];
    let (kind, message) = world.rig.error(1, &[&["backup", &machine], &login[..]].concat());
    assert!(
        kind == "exists" && message.contains(&world.vm) && message.contains("--machine"),
        "{message}"
    );
    world
        .rig
        .report(&[&["backup", &machine, "--machine", "web1b"], &login[..]].concat());
    // A copy of the machine needs a statement to continue its history, even if the original is gone, because names are
    // reused.
    let (address, fingerprint) = (world.address(), world.pool.fingerprint());
    let words = ["export", "web1", &address, "--new-identity"];
    let report = world.rig.json(3, &with_login(&words, &fingerprint))["report"].clone();
    let uuid = report["uuid"].as_str().unwrap();
    let again = format!("{}/{uuid}", world.address());
    let (kind, _) = world.fails(1, &["backup", &again]);
    assert_eq!(kind, "exists");
    world.pool.set_power_state(&world.vm, "Halted");
    world.pool.destroy(&world.vm).unwrap();
    assert_eq!(world.fails(1, &["backup", &again]).0, "exists");
    world.report(&["backup", &again, "--same-machine"]);
    world.report(&["backup", &again]);
}

/// A copy in another pool has the UUID of the machine, and so has a machine that was moved there.
#[test]
fn a_machine_that_is_now_in_another_pool_is_warned_about() {
    let (world, other) = (World::new(), World::new());
    other.pool.set_power_state(&other.vm, "Halted");
    other.pool.destroy(&other.vm).unwrap();
    world.back_up(&[]);
    let fingerprint = other.pool.fingerprint();
    let password = other.rig.path("password").display().to_string();
    let login = ["--pool-password-file", &password, "--pool-certificate", &fingerprint];
    let address = other.address();
    world.rig.report(&[&["export", "web1", &address], &login[..]].concat());
    let copy = other.machine();
    let words = [&["backup", &copy], &login[..]].concat();
    let warnings = world.rig.json(3, &words)["warnings"].to_string();
    assert!(
        warnings.contains(&world.address()) && warnings.contains("--machine"),
        "{warnings}"
    );
    // The warning comes once.
    world.rig.json(0, &words);
}

#[test]
fn blocks_in_another_order_and_raw_bytes_are_read_as_well() {
    let world = World::new();
    world.pool.set_nbd_purpose(NbdPurpose::None);
    world.back_up(&["--pool-read", "raw"]);
    world.assert_holds();
    world
        .pool
        .change_habits(|habits: &mut Habits| habits.vhd_order = VhdOrder::Reversed);
    world.write("xvda", 0, 5_000_000, 6);
    let report = world.back_up(&["--pool-read", "vhd"]);
    assert!(
        report["disks"][0]["reason"].as_str().unwrap().contains("order"),
        "{report}"
    );
    world.assert_holds();
    world.assert_clean(2);
}

#[test]
fn redirects_between_hosts_are_followed() {
    let world = World::with_storage_at(SrPlace::OnSlave);
    world.pool.set_nbd_purpose(NbdPurpose::None);
    world.back_up(&[]);
    world.assert_holds();
    // A host that is not the master returns the address of the master.
    let slave = format!("xen://{}/web1", world.pool.slave_address());
    let both = [world.pool.fingerprint(), world.pool.slave_fingerprint()];
    let words = [
        "backup",
        &slave,
        "--pool-password-file",
        "password",
        "--pool-certificate",
        &both[0],
        "--pool-certificate",
        &both[1],
    ];
    world.rig.report(&words);
    world.assert_holds();
    world.assert_clean(2);
}

#[test]
fn the_pool_is_clean_after_any_fault() {
    let faults: [(&str, Fault, bool); 5] = [
        ("the session expires", Fault::SessionExpiresAfterCalls(12), true),
        (
            "the session expires in a transfer",
            Fault::SessionExpiresAfterBytes(MIB),
            true,
        ),
        ("a transfer is cut off", Fault::CutDownloadAfter(2 * MIB + 77), true),
        ("a handler fails once", Fault::HandlerStatus(500), true),
        (
            "a transfer fails behind its answer",
            Fault::TransferFails(vec!["VDI_IO_ERROR".to_owned(), "device".to_owned()]),
            false,
        ),
    ];
    for (what, fault, goes_on) in faults {
        let world = World::new();
        world.pool.set_nbd_purpose(NbdPurpose::None);
        world.pool.faults().once(fault);
        let machine = world.machine();
        let output = world.run(&["backup", &machine]);
        assert_eq!(output.status.success(), goes_on, "{what}: {}", stderr(&output));
        if goes_on {
            world.assert_holds();
        } else {
            assert_eq!(world.rig.snapshot_count(), 0, "{what}");
        }
        world.assert_clean(if goes_on { 2 } else { 0 });
    }
    let world = World::new();
    world.pool.faults().fail_snapshot_out_of_space();
    let machine = world.machine();
    let (kind, message) = world.fails(1, &["backup", &machine]);
    assert!(message.contains("not enough space"), "{message}");
    assert_eq!(kind, "no-space");
    world.assert_clean(0);
}

/// After an interruption a new download begins: a VHD with another identity, which may break at an earlier offset than
/// the first one.
#[test]
fn an_interrupted_download_of_a_disk_is_continued_at_any_offset() {
    for way in ["vhd", "raw"] {
        for cuts in [&[3 * MIB + 77][..], &[4 * MIB, MIB], &[5 * MIB, 2 * MIB, 6 * MIB]] {
            let world = World::new();
            world.pool.set_nbd_purpose(NbdPurpose::None);
            for cut in cuts {
                world.pool.faults().once(Fault::CutDownloadAfter(*cut));
            }
            let machine = world.machine();
            world.report(&["backup", &machine, "--pool-read", way]);
            world.assert_holds();
        }
        let world = World::new();
        world.pool.set_nbd_purpose(NbdPurpose::None);
        world.pool.faults().times(Fault::CutDownloadAfter(4 * MIB), 9);
        let machine = world.machine();
        // This is an error of the connection, not of stored data.
        let (kind, message) = world.fails(1, &["backup", &machine, "--pool-read", way]);
        assert_eq!(kind, "io", "{message}");
        assert_eq!(world.rig.snapshot_count(), 0);
    }
}

#[test]
fn a_snapshot_that_cannot_be_removed_is_removed_by_the_next_backup() {
    let world = World::new();
    world
        .pool
        .faults()
        .fail_call("VM.destroy", &["OTHER_OPERATION_IN_PROGRESS", "VM", "OpaqueRef:x"]);
    let machine = world.machine();
    let output = world.run(&["backup", &machine]);
    assert!(stderr(&output).contains("cannot be removed"), "{}", stderr(&output));
    let output = world.run(&["backup", &machine]);
    assert!(
        stderr(&output).contains("which a killed backup had left"),
        "{}",
        stderr(&output)
    );
    world.assert_holds();
    world.assert_clean(2);
}

#[test]
fn hooks_are_called_around_the_snapshot_of_the_pool() {
    let world = World::new();
    world.rig.write_hook();
    let report = world.back_up(&["--hook", "hook", "--bwlimit", "8M"]);
    assert_eq!(
        world.rig.take_hook_calls(),
        ["job-start", "pre-freeze", "post-thaw", "job-end"]
    );
    let ended = String::from_utf8(world.rig.read("hook.job-end")).unwrap();
    let id = report["snapshot"]["id"].as_str().unwrap();
    for line in [
        format!("HOLDFAST_MACHINE_UUID={}\n", world.vm),
        format!("HOLDFAST_HYPERVISOR={}\n", world.address()),
        format!("HOLDFAST_SNAPSHOT={id}\n"),
        "HOLDFAST_CONSISTENCY=crash\n".to_owned(),
    ] {
        assert!(ended.contains(&line), "{line}{ended}");
    }
    assert!(report["load"]["waited_ms"].as_u64().unwrap() > 0, "{report}");
    // A hook that fails before the snapshot is taken prevents it.
    let snapshot_count = || {
        world
            .pool
            .calls()
            .iter()
            .filter(|call| call.contains("snapshot"))
            .count()
    };
    let before = snapshot_count();
    let (_, message) = world.fails(1, &["backup", &world.machine(), "--hook", "/bin/false"]);
    assert!(message.contains("job-start"), "{message}");
    assert_eq!(snapshot_count(), before);
    world.assert_clean(2);
}
