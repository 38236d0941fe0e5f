//! Clones of files, which share their blocks until one of them is written: XFS with `reflink=1`, btrfs, and whatever else has them.
//!
//! Each clone is of one instant of its file; several files are of one instant only if nobody writes them meanwhile.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::ioctl_ficlone;
use rustix::io::Errno;

use super::folder::{OURS, SnapshotFolder, file_error, make_folder, sync_folder};
use super::{
    Cutting, Dataset, DatasetState, HostSnapshot, HostSnapshotName, Provider, ProviderError, ProviderKind,
    ProviderResult, View, Wanted,
};

/// What is cloned to find out whether files can be: more than a file system keeps in an inode.
const PROBE: &[u8] = &[0x48; 4096];
/// Folders in folders, at most.
const DEPTH_MAX: u32 = 64;

/// Folders whose files can be cloned.
#[derive(Debug, Default)]
pub struct Reflink;

/// A new file that shares its blocks with another one. It must not be there.
pub fn clone_file(from: &Path, to: &Path) -> std::io::Result<()> {
    // Until its name goes, it is as secret as what it shares.
    let clone = File::options().write(true).create_new(true).mode(0o600).open(to)?;
    Ok(ioctl_ficlone(clone, File::open(from)?)?)
}

/// Why files in a folder cannot be cloned; none where they can. It is tried, with two small files named after `label`.
pub fn why_not(folder: &Path, label: &str) -> Option<String> {
    let path = |what: &str| folder.join(format!(".holdfast-{label}.{what}.partial"));
    let (from, to) = (path("from"), path("to"));
    let written = File::create_new(&from).and_then(|mut file| file.write_all(PROBE));
    let made = written.and_then(|()| clone_file(&from, &to));
    for path in [from, to] {
        // What is not there need not go.
        drop(std::fs::remove_file(path));
    }
    let reason = match made {
        Ok(()) => return None,
        Err(error) if error.raw_os_error() == Some(Errno::OPNOTSUPP.raw_os_error()) => {
            "its file system has no clones of files (XFS and btrfs have)".to_owned()
        }
        Err(error) => error.to_string(),
    };
    Some(format!("files in {} cannot be cloned: {reason}", folder.display()))
}

fn dataset(name: &str) -> Dataset {
    Dataset {
        provider: ProviderKind::Reflink,
        name: name.to_owned(),
    }
}

/// The regular files below a folder, on its own file system, by their paths from there.
fn files_below(folder: &Path) -> ProviderResult<Vec<PathBuf>> {
    let device = folder
        .metadata()
        .map_err(|source| file_error("look at", folder, source))?
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
            if metadata.dev() != device || entry.file_name() == OURS {
                continue;
            }
            if metadata.is_file() {
                files.push(inside);
            } else if metadata.is_dir() && depth < DEPTH_MAX {
                folders.push((inside, depth + 1));
            }
        }
    }
    files.sort();
    Ok(files)
}

/// The clone belongs to whom the file belongs to.
fn finish(from: &Path, to: &Path) -> std::io::Result<()> {
    let (file, metadata) = (File::open(to)?, from.metadata()?);
    fchown(&file, Some(metadata.uid()), Some(metadata.gid()))?;
    file.set_permissions(metadata.permissions())?;
    file.sync_all()
}

impl Reflink {
    fn files_of(wanted: &Wanted) -> ProviderResult<Vec<PathBuf>> {
        if wanted.files.is_empty() {
            return files_below(Path::new(&wanted.dataset.name));
        }
        Ok(wanted.files.clone())
    }

    fn clone_files(from: &Path, to: &Path, files: &[PathBuf]) -> ProviderResult<()> {
        for file in files {
            let (from, to) = (from.join(file), to.join(file));
            if let Some(folder) = to.parent() {
                make_folder(folder)?;
            }
            clone_file(&from, &to).map_err(|source| file_error("clone", &from, source))?;
        }
        Ok(())
    }
}

