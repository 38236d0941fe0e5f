//! The files that a restore created, until they are kept.

use std::path::PathBuf;

use super::host_folders::HostFolders;
use super::tpm::MadeFolders;

/// Files with their final names. Dropping this removes them, unless they were kept.
pub(crate) struct MadeFiles {
    pub(super) files: Vec<PathBuf>,
    pub(super) folders: Vec<MadeFolders>,
    pub(super) host_folders: HostFolders,
}

impl MadeFiles {
    pub(super) fn with(host_folders: HostFolders) -> Self {
        Self {
            host_folders,
            files: Vec::new(),
            folders: Vec::new(),
        }
    }

    pub(crate) fn keep(&mut self) {
        self.files.clear();
        self.folders.iter_mut().for_each(MadeFolders::keep);
        self.host_folders.keep();
    }
}

impl Drop for MadeFiles {
    fn drop(&mut self) {
        for path in &self.files {
            // This runs after another error, which is more useful than one about the cleanup.
            drop(std::fs::remove_file(path));
        }
    }
}
