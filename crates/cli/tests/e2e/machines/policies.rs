//! Policies of a sanoid.conf, executed on a real ZFS with a machine on it.

use std::path::PathBuf;

use holdfast_block::Clock as _;
use serde_json::Value;

use super::at;
use super::host_snapshots::{MachineSetup, machine_on};
use crate::schedules::wait_until;
use holdfast_test_kit::file_systems::system;

/// A machine on a separate pool, and a policy.
pub(super) struct Policed {
    pub(super) setup: MachineSetup,
    pub(super) pool: String,
}

/// Begins a policy: one snapshot in each run that has none yet, and nothing else.
pub(super) const FREQUENTLY: &str =
    "frequently = 1\nhourly = 0\ndaily = 0\nmonthly = 0\nautosnap = yes\nautoprune = yes\n";

impl Policed {
    pub(super) fn new() -> Option<Self> {
        let setup = machine_on("zfs")?;
        let pool = setup.file_system.dataset().0.split('/').next().unwrap().to_owned();
        Some(Self { setup, pool })
    }

    /// Replaces the policy of the pool.
    pub(super) fn write(&self, lines: &str) {
        let text = format!("[{}]\nuse_template = mine\n\n[template_mine]\n{lines}", self.pool);
        self.setup.world.rig.write("sanoid.conf", text.as_bytes());
    }

    pub(super) fn run(&self, code: i32, words: &[&str]) -> Value {
        let uri = self.setup.world.lab.uri();
        let words = [&["cron", "sanoid.conf"], words].concat();
        self.setup.world.rig.json(code, &at(&uri, &words))["report"].clone()
    }

    /// The snapshots of the pool's root dataset.
    pub(super) fn names(&self) -> Vec<String> {
        let provider = self.setup.file_system.provider();
        let snapshots = provider.snapshots(&self.pool).unwrap();
        snapshots.into_iter().map(|snapshot| snapshot.name.name).collect()
    }

    /// Takes a snapshot as another program would.
    pub(super) fn make(&self, name: &str) {
        zfs(&["snapshot", &format!("{}@{name}", self.pool)]);
    }

    /// Creates a script that logs its variables, and then runs `then`.
    fn script(&self, then: &str) -> (String, PathBuf) {
        let log = self.setup.world.rig.path("log");
        let line =
            "echo $SANOID_SCRIPT $SANOID_TARGET $SANOID_SNAPNAME $SANOID_TYPES $SANOID_PRE_FAILURE $HOLDFAST_EVENT";
        self.setup
            .world
            .rig
            .write("script", format!("{line} >> {}\n{then}\n", log.display()).as_bytes());
        (
            format!("/bin/sh {}", self.setup.world.rig.path("script").display()),
            log,
        )
    }

    /// ZFS has times in seconds, so a snapshot of the same second does not count as older.
    pub(super) fn wait_until_older(&self) {
        self.setup.world.lab.clock.sleep(std::time::Duration::from_millis(2100));
    }
}

fn zfs(words: &[&str]) {
    system("zfs", words).unwrap();
}

pub(super) fn reports() -> Vec<Value> {
    let Some(policed) = Policed::new() else {
        return Vec::new();
    };
    policed.write(&format!("{FREQUENTLY}weekly = 0\nyearly = 0\n"));
    let planned = policed.run(0, &["--dry-run"]);
    policed.make("autosnap_2020-01-01_00:00:00_hourly");
    policed.wait_until_older();
    let done = policed.run(0, &[]);
    let text = format!("[{}]\nuse_template = missing\n[gone]\nhourly = 1\n", policed.pool);
    policed.setup.world.rig.write("sanoid.conf", text.as_bytes());
    vec![planned, done, policed.run(3, &["--dry-run"])]
}