impl Provider for Reflink {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Reflink
    }

    fn datasets(&self) -> ProviderResult<Vec<DatasetState>> {
        // Any folder may be one.
        Ok(Vec::new())
    }

    fn dataset(&self, name: &str) -> ProviderResult<DatasetState> {
        let folder = Path::new(name);
        if !folder.is_dir() {
            return Err(ProviderError::NotThere {
                what: format!("folder {name}"),
            });
        }
        let room = rustix::fs::statvfs(folder).map_err(|error| file_error("look at", folder, error.into()))?;
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
        let kept = SnapshotFolder::of(Path::new(name));
        let mut snapshots = Vec::new();
        for snapshot in kept.names()? {
            let noted = kept.noted(&snapshot);
            let place = kept.place(&snapshot);
            let metadata = place
                .metadata()
                .map_err(|source| file_error("look at", &place, source))?;
            snapshots.push(HostSnapshot {
                name: HostSnapshotName {
                    dataset: dataset(name),
                    name: snapshot.clone(),
                },
                time_s: noted.as_ref().map_or_else(|| metadata.mtime(), |noted| noted.time_s),
                identity: metadata.ino().to_string(),
                used_bytes: None,
                referenced_bytes: None,
                hold_count: kept.hold_count(&snapshot)?,
                record: noted.map(|noted| noted.record),
            });
        }
        snapshots.sort_by(|a, b| (a.time_s, &a.name).cmp(&(b.time_s, &b.name)));
        Ok(snapshots)
    }

    fn groups(&self, wanted: &[Wanted]) -> ProviderResult<Vec<Vec<Wanted>>> {
        Ok(wanted.iter().map(|one| vec![one.clone()]).collect())
    }

    fn prepare(&self, wanted: &[Wanted], cut: &Cutting<'_>) -> ProviderResult<()> {
        for one in wanted {
            let folder = Path::new(&one.dataset.name);
            let kept = SnapshotFolder::of(folder);
            kept.must_be_new(cut.name, &format!("{}@{}", one.dataset, cut.name))?;
            kept.make()?;
            let place = kept.hidden_place(cut.name);
            // Somebody who was killed may have left it.
            drop(std::fs::remove_dir_all(&place));
            if let Some(reason) = why_not(&folder.join(OURS), cut.name) {
                return Err(ProviderError::Refused {
                    action: "make a snapshot of",
                    what: one.dataset.to_string(),
                    reason,
                });
            }
            make_folder(&place)?;
        }
        Ok(())
    }

    fn cut(&self, group: &[Wanted], cut: &Cutting<'_>) -> ProviderResult<()> {
        let mut made = Vec::new();
        let done = group.iter().try_for_each(|one| {
            let folder = Path::new(&one.dataset.name);
            let place = SnapshotFolder::of(folder).hidden_place(cut.name);
            made.push(place.clone());
            Self::clone_files(folder, &place, &Self::files_of(one)?)
        });
        if done.is_err() {
            for place in made {
                drop(std::fs::remove_dir_all(place));
            }
        }
        done
    }

    fn settle(&self, group: &[Wanted], cut: &Cutting<'_>) -> ProviderResult<()> {
        for one in group {
            let folder = Path::new(&one.dataset.name);
            let kept = SnapshotFolder::of(folder);
            let (hidden, place) = (kept.hidden_place(cut.name), kept.place(cut.name));
            // Settled before, it gets another record.
            if hidden.is_dir() {
                for file in files_below(&hidden)? {
                    let finished = finish(&folder.join(&file), &hidden.join(&file));
                    finished.map_err(|source| file_error("finish", &hidden.join(&file), source))?;
                }
                kept.note(cut)?;
                std::fs::rename(&hidden, &place).map_err(|source| file_error("rename", &hidden, source))?;
                sync_folder(&place.with_file_name(""))?;
            } else {
                kept.note(cut)?;
            }
        }
        Ok(())
    }

    fn destroy(&self, snapshot: &HostSnapshotName) -> ProviderResult<()> {
        let kept = SnapshotFolder::of(Path::new(&snapshot.dataset.name));
        // What was cut and never settled goes too.
        drop(std::fs::remove_dir_all(kept.hidden_place(&snapshot.name)));
        kept.remove(snapshot, || {
            // From one moment to the next it is no snapshot any more, and not half of one.
            let (place, hidden) = (kept.place(&snapshot.name), kept.hidden_place(&snapshot.name));
            drop(std::fs::remove_dir_all(&hidden));
            std::fs::rename(&place, &hidden).map_err(|source| file_error("rename", &place, source))?;
            std::fs::remove_dir_all(&hidden).map_err(|source| file_error("remove", &hidden, source))
        })
    }

    fn hold(&self, snapshot: &HostSnapshotName, tag: &str) -> ProviderResult<()> {
        SnapshotFolder::of(Path::new(&snapshot.dataset.name)).hold(snapshot, tag)
    }

    fn release(&self, snapshot: &HostSnapshotName, tag: &str) -> ProviderResult<()> {
        SnapshotFolder::of(Path::new(&snapshot.dataset.name)).release(snapshot, tag)
    }

    fn view(&self, snapshot: &HostSnapshotName, _label: &str) -> ProviderResult<View> {
        let kept = SnapshotFolder::of(Path::new(&snapshot.dataset.name));
        kept.must_be_there(snapshot)?;
        Ok(View::lasting(kept.place(&snapshot.name)))
    }

    fn clone_to(&self, snapshot: &HostSnapshotName, name: &str) -> ProviderResult<DatasetState> {
        let kept = SnapshotFolder::of(Path::new(&snapshot.dataset.name));
        kept.must_be_there(snapshot)?;
        let (from, to) = (kept.place(&snapshot.name), Path::new(name));
        std::fs::create_dir(to).map_err(|source| match source.kind() {
            std::io::ErrorKind::AlreadyExists => ProviderError::Exists { what: name.to_owned() },
            _ => file_error("create the folder", to, source),
        })?;
        Self::clone_files(&from, to, &files_below(&from)?)?;
        self.dataset(name)
    }
}
