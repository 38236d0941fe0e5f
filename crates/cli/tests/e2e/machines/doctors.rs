//! Real damage of every kind: the doctor reports it and changes nothing, `--fix` repairs it, and then no finding is
//! left.

use std::process::{Child, Command, Output};
use std::sync::{PoisonError, RwLock, RwLockWriteGuard};
use std::time::Duration;

use holdfast_block::Clock as _;
use holdfast_host::MachineState;
use holdfast_host::qemu::{disks, runs_in};
use holdfast_host::qmp::QmpCommand;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::{World, at};
use holdfast_test_kit::run;

/// Taken by each doctor that repairs. A doctor finds leftovers of other tests by their processes, so a test whose leftover
/// could be removed by the doctor of another test takes it for writing.
static REPAIRS: RwLock<()> = RwLock::new(());

impl World {
    pub(super) fn doctor(&self, code: i32, words: &[&str]) -> Value {
        Self::report_of(code, &self.doctor_answers(words))
    }

    /// Repairs what a killed program has left, until nothing is found: on a loaded host, a tool that it had started may still
    /// be at work, or keep a dataset busy.
    pub(super) fn repair_after_kill(&self) -> Value {
        let start = self.lab.clock.now();
        loop {
            self.doctor_answers(&["--fix"]);
            let after = self.doctor_answers(&[]);
            let waited = self.lab.clock.now().saturating_sub(start);
            if after.status.success() || waited > Duration::from_secs(60) {
                return Self::report_of(0, &after);
            }
            self.lab.clock.sleep(Duration::from_millis(500));
        }
    }

    /// Prevents repairs by the doctors of other tests, as long as the result lives.
    pub(super) fn other_doctors_wait() -> RwLockWriteGuard<'static, ()> {
        REPAIRS.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Repairs while the doctors of other tests wait.
    pub(super) fn repair_alone(&self, _turn: RwLockWriteGuard<'static, ()>) -> Value {
        Self::report_of(0, &self.doctor_command(&["--fix"]).output().unwrap())
    }

    fn report_of(code: i32, output: &Output) -> Value {
        let message = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{message}");
        serde_json::from_slice::<Value>(&output.stdout).unwrap()["report"].clone()
    }

    /// Runs the doctor with a runtime directory of its own, because other tests leave sockets as well.
    ///
    /// A process of another test, whose machine the doctor does not know, prevents the removal of a run. As the doctor
    /// advises, it is run again when that process has ended. The same is done while it finds an instant restore of
    /// another test.
    pub(super) fn doctor_answers(&self, words: &[&str]) -> Output {
        let start = self.lab.clock.now();
        loop {
            let is_repair = words.contains(&"--fix");
            let turn = is_repair.then(|| REPAIRS.read().unwrap_or_else(PoisonError::into_inner));
            let output = self.doctor_command(words).output().unwrap();
            drop(turn);
            let depends_on_others = String::from_utf8_lossy(&output.stdout).contains("it may belong to process")
                || self.finds_restore_of_another_test(&output.stdout);
            let waited = self.lab.clock.now().saturating_sub(start);
            if !depends_on_others || waited > Duration::from_secs(120) {
                return output;
            }
            self.lab.clock.sleep(Duration::from_millis(200));
        }
    }

    fn finds_restore_of_another_test(&self, document: &[u8]) -> bool {
        let document: Value = serde_json::from_slice(document).unwrap_or_default();
        let findings = document["report"]["findings"].as_array().into_iter().flatten();
        let own = self.lab.folder.path().to_str().unwrap();
        findings
            .filter(|finding| finding["kind"] == "instant-restore")
            .filter_map(|finding| finding["what"].as_str())
            .any(|what| what.starts_with("/tmp/hf") && !what.starts_with(own))
    }

