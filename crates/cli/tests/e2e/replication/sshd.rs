//! An sshd on the loopback interface with keys of its own, and a proxy that breaks connections at any byte.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use holdfast_host::provider::REPLICA_TAG;

use super::or_skip;
use crate::schedules::wait_until;
use holdfast_test_kit::file_systems::system;

/// Whether its users have `holdfast` in their path.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Program<'a> {
    Found,
    NotFound,
    /// In this folder is a program of this name that is found before.
    FoundIn(&'a Path),
}

/// The keys of all sshds of the tests.
struct Keys {
    host: String,
    user: String,
    user_public: String,
}

/// They are made once: each takes as long as the start of a sshd.
fn keys() -> Result<&'static Keys, String> {
    static KEYS: OnceLock<Result<Keys, String>> = OnceLock::new();
    let make = || {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        let read = |name: &str| std::fs::read_to_string(at(name)).unwrap();
        for key in ["host", "user"] {
            system("ssh-keygen", &["-q", "-t", "ed25519", "-N", "", "-f", &at(key)])?;
        }
        Ok(Keys {
            host: read("host"),
            user: read("user"),
            user_public: read("user.pub"),
        })
    };
    KEYS.get_or_init(make).as_ref().map_err(Clone::clone)
}

/// Writes a file that only its owner reads, as ssh requires.
fn write_private(path: &Path, text: &str) {
    let mut file = std::fs::File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .unwrap();
    file.write_all(text.as_bytes()).unwrap();
}

/// An sshd, which is stopped on drop.
pub(crate) struct Sshd {
    folder: tempfile::TempDir,
    port: u16,
    process: Child,
}

impl Drop for Sshd {
    fn drop(&mut self) {
        let mut end = self.ssh(&["-O", "exit", "127.0.0.1"]);
        end.stderr(Stdio::null()).status().ok();
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

impl Sshd {
    /// Starts an sshd that accepts the key, for any command or for `forced` only.
    pub(crate) fn start(program: Program<'_>, forced: Option<&str>) -> Option<Self> {
        or_skip(Self::try_start(program, forced, None))
    }

    /// Starts one with the view of the file system that a process has now: another host. It does not see what is mounted later
    /// for that process alone. What other tests unmount is unmounted for it, too: a private copy would keep it in use.
    pub(crate) fn start_inside(process: u32, program: Program<'_>) -> Option<Self> {
        or_skip(Self::try_start(program, None, Some(process)))
    }

    #[expect(clippy::disallowed_methods, reason = "only sshd is a sshd")]
    fn try_start(program: Program<'_>, forced: Option<&str>, inside: Option<u32>) -> Result<Self, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("a sshd that lets in its own user is started by root here".to_owned());
        }
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        let keys = keys()?;
        for (name, text) in [("host", &keys.host), ("user", &keys.user)] {
            write_private(&folder.path().join(name), text);
        }
        let before = forced
            .map(|command| format!("restrict,command=\"{command}\" "))
            .unwrap_or_default();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let program_folder = Path::new(env!("CARGO_BIN_EXE_holdfast")).parent().unwrap().display();
        let path = match program {
            Program::Found => format!("{program_folder}:/usr/sbin:/usr/bin:/sbin:/bin"),
            Program::NotFound => "/usr/sbin:/usr/bin:/sbin:/bin".to_owned(),
            Program::FoundIn(folder) => format!("{}:{program_folder}:/usr/sbin:/usr/bin:/sbin:/bin", folder.display()),
        };
        let config = format!(
            "ListenAddress 127.0.0.1:{port}\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\nStrictModes no\nUsePAM no\n\
             PermitRootLogin yes\nPasswordAuthentication no\nSetEnv PATH={path} HOME={}\nLogLevel ERROR\nMaxSessions 20\n",
            at("host"),
            at("keys"),
            at("home")
        );
        // Without the profile of the user, whose shell may start many programs before each command.
        std::fs::create_dir(at("home")).unwrap();
        for (name, text) in [("keys", format!("{before}{}", keys.user_public)), ("config", config)] {
            std::fs::File::create(at(name))
                .and_then(|mut file| file.write_all(text.as_bytes()))
                .unwrap();
        }
        std::fs::create_dir_all("/run/sshd").map_err(|error| error.to_string())?;
        let mut command = match inside {
            Some(process) => {
                let mut command = Command::new("/usr/bin/nsenter");
                let namespace = format!("--mount=/proc/{process}/ns/mnt");
                command.args([
                    &namespace,
                    "--",
                    "/usr/bin/unshare",
                    "--mount",
                    "--propagation",
                    "unchanged",
                ]);
                command.arg("/usr/sbin/sshd");
                command
            }
            None => Command::new("/usr/sbin/sshd"),
        };
        command
            .args(["-D", "-e", "-f", &at("config")])
            .stderr(Stdio::null())
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let process = command
            .spawn()
            .map_err(|error| format!("sshd does not start: {error}"))?;
        let sshd = Self { folder, port, process };
        let clock = SystemClock::new();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(clock.now() < Duration::from_secs(30), "sshd does not answer");
            clock.sleep(Duration::from_millis(10));
        }
        let words = [
            "-o",
            "ControlMaster=yes",
            "-o",
            "ControlPersist=60",
            "-f",
            "-N",
            "127.0.0.1",
        ];
        let mut master = sshd.ssh(&words);
        let connected = master.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        assert!(connected.status().unwrap().success(), "sshd accepts no connection");
        Ok(sshd)
    }

