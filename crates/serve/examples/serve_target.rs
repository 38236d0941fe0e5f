//! Serves a file over iSCSI until standard input ends: `serve_target PORT ro|rw 512|4096 FILE`. For measurements, and
//! to try initiators by hand.

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
use holdfast_serve::iscsi::{
    Authentication, ExportDevice, InitiatorAccess, Limits, Listener, LogicalUnit, SectorSize, ServerResources, Target,
    TargetEvent, TargetServer, TargetServerOptions, TargetSet, UnitOptions,
};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [port, access, sector, file] = arguments.as_slice() else {
        panic!("serve_target PORT ro|rw 512|4096 FILE");
    };
    let path = Path::new(file);
    let device = if access == "rw" {
        ExportDevice::Writable(Arc::new(FileDeviceMut::open(path, IoMode::Buffered).unwrap()))
    } else {
        ExportDevice::ReadOnly(Arc::new(FileDevice::open(path, IoMode::Buffered).unwrap()))
    };
    let mut options = UnitOptions::new("example");
    if sector == "4096" {
        options.sector_size = SectorSize::Bytes4096;
    }
    let units = vec![LogicalUnit::new(device, options)];
    let target = Target::new("iqn.2026-01.org.example:disk", InitiatorAccess::Anyone, units).unwrap();
    let mut server = TargetServer::new(TargetServerOptions {
        targets: Arc::new(TargetSet::new([target])),
        authentication: Authentication::None,
        resources: ServerResources::new(Limits::default()),
        clock: Arc::new(SystemClock::new()),
        events: Arc::new(|event: &TargetEvent<'_>| eprintln!("{event:?}")),
        // No challenge is sent without CHAP.
        randomness: Arc::new(|_: &mut [u8]| Ok(())),
    });
    let address = ([127, 0, 0, 1], port.parse().unwrap()).into();
    server.listen(Listener::tcp(address).unwrap()).unwrap();
    // Ends with the parent process.
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    eprintln!("{:?}", server.stop(Duration::from_secs(5)));
}