    fn doctor_command(&self, words: &[&str]) -> Command {
        let uri = self.lab.uri();
        let words = [&["doctor", "--scratch", "scratch", "--json"], words].concat();
        std::fs::create_dir_all(self.rig.path("scratch")).unwrap();
        std::fs::create_dir_all(self.rig.path("run")).unwrap();
        let mut command = self.rig.command(&at(&uri, &words));
        command.env("XDG_RUNTIME_DIR", self.rig.path("run"));
        command
    }

    /// Asserts that two runs of the doctor find the same and change nothing, that `--fix` repairs it, and that the next
    /// run finds nothing.
    fn assert_repairs(&self, kinds: &[&str], fix: &[&str]) -> Value {
        let first = self.doctor(3, &[]);
        assert_eq!(found(&first), kinds, "{first:#}");
        assert_eq!(self.doctor(3, &[])["findings"], first["findings"]);
        let fixed = self.doctor(0, &[&["--fix"], fix].concat());
        assert!(
            fixed["findings"]
                .as_array()
                .unwrap()
                .iter()
                .all(|one| one["repaired"].is_string())
        );
        let after = self.doctor(0, &[]);
        assert_eq!(found(&after), [""; 0], "{after:#}");
        self.assert_runs_and_is_clean();
        fixed
    }

    fn begin_backup(&self) -> Child {
        let uri = self.lab.uri();
        std::fs::create_dir_all(self.rig.path("run")).unwrap();
        let mut command = self.rig.command(&at(&uri, &["backup", "web1"]));
        command.env("XDG_RUNTIME_DIR", self.rig.path("run")).spawn().unwrap()
    }

    pub(super) fn journal(&self) -> Vec<Value> {
        let folder = self.rig.path("state/holdfast/runs");
        let names = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let notes = names.filter(|entry| entry.path().extension().is_some_and(|ending| ending == "json"));
        notes
            .filter_map(|entry| serde_json::from_slice(&std::fs::read(entry.path()).ok()?).ok())
            .collect()
    }

    /// Kills a backup and its watchdog while its filters exist in QEMU.
    fn leave_filters(&self) {
        for _ in 0..40 {
            let mut child = self.begin_backup();
            let is_dead_with_filters = loop {
                let is_reading = self.journal().iter().any(|note| note["phase"] == "reading");
                if is_reading {
                    kill_with_watchdog(&mut child);
                    break true;
                }
                if child.try_wait().unwrap().is_some() {
                    break false;
                }
            };
            if is_dead_with_filters && !runs_in(self.machine().monitor()).unwrap().is_empty() {
                return;
            }
            self.doctor(0, &["--fix"]);
        }
        panic!("no backup was killed in time");
    }
}

pub(super) fn found(report: &Value) -> Vec<&str> {
    let findings = report["findings"].as_array().unwrap().iter();
    findings.map(|finding| finding["kind"].as_str().unwrap()).collect()
}

/// Kills the watchdog first, before it can notice the death of its backup.
pub(super) fn kill_with_watchdog(child: &mut Child) {
    let id = child.id();
    let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
    for child in children.split_whitespace() {
        kill_process(Pid::from_raw(child.parse().unwrap()).unwrap(), Signal::KILL).ok();
    }
    kill_process(Pid::from_child(child), Signal::KILL).ok();
    child.wait().unwrap();
}

/// The report of `doctor` about a dead backup.
pub(super) fn report_of_a_dead_backup() -> Value {
    let world = World::new();
    world.leave_filters();
    world.doctor(3, &[])
}

#[test]
fn filters_of_a_backup_killed_with_its_watchdog_are_removed() {
    let mut world = World::new();
    world.back_up();
    assert_eq!(found(&world.doctor(0, &[])), [""; 0]);
    assert!(world.journal().is_empty());
    world.leave_filters();
    let report = world.doctor(3, &[]);
    let remains = &report["findings"][0];
    assert_eq!(
        (&remains["kind"], &remains["is_danger"]),
        (&"remains".into(), &false.into())
    );
    assert!(remains["since"].is_string() && remains["fix"].is_string());
    world.write(0, 60, 0, 65_536);
    let left = runs_in(world.machine().monitor()).unwrap();
    assert!(!left.is_empty());
    let first = world.doctor(3, &[]);
    assert!(
        found(&first).contains(&"remains") && found(&first).contains(&"dead-run"),
        "{first:#}"
    );
    assert_eq!(runs_in(world.machine().monitor()).unwrap(), left);
    world.doctor(0, &["--fix"]);
    assert_eq!(found(&world.doctor(0, &[])), [""; 0]);
    world.assert_runs_and_is_clean();
    assert!(world.journal().is_empty() && world.rig.names("run").is_empty());
    world.back_up();
    world.assert_snapshot_is_right("after the doctor");
    world.rig.ok(&["verify"]);
}

