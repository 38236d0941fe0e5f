//! Exports of qemu-nbd and nbdkit as targets.

use std::fs::File;
use std::path::PathBuf;
use std::process::Child;
use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use holdfast_test_kit::file_systems::Mounted;

use super::{MIB, skipped};
use crate::host::text;
use crate::nbdkit::Nbdkit;
use crate::qemu_nbd::QemuNbd;
use crate::rig::{Rig, noise};
use crate::schedules::wait_until;

/// A rig with a source, and a file that a server offers.
struct ExportRig {
    rig: Rig,
    content: Vec<u8>,
}

impl ExportRig {
    fn new(size_bytes: usize, target_bytes: u64) -> Self {
        let rig = Rig::empty();
        let mut content = noise(size_bytes, 50);
        // Zeroes replace the old content of the target, too.
        content[MIB..MIB + MIB / 2].fill(0);
        rig.write("disk.raw", &content);
        let target = File::create(rig.path("target.raw")).unwrap();
        std::io::copy(&mut &noise(2 * MIB, 51)[..], &mut &target).unwrap();
        target.set_len(target_bytes).unwrap();
        Self { rig, content }
    }

    fn socket(&self) -> PathBuf {
        self.rig.path("nbd")
    }

    fn address(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket().display())
    }

    fn qemu(&self, options: &[&str]) -> QemuNbd {
        let options = [&["-f", "raw", "--shared", "8"], options].concat();
        QemuNbd::serve(&self.rig.path("target.raw"), &self.socket(), &options)
    }

    /// A server that takes 20 ms for each write.
    fn slow(&self) -> Nbdkit {
        let file = self.rig.path("target.raw");
        let slow = ["--filter=delay", "file", text(&file), "delay-write=20ms"];
        Nbdkit::serve(&self.socket(), &slow)
    }

    /// Starts a copy, and waits until a part of it is durable.
    fn start_until_synced(&self, address: &str) -> Child {
        let child = self.rig.command(&words(address, &[])).spawn().unwrap();
        // The first entry of the journal says that the copy has begun.
        wait_until("a part is durable", || {
            self.journals()
                .iter()
                .any(|path| path.metadata().is_ok_and(|found| found.len() > 200))
        });
        child
    }

    fn journals(&self) -> Vec<PathBuf> {
        let folder = std::fs::read_dir(self.rig.path("state/holdfast/copies"));
        folder.map_or(Vec::new(), |entries| {
            entries.map(|entry| entry.unwrap().path()).collect()
        })
    }

    fn assert_copied(&self) {
        let target = self.rig.read("target.raw");
        assert!(target[..self.content.len()] == self.content);
        assert!(self.journals().is_empty());
    }
}

/// Copies the disk of a rig to an export.
fn words<'a>(address: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["live-copy", "disk.raw", address, "--force"][..], more].concat()
}

#[test]
fn an_export_is_overwritten_with_a_disk() {
    let it = ExportRig::new(3 * MIB, 4 << 20);
    let before = it.rig.read("target.raw");
    let server = it.qemu(&[]);
    let address = it.address();
    let (kind, text) = it.rig.error(1, &["live-copy", "disk.raw", &address]);
    assert!(
        kind == "exists" && text.contains("overwrites the content of nbd"),
        "{text}"
    );
    assert!(it.rig.read("target.raw") == before);
    let planned = it.rig.report(&words(&address, &["--dry-run"]));
    assert_eq!(
        (&planned["target"], &planned["format"]),
        (&address[..].into(), &"raw".into())
    );
    assert!(it.rig.read("target.raw") == before);
    let done = it.rig.report(&words(&address, &[]));
    assert_eq!(done["target"], address[..]);
    it.assert_copied();
    assert!(it.rig.read("target.raw")[3 * MIB..] == before[3 * MIB..]);
    // The export is its own seed.
    it.rig
        .write("disk.raw", &[&it.content[..2 * MIB], &noise(MIB, 52)].concat());
    let again = it.rig.report(&words(&address, &["--seed", &address]));
    let sent_bytes = again["sent_bytes"].as_u64().unwrap();
    assert!((1 << 20..(1 << 20) + 65_536).contains(&sent_bytes), "{again}");
    assert!(it.rig.read("target.raw")[..3 * MIB] == it.rig.read("disk.raw"));
    drop(server);
}

/// The server has no zeroes and no extents, and takes whole blocks of at most 32 KiB only.
#[test]
fn an_export_with_few_abilities_is_a_target() {
    let it = ExportRig::new(3 * MIB, 3 << 20);
    let file = it.rig.path("target.raw");
    let plain = [
        "--no-sr",
        "--filter=nozero",
        "--filter=noextents",
        "--filter=blocksize-policy",
        "file",
        text(&file),
        "blocksize-minimum=4096",
        "blocksize-preferred=4096",
        "blocksize-maximum=32768",
        "blocksize-error-policy=error",
    ];
    let _server = Nbdkit::serve(&it.socket(), &plain);
    it.rig.report(&words(&it.address(), &[]));
    it.assert_copied();
}

