//! Backups of a QEMU without libvirt, through its monitor socket.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixListener;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use holdfast_block::{Clock as _, SeededRandom, SystemClock};
use holdfast_host::qemu::{disks, runs_in};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::rig::Rig;
use holdfast_test_kit::qemu::{DISK_BYTES, QemuLab};

/// How long the watchdog may take, which waits ten seconds before it resumes a paused machine.
const PATIENCE: Duration = Duration::from_secs(40);
/// Number of backups that are killed.
const KILLS: usize = 12;

/// A machine with two disks, their expected content, and a second monitor for backups.
pub(super) struct Bare {
    pub(super) lab: QemuLab,
    pub(super) rig: Rig,
    pub(super) source: String,
    pub(super) disks: [Vec<u8>; 2],
}

impl Bare {
    pub(super) fn new(words: &[&str]) -> Self {
        Self::prepared(words, |_| ())
    }

    /// A machine in a folder that `prepare` sets up.
    pub(super) fn prepared(words: &[&str], prepare: impl FnOnce(&std::path::Path)) -> Self {
        let monitor = ["-name", "web1", "-qmp", "unix:{}/web1.qmp,server=on,wait=off"];
        let lab = QemuLab::prepared(&["qcow2", "raw"], &[&monitor, words].concat(), prepare);
        let length = usize::try_from(DISK_BYTES).unwrap();
        Self {
            source: format!("qmp:{}", lab.path("web1.qmp").display()),
            lab,
            rig: Rig::new(),
            disks: [vec![1; length], vec![2; length]],
        }
    }

    pub(super) fn write(&mut self, disk: usize, byte: u8, offset: usize, length: usize) {
        self.lab.guest_writes(disk, byte, offset as u64, length as u64);
        self.disks[disk][offset..offset + length].fill(byte);
    }

    pub(super) fn back_up(&self, words: &[&str]) -> Value {
        let report = self.rig.report(&[&["backup", &self.source], words].concat());
        report["machines"][0].clone()
    }

    pub(super) fn assert_snapshot_is_right(&self, what: &str) {
        for (target, bytes) in ["disk0", "disk1"].iter().zip(&self.disks) {
            let restored = format!("{target}.raw");
            let name = format!("web1@latest:{target}");
            self.rig.ok(&["restore", "--force", &name, &restored]);
            let restored = self.rig.read(&restored);
            assert_eq!(restored.len(), bytes.len(), "{what}: {target}");
            let other = (0..bytes.len()).find(|at| restored[*at] != bytes[*at]);
            let other = other.map(|at| (at, restored[at], bytes[at]));
            assert_eq!(other, None, "{what}: {target} at an offset, restored and expected");
        }
    }

    /// Waits until the machine is running without remains of a backup.
    pub(super) fn wait_until_clean(&self, what: &str) -> Duration {
        let start = self.lab.clock.now();
        loop {
            let left = runs_in(&*self.lab.monitor).unwrap();
            let waited = self.lab.clock.now().saturating_sub(start);
            if self.lab.is_running() && left.is_empty() {
                return waited;
            }
            assert!(waited < PATIENCE, "{what}: {left:?} after {waited:?}");
            self.lab.clock.sleep(Duration::from_millis(50));
        }
    }
}

/// Plays the guest agent at its socket, and returns the commands that it receives.
pub(super) fn play_agent(path: &std::path::Path) -> Receiver<String> {
    play_agent_with_status("thawed", path)
}

/// Plays the agent of a guest whose file systems have this freeze status.
fn play_agent_with_status(mut status: &'static str, path: &std::path::Path) -> Receiver<String> {
    std::fs::remove_file(path).unwrap();
    let listener = UnixListener::bind(path).unwrap();
    let (send, agent_commands) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let mut answers = stream.try_clone().unwrap();
            for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
                let line = line.strip_prefix(&[0xff]).unwrap_or(&line);
                let question: Value = serde_json::from_slice(line).unwrap();
                let command = question["execute"].as_str().unwrap().to_owned();
                let answer = match (question.pointer("/arguments/id"), &command[..]) {
                    (Some(number), _) => {
                        // The client may be dead.
                        answers.write_all(&[0xff]).ok();
                        number.clone()
                    }
                    (None, "guest-fsfreeze-status") => status.into(),
                    (None, other) => {
                        status = if other.ends_with("freeze") { "frozen" } else { "thawed" };
                        1.into()
                    }
                };
                // The client may have disconnected.
                writeln!(answers, "{}", serde_json::json!({ "return": answer })).ok();
                if command != "guest-sync-delimited" && command != "guest-fsfreeze-status" {
                    send.send(command).ok();
                }
            }
        }
    });
    agent_commands
}

