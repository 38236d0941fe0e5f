//! Runs the server until standard input ends, to try it by hand: `xapi-server FOLDER`.

use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;

use holdfast_xapi_server::{NewDisk, NewVm, Server};

/// Size of the disk of the only machine.
const DISK_BYTES: u64 = 64 << 20;

#[expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program for a terminal prints"
)]
fn main() -> ExitCode {
    let Some(folder) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("usage: xapi-server FOLDER");
        return ExitCode::from(2);
    };
    let server = match Server::start(&folder) {
        Ok(server) => server,
        Err(error) => {
            eprintln!("xapi-server: {}: {error}", folder.display());
            return ExitCode::FAILURE;
        }
    };
    let vm = server.add_vm(&NewVm {
        name: "demo".to_owned(),
        disks: vec![NewDisk::new("xvda", DISK_BYTES)],
        power_state: "Running".to_owned(),
    });
    server.write_disk(&vm, "xvda", 0, b"This is a disk of a machine that does not exist.\n");
    println!("master       https://{}", server.address());
    println!("slave        https://{}", server.slave_address());
    println!("user         {}", server.user());
    println!("password     {}", server.password());
    println!("fingerprint  {}", server.fingerprint());
    println!("machine      {vm}");
    println!("It ends with its input (Ctrl-D).");
    let mut rest = Vec::new();
    match std::io::stdin().read_to_end(&mut rest) {
        Ok(_) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}