#[test]
fn due_snapshots_are_taken_once_with_the_machines_of_the_dataset() {
    let Some(policed) = Policed::new() else { return };
    policed.write("hourly = 3\ndaily = 2\nmonthly = 0\nautosnap = yes\nautoprune = yes\n");
    let planned = policed.run(0, &["--dry-run"]);
    assert_eq!(planned["taken"][0]["would_freeze"], serde_json::json!(["web1"]));
    assert_eq!(policed.names(), [""; 0]);

    let done = policed.run(0, &[]);
    let taken = &done["taken"];
    assert_eq!(taken.as_array().unwrap().len(), 1, "{done}");
    assert_eq!(taken[0]["machines"][0]["name"], "web1");
    let names = policed.names();
    assert_eq!(names.len(), 2, "{names:?}");
    for (name, kind) in names.iter().zip(["daily", "hourly"]) {
        assert!(name.starts_with("autosnap_20") && name.ends_with(kind), "{name}");
    }
    let listed = policed
        .setup
        .world
        .rig
        .report(&["host", "list", &format!("zfs:{}", policed.pool)]);
    assert_eq!(
        listed["datasets"][0]["snapshots"][0]["machines"],
        serde_json::json!(["web1"])
    );

    let again = policed.run(0, &[]);
    assert_eq!(
        (&again["taken"], &again["removed"]),
        (&serde_json::json!([]), &serde_json::json!([]))
    );
    assert_eq!(policed.names(), names);
    policed.setup.world.assert_runs_and_is_clean();
}

#[test]
fn expired_snapshots_are_removed_unless_held_or_made_by_another_program() {
    let Some(policed) = Policed::new() else { return };
    policed.write(FREQUENTLY);
    let others = [
        "mine",
        "syncoid_host_2020-01-01:00:00:00",
        "autosnap_mine",
        "holdfast_web1_2020-01-01_00:00:00Z",
    ];
    let old = [
        "autosnap_2020-01-01_00:00:00_hourly",
        "autosnap_2020-01-01_01:00:00_hourly",
        "autosnap_2020-01-01_00:00:00_daily",
    ];
    for name in others.iter().chain(&old) {
        policed.make(name);
    }
    zfs(&["hold", "keep", &format!("{}@{}", policed.pool, old[1])]);
    policed.wait_until_older();
    let planned = policed.run(3, &["--prune-only", "--dry-run"]);
    assert_eq!(planned["removed"].as_array().unwrap().len(), 3, "{planned}");
    assert_eq!(policed.names().len(), 7);

    let done = policed.run(3, &["--prune-only"]);
    let removed = done["removed"].as_array().unwrap();
    let stays: Vec<&str> = removed.iter().filter_map(|one| one["obstacle"].as_str()).collect();
    assert_eq!(stays.len(), 1, "{done}");
    assert!(
        removed
            .iter()
            .all(|one| one["reason"].as_str().unwrap().contains("0 to keep")),
        "{done}"
    );
    let mut expected: Vec<&str> = others.iter().copied().chain([old[1]]).collect();
    let mut names = policed.names();
    expected.sort_unstable();
    names.sort_unstable();
    assert_eq!(names, expected);
    zfs(&["release", "keep", &format!("{}@{}", policed.pool, old[1])]);
    policed.run(0, &["--prune-only"]);
    assert_eq!(policed.names().len(), 4);
}

