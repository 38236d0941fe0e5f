//! Host snapshots of running machines, on real file systems.

use std::path::Path;
use std::time::Duration;

use holdfast_block::{Clock as _, SeededRandom};
use rustix::process::{Pid, Signal, kill_process};

use super::bare::{AGENT, Bare, play_agent};
use super::{World, at};
use holdfast_test_kit::file_systems::{FileSystem, Mounted, Pool, system};
use holdfast_test_kit::libvirt::{DISK_BYTES, LibvirtLab};

/// A machine whose disks are in the root of a separate file system.
pub(super) struct MachineSetup {
    // Dropped before the file system.
    pub(super) world: World,
    pub(super) file_system: Box<dyn FileSystem>,
}

/// A machine on a file system of `kind`; `None`, with the reason printed, if this host cannot create one.
#[expect(clippy::print_stdout, reason = "a test that is skipped says why")]
pub(super) fn machine_on(kind: &'static str) -> Option<MachineSetup> {
    if kind == "volumes" {
        return super::volumes::machine_on_volumes();
    }
    let mut made = None;
    let lab = LibvirtLab::prepared(|folder| {
        let file_system: Result<Box<dyn FileSystem>, String> = match kind {
            "zfs" => Pool::at(folder).map(|pool| Box::new(pool) as _),
            _ => Mounted::at(kind, folder).map(|mounted| Box::new(mounted) as _),
        };
        made = Some(file_system);
    });
    match made? {
        Ok(file_system) => Some(MachineSetup {
            world: World::of(lab),
            file_system,
        }),
        Err(reason) => {
            println!("skipped: no {kind}: {reason}");
            None
        }
    }
}

impl MachineSetup {
    /// Takes a snapshot, and returns the first entry of `cuts` in the report.
    pub(super) fn take(&self, code: i32, words: &[&str]) -> serde_json::Value {
        let words = [&["snapshot"], words].concat();
        self.world.rig.json(code, &at(&self.world.lab.uri(), &words))["report"]["cuts"][0].clone()
    }

    /// The content of the raw disk of the machine in a snapshot.
    fn disk_in(&self, full_name: &str) -> Vec<u8> {
        let snapshot = full_name.split_once(':').unwrap().1;
        let (dataset, name) = snapshot.rsplit_once('@').unwrap();
        let provider = self.file_system.provider();
        let name = holdfast_host::provider::HostSnapshotName {
            dataset: holdfast_host::provider::Dataset {
                provider: provider.kind(),
                name: dataset.to_owned(),
            },
            name: name.to_owned(),
        };
        let view = provider.view(&name, "test").unwrap();
        std::fs::read(view.path().join("web1-b")).unwrap()
    }

    /// The full names of the host snapshots of this name, one for each dataset.
    pub(super) fn full_names(&self, name: &str) -> Vec<String> {
        let report = self
            .world
            .rig
            .report(&at(&self.world.lab.uri(), &["host", "list", "web1"]));
        let datasets = report["datasets"].as_array().unwrap().iter();
        datasets
            .map(|dataset| format!("{}@{name}", dataset["dataset"].as_str().unwrap()))
            .collect()
    }

    pub(super) fn listed(&self, words: &[&str]) -> Vec<serde_json::Value> {
        let words = [&["host", "list"], words].concat();
        let report = self.world.rig.report(&at(&self.world.lab.uri(), &words));
        report["datasets"][0]["snapshots"].as_array().unwrap().clone()
    }
}

/// Reports of the verbs about host snapshots.
pub(super) fn reports() -> Vec<(&'static str, serde_json::Value)> {
    let Some(setup) = machine_on("btrfs") else {
        return Vec::new();
    };
    let folder = setup.world.lab.folder.path().to_str().unwrap().to_owned();
    let uri = setup.world.lab.uri();
    let name = format!("btrfs:{folder}@one");
    let report = |code, words: &[&str]| setup.world.rig.json(code, words)["report"].clone();
    let connected = |code, words: &[&str]| report(code, &at(&uri, words));
    let mounted = format!("{folder}/mounted");
    std::fs::create_dir(&mounted).unwrap();
    let snapshot = connected(1, &["snapshot", &folder, "missing", "--name", "one"]);
    let left_out = connected(0, &["snapshot", "web1", "--dry-run"]);
    let generated = "holdfast_web1_2026-01-01_00:00:00Z";
    connected(0, &["snapshot", "web1", "--name", generated]);
    vec![
        ("snapshot", snapshot),
        ("snapshot", left_out),
        ("rollback", connected(0, &["rollback", "web1@one", "--power-off"])),
        ("clone", connected(0, &["clone", "web1@one", "web2", "--dry-run"])),
        ("mount", report(0, &["mount", &name, &mounted])),
        ("unmount", report(0, &["unmount", &mounted])),
        ("host list", connected(0, &["host", "list", &folder])),
        ("host datasets", report(0, &["host", "datasets", &folder])),
        (
            "host clone",
            report(0, &["host", "clone", &name, &format!("{folder}/clone")]),
        ),
        ("host hold", report(0, &["host", "hold", &name])),
        ("host release", report(0, &["host", "release", &name])),
        ("host prune", report(0, &["host", "prune", &folder, "--keep-last", "1"])),
        ("host remove", report(0, &["host", "remove", &name])),
    ]
}

