//! Clones of files, which share their blocks until one of the files is written: XFS with `reflink=1`, btrfs, and
//! other file systems with clones.
//!
//! Each clone is of one point in time of its file. Several clones are of one point in time only if their files are
//! not written in the meantime.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use holdfast_block::open_past_leases;
use rustix::fs::{FlockOperation, Mode, OFlags, ResolveFlags, flock, ioctl_ficlone, openat2};

use super::folder::{SNAPSHOT_FOLDER, SnapshotFolder, check_name, file_error, make_folder, sync_folder};
use super::leftovers::ProviderLeftover;
use super::probe::why_not;
use super::{
    Dataset, DatasetState, HostSnapshot, HostSnapshotLabel, HostSnapshotName, HostSnapshotScope, NotedSnapshot,
    Provider, ProviderError, ProviderKind, ProviderResult, View, leftovers,
};

/// Limit on the depth of folders.
const DEPTH_MAX: u32 = 64;

/// Folders whose files can be cloned.
#[derive(Debug, Default)]
pub struct Reflink {
    /// Folders of clones that are being created, each locked (flock) until it has its name.
    making: Mutex<BTreeMap<PathBuf, File>>,
}

/// Clones a file below a folder. The owner of the folder may create links anywhere, so no link is followed.
fn clone_below(folder: &File, file: &Path, to: &Path) -> std::io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let open = |flags| openat2(folder, file, flags, Mode::empty(), resolve);
    let from = File::from(open_past_leases(flags, open)?);
    if !from.metadata()?.is_file() {
        return Err(std::io::Error::new(ErrorKind::InvalidInput, "it is not a regular file"));
    }
    let clone = File::options().write(true).create_new(true).mode(0o600).open(to)?;
    ioctl_ficlone(&clone, &from)?;
    // The clone gets the owner and mode of the original. Holdfast's folder limits the access to it.
    let metadata = from.metadata()?;
    fchown(&clone, Some(metadata.uid()), Some(metadata.gid()))?;
    clone.set_permissions(std::fs::Permissions::from_mode(metadata.mode() & 0o777))
}

fn dataset(name: &str) -> Dataset {
    Dataset {
        provider: ProviderKind::Reflink,
        name: name.to_owned(),
    }
}

/// The regular files below a folder, on the same file system, by relative path.
fn files_below(folder: &Path) -> ProviderResult<Vec<PathBuf>> {
    let device = folder
        .metadata()
        .map_err(|source| file_error("inspect", folder, source))?
        .dev();
    let mut files = Vec::new();
    let mut folders = vec![(PathBuf::new(), 0)];
    while let Some((inside, depth)) = folders.pop() {
        let path = folder.join(&inside);
        let failed = |source| file_error("read the folder", &path, source);
        for entry in std::fs::read_dir(&path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let metadata = entry.metadata().map_err(failed)?;
            let inside = inside.join(entry.file_name());
            if metadata.dev() != device || entry.file_name() == SNAPSHOT_FOLDER {
                continue;
            }
            if metadata.is_file() {
                files.push(inside);
            } else if metadata.is_dir() {
                if depth == DEPTH_MAX {
                    let deep = std::io::Error::new(ErrorKind::InvalidInput, "its folders are nested too deep");
                    return Err(file_error("view", &folder.join(inside), deep));
                }
                folders.push((inside, depth + 1));
            }
        }
    }
    files.sort();
    Ok(files)
}

impl Reflink {
    fn files_of(wanted: &HostSnapshotScope) -> ProviderResult<Vec<PathBuf>> {
        if wanted.files.is_empty() {
            return files_below(Path::new(&wanted.dataset.name));
        }
        Ok(wanted.files.clone())
    }

    fn clone_files(from: &Path, to: &Path, files: &[PathBuf]) -> ProviderResult<()> {
        let folder = File::open(from).map_err(|source| file_error("open", from, source))?;
        for file in files {
            let to = to.join(file);
            if let Some(folder) = to.parent() {
                make_folder(folder)?;
            }
            clone_below(&folder, file, &to).map_err(|source| file_error("clone", &from.join(file), source))?;
        }
        Ok(())
    }

