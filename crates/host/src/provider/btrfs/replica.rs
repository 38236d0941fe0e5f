//! btrfs as a side of a replication. A copy of a dataset is a subvolume, with what was received where its host snapshots would be.
//!
//! btrfs marks what has been received to its end: it is read-only, and knows the UUID of what was sent. What lacks that was cut in the
//! middle, and is received again from its beginning.
//!
//! Source: btrfs-send(8), btrfs-receive(8); btrfs-progs 6.2.

use std::fs::File;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{FlockOperation, flock};

use super::super::folder::{SnapshotFolder, check_name, file_error};
use super::super::remains::{Remain, RemainKind};
use super::super::replica::{
    Keeping, KeepingMeans, PackWhen, Partial, Receiving, ReplicaAbilities, ReplicaDataset, ReplicaSide,
    ReplicaSnapshot, Sending, check_tag,
};
use super::super::{Cutting, HostSnapshotName, Provider as _, ProviderError, ProviderKind, ProviderResult};
use super::{BTRFS, Btrfs, Shown, dataset, is_subvolume};
use crate::process::{Piped, Programs};

/// btrfs of this host.
pub struct BtrfsSide {
    btrfs: Btrfs,
    programs: Arc<dyn Programs>,
}

impl BtrfsSide {
    /// What `programs` reach, on this host.
    pub fn new(programs: Arc<dyn Programs>) -> Self {
        Self {
            btrfs: Btrfs::new(Arc::clone(&programs) as _),
            programs,
        }
    }

    fn shown(&self, kept: &SnapshotFolder, name: &str) -> ProviderResult<Shown> {
        self.btrfs.shown(&kept.place(name).to_string_lossy())
    }

    /// Takes away what was received in part.
    fn remove(&self, kept: &SnapshotFolder, name: &str) -> ProviderResult<()> {
        self.btrfs
            .delete(("remove what was received in part,", name), &kept.place(name))
    }

    /// Those that were received in part.
    fn remains(&self, kept: &SnapshotFolder) -> ProviderResult<Vec<String>> {
        let mut remains = Vec::new();
        for name in kept.names()? {
            if is_subvolume(&kept.place(&name)) && is_partial(&self.shown(kept, &name)?) {
                remains.push(name);
            }
        }
        Ok(remains)
    }

    fn snapshot_name(keeping: &Keeping, name: &str) -> HostSnapshotName {
        HostSnapshotName {
            dataset: dataset(&keeping.dataset),
            name: name.to_owned(),
        }
    }
}

impl Btrfs {
    /// What was received in part, where nobody receives: the next who does takes it away, too.
    pub(super) fn half_received(&self, kept: &SnapshotFolder, name: &str) -> ProviderResult<Vec<Remain>> {
        // Where nobody ever received, it is somebody's own.
        let Ok(Some(_lock)) = try_lock(kept) else {
            return Ok(Vec::new());
        };
        let mut found = Vec::new();
        for snapshot in kept.names()? {
            let place = kept.place(&snapshot);
            if kept.noted(&snapshot).is_none() && is_subvolume(&place) {
                let is_half = is_partial(&self.shown(&place.to_string_lossy())?);
                found.extend(is_half.then(|| Remain {
                    dataset: dataset(name),
                    kind: RemainKind::HalfReceived,
                    since_s: place.symlink_metadata().ok().map(|metadata| metadata.mtime()),
                    place: kept.shown_place(&snapshot),
                    name: snapshot,
                }));
            }
        }
        Ok(found)
    }

    pub(super) fn clear_received(&self, kept: &SnapshotFolder, remain: &Remain) -> ProviderResult<()> {
        let _lock = lock(kept)?;
        let place = kept.place(&remain.name);
        let shown = remain.place.display().to_string();
        if !is_subvolume(&place) || !is_partial(&self.shown(&place.to_string_lossy())?) {
            return Err(ProviderError::NotThere { what: shown });
        }
        self.delete(("remove what was received in part,", &shown), &place)
    }
}

/// The lock of who receives, if nobody has it; none where nobody ever received.
fn try_lock(kept: &SnapshotFolder) -> ProviderResult<Option<File>> {
    if kept.receiving_place().symlink_metadata().is_err() {
        return Ok(None);
    }
    lock(kept).map(Some)
}

/// A host snapshot is read-only from its beginning, one that is received from its end on.
fn is_partial(shown: &Shown) -> bool {
    !shown.is_read_only && shown.received_uuid.is_none()
}