pub(super) const AGENT: [&str; 6] = [
    "-device",
    "virtio-serial",
    "-chardev",
    "socket,path={}/agent,server=on,wait=off,id=channel",
    "-device",
    "virtserialport,chardev=channel,name=org.qemu.guest_agent.0",
];

#[test]
fn a_bare_qemu_is_backed_up_completely_and_then_incrementally() {
    let mut bare = Bare::new(&AGENT);
    let agent_commands = play_agent(&bare.lab.path("agent"));
    let first = bare.back_up(&["--quiesce", "require"]);
    assert_eq!(
        (&first["method"], &first["consistency"]),
        (&"filter".into(), &"file system".into())
    );
    assert!(
        first["paused_us"] == 0 && first["frozen_us"].as_u64().unwrap() > 0,
        "{first}"
    );
    assert_eq!(first["snapshot"]["machine"], "web1");
    let agent_commands: Vec<String> = agent_commands.try_iter().collect();
    assert_eq!(agent_commands, ["guest-fsfreeze-freeze", "guest-fsfreeze-thaw"]);
    bare.assert_snapshot_is_right("first");
    bare.wait_until_clean("first");

    bare.write(0, 50, 1 << 20, 65_536);
    bare.write(1, 51, 3 << 20, 512);
    let second = bare.back_up(&[]);
    for disk in second["disks"].as_array().unwrap() {
        let reported = (&disk["is_incremental"], &disk["dirty_bytes"]);
        assert_eq!(reported, (&true.into(), &65_536.into()), "{disk}");
    }
    bare.assert_snapshot_is_right("second");
    bare.rig.ok(&["restore", "web1:qemu-command-line.json", "words.json"]);
    let words: Vec<String> = serde_json::from_slice(&bare.rig.read("words.json")).unwrap();
    assert!(
        words.contains(&"virtio-blk-pci,drive=format0,id=disk0".to_owned()),
        "{words:?}"
    );
    bare.rig.ok(&["restore", "web1:machine.json", "machine.json"]);
    let machine = String::from_utf8(bare.rig.read("machine.json")).unwrap();
    assert!(machine.contains("disk0") && !machine.contains("hf-"), "{machine}");
    bare.rig.ok(&["verify"]);
}

/// Another program has frozen the guest for its own snapshot: thawing the guest would make that snapshot inconsistent.
#[test]
fn a_guest_frozen_by_another_program_stays_frozen() {
    let bare = Bare::new(&AGENT);
    let agent_commands = play_agent_with_status("frozen", &bare.lab.path("agent"));
    let words = ["backup", &bare.source, "--quiesce", "require"];
    let (_, text) = bare.rig.error(1, &words);
    assert!(text.contains("another process has frozen them"), "{text}");
    let report = bare.rig.json(3, &["backup", &bare.source]);
    assert_eq!(report["report"]["machines"][0]["consistency"], "crash", "{report}");
    assert_eq!(agent_commands.try_iter().collect::<Vec<_>>(), Vec::<String>::new());
    bare.wait_until_clean("it was only looked at");
}