    fn making(&self) -> MutexGuard<'_, BTreeMap<PathBuf, File>> {
        self.making.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates a locked folder for clones, and removes the leftover of a killed process.
    fn begin(&self, snapshot_folder: &SnapshotFolder, name: &str, shown: &str) -> ProviderResult<()> {
        // The lock prevents other processes from treating the folder as a leftover before it is locked.
        let _lock = snapshot_folder.lock()?;
        // Another process may have used this name since it was checked.
        snapshot_folder.check_free(name, shown)?;
        let place = snapshot_folder.hidden_place(name);
        let failed = |action| {
            let place = snapshot_folder.shown_place(name);
            move |source| file_error(action, &place, source)
        };
        if let Ok(left) = File::open(&place) {
            if flock(&left, FlockOperation::NonBlockingLockExclusive).is_err() {
                return Err(ProviderError::Exists {
                    what: format!("{shown}, which another process is creating,"),
                });
            }
            std::fs::remove_dir_all(&place).map_err(failed("remove the leftover of"))?;
        }
        std::fs::create_dir(&place).map_err(failed("create"))?;
        let open = File::open(&place).map_err(failed("open"))?;
        let locked = flock(&open, FlockOperation::NonBlockingLockExclusive);
        locked.map_err(|error| failed("lock")(error.into()))?;
        self.making().insert(snapshot_folder.shown_place(name), open);
        Ok(())
    }

    /// Removes a folder that was created or filled, and has no final name yet. Returns whether there was one.
    fn revert_pending(&self, snapshot_folder: &SnapshotFolder, name: &str) -> bool {
        let lock = self.making().remove(&snapshot_folder.shown_place(name));
        if lock.is_some() {
            drop(std::fs::remove_dir_all(snapshot_folder.hidden_place(name)));
        }
        lock.is_some()
    }
}

/// The identity of a folder of clones: its inode, whose number may be reused, and its creation time.
fn identity_of(metadata: &std::fs::Metadata) -> String {
    let made = metadata.created().ok();
    let made = made.and_then(|made| made.duration_since(std::time::UNIX_EPOCH).ok());
    format!("{}-{}", metadata.ino(), made.unwrap_or_default().as_nanos())
}

/// Atomically hides a snapshot before its removal, so that a partly removed one is never visible.
fn hide(snapshot_folder: &SnapshotFolder, name: &str) -> ProviderResult<()> {
    let (place, hidden_path) = (snapshot_folder.place(name), snapshot_folder.hidden_place(name));
    drop(std::fs::remove_dir_all(&hidden_path));
    std::fs::rename(&place, &hidden_path).map_err(|source| file_error("rename", &place, source))
}

fn remove_hidden(snapshot_folder: &SnapshotFolder, name: &str) -> ProviderResult<()> {
    let hidden_path = snapshot_folder.hidden_place(name);
    std::fs::remove_dir_all(&hidden_path).map_err(|source| file_error("remove", &hidden_path, source))
}

