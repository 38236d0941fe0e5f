//! Other NBD servers, one process for each test.

#![expect(clippy::disallowed_methods, reason = "tests run the peer")]

use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use holdfast_serve::nbd::client::{Endpoint, NbdDevice, NbdDeviceMut, NbdOptions};
use tempfile::TempDir;

/// A server on a Unix socket. It is killed when the value is dropped. If it does not start, it closes the first
/// connection.
pub(crate) struct Server {
    child: Child,
    directory: TempDir,
}

impl Server {
    /// Starts nbdkit with these arguments, including filters and plugin.
    pub(crate) fn nbdkit(arguments: &[&str]) -> Self {
        Self::start(&["nbdkit", "-f", "--exit-with-parent"], arguments)
    }

    /// Starts qemu-nbd with these arguments, including the image.
    pub(crate) fn qemu_nbd(arguments: &[&str]) -> Self {
        Self::start(&["qemu-nbd", "--persistent", "--shared=8"], arguments)
    }

    /// Passes a listening socket to the program, by systemd's protocol, so that no test has to wait for it.
    fn start(program: &[&str], arguments: &[&str]) -> Self {
        const HAND_OVER: &str = "exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec \"$@\"";
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("socket")).unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", HAND_OVER, "sh"]).args(program).args(arguments);
        let child = command.stdin(OwnedFd::from(listener)).stderr(Stdio::null()).spawn();
        Self {
            child: child.unwrap(),
            directory,
        }
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

    /// Kills the server while it is working.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The server may have exited before.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Runs a program that must succeed; returns its output.
pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = match Command::new(program).args(arguments).output() {
        Ok(output) => output,
        Err(error) => panic!("these tests need {program} (see scripts/setup): {error}"),
    };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {errors}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Forwards TCP connections to a Unix socket until the value is dropped.
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
