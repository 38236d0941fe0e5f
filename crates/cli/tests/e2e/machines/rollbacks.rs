//! Rollbacks of machines to host snapshots, and clones from host snapshots, on real file systems.

use holdfast_host::MachineState;
use serde_json::{Value, json};

use super::at;
use super::host_snapshots::{MachineSetup, machine_on};

impl MachineSetup {
    /// Runs a verb about a host snapshot; returns its report.
    pub(super) fn point(&self, code: i32, words: &[&str]) -> Value {
        self.world.rig.json(code, &at(&self.world.lab.uri(), words))["report"].clone()
    }

    /// Asserts that the verb fails; returns the error.
    pub(super) fn point_error(&self, words: &[&str]) -> (String, String) {
        self.world.rig.error(1, &at(&self.world.lab.uri(), words))
    }

    /// The full name of the only host snapshot of this name.
    fn full_name(&self, name: &str) -> String {
        self.full_names(name).remove(0)
    }

    /// The names of host snapshots with stored memory.
    fn with_memories(&self) -> Vec<String> {
        let listed = self.listed(&["web1"]);
        let kept = listed.iter().filter(|one| one["memories"] == json!(["web1"]));
        kept.map(|one| one["name"].as_str().unwrap().to_owned()).collect()
    }

    /// Asserts the content of the disks of a machine that is shut off.
    pub(super) fn assert_disks(&self, disks: &[Vec<u8>; 2], what: &str) {
        self.world.rig.ok(&at(&self.world.lab.uri(), &["backup", "web1"]));
        for (target, bytes) in ["vda", "vdb"].iter().zip(disks) {
            let restored = format!("{target}.raw");
            let name = format!("web1@latest:{target}");
            self.world.rig.ok(&["restore", "--force", &name, &restored]);
            assert!(self.world.rig.read(&restored) == *bytes, "{what}: {target}");
        }
    }
}

/// The complete workflow that hooks and scripts implement today: a snapshot with memory, further snapshots, pruning,
/// and a rollback with memory.
pub(super) fn snapshots_pruning_and_rollback(kind: &'static str) {
    let Some(mut setup) = machine_on(kind) else { return };
    setup.world.restart_with_memory(7);
    setup.world.write(0, 40, 65_536, 65_536);
    let uri = setup.world.lab.uri();
    let words = ["snapshot", "web1", "--with-memory", "--name", "hourly", "--json"];
    let output = setup.world.rig.command(&at(&uri, &words)).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    // The watchdog had nothing to do.
    assert!(output.status.success() && !text.contains("warning"), "{text}");
    let cut: Value = serde_json::from_slice(&output.stdout).unwrap();
    let cut = cut["report"]["cuts"][0].clone();
    let machine = &cut["machines"][0];
    assert_eq!(machine["consistency"], "memory", "{cut}");
    assert!(
        machine["memory_bytes"].as_u64().unwrap() >= 16 << 20 && machine["paused_us"].is_u64(),
        "{cut}"
    );
    setup.world.assert_runs_and_is_clean();
    let earlier = setup.world.disks.clone();

    for number in 0..10_u8 {
        let place = usize::from(number) * 131_072;
        setup.world.write(usize::from(number % 2), 100 + number, place, 65_536);
        let name = format!("point-{number}");
        let memory = (number % 5 == 0).then_some("--with-memory=stopped");
        let words = ["web1", "--name", &name].into_iter().chain(memory);
        setup.take(0, &words.collect::<Vec<_>>());
    }
    assert_eq!(setup.with_memories(), ["hourly", "point-0", "point-5"]);
    // A snapshot is removed together with its memory.
    let removed: Vec<String> = (0..5)
        .flat_map(|number| setup.full_names(&format!("point-{number}")))
        .collect();
    let words: Vec<&str> = removed.iter().map(String::as_str).collect();
    setup.world.rig.ok(&[&["host", "remove"], &words[..]].concat());
    assert_eq!(setup.with_memories(), ["hourly", "point-5"]);
    let states = setup.world.rig.path("state/holdfast/states/repository");
    let states = states.to_str().unwrap();
    let kept = setup.world.rig.report(&["list", "-r", states])["snapshots"]
        .as_array()
        .unwrap()
        .len();
    assert_eq!(kept, 6, "states of the hourly snapshot and of five others");
    setup.world.rig.ok(&["verify", "-r", states]);

    // The disks and the memory have changed since.
    setup.world.put_memory(9);
    setup.world.write(0, 99, 0, 1 << 20);
    setup.world.lab.virsh(&["destroy", "web1"]);
    setup.world.lab.virsh(&["start", "web1"]);
    assert!(setup.world.memory_of("web1").ends_with("0x09"));
    let newest = setup.world.disks.clone();
    let (error, text) = setup.point_error(&["rollback", "web1@hourly", "--resume"]);
    assert_eq!(error, "refused", "{text}");
    let report = setup.point(0, &["rollback", "web1@hourly", "--resume", "--power-off"]);
    assert_eq!(report["restore"]["target_machine"]["is_resumed"], true, "{report}");
    assert_eq!(setup.world.state_of("web1"), MachineState::Running);
    assert!(
        setup.world.memory_of("web1").ends_with("0x07"),
        "{}",
        setup.world.memory_of("web1")
    );
    setup.world.assert_runs_and_is_clean();
    // The machine continues to write; its writes after the snapshot are gone.
    setup.world.disks = earlier;
    setup.world.write(1, 77, 512, 512);
    let resumed = setup.world.disks.clone();
    setup.assert_disks(&resumed, "as of the hour");
    // Only differing ranges were written.
    let disks = report["restore"]["disks"].as_array().unwrap();
    assert!(
        disks
            .iter()
            .all(|disk| disk["written_bytes"].as_u64().unwrap() < 4 << 20),
        "{report}"
    );

    // Earlier and newer snapshots still exist.
    let safety = report["safety"][0].as_str().unwrap();
    let safety = safety.rsplit_once('@').unwrap().1;
    assert!(safety.contains("_before-rollback-"), "{safety}");
    setup.world.lab.virsh(&["destroy", "web1"]);
    let words = ["rollback", &format!("web1@{safety}"), "--without-safety-snapshot"];
    let report = setup.point(0, &words);
    assert_eq!(report["safety"], json!([]));
    setup.assert_disks(&newest, "as before the rollback");
    setup.point(0, &["rollback", "web1@point-9", "--dry-run"]);
    setup.assert_disks(&newest, "a dry run changes nothing");
}

