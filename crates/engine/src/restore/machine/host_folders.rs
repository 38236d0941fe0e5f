//! Creates folders on the host for a machine's logs and sockets.

use std::fs::{DirBuilder, File, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::host_needs::PlannedFolder;
use crate::job::{Error, Result};

/// The mode bits that a folder copies from a parent folder, which may be writable by every user.
const MODE_BELOW: u32 = 0o755;
/// The mode bits that a folder copies from its counterpart.
const MODE_LIKE: u32 = 0o2777;
/// The mode of a folder until its owner is set.
const MODE_FIRST: u32 = 0o700;

/// Folders that were created. Dropping this removes those that are empty, unless they were kept.
#[derive(Debug, Default)]
pub(super) struct HostFolders(Vec<PathBuf>);

impl HostFolders {
    /// Creates folders and their missing parents.
    pub(super) fn make(planned: &[PlannedFolder]) -> Result<Self> {
        let mut made = Self::default();
        for folder in planned {
            let failed = |source| Error::File {
                action: "make the folder",
                path: folder.path.clone(),
                source,
            };
            let like = folder.like.metadata().map_err(failed)?;
            let mask = if folder.is_counterpart { MODE_LIKE } else { MODE_BELOW };
            let mut missing: Vec<&Path> = folder.path.ancestors().take_while(|path| !path.is_dir()).collect();
            missing.reverse();
            for path in missing {
                made.make_one(path, like.uid(), like.gid(), like.mode() & mask)
                    .map_err(failed)?;
            }
        }
        Ok(made)
    }

    fn make_one(&mut self, path: &Path, user: u32, group: u32, mode: u32) -> std::io::Result<()> {
        match DirBuilder::new().mode(MODE_FIRST).create(path) {
            // Another process may have created the same folder first.
            Err(error) if error.kind() == ErrorKind::AlreadyExists && path.is_dir() => return Ok(()),
            other => other?,
        }
        self.0.push(path.to_owned());
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW;
        let flags = i32::try_from(flags.bits()).expect("flags of open(2) are an int");
        let opened = File::options().read(true).custom_flags(flags).open(path)?;
        let own = opened.metadata()?;
        if (own.uid(), own.gid()) != (user, group) {
            // Only root may change the owner of a folder. Otherwise it belongs to the restoring user, as the images do.
            drop(fchown(&opened, Some(user), Some(group)));
        }
        opened.set_permissions(Permissions::from_mode(mode))?;
        File::open(path.parent().unwrap_or(path))?.sync_all()
    }

    pub(super) fn keep(&mut self) {
        self.0.clear();
    }
}

impl Drop for HostFolders {
    fn drop(&mut self) {
        for path in self.0.iter().rev() {
            // This runs after another error, which is more useful than one about the cleanup.
            drop(std::fs::remove_dir(path));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::HostFolders;
    use crate::restore::machine::PlannedFolder;

    #[test]
    fn folders_are_like_others_and_go_again_unless_they_are_kept() {
        let root = tempfile::tempdir().unwrap();
        let like = root.path().join("web1");
        std::fs::create_dir(&like).unwrap();
        std::fs::set_permissions(&like, std::fs::Permissions::from_mode(0o770)).unwrap();
        let path = root.path().join("web1-restored/logs");
        let planned = [PlannedFolder {
            path: path.clone(),
            of: path.join("a.log"),
            like,
            is_counterpart: true,
        }];
        drop(HostFolders::make(&planned).unwrap());
        assert!(!root.path().join("web1-restored").exists());
        let mut made = HostFolders::make(&planned).unwrap();
        made.keep();
        drop(made);
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o7777, 0o770);
        // Existing folders, and files of other programs, are kept.
        drop(HostFolders::make(&planned).unwrap());
        assert!(path.exists());
        std::fs::remove_dir(&path).unwrap();
        let made = HostFolders::make(&planned).unwrap();
        std::fs::File::create(path.join("log")).unwrap();
        drop(made);
        assert!(path.join("log").exists());
    }
}
