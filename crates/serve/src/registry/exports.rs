//! The exports of a process, by name.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use holdfast_block::{Clock, Error as DeviceError};

use super::clients::{ClientEntry, ClientHandle, ClientSession, Clients, Closing};
use super::counters::{CacheUse, Traffic};
use super::device::CountedDevice;
use super::settlement::{Settlement, settle_all};
use crate::server::export_device::{Absent, ExportDevice};

/// Exports of one process.
const EXPORT_COUNT_MAX: usize = 4096;
/// Longest name of an export: a string of NBD.
const NAME_BYTES_MAX: usize = 4096;
/// Time limit of the last flush of an export without clients.
const FLUSH_PATIENCE: Duration = Duration::from_secs(10);

/// Reads the counters of the cache of a device.
pub type CacheProbe = Arc<dyn Fn() -> CacheUse + Send + Sync>;

/// An export to add.
pub struct ExportOptions {
    /// Its name.
    pub name: String,
    /// A description for users.
    pub description: String,
    /// Its device.
    pub device: ExportDevice,
    /// The meaning of absent extents of the device.
    pub absent: Absent,
    /// The counters of its cache, if it has one.
    pub cache: Option<CacheProbe>,
    /// Locks and files to keep as long as a request may use the device.
    pub held: Vec<Box<dyn Any + Send + Sync>>,
}

impl ExportOptions {
    /// An export without a description, whose absent extents read as zero.
    pub fn new(name: impl Into<String>, device: ExportDevice) -> Self {
        Self {
            name: name.into(),
            description: String::new(),
            device,
            absent: Absent::ReadsAsZero,
            cache: None,
            held: Vec::new(),
        }
    }
}

/// Why an export cannot be added or removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// An export has this name already.
    #[error("an export is named {name:?} already")]
    NameInUse {
        /// The name.
        name: String,
    },
    /// The name is empty, too long, or has control characters.
    #[error("{name:?} is not a valid name of an export")]
    InvalidName {
        /// The name.
        name: String,
    },
    /// There are too many exports.
    #[error("the server has {EXPORT_COUNT_MAX} exports, and cannot have more")]
    TooMany,
    /// No export has this name.
    #[error("no export is named {name:?}")]
    NotFound {
        /// The name.
        name: String,
    },
    /// Clients are connected. The export was not removed.
    #[error("{name:?} has connected clients: {client_count}")]
    InUse {
        /// The name.
        name: String,
        /// Number of clients.
        client_count: usize,
    },
    /// The export was removed, but its last writes could not be made durable.
    #[error("the last writes to {name:?} may be lost")]
    Flush {
        /// The name.
        name: String,
        /// The error of the device.
        source: DeviceError,
    },
    /// A request to the device, or its last flush, did not end before the server.
    #[error("the last writes to {name:?} may be lost: its device did not complete a request in time")]
    Busy {
        /// The name.
        name: String,
    },
}

/// Whether an export with connected clients is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// It is not removed.
    IfUnused,
    /// Its sessions are ended. Each step waits for at most this time.
    Forced {
        /// The time limit of each step.
        patience: Duration,
    },
}

/// A removed export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemovalReport {
    /// Clients whose sessions were ended. Initiators of iSCSI that use other exports of the target are not among them.
    pub ended_client_count: usize,
    /// Whether the device did not complete a request or its last flush in time. Its files are in use, and its last
    /// writes are not durable, until it does.
    pub is_busy: bool,
}

/// Takes an export out of a protocol when it is removed: no client can open it any more.
type Withdrawal = Box<dyn FnOnce() + Send>;

/// An export. Protocols serve its [`device`](Self::device), and [`enter`](Self::enter) their clients.
pub struct RegisteredExport {
    name: String,
    description: String,
    device: Arc<CountedDevice>,
    absent: Absent,
    cache: Option<CacheProbe>,
    clients: Arc<Clients>,
    withdrawals: Mutex<Vec<Withdrawal>>,
}

