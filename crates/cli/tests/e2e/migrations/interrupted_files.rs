//! Files of a machine with snapshots whose copies are interrupted.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use holdfast_test_kit::file_systems::Mounted;
use holdfast_test_kit::{run, write_program};

use super::snapshots::{content, names, write};
use super::two_hosts::TwoHosts;
use super::write_file;
use crate::replication::sshd::Program;
use crate::rig::noise;
use crate::schedules::wait_until;

/// A machine that is shut off, with a snapshot and then other content.
struct MachineWithSnapshot {
    hosts: TwoHosts,
    /// Its disk at the snapshot, and now.
    contents: [Vec<u8>; 2],
    /// The folder for images at the second host.
    images: PathBuf,
}

impl MachineWithSnapshot {
    /// The second host has this program, and this folder for images.
    fn with(program: Program<'_>, images: PathBuf) -> Option<Self> {
        let hosts = TwoHosts::with(program)?;
        let raw = hosts.rig.path("content.raw");
        hosts.here.virsh(&["destroy", "web1"]);
        // What takes some time to be copied.
        let data = hosts.rig.path("noise");
        write_file(&data, &noise(24 << 20, 70));
        let command = format!("write -s {} 8M 24M", data.display());
        run(
            "qemu-io",
            &["-f", "qcow2", "-c", &command, hosts.image.to_str().unwrap()],
        );
        hosts.here.virsh(&["snapshot-create-as", "web1", "first"]);
        let first = content(&hosts.image, &raw);
        write(&hosts.image, 2);
        let last = content(&hosts.image, &raw);
        Some(Self {
            hosts,
            contents: [first, last],
            images,
        })
    }

    /// The command line of the migration.
    fn words(&self) -> Vec<String> {
        let mut words = self.hosts.words(&[]);
        words[2] = format!("ssh://root@127.0.0.1{}", self.images.display());
        words
    }

    /// Moves it, and compares what has arrived.
    fn move_and_compare(&self) {
        let (hosts, raw) = (&self.hosts, self.hosts.rig.path("content.raw"));
        let words = self.words();
        hosts.rig.report(&words.iter().map(String::as_str).collect::<Vec<_>>());
        let image = self.images.join("web1.qcow2");
        run("qemu-img", &["check", "-q", image.to_str().unwrap()]);
        let [first, last] = &self.contents;
        assert!(content(&image, &raw) == *last);
        assert_eq!(names(&hosts.there, "snapshot-list"), ["first"]);
        hosts.there.virsh(&["snapshot-revert", "web1", "first"]);
        assert!(content(&image, &raw) == *first);
    }
}

/// Each kill leaves a part of the copy, in which bits change then.
#[test]
fn killed_copies_of_files_continue_whatever_they_hold() {
    let folder = tempfile::tempdir().unwrap();
    let Some(machine) = MachineWithSnapshot::with(Program::Found, folder.path().to_owned()) else {
        return;
    };
    let hosts = &machine.hosts;
    let words = machine.words();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let part = folder.path().join(".web1.qcow2.holdfast-copy");
    let mut flipped = 0;
    for round in 1..=4 {
        let mut killed = hosts.rig.command(&words).spawn().unwrap();
        let enough = round * (4 << 20) / 512;
        wait_until("a part is copied", || {
            part.metadata().is_ok_and(|part| part.blocks() >= enough) || killed.try_wait().unwrap().is_some()
        });
        killed.kill().unwrap();
        killed.wait().unwrap();
        if hosts.states() == ["shut off", "shut off"] {
            break;
        }
        assert_eq!(hosts.states(), ["shut off", "absent"]);
        flipped += u32::from(flip_bits(&part));
    }
    assert!(flipped > 0, "no kill was early enough");
    if hosts.states()[1] == "absent" {
        machine.move_and_compare();
    }
}

/// Changes what a part of a copy holds, if it is there.
fn flip_bits(part: &Path) -> bool {
    let Ok(file) = File::options().read(true).write(true).open(part) else {
        return false;
    };
    let bytes = file.metadata().unwrap().len();
    for offset in (0..bytes).step_by(1 << 20) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).unwrap();
        file.write_all_at(&[byte[0] ^ 16], offset).unwrap();
    }
    bytes > 0
}

/// Another program takes the space there after it was found to suffice.
#[test]
fn files_that_do_not_fit_are_moved_when_there_is_space() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("target");
    std::fs::create_dir(&target).unwrap();
    let Ok(_file_system) = Mounted::at("xfs", &target) else {
        return;
    };
    let Some(machine) = MachineWithSnapshot::with(Program::FoundIn(folder.path()), target.clone()) else {
        return;
    };
    let program = folder.path().join("holdfast");
    let fill = target.join("fill");
    let script = format!(
        "#!/bin/sh\nif [ \"$1\" = receive-disk ] && ! [ -e {fill} ]; then\n\
         fallocate -l $(($(stat -f -c '%a * %S' {target}) - (16 << 20))) {fill}\nfi\nexec {} \"$@\"\n",
        env!("CARGO_BIN_EXE_holdfast"),
        fill = fill.display(),
        target = target.display()
    );
    write_program(&program, &script);
    let hosts = &machine.hosts;
    let words = machine.words();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (_, text) = hosts.rig.error(1, &words);
    assert!(text.contains("No space left"), "{text}");
    assert_eq!(hosts.states(), ["shut off", "absent"]);
    std::fs::remove_file(&fill).unwrap();
    std::fs::remove_file(&program).unwrap();
    machine.move_and_compare();
}
