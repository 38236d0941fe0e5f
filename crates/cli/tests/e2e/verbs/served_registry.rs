//! One server for NBD and iSCSI, whose exports change while clients use them.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};

use holdfast_block::{BlockDevice as _, BlockDeviceMut as _};
use holdfast_serve::nbd::client::{Endpoint, NbdDevice, NbdDeviceMut, NbdOptions};
use holdfast_test_kit::{ServiceSocket, activate};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::host::{system, text};
use crate::rig::{Rig, noise};

const SIZE: usize = 3 << 20;
/// The command warned that anyone can read the disks.
const WARNED: i32 = 3;

/// A server with a Unix socket for NBD and a port for iSCSI; killed on drop.
struct ServedRegistry<'a> {
    rig: &'a Rig,
    child: Child,
    socket: PathBuf,
    /// The addresses of the first exports.
    addresses: Vec<String>,
}

impl<'a> ServedRegistry<'a> {
    /// Starts it, and waits for the lines of `export_count` exports.
    fn start(rig: &'a Rig, words: &[&str], export_count: usize) -> Self {
        let socket = rig.path("nbd.sock");
        let nbd = format!("unix:{}", socket.display());
        let words = [&["serve", "all", "--nbd", &nbd, "--iscsi", "127.0.0.1:0"][..], words].concat();
        Self::of(rig, rig.command(&words), socket, 2 * export_count)
    }

    fn of(rig: &'a Rig, mut command: Command, socket: PathBuf, line_count: usize) -> Self {
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().take(line_count);
        let addresses: Vec<String> = lines
            .map(|line| line.unwrap().split("  ").next().unwrap().to_owned())
            .collect();
        assert_eq!(addresses.len(), line_count);
        Self {
            rig,
            child,
            socket,
            addresses,
        }
    }

    fn iscsi(&self, name: &str) -> String {
        let portal = self
            .addresses
            .iter()
            .find_map(|it| it.strip_prefix("iscsi://"))
            .unwrap();
        let portal = portal.split('/').next().unwrap();
        format!("iscsi://{portal}/iqn.2026-01.org.holdfast:{name}")
    }

    fn nbd(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket.display())
    }

    fn open(&self, export: &str) -> NbdDevice {
        NbdDevice::connect(&Endpoint::Unix(self.socket.clone()), export, NbdOptions::default()).unwrap()
    }

    /// The only server in the list.
    fn status(&self) -> Value {
        let report = self.rig.report(&["serve", "list"]);
        assert_eq!(report["servers"].as_array().unwrap().len(), 1, "{report:#}");
        report["servers"][0].clone()
    }

    fn export(&self, name: &str) -> Value {
        let status = self.status();
        let exports = status["exports"].as_array().unwrap();
        exports.iter().find(|export| export["name"] == name).unwrap().clone()
    }

    /// Stops it by the command.
    fn stop(mut self, code: i32) {
        self.rig.ok(&["serve", "stop"]);
        assert_eq!(self.child.wait().unwrap().code(), Some(code));
    }
}

impl Drop for ServedRegistry<'_> {
    fn drop(&mut self) {
        // It may have ended.
        self.child.kill().unwrap_or_default();
        self.child.wait().unwrap();
    }
}

fn qemu_io(uri: &str, commands: &[&str]) -> String {
    let is_reading = commands.iter().all(|command| command.starts_with("read"));
    let mode = is_reading.then_some("-r");
    let commands = commands.iter().flat_map(|command| ["-c", command]);
    let words: Vec<&str> = ["-f", "raw"]
        .into_iter()
        .chain(mode)
        .chain(commands)
        .chain([uri])
        .collect();
    let printed = system("qemu-io", &words).unwrap();
    assert!(!printed.contains("failed"), "{printed}");
    printed
}

fn write_image(rig: &Rig, name: &str) -> Vec<u8> {
    let content = noise(SIZE, 7);
    rig.write("raw", &content);
    let (raw, image) = (rig.path("raw"), rig.path(name));
    system("qemu-img", &["convert", "-O", "qcow2", text(&raw), text(&image)]).unwrap();
    content
}

