//! The target of a copy, and the journal of its receiver.
//!
//! A file is written under a temporary name beside the target, and gets its name when the copy is complete:
//!
//! | file | content |
//! |---|---|
//! | `.NAME.holdfast-copy` | the disk |
//! | `.NAME.holdfast-copy.journal` | which parts of it are durable ([format](../../../docs/format/transfer.md)) |
//!
//! A block device or an export of an NBD server is written in place, and its journal is in a folder of this host. The
//! journal is locked while a receiver uses it.

mod export;
mod journal_file;
mod names;
mod partial_file;

use std::fs::OpenOptions;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_block::{BlockDevice as _, BlockDeviceMut, Clock, LockOutcome, lock_file, sync_folder_of};
use holdfast_engine::{Error as JobError, LockedDevice, Overwrite, open_block_target};
use holdfast_image::Format;
use holdfast_serve::nbd::client::NbdDeviceMut;
use holdfast_transfer::{FileIdentity, JournalState};
use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::error::{Error, Result};
use crate::request::{ExistingTarget, ReceiveRequest};
use crate::seed::{SeedFill, SeedWatch};
pub use export::{ExportTarget, export_identity};
use journal_file::LockedJournal;
use names::{JOURNAL_SUFFIX, SUFFIX, beside, is_same_file, remove_partial};
pub use names::{interrupted_bytes, is_named_early, name_early, remove_early_name, remove_journal};
use partial_file::{PartialFile, target_format};

/// Where the disk is written.
enum Place {
    /// A file that gets its name at the end.
    File {
        open: PartialFile,
        partial: PathBuf,
        path: PathBuf,
        existing: ExistingTarget,
        /// Keeps machines away from the file that is replaced: they would write to a file without a name.
        _replaced: Option<LockOutcome>,
    },
    BlockDevice(LockedDevice),
    Export(Arc<NbdDeviceMut>),
}

impl Place {
    fn device(&self) -> &dyn BlockDeviceMut {
        match self {
            Self::File { open, .. } => open.device(),
            Self::BlockDevice(device) => &**device,
            Self::Export(export) => export,
        }
    }
}

/// A locked target with its journal.
pub(crate) struct Target {
    place: Place,
    journal: LockedJournal,
}

/// What the host of a target has.
#[derive(Clone, Copy)]
pub(crate) struct TargetHost<'a> {
    /// The export that is the target; none if the request names a file or a block device.
    pub(crate) export: Option<&'a ExportTarget>,
    /// The folder for journals of targets without a folder.
    pub(crate) journal_folder: &'a Path,
    pub(crate) clock: &'a dyn Clock,
}

impl Target {
    /// Opens the target of a request, with the state of an interrupted copy.
    ///
    /// # Errors
    /// The target cannot be used, for the reason that the error has. After [`Error::Export`], another attempt can succeed.
    pub(crate) fn open(
        request: &ReceiveRequest,
        host: TargetHost<'_>,
        watch: &mut SeedWatch<'_>,
    ) -> Result<(Self, Option<JournalState>)> {
        let clock = host.clock;
        let fill = request.seed.as_ref().map(|seed| SeedFill { seed, clock, watch });
        let path = &request.target;
        if let Some(export) = host.export {
            return Self::open_export(export, request, host, fill);
        }
        let format = target_format(request)?;
        let found = path.metadata().ok();
        if found.as_ref().is_some_and(|found| found.file_type().is_block_device()) {
            if format != Format::Raw {
                return Err(Error::TargetFormat {
                    path: path.clone(),
                    reason: format!("a block device holds a raw disk, not a {format} image"),
                });
            }
            return Self::open_block_device(request, host, fill);
        }
        if found.as_ref().is_some_and(|found| !found.is_file()) || path.file_name().is_none() || !path.is_absolute() {
            return Err(Error::TargetKind { path: path.clone() });
        }
        Self::open_file(request, clock, fill)
    }