/// Rolls back, and counts the bytes that the program and its children have read.
#[expect(clippy::disallowed_methods, reason = "a test runs the system's programs")]
fn bytes_read(setup: &MachineSetup, words: &[&str]) -> (u64, String) {
    let uri = setup.world.lab.uri();
    let words = [&["rollback", "web1@one"], words].concat();
    let program = setup.world.rig.command(&at(&uri, &words));
    let mut counted = std::process::Command::new("bash");
    let script = "\"$@\"; code=$?; cat /proc/$$/io >&2; exit $code";
    counted.args(["-c", script, "bash"]).arg(program.get_program());
    let set = program.get_envs().filter_map(|(name, value)| Some((name, value?)));
    let output = counted.args(program.get_args()).envs(set).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{text}");
    let count = text.lines().find_map(|line| line.strip_prefix("rchar: "));
    (count.unwrap().parse().unwrap(), text)
}

/// ZFS reports the changes since the snapshot, and the rest is not read; without a safety snapshot everything is read.
pub(super) fn unchanged_ranges_are_not_read(kind: &'static str) {
    let Some(mut setup) = machine_on(kind) else { return };
    setup.take(0, &["web1", "--name", "one"]);
    let earlier = setup.world.disks.clone();
    let mut read = Vec::new();
    for option in ["--power-off", "--without-safety-snapshot"] {
        setup.world.write(0, 61, 5 << 20, 65_536);
        setup.world.write(1, 62, 4096, 4096);
        setup.world.lab.virsh(&["destroy", "web1"]);
        let (count, text) = bytes_read(&setup, &[option]);
        assert_eq!(
            text.contains("all of it is compared"),
            option == "--without-safety-snapshot",
            "{text}"
        );
        read.push(count);
        setup.assert_disks(&earlier, option);
        setup.world.disks.clone_from(&earlier);
        setup.world.lab.virsh(&["start", "web1"]);
    }
    assert!(read[0] + (8 << 20) < read[1], "{read:?}");
}

#[test]
fn unchanged_ranges_are_not_read_on_zfs() {
    unchanged_ranges_are_not_read("zfs");
}

#[test]
fn a_machine_is_snapshotted_pruned_and_rolled_back_on_btrfs() {
    snapshots_pruning_and_rollback("btrfs");
}

#[test]
fn a_machine_is_snapshotted_pruned_and_rolled_back_on_xfs() {
    snapshots_pruning_and_rollback("xfs");
}

#[test]
fn a_machine_is_snapshotted_pruned_and_rolled_back_on_zfs() {
    snapshots_pruning_and_rollback("zfs");
}

