//! Receivers that a command reaches, without ssh.

use std::fs::File;
use std::io::Write as _;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use holdfast_test_kit::run;

use super::MIB;
use crate::rig::{Rig, noise};
use crate::schedules::wait_until;

const PROGRAM: &str = env!("CARGO_BIN_EXE_holdfast");

#[test]
fn a_command_reaches_the_receiver() {
    let rig = Rig::empty();
    let there = tempfile::tempdir().unwrap();
    let folder = there.path().display();
    rig.write("disk.raw", &noise(3 * MIB, 60));
    let target = format!("{folder}/web1.raw");
    let command = format!("{PROGRAM} receive-disk 1 --below {folder}");
    let copy = |command: &str| rig.run(&["live-copy", "disk.raw", &target, "--connect-command", command]);
    // The link breaks in the middle.
    let cut = format!("dd bs=1024 count=1024 status=none | {command}");
    let output = rig.run(&[
        "live-copy",
        "disk.raw",
        &target,
        "--retry-for",
        "0s",
        "--connect-command",
        &cut,
    ]);
    assert!(!output.status.success(), "{output:?}");
    assert!(copy(&command).status.success());
    assert!(std::fs::read(&target).unwrap() == noise(3 * MIB, 60));
    let outside = ["live-copy", "disk.raw", "/srv/web1.raw", "--connect-command", &command];
    let (_, text) = rig.error(1, &outside);
    assert!(text.contains("is not below"), "{text}");
    // A command that fails is not repeated for ten minutes.
    let absent = [
        "live-copy",
        "disk.raw",
        "/srv/a",
        "--connect-command",
        "echo no route >&2; exit 3",
    ];
    let (_, text) = rig.error(1, &absent);
    assert!(text.contains("no route"), "{text}");
}

/// Ends the server of a test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// A program beside ours.
#[expect(clippy::disallowed_methods, reason = "other programs make certificates and serve")]
fn program(name: &str) -> Command {
    Command::new(name)
}

/// A key with its certificate in `NAME.pem`, and the certificate alone in `NAME.crt`.
fn certificate(folder: &Path, name: &str) {
    let path = |ending: &str| folder.join(format!("{name}.{ending}"));
    let (key, certificate) = (path("key"), path("crt"));
    let words = [
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ];
    let files = ["-keyout", key.to_str().unwrap(), "-out", certificate.to_str().unwrap()];
    let output = program("openssl").args(words).args(files).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let both = [std::fs::read(&key).unwrap(), std::fs::read(&certificate).unwrap()].concat();
    File::create(path("pem")).unwrap().write_all(&both).unwrap();
}

#[test]
fn a_disk_is_copied_by_tls_between_hosts_that_know_each_other() {
    let rig = Rig::empty();
    let there = tempfile::tempdir().unwrap();
    for name in ["sender", "receiver", "other"] {
        certificate(there.path(), name);
    }
    let copies = there.path().join("copies");
    std::fs::create_dir(&copies).unwrap();
    let file = |name: &str| there.path().join(name).display().to_string();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let listener = format!(
        "OPENSSL-LISTEN:{port},bind=127.0.0.1,reuseaddr,fork,cert={},cafile={}",
        file("receiver.pem"),
        file("sender.crt")
    );
    let receiver = format!("EXEC:{PROGRAM} receive-disk 1 --below {}", copies.display());
    let mut socat = program("socat");
    socat
        .args([&listener, &receiver])
        .stdin(Stdio::null())
        .stderr(Stdio::null());
    let _server = Server(socat.spawn().unwrap());
    wait_until("socat listens", || {
        let listening = run("ss", &["-Hltn", &format!("sport = {port}")]);
        !listening.is_empty()
    });
    rig.write("disk.raw", &noise(3 * MIB, 61));
    let target = copies.join("web1.raw");
    let command = |own: &str, known: &str| {
        let (own, known) = (file(own), file(known));
        format!("socat - OPENSSL:localhost:{port},cert={own},cafile={known}")
    };
    let copy = |command: &str| {
        let target = target.to_str().unwrap();
        rig.run(&["live-copy", "disk.raw", target, "--connect-command", command])
    };
    for wrong in [command("other.pem", "receiver.crt"), command("sender.pem", "other.crt")] {
        let output = copy(&wrong);
        assert!(!output.status.success(), "{output:?}");
        assert_eq!(std::fs::read_dir(&copies).unwrap().count(), 0);
    }
    let output = copy(&command("sender.pem", "receiver.crt"));
    assert!(output.status.success(), "{output:?}");
    assert!(std::fs::read(&target).unwrap() == noise(3 * MIB, 61));
}