/// Dry runs of `host hold` and `host release` fail like the commands, and change nothing.
fn assert_hold_plans(setup: &MachineSetup, name: &str) {
    let rig = &setup.world.rig;
    let hold_count = || setup.listed(&["web1"])[0]["hold_count"].clone();
    let lists_holds = !name.starts_with("zfs:") || Pool::is_in_kernel();
    let fails = |code: i32, change: &str, expected: &str| {
        assert_eq!(rig.error(code, &["host", change, name]).0, expected);
        if lists_holds {
            assert_eq!(rig.error(code, &["host", change, name, "-n"]).0, expected);
        }
    };
    fails(1, "release", "not-found");
    let planned = rig.ok(&["host", "hold", name, "-n"]);
    assert!(planned.starts_with("would hold "), "{planned}");
    assert_eq!(hold_count(), 0);
    rig.ok(&["host", "hold", name]);
    fails(4, "hold", "locked");
    let planned = rig.report(&["host", "release", name, "-n"]);
    assert_eq!(
        (&planned["dry_run"], hold_count()),
        (&true.into(), 1.into()),
        "{planned}"
    );
    rig.ok(&["host", "release", name]);
    assert_eq!(hold_count(), 0);
}

fn a_machine_is_snapshotted(kind: &'static str) {
    let Some(mut setup) = machine_on(kind) else { return };
    // A snapshot with an existing name fails, and the existing one is kept.
    setup.take(0, &["web1", "--name", "once"]);
    let (error, text) = setup
        .world
        .rig
        .error(1, &at(&setup.world.lab.uri(), &["snapshot", "web1", "--name", "once"]));
    assert_eq!(error, "exists", "{text}");
    let once = setup.listed(&["web1"]);
    assert_eq!(once.len(), 1);
    let dataset = setup.take(0, &["web1", "--dry-run"])["snapshots"][0]
        .as_str()
        .unwrap()
        .to_owned();
    let dataset = dataset.rsplit_once('@').unwrap().0.to_owned();
    setup.world.rig.ok(&["host", "remove", &format!("{dataset}@once")]);

    let cut = setup.take(0, &["web1"]);
    let name = cut["snapshots"][0].as_str().unwrap().to_owned();
    assert!(name.contains("@holdfast_web1_20") && name.ends_with('Z'), "{name}");
    assert_eq!(cut["snapshots"].as_array().unwrap().len(), 1);
    // Two files are cloned one after the other, so the machine is paused meanwhile.
    let is_clones = kind == "xfs";
    assert_eq!(cut["is_one_instant"], !is_clones);
    let machine = &cut["machines"][0];
    assert_eq!(machine["paused_us"].is_u64(), is_clones, "{machine}");
    assert_eq!(
        (&machine["consistency"], &machine["name"]),
        (&"crash".into(), &"web1".into())
    );
    assert_eq!(machine["not_frozen"], "it has no guest agent");

    setup.world.write(1, 77, 0, 65_536);
    let now = std::fs::read(setup.world.lab.path("web1-b")).unwrap();
    assert_eq!(now[0], 77);
    let earlier = setup.disk_in(&name);
    assert!(earlier.len() as u64 == DISK_BYTES && earlier.iter().all(|byte| *byte == 2));

    let listed = &setup.listed(&["web1"])[0];
    assert!(name.ends_with(listed["name"].as_str().unwrap()));
    assert_eq!(
        (&listed["consistency"], &listed["machines"]),
        (&"crash".into(), &serde_json::json!(["web1"]))
    );
    assert!(listed["program"].as_str().unwrap().starts_with("holdfast "));
    assert_hold_plans(&setup, &name);
    setup.world.rig.ok(&["host", "hold", &name]);
    let held = setup.world.rig.json(1, &["host", "remove", &name])["report"]["snapshots"][0].clone();
    assert_eq!(held["obstacle"], "it has a hold");
    setup.world.rig.ok(&["host", "release", &name]);
    let planned = setup.world.rig.ok(&["host", "remove", &name, "--dry-run"]);
    assert!(planned.starts_with("would remove "), "{planned}");
    assert_eq!(setup.listed(&["web1"]).len(), 1);
    setup.world.rig.ok(&["host", "remove", &name]);
    assert_eq!(setup.listed(&["web1"]).len(), 0);
    setup.world.rig.error(1, &["host", "remove", &name]);
    setup.world.assert_runs_and_is_clean();
    assert_eq!(setup.world.rig.names("state/holdfast/runs"), [""; 0]);
}

