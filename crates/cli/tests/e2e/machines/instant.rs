//! Instant restores: machines run from a snapshot while their images are filled.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use holdfast_block::Clock as _;
use holdfast_host::domain_xml::served_folder;
use holdfast_host::qmp::QmpCommand;
use holdfast_host::{ExecutionState, Hypervisor as _, HypervisorMut as _, LiveDisks as _, Machine};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{World, at};
use crate::host::loop_device;
use crate::rig::assert_runs;

pub(super) const NAME: &str = "web1-restored";

impl World {
    pub(super) fn restored(&self) -> Box<dyn Machine> {
        self.lab.connect().machine(NAME).unwrap()
    }

    /// Kills a restore as soon as its machine is running, before its images are filled. Returns the folder of the
    /// restore.
    pub(super) fn begun(&self) -> PathBuf {
        self.begun_with(&[])
    }

    fn begun_with(&self, words: &[&str]) -> PathBuf {
        let uri = self.lab.uri();
        for _ in 0..5 {
            let words = [&["restore", "web1", "--to-machine", "--live"], words].concat();
            let words = at(&uri, &words);
            let mut child = self.rig.command(&words).spawn().unwrap();
            let libvirt = self.lab.connect();
            while libvirt.execution_state(NAME).ok() != Some(ExecutionState::Running) {
                assert_runs(&mut child);
                self.lab.clock.sleep(Duration::from_millis(2));
            }
            kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
            child.wait().unwrap();
            if let Some(folder) = served_folder(&self.configuration(NAME)) {
                return folder;
            }
            // All images were filled before the kill.
            self.lab.virsh(&["destroy", NAME]);
            self.lab.virsh(&["undefine", NAME]);
        }
        panic!("all images were filled before the kill");
    }

    /// The guest of the restored machine writes and flushes successfully.
    pub(super) fn restored_writes(&mut self, disk: usize, byte: u8, offset: usize, length: usize) {
        let machine = self.restored();
        self.lab
            .guest_writes(machine.monitor(), disk, byte, offset as u64, length as u64);
        let message = self.restored_says(disk, "flush");
        assert!(!message.contains("failed"), "{message}");
        self.disks[disk][offset..offset + length].fill(byte);
    }

    fn restored_says(&self, disk: usize, command: &str) -> String {
        self.lab.guest_output(self.restored().monitor(), disk, command)
    }

    pub(super) fn resume(&self) -> Value {
        self.rig.report(&at(&self.lab.uri(), &["resume", NAME]))
    }

    pub(super) fn start_check_and_remove(&self) {
        // If the restore was killed before the start, the user starts the machine.
        self.lab.connect().start(NAME).ok();
        self.assert_is_whole();
        self.lab.virsh(&["undefine", NAME]);
        for image in ["web1-restored-a", "web1-restored-b"] {
            std::fs::remove_file(self.lab.path(image)).unwrap();
        }
    }

    /// Asserts that the machine uses its own images, which have the right content, and that nothing else is left.
    pub(super) fn assert_is_whole(&self) {
        assert_eq!(self.lab.virsh(&["domstate", NAME]).trim(), "running");
        let before = self.configuration(NAME);
        assert!(
            served_folder(&before).is_none() && !before.contains("error_policy"),
            "{before}"
        );
        let all_done = || self.rig.report(&at(&self.lab.uri(), &["resume"]))["machines"] == serde_json::json!([]);
        assert!(all_done());
        self.lab.virsh(&["destroy", NAME]);
        self.assert_holds(NAME);
        assert_eq!(
            self.files(),
            ["domain.xml", "web1-a", "web1-b", "web1-restored-a", "web1-restored-b"]
        );
        let folder = self.lab.path(&format!(".{NAME}.holdfast"));
        assert!(servers(&folder).is_empty());
        assert!(all_done());
    }
}

/// The server processes of the restore in a folder.
pub(super) fn servers(folder: &std::path::Path) -> Vec<Pid> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let is_server = |entry: &std::fs::DirEntry| {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
        words.contains(&folder.as_os_str().as_encoded_bytes()) && words.contains(&b"live-server".as_slice())
    };
    let numbers = processes
        .filter(is_server)
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.filter_map(Pid::from_raw).collect()
}

pub(super) fn kill_servers(folder: &std::path::Path) {
    let servers = servers(folder);
    assert_eq!(servers.len(), 1);
    kill_process(servers[0], Signal::KILL).unwrap();
}

#[test]
fn a_machine_runs_immediately_and_then_from_its_own_images() {
    let mut world = World::new();
    world.write(0, 7, 1 << 20, 65_536);
    world.back_up();
    let report = world.restore(&["--live"]);
    assert!(report["live"]["runs_after_ms"].as_u64().unwrap() > 0);
    assert_eq!(report["target_machine"]["is_started"], true);
    world.assert_is_whole();
}

#[test]
fn changes_of_the_configuration_during_a_restore_are_kept() {
    let world = World::new();
    world.back_up();
    let folder = world.begun();
    let edited = world.configuration(NAME);
    let title = "<title>changed meanwhile</title><metadata>";
    let edited = edited.replacen("<metadata>", title, 1);
    assert!(edited.contains(title), "{edited}");
    world.lab.connect().define(&edited).unwrap();
    let report = world.resume();
    assert_eq!(report["machines"].as_array().unwrap().len(), 1, "{report}");
    assert!(!folder.exists());
    assert!(world.configuration(NAME).contains("<title>changed meanwhile</title>"));
    world.assert_is_whole();
}

