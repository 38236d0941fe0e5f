//! The target of a copy, and the journal of its receiver.
//!
//! A file is written under a temporary name beside the target, and gets its name when the copy is complete:
//!
//! | file | content |
//! |---|---|
//! | `.NAME.holdfast-copy` | the disk |
//! | `.NAME.holdfast-copy.journal` | which parts of it are durable ([format](../../../docs/format/transfer.md)) |
//!
//! A block device is written in place, and its journal is in a folder of this host. The journal is locked while a
//! receiver uses it.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::{BlockDeviceMut, Clock, FileDeviceMut, IoMode, LockOutcome, lock_file, sync_folder_of};
use holdfast_engine::{LockedDevice, Overwrite, open_block_target};
use holdfast_transfer::{FileIdentity, JournalState};
use rustix::fs::{CWD, RenameFlags, renameat_with, statvfs};

use crate::error::{Error, Result};
use crate::request::{ExistingTarget, InterruptedCopy, ReceiveRequest};
use crate::seed::{SeedFill, SeedWatch};

const SUFFIX: &str = ".holdfast-copy";
const JOURNAL_SUFFIX: &str = ".holdfast-copy.journal";
/// How long to wait for another receiver of the same target. One whose sender is gone ends in this time.
const LOCK_PATIENCE: Duration = Duration::from_secs(45);
const LOCK_INTERVAL: Duration = Duration::from_millis(100);

/// Where the disk is written.
enum Place {
    /// A file that gets its name at the end.
    File {
        device: FileDeviceMut,
        /// The same open file.
        file: File,
        partial: PathBuf,
        path: PathBuf,
        existing: ExistingTarget,
        /// Keeps machines away from the file that is replaced: they would write to a file without a name.
        _replaced: Option<LockOutcome>,
    },
    BlockDevice(LockedDevice),
}

/// A locked target with its journal.
pub(crate) struct Target {
    place: Place,
    journal: LockedJournal,
}

/// A journal that no other receiver uses.
struct LockedJournal {
    path: PathBuf,
    file: File,
    _lock: LockOutcome,
}

impl Target {
    /// Opens the target of a request, with the state of an interrupted copy.
    ///
    /// # Errors
    /// The target cannot be used, for the reason that the error has.
    pub(crate) fn open(
        request: &ReceiveRequest,
        journal_folder: &Path,
        clock: &dyn Clock,
        watch: &mut SeedWatch<'_>,
    ) -> Result<(Self, Option<JournalState>)> {
        let path = &request.target;
        let mut fill = request.seed.as_ref().map(|seed| SeedFill { seed, clock, watch });
        let found = path.metadata().ok();
        if found.as_ref().is_some_and(|found| found.file_type().is_block_device()) {
            return Self::open_block_device(request, journal_folder, fill, clock);
        }
        if found.as_ref().is_some_and(|found| !found.is_file()) || path.file_name().is_none() || !path.is_absolute() {
            return Err(Error::TargetKind { path: path.clone() });
        }
        let partial = beside(path, SUFFIX);
        let mut journal = LockedJournal::open(&beside(path, JOURNAL_SUFFIX), path, clock)?;
        if request.interrupted == InterruptedCopy::Delete {
            journal.clear()?;
        }
        let mut state = journal.state(request)?;
        let is_owner = |state: &Option<JournalState>| state.as_ref().is_some_and(|state| state.owner.is_some());
        let has_data = partial.exists() || (is_owner(&state) && found.is_some());
        if state.is_some() && !has_data {
            // Without the data, the journal means nothing.
            journal.clear()?;
            state = None;
        }
        let is_owner = is_owner(&state);
        let is_named_early = is_named_early(path);
        if !is_owner && found.is_some() && !is_named_early && request.existing == ExistingTarget::Refuse {
            journal.discard_without(state.as_ref());
            return Err(Error::TargetExists { path: path.clone() });
        }
        // A file with both names, and one that is complete, may be in use by a machine already.
        let is_complete = is_owner && !partial.exists();
        let replaced = if is_named_early || is_complete {
            None
        } else {
            lock_replaced(path).inspect_err(|_| journal.discard_without(state.as_ref()))?
        };
        let opened = match &state {
            None => create(&partial, request).and_then(|(device, file)| {
                let filled = fill.as_mut().map_or(Ok(()), |fill| fill.fill_file(&file, &device));
                // The error of the seed matters more than that of the deletion.
                let filled = filled.inspect_err(|_| drop(std::fs::remove_file(&partial)));
                filled.map(|()| (device, file))
            }),
            Some(_) if is_complete => open_file(path),
            Some(_) => open_file(&partial),
        };
        let (device, file) = opened.inspect_err(|_| journal.discard_without(state.as_ref()))?;
        let place = Place::File {
            device,
            file,
            partial,
            path: path.clone(),
            existing: request.existing,
            _replaced: replaced,
        };
        let target = Self { place, journal };
        if is_owner {
            target.finish()?;
        }
        Ok((target, state))
    }

