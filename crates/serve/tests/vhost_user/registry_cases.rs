//! Exports of a registry that are removed while machines use them.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::{BlockDevice as _, FaultyDevice, MemoryDevice, RequestKind, SystemClock};
use holdfast_serve::registry::{ClientProtocol, ExportOptions, RegisteredExport, Registry, Removal};
use holdfast_serve::vhost_user::{AcceptedWrites, ExportDevice, Limits, Listener, VhostUserExport};

use crate::front_end::{Guest, TestServer, device, options};
use crate::successors::reconnect;

const FORCED: Removal = Removal::Forced {
    patience: Duration::from_secs(60),
};

fn add(registry: &Registry, device: ExportDevice) -> Arc<RegisteredExport> {
    registry.add(ExportOptions::new("disk", device)).unwrap()
}

fn serve(export: &Arc<RegisteredExport>, accepted_writes: AcceptedWrites) -> TestServer {
    let export = VhostUserExport::of(export, options(accepted_writes));
    TestServer::serving(export, Limits::default())
}

#[test]
fn a_removed_disk_is_flushed_and_its_machine_disconnected() {
    let registry = Registry::default();
    let clock = SystemClock::new();
    let content = device();
    let faulty = Arc::new(FaultyDevice::new(Arc::clone(&content)));
    let export = add(&registry, ExportDevice::Writable(Arc::clone(&faulty) as _));
    let server = serve(&export, AcceptedWrites::NeedFlush);
    let mut guest = server.guest();
    assert_eq!(guest.request(1, 0, &[7; 512], 0).status, 0);
    assert_eq!(guest.request(0, 0, &[], 512).data, [7; 512]);
    let clients = export.clients();
    assert_eq!(clients.len(), 1);
    assert_eq!(clients[0].protocol, ClientProtocol::VhostUser);
    let traffic = export.traffic();
    assert_eq!((traffic.write_bytes, traffic.read_bytes), (512, 512));
    assert!(registry.remove("disk", Removal::IfUnused, &clock).is_err());
    let flushed = faulty.count(RequestKind::Flush);
    let report = registry.remove("disk", FORCED, &clock).unwrap();
    assert_eq!((report.ended_client_count, report.is_busy), (1, false));
    assert!(faulty.count(RequestKind::Flush) > flushed);
    server.wait_for_event("ByServer");
    server.wait_until_gone();
    // Later machines are disconnected at once.
    drop(server.connect());
    server.wait_until_gone();
    let mut first = [0; 512];
    content.read_at(&mut first, 0).unwrap();
    assert_eq!(first, [7; 512]);
}

/// The second disk of the name has a new overlay, in the same server.
#[test]
fn a_disk_that_is_added_again_lacks_discarded_writes() {
    let registry = Registry::default();
    let clock = SystemClock::new();
    let export = add(&registry, ExportDevice::Writable(device()));
    let mut server = serve(&export, AcceptedWrites::Discarded);
    let mut guest = server.guest();
    assert_eq!(guest.request(1, 0, &[7; 512], 0).status, 0);
    registry.remove("disk", FORCED, &clock).unwrap();
    server.server.withdraw(server.disk);
    let again = add(&registry, ExportDevice::Writable(device()));
    let again = VhostUserExport::of(&again, options(AcceptedWrites::Discarded));
    server.disk = server.server.add(again);
    assert!(reconnect(guest, &server).is_err());
    server.wait_for_event("WritesLost");
}

#[test]
fn a_withdrawn_disk_has_no_socket() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.sock");
    let clock = SystemClock::new();
    let server = TestServer::start(ExportDevice::ReadOnly(Arc::new(MemoryDevice::new(4096))));
    server
        .server
        .listen(server.disk, Listener::unix(&path, &clock).unwrap())
        .unwrap();
    let mut guest = Guest::start(UnixStream::connect(&path).unwrap(), u64::MAX);
    server.server.withdraw(server.disk);
    assert!(!path.exists());
    assert!(UnixStream::connect(&path).is_err());
    assert_eq!(guest.request(0, 0, &[], 512).data, [0; 512], "its machine continues");
    drop(guest);
    server.wait_for_event("Disconnected");
}
