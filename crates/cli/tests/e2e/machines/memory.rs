//! Machines with their memory: a restored machine resumes with the memory and the disks of one point in time.

use holdfast_host::qemu::{Danger, QemuVersion};
use holdfast_host::qmp::QmpCommand;
use holdfast_host::{Hypervisor as _, MachineState};
use serde_json::{Value, json};

use super::{World, at};

/// Address in the machine's memory that its firmware does not use.
const PLACE: u64 = 8 << 20;

impl World {
    /// A machine that starts with `byte` in its memory.
    fn with_memory(byte: u8) -> Self {
        let world = Self::new();
        world.restart_with_memory(byte);
        world
    }

    /// Restarts the machine with `byte` in its memory.
    pub(super) fn restart_with_memory(&self, byte: u8) {
        let world = self;
        world.lab.virsh(&["destroy", "web1"]);
        world.put_memory(byte);
        let loader = format!(
            "<qemu:commandline><qemu:arg value='-device'/><qemu:arg value='loader,file={},addr={PLACE},force-raw=on'/>\
             </qemu:commandline></domain>",
            world.lab.path("pattern").display()
        );
        let xml = world.lab.virsh(&["dumpxml", "web1"]);
        let xml = xml.replace(
            "<domain type='qemu'",
            "<domain xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0' type='qemu'",
        );
        let file = world.lab.path("with-loader.xml");
        let text = xml.replace("</domain>", &loader);
        std::io::Write::write_all(&mut std::fs::File::create(&file).unwrap(), text.as_bytes()).unwrap();
        world.lab.virsh(&["define", file.to_str().unwrap()]);
        world.lab.virsh(&["start", "web1"]);
    }

    /// Sets the initial memory of machines that start from now on.
    pub(super) fn put_memory(&self, byte: u8) {
        let file = std::fs::File::create(self.lab.path("pattern")).unwrap();
        std::io::Write::write_all(&mut &file, &vec![byte; 65_536]).unwrap();
    }

    /// The content of a machine's memory at `PLACE`.
    pub(super) fn memory_of(&self, name: &str) -> String {
        let machine = self.lab.connect().machine(name).unwrap();
        let line = json!({ "command-line": format!("xp /1xb {PLACE:#x}") });
        let message = machine
            .monitor()
            .execute(&QmpCommand::new("human-monitor-command", line));
        message.unwrap().as_str().unwrap().trim().to_owned()
    }

    pub(super) fn state_of(&self, name: &str) -> MachineState {
        self.lab
            .connect()
            .machine(name)
            .unwrap()
            .describe()
            .unwrap()
            .summary
            .state
    }

    /// Whether the tested QEMU, which emulates the processor here, may lose writes to memory that is sent while the
    /// machine is running.
    fn may_lose_memory(&self) -> bool {
        let version = QemuVersion::query(self.machine().monitor()).unwrap();
        version.defect(Danger::MemoryOfRunningTcg).is_some()
    }

    fn back_up_with_live_memory(&self) -> Value {
        let uri = self.lab.uri();
        let is_lossy = self.may_lose_memory();
        let code = if is_lossy { 3 } else { 0 };
        let document = self
            .rig
            .json(code, &at(&uri, &["backup", "web1", "--with-memory=live"]));
        let warnings = document["warnings"].to_string();
        assert_eq!(warnings.contains("may be damaged: QEMU "), is_lossy, "{warnings}");
        document["report"]["machines"][0].clone()
    }

    fn back_up_with_memory(&self, words: &[&str]) -> Value {
        let uri = self.lab.uri();
        let report = self.rig.report(&at(&uri, &[&["backup", "web1"], words].concat()));
        report["machines"][0].clone()
    }
}

#[test]
fn a_machine_resumes_with_the_memory_and_the_disks_of_one_point_in_time() {
    let mut world = World::with_memory(7);
    world.write(0, 40, 65_536, 65_536);
    let first = world.back_up_with_live_memory();
    assert_eq!(
        (&first["consistency"], &first["method"]),
        (&json!("memory"), &json!("filter"))
    );
    let memory_bytes = first["memory_bytes"].as_u64().unwrap();
    assert!(
        memory_bytes >= 16 << 20 && first["paused_us"].as_u64().unwrap() > 0,
        "{first}"
    );
    world.assert_snapshot_is_right("with memory");
    world.assert_runs_and_is_clean();

    // The second backup is incremental, and unchanged memory is not stored again.
    world.write(1, 41, 0, 65_536);
    let second = world.back_up_with_memory(&["--with-memory=stopped"]);
    assert!(
        second["disks"]
            .as_array()
            .unwrap()
            .iter()
            .all(|disk| disk["is_incremental"] == true),
        "{second}"
    );
    assert!(
        second["stored_bytes"].as_u64() < first["stored_bytes"].as_u64(),
        "{second}"
    );
    world.assert_snapshot_is_right("with memory, again");
    let earlier = world.disks.clone();

    // A start of the machine gives another memory; a resume gives that of the snapshot.
    world.put_memory(9);
    world.write(0, 99, 0, 1 << 20);
    world.lab.virsh(&["destroy", "web1"]);
    world.lab.virsh(&["start", "web1"]);
    assert!(world.memory_of("web1").ends_with("0x09"));
    world.lab.virsh(&["destroy", "web1"]);
    let report = world.restore(&["--in-place", "--resume"]);
    let machine = &report["target_machine"];
    assert_eq!(
        (&machine["is_started"], &machine["is_resumed"]),
        (&json!(true), &json!(true))
    );
    assert!(
        machine["clock_behind_ms"].as_u64().is_some(),
        "the clock of the guest was not set: {machine}"
    );
    assert_eq!(world.state_of("web1"), MachineState::Running);
    assert!(world.memory_of("web1").ends_with("0x07"), "{}", world.memory_of("web1"));
    world.disks = earlier;
    world.back_up();
    world.assert_snapshot_is_right("it goes on with its disks");
    world.rig.ok(&["verify"]);
}

