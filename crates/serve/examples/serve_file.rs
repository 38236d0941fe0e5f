//! Serves files over NBD until standard input ends: `serve_file SOCKET ro|rw FILE [TCP_PORT]`. For measurements, and to
//! try clients by hand.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a tool for those who work on the project, not for users"
)]

use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::{FileDevice, FileDeviceMut, IoMode, SystemClock};
use holdfast_serve::nbd::{
    Absent, Event, Export, ExportDevice, FixedExports, Limits, Listener, Server, ServerOptions, ServerResources,
    TlsPolicy, ZeroSpeed,
};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, access, file, ..] = arguments.as_slice() else {
        panic!("serve_file SOCKET ro|rw FILE [TCP_PORT]");
    };
    let path = Path::new(file);
    let device = if access == "rw" {
        ExportDevice::Writable(Arc::new(FileDeviceMut::open(path, IoMode::Buffered).unwrap()))
    } else {
        ExportDevice::ReadOnly(Arc::new(FileDevice::open(path, IoMode::Buffered).unwrap()))
    };
    let export = Export::new("disk", device)
        .with_description(file.as_str())
        .with_absent(Absent::ReadsAsZero)
        .with_zero_speed(ZeroSpeed::Quick);
    let clock = SystemClock::new();
    let mut server = Server::new(ServerOptions {
        exports: Arc::new(FixedExports::new([export])),
        resources: ServerResources::new(Limits::default()),
        tls: TlsPolicy::Off,
        clock: Arc::new(clock),
        events: Arc::new(|event: &Event<'_>| eprintln!("{event:?}")),
    });
    server
        .listen(Listener::unix(Path::new(socket), &clock).unwrap())
        .unwrap();
    if let Some(port) = arguments.get(3) {
        let address = ([127, 0, 0, 1], port.parse().unwrap()).into();
        server.listen(Listener::tcp(address).unwrap()).unwrap();
    }
    // Ends with the parent process.
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    eprintln!("{:?}", server.stop(Duration::from_secs(5)));
}