/// The note of a dead backup is changed to a phase in which the backup had paused the machine.
#[test]
fn only_a_machine_that_a_dead_backup_paused_is_resumed() {
    let world = World::new();
    world.lab.virsh(&["suspend", "web1"]);
    let report = world.doctor(0, &["--fix"]);
    assert!(report["notes"][0].as_str().unwrap().contains("is paused"), "{report:#}");
    assert_eq!(world.machine().describe().unwrap().summary.state, MachineState::Paused);
    world.lab.virsh(&["resume", "web1"]);
    // A note of a backup that died in that phase, and a paused machine.
    world.leave_filters();
    let folder = world.rig.path("state/holdfast/runs");
    let note = std::fs::read_dir(&folder).unwrap().next().unwrap().unwrap().path();
    let text = std::fs::read_to_string(&note).unwrap();
    let name = note.file_name().unwrap().to_str().unwrap();
    world.rig.write(
        &format!("state/holdfast/runs/{name}"),
        text.replace("\"reading\"", "\"freezing\"").as_bytes(),
    );
    world.lab.virsh(&["suspend", "web1"]);
    let report = world.doctor(3, &[]);
    let paused = &report["findings"][0];
    assert_eq!(
        (&paused["kind"], &paused["is_danger"]),
        (&"paused".into(), &true.into()),
        "{report:#}"
    );
    assert_eq!(world.machine().describe().unwrap().summary.state, MachineState::Paused);
    world.doctor(0, &["--fix"]);
    assert_eq!(found(&world.doctor(0, &[])), [""; 0]);
    world.assert_runs_and_is_clean();
}

#[test]
fn a_forgotten_overlay_is_committed_while_the_machine_runs() {
    for fix in [&[][..], &["--delete-overlays"]] {
        let mut world = World::new();
        let snapshot = ["snapshot-create-as", "web1", "old", "--disk-only", "--no-metadata"];
        world
            .lab
            .virsh(&[&snapshot[..], &["--diskspec", "vdb,snapshot=no"]].concat());
        world.write(0, 70, 1 << 20, 1 << 20);
        let overlay = world.lab.path("web1-a.old");
        assert!(overlay.exists());
        let fixed = world.assert_repairs(&["overlay"], fix);
        assert!(
            fixed["findings"][0]["repaired"]
                .as_str()
                .unwrap()
                .contains("committed disk vda into")
        );
        assert_eq!(overlay.exists(), fix.is_empty());
        let xml = world.lab.virsh(&["dumpxml", "web1"]);
        assert!(!xml.contains("web1-a.old"), "{xml}");
        world.write(0, 71, 4 << 20, 1 << 20);
        world.back_up();
        world.assert_snapshot_is_right("after the commit");
        world.lab.virsh(&["destroy", "web1"]);
        world.lab.virsh(&["start", "web1"]);
        world.back_up();
        world.assert_snapshot_is_right("started from its base");
    }
}