/// A clone runs beside its original, shares all blocks with it, and neither sees the writes of the other.
pub(super) fn a_clone_runs_beside_its_original(kind: &'static str) {
    let Some(mut setup) = machine_on(kind) else { return };
    setup.world.restart_with_memory(7);
    setup.take(0, &["web1", "--with-memory", "--name", "one"]);
    setup.world.write(0, 55, 0, 65_536);
    setup.world.put_memory(9);
    let plan = setup.point(3, &["clone", "web1@one", "trial", "--dry-run"]);
    assert_eq!(setup.world.machines(), ["web1"]);
    let report = setup.point(3, &["clone", "web1@one", "trial", "--resume"]);
    let (plan, report) = (&plan["machines"][0], &report["machines"][0]);
    assert_eq!(plan["restore"]["files"], report["restore"]["files"]);
    let is_zfs = kind != "btrfs" && kind != "xfs";
    for file in report["restore"]["files"].as_array().unwrap() {
        assert_eq!(file["way"], if is_zfs { "cloned" } else { "shared" }, "{report}");
    }
    for disk in report["restore"]["disks"].as_array().unwrap() {
        assert_eq!(disk["written_bytes"], 0);
    }
    assert_eq!(setup.world.machines(), ["trial", "web1"]);
    assert_eq!(report["restore"]["target_machine"]["is_resumed"], true, "{report}");
    assert!(setup.world.memory_of("trial").ends_with("0x07"));
    assert_eq!(setup.world.state_of("web1"), MachineState::Running);
    setup.world.lab.virsh(&["destroy", "trial"]);
    setup.world.rig.ok(&at(&setup.world.lab.uri(), &["backup", "trial"]));
    setup.world.rig.ok(&["restore", "trial@latest:vda", "clone.raw"]);
    assert!(setup.world.rig.read("clone.raw").iter().all(|byte| *byte == 1));
    // A second clone of the same name is refused, and leaves nothing.
    let before = setup.world.files();
    let (error, text) = setup.point_error(&["clone", "web1@one", "trial"]);
    assert_eq!(error, "exists", "{text}");
    assert_eq!(setup.world.files(), before);
    let (error, text) = setup.point_error(&["clone", "web1@never", "other"]);
    assert!(error == "not-found" && text.contains("never"), "{error}: {text}");
}

#[test]
fn a_clone_runs_beside_its_original_on_btrfs() {
    a_clone_runs_beside_its_original("btrfs");
}

#[test]
fn a_clone_runs_beside_its_original_on_xfs() {
    a_clone_runs_beside_its_original("xfs");
}

#[test]
fn a_clone_runs_beside_its_original_on_zfs() {
    a_clone_runs_beside_its_original("zfs");
}

/// A running machine is cloned in its current state: two clones at once, and one with its memory. The host snapshots
/// for it are removed afterwards, unless a clone needs them.
pub(super) fn a_running_machine_is_cloned(kind: &'static str) {
    let Some(mut setup) = machine_on(kind) else { return };
    setup.world.restart_with_memory(7);
    setup.world.write(0, 55, 0, 65_536);
    for (words, why) in [
        (
            &["clone", "web1", "web1", "--dry-run"][..],
            "there is a machine web1 already",
        ),
        (
            &["clone", "web1", "trial", "--storage", "/no/such", "--dry-run"],
            "there is no folder /no/such",
        ),
    ] {
        let (_, text) = setup.point_error(words);
        assert!(text.contains(why), "{text}");
    }
    let datasets = setup.point(0, &["clone", "web1", "trial", "--dry-run"])["instant"]["datasets"].clone();
    assert!(!datasets.as_array().unwrap().is_empty());
    assert_eq!(
        (setup.world.machines(), setup.listed(&["web1"])),
        (vec!["web1".to_owned()], vec![])
    );
    let report = setup.point(3, &["clone", "web1", "--count", "2", "--name-template", "trial{n}"]);
    assert_eq!(setup.world.machines(), ["trial1", "trial2", "web1"]);
    let instant = &report["instant"];
    assert_eq!(
        (&instant["datasets"], &instant["of"]),
        (&datasets, &json!("web1")),
        "{report:#}"
    );
    assert_eq!(instant["machine"]["consistency"], "crash");
    let needs_them = kind == "zfs" || kind == "volumes";
    for made in report["machines"].as_array().unwrap() {
        for file in made["restore"]["files"].as_array().unwrap() {
            assert_eq!(file["way"], if needs_them { "cloned" } else { "shared" }, "{report:#}");
        }
    }
    assert_eq!(setup.unfinished(), [""; 0]);
    let left = setup.listed(&["web1"]);
    assert_eq!(!left.is_empty(), needs_them, "{left:#?}");
    // The clones do not have later writes.
    setup.world.write(0, 99, 0, 65_536);
    setup.world.rig.ok(&at(&setup.world.lab.uri(), &["backup", "trial2"]));
    setup.world.rig.ok(&["restore", "trial2@latest:vda", "clone.raw"]);
    let clone = setup.world.rig.read("clone.raw");
    assert!(clone[..65_536].iter().all(|byte| *byte == 55) && clone[65_536..].iter().all(|byte| *byte == 1));
    setup.world.put_memory(9);
    let report = setup.point(3, &["clone", "web1", "twin", "--resume"]);
    assert_eq!(report["instant"]["machine"]["consistency"], "memory", "{report:#}");
    // A clone that had booted, not resumed, would have found 9.
    assert!(setup.world.memory_of("twin").ends_with("0x07"));
    assert_eq!(setup.world.state_of("web1"), MachineState::Running);
    assert_eq!(setup.unfinished(), [""; 0]);
    setup.world.lab.virsh(&["destroy", "twin"]);
    // A clone that cannot be created leaves no host snapshot either.
    let before = setup.listed(&["web1"]).len();
    let (error, text) = setup.point_error(&["clone", "web1", "trial1"]);
    assert_eq!(error, "exists", "{text}");
    assert_eq!((setup.listed(&["web1"]).len(), setup.unfinished()), (before, vec![]));
    let (_, text) = setup.point_error(&["clone", "missing", "other"]);
    assert!(text.contains("missing"), "{text}");
}