    /// Its process, which starts one for each connection.
    pub(crate) fn process_id(&self) -> u32 {
        self.process.id()
    }

    /// Options with which `holdfast replicate` connects to it.
    pub(crate) fn options(&self) -> Vec<String> {
        self.options_by(self.port)
    }

    /// The same with another port.
    pub(crate) fn options_by(&self, port: u16) -> Vec<String> {
        let user = self.folder.path().join("user").display().to_string();
        let options = [
            format!("Port={port}"),
            format!("IdentityFile={user}"),
            "IdentitiesOnly=yes".to_owned(),
            "UserKnownHostsFile=/dev/null".to_owned(),
            "StrictHostKeyChecking=no".to_owned(),
        ];
        options
            .into_iter()
            .flat_map(|option| ["--ssh-option".to_owned(), option])
            .collect()
    }

    /// Runs a command on it by ssh with this input; returns the exit code and all output.
    pub(crate) fn run(&self, command: &str, input: &[u8]) -> (Option<i32>, String) {
        let mut ssh = self.ssh(&["-T", "127.0.0.1"]);
        ssh.args(Some(command).filter(|command| !command.is_empty()));
        let mut child = ssh
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(input).ok();
        let output = child.wait_with_output().unwrap();
        let message = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8_lossy(&message).into_owned())
    }

    /// All commands share one connection, because there are many.
    #[expect(clippy::disallowed_methods, reason = "a hostile sender has his own ssh")]
    fn ssh(&self, words: &[&str]) -> Command {
        let socket = format!("ControlPath={}", self.folder.path().join("socket").display());
        let options = self.options();
        let options = options
            .iter()
            .map(|word| if word == "--ssh-option" { "-o" } else { word });
        let mut ssh = Command::new("ssh");
        ssh.args(options)
            .args(["-o", "BatchMode=yes", "-o", "LogLevel=ERROR", "-o", &socket]);
        ssh.args(words);
        ssh
    }

    /// Starts a proxy to it, which breaks connections after a number of transferred bytes.
    pub(crate) fn breaking_proxy(&self) -> BreakingProxy {
        let left = Arc::new(AtomicU64::new(u64::MAX));
        let port = self.start_proxy(Arc::clone(&left), None);
        BreakingProxy { port, left }
    }

    /// Starts a proxy to it that passes so many bytes per second, and returns its port.
    pub(crate) fn slow_proxy(&self, bytes_per_s: u64) -> u16 {
        self.start_proxy(Arc::new(AtomicU64::new(u64::MAX)), Some(bytes_per_s))
    }

    fn start_proxy(&self, left: Arc<AtomicU64>, bytes_per_s: Option<u64>) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        // What is in its buffers is sent, however slow it is.
        if bytes_per_s.is_some() {
            rustix::net::sockopt::set_socket_recv_buffer_size(&listener, 64 << 10).unwrap();
        }
        let to = self.port;
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let left = Arc::clone(&left);
                std::thread::spawn(move || {
                    let Ok(server) = TcpStream::connect(("127.0.0.1", to)) else {
                        return;
                    };
                    let backward = (server.try_clone().unwrap(), client.try_clone().unwrap());
                    std::thread::spawn(move || forward(backward.0, backward.1, &AtomicU64::new(u64::MAX), None));
                    forward(client, server, &left, bytes_per_s);
                });
            }
        });
        port
    }
}

/// A proxy that breaks connections.
pub(crate) struct BreakingProxy {
    pub(crate) port: u16,
    left: Arc<AtomicU64>,
}

impl BreakingProxy {
    /// Breaks the connection once, after this many bytes from now on.
    pub(crate) fn break_after(&self, bytes: u64) {
        self.left.store(bytes, Ordering::SeqCst);
    }

    /// Waits until a connection is broken, and lets all others pass.
    pub(crate) fn heal_after_the_break(&self) {
        wait_until("the connection is broken", || self.left.load(Ordering::SeqCst) == 0);
        self.break_after(u64::MAX);
    }
}

fn forward(mut from: TcpStream, mut to: TcpStream, left: &AtomicU64, bytes_per_s: Option<u64>) {
    let clock = SystemClock::new();
    let mut buffer = vec![0; 16 << 10];
    while let Ok(length) = from.read(&mut buffer) {
        let allowed = left.load(Ordering::SeqCst);
        let passed = length.min(usize::try_from(allowed).unwrap_or(usize::MAX));
        if allowed != u64::MAX {
            left.store(allowed - passed as u64, Ordering::SeqCst);
        }
        if length == 0 || to.write_all(&buffer[..passed]).is_err() || passed < length {
            break;
        }
        if let Some(bytes_per_s) = bytes_per_s {
            clock.sleep(Duration::from_nanos(passed as u64 * 1_000_000_000 / bytes_per_s));
        }
    }
    from.shutdown(Shutdown::Both).ok();
    to.shutdown(Shutdown::Both).ok();
}

/// The tag of the holds for a target on this host.
pub(crate) fn tag_of(target: &str) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let sum = format!("{}:{target}", host.trim())
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
            (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
    format!("{REPLICA_TAG}{sum:016x}")
}

/// Converts arguments for the rig.
pub(crate) fn texts(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}
