//! A file or block device that a restore of a machine writes.

use std::path::{Path, PathBuf};

use holdfast_host::TpmStore;
use holdfast_host::domain_xml::Medium;
use holdfast_image::Format;

use crate::files::block_target::is_block_device;

/// A file or block device that will be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedFile {
    /// Its content.
    pub content: FileContent,
    /// The path at the time of the backup.
    pub from: Option<PathBuf>,
    /// The target path.
    pub to: PathBuf,
    /// The format of the target.
    pub format: Format,
    /// How it is written.
    pub way: FileWay,
    /// The path to which the existing file is moved, with [`FileWay::SetAside`].
    pub kept_at: Option<PathBuf>,
    /// Its virtual size in bytes.
    pub size_bytes: u64,
    /// Approximate number of bytes that are not zero.
    pub data_bytes: u64,
}

impl PlannedFile {
    /// The medium that results. The device of a volume that will be cloned does not exist yet.
    pub(crate) fn medium(&self) -> Medium {
        let is_device = self.way == FileWay::BlockDevice
            || is_block_device(&self.to)
            || (self.way == FileWay::Cloned && self.to.starts_with("/dev"));
        if is_device { Medium::BlockDevice } else { Medium::File }
    }
}

/// The content of a machine's file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileContent {
    /// A disk, by its name.
    Disk(String),
    /// The firmware's variables.
    FirmwareVariables,
    /// The persistent state of its TPM.
    TpmState(TpmStore),
}

/// How a file is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileWay {
    /// As a new file.
    NewFile,
    /// Over the content of the block device.
    BlockDevice,
    /// Into the existing file, where it differs.
    InPlace,
    /// As a new file that replaces the existing one when it is complete.
    Replace,
    /// As a new file; the existing one is unusable and kept under another name.
    SetAside,
    /// As a new file that shares its blocks with a host snapshot: no data is written.
    Shared,
    /// In a clone of its dataset, which is created first: no data is written.
    Cloned,
}

impl FileWay {
    /// The keyword in machine-readable output.
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

/// The nearest existing folder of a path: those below it will be created.
pub(super) fn nearest_folder(path: &Path) -> &Path {
    let mut above = path.ancestors().skip(1);
    above.find(|folder| folder.is_dir()).unwrap_or(Path::new("/"))
}