#[test]
fn an_export_that_cannot_be_a_target_is_refused() {
    let it = ExportRig::new(3 * MIB, 3 << 20);
    let before = it.rig.read("target.raw");
    let address = it.address();
    let refused = |command: &[&str], code: i32, expected: &str, reason: &str| {
        let (kind, text) = it.rig.error(code, command);
        assert!(kind == expected && text.contains(reason), "{command:?}: {kind}: {text}");
    };
    let server = it.qemu(&["-r"]);
    refused(&words(&address, &[]), 1, "refused", "read-only");
    drop(server);

    let server = it.qemu(&[]);
    it.rig.write("larger.raw", &noise(3 * MIB + 1, 53));
    refused(
        &["live-copy", "larger.raw", &address, "--force"],
        1,
        "no-space",
        "has 3145728 bytes, the disk has 3145729",
    );
    refused(&words(&address, &["--to", "qcow2"]), 2, "usage", "without a format");
    refused(
        &["live-copy", &address, &address, "--force"],
        2,
        "usage",
        "the target is the source",
    );
    let tls = address.replace("nbd+unix", "nbds+unix");
    refused(&words(&tls, &[]), 1, "io", "TLS");
    refused(&words("nbd+unix:///disk", &[]), 2, "usage", "?socket=PATH");
    drop(server);
    refused(&words(&address, &[]), 1, "io", "connect to");
    assert!(it.rig.read("target.raw") == before);
    assert!(it.journals().is_empty());

    let socket = it.rig.path("no-flush");
    let unable = [
        "eval",
        "get_size=echo 3145728",
        "can_write=exit 0",
        "can_flush=exit 3",
        "pread=head -c $3 /dev/zero",
        "pwrite=cat > /dev/null",
    ];
    let _server = Nbdkit::serve(&socket, &unable);
    let address = format!("nbd+unix:///?socket={}", socket.display());
    refused(&words(&address, &[]), 1, "refused", "offers no flush");
}

/// The copy is killed, and the server comes back as another program: the next copy sends only what is missing.
#[test]
fn a_killed_copy_to_an_export_continues() {
    let it = ExportRig::new(48 * MIB, 48 << 20);
    let address = it.address();
    let server = it.slow();
    let mut killed = it.start_until_synced(&address);
    killed.kill().unwrap();
    killed.wait().unwrap();
    drop(server);
    std::fs::remove_file(it.socket()).unwrap();
    assert_eq!(it.journals().len(), 1);
    let _server = it.qemu(&[]);
    let done = it.rig.report(&words(&address, &[]));
    let phases = done["times"]["phases"].as_array().unwrap();
    assert!(phases.iter().any(|phase| phase["phase"] == "comparing"), "{done}");
    assert!(done["sent_bytes"].as_u64().unwrap() < 44 << 20, "{done}");
    it.assert_copied();
}

/// The server is killed in the middle of the copy, and comes back.
#[test]
fn a_copy_survives_the_loss_of_its_server() {
    let it = ExportRig::new(48 * MIB, 48 << 20);
    let address = it.address();
    let slow = it.slow();
    let copying = words(&address, &["--json"]);
    let (output, _server) = std::thread::scope(|scope| {
        let copy = scope.spawn(|| it.rig.run(&copying));
        wait_until("a part is durable", || {
            let mut journals = it.journals().into_iter();
            journals.any(|path| path.metadata().is_ok_and(|found| found.len() > 200))
        });
        drop(slow);
        std::fs::remove_file(it.socket()).unwrap();
        SystemClock::new().sleep(Duration::from_millis(500));
        let server = it.slow();
        (copy.join().unwrap(), server)
    });
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(text.contains("is lost"), "{text}");
    it.assert_copied();
}

/// The server stays away: the copy ends after --retry-for. When the server is back, the same command continues it.
#[test]
fn a_copy_ends_if_its_server_stays_away() {
    let it = ExportRig::new(48 * MIB, 48 << 20);
    let address = it.address();
    let slow = it.slow();
    let copying = words(&address, &["--retry-for", "1s", "--json"]);
    let output = std::thread::scope(|scope| {
        let copy = scope.spawn(|| it.rig.run(&copying));
        wait_until("the copy has begun", || !it.journals().is_empty());
        drop(slow);
        std::fs::remove_file(it.socket()).unwrap();
        copy.join().unwrap()
    });
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("could not be made again within 1 s") && text.contains("connect to"),
        "{text}"
    );
    let _server = it.qemu(&[]);
    it.rig.report(&words(&address, &[]));
    it.assert_copied();
}

/// The file system of the server is full: the copy ends at once, and continues when there is room.
#[test]
fn a_full_server_is_an_error_with_the_reason() {
    let it = ExportRig::new(24 * MIB, 24 << 20);
    let point = it.rig.path("small");
    let _mounted = match Mounted::at("ext4", &point) {
        Ok(mounted) => mounted,
        Err(reason) => return skipped(&reason),
    };
    let ballast = super::fill_but(&point, 8 << 20);
    let target = point.join("target.raw");
    File::create(&target).unwrap().set_len(24 << 20).unwrap();
    let server = QemuNbd::serve(&target, &it.socket(), &["-f", "raw"]);
    let (kind, text) = it.rig.error(1, &words(&it.address(), &[]));
    assert!(
        kind == "no-space" && text.contains("no space left (ENOSPC)"),
        "{kind}: {text}"
    );
    std::fs::remove_file(&ballast).unwrap();
    it.rig.report(&words(&it.address(), &[]));
    drop(server);
    assert!(std::fs::read(&target).unwrap() == it.content);
}
