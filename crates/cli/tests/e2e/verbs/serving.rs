//! Snapshots as block devices, opened by other programs.

use std::io::{BufRead as _, BufReader};
use std::process::Child;

use rustix::process::{Pid, Signal, kill_process};

use crate::host::{system, text};
use crate::rig::{Rig, noise};

const SIZE: usize = 3 << 20;

/// A server, stopped on drop.
struct Serving {
    child: Child,
    uris: Vec<String>,
}

impl Serving {
    /// Starts a server, and waits for the lines of `count` disks.
    fn start(rig: &Rig, words: &[&str], count: usize) -> Self {
        let socket = rig.path("sock");
        let all = [&["serve", "nbd", "--socket", text(&socket)], words].concat();
        let mut child = rig.command(&all).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let uris = lines
            .take(count)
            .map(|line| line.unwrap().split("  ").next().unwrap().to_owned());
        let uris: Vec<String> = uris.collect();
        assert_eq!(uris.len(), count);
        Self { child, uris }
    }

    /// Stops the server as a user does; it must exit successfully.
    fn stop(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::INT).unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
    }
}

fn qemu_io(command: &str, uri: &str) -> String {
    let message = system("qemu-io", &["-f", "raw", "-c", command, uri]).unwrap();
    assert!(!message.contains("failed"), "{message}");
    message
}

#[test]
fn disks_of_snapshots_are_opened_by_qemu() {
    let rig = Rig::new();
    rig.write("vda.raw", &noise(SIZE, 1));
    rig.write("vdb.raw", &noise(SIZE - 100, 2));
    rig.ok(&["backup", "-m", "web1", "vda=vda.raw", "vdb=vdb.raw"]);
    let serving = Serving::start(&rig, &["web1"], 2);
    for (name, uri) in ["vda", "vdb"].iter().zip(&serving.uris) {
        assert!(uri.contains(&format!("///web1/{name}?")), "{uri}");
        let out = rig.path("out.raw");
        system("nbdcopy", &[uri, text(&out)]).unwrap();
        assert!(rig.read("out.raw") == rig.read(&format!("{name}.raw")), "{name}");
        std::fs::remove_file(out).unwrap();
    }
    assert!(system("qemu-io", &["-f", "raw", "-c", "write 0 512", &serving.uris[0]]).is_err());
    serving.stop();
    assert!(!rig.path("sock").exists());
}

#[test]
fn writes_of_clients_are_discarded_or_kept_and_the_snapshot_is_unchanged() {
    let rig = Rig::new();
    rig.write("vda.raw", &noise(SIZE, 1));
    rig.ok(&["backup", "-m", "web1", "vda=vda.raw"]);
    let serving = Serving::start(&rig, &["web1", "--writable"], 1);
    qemu_io("write -P 7 1M 4k", &serving.uris[0]);
    qemu_io("read -P 7 1M 4k", &serving.uris[0]);
    serving.stop();
    std::fs::create_dir(rig.path("kept")).unwrap();
    let words = ["web1:vda", "--overlay", text(&rig.path("kept")).to_owned().leak()];
    let serving = Serving::start(&rig, &words, 1);
    let original = system("qemu-io", &["-f", "raw", "-c", "read -P 7 1M 4k", &serving.uris[0]]);
    assert!(
        original.map_or(true, |message| message.contains("failed")),
        "the write was discarded"
    );
    qemu_io("write -P 8 2M 4k", &serving.uris[0]);
    qemu_io("flush", &serving.uris[0]);
    // Two servers with the same overlay would destroy it.
    let second = [&["serve", "nbd", "--socket", "second"][..], &words].concat();
    let output = rig.code(4, &second);
    assert!(crate::program::stderr(&output).contains("served already"));
    serving.stop();
    let serving = Serving::start(&rig, &words, 1);
    qemu_io("read -P 8 2M 4k", &serving.uris[0]);
    serving.stop();
    rig.ok(&["verify", "web1", "--against", "vda.raw"]);
}

/// Regression: a prune and a gc ran while a client read a snapshot. Reads failed, and the log reported damage.
#[test]
fn a_served_snapshot_can_be_read_after_its_removal() {
    let rig = Rig::new();
    rig.write("vda.raw", &noise(SIZE, 1));
    rig.ok(&["backup", "-m", "web1", "vda=vda.raw"]);
    let id = rig.report(&["list"])["snapshots"][0]["id"].as_str().unwrap().to_owned();
    let serving = Serving::start(&rig, &["web1"], 1);
    rig.ok(&["forget", &id]);
    rig.ok(&["gc"]);
    let out = rig.path("out.raw");
    system("nbdcopy", &[&serving.uris[0], text(&out)]).unwrap();
    assert!(rig.read("out.raw") == rig.read("vda.raw"));
    serving.stop();
    let pack_count = || -> usize {
        let folders = rig.names("repo/packs");
        folders
            .iter()
            .map(|folder| rig.names(&format!("repo/packs/{folder}")).len())
            .sum()
    };
    let kept = pack_count();
    rig.ok(&["gc"]);
    let left = pack_count();
    assert!(left < kept, "{left} packs of {kept} are left");
}

#[test]
fn missing_and_unknown_arguments_are_refused() {
    let rig = Rig::new();
    rig.write("a.raw", &noise(5000, 1));
    rig.ok(&["backup", "a.raw"]);
    let output = rig.code(2, &["serve", "nbd", "a"]);
    assert!(crate::program::stderr(&output).contains("--socket"));
    assert_eq!(rig.error(2, &["serve", "nbd", "a", "--socket", "s"]).0, "usage");
    assert_eq!(rig.code(1, &["serve", "nbd", "missing", "--socket", "s"]).stdout, b"");
}
