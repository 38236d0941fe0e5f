//! What a restore has made, until it is to be kept.

use std::path::PathBuf;

use super::host_folders::HostFolders;
use super::tpm::MadeFolders;

/// Files that have their names; they lose them again unless they are to be kept.
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
            // Another error brought us here, and says more than one about this.
            drop(std::fs::remove_file(path));
        }
    }
}
