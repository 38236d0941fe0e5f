//! The same requests to QEMU's storage daemon.

#![allow(clippy::disallowed_methods, reason = "tests run the peers")]

use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use holdfast_block::{BlockDevice as _, BlockDeviceMut as _, FileDeviceMut, IoMode};
use tempfile::TempDir;

use crate::front_end::{Guest, SIZE, TestServer, device, pause_ms};
use crate::request_cases::{illegal_cases, legal_cases};

/// The storage daemon, stopped on drop.
struct StorageDaemon {
    process: Child,
    folder: TempDir,
}

impl StorageDaemon {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        let file = FileDeviceMut::create_new(&image, SIZE as u64, IoMode::Buffered).unwrap();
        file.write_at(&device().to_bytes(), 0).unwrap();
        file.flush().unwrap();
        assert_eq!(file.size_bytes(), SIZE as u64);
        let socket = folder.path().join("socket");
        let process = Command::new("qemu-storage-daemon")
            .arg("--blockdev")
            .arg(format!("driver=file,filename={},node-name=file", image.display()))
            .args([
                "--blockdev",
                "driver=raw,file=file,node-name=disk,discard=unmap",
                "--export",
            ])
            .arg(format!(
                "type=vhost-user-blk,id=e,node-name=disk,addr.type=unix,addr.path={},writable=on,num-queues=2",
                socket.display()
            ))
            .stdin(Stdio::null())
            .spawn()
            .expect("these tests need qemu-storage-daemon (scripts/setup installs it)");
        Self { process, folder }
    }

    fn connect(&self) -> UnixStream {
        for _ in 0..1500 {
            if let Ok(stream) = UnixStream::connect(self.folder.path().join("socket")) {
                stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
                return stream;
            }
            pause_ms(20);
        }
        panic!("the storage daemon does not listen");
    }
}

impl Drop for StorageDaemon {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// Where the answers differ on purpose, and why.
const DIFFERENCES: &[(&str, &str)] = &[
    ("many ranges of zeroes", "QEMU takes one range per request"),
    ("many ranges to discard", "QEMU takes one range per request"),
    ("second range behind the end", "QEMU takes one range per request"),
    ("second range with an unknown flag", "QEMU takes one range per request"),
    ("33 ranges", "QEMU takes one range per request"),
    ("part of the serial number", "QEMU compares lengths otherwise"),
    ("part of a range", "QEMU refuses the queue"),
    ("range and a byte", "QEMU refuses the queue"),
    ("no range", "QEMU refuses the queue"),
    ("part of a header", "QEMU refuses the queue"),
    (
        "discard",
        "QEMU 7.2 needs discards to be enabled elsewhere, and then leaves the contents undefined",
    ),
    ("obsolete barrier", "QEMU ignores the bit"),
    ("obsolete barrier at the end", "QEMU ignores the bit"),
    ("too many sectors", "the limits differ"),
    ("one sector too many", "the limits differ"),
];

#[test]
fn answers_are_those_of_the_storage_daemon() {
    let daemon = StorageDaemon::start();
    let server = TestServer::writable(device());
    let mut theirs = Guest::start(daemon.connect(), u64::MAX);
    let mut ours = server.guest();
    let is_compared = |name: &str| DIFFERENCES.iter().all(|(known, _)| *known != name);
    let cases = legal_cases().into_iter().chain(illegal_cases());
    let compared: Vec<_> = cases.filter(|case| is_compared(case.name)).collect();
    assert!(compared.len() > 150, "{}", compared.len());
    for case in compared {
        let mine = ours.request_on(0, &case.header, &case.sent, case.expected_bytes);
        let peer = theirs.request_on(0, &case.header, &case.sent, case.expected_bytes);
        assert_eq!(mine.status, peer.status, "{}", case.name);
        // The serial numbers of the two differ.
        if mine.status == 0 && case.header[0] == 0 {
            assert!(mine.data == peer.data, "{}", case.name);
        }
    }
}
