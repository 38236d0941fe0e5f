//! btrfs as one side of a replication. A copy of a dataset is a subvolume in which the received snapshots take the
//! place of its host snapshots.
//!
//! btrfs marks a completely received subvolume: it is read-only, and has the UUID of the sent subvolume. A subvolume
//! without that mark is incomplete, and is received again from the beginning.
//!
//! Source: btrfs-send(8), btrfs-receive(8); btrfs-progs 6.2.

use std::fs::File;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};

use super::super::folder::{SnapshotFolder, check_name, file_error};
use super::super::incoming::{Incoming, Notes};
use super::super::replica::{
    KeepMethod, KeepRequest, PartialReceive, ReceiveRequest, ReplicaAbilities, ReplicaDataset, ReplicaScope,
    ReplicaSide, ReplicaSnapshot, SendRequest, SenderTrust, StreamCompression, check_tag,
};
use super::super::{HostSnapshotLabel, HostSnapshotName, Provider as _, ProviderError, ProviderKind, ProviderResult};
use super::stream::{Arrival, BtrfsAnnouncement, BtrfsGate, ParentSnapshot};
use super::{BTRFS, Btrfs, SubvolumeInfo, dataset, is_subvolume};
use crate::Uuid;
use crate::storage::provider::leftovers::{ProviderLeftover, ProviderLeftoverKind};
use crate::system::process::{Piped, StreamTools};

/// Prefix of a subvolume that is being received. No host snapshot can have such a name. It is in the folder of the host
/// snapshots because a read-only subvolume cannot be moved to another folder.
const INCOMING: &str = ".incoming+";

/// btrfs on this host.
pub struct BtrfsSide {
    btrfs: Btrfs,
    programs: Arc<dyn StreamTools>,
}

impl BtrfsSide {
    /// Uses btrfs of this host through `programs`.
    pub fn new(programs: Arc<dyn StreamTools>) -> Self {
        Self {
            btrfs: Btrfs::new(Arc::clone(&programs) as _),
            programs,
        }
    }

    fn inspect(&self, snapshot_folder: &SnapshotFolder, name: &str) -> ProviderResult<SubvolumeInfo> {
        self.btrfs.inspect(&snapshot_folder.place(name).to_string_lossy())
    }

    fn remove(&self, snapshot_folder: &SnapshotFolder, name: &str) -> ProviderResult<()> {
        self.btrfs
            .delete("remove the partially received", name, &snapshot_folder.place(name))
    }

    /// The names of partially received subvolumes.
    fn leftovers(&self, snapshot_folder: &SnapshotFolder) -> ProviderResult<Vec<String>> {
        let mut leftovers = incoming(snapshot_folder)?;
        // An earlier version of Holdfast received under the name of the snapshot.
        for name in snapshot_folder.names()? {
            if is_subvolume(&snapshot_folder.place(&name)) && is_partial(&self.inspect(snapshot_folder, &name)?) {
                leftovers.push(name);
            }
        }
        Ok(leftovers)
    }

    /// The expected content of the next stream into a dataset.
    fn announced(
        &self,
        snapshot_folder: &Arc<SnapshotFolder>,
        receiving: &ReceiveRequest,
    ) -> ProviderResult<BtrfsAnnouncement> {
        let snapshot = match &receiving.snapshots[..] {
            [] => None,
            [one] => Some((one.name.clone(), one.identity.clone())),
            _ => {
                return Err(refused_stream(
                    receiving,
                    "a btrfs stream contains one snapshot, but several are announced",
                ));
            }
        };
        let names = snapshot_folder.names()?;
        let mut known = Vec::new();
        for name in names.iter().filter(|name| is_subvolume(&snapshot_folder.place(name))) {
            let info = self.inspect(snapshot_folder, name)?;
            let uuid = info.uuid.as_deref().and_then(Uuid::parse);
            if let (true, Some(identity), Some(uuid)) = (info.is_read_only, info.identity(), uuid) {
                known.push((identity.to_owned(), uuid, name.clone()));
            }
        }
        let snapshot_folder = Arc::clone(snapshot_folder);
        let parent = move |identity: &str| {
            let (_, uuid, name) = known.iter().find(|(known, ..)| known == identity)?;
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            Some(ParentSnapshot {
                uuid: *uuid,
                folder: open(&*snapshot_folder.place(name), flags, Mode::empty()).ok()?,
            })
        };
        Ok(BtrfsAnnouncement {
            snapshot,
            names,
            parent: Box::new(parent),
            hidden_prefix: INCOMING,
        })
    }

