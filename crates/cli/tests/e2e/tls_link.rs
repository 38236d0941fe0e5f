//! Connections by TLS between hosts that know each other's certificates, by socat.

use std::fs::File;
use std::io::Write as _;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use holdfast_test_kit::run;
use tempfile::TempDir;

use crate::schedules::wait_until;

/// A server that calls a command for each connection of the sender.
pub(crate) struct TlsLink {
    folder: TempDir,
    port: u16,
    server: Child,
}

impl TlsLink {
    /// Calls `receiver`, with the view of the file system of the process `inside`.
    pub(crate) fn to(receiver: &str, inside: Option<u32>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["sender", "receiver", "other"] {
            make_certificate(folder.path(), name);
        }
        // In a file, because `:` and `,` mean something else in an address of socat.
        let script = folder.path().join("receiver.sh");
        writeln!(File::create(&script).unwrap(), "exec {receiver}").unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let file = |name: &str| folder.path().join(name).display().to_string();
        let listener = format!(
            "OPENSSL-LISTEN:{port},bind=127.0.0.1,reuseaddr,fork,cert={},cafile={}",
            file("receiver.pem"),
            file("sender.crt")
        );
        let mut socat = match inside {
            None => program("socat"),
            Some(process) => {
                let mut enter = program("nsenter");
                enter.args([&format!("--mount=/proc/{process}/ns/mnt"), "--", "socat"]);
                enter
            }
        };
        socat.args([&listener, &format!("EXEC:sh {}", script.display())]);
        let server = socat.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        wait_until("socat listens", || {
            let listening = run("ss", &["-Hltn", &format!("sport = {port}")]);
            !listening.is_empty()
        });
        Self { folder, port, server }
    }

    /// The command by which the sender reaches the receiver.
    pub(crate) fn command(&self) -> String {
        self.command_with("sender.pem", "receiver.crt")
    }

    /// Commands of a sender and to a receiver that are not known.
    pub(crate) fn wrong_commands(&self) -> [String; 2] {
        [
            self.command_with("other.pem", "receiver.crt"),
            self.command_with("sender.pem", "other.crt"),
        ]
    }

    fn command_with(&self, own: &str, known: &str) -> String {
        let [own, known] = [own, known].map(|name| self.folder.path().join(name));
        let port = self.port;
        format!(
            "socat - OPENSSL:localhost:{port},cert={},cafile={}",
            own.display(),
            known.display()
        )
    }
}

impl Drop for TlsLink {
    fn drop(&mut self) {
        self.server.kill().ok();
        self.server.wait().ok();
    }
}

/// A program beside ours.
#[expect(clippy::disallowed_methods, reason = "other programs make certificates and serve")]
fn program(name: &str) -> Command {
    Command::new(name)
}

/// Makes a key with its certificate in `NAME.pem`, and the certificate alone in `NAME.crt`.
fn make_certificate(folder: &Path, name: &str) {
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