#[test]
fn a_running_machine_on_btrfs_is_cloned() {
    a_running_machine_is_cloned("btrfs");
}

#[test]
fn a_running_machine_on_xfs_is_cloned() {
    a_running_machine_is_cloned("xfs");
}

#[test]
fn a_running_machine_on_zfs_is_cloned() {
    a_running_machine_is_cloned("zfs");
}

/// On other file systems the error names an alternative.
#[test]
fn the_error_of_an_impossible_clone_names_the_alternative() {
    let world = super::World::new();
    let (error, text) = world.rig.error(1, &at(&world.lab.uri(), &["clone", "web1", "trial"]));
    assert!(error == "unsupported" && text.contains("--to-machine --live"), "{text}");
}

/// The files of a host snapshot are mounted at a given folder.
fn a_host_snapshot_is_mounted(kind: &'static str) {
    let Some(mut setup) = machine_on(kind) else { return };
    setup.take(0, &["web1", "--name", "one"]);
    let name = setup.full_name("one");
    setup.world.write(1, 77, 0, 65_536);
    setup.world.rig.write("mounted/full/file", b"something");
    std::fs::create_dir(setup.world.rig.path("mounted/empty")).unwrap();
    let folder = setup.world.rig.path("mounted/empty").to_str().unwrap().to_owned();
    let (error, _) = setup.world.rig.error(
        1,
        &["mount", &name, setup.world.rig.path("mounted/full").to_str().unwrap()],
    );
    assert_eq!(error, "exists");
    setup.world.rig.ok(&["mount", &name, &folder]);
    let image = std::path::Path::new(&folder).join("web1-b");
    assert!(std::fs::read(&image).unwrap().iter().all(|byte| *byte == 2));
    let opened = std::fs::File::options().write(true).open(&image);
    let written = opened.and_then(|mut file| std::io::Write::write_all(&mut file, b"x"));
    assert!(written.is_err(), "the mount is writable");
    setup.world.rig.ok(&["unmount", &folder]);
    assert!(!image.exists());
    // Nothing else is unmounted.
    let root = setup.world.lab.folder.path().to_str().unwrap().to_owned();
    for other in [&folder, &root] {
        let (_, text) = setup.world.rig.error(1, &["unmount", other]);
        assert!(text.contains("no snapshot is mounted there"), "{text}");
    }
    setup.world.rig.ok(&["host", "remove", &name]);
}

#[test]
fn a_host_snapshot_on_btrfs_is_mounted() {
    a_host_snapshot_is_mounted("btrfs");
}

#[test]
fn a_host_snapshot_on_xfs_is_mounted() {
    a_host_snapshot_is_mounted("xfs");
}

#[test]
fn a_host_snapshot_on_zfs_is_mounted() {
    a_host_snapshot_is_mounted("zfs");
}
