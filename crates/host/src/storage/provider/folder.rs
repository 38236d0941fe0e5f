//! The folder of host snapshots inside a dataset, for providers that do not store snapshots themselves.
//!
//! ```text
//! DATASET/.holdfast/snapshots/NAME      the snapshot; a leading dot marks one that is being created or removed
//! DATASET/.holdfast/records/NAME.json   {"schema": 1, "time_s": 1795363666, "record": "..."}
//! DATASET/.holdfast/holds/NAME/TAG      an empty file for each hold
//! DATASET/.holdfast/lock                locked (flock) while a note is written, a hold changed or a snapshot removed
//! DATASET/.holdfast/making              locked (flock) while btrfs snapshots are created, until they have their names
//! DATASET/.holdfast/receiving           locked (flock) while snapshots of another host are received
//! ```
//!
//! Only its owner has access to `.holdfast`: its content is as confidential as the disks of machines.

use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::ops::Deref;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use holdfast_block::replace_file;
use rustix::fs::{FlockOperation, Mode, OFlags, flock, fstat, open};
use rustix::io::Errno;
use rustix::process::geteuid;
use serde_json::{Value, json};

use super::{HostSnapshotLabel, HostSnapshotName, ProviderError, ProviderResult};
use crate::system::waits::{LOCK_HOLDER, Wait};

/// The name of Holdfast's folder in a dataset that is a folder. The folder is kept when the last host snapshot is
/// removed.
pub const SNAPSHOT_FOLDER: &str = ".holdfast";
/// Limit on the bytes of a record's file.
const RECORD_BYTES_MAX: u64 = 1 << 20;
const NAME_BYTES_MAX: usize = 200;

/// Checks that the name is valid for host snapshots of every provider.
pub(super) fn check_name(name: &str) -> ProviderResult<()> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_.:-".contains(&byte);
    let reason = if name.is_empty() || name.len() > NAME_BYTES_MAX {
        "it must have 1 to 200 characters"
    } else if !name.bytes().all(is_allowed) {
        "it may contain only ASCII letters, digits and _ . : -"
    } else if name.starts_with(['.', '-']) {
        "it must not begin with a dot or a hyphen"
    } else {
        return Ok(());
    };
    Err(ProviderError::Name {
        name: name.to_owned(),
        reason,
    })
}

/// The host snapshots of a dataset that is a folder.
///
/// The owner of the dataset may replace `.holdfast`, for example by a link, and this process may be root. So the
/// folder is opened only once, without following a link. It is trusted only if other users have no access, and all
/// changes use the open file descriptor.
pub(super) struct SnapshotFolder {
    path: PathBuf,
    open: Option<OwnedFd>,
}

/// A path by the open file descriptor of a [`SnapshotFolder`]. It is invalid once the descriptor is closed, so it
/// cannot outlive the folder.
pub(super) struct HeldPath<'a> {
    path: PathBuf,
    _holder: &'a SnapshotFolder,
}

impl Deref for HeldPath<'_> {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.path
    }
}

impl AsRef<Path> for HeldPath<'_> {
    fn as_ref(&self) -> &Path {
        self
    }
}

/// The result of an attempt to lock the folder.
pub(super) enum LockAttempt {
    /// Locked until this value is dropped. No file if the folder has no lock file yet.
    Acquired(Option<File>),
    /// Another process has the lock.
    Busy,
}

/// The stored metadata of a host snapshot.
pub(super) struct HostSnapshotNote {
    pub(super) time_s: i64,
    pub(super) record: String,
}