#[test]
fn scripts_get_the_variables_of_sanoid_and_their_exit_code_counts() {
    let Some(policed) = Policed::new() else { return };
    let (script, log) = policed.script("exit 0");
    let hooks = |extra: &str| {
        format!(
            "{FREQUENTLY}pre_snapshot_script = {script}\npost_snapshot_script = {script}\npre_pruning_script = {script}\n\
             pruning_script = {script}\n{extra}"
        )
    };
    policed.write(&hooks(""));
    policed.make("autosnap_2020-01-01_00:00:00_hourly");
    policed.wait_until_older();
    policed.run(0, &[]);
    let taken = policed.names()[0].clone();
    let pool = &policed.pool;
    let old = "autosnap_2020-01-01_00:00:00_hourly";
    let message = std::fs::read_to_string(&log).unwrap();
    let expected = format!(
        "pre {pool} {taken} frequently pre-snapshot\npost {pool} {taken} frequently 0 post-snapshot\n\
         pre-prune {pool} {old} pre-pruning\nprune {pool} {old} pruning\n"
    );
    assert_eq!(message, expected);

    // If a script fails, the snapshot is still taken, expired ones are kept, and the next script is not called.
    zfs(&["destroy", &format!("{pool}@{taken}")]);
    policed.make(old);
    policed.wait_until_older();
    std::fs::remove_file(&log).unwrap();
    policed.script("exit 3");
    let done = policed.run(3, &[]);
    assert!(
        done["removed"][0]["obstacle"]
            .as_str()
            .unwrap()
            .contains("ended with code 3"),
        "{done}"
    );
    assert_eq!(policed.names().len(), 2);
    let message = std::fs::read_to_string(&log).unwrap();
    assert_eq!(
        message
            .lines()
            .map(|line| line.split(' ').next().unwrap())
            .collect::<Vec<_>>(),
        ["pre", "pre-prune"]
    );

    // With `no_inconsistent_snapshot` no snapshot is taken; a script that hangs is killed with its children.
    let frequent = policed
        .names()
        .into_iter()
        .find(|name| name.ends_with("frequently"))
        .unwrap();
    zfs(&["destroy", &format!("{pool}@{frequent}")]);
    policed.script(&format!("(sleep 6; echo late >> {}) & sleep 100", log.display()));
    policed.write(&hooks("no_inconsistent_snapshot = yes\nscript_timeout = 1\n"));
    let done = policed.run(1, &["--take-only"]);
    assert!(
        done["taken"][0]["failure"]
            .as_str()
            .unwrap()
            .contains("exceeded its time limit"),
        "{done}"
    );
    assert_eq!(policed.names(), [old]);
    policed.setup.world.assert_runs_and_is_clean();
    policed.setup.world.lab.clock.sleep(std::time::Duration::from_secs(6));
    assert!(!std::fs::read_to_string(&log).unwrap().contains("late"));
}

#[test]
fn two_runs_exclude_each_other_and_an_invalid_policy_is_refused() {
    let Some(policed) = Policed::new() else { return };
    let (script, log) = policed.script("sleep 3");
    policed.write(&format!("{FREQUENTLY}pre_snapshot_script = {script}\n"));
    let uri = policed.setup.world.lab.uri();
    let words = at(&uri, &["cron", "sanoid.conf"]);
    let first = policed.setup.world.rig.command(&words).spawn().unwrap();
    wait_until("the script begins", || log.exists());
    let (kind, message) = policed.setup.world.rig.error(4, &words);
    assert!(kind == "locked" && message.contains("another run"), "{message}");
    assert!(first.wait_with_output().unwrap().status.success());
    assert_eq!(policed.names().len(), 1);

    policed.write("hourly = 3\nhuorly = 3\n");
    let (kind, message) = policed.setup.world.rig.error(1, &words);
    assert!(
        kind == "refused" && message.contains("line 6") && message.contains("hourly"),
        "{message}"
    );
}

/// Renamed or missing datasets in a policy cause a warning, and the rest is executed.
#[test]
fn missing_datasets_are_reported() {
    let Some(policed) = Policed::new() else { return };
    let text = format!("[{}/renamed]\nhourly = 1\nautosnap = yes\n", policed.pool);
    policed.setup.world.rig.write("sanoid.conf", text.as_bytes());
    let done = policed.run(3, &[]);
    assert!(done["doubts"][0].as_str().unwrap().contains("renamed"), "{done}");
    assert_eq!(policed.names(), [""; 0]);
}

