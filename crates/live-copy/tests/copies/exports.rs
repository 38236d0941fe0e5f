//! Exports of NBD servers as targets.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast_block::{
    BlockDevice, BlockDeviceMut, Clock as _, Fault, FaultRule, FaultyDevice, MemoryDevice, RequestKind, SystemClock,
};
use holdfast_live_copy::{
    Connector, Error, ExistingTarget, ExportTarget, LiveCopyReport, LocalConnector, ReceiveRequest, RefusalKind,
    Result, StillSource,
};
use holdfast_serve::nbd::client::{Error as NbdError, NbdOptions, NbdUri};
use holdfast_serve::nbd::{
    Event, Export, ExportDevice, FixedExports, Limits, Listener, Server, ServerOptions, ServerResources, TlsPolicy,
};

use super::rig::{Rig, breaking, content_of};
use super::{MIB, disk};

/// An NBD server that can be stopped and started again with other devices.
struct ExportServer {
    server: Mutex<Option<Server>>,
    socket: PathBuf,
}

impl ExportServer {
    fn start(rig: &Rig, device: ExportDevice) -> Self {
        let this = Self {
            server: Mutex::new(None),
            socket: rig.path("socket"),
        };
        this.restart(device);
        this
    }

    fn writable(rig: &Rig, device: &Arc<impl BlockDeviceMut + 'static>) -> Self {
        Self::start(rig, writable(device))
    }

    fn stop(&self) {
        drop(self.server.lock().unwrap().take());
    }

    fn restart(&self, device: ExportDevice) {
        self.stop();
        let mut server = Server::new(ServerOptions {
            exports: Arc::new(FixedExports::new([Export::new("disk", device)])),
            resources: ServerResources::new(Limits::default()),
            tls: TlsPolicy::Off,
            clock: Arc::new(SystemClock::new()),
            events: Arc::new(|_: &Event<'_>| {}),
        });
        let listener = Listener::unix(&self.socket, &SystemClock::new()).unwrap();
        server.listen(listener).unwrap();
        *self.server.lock().unwrap() = Some(server);
    }

    fn address(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.socket.display())
    }

    fn connect(&self) -> Result<ExportTarget> {
        let uri: NbdUri = self.address().parse().unwrap();
        ExportTarget::connect(&self.address(), &uri, NbdOptions::default())
    }

    fn connector(&self, rig: &Rig) -> Arc<dyn Connector> {
        Arc::new(LocalConnector::to_export(rig.tools(), self.connect().unwrap()))
    }

    fn request(&self, rig: &Rig, device: &MemoryDevice) -> ReceiveRequest {
        ReceiveRequest {
            target: PathBuf::from(self.address()),
            existing: ExistingTarget::Replace,
            ..rig.request(device)
        }
    }

    fn copy(&self, rig: &Rig, device: &MemoryDevice) -> Result<LiveCopyReport> {
        let source = StillSource::new(device);
        rig.copy_as(&source, self.connector(rig), self.request(rig, device), PATIENCE)
    }
}

const PATIENCE: Duration = Duration::from_secs(60);

fn writable(device: &Arc<impl BlockDeviceMut + 'static>) -> ExportDevice {
    ExportDevice::Writable(Arc::clone(device) as Arc<dyn BlockDeviceMut>)
}

fn journal_count(rig: &Rig) -> usize {
    std::fs::read_dir(rig.path("journals")).map_or(0, Iterator::count)
}

/// Content that no disk of these tests has.
fn old_content(size_bytes: u64) -> Arc<MemoryDevice> {
    Arc::new(MemoryDevice::from_bytes(&vec![
        0x5a;
        usize::try_from(size_bytes).unwrap()
    ]))
}

#[test]
fn an_export_gets_the_disk_and_keeps_what_is_beyond() {
    let rig = Rig::new();
    let device = disk(31, 12 * MIB + 300);
    let target = old_content(14 * MIB);
    let server = ExportServer::writable(&rig, &target);
    let report = server.copy(&rig, &device).unwrap();
    assert!(report.sent_bytes < 6 * MIB, "{report:?}");
    let (copied, beyond) = split(&target, device.size_bytes());
    assert!(copied == content_of(&device) && beyond.iter().all(|byte| *byte == 0x5a));
    assert_eq!(journal_count(&rig), 0);
}

fn split(device: &MemoryDevice, at: u64) -> (Vec<u8>, Vec<u8>) {
    let mut content = content_of(device);
    let rest = content.split_off(usize::try_from(at).unwrap());
    (content, rest)
}