#[test]
fn snapshots_of_libvirt_and_templates_are_left_alone() {
    let world = World::new();
    world.lab.virsh(&[
        "snapshot-create-as",
        "web1",
        "kept",
        "--disk-only",
        "--diskspec",
        "vdb,snapshot=no",
    ]);
    assert_eq!(found(&world.doctor(0, &["--fix"])), [""; 0]);
    assert!(world.lab.virsh(&["dumpxml", "web1"]).contains("web1-a.kept"));
    // Two machines with one base, one of them shut off: a template, whatever the name of the overlay.
    world.lab.define("db1", &["qcow2"]);
    let (base, image) = (world.lab.path("web1-a"), world.lab.path("db1-a"));
    std::fs::remove_file(&image).unwrap();
    let words = [
        "create",
        "-q",
        "-f",
        "qcow2",
        "-F",
        "qcow2",
        "-b",
        base.to_str().unwrap(),
    ];
    run("qemu-img", &[&words[..], &[image.to_str().unwrap()]].concat());
    world.lab.virsh(&["snapshot-delete", "web1", "kept", "--metadata"]);
    let report = world.doctor(0, &["--fix"]);
    assert!(report["notes"].to_string().contains("a template"), "{report:#}");
    assert!(world.lab.virsh(&["dumpxml", "web1"]).contains("web1-a.kept"));
}

#[test]
fn bitmaps_of_a_killed_qemu_and_waiting_jobs_are_reported() {
    let world = World::new();
    world.back_up();
    // A stored bitmap is inconsistent after QEMU was killed while using it.
    world.lab.virsh(&["managedsave", "web1"]);
    world.lab.virsh(&["start", "web1"]);
    assert_eq!(found(&world.doctor(0, &[])), [""; 0]);
    kill_qemu(&world);
    world.lab.virsh(&["start", "web1"]);
    let is_bad = disks(world.machine().monitor())
        .unwrap()
        .iter()
        .any(|disk| disk.bitmaps.iter().any(|bitmap| bitmap.is_inconsistent));
    assert!(is_bad);
    world.assert_repairs(&["bitmap"], &[]);
    let copy = world.lab.path("copy");
    let copy = copy.to_str().unwrap();
    world
        .lab
        .virsh(&["blockcopy", "web1", "vda", copy, "--transient-job", "--wait"]);
    let report = world.doctor(3, &["--fix"]);
    assert_eq!(found(&report), ["job"], "{report:#}");
    let advice = report["findings"][0]["advice"].as_str().unwrap();
    assert!(advice.contains("blockjob web1 vda --pivot"), "{advice}");
    world.lab.virsh(&["blockjob", "web1", "vda", "--abort"]);
    assert_eq!(found(&world.doctor(0, &[])), [""; 0]);
}

#[test]
fn leftovers_in_folders_are_deleted_unless_they_are_in_use() {
    let world = World::new();
    assert_eq!(found(&world.doctor(0, &[])), [""; 0]);
    // Control sockets of servers: of a killed one, and of a running one.
    for folder in ["run/holdfast-served", "run/holdfast-serving"] {
        std::fs::create_dir_all(world.rig.path(folder)).unwrap();
    }
    let serve = |folder: &str| std::os::unix::net::UnixListener::bind(world.rig.path(folder).join("control")).unwrap();
    drop(serve("run/holdfast-served"));
    let _serving = serve("run/holdfast-serving");
    for folder in ["run/holdfast-dead", "run/holdfast-alive", "run/other"] {
        std::fs::create_dir_all(world.rig.path(folder)).unwrap();
    }
    let bind = |folder: &str| std::os::unix::net::UnixListener::bind(world.rig.path(folder).join("nbd")).unwrap();
    drop(bind("run/holdfast-dead"));
    let _alive = bind("run/holdfast-alive");
    // Pipes of restores with memory: of a killed one, and of a running one.
    for folder in ["run/holdfast-pipe", "run/holdfast-pipe-alive"] {
        std::fs::create_dir_all(world.rig.path(folder)).unwrap();
        let pipe = world.rig.path(folder).join("memory");
        rustix::fs::mkfifoat(rustix::fs::CWD, pipe, rustix::fs::Mode::RUSR).unwrap();
    }
    let live_pipe = std::fs::File::open(world.rig.path("run/holdfast-pipe-alive")).unwrap();
    flock(&live_pipe, FlockOperation::LockShared).unwrap();
    world.rig.write("scratch/holdfast-memory-old/memory", b"pages");
    world.rig.write("scratch/holdfast-memory-used/memory", b"pages");
    world.rig.write("scratch/holdfast-memory-new/memory", b"pages");
    let _used = std::fs::File::open(world.rig.path("scratch/holdfast-memory-used/memory")).unwrap();
    let long_ago = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
    for folder in ["old", "used"] {
        let folder = std::fs::File::open(world.rig.path(&format!("scratch/holdfast-memory-{folder}"))).unwrap();
        folder.set_modified(long_ago).unwrap();
    }
    let half = world.lab.path(".web1-a.0123abcd.partial");
    std::io::Write::write_all(&mut std::fs::File::create(&half).unwrap(), b"half").unwrap();
    world.rig.write("state/holdfast/runs/0000000a.partial", b"{");
    let note = std::fs::File::open(world.rig.path("state/holdfast/runs/0000000a.partial")).unwrap();
    note.set_modified(long_ago).unwrap();
    world.assert_repairs(&["leftover"; 6], &[]);
    assert_eq!(world.rig.names("state/holdfast/runs"), [""; 0]);
    assert_eq!(
        world.rig.names("run"),
        ["holdfast-alive", "holdfast-pipe-alive", "holdfast-serving", "other"]
    );
    assert_eq!(
        world.rig.names("scratch"),
        ["holdfast-memory-new", "holdfast-memory-used"]
    );
    assert!(!half.exists());
}

