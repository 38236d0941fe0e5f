//! Servers to be tested.

use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use holdfast_block::{BlockDeviceMut, MemoryDevice, SystemClock};
use holdfast_serve::iscsi::{
    Authentication, ExportDevice, InitiatorAccess, Limits, LogicalUnit, SectorSize, ServerResources, Socket, Target,
    TargetEvent, TargetServer, TargetServerOptions, TargetSet, UnitOptions,
};

pub(crate) const TARGET: &str = "iqn.2026-01.org.example:disk";
/// A target that only [`FRIEND`] may use.
pub(crate) const PRIVATE: &str = "iqn.2026-01.org.example:private";
pub(crate) const FRIEND: &str = "iqn.2026-01.org.example:friend";
/// Bytes of every unit: data up to [`DATA_END`], zeros from there on.
pub(crate) const SIZE: usize = 4 << 20;
pub(crate) const DATA_END: usize = 1 << 20;

/// The contents of the data at `offset`.
pub(crate) fn pattern(offset: usize) -> u8 {
    u8::try_from((offset / 512 * 7 + offset % 251) % 256).unwrap()
}

/// A target that initiators connect to: ours, or one of others.
pub(crate) trait Portal {
    /// A new connection to the server.
    fn connect(&self) -> UnixStream;
}

/// A server on devices in memory.
pub(crate) struct TestTarget {
    pub(crate) server: TargetServer,
    /// The device of unit 0.
    pub(crate) device: Arc<MemoryDevice>,
    /// Events as text.
    pub(crate) events: Arc<Mutex<Vec<String>>>,
}

pub(crate) fn start(authentication: Authentication) -> TestTarget {
    start_with(authentication, Limits::default())
}

/// Starts a server with two targets. The first has a writable unit, a read-only one, and one with large sectors.
pub(crate) fn start_with(authentication: Authentication, limits: Limits) -> TestTarget {
    let first = device();
    start_on(Arc::clone(&first) as _, first, authentication, limits)
}

/// The same, with `unit` as the writable unit, which stores its data in `device`.
pub(crate) fn start_on(
    unit: Arc<dyn BlockDeviceMut>,
    device: Arc<MemoryDevice>,
    authentication: Authentication,
    limits: Limits,
) -> TestTarget {
    let large = UnitOptions {
        sector_size: SectorSize::Bytes4096,
        ..UnitOptions::new("large")
    };
    let units = vec![
        LogicalUnit::new(ExportDevice::Writable(unit), UnitOptions::new("first")),
        LogicalUnit::new(ExportDevice::ReadOnly(self::device()), UnitOptions::new("second")),
        LogicalUnit::new(ExportDevice::Writable(self::device()), large),
    ];
    let private = vec![LogicalUnit::new(
        ExportDevice::ReadOnly(self::device()),
        UnitOptions::new("private"),
    )];
    let friends = InitiatorAccess::Listed(vec![FRIEND.to_owned()]);
    let targets = TargetSet::new([
        Target::new(TARGET, InitiatorAccess::Anyone, units).unwrap(),
        Target::new(PRIVATE, friends, private).unwrap(),
    ]);
    start_set(Arc::new(targets), device, authentication, limits)
}

/// A server with these targets.
pub(crate) fn start_set(
    targets: Arc<TargetSet>,
    device: Arc<MemoryDevice>,
    authentication: Authentication,
    limits: Limits,
) -> TestTarget {
    let events = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&events);
    let server = TargetServer::new(TargetServerOptions {
        targets,
        authentication,
        resources: ServerResources::new(limits),
        clock: Arc::new(SystemClock::new()),
        events: Arc::new(move |event: &TargetEvent<'_>| log.lock().unwrap().push(format!("{event:?}"))),
        randomness: Arc::new(|bytes: &mut [u8]| {
            bytes.fill(5);
            Ok(())
        }),
    });
    TestTarget { server, device, events }
}

/// A device with data at its start.
pub(crate) fn device() -> Arc<MemoryDevice> {
    let device = MemoryDevice::new(SIZE as u64);
    let data: Vec<u8> = (0..DATA_END).map(pattern).collect();
    device.write_at(&data, 0).unwrap();
    Arc::new(device)
}

impl Portal for TestTarget {
    fn connect(&self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.server.serve(Socket::Unix(theirs)).unwrap();
        ours
    }
}