impl Provider for Reflink {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Reflink
    }

    fn datasets(&self) -> ProviderResult<Vec<DatasetState>> {
        // Any folder may be a dataset.
        Ok(Vec::new())
    }

    fn dataset(&self, name: &str) -> ProviderResult<DatasetState> {
        let folder = Path::new(name);
        if !folder.is_dir() {
            return Err(ProviderError::NotFound {
                what: format!("folder {name}"),
            });
        }
        let room = rustix::fs::statvfs(folder).map_err(|error| file_error("inspect", folder, error.into()))?;
        Ok(DatasetState {
            dataset: dataset(name),
            folder: Some(folder.to_owned()),
            is_volume: false,
            used_bytes: None,
            referenced_bytes: None,
            snapshots_bytes: None,
            compression_percent: None,
            available_bytes: Some(room.f_bavail.saturating_mul(room.f_frsize)),
            origin: None,
        })
    }

    fn snapshots(&self, name: &str) -> ProviderResult<Vec<HostSnapshot>> {
        let snapshot_folder = SnapshotFolder::of(Path::new(name))?;
        let mut snapshots = Vec::new();
        for snapshot in snapshot_folder.names()? {
            let noted = snapshot_folder.noted(&snapshot);
            let place = snapshot_folder.place(&snapshot);
            let metadata = place
                .metadata()
                .map_err(|source| file_error("inspect", &place, source))?;
            snapshots.push(HostSnapshot {
                name: HostSnapshotName {
                    dataset: dataset(name),
                    name: snapshot.clone(),
                },
                time_s: noted.as_ref().map_or_else(|| metadata.mtime(), |noted| noted.time_s),
                identity: identity_of(&metadata),
                used_bytes: None,
                referenced_bytes: None,
                hold_count: snapshot_folder.hold_count(&snapshot)?,
                record: noted.map(|noted| noted.record),
            });
        }
        snapshots.sort_by(|a, b| (a.time_s, &a.name).cmp(&(b.time_s, &b.name)));
        Ok(snapshots)
    }

    fn groups(&self, wanted: &[HostSnapshotScope]) -> ProviderResult<Vec<Vec<HostSnapshotScope>>> {
        Ok(wanted.iter().map(|one| vec![one.clone()]).collect())
    }

    fn prepare(&self, wanted: &[HostSnapshotScope], label: &HostSnapshotLabel<'_>) -> ProviderResult<()> {
        for one in wanted {
            let folder = Path::new(&one.dataset.name);
            let shown = format!("{}@{}", one.dataset, label.name);
            check_name(label.name)?;
            let snapshot_folder = SnapshotFolder::make(folder)?;
            snapshot_folder.check_free(label.name, &shown)?;
            if let Some(reason) = why_not(&folder.join(SNAPSHOT_FOLDER), label.name) {
                return Err(ProviderError::Refused {
                    action: "make a snapshot of",
                    what: one.dataset.to_string(),
                    reason,
                });
            }
            self.begin(&snapshot_folder, label.name, &shown)?;
        }
        Ok(())
    }

    fn create(&self, group: &[HostSnapshotScope], label: &HostSnapshotLabel<'_>) -> ProviderResult<()> {
        let done = group.iter().try_for_each(|one| {
            let folder = Path::new(&one.dataset.name);
            // The paths use the open file descriptor of the folder.
            let snapshot_folder = SnapshotFolder::of(folder)?;
            Self::clone_files(folder, &snapshot_folder.hidden_place(label.name), &Self::files_of(one)?)
        });
        if done.is_err() {
            for one in group {
                let snapshot_folder = SnapshotFolder::of(Path::new(&one.dataset.name));
                drop(snapshot_folder.map(|snapshot_folder| self.revert_pending(&snapshot_folder, label.name)));
            }
        }
        done
    }

    fn commit(&self, group: &[HostSnapshotScope], label: &HostSnapshotLabel<'_>) -> ProviderResult<()> {
        for one in group {
            let snapshot_folder = SnapshotFolder::of(Path::new(&one.dataset.name))?;
            let lock = self.making().remove(&snapshot_folder.shown_place(label.name));
            if lock.is_some() {
                let (hidden, place) = (
                    snapshot_folder.hidden_place(label.name),
                    snapshot_folder.place(label.name),
                );
                for file in files_below(&hidden)? {
                    let synced = File::open(hidden.join(&file)).and_then(|file| file.sync_all());
                    synced.map_err(|source| {
                        file_error("sync", &snapshot_folder.shown_place(label.name).join(&file), source)
                    })?;
                }
                snapshot_folder.note(label)?;
                std::fs::rename(&hidden, &place).map_err(|source| file_error("rename", &hidden, source))?;
                sync_folder(&place.with_file_name(""))?;
            } else {
                // A snapshot that was already committed gets another record.
                snapshot_folder.check_exists(&HostSnapshotName {
                    dataset: one.dataset.clone(),
                    name: label.name.to_owned(),
                })?;
                snapshot_folder.note(label)?;
            }
        }
        Ok(())
    }

    fn abandon(&self, wanted: &[HostSnapshotScope], label: &HostSnapshotLabel<'_>) {
        for one in wanted {
            if let Ok(snapshot_folder) = SnapshotFolder::of(Path::new(&one.dataset.name)) {
                self.revert_pending(&snapshot_folder, label.name);
            }
        }
    }

    fn noted(&self, name: &str) -> ProviderResult<Vec<NotedSnapshot>> {
        let snapshot_folder = SnapshotFolder::of(Path::new(name))?;
        let noted = snapshot_folder.names()?.into_iter().map(|snapshot| {
            let record = snapshot_folder.noted(&snapshot).map(|noted| noted.record);
            NotedSnapshot::new(dataset(name), snapshot, record)
        });
        Ok(noted.collect())
    }

    fn leftovers(&self, name: &str) -> ProviderResult<Vec<ProviderLeftover>> {
        leftovers::leftovers(&dataset(name))
    }

    fn remove_leftover(&self, leftover: &ProviderLeftover) -> ProviderResult<()> {
        leftovers::remove(leftover, |place| {
            std::fs::remove_dir_all(place).map_err(|source| file_error("remove", place, source))
        })
    }

    fn destroy(&self, snapshot: &HostSnapshotName) -> ProviderResult<()> {
        check_name(&snapshot.name)?;
        let snapshot_folder = SnapshotFolder::of(Path::new(&snapshot.dataset.name))?;
        if self.revert_pending(&snapshot_folder, &snapshot.name) {
            return Ok(());
        }
        snapshot_folder.remove(snapshot, || {
            hide(&snapshot_folder, &snapshot.name)?;
            remove_hidden(&snapshot_folder, &snapshot.name)
        })
    }

    fn destroy_this(&self, snapshot: &HostSnapshot) -> ProviderResult<()> {
        let name = &snapshot.name.name;
        let snapshot_folder = SnapshotFolder::of(Path::new(&snapshot.name.dataset.name))?;
        snapshot_folder.remove(&snapshot.name, || {
            hide(&snapshot_folder, name)?;
            // The snapshot is hidden now, so the inspected folder is the folder that is removed.
            let hidden_path = snapshot_folder.hidden_place(name);
            let metadata = hidden_path
                .metadata()
                .map_err(|source| file_error("inspect", &hidden_path, source))?;
            if identity_of(&metadata) == snapshot.identity {
                return remove_hidden(&snapshot_folder, name);
            }
            let place = snapshot_folder.place(name);
            std::fs::rename(&hidden_path, &place).map_err(|source| file_error("rename", &hidden_path, source))?;
            Err(snapshot.replaced())
        })
    }

    fn hold(&self, snapshot: &HostSnapshotName, tag: &str) -> ProviderResult<()> {
        SnapshotFolder::of(Path::new(&snapshot.dataset.name))?.hold(snapshot, tag)
    }

    fn hold_tags(&self, snapshot: &HostSnapshotName) -> ProviderResult<Option<Vec<String>>> {
        SnapshotFolder::of(Path::new(&snapshot.dataset.name))?
            .hold_tags(&snapshot.name)
            .map(Some)
    }

    fn release(&self, snapshot: &HostSnapshotName, tag: &str) -> ProviderResult<()> {
        SnapshotFolder::of(Path::new(&snapshot.dataset.name))?.release(snapshot, tag)
    }

    fn view(&self, snapshot: &HostSnapshotName, _label: &str) -> ProviderResult<View> {
        let snapshot_folder = SnapshotFolder::of(Path::new(&snapshot.dataset.name))?;
        snapshot_folder.check_exists(snapshot)?;
        Ok(View::permanent(snapshot_folder.shown_place(&snapshot.name)))
    }

    fn clone_to(&self, snapshot: &HostSnapshotName, name: &str) -> ProviderResult<DatasetState> {
        let snapshot_folder = SnapshotFolder::of(Path::new(&snapshot.dataset.name))?;
        snapshot_folder.check_exists(snapshot)?;
        let (from, to) = (snapshot_folder.place(&snapshot.name), Path::new(name));
        std::fs::create_dir(to).map_err(|source| match source.kind() {
            ErrorKind::AlreadyExists => ProviderError::Exists { what: name.to_owned() },
            _ => file_error("create the folder", to, source),
        })?;
        Self::clone_files(&from, to, &files_below(&from)?)?;
        self.dataset(name)
    }
}