#[test]
fn a_machine_on_zfs_is_snapshotted() {
    a_machine_is_snapshotted("zfs");
}

#[test]
fn a_machine_on_btrfs_is_snapshotted() {
    a_machine_is_snapshotted("btrfs");
}

#[test]
fn a_machine_on_xfs_is_snapshotted() {
    a_machine_is_snapshotted("xfs");
}

#[test]
fn the_machines_in_a_dataset_are_found() {
    let Some(setup) = machine_on("btrfs") else { return };
    let folder = setup.world.lab.folder.path().to_str().unwrap().to_owned();
    let planned = setup.take(0, &[&folder, "--dry-run", "--name", "one"]);
    assert_eq!(planned["would_freeze"], serde_json::json!(["web1"]));
    assert_eq!(planned["snapshots"][0], format!("btrfs:{folder}@one"));
    assert_eq!(setup.listed(&[&folder]).len(), 0);
    let cut = setup.take(0, &[&folder, "--name", "one"]);
    assert_eq!(cut["machines"][0]["name"], "web1");
    // The machine has no agent: a required freeze is refused, and no snapshot is taken.
    let uri = setup.world.lab.uri();
    let words = ["snapshot", &folder, "--name", "two", "--quiesce", "require"];
    let (kind, text) = setup.world.rig.error(1, &at(&uri, &words));
    assert!(kind == "refused" && text.contains("web1"), "{text}");
    let (kind, _) = setup
        .world
        .rig
        .error(1, &at(&uri, &["snapshot", &folder, "--name", "one"]));
    assert_eq!(kind, "exists");
    let names: Vec<_> = setup.listed(&[&folder]).iter().map(|one| one["name"].clone()).collect();
    assert_eq!(names, ["one"]);
    setup.world.virsh_off();
    let cut = setup.take(0, &["web1", "--name", "off"]);
    assert_eq!(cut["machines"][0]["consistency"], "shut off");
}

impl World {
    pub(super) fn virsh_off(&self) {
        self.lab.virsh(&["destroy", "web1"]);
    }
}

#[test]
fn a_machine_with_disks_on_ext4_is_refused_with_a_reason() {
    let Some(setup) = machine_on("ext4") else { return };
    let (kind, text) = setup
        .world
        .rig
        .error(1, &at(&setup.world.lab.uri(), &["snapshot", "web1"]));
    assert_eq!(kind, "unsupported");
    assert!(
        text.contains("disk vda") && text.contains("ext4") && text.contains("holdfast backup"),
        "{text}"
    );
    setup.world.assert_runs_and_is_clean();
}

/// A machine of a bare QEMU, in a folder on XFS, whose files can be cloned.
pub(super) fn bare_on_xfs() -> Option<(Bare, Mounted)> {
    let mut mounted = None;
    let bare = Bare::prepared(&AGENT, |folder| mounted = Mounted::at("xfs", folder).ok());
    Some((bare, mounted?))
}

#[test]
fn a_guest_is_frozen_and_paused_while_its_disks_are_snapshotted() {
    let Some((bare, _mounted)) = bare_on_xfs() else { return };
    let agent_commands = play_agent(&bare.lab.path("agent"));
    let report = bare
        .rig
        .report(&["snapshot", &bare.source, "--quiesce", "require", "--name", "one"]);
    let machine = &report["cuts"][0]["machines"][0];
    assert_eq!(machine["consistency"], "file system");
    assert!(
        machine["frozen_us"].as_u64().unwrap() > 0 && machine["paused_us"].is_u64(),
        "{machine}"
    );
    let agent_commands: Vec<String> = agent_commands.try_iter().collect();
    assert_eq!(agent_commands, ["guest-fsfreeze-freeze", "guest-fsfreeze-thaw"]);
    bare.wait_until_clean("a snapshot");
}

