//! `migrate qmp:PATH`: the machine of a QEMU without libvirt moves. The other host is a mount namespace in which the folder of
//! the sockets is another one.

use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use holdfast_host::qmp::{Monitor as _, QmpCommand, QmpSocket};
use holdfast_test_kit::run;
use serde_json::{Value, json};

use crate::host::text;
use crate::replication::sshd::{Program, Sshd};
use crate::rig::Rig;
use crate::schedules::wait_until;
use crate::writing_guest::{GuestConsole, assert_one_moment, guest_file};

/// A machine on a busy host is stopped for longer, and a lost receiver is not awaited for long.
const USUAL: [&str; 5] = [
    "--accept-incomplete-memory",
    "--max-frozen",
    "20s",
    "--retry-for",
    "10s",
];
const PROGRAM: &str = env!("CARGO_BIN_EXE_holdfast");

/// A guest that writes under a QEMU, and a place to which it can move.
pub(super) struct BareHosts {
    pub(super) rig: Rig,
    pub(super) console: GuestConsole,
    pub(super) image: PathBuf,
    /// The QEMU that this test has started.
    qemu: Child,
    /// Keep the mount namespaces of both hosts.
    namespaces: [Child; 2],
}

impl BareHosts {
    /// None without the rights to make namespaces.
    pub(super) fn new(words: &[&str]) -> Option<Self> {
        Self::prepared(words, |_| ())
    }

    /// Hosts in a folder that `prepare` completes.
    fn prepared(words: &[&str], prepare: impl FnOnce(&Rig)) -> Option<Self> {
        Self::started_by(&["env"], words, prepare)
    }

    /// Hosts whose QEMU this command starts.
    fn started_by(starter: &[&str], words: &[&str], prepare: impl FnOnce(&Rig)) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            return None;
        }
        let rig = Rig::empty();
        for folder in ["run", "run-there", "images"] {
            std::fs::create_dir(rig.path(folder)).unwrap();
        }
        let image = rig.path("web1.qcow2");
        run("qemu-img", &["create", "-q", "-f", "qcow2", text(&image), "64M"]);
        // The guest uses the first 4 MiB only.
        run("qemu-io", &["-f", "qcow2", "-c", "write -P 165 32M 16M", text(&image)]);
        prepare(&rig);
        let bind = format!(
            "mount --bind {} {}",
            text(&rig.path("run-there")),
            text(&rig.path("run"))
        );
        let namespaces = [":", &bind].map(|own| make_namespace(own, &rig.path("ready")));
        let console = GuestConsole(rig.path("console"));
        let qemu = command(starter[0])
            .args(&starter[1..])
            .arg("qemu-system-x86_64")
            .args([
                "-name",
                "web1",
                "-accel",
                "tcg",
                "-m",
                "160",
                "-nodefaults",
                "-display",
                "none",
            ])
            .args(["-kernel", &guest_file("vmlinuz"), "-initrd", &guest_file("initrd")])
            .args(["-append", "console=ttyS0 quiet"])
            .args([
                "-chardev",
                &format!("file,id=console,path={},append=on", text(&console.0)),
            ])
            .args(["-serial", "chardev:console"])
            .args(["-drive", "file=web1.qcow2,format=qcow2,if=none,id=drive0"])
            .args(["-device", "virtio-blk-pci,drive=drive0,id=disk0"])
            .args(["web1.qmp", "test.qmp"].iter().flat_map(|name| {
                let socket = format!("unix:{},server=on,wait=off", text(&rig.path("run").join(name)));
                ["-qmp".to_owned(), socket]
            }))
            .args(words)
            .current_dir(image.parent().unwrap())
            .spawn()
            .unwrap();
        console.wait_for(20);
        Some(Self {
            rig,
            console,
            image,
            qemu,
            namespaces,
        })
    }

    /// The command of the host on which the machine runs: the first one, or the other one.
    pub(super) fn run_at(&mut self, host: usize) {
        self.rig.see_files_of(self.namespaces[host].id());
    }

    /// The command that reaches the receiver of a host.
    pub(super) fn receiver_of(&self, host: usize) -> String {
        format!(
            "nsenter --mount=/proc/{}/ns/mnt -- {PROGRAM} receive-migration 1 --connect {}",
            self.namespaces[host].id(),
            self.source()
        )
    }

    pub(super) fn there(&self) -> String {
        self.receiver_of(1)
    }

    pub(super) fn source(&self) -> String {
        format!("qmp:{}", text(&self.rig.path("run/web1.qmp")))
    }

    pub(super) fn words(&self, receiver: &str, more: &[&str]) -> Vec<String> {
        let folder = self.rig.path("images");
        let words = ["migrate", &self.source(), text(&folder), "--connect-command", receiver];
        let words = [&words[..], &USUAL, more].concat();
        words.into_iter().map(str::to_owned).collect()
    }

    /// The status of the QEMU in a folder of sockets: "running", "paused", "absent" and so on.
    pub(super) fn status(&self, folder: &str) -> String {
        let Ok(monitor) = QmpSocket::connect(&self.rig.path(folder).join("test.qmp")) else {
            return "absent".to_owned();
        };
        let status = monitor.execute(&QmpCommand::new("query-status", Value::Null));
        status.map_or_else(
            |_| "absent".to_owned(),
            |status| status["status"].as_str().unwrap().to_owned(),
        )
    }

    pub(super) fn statuses(&self) -> [String; 2] {
        ["run", "run-there"].map(|folder| self.status(folder))
    }

    /// Starts the QEMU of the machine at the other host, which gets no memory.
    fn start_without_memory_there(&self) -> Child {
        let line = std::fs::read_to_string(format!("/proc/{}/cmdline", self.qemu.id())).unwrap();
        let words = line.split_terminator('\0');
        command("nsenter")
            .args([&format!("--mount=/proc/{}/ns/mnt", self.namespaces[1].id()), "--"])
            .args(["env", "-C", text(self.image.parent().unwrap())])
            .args(words)
            .args(["-S", "-incoming", "defer"])
            .spawn()
            .unwrap()
    }

    pub(super) fn has_moved(&mut self) -> bool {
        self.qemu.try_wait().unwrap().is_some()
    }

    /// The disk of the other host.
    pub(super) fn moved_disk(&self, name: &str) -> PathBuf {
        self.rig.path("images").join(name)
    }

    fn assert_no_sockets(&self) {
        for namespace in &self.namespaces {
            let entries = std::fs::read_dir(format!("/proc/{}/root/run", namespace.id())).unwrap();
            let mut names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            assert_eq!(names.find(|name| name.ends_with(".memory")), None);
        }
    }

    pub(super) fn pause(&self, folder: &str) {
        let monitor = QmpSocket::connect(&self.rig.path(folder).join("test.qmp")).unwrap();
        monitor.execute(&QmpCommand::new("stop", Value::Null)).unwrap();
    }
}