impl SnapshotFolder {
    /// Opens the folder of a dataset, which need not exist yet.
    ///
    /// # Errors
    /// Other users have access to the existing folder.
    pub(super) fn of(dataset: &Path) -> ProviderResult<Self> {
        let path = dataset.join(SNAPSHOT_FOLDER);
        let refused = |reason: &str| ProviderError::Refused {
            action: "keep host snapshots in",
            what: path.display().to_string(),
            reason: format!("{reason}; move it away if it is not needed"),
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = match open(&path, flags, Mode::empty()) {
            Ok(open) => open,
            Err(Errno::NOENT) => return Ok(Self { path, open: None }),
            Err(Errno::LOOP | Errno::NOTDIR) => return Err(refused("it is not a folder")),
            Err(error) => return Err(file_error("open", &path, error.into())),
        };
        let found = fstat(&open).map_err(|error| file_error("inspect", &path, error.into()))?;
        if found.st_uid != geteuid().as_raw() || found.st_mode & 0o077 != 0 {
            return Err(refused("other users own it, or can read it"));
        }
        Ok(Self { path, open: Some(open) })
    }

    /// Opens the folder of a dataset, and creates it if necessary.
    pub(super) fn make(dataset: &Path) -> ProviderResult<Self> {
        let mut builder = std::fs::DirBuilder::new();
        let path = dataset.join(SNAPSHOT_FOLDER);
        match builder.mode(0o700).create(&path) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(file_error("create the folder", &path, error));
            }
            _ => {}
        }
        let made = Self::of(dataset)?;
        for part in ["snapshots", "records", "holds"] {
            make_folder(&made.ours().join(part))?;
        }
        Ok(made)
    }

    /// The path of the folder for this process and for programs that it starts.
    fn ours(&self) -> PathBuf {
        match &self.open {
            Some(open) => open_here().join(open.as_raw_fd().to_string()),
            None => self.path.clone(),
        }
    }

    /// The path of a host snapshot, for messages and readers.
    pub(super) fn shown_place(&self, name: &str) -> PathBuf {
        self.path.join("snapshots").join(name)
    }

    /// The path of a host snapshot.
    pub(super) fn place(&self, name: &str) -> HeldPath<'_> {
        HeldPath {
            path: self.ours().join("snapshots").join(name),
            _holder: self,
        }
    }

    /// The path of a host snapshot while it is created or removed.
    pub(super) fn hidden_place(&self, name: &str) -> HeldPath<'_> {
        self.place(&format!(".{name}"))
    }

    fn record_place(&self, name: &str) -> PathBuf {
        self.ours().join("records").join(format!("{name}.json"))
    }

    fn holds_place(&self, name: &str) -> PathBuf {
        self.ours().join("holds").join(name)
    }

    /// The names of all host snapshots.
    pub(super) fn names(&self) -> ProviderResult<Vec<String>> {
        let names = names_in(&self.ours().join("snapshots"))?;
        Ok(names.into_iter().filter(|name| check_name(name).is_ok()).collect())
    }

    /// The note of a host snapshot; none if it is missing or invalid.
    pub(super) fn noted(&self, name: &str) -> Option<HostSnapshotNote> {
        let mut bytes = Vec::new();
        let file = File::open(self.record_place(name)).ok()?;
        file.take(RECORD_BYTES_MAX).read_to_end(&mut bytes).ok()?;
        let value: Value = serde_json::from_slice(&bytes).ok()?;
        Some(HostSnapshotNote {
            time_s: value.get("time_s")?.as_i64()?,
            record: value.get("record")?.as_str()?.to_owned(),
        })
    }

    /// Writes a note durably and atomically.
    pub(super) fn note(&self, label: &HostSnapshotLabel<'_>) -> ProviderResult<()> {
        let _lock = self.lock()?;
        self.write_note(label)
    }

    /// Renames a received snapshot from its hidden name to its final name, which must be free. Its note is written
    /// before the rename, and replaces a leftover note of another snapshot.
    pub(super) fn adopt(
        &self,
        hidden: &str,
        name: &str,
        shown: &str,
        label: Option<&HostSnapshotLabel<'_>>,
    ) -> ProviderResult<()> {
        let _lock = self.lock()?;
        self.check_free(name, shown)?;
        if let Some(label) = label {
            self.write_note(label)?;
        }
        let (from, to) = (self.place(hidden), self.place(name));
        std::fs::rename(&from, &to).map_err(|source| file_error("rename", &from, source))?;
        sync_folder(&self.place(""))
    }

    fn write_note(&self, label: &HostSnapshotLabel<'_>) -> ProviderResult<()> {
        let path = self.record_place(label.name);
        let new = self.ours().join("records").join(format!(".{}.new", label.name));
        let value = json!({ "schema": 1, "time_s": label.time_s, "record": label.record });
        replace_file(&path, &new, format!("{value}\n").as_bytes(), None)
            .map_err(|source| file_error("write", &path, source))
    }

    /// The tags of the holds of a host snapshot.
    pub(super) fn hold_tags(&self, name: &str) -> ProviderResult<Vec<String>> {
        check_name(name)?;
        names_in(&self.holds_place(name))
    }

    pub(super) fn hold_count(&self, name: &str) -> ProviderResult<u64> {
        Ok(self.hold_tags(name)?.len() as u64)
    }

    pub(super) fn hold(&self, snapshot: &HostSnapshotName, tag: &str) -> ProviderResult<()> {
        check_name(tag)?;
        let _lock = self.lock()?;
        self.check_exists(snapshot)?;
        let folder = self.holds_place(&snapshot.name);
        make_folder(&folder)?;
        let path = folder.join(tag);
        match File::options().write(true).create_new(true).mode(0o600).open(&path) {
            Ok(_) => sync_folder(&folder),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Err(ProviderError::Held {
                what: snapshot.to_string(),
                reason: format!("by {tag} already"),
            }),
            Err(error) => Err(file_error("create", &path, error)),
        }
    }

    pub(super) fn release(&self, snapshot: &HostSnapshotName, tag: &str) -> ProviderResult<()> {
        check_name(tag)?;
        let _lock = self.lock()?;
        let path = self.holds_place(&snapshot.name).join(tag);
        std::fs::remove_file(&path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => ProviderError::NotFound {
                what: format!("hold {tag} of {snapshot}"),
            },
            _ => file_error("remove", &path, error),
        })
    }

    /// Removes a host snapshot without holds: calls `destroy`, then removes the note.
    pub(super) fn remove(
        &self,
        snapshot: &HostSnapshotName,
        destroy: impl FnOnce() -> ProviderResult<()>,
    ) -> ProviderResult<()> {
        check_name(&snapshot.name)?;
        let _lock = self.lock()?;
        self.check_exists(snapshot)?;
        let holders = names_in(&self.holds_place(&snapshot.name))?;
        if !holders.is_empty() {
            return Err(ProviderError::Held {
                what: snapshot.to_string(),
                reason: format!("by {}", holders.join(", ")),
            });
        }
        destroy()?;
        let record = self.record_place(&snapshot.name);
        match std::fs::remove_file(&record) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(file_error("remove", &record, error)),
            _ => {}
        }
        drop(std::fs::remove_dir(self.holds_place(&snapshot.name)));
        Ok(())
    }

    /// Checks that no host snapshot has this name.
    pub(super) fn check_free(&self, name: &str, shown: &str) -> ProviderResult<()> {
        check_name(name)?;
        match self.place(name).symlink_metadata() {
            Ok(_) => Err(ProviderError::Exists { what: shown.to_owned() }),
            Err(_) => Ok(()),
        }
    }

    pub(super) fn check_exists(&self, snapshot: &HostSnapshotName) -> ProviderResult<()> {
        check_name(&snapshot.name)?;
        let place = self.place(&snapshot.name);
        let is_folder = place.symlink_metadata().is_ok_and(|metadata| metadata.is_dir());
        is_folder.then_some(()).ok_or_else(|| ProviderError::NotFound {
            what: snapshot.to_string(),
        })
    }

    /// The path of the lock file of receivers.
    pub(super) fn receiving_place(&self) -> PathBuf {
        self.ours().join("receiving")
    }

    /// All names in a subfolder.
    pub(super) fn all_names(&self, part: &str) -> ProviderResult<Vec<String>> {
        all_names_in(&self.in_ours(part))
    }

    /// The path of a subfolder, valid while this folder is open.
    pub(super) fn in_ours(&self, part: &str) -> PathBuf {
        self.ours().join(part)
    }

    /// The path of a subfolder, for messages.
    pub(super) fn shown(&self, part: &str) -> PathBuf {
        self.path.join(part)
    }

    /// Takes the shared lock for creating snapshots. For providers that cannot lock the snapshot itself.
    pub(super) fn lock_making(&self) -> ProviderResult<File> {
        let path = self.ours().join("making");
        let file = open_lock(&path)?;
        let _wait = Wait::for_answer(LOCK_HOLDER);
        flock(&file, FlockOperation::LockShared).map_err(|error| file_error("lock", &path, error.into()))?;
        Ok(file)
    }

    /// Whether a process holds the lock for creating snapshots.
    pub(super) fn is_making(&self) -> bool {
        let Ok(file) = File::open(self.ours().join("making")) else {
            return false;
        };
        flock(&file, FlockOperation::NonBlockingLockExclusive).is_err()
    }

    /// Tries to take the lock. Does not create the lock file: without a lock file, there is nothing to lock.
    pub(super) fn try_lock(&self) -> ProviderResult<LockAttempt> {
        let path = self.ours().join("lock");
        let file = match File::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(LockAttempt::Acquired(None)),
            other => other.map_err(|source| file_error("open", &path, source))?,
        };
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(LockAttempt::Acquired(Some(file))),
            Err(Errno::WOULDBLOCK) => Ok(LockAttempt::Busy),
            Err(error) => Err(file_error("lock", &path, error.into())),
        }
    }

    pub(super) fn lock(&self) -> ProviderResult<File> {
        let path = self.ours().join("lock");
        let file = open_lock(&path)?;
        let _wait = Wait::for_answer(LOCK_HOLDER);
        flock(&file, FlockOperation::LockExclusive).map_err(|error| file_error("lock", &path, error.into()))?;
        Ok(file)
    }
}