/// Who receives has this locked, so that nobody takes his for what a dead one has left.
fn lock(kept: &SnapshotFolder) -> ProviderResult<File> {
    let path = kept.receiving_place();
    let mut options = File::options();
    let open = options.create(true).write(true).truncate(false).mode(0o600).open(&path);
    let file = open.map_err(|source| file_error("open", &path, source))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(ProviderError::Held {
            what: kept.shown_place("").display().to_string(),
            reason: "somebody receives into it".to_owned(),
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

    fn datasets(&self, name: &str, is_tree: bool) -> ProviderResult<Vec<ReplicaDataset>> {
        if is_tree {
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
        let kept = Btrfs::folder(name)?;
        let mut snapshots = Vec::new();
        let mut partial = None;
        for snapshot in kept.names()? {
            if !is_subvolume(&kept.place(&snapshot)) {
                continue;
            }
            let shown = self.shown(&kept, &snapshot)?;
            if is_partial(&shown) {
                partial = Some(Partial::Remains(snapshot));
                continue;
            }
            let noted = kept.noted(&snapshot);
            let time_s = noted.as_ref().map(|noted| noted.time_s).or(shown.made_s);
            snapshots.push(ReplicaSnapshot {
                identity: shown.received_uuid.or(shown.uuid).unwrap_or_default(),
                time_s: time_s.ok_or_else(|| ProviderError::Senseless {
                    program: BTRFS,
                    detail: format!("{snapshot} was made at no time"),
                })?,
                is_bookmark: false,
                hold_count: kept.hold_count(&snapshot)?,
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

    fn estimate(&self, _sending: &Sending) -> ProviderResult<Option<u64>> {
        Ok(None)
    }

    fn send(&self, sending: &Sending) -> ProviderResult<Piped> {
        let kept = Btrfs::folder(&sending.dataset)?;
        check_name(&sending.to)?;
        let place = kept.place(&sending.to).to_string_lossy().into_owned();
        let mut words = vec!["send".to_owned(), "-q".to_owned()];
        if let Some(base) = &sending.base {
            check_name(&base.name)?;
            let base = kept.place(&base.name).to_string_lossy().into_owned();
            words.extend(["-p".to_owned(), base]);
        }
        words.extend(["--".to_owned(), place]);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        // The paths mean something as long as the folder is open.
        Ok(self.programs.start(BTRFS, &words)?.with(kept))
    }

    fn receive(&self, receiving: &Receiving) -> ProviderResult<Piped> {
        let folder = Path::new(&receiving.dataset);
        if folder.symlink_metadata().is_err() {
            let words = ["subvolume", "create", "--", &receiving.dataset];
            self.btrfs.ask(("make", &receiving.dataset), &words)?;
        }
        Btrfs::folder(&receiving.dataset)?;
        let kept = SnapshotFolder::make(folder)?;
        let lock = lock(&kept)?;
        for name in self.remains(&kept)? {
            self.remove(&kept, &name)?;
        }
        let place = kept.place("").to_string_lossy().into_owned();
        // A link in a stream would lead whoever writes the rest of it elsewhere.
        let words = ["receive", "-q", "-e", "-C", "--", &place];
        Ok(self.programs.start(BTRFS, &words)?.with((kept, lock)))
    }

    fn settle(&self, receiving: &Receiving) -> ProviderResult<()> {
        let kept = Btrfs::folder(&receiving.dataset)?;
        for snapshot in &receiving.snapshots {
            check_name(&snapshot.name)?;
            let shown = self.shown(&kept, &snapshot.name)?;
            if !shown.is_read_only || shown.received_uuid.as_deref() != Some(&snapshot.identity) {
                return Err(ProviderError::Refused {
                    action: "receive",
                    what: format!("{}@{}", dataset(&receiving.dataset), snapshot.name),
                    reason: "it did not come to its end, or is another than was sent".to_owned(),
                });
            }
            if kept.noted(&snapshot.name).is_some() {
                // What is noted stays: retention goes by the time in it.
                continue;
            }
            kept.note(&Cutting {
                name: &snapshot.name,
                time_s: snapshot.time_s,
                record: snapshot.record.as_deref().unwrap_or_default(),
            })?;
        }
        Ok(())
    }

    fn discard(&self, name: &str) -> ProviderResult<()> {
        let kept = Btrfs::folder(name)?;
        let _lock = lock(&kept)?;
        self.remains(&kept)?
            .iter()
            .try_for_each(|name| self.remove(&kept, name))
    }

    fn keep(&self, keeping: &Keeping) -> ProviderResult<()> {
        check_tag(&keeping.tag)?;
        match self
            .btrfs
            .hold(&Self::snapshot_name(keeping, &keeping.snapshot), &keeping.tag)
        {
            Err(ProviderError::Held { .. }) => {}
            other => other?,
        }
        if keeping.means == KeepingMeans::HoldToo {
            return Ok(());
        }
        for name in Btrfs::folder(&keeping.dataset)?.names()? {
            if name == keeping.snapshot {
                continue;
            }
            match self.btrfs.release(&Self::snapshot_name(keeping, &name), &keeping.tag) {
                Err(ProviderError::NotThere { .. }) => {}
                other => other?,
            }
        }
        Ok(())
    }

    fn refusal(&self, action: &'static str, what: &str, complaint: &str) -> ProviderError {
        Btrfs::refusal((action, what), complaint)
    }

    fn can_pack(&self, when: PackWhen) -> bool {
        when == PackWhen::Never
    }

    fn can_unpack(&self) -> bool {
        false
    }
}
