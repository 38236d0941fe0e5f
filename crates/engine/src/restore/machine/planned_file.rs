//! A file or block device that a restore of a machine writes.

use std::path::{Path, PathBuf};

use holdfast_host::TpmStore;
use holdfast_host::domain_xml::Medium;
use holdfast_image::Format;

use crate::files::block_target::is_block_device;

/// A file or block device that will be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedFile {
    /// What it holds.
    pub content: FileContent,
    /// Where that was when it was backed up.
    pub from: Option<PathBuf>,
    /// Where it will be.
    pub to: PathBuf,
    /// How it holds it.
    pub format: Format,
    /// How it is written.
    pub way: FileWay,
    /// Where the file that is there now is kept, with [`FileWay::SetAside`].
    pub kept_at: Option<PathBuf>,
    /// Its size as the machine sees it, in bytes.
    pub size_bytes: u64,
    /// Bytes of that which are not zero, about.
    pub data_bytes: u64,
}

impl PlannedFile {
    /// What it will be. The device of a volume that will be cloned is not there yet.
    pub(crate) fn medium(&self) -> Medium {
        let is_device = self.way == FileWay::BlockDevice
            || is_block_device(&self.to)
            || (self.way == FileWay::Cloned && self.to.starts_with("/dev"));
        if is_device { Medium::BlockDevice } else { Medium::File }
    }
}

/// What a file of a machine holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileContent {
    /// A disk, by its name.
    Disk(String),
    /// The firmware's variables.
    FirmwareVariables,
    /// The permanent state of its TPM.
    TpmState(TpmStore),
}

/// How a file is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileWay {
    /// It is new.
    NewFile,
    /// What is on the block device is written over.
    BlockDevice,
    /// What differs is written into what is there.
    InPlace,
    /// It takes the place of the one that is there, which stays until then.
    Replace,
    /// It is new; the file that is there, which cannot be used, is kept under another name.
    SetAside,
    /// It is new, and shares its blocks with a host snapshot: nothing is written.
    Shared,
    /// It is in a clone of its dataset, which is made before: nothing is written.
    Cloned,
}

impl FileWay {
    /// A word for scripts.
    pub fn word(self) -> &'static str {
        match self {
            Self::NewFile => "new",
            Self::BlockDevice => "overwrite",
            Self::InPlace => "in-place",
            Self::Replace => "replace",
            Self::SetAside => "set-aside",
            Self::Shared => "shared",
            Self::Cloned => "cloned",
        }
    }
}

/// The nearest folder of a path that is there: those below it will be made.
pub(super) fn nearest_folder(path: &Path) -> &Path {
    let mut above = path.ancestors().skip(1);
    above.find(|folder| folder.is_dir()).unwrap_or(Path::new("/"))
}