/// Without arguments, the doctor also examines the pools of holdfast.toml.
#[test]
fn pools_of_a_configuration_are_examined() {
    let world = World::new();
    let text = format!(
        "version = 1\n[pools.away]\naddress = \"127.0.0.1:1\"\npassword_file = \"{}\"\ncertificate = \"{}00\"\n[pools.secret]\n",
        world.rig.path("password").display(),
        "00:".repeat(31)
    );
    world.rig.write("password", b"guess\n");
    world.rig.write("holdfast.toml", text.as_bytes());
    let mut command = world.doctor_command(&[]);
    let output = command.env("HOLDFAST_CONFIG", "holdfast.toml").output().unwrap();
    let report = serde_json::from_slice::<Value>(&output.stdout).unwrap()["report"].clone();
    assert_eq!(found(&report), ["unreachable"], "{report:#}");
    assert_eq!(report["findings"][0]["machine"], "xen://away");
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(message.contains("xen://secret is not examined"), "{message}");
}

#[test]
fn an_unneeded_bitmap_is_removed_unless_another_program_made_it() {
    let world = World::new();
    world.back_up();
    let disk = disks(world.machine().monitor()).unwrap().remove(0);
    let own_bitmap = disk.bitmaps[0].name.clone();
    let (kept, _) = own_bitmap.rsplit_once('-').unwrap();
    let obsolete = format!("{kept}-00000000");
    for name in [&obsolete[..], "nightly"] {
        let arguments = json!({ "node": disk.node, "name": name });
        let command = QmpCommand::new("block-dirty-bitmap-add", arguments);
        world.machine().monitor().execute(&command).unwrap();
    }
    world.assert_repairs(&["bitmap"], &[]);
    let mut left: Vec<String> = disks(world.machine().monitor()).unwrap()[0]
        .bitmaps
        .iter()
        .map(|bitmap| bitmap.name.clone())
        .collect();
    left.sort();
    assert_eq!(left, [own_bitmap, "nightly".to_owned()]);
}

fn kill_qemu(world: &World) {
    let folder = world.lab.path("libvirt");
    let found = run("find", &[folder.to_str().unwrap(), "-name", "web1.pid"]);
    let pid = std::fs::read_to_string(found.lines().next().unwrap()).unwrap();
    kill_process(Pid::from_raw(pid.trim().parse().unwrap()).unwrap(), Signal::KILL).unwrap();
    while world.lab.virsh(&["domstate", "web1"]).trim() != "shut off" {
        world.lab.clock.sleep(Duration::from_millis(50));
    }
}