    fn open_block_device(
        request: &ReceiveRequest,
        journal_folder: &Path,
        fill: Option<SeedFill<'_>>,
        clock: &dyn Clock,
    ) -> Result<(Self, Option<JournalState>)> {
        let overwrite = match request.existing {
            ExistingTarget::Refuse => Overwrite::Refuse,
            ExistingTarget::Replace => Overwrite::Replace,
        };
        let path = &request.target;
        let name = blake3::hash(path.as_os_str().as_encoded_bytes()).to_hex();
        let journal_path = journal_folder.join(format!("{name}.journal"));
        let failed = |source| Error::File {
            action: "create",
            path: journal_folder.to_owned(),
            source,
        };
        std::fs::create_dir_all(journal_folder).map_err(failed)?;
        let mut journal = LockedJournal::open(&journal_path, path, clock)?;
        if request.interrupted == InterruptedCopy::Delete {
            journal.clear()?;
        }
        let state = journal.state(request)?;
        let opened = open_block_target(path, overwrite, request.size_bytes).map_err(Error::from);
        let device = opened.and_then(|device| match fill {
            // A device that is its own seed has the content already.
            Some(mut fill) if state.is_none() && fill.seed.path != *path => {
                fill.fill_block_device(&*device).map(|()| device)
            }
            _ => Ok(device),
        });
        let device = device.inspect_err(|_| journal.discard_without(state.as_ref()))?;
        let place = Place::BlockDevice(device);
        Ok((Self { place, journal }, state))
    }

    /// The disk.
    pub(crate) fn device(&self) -> &dyn BlockDeviceMut {
        match &self.place {
            Place::File { device, .. } => device,
            Place::BlockDevice(device) => &**device,
        }
    }

    /// Appends to the journal, durably.
    pub(crate) fn append(&self, bytes: &[u8]) -> Result<()> {
        let mut file = &self.journal.file;
        let written = file.write_all(bytes).and_then(|()| file.sync_data());
        written.map_err(|source| self.journal.failed("write", source))
    }

    /// Whether the file at the path of the target is the one that was written.
    pub(crate) fn examine(&self) -> FileIdentity {
        let Place::File { file, partial, .. } = &self.place else {
            return FileIdentity::Same;
        };
        match (file.metadata(), partial.symlink_metadata()) {
            (Ok(ours), Ok(named)) if (named.dev(), named.ino()) == (ours.dev(), ours.ino()) => FileIdentity::Same,
            (_, Ok(_)) => FileIdentity::Different {
                detail: format!("{} was replaced meanwhile", partial.display()),
            },
            (_, Err(error)) => FileIdentity::Different {
                detail: format!("{}: {error}", partial.display()),
            },
        }
    }

    /// Gives the file its name. Called again after a kill, it completes what is left to do.
    pub(crate) fn finish(&self) -> Result<()> {
        let Place::File {
            partial,
            path,
            existing,
            ..
        } = &self.place
        else {
            return Ok(());
        };
        if !partial.exists() {
            return Ok(());
        }
        if is_same_file(partial, path) {
            return remove_partial(partial);
        }
        let flags = match existing {
            ExistingTarget::Refuse => RenameFlags::NOREPLACE,
            ExistingTarget::Replace => RenameFlags::empty(),
        };
        let renamed = renameat_with(CWD, partial, CWD, path, flags).map_err(std::io::Error::from);
        renamed
            .and_then(|()| sync_folder_of(path))
            .map_err(|source| Error::File {
                action: "rename the finished copy to",
                path: path.clone(),
                source,
            })
    }