/// A dataset and all its descendants are snapshotted at one point in time: all of them get the record, and if one
/// snapshot is impossible, none is taken.
#[test]
fn a_tree_is_snapshotted_atomically() {
    let Some(policed) = Policed::new() else { return };
    let child = format!("{}/child", policed.pool);
    zfs(&["create", &child]);
    let text = format!("[{}]\nrecursive = zfs\n{FREQUENTLY}", policed.pool);
    policed.setup.world.rig.write("sanoid.conf", text.as_bytes());
    let done = policed.run(0, &[]);
    assert_eq!(done["taken"][0]["machines"][0]["name"], "web1", "{done}");
    let names = policed.names();
    assert_eq!(names.len(), 1);
    let record = |dataset: &str| {
        let name = format!("{dataset}@{}", names[0]);
        system("zfs", &["get", "-H", "-o", "value", "holdfast:record", &name]).unwrap()
    };
    assert_eq!(record(&policed.pool), record(&child));
    assert!(record(&child).contains("web1"));

    zfs(&["snapshot", &format!("{child}@keep")]);
    let uri = policed.setup.world.lab.uri();
    let words = [
        "snapshot",
        &format!("zfs:{}", policed.pool),
        "--recursive",
        "--name",
        "keep",
    ];
    let (kind, message) = policed.setup.world.rig.error(1, &at(&uri, &words));
    assert_eq!(kind, "exists", "{message}");
    system("zfs", &["get", "-H", "type", &format!("{child}@keep")]).unwrap();
    assert_eq!(policed.names(), names);
    policed.setup.world.assert_runs_and_is_clean();
}

/// Machines come and go during the execution of a policy: the report has their states at the snapshot.
#[test]
fn a_machine_started_before_the_snapshot_is_not_recorded_as_shut_off() {
    let Some(policed) = Policed::new() else { return };
    let lab = &policed.setup.world.lab;
    lab.virsh(&["destroy", "web1"]);
    lab.define("web2", &["raw"]);
    lab.virsh(&["undefine", "web2"]);
    let domain = lab.path("domain.xml");
    let virsh = format!("virsh -q -c '{}'", lab.uri());
    // web1 is known and shut off, and web2 is unknown.
    let (script, _) = policed.script(&format!("{virsh} start web1; {virsh} create {}", domain.display()));
    policed.write(&format!("{FREQUENTLY}pre_snapshot_script = {script}\n"));
    let done = policed.run(3, &[]);
    let machines = done["taken"][0]["machines"].as_array().unwrap();
    let described = machines
        .iter()
        .map(|one| (one["name"].as_str().unwrap(), one["consistency"].as_str().unwrap()));
    assert_eq!(
        described.collect::<Vec<_>>(),
        [("web1", "crash"), ("web2", "crash")],
        "{done}"
    );
    let listed = &policed.setup.listed(&[&format!("zfs:{}", policed.pool)])[0];
    assert_eq!(listed["consistency"], "crash", "{listed}");
    assert_eq!(listed["machines"], serde_json::json!(["web1", "web2"]));
    policed.setup.world.lab.virsh(&["destroy", "web2"]);
}

