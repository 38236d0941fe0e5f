//! The exports of a running server: opened, added and removed while clients use others.

use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_repo::Repository;
use holdfast_serve::iscsi::{TargetSet, UnitPosition};
use holdfast_serve::nbd::ServerResources;
use holdfast_serve::registry::{ExportOptions, RegisteredExport, Registry, RegistryError, Removal, RemovalReport};
use jiff::tz::TimeZone;

use super::LAST_FLUSH_PATIENCE;
use super::control::{CacheStatus, ClientStatus, DiskSocket, ExportStatus, ServerStatus, TrafficStatus};
use super::disks::{DiskSelection, OpenServedDisk, open_disks};
use super::doors::DoorPlace;
use super::images::{ImageSelection, ServedImage, open_image};
use super::iscsi::{UnitRules, UnitSource};
use super::uri::percent_encoded;
use super::vhost_user::{DiskSource, VhostUserDisks};
use super::{ServeSource, SourceChoice};
use crate::SnapshotName;
use crate::image::source::OpenSource;
use crate::job::error::ServingError;
use crate::job::{Job, Result};

/// The interval between two checks whether served images have changed.
const CHANGE_INTERVAL: Duration = Duration::from_secs(5);
/// How long each step of a forced removal may take.
const REMOVAL_PATIENCE: Duration = Duration::from_secs(10);

/// Begin and end of the URIs of NBD exports, with the name between them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NbdDoor {
    pub(super) start: String,
    pub(super) end: String,
}

impl NbdDoor {
    /// The parts of the URIs at an address, with the scheme `nbd` or `nbds`.
    pub(super) fn of(place: &DoorPlace, scheme: &str) -> Self {
        match place {
            DoorPlace::Unix(path) => Self {
                start: format!("{scheme}+unix:///"),
                end: format!("?socket={}", percent_encoded(path.as_os_str().as_bytes())),
            },
            DoorPlace::Tcp(address) => Self {
                start: format!("{scheme}://{address}/"),
                end: String::new(),
            },
        }
    }

    fn uri(&self, name: &str) -> String {
        format!("{}{}{}", self.start, percent_encoded(name.as_bytes()), self.end)
    }
}

/// The addresses of a server.
#[derive(Debug, Clone, Default)]
pub(super) struct Addresses {
    pub(super) nbd: Vec<NbdDoor>,
    /// Portals of iSCSI.
    pub(super) iscsi: Vec<String>,
}

/// The exports of a server. Its threads share it.
pub(super) struct ServedExports {
    pub(super) registry: Arc<Registry>,
    pub(super) targets: Arc<TargetSet>,
    /// `None` if the server has no iSCSI.
    pub(super) units: Option<UnitRules>,
    /// `None` if the server has no vhost-user.
    pub(super) disks: Option<VhostUserDisks>,
    addresses: Mutex<Addresses>,
    pub(super) resources: ServerResources,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) started: Duration,
    records: Mutex<Vec<ServedRecord>>,
}

/// What the registry does not know of an export.
struct ServedRecord {
    export: Arc<RegisteredExport>,
    unit: Option<UnitPosition>,
    socket: Option<DiskSocket>,
    watched: Option<Arc<OpenSource>>,
}

/// What is needed to open exports.
#[derive(Clone, Copy)]
pub(super) struct ExportOpener<'a> {
    pub(super) repository: Option<&'a Repository>,
    pub(super) zone: &'a TimeZone,
    pub(super) job: Job<'a>,
}

impl ServedExports {
    pub(super) fn new(
        resources: ServerResources,
        units: Option<UnitRules>,
        disks: Option<VhostUserDisks>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        Self {
            registry: Arc::default(),
            targets: Arc::default(),
            units,
            disks,
            addresses: Mutex::default(),
            resources,
            started: clock.now(),
            clock,
            records: Mutex::default(),
        }
    }

    fn records(&self) -> MutexGuard<'_, Vec<ServedRecord>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens and adds exports: all of them, or none after an error.
    pub(super) fn add(&self, choice: &SourceChoice, opener: ExportOpener<'_>) -> Result<Vec<ExportStatus>> {
        let disks = self.open(choice, opener)?;
        if let Some(place) = &self.disks {
            place.check_count(self.records().len(), disks.len())?;
        }
        let mut added: Vec<Arc<RegisteredExport>> = Vec::new();
        for disk in disks {
            match self.add_disk(disk) {
                Ok(export) => added.push(export),
                Err(error) => {
                    for export in &added {
                        // No client can have written yet.
                        drop(self.remove_by_force(export.name()));
                    }
                    return Err(error);
                }
            }
        }
        Ok(added.iter().map(|export| self.status_of(export)).collect())
    }