    /// Deletes the journal: the sender knows the owner.
    pub(crate) fn forget(self) -> Result<()> {
        let removed = std::fs::remove_file(&self.journal.path).and_then(|()| sync_folder_of(&self.journal.path));
        removed.map_err(|source| self.journal.failed("delete", source))
    }
}

impl LockedJournal {
    fn open(path: &Path, target: &Path, clock: &dyn Clock) -> Result<Self> {
        let failed = |action, source| Error::File {
            action,
            path: path.to_owned(),
            source,
        };
        let until = clock.now() + LOCK_PATIENCE;
        loop {
            let opened = OpenOptions::new().read(true).append(true).create(true).open(path);
            let file = opened.map_err(|source| failed("open", source))?;
            let lock = lock_file(&file).map_err(|source| failed("lock", source))?;
            // A receiver that has finished deletes its journal while others wait for the lock.
            let is_present = path.symlink_metadata().is_ok_and(|named| {
                file.metadata()
                    .is_ok_and(|ours| (ours.dev(), ours.ino()) == (named.dev(), named.ino()))
            });
            match lock {
                LockOutcome::HeldElsewhere if clock.now() >= until => {
                    return Err(Error::TargetBusy {
                        path: target.to_owned(),
                    });
                }
                LockOutcome::HeldElsewhere => clock.sleep(LOCK_INTERVAL),
                _ if !is_present => {}
                lock => {
                    let journal = Self {
                        path: path.to_owned(),
                        file,
                        _lock: lock,
                    };
                    sync_folder_of(path).map_err(|source| failed("make durable", source))?;
                    return Ok(journal);
                }
            }
        }
    }

    fn failed(&self, action: &'static str, source: std::io::Error) -> Error {
        Error::File {
            action,
            path: self.path.clone(),
            source,
        }
    }

    /// The state of an interrupted copy. An entry that was cut off is removed, and the rest is durable afterwards.
    fn state(&mut self, request: &ReceiveRequest) -> Result<Option<JournalState>> {
        let mut bytes = Vec::new();
        let read = self
            .file
            .seek(SeekFrom::Start(0))
            .and_then(|_| self.file.read_to_end(&mut bytes));
        read.map_err(|source| self.failed("read", source))?;
        let state = JournalState::decode(&bytes).map_err(|error| Error::Journal {
            path: self.path.clone(),
            reason: error.to_string(),
        })?;
        let valid_bytes = state.as_ref().map_or(0, |state| state.valid_bytes);
        let cut = self.file.set_len(valid_bytes).and_then(|()| self.file.sync_all());
        cut.map_err(|source| self.failed("shorten", source))?;
        if let Some(state) = &state
            && state.copy.layout.size_bytes() != request.size_bytes
        {
            return Err(Error::OtherSize {
                path: request.target.clone(),
                found_bytes: state.copy.layout.size_bytes(),
                size_bytes: request.size_bytes,
            });
        }
        Ok(state)
    }

    fn clear(&mut self) -> Result<()> {
        let cleared = self.file.set_len(0).and_then(|()| self.file.sync_all());
        cleared.map_err(|source| self.failed("shorten", source))
    }

    /// Deletes a journal without a state, before an error is returned.
    fn discard_without(&self, state: Option<&JournalState>) {
        if state.is_none() {
            // The error that follows matters more.
            std::fs::remove_file(&self.path).ok();
        }
    }
}

/// Gives the file of a copy that is not complete its own name, besides the temporary one: the hypervisor of a machine that
/// moves opens it before.
///
/// # Errors
/// Another file has that name.
pub fn name_early(path: &Path) -> Result<()> {
    let partial = beside(path, SUFFIX);
    if is_same_file(&partial, path) {
        return Ok(());
    }
    let linked = std::fs::hard_link(&partial, path).and_then(|()| sync_folder_of(path));
    linked.map_err(|source| Error::File {
        action: "name the copy",
        path: path.to_owned(),
        source,
    })
}

