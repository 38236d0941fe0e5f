//! Servers of other people, one process for each test.

#![expect(
    clippy::disallowed_methods,
    reason = "tests run the peer, and wait for it to be there"
)]

use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use holdfast_serve::nbd::client::{Endpoint, NbdDevice, NbdDeviceMut, NbdOptions};
use tempfile::TempDir;

/// A server on a Unix socket, that ends with the value.
pub(crate) struct Server {
    child: Child,
    directory: TempDir,
}

impl Server {
    /// nbdkit with its arguments, those of filters and plugin.
    pub(crate) fn nbdkit(arguments: &[&str]) -> Self {
        Self::start("nbdkit", |socket| {
            let mut command = Command::new("nbdkit");
            command
                .args(["-f", "--exit-with-parent", "-U"])
                .arg(socket)
                .args(arguments);
            command
        })
    }

    /// qemu-nbd with its arguments, the image among them.
    pub(crate) fn qemu_nbd(arguments: &[&str]) -> Self {
        Self::start("qemu-nbd", |socket| {
            let mut command = Command::new("qemu-nbd");
            command
                .args(["--persistent", "--shared=8", "-k"])
                .arg(socket)
                .args(arguments);
            command
        })
    }

    fn start(program: &str, command: impl FnOnce(&Path) -> Command) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let mut command = command(&socket);
        let started = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn();
        let mut child = match started {
            Ok(child) => child,
            Err(error) => panic!("these tests need {program} (see scripts/setup): {error}"),
        };
        for _ in 0..2000 {
            // It is there before it listens.
            if UnixStream::connect(&socket).is_ok() {
                return Self { child, directory };
            }
            assert!(child.try_wait().unwrap().is_none(), "{command:?} ended at once");
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("{command:?} did not open its socket in 10 seconds");
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    pub(crate) fn endpoint(&self) -> Endpoint {
        Endpoint::Unix(self.socket())
    }

    pub(crate) fn device(&self) -> NbdDevice {
        NbdDevice::connect(&self.endpoint(), "", NbdOptions::default()).unwrap()
    }

    pub(crate) fn device_mut(&self) -> NbdDeviceMut {
        NbdDeviceMut::connect(&self.endpoint(), "", NbdOptions::default()).unwrap()
    }

    /// Ends the server at once, in the middle of whatever it does.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended before.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Runs a program that must succeed; gives what it printed.
pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = match Command::new(program).args(arguments).output() {
        Ok(output) => output,
        Err(error) => panic!("these tests need {program} (see scripts/setup): {error}"),
    };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {errors}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Forwards TCP connections to a Unix socket, as long as the value lives.
pub(crate) fn relay_tcp(port: u16, socket: PathBuf) -> Relay {
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let relay = Relay {
        port,
        is_over: Arc::default(),
    };
    let is_over = relay.is_over.clone();
    std::thread::spawn(move || {
        for tcp in listener.incoming().map_while(Result::ok) {
            if is_over.load(Ordering::Relaxed) {
                break;
            }
            let unix = UnixStream::connect(&socket).unwrap();
            let (mut tcp_back, mut unix_back) = (tcp.try_clone().unwrap(), unix.try_clone().unwrap());
            let (mut tcp, mut unix) = (tcp, unix);
            std::thread::spawn(move || {
                std::io::copy(&mut tcp, &mut unix).ok();
                unix.shutdown(Shutdown::Both).ok();
            });
            std::thread::spawn(move || {
                std::io::copy(&mut unix_back, &mut tcp_back).ok();
                tcp_back.shutdown(Shutdown::Both).ok();
            });
        }
    });
    relay
}

/// A forwarder of connections.
pub(crate) struct Relay {
    port: u16,
    is_over: Arc<AtomicBool>,
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        TcpStream::connect(("127.0.0.1", self.port)).ok();
    }
}
