//! Runs programs that a test requires.

use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Runs a program, which must succeed; returns its output.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = match Command::new(program).args(arguments).output() {
        Ok(output) => output,
        Err(error) => panic!("these tests need {program} (scripts/setup installs it): {error}"),
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {text}");
    text
}

/// Creates a program from the text of a script, or replaces it.
///
/// Another process writes the file: were it open for writing here, a child that another test starts in this moment would
/// keep it open, and the kernel would refuse to execute it (ETXTBSY).
pub fn write_program(path: &Path, script: &str) {
    let mut install = Command::new("install");
    install
        .args(["-m", "755", "/dev/stdin"])
        .arg(path)
        .stdin(Stdio::piped());
    let mut child = install.spawn().unwrap();
    child.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success(), "{}", path.display());
}

/// Copies a program, so that it can be executed at once, as [`write_program`] does.
pub fn copy_program(from: &Path, to: &Path) {
    let status = Command::new("install").args(["-m", "755"]).args([from, to]).status();
    assert!(status.unwrap().success(), "{}", to.display());
}

/// A listening socket, and the name by which a service knows it.
pub struct ServiceSocket<'a> {
    /// The name (`FileDescriptorName=`).
    pub name: &'a str,
    /// The socket.
    pub socket: OwnedFd,
}

/// Starts a program with two sockets as systemd does: as the descriptors 3 and 4, with the variables of sd_listen_fds(3).
/// Its messages go to the file `errors`.
pub fn activate(program: &Command, sockets: [ServiceSocket<'_>; 2], errors: &Path) -> Command {
    // The shell replaces itself, so LISTEN_PID is the process of the program. The standard streams carry the sockets to it.
    const SCRIPT: &str = "exec 3<&0 4<&2 </dev/null 2>\"$ERRORS\"; export LISTEN_PID=$$; exec \"$@\"";
    let names = sockets.each_ref().map(|socket| socket.name).join(":");
    let [first, second] = sockets.map(|socket| Stdio::from(socket.socket));
    let mut command = Command::new("sh");
    command
        .args(["-c", SCRIPT, "sh"])
        .arg(program.get_program())
        .args(program.get_args());
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    if let Some(folder) = program.get_current_dir() {
        command.current_dir(folder);
    }
    command
        .env("ERRORS", errors)
        .env("LISTEN_FDS", "2")
        .env("LISTEN_FDNAMES", names);
    command.stdin(first).stderr(second).stdout(Stdio::piped());
    command
}

/// The time for which the threads of a process have run or have waited for a processor: on a busy host, a process that
/// waits is not idle.
pub fn processor_demand(process: u32) -> Duration {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let of_task = |task: std::fs::DirEntry| {
        // A thread may have ended.
        let text = std::fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
        let nanoseconds = text.split_whitespace().take(2).map(|word| word.parse::<u64>().unwrap());
        Duration::from_nanos(nanoseconds.sum())
    };
    tasks.map(|task| of_task(task.unwrap())).sum()
}

/// Asserts that the NBD export at `socket` contains `byte` in `length` bytes from `offset` on.
pub fn assert_served(socket: &Path, export: &str, byte: usize, offset: u64, length: u64) {
    let uri = format!("nbd+unix:///{export}?socket={}", socket.display());
    let command = format!("read -P {byte} {offset} {length}");
    let printed = run("qemu-io", &["-r", "-f", "raw", "-c", &command, &uri]);
    assert!(
        printed.contains(&format!("read {length}/{length}")) && !printed.contains("failed"),
        "{printed}"
    );
}