#[test]
fn another_program_continues_a_copy_to_an_export() {
    let rig = Rig::new();
    let device = disk(32, 180 * MIB);
    let target = old_content(180 * MIB);
    let server = ExportServer::writable(&rig, &target);
    let request = server.request(&rig, &device);
    let once = breaking(server.connector(&rig), 48 * MIB);
    let error = rig.copy_as(&StillSource::new(&device), once, request, Duration::ZERO);
    assert!(matches!(error, Err(Error::GivenUp { .. })), "{error:?}");
    assert_eq!(journal_count(&rig), 1);
    let report = server.copy(&rig, &device).unwrap();
    assert!(report.sent_bytes < 45 * MIB, "{report:?}");
    assert!(content_of(&*target) == content_of(&device));
    assert_eq!(journal_count(&rig), 0);
}

/// The server ends in the middle. One comes back that has lost everything, although it had confirmed to have it.
#[test]
fn a_server_that_comes_back_without_its_data_gets_all_of_it_again() {
    let rig = Rig::new();
    let device = disk(33, 60 * MIB);
    let first = Arc::new(FaultyDevice::new(MemoryDevice::new(60 * MIB)));
    let second = old_content(60 * MIB);
    let server = ExportServer::writable(&rig, &first);
    let report = std::thread::scope(|scope| {
        scope.spawn(|| {
            let clock = SystemClock::new();
            while first.count(RequestKind::Flush) < 1 {
                clock.sleep(Duration::from_millis(1));
            }
            server.stop();
            clock.sleep(Duration::from_millis(300));
            server.restart(writable(&second));
        });
        server.copy(&rig, &device)
    });
    let report = report.unwrap();
    assert!(
        report.lost_connection_count > 0 || report.sent_bytes > 20 * MIB,
        "{report:?}"
    );
    assert!(content_of(&*second) == content_of(&device));
}

#[test]
fn a_full_server_ends_the_copy_and_with_room_it_continues() {
    let rig = Rig::new();
    let device = disk(34, 24 * MIB);
    let target = Arc::new(FaultyDevice::new(MemoryDevice::new(24 * MIB)));
    target.add(FaultRule::from_nth(RequestKind::Write, 3, Fault::NoSpace));
    let server = ExportServer::writable(&rig, &target);
    let error = server.copy(&rig, &device);
    let Err(Error::Refused {
        kind: RefusalKind::NoSpace,
        reason,
        ..
    }) = error
    else {
        panic!("{error:?}")
    };
    assert!(reason.contains("ENOSPC"), "{reason}");
    target.clear_rules();
    server.copy(&rig, &device).unwrap();
    assert!(content_of(&*target) == content_of(&device));
}

#[test]
fn an_export_that_cannot_be_a_target_is_refused() {
    let rig = Rig::new();
    let device = disk(35, 2 * MIB);
    let target = old_content(2 * MIB);
    let server = ExportServer::start(&rig, ExportDevice::ReadOnly(target.clone()));
    let Err(error) = server.connect() else {
        panic!("it is read-only")
    };
    assert!(matches!(error, Error::Export(NbdError::ReadOnly { .. })), "{error}");

    server.restart(writable(&target));
    let request = ReceiveRequest {
        existing: ExistingTarget::Refuse,
        ..server.request(&rig, &device)
    };
    let error = rig.copy_as(
        &StillSource::new(&device),
        server.connector(&rig),
        request,
        Duration::ZERO,
    );
    let is_of = |error: &Result<LiveCopyReport>, expected: RefusalKind| matches!(error, Err(Error::Refused { kind, .. }) if *kind == expected);
    assert!(is_of(&error, RefusalKind::Exists), "{error:?}");
    assert!(content_of(&*target) == vec![0x5a; 2 << 20]);

    let larger = disk(36, 2 * MIB + 1);
    let error = server.copy(&rig, &larger);
    assert!(is_of(&error, RefusalKind::NoSpace), "{error:?}");

    assert_eq!(journal_count(&rig), 0);

    // Another export gets the name of the target.
    let connected = server.connector(&rig);
    server.restart(writable(&old_content(3 * MIB)));
    let error = rig.copy_as(
        &StillSource::new(&device),
        connected,
        server.request(&rig, &device),
        PATIENCE,
    );
    assert!(is_of(&error, RefusalKind::Io), "{error:?}");
}