    fn open(&self, choice: &SourceChoice, opener: ExportOpener<'_>) -> Result<Vec<OpenServedDisk>> {
        let names: Vec<SnapshotName> = choice
            .sources
            .iter()
            .filter_map(ServeSource::snapshot)
            .cloned()
            .collect();
        let images = choice.sources.iter().filter_map(ServeSource::image);
        let is_registered = |name: &str| self.registry.find(name).is_some();
        let mut disks = Vec::new();
        if !names.is_empty() {
            let repository = opener.repository.ok_or(ServingError::NoRepository)?;
            let selection = DiskSelection {
                names: &names,
                zone: opener.zone,
                writes: &choice.writes,
                is_in_use: &is_registered,
            };
            disks = open_disks(repository, &selection, opener.job)?;
        }
        for image in images {
            disks.push(self.open_image(image, choice, &disks, opener.job)?);
        }
        Ok(disks)
    }

    fn open_image(
        &self,
        image: &ServedImage,
        choice: &SourceChoice,
        opened: &[OpenServedDisk],
        job: Job<'_>,
    ) -> Result<OpenServedDisk> {
        let is_in_use =
            |name: &str| self.registry.find(name).is_some() || opened.iter().any(|disk| disk.export == name);
        let selection = ImageSelection {
            writes: &choice.writes,
            machine: choice.machine.as_deref(),
            is_in_use: &is_in_use,
        };
        open_image(image, selection, job)
    }

    fn add_disk(&self, disk: OpenServedDisk) -> Result<Arc<RegisteredExport>> {
        let (source, disk_source) = (UnitSource::of(&disk), DiskSource::of(&disk));
        let export = self.registry.add(ExportOptions {
            description: disk.description,
            cache: disk.cache,
            held: disk.held,
            ..ExportOptions::new(disk.export, disk.device)
        })?;
        match self.place(&export, &source, &disk_source) {
            Ok((unit, socket)) => self.records().push(ServedRecord {
                export: Arc::clone(&export),
                unit,
                socket,
                watched: disk.watched,
            }),
            Err(error) => {
                drop(self.remove_by_force(export.name()));
                return Err(error);
            }
        }
        Ok(export)
    }

    /// Offers an export over the protocols that need a place for each.
    fn place(
        &self,
        export: &Arc<RegisteredExport>,
        unit: &UnitSource,
        disk: &DiskSource,
    ) -> Result<(Option<UnitPosition>, Option<DiskSocket>)> {
        let units = self.units.as_ref();
        let unit = units
            .map(|rules| rules.place(export, unit, &self.targets))
            .transpose()?;
        let taken: Vec<PathBuf> = {
            let records = self.records();
            let sockets = records.iter().filter_map(|record| record.socket.as_ref());
            sockets.map(|socket| socket.path.clone()).collect()
        };
        let disks = self.disks.as_ref();
        let socket = disks.map(|disks| disks.place(export, disk, &taken)).transpose()?;
        Ok((unit, socket))
    }

    /// Removes an export.
    pub(super) fn remove(&self, name: &str, removal: Removal) -> std::result::Result<RemovalReport, RegistryError> {
        let removed = self.registry.remove(name, removal, &*self.clock);
        self.records().retain(|record| !record.export.is_removed());
        removed
    }

    /// Removes an export whose clients are disconnected.
    pub(super) fn remove_by_force(&self, name: &str) -> std::result::Result<RemovalReport, RegistryError> {
        let patience = REMOVAL_PATIENCE;
        self.remove(name, Removal::Forced { patience })
    }

    /// Removes all exports after the servers have stopped. Returns errors of exports whose last writes may be lost.
    pub(super) fn remove_all(&self) -> Vec<RegistryError> {
        let errors = self.registry.remove_all(LAST_FLUSH_PATIENCE, &*self.clock);
        self.records().clear();
        errors
    }

    /// Images that have changed since they were opened, each once.
    pub(super) fn newly_changed(&self) -> Vec<String> {
        let mut found = Vec::new();
        for record in self.records().iter_mut() {
            let changes = record.watched.as_ref().map(|image| image.changes().unwrap_or_default());
            if let Some((path, change)) = changes.into_iter().flatten().next() {
                record.watched = None;
                found.push(format!(
                    "{} was changed while it is served ({change}): reads may return data of different times",
                    path.display()
                ));
            }
        }
        found
    }

    /// The description of the server, its exports and their clients.
    pub(super) fn status(&self, pid: u32) -> ServerStatus {
        let addresses = self.addresses();
        let nbd = addresses.nbd.iter().map(|door| door.uri(""));
        ServerStatus {
            pid,
            up_ms: millis(self.clock.now().saturating_sub(self.started)),
            nbd: nbd.collect(),
            iscsi: addresses
                .iscsi
                .iter()
                .map(|portal| format!("iscsi://{portal}"))
                .collect(),
            vhost_user: self.disks.iter().map(VhostUserDisks::address).collect(),
            connections: self.resources.connection_count(),
            connections_max: self.resources.limits().connection_count_max,
            exports: self.list(),
        }
    }

