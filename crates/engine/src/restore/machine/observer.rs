//! Events of a running restore, and how it ended.

use std::path::Path;

use crate::job::Result;

/// Is notified of the steps of a restore, to note them for the cleanup after a kill.
pub(crate) trait RestoreObserver {
    /// The first byte is about to be written into something that is there.
    fn about_to_write(&mut self) -> Result<()> {
        Ok(())
    }

    /// New files are about to get their names: the name of each, and where it is as long as it has none.
    fn about_to_name(&mut self, _new: &[(&Path, &Path)]) -> Result<()> {
        Ok(())
    }

    /// The files of a new machine are there and not open here any more, and it is not defined yet. Where this fails they go again.
    fn has_files(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Notes nothing.
pub(super) struct NoObserver;

impl RestoreObserver for NoObserver {}