    fn snapshot_name(keeping: &KeepRequest, name: &str) -> HostSnapshotName {
        HostSnapshotName {
            dataset: dataset(&keeping.dataset),
            name: name.to_owned(),
        }
    }
}

/// The hidden names of subvolumes that are being received, or that a killed process left.
fn incoming(snapshot_folder: &SnapshotFolder) -> ProviderResult<Vec<String>> {
    let mut names = snapshot_folder.all_names("snapshots")?;
    names.retain(|name| name.starts_with(INCOMING));
    Ok(names)
}

fn refused_stream(receiving: &ReceiveRequest, reason: &str) -> ProviderError {
    ProviderError::Refused {
        action: "receive",
        what: dataset(&receiving.dataset).to_string(),
        reason: reason.to_owned(),
    }
}

/// A received subvolume before it becomes a host snapshot.
struct Received {
    btrfs: Btrfs,
    snapshot_folder: Arc<SnapshotFolder>,
    receiving: ReceiveRequest,
    arrived: Arc<Mutex<Option<Arrival>>>,
    _lock: Arc<File>,
}

impl Received {
    /// Compares the subvolume with the announcement, and gives it its name and record.
    fn settle(self) -> ProviderResult<()> {
        let arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner).take();
        let refused = |reason: &str| Err(refused_stream(&self.receiving, reason));
        let Some(arrival) = arrived else {
            return refused("the stream is incomplete");
        };
        let hidden = format!("{INCOMING}{}", arrival.name);
        let info = self
            .btrfs
            .inspect(&self.snapshot_folder.place(&hidden).to_string_lossy())?;
        let uuid = |text: &Option<String>| text.as_deref().and_then(Uuid::parse);
        if !info.is_read_only || uuid(&info.received_uuid) != Some(arrival.identity) {
            return refused("it is incomplete, or is not the snapshot that was sent");
        }
        if uuid(&info.parent_uuid) != arrival.parent {
            return refused("its parent is not the one in the stream");
        }
        let announced = self.receiving.snapshots.first();
        let label = announced.map(|announced| HostSnapshotLabel {
            name: &arrival.name,
            time_s: announced.time_s,
            record: announced.record.as_deref().unwrap_or_default(),
        });
        let shown_name = format!("{}@{}", dataset(&self.receiving.dataset), arrival.name);
        self.snapshot_folder
            .adopt(&hidden, &arrival.name, &shown_name, label.as_ref())
    }
}

impl Btrfs {
    /// Partially received subvolumes, if no process is receiving. The next receiver removes them, too.
    pub(super) fn partial_receives(
        &self,
        snapshot_folder: &SnapshotFolder,
        name: &str,
    ) -> ProviderResult<Vec<ProviderLeftover>> {
        // Without a lock file, nothing was received, and the subvolume belongs to a user.
        let Ok(Some(_lock)) = try_lock(snapshot_folder) else {
            return Ok(Vec::new());
        };
        let mut found = Vec::new();
        let half = |snapshot: String| ProviderLeftover {
            dataset: dataset(name),
            kind: ProviderLeftoverKind::HalfReceived,
            since_s: (snapshot_folder.place(&snapshot).symlink_metadata().ok()).map(|metadata| metadata.mtime()),
            place: snapshot_folder.shown_place(&snapshot),
            name: snapshot,
        };
        found.extend(incoming(snapshot_folder)?.into_iter().map(half));
        for snapshot in snapshot_folder.names()? {
            let place = snapshot_folder.place(&snapshot);
            if snapshot_folder.noted(&snapshot).is_none() && is_subvolume(&place) {
                let is_half = is_partial(&self.inspect(&place.to_string_lossy())?);
                found.extend(is_half.then(|| half(snapshot)));
            }
        }
        Ok(found)
    }

    pub(super) fn clear_received(
        &self,
        snapshot_folder: &SnapshotFolder,
        leftover: &ProviderLeftover,
    ) -> ProviderResult<()> {
        let _lock = lock(snapshot_folder)?;
        let place = snapshot_folder.place(&leftover.name);
        let shown = leftover.place.display().to_string();
        let is_half = || {
            ProviderResult::Ok(
                leftover.name.starts_with(INCOMING) || is_partial(&self.inspect(&place.to_string_lossy())?),
            )
        };
        if !is_subvolume(&place) || !is_half()? {
            return Err(ProviderError::NotFound { what: shown });
        }
        self.delete("remove the partially received", &shown, &place)
    }
}