/// The owner pauses the machine between inspection and snapshot: Holdfast does not resume it.
#[test]
fn a_machine_that_its_owner_pauses_during_a_snapshot_stays_paused() {
    let Some((bare, _mounted)) = bare_on_xfs() else { return };
    let agent_commands = play_agent(&bare.lab.path("agent"));
    let words = ["snapshot", &bare.source, "--name", "one", "--json"];
    let child = bare.rig.command(&words).spawn().unwrap();
    assert_eq!(agent_commands.recv().unwrap(), "guest-fsfreeze-freeze");
    bare.lab.execute("stop", serde_json::Value::Null);
    child.wait_with_output().unwrap();
    // If it was already paused for the snapshot, Holdfast resumes it.
    let was_first = !bare.lab.is_running();
    bare.lab.execute("stop", serde_json::Value::Null);
    bare.rig.report(&["snapshot", &bare.source, "--name", "two"]);
    assert!(!bare.lab.is_running(), "paused before: {was_first}");
    bare.lab.execute("cont", serde_json::Value::Null);
    bare.wait_until_clean("resumed");
}

#[test]
fn a_snapshot_killed_at_any_moment_leaves_the_machine_running_and_thawed() {
    let Some((bare, _mounted)) = bare_on_xfs() else { return };
    let _asked = play_agent(&bare.lab.path("agent"));
    let clock = holdfast_block::SystemClock::new();
    let mut random = SeededRandom::new(11);
    for round in 0..12 {
        // In every second round the guest is not frozen, and the machine is only paused.
        let quiesce = if round % 2 == 0 { "off" } else { "try" };
        let words = ["snapshot", &bare.source, "--quiesce", quiesce];
        let mut child = bare.rig.command(&words).spawn().unwrap();
        clock.sleep(Duration::from_millis(random.below(150)));
        kill_process(Pid::from_child(&child), Signal::KILL).ok();
        child.wait().unwrap();
        bare.wait_until_clean(&format!("round {round}"));
    }
    let listed = bare.rig.report(&["host", "list", &bare.source]);
    for dataset in listed["datasets"].as_array().unwrap() {
        let folder =
            Path::new(dataset["dataset"].as_str().unwrap().split_once(':').unwrap().1).join(".holdfast/snapshots");
        for snapshot in dataset["snapshots"].as_array().unwrap() {
            // Every listed snapshot is complete.
            let files = std::fs::read_dir(folder.join(snapshot["name"].as_str().unwrap())).unwrap();
            assert!(files.count() >= 1);
        }
    }
}

/// Rules apply within a series; named and held snapshots, and those of other programs, are kept.
#[test]
fn host_snapshots_are_pruned_by_rules() {
    let Some(setup) = machine_on("btrfs") else { return };
    let folder = setup.world.lab.folder.path().to_str().unwrap().to_owned();
    let of_web = |second: u32| format!("holdfast_web1_2026-01-01_00:00:0{second}Z");
    let other = "holdfast_db1_2026-01-01_00:00:00Z";
    for name in (0..4).map(of_web).chain(["mine".to_owned(), other.to_owned()]) {
        setup.take(0, &["web1", "--name", &name]);
    }
    system(
        "btrfs",
        &[
            "subvolume",
            "snapshot",
            "-r",
            &folder,
            &format!("{folder}/.holdfast/snapshots/{}", of_web(9)),
        ],
    )
    .unwrap();
    setup
        .world
        .rig
        .ok(&["host", "hold", &format!("btrfs:{folder}@{}", of_web(0))]);
    let uri = setup.world.lab.uri();
    let prune = |words: &[&str]| {
        let words = [&["host", "prune"], words].concat();
        setup.world.rig.report(&at(&uri, &words))
    };
    let names = || {
        let mut names: Vec<String> = setup
            .listed(&["web1"])
            .iter()
            .map(|one| one["name"].as_str().unwrap().to_owned())
            .collect();
        names.sort();
        names
    };
    let before = names();
    let planned = prune(&["web1", "--keep-last", "2", "--dry-run"]);
    assert_eq!(
        (&planned["removed_count"], &planned["kept_count"]),
        (&1.into(), &3.into()),
        "{planned:#}"
    );
    assert_eq!(prune(&["web1"])["removed_count"], 0);
    assert_eq!(names(), before);

    let done = prune(&["web1", "--keep-last", "2"]);
    assert_eq!(done["series"].as_array().unwrap().len(), 1, "{done:#}");
    let left = |webs: &[u32]| {
        let mut left: Vec<String> = webs.iter().map(|second| of_web(*second)).collect();
        left.extend([of_web(9), "mine".to_owned(), other.to_owned()]);
        left.sort();
        left
    };
    assert_eq!(names(), left(&[0, 2, 3]));
    // All series of a dataset, each of them separately.
    let done = prune(&[&folder, "--keep-last", "1"]);
    assert_eq!(done["series"].as_array().unwrap().len(), 2, "{done:#}");
    assert_eq!(names(), left(&[0, 3]));
    setup.world.assert_runs_and_is_clean();
}