fn open_lock(path: &Path) -> ProviderResult<File> {
    let mut options = File::options();
    let open = options.create(true).write(true).truncate(false).mode(0o600).open(path);
    open.map_err(|source| file_error("open", path, source))
}

pub(super) fn file_error(action: &'static str, path: &Path, source: std::io::Error) -> ProviderError {
    let path = shown(path);
    match source.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => ProviderError::Full {
            action,
            what: path.display().to_string(),
        },
        _ => ProviderError::File { action, path, source },
    }
}

/// Converts a path by Holdfast's file descriptor to a path for messages; other paths are unchanged.
fn shown(path: &Path) -> PathBuf {
    let descriptors = open_here();
    let Ok(inside) = path.strip_prefix(&descriptors) else {
        return path.to_owned();
    };
    let mut parts = inside.components();
    let open = parts.next().map(|descriptor| descriptors.join(descriptor));
    let folder = open.and_then(|open| std::fs::read_link(open).ok());
    folder.map_or_else(|| path.to_owned(), |folder| folder.components().chain(parts).collect())
}

/// Replaces paths by Holdfast's file descriptor in the message of a program.
pub(super) fn shown_words(words: &str) -> String {
    let descriptors = format!("{}/", open_here().display());
    let mut shown_words = String::new();
    let mut rest = words;
    while let Some(at) = rest.find(&descriptors) {
        let (before, found) = rest.split_at(at);
        let digits = found[descriptors.len()..]
            .bytes()
            .take_while(u8::is_ascii_digit)
            .count();
        let (path, after) = found.split_at(descriptors.len() + digits);
        shown_words += before;
        shown_words += &shown(Path::new(path)).display().to_string();
        rest = after;
    }
    shown_words + rest
}