    /// The description of the exports and their clients.
    pub(super) fn list(&self) -> Vec<ExportStatus> {
        self.registry
            .exports()
            .iter()
            .map(|export| self.status_of(export))
            .collect()
    }

    pub(super) fn change_addresses(&self, change: impl FnOnce(&mut Addresses)) {
        change(&mut self.addresses.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn addresses(&self) -> Addresses {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn status_of(&self, export: &Arc<RegisteredExport>) -> ExportStatus {
        let now = self.clock.now();
        let (unit, socket) = {
            let records = self.records();
            let record = records.iter().find(|record| Arc::ptr_eq(&record.export, export));
            record.map_or((None, None), |record| (record.unit.clone(), record.socket.clone()))
        };
        let addresses = self.addresses();
        let nbd = addresses.nbd.iter().map(|door| door.uri(export.name()));
        let iscsi = unit.iter().flat_map(|unit| {
            let portals = addresses.iscsi.iter();
            portals.map(|portal| format!("iscsi://{portal}/{}/{}", unit.target, unit.number))
        });
        let sockets = socket.iter().map(|socket| socket.path.display().to_string());
        let clients = export.clients().into_iter().map(|client| ClientStatus {
            protocol: client.protocol.name().to_owned(),
            peer: client.peer,
            name: client.name,
            connected_ms: millis(now.saturating_sub(client.since)),
        });
        let traffic = export.traffic();
        // A disk that is served over one other protocol than NBD appears as its clients see it.
        let size_bytes = match (&self.units, &self.disks) {
            (Some(rules), None) if addresses.nbd.is_empty() => rules.visible_bytes(export.size_bytes()),
            (None, Some(disks)) if addresses.nbd.is_empty() => disks.visible_bytes(export.size_bytes()),
            _ => export.size_bytes(),
        };
        ExportStatus {
            name: export.name().to_owned(),
            description: export.description().to_owned(),
            size_bytes,
            writable: export.is_writable(),
            addresses: nbd.chain(iscsi).chain(sockets).collect(),
            socket: socket.clone(),
            clients: clients.collect(),
            traffic: TrafficStatus {
                reads: traffic.read_count,
                read_bytes: traffic.read_bytes,
                writes: traffic.write_count,
                write_bytes: traffic.write_bytes,
                flushes: traffic.flush_count,
                discards: traffic.discard_count,
                discard_bytes: traffic.discard_bytes,
                errors: traffic.error_count,
            },
            cache: export.cache_use().map(|cache| CacheStatus {
                hits: cache.hit_count,
                misses: cache.miss_count,
            }),
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Looks for changed images from time to time.
pub(super) struct ChangeWatch {
    checked: Duration,
}

impl ChangeWatch {
    pub(super) fn new(clock: &dyn Clock) -> Self {
        Self { checked: clock.now() }
    }

    /// Warns of changed images, if it is time to look.
    pub(super) fn look(&mut self, exports: &ServedExports, job: Job<'_>) {
        let now = exports.clock.now();
        if now >= self.checked + CHANGE_INTERVAL {
            self.checked = now;
            exports
                .newly_changed()
                .iter()
                .for_each(|message| job.progress.warning(message));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;

    use holdfast_serve::nbd::client::{Endpoint, NbdUri};

    use super::{DoorPlace, NbdDoor};

    /// A name or a path with `?`, `#`, `&` or a blank made a URI of another export or socket.
    #[test]
    fn uris_name_the_export_and_the_socket() {
        for (name, path) in [
            ("web1@0a1b/vda", &b"/run/web1.sock"[..]),
            ("a b?c#d%e&f", b"/run/a b&c=d?#%.sock"),
            ("w\u{eb}b", b"/run/\xff.sock"),
        ] {
            let path = OsStr::from_bytes(path);
            let uri = NbdDoor::of(&DoorPlace::Unix(path.into()), "nbd").uri(name);
            let parsed: NbdUri = uri.parse().unwrap();
            assert_eq!(parsed.export, name, "{uri}");
            assert!(
                matches!(parsed.endpoint, Endpoint::Unix(socket) if socket == path),
                "{uri}"
            );
        }
        let door = NbdDoor::of(&DoorPlace::Tcp("[::1]:10809".parse().unwrap()), "nbds");
        assert_eq!(door.uri("web1@0a1b/vda"), "nbds://[::1]:10809/web1@0a1b/vda");
        assert_eq!(door.uri("a b"), "nbds://[::1]:10809/a%20b");
    }
}