#[test]
fn a_backup_killed_at_any_moment_leaves_a_clean_running_machine() {
    let mut bare = Bare::new(&AGENT);
    let agent_commands = play_agent(&bare.lab.path("agent"));
    let clock = SystemClock::new();
    let mut random = SeededRandom::new(3);
    let start = clock.now();
    bare.back_up(&[]);
    let whole_us = u64::try_from(clock.now().saturating_sub(start).as_micros()).unwrap();
    for round in 0..KILLS {
        bare.write(round % 2, u8::try_from(100 + round).unwrap(), 65_536 * round, 65_536);
        let mut child = bare.rig.command(&["backup", &bare.source]).spawn().unwrap();
        clock.sleep(Duration::from_micros(random.below(whole_us)));
        kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
        child.wait().unwrap();
        bare.wait_until_clean(&format!("round {round}"));
        // If the backup had no objects in QEMU yet, the watchdog may still be thawing the guest.
        let mut received: Vec<String> = agent_commands.try_iter().collect();
        while received
            .iter()
            .rev()
            .find(|command| command.starts_with("guest-fsfreeze"))
            .is_some_and(|last| last.ends_with("freeze"))
        {
            let next = agent_commands.recv_timeout(PATIENCE);
            received.push(next.unwrap_or_else(|_| panic!("round {round}: {received:?}, and the guest stays frozen")));
        }
        if round % 4 == 3 {
            bare.back_up(&[]);
            bare.assert_snapshot_is_right(&format!("round {round}"));
        }
    }
    bare.rig.ok(&["verify"]);
}

/// Firmware variables are read while the machine is paused. Here the backup is stopped (SIGSTOP) at that time, like one
/// that waits for an unavailable server. The backup occupies the monitor, so the watchdog ends the backup.
#[test]
fn the_watchdog_ends_a_backup_that_hangs_during_a_pause() {
    let folder = tempfile::tempdir().unwrap();
    let variables = folder.path().join("variables");
    std::fs::File::create(&variables).unwrap().set_len(1 << 18).unwrap();
    let flash = format!("if=pflash,format=raw,file={}", variables.display());
    let bare = Bare::new(&["-drive", &flash]);
    let report = bare.back_up(&[]);
    assert!(report["snapshot"].to_string().contains("nvram"), "{report}");
    // The pause is short, and the signal may come too late.
    let mut child = loop {
        let mut child = bare.rig.command(&["backup", &bare.source]).spawn().unwrap();
        while bare.lab.is_running() && child.try_wait().unwrap().is_none() {}
        if child.try_wait().unwrap().is_none() {
            kill_process(Pid::from_child(&child), Signal::STOP).unwrap();
            if !bare.lab.is_running() {
                break child;
            }
            kill_process(Pid::from_child(&child), Signal::CONT).unwrap();
            child.wait().unwrap();
        }
    };
    let paused = bare.wait_until_clean("hanging");
    assert!(paused > Duration::from_secs(5), "{paused:?}");
    assert!(!child.wait().unwrap().success());
}

/// The memory is restored as a stream for QEMU, beside the disks; another QEMU resumes from both.
#[test]
fn a_machine_is_backed_up_with_its_memory_and_another_qemu_resumes_it() {
    let pattern = Rig::empty();
    let bytes: Vec<u8> = (0..2 << 20)
        .map(|at: u32| u8::try_from(at / 4096 % 251).unwrap())
        .collect();
    pattern.write("pattern", &bytes);
    let loader = format!(
        "loader,file={},addr=0x800000,force-raw=on",
        pattern.path("pattern").display()
    );
    let mut bare = Bare::new(&["-device", &loader]);
    bare.write(1, 77, 65_536, 4096);
    for mode in ["--with-memory=stopped", "--with-memory"] {
        let report = bare.back_up(&[mode]);
        assert_eq!(report["consistency"], "memory");
        assert!(report["memory_bytes"].as_u64().unwrap() >= 16 << 20, "{report:#}");
        bare.wait_until_clean(mode);
        bare.assert_snapshot_is_right(mode);
    }
    std::fs::create_dir(bare.rig.path("whole")).unwrap();
    bare.rig.ok(&["restore", "web1", "whole"]);
    assert_eq!(
        bare.rig.names("whole"),
        [
            "disk0.raw",
            "disk1.raw",
            "machine.json",
            "memory.qemu",
            "qemu-command-line.json"
        ]
    );
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&bare.rig.path("whole/memory.qemu").metadata().unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    // An existing file is not overwritten.
    let (kind, message) = bare.rig.error(1, &["restore", "web1", "whole"]);
    assert_eq!(kind, "exists", "{message}");

    let other = QemuLab::with(&["raw", "raw"], &["-S", "-incoming", "defer"]);
    for (number, disk) in ["disk0", "disk1"].iter().enumerate() {
        let image = std::fs::File::options().write(true).open(other.path(disk)).unwrap();
        let restored = bare.rig.read(&format!("whole/{disk}.raw"));
        assert!(restored == bare.disks[number]);
        std::os::unix::fs::FileExt::write_all_at(&image, &restored, 0).unwrap();
    }
    let stream = format!("exec:cat {}", bare.rig.path("whole/memory.qemu").display());
    other.execute("migrate-incoming", serde_json::json!({ "uri": stream }));
    while other.execute("query-status", Value::Null)["status"] == "inmigrate" {
        other.clock.sleep(Duration::from_millis(20));
    }
    other.execute("cont", Value::Null);
    assert!(other.is_running());
    let file = other.path("memory");
    let arguments = serde_json::json!({ "val": 8 << 20, "size": 2 << 20, "filename": file.to_str().unwrap() });
    other.execute("pmemsave", arguments);
    assert!(std::fs::read(file).unwrap() == bytes, "the memory differs");
}