/// The images are reserved, although the configuration of the machine does not name them yet.
#[test]
fn images_that_are_being_filled_are_reserved() {
    let world = World::new();
    world.back_up();
    let Some(device) = loop_device(&world.rig.path("loop"), 8 << 20) else {
        return;
    };
    let place = format!("vdb={}", device.path.display());
    let folder = world.begun_with(&["--disk", &place, "--force"]);
    let mut words = vec!["restore", "web1", "--to-machine", "--name", "web2"];
    words.extend(["--disk", &place, "--force"]);
    let (kind, text) = world.rig.error(1, &at(&world.lab.uri(), &words));
    assert!(kind == "refused" && text.contains(NAME), "{kind}: {text}");
    assert!(folder.exists());
    world.resume();
    world.lab.virsh(&["destroy", NAME]);
    world.assert_holds(NAME);
}

/// Ctrl-C leaves a running machine, and prints how its disks are filled.
#[test]
fn an_interrupted_restore_leaves_the_machine_running() {
    let world = World::new();
    world.back_up();
    let words = ["restore", "web1", "--to-machine", "--live"];
    let child = world.rig.command(&at(&world.lab.uri(), &words)).spawn().unwrap();
    let libvirt = world.lab.connect();
    while libvirt.execution_state(NAME).ok() != Some(ExecutionState::Running) {
        world.lab.clock.sleep(Duration::from_millis(2));
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(world.lab.virsh(&["domstate", NAME]).trim(), "running");
    if output.status.code() != Some(0) {
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(message.contains("holdfast resume web1-restored"), "{message}");
        world.resume();
    }
    world.assert_is_whole();
}

/// The server cannot ask for a password; it gets the derived key and needs no key slot.
#[test]
fn the_server_of_an_encrypted_repository_needs_no_password() {
    let world = World::new();
    let uri = world.lab.uri();
    world.rig.write("password", "fünf Kühe essen Suppe\n".as_bytes());
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(world.rig.path("password"), mode).unwrap();
    let sealed = ["-r", "sealed", "--password-file", "password"];
    world.rig.ok(&[&["init"], &sealed[..]].concat());
    world.rig.ok(&at(&uri, &[&["backup", "web1"], &sealed[..]].concat()));
    let folder = world.begun_with(&sealed);
    kill_servers(&folder);
    let paper = world.rig.ok(&[&["key", "paper"], &sealed[..]].concat());
    let key = paper
        .lines()
        .find(|line| line.trim_start().starts_with("HF1-"))
        .unwrap();
    let slots = world.rig.path("sealed/keys");
    let away = world.rig.path("away");
    std::fs::rename(&slots, &away).unwrap();
    std::fs::create_dir(&slots).unwrap();
    let served = folder.to_str().unwrap();
    let mut server = world
        .rig
        .command(&["live-server", "-r", "sealed", "--folder", served])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    writeln!(server.stdin.take().unwrap(), "{}", key.trim()).unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    assert_eq!(line, "ready\n");
    kill_process(Pid::from_child(&server), Signal::KILL).unwrap();
    server.wait().unwrap();
    std::fs::remove_dir(&slots).unwrap();
    std::fs::rename(&away, &slots).unwrap();
    world
        .rig
        .ok(&at(&uri, &["resume", NAME, "--password-file", "password"]));
    world.assert_is_whole();
}

/// The guest boots while its disks are filled: the copy is limited from the first byte on.
#[test]
fn disks_are_filled_at_a_bounded_rate() {
    let world = World::new();
    world.back_up();
    let reach = |rate: u64, words: &[&str]| {
        let mut child = world.rig.command(&at(&world.lab.uri(), words)).spawn().unwrap();
        let jobs = QmpCommand::new("query-block-jobs", Value::Null);
        let libvirt = world.lab.connect();
        loop {
            assert_runs(&mut child);
            let machine = libvirt.machine(NAME);
            let jobs = machine.ok().and_then(|machine| machine.monitor().execute(&jobs).ok());
            let jobs = jobs.unwrap_or_default();
            let rates: Vec<u64> = jobs
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(|job| job["speed"].as_u64())
                .collect();
            // The rate of a running copy changes shortly after the start of the next program.
            if rates == [rate, rate] {
                break;
            }
            assert!(rates.iter().all(|rate| *rate > 0), "a copy has no limit");
            world.lab.clock.sleep(Duration::from_millis(2));
        }
        kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
        child.wait().unwrap();
    };
    let restore = ["restore", "web1", "--to-machine", "--live", "--bwlimit", "200K"];
    reach(102_400, &restore);
    // A higher rate would end the wait of QEMU for the lower one.
    reach(51_200, &["resume", NAME, "--bwlimit", "100K"]);
    world.resume();
    world.assert_is_whole();
}

#[test]
fn a_restore_continues_only_with_its_repository() {
    let mut world = World::new();
    world.back_up();
    let folder = world.begun();
    world.restored_writes(0, 80, 65_536, 4096);
    world.lab.virsh(&["destroy", NAME]);
    kill_servers(&folder);
    let (packs, away) = (world.rig.path("repo/packs"), world.rig.path("packs-away"));
    std::fs::rename(&packs, &away).unwrap();
    let (_, text) = world.rig.error(1, &at(&world.lab.uri(), &["resume", NAME]));
    assert!(text.contains("nothing is lost") || text.contains("server"), "{text}");
    std::fs::rename(&away, &packs).unwrap();
    world.resume();
    world.assert_is_whole();
}
