//! Events during a restore.

use std::path::Path;

use crate::job::Result;

/// Receives the steps of a restore, to note them for the cleanup after a kill.
pub(crate) trait RestoreObserver {
    /// Called before the first byte is written into an existing file or device.
    fn about_to_write(&mut self) -> Result<()> {
        Ok(())
    }

    /// Called before new files get their final names, with the final and the temporary path of each.
    fn about_to_name(&mut self, _new: &[(&Path, &Path)]) -> Result<()> {
        Ok(())
    }

    /// Called when the files of a new machine exist and are closed, and before the machine is defined. If this fails
    /// the files are removed.
    fn has_files(&mut self) -> Result<()> {
        Ok(())
    }
}

/// An observer that does nothing.
pub(super) struct NoObserver;

impl RestoreObserver for NoObserver {}