/// The folder with the file descriptors of this process.
fn open_here() -> PathBuf {
    format!("/proc/{}/fd", std::process::id()).into()
}

/// Creates a folder and its parents, with access for the owner only.
pub(super) fn make_folder(folder: &Path) -> ProviderResult<()> {
    let mut builder = std::fs::DirBuilder::new();
    let made = builder.recursive(true).mode(0o700).create(folder);
    made.map_err(|source| file_error("create the folder", folder, source))
}

/// Makes created and renamed files in a folder durable.
pub(super) fn sync_folder(folder: &Path) -> ProviderResult<()> {
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(|source| file_error("sync", folder, source))
}

/// The names in a folder that do not begin with a dot, in order; empty if the folder does not exist.
fn names_in(folder: &Path) -> ProviderResult<Vec<String>> {
    let mut names = all_names_in(folder)?;
    names.retain(|name| !name.starts_with('.'));
    Ok(names)
}

/// All names in a folder.
fn all_names_in(folder: &Path) -> ProviderResult<Vec<String>> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(file_error("read the folder", folder, error)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|source| file_error("read the folder", folder, source))?;
        names.extend(entry.file_name().into_string().ok());
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::{SnapshotFolder, shown, shown_words};

    #[test]
    fn messages_show_the_real_paths() {
        let dataset = tempfile::tempdir().unwrap();
        let folder = SnapshotFolder::make(dataset.path()).unwrap();
        let known = dataset.path().canonicalize().unwrap().join(".holdfast");
        assert_eq!(shown(&folder.hidden_place("a")), known.join("snapshots/.a"));
        let message = format!("ERROR: cannot snapshot '{}': it's full", folder.place("a").display());
        let place = known.join("snapshots/a").display().to_string();
        assert_eq!(
            shown_words(&message),
            format!("ERROR: cannot snapshot '{place}': it's full")
        );
        assert_eq!(shown_words("nothing of the kind"), "nothing of the kind");
    }
}