/// web1 has disks in three datasets, web2 in one of them. A snapshot of the second dataset is impossible: web1 gets
/// none, web2 does.
#[test]
fn a_dataset_without_a_snapshot_affects_only_its_own_machines() {
    let Some(policed) = Policed::new() else { return };
    let (lab, pool) = (&policed.setup.world.lab, &policed.pool);
    // Together with the name of a snapshot, the name exceeds the limit of ZFS.
    let long = format!("{pool}/{}", "x".repeat(250 - pool.len() - 20));
    let own = format!("{pool}/own");
    for (dataset, target) in [(&long, "vdc"), (&own, "vdd")] {
        zfs(&["create", dataset]);
        let image = lab.path(dataset.split_once('/').unwrap().1).join("image");
        let image = image.to_str().unwrap();
        system("qemu-img", &["create", "-q", "-f", "raw", image, "1M"]).unwrap();
        lab.virsh(&[
            "attach-disk",
            "web1",
            image,
            target,
            "--persistent",
            "--subdriver",
            "raw",
        ]);
    }
    lab.define("web2", &["raw"]);
    let text = format!(
        "[{pool}]\nuse_template = mine\n[{long}]\nuse_template = mine\n[{own}]\nuse_template = mine\n[template_mine]\n{FREQUENTLY}"
    );
    policed.setup.world.rig.write("sanoid.conf", text.as_bytes());
    let done = policed.run(1, &["--take-only"]);
    let taken = done["taken"].as_array().unwrap();
    let failure = |dataset: &str| {
        let of_it = |one: &&Value| {
            one["snapshots"][0]
                .as_str()
                .unwrap()
                .starts_with(&format!("zfs:{dataset}@"))
        };
        taken.iter().find(of_it).unwrap()["failure"].clone()
    };
    assert!(failure(&long).as_str().unwrap().contains("255 bytes"), "{done}");
    assert!(
        failure(&own).as_str().unwrap().contains("its machines have disks"),
        "{done}"
    );
    assert_eq!(failure(pool), Value::Null, "{done}");
    let whole = taken.iter().find(|one| one["failure"].is_null()).unwrap();
    assert_eq!(whole["incomplete_machines"], serde_json::json!(["web1"]));
    assert_eq!(whole["machines"].as_array().unwrap().len(), 2);
    assert_eq!(policed.names().len(), 1);
    let provider = policed.setup.file_system.provider();
    assert!(provider.snapshots(&own).unwrap().is_empty());
    policed.setup.world.assert_runs_and_is_clean();
}

/// A run that is stopped or times out reports what it has done.
#[test]
fn a_stopped_run_reports_what_it_has_done() {
    use std::os::unix::process::ExitStatusExt as _;
    let Some(policed) = Policed::new() else { return };
    let (rig, pool) = (&policed.setup.world.rig, &policed.pool);
    let late = format!("{pool}/late");
    zfs(&["create", &late]);
    policed.make("autosnap_2020-01-01_00:00:00_hourly");
    let (script, log) = policed.script("sleep 2");
    let text = format!(
        "[{pool}]\n{FREQUENTLY}\n[{late}]\n{FREQUENTLY}pre_snapshot_script = {script}\npost_snapshot_script = {script}\n"
    );
    rig.write("sanoid.conf", text.as_bytes());
    policed.wait_until_older();
    let uri = policed.setup.world.lab.uri();
    for (json, signal) in [
        (true, rustix::process::Signal::TERM),
        (false, rustix::process::Signal::INT),
    ] {
        let words = [&["cron", "sanoid.conf"][..], if json { &["--json"] } else { &[] }].concat();
        let child = rig.command(&at(&uri, &words)).spawn().unwrap();
        wait_until("the script begins", || log.exists());
        rustix::process::kill_process(rustix::process::Pid::from_child(&child), signal).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.signal(), Some(signal.as_raw()), "{output:?}");
        let message = String::from_utf8(output.stdout).unwrap();
        if json {
            let document: Value = serde_json::from_str(&message).unwrap();
            assert_eq!(document["exit_code"], 128 + signal.as_raw());
            let report = &document["report"];
            assert_eq!(report["interrupted"], true);
            assert_eq!(report["taken"][0]["failure"], Value::Null, "{report}");
            assert_eq!(report["taken"][1]["failure"], "interrupted", "{report}");
            assert_eq!(report["removed"], serde_json::json!([]));
        } else {
            assert!(message.contains("it was stopped before all was done"), "{message}");
        }
        // The script after the snapshot also gets the snapshots that were due and not taken.
        let called = std::fs::read_to_string(&log).unwrap();
        assert!(called.starts_with("pre ") && called.contains("\npost "), "{called}");
        std::fs::remove_file(&log).unwrap();
        assert_eq!(policed.names().len(), 2, "nothing was pruned");
    }
    let runs = rig.report(&["runs", "--job", "cron"]);
    assert_eq!(runs["runs"][0]["outcome"], "stopped", "{runs}");
    policed.run(0, &[]);
    assert_eq!(policed.names().len(), 1);
    assert_eq!(policed.setup.file_system.provider().snapshots(&late).unwrap().len(), 1);
}