#[test]
fn a_missing_or_busy_monitor_is_reported() {
    let bare = Bare::new(&[]);
    let (_, text) = bare.rig.error(1, &["backup", "qmp:/nonexistent/socket"]);
    assert!(text.contains("/nonexistent/socket"), "{text}");
    let _other = holdfast_host::qmp::QmpSocket::connect(&bare.lab.path("web1.qmp")).unwrap();
    let (kind, text) = bare.rig.error(4, &["backup", &bare.source]);
    assert!(kind == "locked" && text.contains("one client at a time"), "{text}");
    assert_eq!(bare.rig.snapshot_count(), 0);
}

/// The name of a QEMU is arbitrary: its UUID identifies the machine.
#[test]
fn a_bare_qemu_does_not_continue_the_history_of_another_machine() {
    const UUIDS: [&str; 2] = [
        "11111111-1111-4111-8111-111111111111",
        "22222222-2222-4222-8222-222222222222",
    ];
    let [first, second] = UUIDS.map(|uuid| Bare::new(&["-uuid", uuid]));
    let unidentified = Bare::new(&[]);
    first.back_up(&[]);
    for other in [&second, &unidentified] {
        let (kind, message) = first.rig.error(1, &["backup", &other.source]);
        assert!(kind == "exists" && message.contains(UUIDS[0]), "{message}");
        assert!(other.lab.is_running() && runs_in(&*other.lab.monitor).unwrap().is_empty());
    }
    first.back_up(&[]);
    first.rig.ok(&["backup", &second.source, "--machine", "web2"]);
    first.rig.ok(&["backup", &unidentified.source, "--machine", "web3"]);
    first.rig.ok(&["backup", &unidentified.source, "--machine", "web3"]);
    // A QEMU without a UUID is another machine, even under the same name.
    let other = Bare::new(&[]);
    let words = ["backup", &other.source, "--machine", "web3"];
    let (kind, message) = first.rig.error(1, &words);
    assert!(
        kind == "exists" && message.contains("a machine without a UUID at ") && message.contains("web1.qmp"),
        "{message}"
    );
    first.rig.ok(&[&words[..], &["--same-machine"]].concat());
}

#[test]
fn a_dry_run_reports_changes_without_touching_the_machine() {
    let mut bare = Bare::new(&[]);
    let planned = bare.back_up(&["--dry-run", "--hook", "/bin/false"]);
    assert_eq!(
        (&planned["method"], &planned["state"]),
        (&"filter".into(), &"running".into())
    );
    assert_eq!(planned["disks"][0]["read_bytes"], DISK_BYTES);
    let reason = planned["disks"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("no earlier snapshot"), "{reason}");
    assert_eq!(bare.rig.snapshot_count(), 0);

    bare.back_up(&[]);
    bare.write(0, 50, 1 << 20, 65_536);
    let bitmaps = || format!("{:?}", disks(&*bare.lab.monitor).unwrap());
    let before = bitmaps();
    let planned = bare.back_up(&["--dry-run"]);
    assert_eq!(planned["disks"][0]["reason"], Value::Null, "{planned}");
    // The marks of the bitmap's witness count as changed until they have been compared.
    let read_bytes = planned["disks"][0]["read_bytes"].as_u64().unwrap();
    assert!((65_536..DISK_BYTES).contains(&read_bytes), "{planned}");
    assert_eq!(bitmaps(), before);
    bare.wait_until_clean("a dry run");
    assert_eq!(bare.rig.snapshot_count(), 1);
}