impl fmt::Debug for RegisteredExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegisteredExport")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl RegisteredExport {
    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The description; may be empty.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// The meaning of absent extents.
    pub fn absent(&self) -> Absent {
        self.absent
    }

    /// The device to serve. Its requests are counted, and fail after the export was removed.
    pub fn device(&self) -> ExportDevice {
        if self.device.is_writable() {
            ExportDevice::Writable(Arc::clone(&self.device) as _)
        } else {
            ExportDevice::ReadOnly(Arc::clone(&self.device) as _)
        }
    }

    /// The size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.device().reader().size_bytes()
    }

    /// Whether clients can write.
    pub fn is_writable(&self) -> bool {
        self.device.is_writable()
    }

    /// Requests since the export was added.
    pub fn traffic(&self) -> Traffic {
        self.device.traffic()
    }

    /// The use of the cache of the device, if it has one.
    pub fn cache_use(&self) -> Option<CacheUse> {
        self.cache.as_ref().map(|probe| probe())
    }

    /// The clients that are connected now, in the order of their connections.
    pub fn clients(&self) -> Vec<ClientEntry> {
        self.clients.list()
    }

    /// Enters a client, which is connected until the handle is dropped; `None` if the export is being removed.
    pub fn enter(&self, entry: ClientEntry, session: Arc<dyn ClientSession>) -> Option<ClientHandle> {
        self.clients.enter(entry, session)
    }

    /// Whether the export is being removed, or was.
    pub fn is_removed(&self) -> bool {
        self.clients.is_closed()
    }

    /// Calls `withdraw` once when the export is removed, before the sessions of its clients are ended.
    pub fn on_removal(&self, withdraw: impl FnOnce() + Send + 'static) {
        let mut withdrawals = self.withdrawals.lock().unwrap_or_else(PoisonError::into_inner);
        withdrawals.push(Box::new(withdraw));
    }

    fn withdraw(&self) {
        let mut withdrawals = self.withdrawals.lock().unwrap_or_else(PoisonError::into_inner);
        for withdraw in std::mem::take(&mut *withdrawals) {
            withdraw();
        }
    }
}