    fn open_file(
        request: &ReceiveRequest,
        clock: &dyn Clock,
        mut fill: Option<SeedFill<'_>>,
    ) -> Result<(Self, Option<JournalState>)> {
        let path = &request.target;
        let is_present = path.metadata().is_ok();
        let partial = beside(path, SUFFIX);
        let (mut journal, mut state) = LockedJournal::open(&beside(path, JOURNAL_SUFFIX), request, clock)?;
        let is_owner = |state: &Option<JournalState>| state.as_ref().is_some_and(|state| state.owner.is_some());
        let has_data = partial.exists() || (is_owner(&state) && is_present);
        if state.is_some() && !has_data {
            // Without the data, the journal means nothing.
            journal.clear()?;
            state = None;
        }
        let is_owner = is_owner(&state);
        let is_named_early = is_named_early(path);
        if !is_owner && is_present && !is_named_early && request.existing == ExistingTarget::Refuse {
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
            None => PartialFile::create(&partial, request).and_then(|open| {
                let filled = fill.as_mut().map_or(Ok(()), |fill| open.fill(fill));
                // The error of the seed matters more than that of the deletion.
                let filled = filled.inspect_err(|_| drop(std::fs::remove_file(&partial)));
                filled.map(|()| open)
            }),
            Some(_) if is_complete => PartialFile::open_raw(path),
            Some(_) => PartialFile::reopen(&partial, request),
        };
        let place = Place::File {
            open: opened.inspect_err(|_| journal.discard_without(state.as_ref()))?,
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
        host: TargetHost<'_>,
        fill: Option<SeedFill<'_>>,
    ) -> Result<(Self, Option<JournalState>)> {
        let overwrite = match request.existing {
            ExistingTarget::Refuse => Overwrite::Refuse,
            ExistingTarget::Replace => Overwrite::Replace,
        };
        let path = &request.target;
        let open = || {
            Ok(Place::BlockDevice(open_block_target(
                path,
                overwrite,
                request.size_bytes,
            )?))
        };
        Self::open_in_place(path.as_os_str().as_encoded_bytes(), request, host, fill, open)
    }

    fn open_export(
        export: &ExportTarget,
        request: &ReceiveRequest,
        host: TargetHost<'_>,
        fill: Option<SeedFill<'_>>,
    ) -> Result<(Self, Option<JournalState>)> {
        if request.existing == ExistingTarget::Refuse {
            return Err(Error::ExportOverwritten {
                address: export.address().to_owned(),
            });
        }
        let open = || {
            let device = export.reconnected()?;
            let target_bytes = device.size_bytes();
            if target_bytes < request.size_bytes {
                return Err(Error::Engine(JobError::TargetTooSmall {
                    path: request.target.clone(),
                    target_bytes,
                    disk_bytes: request.size_bytes,
                }));
            }
            Ok(Place::Export(device))
        };
        Self::open_in_place(export.identity().as_bytes(), request, host, fill, open)
    }

    /// Opens a target that is overwritten, whose journal is in a folder of the host. `identity` is that of the target.
    fn open_in_place(
        identity: &[u8],
        request: &ReceiveRequest,
        host: TargetHost<'_>,
        fill: Option<SeedFill<'_>>,
        open: impl FnOnce() -> Result<Place>,
    ) -> Result<(Self, Option<JournalState>)> {
        let folder = host.journal_folder;
        std::fs::create_dir_all(folder).map_err(|source| Error::File {
            action: "create",
            path: folder.to_owned(),
            source,
        })?;
        let name = format!("{}.journal", blake3::hash(identity).to_hex());
        let (journal, state) = LockedJournal::open(&folder.join(name), request, host.clock)?;
        let opened = open().and_then(|place| match fill {
            // A target that is its own seed has the content already.
            Some(mut fill) if state.is_none() && fill.seed.path != request.target => {
                fill.fill_block_device(place.device()).map(|()| place)
            }
            _ => Ok(place),
        });
        let place = opened.inspect_err(|_| journal.discard_without(state.as_ref()))?;
        Ok((Self { place, journal }, state))
    }

    /// The disk.
    pub(crate) fn device(&self) -> &dyn BlockDeviceMut {
        self.place.device()
    }

    /// Ends operations in progress that wait for a server. A server that has lost one connection may answer on none.
    pub(crate) fn abandon_operations(&self) {
        if let Place::Export(export) = &self.place {
            export.as_read().stopper().stop();
        }
    }

    /// Keeps what has arrived since the last synchronization, as well as possible: the next receiver compares it.
    pub(crate) fn keep_received(&self) {
        if let Place::File { open, .. } = &self.place {
            open.keep();
        }
    }

    /// Appends to the journal, durably.
    pub(crate) fn append(&self, bytes: &[u8]) -> Result<()> {
        self.journal.append(bytes)
    }

    /// Whether the file at the path of the target is the one that was written.
    pub(crate) fn examine(&self) -> FileIdentity {
        let Place::File { open, partial, .. } = &self.place else {
            return FileIdentity::Same;
        };
        match (open.file.metadata(), partial.symlink_metadata()) {
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
        self.journal.delete()
    }
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
