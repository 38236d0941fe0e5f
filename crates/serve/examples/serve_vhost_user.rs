//! Serves a raw image to a virtual machine of this host, until its standard input ends:
//! `serve_vhost_user SOCKET [ro|rw] IMAGE`.
//!
//! For trying QEMU against the server, and for measuring it.

#![allow(
    clippy::print_stderr,
    reason = "a tool for those who work on the project, not for users"
)]

use std::error::Error;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::{BlockDevice, BlockDeviceMut, FileDevice, FileDeviceMut, IoMode, SystemClock};
use holdfast_serve::vhost_user::{
    AcceptedWrites, ExportDevice, Limits, Listener, ServerResources, VhostUserEvent, VhostUserExport,
    VhostUserExportOptions, VhostUserServer, VhostUserServerOptions,
};

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [socket, mode, image] = words.as_slice() else {
        return Err("serve_vhost_user SOCKET [ro|rw] IMAGE".into());
    };
    let image = Path::new(image);
    let device = if mode == "rw" {
        let device: Arc<dyn BlockDeviceMut> = Arc::new(FileDeviceMut::open(image, IoMode::Buffered)?);
        ExportDevice::Writable(device)
    } else {
        let device: Arc<dyn BlockDevice> = Arc::new(FileDevice::open(image, IoMode::Buffered)?);
        ExportDevice::ReadOnly(device)
    };
    let clock = Arc::new(SystemClock::new());
    let listener = Listener::unix(Path::new(socket), &*clock)?;
    let server = VhostUserServer::new(VhostUserServerOptions {
        resources: ServerResources::new(Limits::default()),
        clock,
        events: Arc::new(|event: &VhostUserEvent<'_>| eprintln!("{event:?}")),
        server_number: std::process::id().into(),
    });
    let options = VhostUserExportOptions {
        serial: "example".to_owned(),
        accepted_writes: AcceptedWrites::Stay,
        ..VhostUserExportOptions::new("disk")
    };
    let disk = server.add(VhostUserExport::new(device, options));
    server.listen(disk, listener)?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    let report = server.stop(Duration::from_secs(10));
    match report.abandoned_connection_count {
        0 => Ok(()),
        count => Err(format!("{count} connections did not end").into()),
    }
}
