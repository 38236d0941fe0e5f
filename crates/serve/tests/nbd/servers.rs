//! Shared by the tests of NBD: servers of Holdfast and of other projects.

#![allow(clippy::disallowed_methods, reason = "tests run the peers")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast_block::{Clock, SystemClock};
use holdfast_serve::nbd::{Event, Exports, Limits, Listener, Server, ServerOptions, ServerResources, TlsPolicy};
use tempfile::TempDir;

/// Holdfast's server on a Unix socket, and its events.
pub(crate) struct OurServer {
    pub(crate) inner: Option<Server>,
    pub(crate) events: Arc<Mutex<Vec<String>>>,
    folder: TempDir,
}

impl OurServer {
    pub(crate) fn start(exports: impl Exports + 'static) -> Self {
        Self::start_with(exports, Limits::default())
    }

    pub(crate) fn start_with(exports: impl Exports + 'static, limits: Limits) -> Self {
        Self::start_at(exports, limits, &system_clock())
    }

    pub(crate) fn start_at(exports: impl Exports + 'static, limits: Limits, clock: &Arc<dyn Clock>) -> Self {
        Self::start_all(exports, limits, TlsPolicy::Off, clock)
    }

    pub(crate) fn start_tls(exports: impl Exports + 'static, tls: TlsPolicy) -> Self {
        Self::start_all(exports, Limits::default(), tls, &system_clock())
    }

    fn start_all(exports: impl Exports + 'static, limits: Limits, tls: TlsPolicy, clock: &Arc<dyn Clock>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let events = Arc::new(Mutex::new(Vec::new()));
        let notes = Arc::clone(&events);
        let mut server = Server::new(ServerOptions {
            exports: Arc::new(exports),
            resources: ServerResources::new(limits),
            tls,
            clock: Arc::clone(clock),
            events: Arc::new(move |event: &Event<'_>| notes.lock().unwrap().push(format!("{event:?}"))),
        });
        let listener = Listener::unix(&folder.path().join("socket"), &**clock).unwrap();
        server.listen(listener).unwrap();
        Self {
            inner: Some(server),
            events,
            folder,
        }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    pub(crate) fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket().display())
    }

    /// Waits for an event that contains all of `words`.
    pub(crate) fn wait_for_event(&self, words: &[&str]) {
        wait_for(&format!("{words:?} to be reported"), || {
            let events = self.events.lock().unwrap();
            events.iter().any(|line| words.iter().all(|word| line.contains(word)))
        });
    }
}

fn system_clock() -> Arc<dyn Clock> {
    Arc::new(SystemClock::new())
}

/// Waits until `is_there` returns true, or a timeout.
pub(crate) fn wait_for(what: &str, mut is_there: impl FnMut() -> bool) {
    let clock = SystemClock::new();
    while !is_there() {
        assert!(clock.now() < Duration::from_secs(30), "timed out waiting for {what}");
        clock.sleep(Duration::from_millis(2));
    }
}

/// Servers of other projects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peer {
    Nbdkit,
    QemuNbd,
}

/// A peer that serves a file as "disk" until it is dropped.
pub(crate) struct PeerServer {
    child: Child,
    folder: TempDir,
}

impl PeerServer {
    pub(crate) fn start(peer: Peer, contents: &[u8]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        let socket = folder.path().join("socket");
        std::fs::write(&image, contents).unwrap();
        let mut command = match peer {
            Peer::Nbdkit => {
                let mut command = Command::new("nbdkit");
                command
                    .args(["-f", "--exit-with-parent", "-U"])
                    .arg(&socket)
                    .arg("file")
                    .arg(&image);
                command
            }
            Peer::QemuNbd => {
                let mut command = Command::new("qemu-nbd");
                command
                    .args(["-t", "-f", "raw", "-x", "disk", "-e", "20", "-k"])
                    .arg(&socket)
                    .arg(&image);
                command
            }
        };
        let child = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn();
        let child = child.unwrap_or_else(|error| panic!("these tests need {peer:?} (see scripts/setup): {error}"));
        wait_for("the peer's socket", || {
            std::os::unix::net::UnixStream::connect(&socket).is_ok()
        });
        Self { child, folder }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }
}

impl Drop for PeerServer {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Runs a program, which must succeed; returns its output.
pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("these tests need {program} (see scripts/setup): {error}"));
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {printed}{errors}");
    printed
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are UTF-8")
}