/// The lock of receivers, if it is free; none if nothing was ever received.
fn try_lock(snapshot_folder: &SnapshotFolder) -> ProviderResult<Option<File>> {
    if snapshot_folder.receiving_place().symlink_metadata().is_err() {
        return Ok(None);
    }
    lock(snapshot_folder).map(Some)
}

/// A host snapshot is read-only from its creation; a received one becomes read-only when it is complete.
fn is_partial(info: &SubvolumeInfo) -> bool {
    !info.is_read_only && info.received_uuid.is_none()
}

/// Takes the lock of receivers, so that another process does not treat the subvolume as a leftover.
fn lock(snapshot_folder: &SnapshotFolder) -> ProviderResult<File> {
    let path = snapshot_folder.receiving_place();
    let mut options = File::options();
    let open = options.create(true).write(true).truncate(false).mode(0o600).open(&path);
    let file = open.map_err(|source| file_error("open", &path, source))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(ProviderError::Held {
            what: snapshot_folder.shown_place("").display().to_string(),
            reason: "another process receives into it".to_owned(),
        }),
        Err(error) => Err(file_error("lock", &path, error.into())),
    }
}

impl ReplicaSide for BtrfsSide {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Btrfs
    }

    fn host(&self) -> Option<&str> {
        None
    }

    fn abilities(&self) -> ProviderResult<ReplicaAbilities> {
        Ok(ReplicaAbilities::default())
    }

    fn datasets(&self, name: &str, scope: ReplicaScope) -> ProviderResult<Vec<ReplicaDataset>> {
        if scope == ReplicaScope::Tree {
            return Err(ProviderError::Refused {
                action: "replicate",
                what: format!("{name} and all below it"),
                reason:
                    "subvolumes of btrfs have no snapshots of one instant together, and are replicated one by one: \
                         without --recursive, once for each that btrfs subvolume list shows"
                        .to_owned(),
            });
        }
        if !Path::new(name).symlink_metadata().is_ok_and(|found| found.is_dir()) {
            return Ok(Vec::new());
        }
        let snapshot_folder = Btrfs::folder(name)?;
        let mut snapshots = Vec::new();
        let hidden = incoming(&snapshot_folder)?.into_iter().next();
        let shown_name = |hidden: &String| PartialReceive::NotResumable(hidden[INCOMING.len()..].to_owned());
        let mut partial = hidden.as_ref().map(shown_name);
        for snapshot in snapshot_folder.names()? {
            if !is_subvolume(&snapshot_folder.place(&snapshot)) {
                continue;
            }
            let info = self.inspect(&snapshot_folder, &snapshot)?;
            if is_partial(&info) {
                partial = Some(PartialReceive::NotResumable(snapshot));
                continue;
            }
            let noted = snapshot_folder.noted(&snapshot);
            let time_s = noted.as_ref().map(|noted| noted.time_s).or(info.made_s);
            snapshots.push(ReplicaSnapshot {
                identity: info.identity().unwrap_or_default().to_owned(),
                time_s: time_s.ok_or_else(|| ProviderError::Invalid {
                    program: BTRFS,
                    detail: format!("{snapshot} has no valid creation time"),
                })?,
                is_bookmark: false,
                hold_count: snapshot_folder.hold_count(&snapshot)?,
                record: noted.map(|noted| noted.record),
                name: snapshot,
            });
        }
        snapshots.sort_by(|a, b| (a.time_s, &a.name).cmp(&(b.time_s, &b.name)));
        Ok(vec![ReplicaDataset {
            name: name.to_owned(),
            snapshots,
            partial,
            is_encrypted: false,
        }])
    }

    fn estimate(&self, _sending: &SendRequest) -> ProviderResult<Option<u64>> {
        Ok(None)
    }

    fn send(&self, sending: &SendRequest) -> ProviderResult<Piped> {
        let snapshot_folder = Btrfs::folder(&sending.dataset)?;
        check_name(&sending.to)?;
        let place = snapshot_folder.place(&sending.to).to_string_lossy().into_owned();
        let mut arguments = vec!["send".to_owned(), "-q".to_owned()];
        if let Some(base) = &sending.base {
            check_name(&base.name)?;
            let base = snapshot_folder.place(&base.name).to_string_lossy().into_owned();
            arguments.extend(["-p".to_owned(), base]);
        }
        arguments.extend(["--".to_owned(), place]);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        // The paths are valid as long as the folder is open.
        Ok(self.programs.start(BTRFS, &arguments)?.with(snapshot_folder))
    }

    fn receive(&self, receiving: &ReceiveRequest, _trust: SenderTrust) -> ProviderResult<Incoming> {
        let folder = Path::new(&receiving.dataset);
        if folder.symlink_metadata().is_err() {
            let arguments = ["subvolume", "create", "--", &receiving.dataset];
            self.btrfs.ask("create", &receiving.dataset, &arguments)?;
        }
        Btrfs::folder(&receiving.dataset)?;
        let snapshot_folder = Arc::new(SnapshotFolder::make(folder)?);
        let lock = Arc::new(lock(&snapshot_folder)?);
        for name in self.leftovers(&snapshot_folder)? {
            self.remove(&snapshot_folder, &name)?;
        }
        let notes = Notes::default();
        let (gate, arrived) = BtrfsGate::new(self.announced(&snapshot_folder, receiving)?, Arc::clone(&notes));
        let received = Received {
            btrfs: self.btrfs.clone(),
            snapshot_folder: Arc::clone(&snapshot_folder),
            receiving: receiving.clone(),
            arrived,
            _lock: Arc::clone(&lock),
        };
        // The gate passes no path outside of the folder, and no device. The program is also confined by chroot.
        let arguments = ["receive", "-q", "-e", "-C", "--", "."];
        let piped = self
            .programs
            .start_receiver(BTRFS, &arguments, &snapshot_folder.place(""))?;
        let piped = piped.with((snapshot_folder, lock));
        Ok(Incoming::gated(piped, Box::new(gate), notes, || received.settle()))
    }

    fn settle(&self, receiving: &ReceiveRequest) -> ProviderResult<()> {
        let snapshot_folder = Btrfs::folder(&receiving.dataset)?;
        for snapshot in &receiving.snapshots {
            check_name(&snapshot.name)?;
            let info = self.inspect(&snapshot_folder, &snapshot.name)?;
            if !info.is_read_only || info.received_uuid.as_deref() != Some(&snapshot.identity) {
                return Err(ProviderError::Refused {
                    action: "receive",
                    what: format!("{}@{}", dataset(&receiving.dataset), snapshot.name),
                    reason: "it is incomplete, or is not the snapshot that was sent".to_owned(),
                });
            }
            if snapshot_folder.noted(&snapshot.name).is_some() {
                // Existing notes are kept: retention uses the time in them.
                continue;
            }
            if let Some(record) = &snapshot.record {
                snapshot_folder.note(&HostSnapshotLabel {
                    name: &snapshot.name,
                    time_s: snapshot.time_s,
                    record,
                })?;
            }
        }
        Ok(())
    }

    fn discard(&self, name: &str) -> ProviderResult<()> {
        let snapshot_folder = Btrfs::folder(name)?;
        let _lock = lock(&snapshot_folder)?;
        self.leftovers(&snapshot_folder)?
            .iter()
            .try_for_each(|name| self.remove(&snapshot_folder, name))
    }

    fn keep(&self, keeping: &KeepRequest) -> ProviderResult<()> {
        check_tag(&keeping.tag)?;
        match self
            .btrfs
            .hold(&Self::snapshot_name(keeping, &keeping.snapshot), &keeping.tag)
        {
            Err(ProviderError::Held { .. }) => {}
            other => other?,
        }
        if keeping.method == KeepMethod::AddHold {
            return Ok(());
        }
        for name in Btrfs::folder(&keeping.dataset)?.names()? {
            if name == keeping.snapshot {
                continue;
            }
            match self.btrfs.release(&Self::snapshot_name(keeping, &name), &keeping.tag) {
                Err(ProviderError::NotFound { .. }) => {}
                other => other?,
            }
        }
        Ok(())
    }

    fn refusal(&self, action: &'static str, what: &str, stderr: &str) -> ProviderError {
        Btrfs::refusal(action, what, stderr)
    }

    fn can_compress(&self, compression: StreamCompression) -> bool {
        compression == StreamCompression::Never
    }

    fn can_decompress(&self) -> bool {
        false
    }
}