#[test]
fn both_protocols_see_the_writes_of_each_other() {
    let rig = Rig::new();
    rig.write("vda.raw", &noise(SIZE, 1));
    rig.ok(&["backup", "-m", "web1", "vda=vda.raw"]);
    write_image(&rig, "db.qcow2");
    let server = ServedRegistry::start(&rig, &["web1"], 1);
    let added = rig.report(&["serve", "add", "--writable", "./db.qcow2"]);
    let addresses = added["exports"][0]["addresses"].as_array().unwrap().clone();
    assert_eq!(addresses, [server.nbd("db"), format!("{}/0", server.iscsi("db"))]);
    qemu_io(&server.nbd("db"), &["write -P 5 1M 64k"]);
    qemu_io(
        &format!("{}/0", server.iscsi("db")),
        &["read -P 5 1M 64k", "write -P 6 2M 64k"],
    );
    qemu_io(&server.nbd("db"), &["read -P 6 2M 64k", "flush"]);
    // The same image again has the same name, and another name does not unlock it.
    assert_eq!(rig.error(1, &["serve", "add", "db.qcow2"]).0, "exists");
    let locked = rig.error(4, &["serve", "add", "--writable", "other=db.qcow2"]);
    assert_eq!(locked.0, "locked", "{}", locked.1);
    // Two images of a machine are units of one target.
    rig.write("b.raw", &noise(1 << 20, 2));
    rig.write("c.raw", &noise(1 << 20, 3));
    rig.ok(&["serve", "add", "-m", "web2", "vda=b.raw", "vdb=c.raw", "--discard"]);
    for (lun, name) in ["b.raw", "c.raw"].iter().enumerate() {
        let url = format!("{}/{lun}", server.iscsi("web2"));
        let out = rig.path("out.raw");
        system("qemu-img", &["convert", "-f", "raw", "-O", "raw", &url, text(&out)]).unwrap();
        assert!(rig.read("out.raw") == rig.read(name), "{name}");
    }
    qemu_io(&server.nbd("web2/vda"), &["write -P 9 0 4k", "read -P 9 0 4k"]);
    // The snapshot is unchanged, and its reads are counted.
    qemu_io(&server.nbd("web1/vda"), &["read 0 1M"]);
    let export = server.export("web1/vda");
    assert_eq!(export["writable"], false);
    assert!(
        export["traffic"]["read_bytes"].as_u64().unwrap() >= 1 << 20,
        "{export:#}"
    );
    assert!(export["cache"]["misses"].as_u64().unwrap() > 0, "{export:#}");
    assert_eq!(server.export("db")["traffic"]["write_bytes"], 128 << 10);
    let shown = rig.ok(&["serve", "list"]);
    assert!(
        shown.contains("of 256 connections") && shown.contains("web2/vdb"),
        "{shown}"
    );
    // A name that does not exist does not hide what was removed.
    let removed = rig.json(1, &["serve", "remove", "web2/vdb", "nonsense"]);
    let removed = &removed["report"];
    assert_eq!(removed["exports"][0]["name"], "web2/vdb", "{removed:#}");
    assert_eq!(removed["failed"][0]["name"], "nonsense", "{removed:#}");
    server.stop(WARNED);
    assert_eq!(rig.runtime_names(), [""; 0]);
    assert!(rig.read("b.raw") == noise(1 << 20, 2), "writes were discarded");
    let words = ["-f", "qcow2", "-r", "-c", "read -P 5 1M 64k", "-c", "read -P 6 2M 64k"];
    let image = rig.path("db.qcow2");
    let printed = system("qemu-io", &[&words[..], &[text(&image)]].concat()).unwrap();
    assert!(!printed.contains("failed"), "{printed}");
}