impl Drop for BareHosts {
    fn drop(&mut self) {
        for folder in ["run", "run-there"] {
            if let Ok(monitor) = QmpSocket::connect(&self.rig.path(folder).join("test.qmp")) {
                monitor.execute(&QmpCommand::new("quit", Value::Null)).ok();
            }
        }
        for process in std::iter::once(&mut self.qemu).chain(&mut self.namespaces) {
            process.kill().ok();
            process.wait().ok();
        }
    }
}

/// A process in a mount namespace, after it has created the file `ready`. Sockets of migrations are in `/run`.
fn make_namespace(command_inside: &str, ready: &Path) -> Child {
    let run = "mount -t tmpfs run /run && mkdir /run/sshd";
    let script = format!(
        "{run} && {command_inside} && touch {} && exec sleep infinity",
        text(ready)
    );
    let words = ["--mount", "--propagation", "slave", "sh", "-c", &script];
    let process = command("unshare").args(words).spawn().unwrap();
    wait_until("the host is there", || ready.exists());
    std::fs::remove_file(ready).unwrap();
    process
}

#[expect(
    clippy::disallowed_methods,
    reason = "QEMU is started as its user does, and another host is made"
)]
fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    command.stdin(Stdio::null());
    command
}

pub(super) fn texts(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

pub(super) fn assert_moved_disk(disk: &Path) {
    let bytes = std::fs::read(disk).unwrap();
    assert_eq!(bytes.len(), 64 << 20);
    assert_one_moment(&bytes);
    assert!(bytes[32 << 20..48 << 20].iter().all(|byte| *byte == 165));
}

#[test]
fn a_qemu_without_libvirt_moves_and_comes_back() {
    let Some(mut hosts) = BareHosts::new(&[]) else { return };
    let there = hosts.there();
    let plan = hosts.rig.report(&texts(&hosts.words(&there, &["--dry-run"])));
    assert_eq!(plan["obstacles"], json!([]), "{plan}");
    let note = plan["notes"][0].as_str().unwrap();
    assert!(
        note.contains("web1.raw,format=raw") && note.ends_with("-S -incoming defer"),
        "{note}"
    );
    let boot = hosts.console.last().unwrap().boot;
    let report = hosts.rig.report(&texts(&hosts.words(&there, &[])));
    assert_eq!(
        report["disks"][0]["path"],
        text(&hosts.moved_disk("web1.raw")),
        "{report}"
    );
    assert!(hosts.has_moved(), "the QEMU here has not ended");
    assert_eq!(hosts.statuses(), ["absent", "running"]);
    let later = hosts.console.wait_for_more(100);
    assert_eq!(later.boot, boot, "the guest has booted again");
    hosts.console.assert_no_mismatch();
    hosts.assert_no_sockets();
    // Its image here is kept, and can be used.
    run("qemu-img", &["check", "-q", text(&hosts.image)]);
    hosts.pause("run-there");
    assert_moved_disk(&hosts.moved_disk("web1.raw"));
    let monitor = QmpSocket::connect(&hosts.rig.path("run-there/test.qmp")).unwrap();
    monitor.execute(&QmpCommand::new("cont", Value::Null)).unwrap();
    drop(monitor);
    // The way back is a migration from there, by ssh.
    hosts.run_at(1);
    let Some(sshd) = Sshd::start_inside(hosts.namespaces[0].id(), Program::Found) else {
        return;
    };
    let address = format!("ssh://root@127.0.0.1{}", hosts.rig.path("images").display());
    let seed = format!("disk0={}", text(&hosts.image));
    let mut words = vec!["migrate".to_owned(), hosts.source(), address];
    words.extend(sshd.options());
    words.extend([&["--seed", &seed], &USUAL[..]].concat().into_iter().map(str::to_owned));
    let report = hosts.rig.report(&texts(&words));
    assert_eq!(
        report["disks"][0]["path"],
        text(&hosts.moved_disk("web1-2.raw")),
        "{report}"
    );
    assert_eq!(hosts.statuses(), ["running", "absent"]);
    let later = hosts.console.wait_for_more(100);
    assert_eq!(later.boot, boot, "the guest has booted again");
    hosts.console.assert_no_mismatch();
    hosts.pause("run");
    assert_moved_disk(&hosts.moved_disk("web1-2.raw"));
    hosts.assert_no_sockets();
}

#[test]
fn a_qemu_that_does_not_start_there_leaves_the_guest_here() {
    let Some(hosts) = BareHosts::new(&["-pidfile", "run/pid"]) else {
        return;
    };
    std::fs::create_dir(hosts.rig.path("run-there/pid")).unwrap();
    let (_, error) = hosts.rig.error(1, &texts(&hosts.words(&hosts.there(), &[])));
    // QEMU's own message.
    assert!(error.contains("Is a directory"), "{error}");
    assert_eq!(hosts.statuses(), ["running", "absent"]);
    hosts.console.wait_for_more(20);
    hosts.console.assert_no_mismatch();
    hosts.assert_no_sockets();
    // The same command continues the copy of the disk.
    std::fs::remove_dir(hosts.rig.path("run-there/pid")).unwrap();
    hosts.rig.ok(&texts(&hosts.words(&hosts.there(), &[])));
    assert_eq!(hosts.statuses(), ["absent", "running"]);
    hosts.console.wait_for_more(20);
    hosts.console.assert_no_mismatch();
}

/// The variables of the firmware come with the memory, into a file that is made.
#[test]
fn a_qemu_moves_with_the_variables_of_its_firmware() {
    let code = "if=pflash,format=raw,readonly=on,file=/usr/share/OVMF/OVMF_CODE_4M.fd";
    let variables = "if=pflash,format=raw,file=run/vars.fd";
    let words = ["-drive", code, "-drive", variables, "-M", "q35"];
    let with_variables = |rig: &Rig| {
        std::fs::copy("/usr/share/OVMF/OVMF_VARS_4M.fd", rig.path("run/vars.fd")).unwrap();
    };
    let Some(hosts) = BareHosts::prepared(&words, with_variables) else {
        return;
    };
    hosts.rig.ok(&texts(&hosts.words(&hosts.there(), &[])));
    assert_eq!(hosts.statuses(), ["absent", "running"]);
    hosts.console.wait_for_more(20);
    hosts.console.assert_no_mismatch();
    let here = hosts.rig.read("run/vars.fd");
    assert!(here == hosts.rig.read("run-there/vars.fd"));
    assert!(here != std::fs::read("/usr/share/OVMF/OVMF_VARS_4M.fd").unwrap());
}

/// The user has chosen the command line, so it is started with the rights of this user.
#[test]
fn a_qemu_of_another_user_is_that_of_this_user_there() {
    let user = rustix::process::Uid::from_raw(65_534);
    let starter = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"];
    let for_user = |rig: &Rig| {
        run("chown", &["-R", "65534:65534", text(&rig.path("."))]);
        run("chown", &["0:0", text(&rig.path("images"))]);
    };
    let Some(hosts) = BareHosts::started_by(&starter, &[], for_user) else {
        return;
    };
    hosts.rig.ok(&texts(&hosts.words(&hosts.there(), &[])));
    assert_eq!(hosts.statuses(), ["absent", "running"]);
    hosts.console.wait_for_more(20);
    hosts.console.assert_no_mismatch();
    let monitor = UnixStream::connect(hosts.rig.path("run-there/web1.qmp")).unwrap();
    let peer = rustix::net::sockopt::socket_peercred(&monitor).unwrap();
    assert_eq!(peer.uid, user);
    assert_eq!(hosts.moved_disk("web1.raw").metadata().unwrap().uid(), user.as_raw());
}

#[test]
fn what_prevents_the_move_of_a_qemu_is_said_before() {
    let Some(hosts) = BareHosts::new(&[]) else { return };
    let error = |receiver: &str, more: &[&str]| hosts.rig.error(1, &texts(&hosts.words(receiver, more))).1;
    // Its monitor is here.
    let here = hosts.receiver_of(0);
    let refused = error(&here, &[]);
    assert!(refused.contains("another one is connected"), "{refused}");
    for (option, part) in [("--undo", "on the other host"), ("--post-copy", "remove the option")] {
        let words = ["migrate", &hosts.source(), "ssh://host2", option];
        let (_, error) = hosts.rig.error(2, &words);
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(hosts.statuses(), ["running", "absent"]);
}

/// A receiver that kills a process at a request, as `plan` says.
fn losing_receiver(hosts: &BareHosts) -> String {
    let text = include_str!("lost_request.py")
        .replace("@PROGRAM@", PROGRAM)
        .replace("@PLAN@", text(&hosts.rig.path("plan")));
    let script = hosts.rig.path("lost_request.py");
    hosts.rig.write("lost_request.py", text.as_bytes());
    let there = hosts.there();
    there.replace(PROGRAM, &format!("python3 {}", script.display()))
}

/// Whatever is lost when the machine has sent all of its memory, it runs on one host, and the same command completes the move.
#[test]
fn a_qemu_runs_on_one_host_whatever_is_lost_at_its_start() {
    let Some(hosts) = BareHosts::new(&[]) else { return };
    let receiver = losing_receiver(&hosts);
    let words = hosts.words(&receiver, &[]);
    let attempt = |plan: &str, signal: Option<i32>| {
        hosts.rig.write("plan", plan.as_bytes());
        let output = hosts.rig.run(&texts(&words));
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{text}");
        assert_eq!(output.status.signal(), signal, "{text}");
    };
    // The QEMU there is left without a machine, and the next attempt replaces it.
    attempt("receive-memory after program", None);
    assert_eq!(hosts.statuses(), ["running", "inmigrate"]);
    // The machine was not started there, so it is resumed here, and moved again.
    attempt("start before sender", Some(9));
    wait_until("the QEMU there has ended", || {
        hosts.statuses() == ["postmigrate", "absent"]
    });
    let elsewhere = hosts.words(&hosts.there(), &[]);
    let elsewhere: Vec<&str> = texts(&elsewhere);
    let other_folder = text(&hosts.rig.path("run")).to_owned();
    let elsewhere = [&elsewhere[..2], &[&other_folder], &elsewhere[3..]].concat();
    let (_, error) = hosts.rig.error(1, &elsewhere);
    assert!(error.contains("was interrupted"), "{error}");
    assert_eq!(hosts.statuses(), ["postmigrate", "absent"]);
    let plan = hosts.rig.report(&texts(&hosts.words(&hosts.there(), &["--dry-run"])));
    let obstacle = plan["obstacles"][0].as_str().unwrap();
    assert!(obstacle.contains("the same command"), "{plan}");
    // A QEMU there without its memory is not this machine.
    let mut waiting = hosts.start_without_memory_there();
    wait_until("it waits for its memory", || hosts.status("run-there") == "inmigrate");
    // It runs there, and the answer is lost with the command.
    attempt("start after sender", Some(9));
    assert_eq!(hosts.statuses(), ["postmigrate", "running"]);
    waiting.wait().unwrap();
    hosts.console.wait_for_more(20);
    let report = hosts.rig.report(&texts(&words));
    assert_eq!(report["state"], "running", "{report}");
    assert_eq!(hosts.statuses(), ["absent", "running"]);
    hosts.console.wait_for_more(20);
    hosts.console.assert_no_mismatch();
}

/// 17 MiB at 8 MiB per second.
#[test]
fn a_qemu_moves_within_the_limit_of_the_user() {
    let Some(hosts) = BareHosts::new(&[]) else { return };
    let words = hosts.words(&hosts.there(), &["--bwlimit", "8M", "--no-compression"]);
    let report = hosts.rig.report(&texts(&words));
    let disks = &report["phases"][0];
    assert_eq!(disks["phase"], "disks");
    assert!(disks["duration_us"].as_u64().unwrap() > 1_900_000, "{report}");
    assert_eq!(hosts.statuses(), ["absent", "running"]);
    hosts.console.wait_for_more(20);
    hosts.console.assert_no_mismatch();
}

/// The other host is asked again.
#[test]
fn a_qemu_is_started_there_although_the_connection_is_lost() {
    for when in ["before", "after"] {
        let Some(hosts) = BareHosts::new(&[]) else { return };
        let receiver = losing_receiver(&hosts);
        hosts.rig.write("plan", format!("start {when} program").as_bytes());
        hosts.rig.ok(&texts(&hosts.words(&receiver, &[])));
        assert_eq!(hosts.statuses(), ["absent", "running"], "{when}");
        hosts.console.wait_for_more(20);
        hosts.console.assert_no_mismatch();
    }
}

/// QEMU stops the machine, and waits for the program that migrates it. If that was killed, it would wait forever.
#[test]
fn a_qemu_that_a_killed_migration_has_stopped_is_resumed() {
    let Some(hosts) = BareHosts::new(&[]) else { return };
    let monitor = QmpSocket::connect(&hosts.rig.path("run/test.qmp")).unwrap();
    let execute = |name: &'static str, arguments: Value| monitor.execute(&QmpCommand::new(name, arguments)).unwrap();
    let capability = json!({ "capability": "pause-before-switchover", "state": true });
    execute("migrate-set-capabilities", json!({ "capabilities": [capability] }));
    let hold = || {
        execute("migrate", json!({ "uri": "exec:cat >/dev/null" }));
        wait_until("QEMU waits", || {
            execute("query-migrate", Value::Null)["status"] == "pre-switchover"
        });
    };
    let watchdog = [
        "watchdog",
        "--connect",
        &hosts.source(),
        "--machine",
        "web1",
        "--run",
        "7",
    ];
    let status = || execute("query-status", Value::Null)["status"].clone();
    // Another program migrates it.
    hold();
    hosts.rig.run(&watchdog);
    let refused = hosts.rig.error(1, &texts(&hosts.words(&hosts.there(), &[]))).1;
    assert!(refused.contains("wait until it runs"), "{refused}");
    assert_eq!(status(), "finish-migrate");
    let destination = json!({ "qom-type": "secret", "id": "hf-destination", "data": "ssh://host2" });
    execute("object-add", destination);
    hosts.rig.run(&watchdog);
    wait_until("the machine runs", || status() == "running");
    hosts.console.wait_for_more(20);
    // Without its watchdog, the next migration finds it, to whichever host.
    hold();
    let destination = json!({ "qom-type": "secret", "id": "hf-destination", "data": "ssh://host2" });
    execute("object-add", destination);
    let plan = hosts.rig.report(&texts(&hosts.words(&hosts.there(), &["--dry-run"])));
    let obstacle = plan["obstacles"][0].as_str().unwrap();
    assert!(obstacle.contains("any migration resumes it"), "{plan}");
    drop(monitor);
    hosts.rig.ok(&texts(&hosts.words(&hosts.there(), &[])));
    assert_eq!(hosts.statuses(), ["absent", "running"]);
    hosts.console.wait_for_more(20);
    hosts.console.assert_no_mismatch();
}