/// The exports of a process, in the order in which they were added.
#[derive(Debug, Default)]
pub struct Registry {
    exports: Mutex<Vec<Arc<RegisteredExport>>>,
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<RegisteredExport>>> {
        self.exports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an export.
    pub fn add(&self, options: ExportOptions) -> Result<Arc<RegisteredExport>, RegistryError> {
        let ExportOptions { name, .. } = options;
        if name.is_empty() || name.len() > NAME_BYTES_MAX || name.chars().any(char::is_control) {
            return Err(RegistryError::InvalidName { name });
        }
        let mut exports = self.lock();
        if exports.len() >= EXPORT_COUNT_MAX {
            return Err(RegistryError::TooMany);
        }
        if exports.iter().any(|export| export.name == name) {
            return Err(RegistryError::NameInUse { name });
        }
        let export = Arc::new(RegisteredExport {
            name,
            description: options.description,
            device: Arc::new(CountedDevice::new(options.device, options.held)),
            absent: options.absent,
            cache: options.cache,
            clients: Arc::default(),
            withdrawals: Mutex::default(),
        });
        exports.push(Arc::clone(&export));
        Ok(export)
    }

    /// All exports.
    pub fn exports(&self) -> Vec<Arc<RegisteredExport>> {
        self.lock().clone()
    }

    /// The export with this name.
    pub fn find(&self, name: &str) -> Option<Arc<RegisteredExport>> {
        self.lock().iter().find(|export| export.name == name).cloned()
    }

    /// Removes an export: no client can open it any more, sessions end after the requests in progress were answered,
    /// and all writes are durable, unless the report says that the device is busy. The name is free afterwards.
    ///
    /// # Errors
    /// After [`RegistryError::Flush`], the export is removed nevertheless.
    pub fn remove(&self, name: &str, removal: Removal, clock: &dyn Clock) -> Result<RemovalReport, RegistryError> {
        let named = || name.to_owned();
        let export = self
            .find(name)
            .ok_or_else(|| RegistryError::NotFound { name: named() })?;
        let (closing, patience, flush_patience) = match removal {
            Removal::IfUnused => (Closing::IfUnused, Duration::ZERO, FLUSH_PATIENCE),
            Removal::Forced { patience } => (Closing::Forced, patience, patience),
        };
        export
            .clients
            .close(closing)
            .map_err(|client_count| RegistryError::InUse {
                name: named(),
                client_count,
            })?;
        export.withdraw();
        // Counted after the withdrawal: sessions that continue without this export are not ended.
        let ended_client_count = export.clients.end_all(patience, clock);
        export.device.retire();
        let settled = settle_all(&[Arc::clone(&export.device)], flush_patience, clock).pop();
        self.lock().retain(|other| !Arc::ptr_eq(other, &export));
        match settled {
            Some(Settlement::Failed(source)) => Err(RegistryError::Flush { name: named(), source }),
            Some(Settlement::Complete) => Ok(RemovalReport {
                ended_client_count,
                is_busy: false,
            }),
            Some(Settlement::Busy) | None => Ok(RemovalReport {
                ended_client_count,
                is_busy: true,
            }),
        }
    }

    /// Removes all exports within `patience` when the servers have stopped. An export that hangs does not delay the last
    /// flushes of the others. Returns the errors of exports whose last writes may be lost.
    pub fn remove_all(&self, patience: Duration, clock: &dyn Clock) -> Vec<RegistryError> {
        let exports = std::mem::take(&mut *self.lock());
        for export in &exports {
            // A forced removal is never refused.
            export.clients.close(Closing::Forced).unwrap_or_default();
            export.withdraw();
            export.clients.cut_all();
            export.device.retire();
        }
        let written: Vec<_> = exports.iter().filter(|export| export.is_writable()).collect();
        let devices: Vec<_> = written.iter().map(|export| Arc::clone(&export.device)).collect();
        let settled = settle_all(&devices, patience, clock).into_iter().zip(written);
        let errors = settled.filter_map(|(settlement, export)| {
            let name = export.name.clone();
            match settlement {
                Settlement::Complete => None,
                Settlement::Busy => Some(RegistryError::Busy { name }),
                Settlement::Failed(source) => Some(RegistryError::Flush { name, source }),
            }
        });
        errors.collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use holdfast_block::{Fault, FaultRule, FaultyDevice, MemoryDevice, RequestKind, SystemClock};

    use super::{ExportOptions, Registry, RegistryError, Removal};
    use crate::registry::{ClientEntry, ClientHandle, ClientProtocol, ClientSession};
    use crate::server::export_device::ExportDevice;

    const PATIENCE: Duration = Duration::from_millis(200);

    fn options(name: &str) -> ExportOptions {
        ExportOptions::new(name, ExportDevice::Writable(Arc::new(MemoryDevice::new(4096))))
    }

    fn entry() -> ClientEntry {
        ClientEntry {
            protocol: ClientProtocol::Nbd,
            peer: "10.0.0.1:1".to_owned(),
            name: None,
            since: Duration::ZERO,
        }
    }

    /// A session that ends when it is asked to, or only when it is cut.
    struct TestSession {
        is_polite: bool,
        handle: Mutex<Option<ClientHandle>>,
        cut_count: AtomicUsize,
    }

    impl TestSession {
        fn new(is_polite: bool) -> Arc<Self> {
            Arc::new(Self {
                is_polite,
                handle: Mutex::default(),
                cut_count: AtomicUsize::new(0),
            })
        }
    }

    impl ClientSession for TestSession {
        fn ask_to_end(&self) {
            if self.is_polite {
                let handle = self.handle.lock().unwrap().take();
                drop(handle);
            }
        }

        fn cut(&self) {
            self.cut_count.fetch_add(1, Ordering::Relaxed);
            let handle = self.handle.lock().unwrap().take();
            drop(handle);
        }
    }

    #[test]
    fn names_are_unique_and_valid() {
        let registry = Registry::default();
        registry.add(options("web1/vda")).unwrap();
        assert!(matches!(
            registry.add(options("web1/vda")),
            Err(RegistryError::NameInUse { .. })
        ));
        for name in ["", "a\nb", &"x".repeat(5000)] {
            assert!(matches!(
                registry.add(options(name)),
                Err(RegistryError::InvalidName { .. })
            ));
        }
        assert!(registry.find("web1/vda").is_some() && registry.find("web1").is_none());
    }

    #[test]
    fn an_export_with_clients_is_removed_only_by_force() {
        let registry = Registry::default();
        let clock = SystemClock::new();
        let export = registry.add(options("a")).unwrap();
        let sessions = [TestSession::new(true), TestSession::new(false)];
        for session in &sessions {
            *session.handle.lock().unwrap() = export.enter(entry(), Arc::clone(session) as _);
        }
        let withdrawn = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&withdrawn);
        export.on_removal(move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        let refused = registry.remove("a", Removal::IfUnused, &clock);
        assert!(matches!(refused, Err(RegistryError::InUse { client_count: 2, .. })));
        assert!(!export.is_removed() && withdrawn.load(Ordering::Relaxed) == 0);
        let report = registry
            .remove("a", Removal::Forced { patience: PATIENCE }, &clock)
            .unwrap();
        assert_eq!((report.ended_client_count, report.is_busy), (2, false));
        assert_eq!(withdrawn.load(Ordering::Relaxed), 1);
        assert_eq!(
            sessions.map(|session| session.cut_count.load(Ordering::Relaxed)),
            [0, 1]
        );
        assert!(export.enter(entry(), TestSession::new(true)).is_none());
        assert!(
            export.device().writer().unwrap().write_at(&[1], 0).is_err(),
            "it is retired"
        );
        assert!(matches!(
            registry.remove("a", Removal::IfUnused, &clock),
            Err(RegistryError::NotFound { .. })
        ));
        registry.add(options("a")).unwrap();
    }

    #[test]
    fn a_removal_makes_writes_durable_or_says_that_it_could_not() {
        let registry = Registry::default();
        let clock = SystemClock::new();
        let device = Arc::new(FaultyDevice::new(MemoryDevice::new(4096)));
        let export = ExportOptions::new("a", ExportDevice::Writable(Arc::clone(&device) as _));
        registry.add(export).unwrap();
        registry.remove("a", Removal::IfUnused, &clock).unwrap();
        assert_eq!(device.count(RequestKind::Flush), 1);
        device.add(FaultRule::every(RequestKind::Flush, Fault::Io));
        let export = ExportOptions::new("b", ExportDevice::Writable(Arc::clone(&device) as _));
        registry.add(export).unwrap();
        assert!(matches!(
            registry.remove("b", Removal::IfUnused, &clock),
            Err(RegistryError::Flush { .. })
        ));
        assert!(registry.find("b").is_none());
    }

    #[test]
    fn all_exports_are_removed_and_lost_writes_reported() {
        let registry = Registry::default();
        let failing = Arc::new(FaultyDevice::new(MemoryDevice::new(4096)));
        failing.add(FaultRule::every(RequestKind::Flush, Fault::Io));
        let healthy = Arc::new(FaultyDevice::new(MemoryDevice::new(4096)));
        for (name, device) in [("failing", &failing), ("healthy", &healthy)] {
            let device = ExportDevice::Writable(Arc::clone(device) as _);
            registry.add(ExportOptions::new(name, device)).unwrap();
        }
        let session = TestSession::new(false);
        let export = registry.find("healthy").unwrap();
        *session.handle.lock().unwrap() = export.enter(entry(), Arc::clone(&session) as _);
        let lost = registry.remove_all(PATIENCE, &SystemClock::new());
        assert!(
            matches!(&lost[..], [RegistryError::Flush { name, .. }] if name == "failing"),
            "{lost:?}"
        );
        assert_eq!(healthy.count(RequestKind::Flush), 1);
        assert!(export.clients().is_empty() && registry.exports().is_empty());
    }
}