/// A QEMU that emulates processors may lose writes while its memory is read, so the machine is paused for it.
#[test]
fn memory_that_qemu_may_lose_is_read_while_the_machine_is_paused() {
    let world = World::with_memory(7);
    let uri = world.lab.uri();
    let output = world.rig.code(0, &at(&uri, &["backup", "web1", "--with-memory"]));
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        message.contains("web1 is paused while its memory is read: QEMU "),
        world.may_lose_memory(),
        "{message}"
    );
    let output = world
        .rig
        .code(0, &at(&uri, &["backup", "web1", "--with-memory=stopped"]));
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(
        !message.contains("is paused while"),
        "a requested pause is reported: {message}"
    );
    world.assert_runs_and_is_clean();
}

/// A copy in another repository has everything of a machine, and backups there continue from it.
#[test]
fn a_copy_of_a_machine_resumes_with_its_memory() {
    let mut world = World::with_memory(7);
    world.write(0, 40, 65_536, 65_536);
    world.back_up_with_memory(&["--with-memory"]);
    world.rig.ok(&["init", "--no-encryption", "-r", "far"]);
    world.rig.ok(&["copy", "--to", "far", "--all"]);
    let disks = |repository: &str| {
        let report = world.rig.report(&["show", "web1", "-r", repository]);
        report["snapshot"]["disks"].clone()
    };
    assert_eq!(disks("repo"), disks("far"));
    world.assert_snapshot_in("far", "copied");
    let repository = world.rig.path("repo");
    std::fs::remove_dir_all(&repository).unwrap();

    world.put_memory(9);
    let uri = world.lab.uri();
    let words = at(&uri, &["restore", "web1", "--to-machine", "--resume", "-r", "far"]);
    world.rig.json(3, &words);
    assert!(world.memory_of("web1-restored").ends_with("0x07"));
    world.lab.virsh(&["destroy", "web1-restored"]);
    world.write(1, 41, 0, 65_536);
    world.rig.ok(&at(&uri, &["backup", "web1", "-r", "far"]));
    world.assert_snapshot_in("far", "backed up where it was copied to");
    world.rig.ok(&["verify", "-r", "far"]);
    world.assert_holds("web1");
}

/// The new machine runs beside the old one, which is not affected.
#[test]
fn a_new_machine_is_resumed_beside_the_old_one() {
    let world = World::with_memory(7);
    world.lab.virsh(&["suspend", "web1"]);
    world.back_up_with_memory(&["--with-memory"]);
    assert_eq!(
        world.state_of("web1"),
        MachineState::Paused,
        "a paused machine stays paused"
    );
    world.lab.virsh(&["resume", "web1"]);
    world.put_memory(9);
    // Warnings: the machine has QEMU arguments of its own, which may conflict with those of the other machine.
    let uri = world.lab.uri();
    let restore = |words: &[&str]| {
        let words = [&["restore", "web1", "--to-machine", "--resume"], words].concat();
        world.rig.json(3, &at(&uri, &words))["report"].clone()
    };
    let plan = restore(&["--dry-run"]);
    assert!(!plan["notes"].to_string().contains("not restored"), "{plan}");
    assert_eq!(world.machines(), ["web1"]);
    restore(&[]);
    assert_eq!(world.machines(), ["web1", "web1-restored"]);
    assert!(world.memory_of("web1-restored").ends_with("0x07"));
    assert!(world.memory_of("web1").ends_with("0x07"));
    assert_eq!(world.state_of("web1"), MachineState::Running);
    world.lab.virsh(&["destroy", "web1-restored"]);
    world.assert_holds("web1-restored");
}

/// The guest has an outdated cache of the disk that is not in the snapshot, and would write it over the newer content.
#[test]
fn memory_is_not_resumed_without_all_disks_that_its_guest_writes() {
    let world = World::with_memory(7);
    let uri = world.lab.uri();
    let words = at(&uri, &["backup", "web1", "--with-memory", "--exclude", "vdb"]);
    let report = world.rig.json(3, &words);
    let warnings = report["warnings"].to_string();
    assert!(
        warnings.contains("cannot resume from the memory") && warnings.contains("vdb"),
        "{report}"
    );
    let before = world.files();
    world.lab.virsh(&["destroy", "web1"]);
    for words in [&["--resume"][..], &["--resume", "--in-place"]] {
        let (kind, text) = world.refused(1, words);
        assert!(
            kind == "refused" && text.contains("vdb is not in the snapshot"),
            "{kind}: {text}"
        );
    }
    assert_eq!(world.files(), before);
    world.assert_holds("web1");
}

#[test]
fn a_missing_memory_is_reported() {
    let world = World::new();
    world.back_up();
    let (kind, text) = world.refused(1, &["--resume"]);
    assert!(kind == "refused" && text.contains("--with-memory"), "{kind}: {text}");
    assert_eq!(world.machines(), ["web1"]);
    let uri = world.lab.uri();
    let words = at(&uri, &["backup", "web1", "--with-memory", "--quiesce", "require"]);
    let (_, text) = world.rig.error(2, &words);
    assert!(text.contains("do not go together"), "{text}");
    // A folder without space for the memory: the backup fails, and the machine keeps running.
    let words = at(&uri, &["backup", "web1", "--with-memory", "--scratch", "/proc"]);
    let (_, text) = world.rig.error(1, &words);
    assert!(text.contains("/proc"), "{text}");
    world.assert_runs_and_is_clean();
}
