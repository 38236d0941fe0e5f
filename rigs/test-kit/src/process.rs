//! Runs programs that a test requires.

use std::path::Path;
use std::process::Command;

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
