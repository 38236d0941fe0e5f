//! What is told of a restore while it is at work, and of how it ended.

use std::path::Path;

use crate::job::Result;

/// Hears how far a restore is, to note it for whoever has to clear up after one that is killed.
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