#[test]
fn exports_in_use_are_removed_only_by_force_and_lose_no_write() {
    let rig = Rig::empty();
    write_image(&rig, "db.qcow2");
    let server = ServedRegistry::start(&rig, &["db.qcow2", "--writable"], 1);
    let client = NbdDeviceMut::new(server.open("db")).unwrap();
    client.write_at(&[5; 4096], 0).unwrap();
    client.flush().unwrap();
    client.write_at(&[6; 4096], 4096).unwrap();
    let export = server.export("db");
    let clients = export["clients"].as_array().unwrap();
    // This client opens several connections.
    assert!(clients.iter().all(|client| client["protocol"] == "nbd") && !clients.is_empty());
    let (kind, message) = rig.error(4, &["serve", "remove", "db"]);
    assert!(kind == "locked" && message.contains("--force"), "{kind} {message}");
    client.read_at(&mut [0; 512], 0).unwrap();
    let removed = rig.report(&["serve", "remove", "--force", "db"]);
    assert_eq!(removed["exports"][0]["ended_clients"], clients.len());
    assert_eq!(removed["exports"][0]["busy"], false);
    assert!(client.read_at(&mut [0; 512], 0).is_err());
    assert_eq!(rig.error(1, &["serve", "remove", "db"]).0, "not-found");
    // The lock is released, and also the write that no client has flushed is there.
    let words = ["-f", "qcow2", "-c", "read -P 5 0 4k", "-c", "read -P 6 4k 4k"];
    let image = rig.path("db.qcow2");
    let printed = system("qemu-io", &[&words[..], &[text(&image)]].concat()).unwrap();
    assert!(!printed.contains("failed"), "{printed}");
    server.stop(WARNED);
}

#[test]
fn clients_read_while_other_exports_come_and_go() {
    let rig = Rig::empty();
    let content = write_image(&rig, "db.qcow2");
    rig.write("other.raw", &noise(1 << 20, 2));
    let server = ServedRegistry::start(&rig, &["db.qcow2"], 1);
    let client = server.open("db");
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let mut buffer = vec![0; SIZE];
            let mut count = 0;
            while count == 0 || !is_done.load(Ordering::Relaxed) {
                client.read_at(&mut buffer, 0).unwrap();
                assert!(buffer == content);
                count += 1;
            }
        });
        for _ in 0..5 {
            rig.ok(&["serve", "add", "other.raw"]);
            qemu_io(&server.nbd("other"), &["read 0 1M"]);
            rig.ok(&["serve", "remove", "other"]);
        }
        is_done.store(true, Ordering::Relaxed);
        reading.join().unwrap();
    });
    drop(client);
    server.stop(WARNED);
}

#[test]
fn a_killed_server_is_not_listed_and_can_be_started_again() {
    let rig = Rig::empty();
    write_image(&rig, "db.qcow2");
    let mut server = ServedRegistry::start(&rig, &["db.qcow2", "--writable"], 1);
    let client = NbdDeviceMut::new(server.open("db")).unwrap();
    client.write_at(&[5; 4096], 0).unwrap();
    client.flush().unwrap();
    kill_process(Pid::from_child(&server.child), Signal::KILL).unwrap();
    server.child.wait().unwrap();
    assert_eq!(rig.runtime_names().len(), 1, "its control socket is left");
    assert_eq!(rig.report(&["serve", "list"])["servers"].as_array().unwrap().len(), 0);
    assert_eq!(rig.error(1, &["serve", "stop"]).0, "not-found");
    drop((client, server));
    let server = ServedRegistry::start(&rig, &["db.qcow2", "--writable"], 1);
    qemu_io(&server.nbd("db"), &["read -P 5 0 4k"]);
    let pid = server.child.id();
    let second = ServedRegistry::of(
        &rig,
        rig.command(&[
            "serve",
            "nbd",
            "raw.img=raw",
            "--listen",
            "127.0.0.1:0",
            "--format",
            "raw",
        ]),
        PathBuf::new(),
        1,
    );
    assert_eq!(rig.error(1, &["serve", "stop"]).0, "ambiguous");
    rig.ok(&["serve", "stop", "--server", &second.child.id().to_string()]);
    drop(second);
    assert_eq!(server.status()["pid"], pid);
    server.stop(WARNED);
}