/// Removes the name that [`name_early`] has given. A file without a temporary name is a complete copy, or of another
/// origin, and is kept.
pub fn remove_early_name(path: &Path) -> Result<()> {
    if !is_named_early(path) {
        return Ok(());
    }
    let removed = std::fs::remove_file(path).and_then(|()| sync_folder_of(path));
    removed.map_err(|source| Error::File {
        action: "delete the early name",
        path: path.to_owned(),
        source,
    })
}

/// Removes the temporary name of a file that was given its own name before.
fn remove_partial(partial: &Path) -> Result<()> {
    let removed = std::fs::remove_file(partial).and_then(|()| sync_folder_of(partial));
    removed.map_err(|source| Error::File {
        action: "delete the temporary name",
        path: partial.to_owned(),
        source,
    })
}

/// Bytes that an interrupted copy to the file `path` has stored.
pub fn interrupted_bytes(path: &Path) -> u64 {
    let partial = beside(path, SUFFIX).symlink_metadata();
    partial.map_or(0, |found| found.blocks().saturating_mul(512))
}

/// Whether the file at `path` is a copy that is not complete: [`name_early`] has named it.
pub fn is_named_early(path: &Path) -> bool {
    is_same_file(&beside(path, SUFFIX), path)
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| path.symlink_metadata().ok().map(|found| (found.dev(), found.ino()));
    identity(one).is_some_and(|found| Some(found) == identity(other))
}

/// Locks the file that is to be replaced, if there is one.
fn lock_replaced(path: &Path) -> Result<Option<LockOutcome>> {
    let failed = |action, source| Error::File {
        action,
        path: path.to_owned(),
        source,
    };
    let file = match OpenOptions::new().read(true).write(true).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(failed("open", source)),
    };
    match lock_file(&file).map_err(|source| failed("lock", source))? {
        LockOutcome::HeldElsewhere => Err(Error::TargetInUse { path: path.to_owned() }),
        lock => Ok(Some(lock)),
    }
}

/// The temporary name of a file beside the target.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(suffix);
    path.with_file_name(name)
}

/// Creates an empty file for the disk. A leftover of an earlier copy is removed.
fn create(partial: &Path, request: &ReceiveRequest) -> Result<(FileDeviceMut, File)> {
    if let Err(source) = std::fs::remove_file(partial)
        && source.kind() != std::io::ErrorKind::NotFound
    {
        return Err(Error::File {
            action: "delete",
            path: partial.to_owned(),
            source,
        });
    }
    let folder = partial.parent().unwrap_or_else(|| Path::new("/"));
    let room = statvfs(folder).map_err(|source| Error::File {
        action: "examine the file system of",
        path: folder.to_owned(),
        source: source.into(),
    })?;
    let available_bytes = room.f_bavail.saturating_mul(room.f_frsize);
    if available_bytes < request.expected_bytes {
        return Err(Error::NoSpace {
            path: request.target.clone(),
            needed_bytes: request.expected_bytes,
            available_bytes,
        });
    }
    let failed = |action, source| Error::File {
        action,
        path: partial.to_owned(),
        source,
    };
    let mut options = OpenOptions::new();
    let created = options
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(partial);
    let file = created.map_err(|source| failed("create", source))?;
    let sized = file.set_len(request.size_bytes).and_then(|()| file.sync_all());
    sized
        .and_then(|()| sync_folder_of(partial))
        .map_err(|source| failed("make durable", source))?;
    device_of(file, partial)
}

fn open_file(path: &Path) -> Result<(FileDeviceMut, File)> {
    let opened = OpenOptions::new().read(true).write(true).open(path);
    let file = opened.map_err(|source| Error::File {
        action: "open",
        path: path.to_owned(),
        source,
    })?;
    device_of(file, path)
}

fn device_of(file: File, path: &Path) -> Result<(FileDeviceMut, File)> {
    let same = file.try_clone().map_err(|source| Error::File {
        action: "open",
        path: path.to_owned(),
        source,
    })?;
    Ok((FileDeviceMut::of_file(file, path, IoMode::Buffered)?, same))
}