/// Invalid requests on the control socket do not end the server.
#[test]
fn hostile_requests_do_not_harm_a_server() {
    let rig = Rig::empty();
    write_image(&rig, "db.qcow2");
    let server = ServedRegistry::start(&rig, &["db.qcow2"], 1);
    let control = server.status()["socket"].as_str().unwrap().to_owned();
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&control).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    let ask = |bytes: &[u8]| {
        let mut stream = UnixStream::connect(&control).unwrap();
        // The server may have closed the connection already.
        stream.write_all(bytes).unwrap_or_default();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap_or_default();
        answer
    };
    for (request, expected) in [
        (&b"\n"[..], "invalid"),
        (b"\xff\xfe\n", "invalid"),
        (b"{\"version\":9,\"request\":\"stop\"}\n", "version"),
        (b"{\"version\":1,\"request\":\"stop!\"}\n", "invalid"),
        (
            b"{\"version\":1,\"request\":\"add\",\"exports\":[{\"image\":{\"path\":\"db.qcow2\"}}]}\n",
            "absolute",
        ),
        (
            b"{\"version\":1,\"request\":\"add\",\"exports\":[{\"image\":{\"path\":\"/dev/null/x\"}}]}\n",
            "failed",
        ),
        (
            b"{\"version\":1,\"request\":\"add\",\"exports\":[{\"snapshot\":{\"name\":\"web1\"}}]}\n",
            "repository",
        ),
    ] {
        let answer = ask(request);
        assert!(answer.contains(expected), "{answer}");
    }
    assert_eq!(
        ask(&noise(1 << 20, 3)
            .into_iter()
            .filter(|byte| *byte != b'\n')
            .collect::<Vec<_>>()),
        ""
    );
    let nested = format!(
        "{{\"version\":1,\"request\":{}1{}}}\n",
        "[".repeat(100_000),
        "]".repeat(100_000)
    );
    assert!(ask(nested.as_bytes()).contains("invalid"));
    assert_eq!(server.status()["exports"].as_array().unwrap().len(), 1);
    server.stop(WARNED);
}

/// The sockets of systemd that child processes of a server would inherit.
fn inheritable_sockets(server: &ServedRegistry<'_>) -> Vec<String> {
    const CLOSE_ON_EXEC: u32 = 0o2_000_000;
    let folder = format!("/proc/{}/fdinfo", server.child.id());
    let entries = std::fs::read_dir(folder).unwrap();
    let numbers = entries.map(|entry| entry.unwrap());
    let is_inheritable = |path: PathBuf| {
        // Some are closed meanwhile.
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let flags = text.lines().find_map(|line| line.strip_prefix("flags:\t"));
        flags.is_some_and(|flags| u32::from_str_radix(flags, 8).unwrap() & CLOSE_ON_EXEC == 0)
    };
    let inheritable = numbers.filter(|entry| is_inheritable(entry.path()));
    let names = inheritable.map(|entry| entry.file_name().into_string().unwrap());
    names.filter(|name| ["3", "4"].contains(&&name[..])).collect()
}

#[test]
fn systemd_hands_over_sockets_which_survive_the_server() {
    let rig = Rig::empty();
    write_image(&rig, "db.qcow2");
    let socket = rig.path("nbd.sock");
    let nbd = UnixListener::bind(&socket).unwrap();
    let iscsi = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let start = || {
        let sockets = [
            ServiceSocket {
                name: "nbd",
                socket: nbd.try_clone().unwrap().into(),
            },
            ServiceSocket {
                name: "iscsi",
                socket: iscsi.try_clone().unwrap().into(),
            },
        ];
        let program = rig.command(&["serve", "all", "db.qcow2"]);
        let command = activate(&program, sockets, &rig.path("errors"));
        ServedRegistry::of(&rig, command, socket.clone(), 2)
    };
    for _ in 0..2 {
        let server = start();
        qemu_io(&server.nbd("db"), &["read 0 4k"]);
        qemu_io(&format!("{}/0", server.iscsi("db")), &["read 0 4k"]);
        assert_eq!(inheritable_sockets(&server), [""; 0]);
        // The inherited TCP socket has no authentication.
        server.stop(WARNED);
        // The sockets still listen: the next client would start the service again.
        UnixStream::connect(&socket).unwrap();
    }
    let sockets = ["nbd", "web"].map(|name| ServiceSocket {
        name,
        socket: nbd.try_clone().unwrap().into(),
    });
    let mut command = activate(&rig.command(&["serve", "all"]), sockets, &rig.path("errors"));
    assert_eq!(command.status().unwrap().code(), Some(2));
    let message = String::from_utf8(rig.read("errors")).unwrap();
    assert!(
        message.contains("\"web\"") && message.contains("FileDescriptorName"),
        "{message}"
    );
    assert_eq!(rig.error(2, &["serve", "all", "db.qcow2"]).0, "usage");
}
