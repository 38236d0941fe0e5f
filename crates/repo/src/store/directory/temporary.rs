//! A temporary file of a directory store.

use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{Error as IoError, Result as IoResult, Write};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::SystemTime;

use rustix::fs::{Advice, AtFlags, Mode, OFlags, RenameFlags, fadvise, linkat, openat, renameat_with, unlinkat};
use rustix::io::Errno;

use super::TEMPORARY_FOLDER;
use super::tree::{FolderTree, folders, sync};
use crate::store::{ObjectName, ObjectWriter, Put, Result, StoreError};

/// Number of bytes after which the kernel is asked to start writing, so that the sync at the end of a pack takes little
/// time.
const WRITE_BEHIND_BYTES: u64 = 8 << 20;

/// A file in the folder of temporary files, removed when dropped.
#[derive(Debug)]
pub(super) struct TemporaryFile {
    tree: Arc<FolderTree>,
    object: ObjectName,
    folder: File,
    file: File,
    source_name: String,
    length: u64,
    started: u64,
}

impl TemporaryFile {
    pub(super) fn create(tree: &Arc<FolderTree>, name: &ObjectName) -> Result<Self> {
        let source_name = unique_name();
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let created = tree.make_folder(&[TEMPORARY_FOLDER]).and_then(|folder| {
            let file = openat(&folder, &source_name, flags, Mode::RUSR | Mode::WUSR)?;
            Ok((folder, file))
        });
        let (folder, file) = created.map_err(|source| tree.error("create", &name.to_string(), source))?;
        Ok(Self {
            tree: Arc::clone(tree),
            object: name.clone(),
            folder,
            file: file.into(),
            source_name,
            length: 0,
            started: 0,
        })
    }

    /// The current time of the clock that the file system uses, which may be that of another host. The file is
    /// removed afterwards.
    pub(super) fn modification_time(mut self) -> Result<SystemTime> {
        let found = self.write(b"now").and_then(|()| self.file.sync_all()).and_then(|()| {
            let found = self.file.metadata()?;
            found.modified()
        });
        found.map_err(|source| self.tree.error("look up", "a new file", source))
    }

    /// Makes the object durable and then visible.
    pub(super) fn publish(mut self) -> Result<Put> {
        let object = self.object.to_string();
        let answer = self.sync_and_link();
        answer.map_err(|failure| match failure {
            PublishFailure::Io(action, source) => self.tree.error(action, &object, source),
            PublishFailure::NoExclusiveLink => StoreError::Unsupported {
                store: self.tree.describe(),
                detail: "its file system has neither hard links nor a rename that does not replace, so two writers could overwrite \
                         each other's objects",
            },
        })
    }

    fn sync_and_link(&mut self) -> std::result::Result<Put, PublishFailure> {
        self.file
            .sync_all()
            .map_err(|source| PublishFailure::Io("sync", source))?;
        let target = self
            .tree
            .make_folder(&folders(&self.object))
            .map_err(|source| PublishFailure::Io("create the folder", source))?;
        let put = self.link(&target)?;
        sync(&target).map_err(|source| PublishFailure::Io("sync the folder", source))?;
        Ok(put)
    }

    /// Gives the file its name, unless the name is taken.
    fn link(&self, target: &File) -> std::result::Result<Put, PublishFailure> {
        let (from, to) = (self.source_name.as_str(), self.object.name());
        match linkat(&self.folder, from, target, to, AtFlags::empty()) {
            Ok(()) => Ok(Put::Created),
            // A server may have linked the file, lost its reply, and rejected the retransmission. No other process
            // links this file.
            Err(Errno::EXIST) => {
                let stat = rustix::fs::fstat(&self.file).map_err(|errno| PublishFailure::Io("link", errno.into()))?;
                Ok(match stat.st_nlink {
                    2.. => Put::Created,
                    _ => Put::AlreadyExists,
                })
            }
            Err(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::MLINK) => self.rename(target),
            Err(errno) => Err(PublishFailure::Io("link", errno.into())),
        }
    }

    /// The same without hard links: for FAT, some FUSE file systems and SMB.
    fn rename(&self, target: &File) -> std::result::Result<Put, PublishFailure> {
        let (from, to) = (self.source_name.as_str(), self.object.name());
        match renameat_with(&self.folder, from, target, to, RenameFlags::NOREPLACE) {
            Ok(()) => Ok(Put::Created),
            Err(Errno::EXIST) => Ok(Put::AlreadyExists),
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Err(PublishFailure::NoExclusiveLink),
            Err(errno) => Err(PublishFailure::Io("rename", errno.into())),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> IoResult<()> {
        self.file.write_all(bytes)?;
        self.length += bytes.len() as u64;
        if let Some(behind) = NonZeroU64::new(self.length - self.started)
            && behind.get() >= WRITE_BEHIND_BYTES
        {
            // Linux starts to write the dirty pages of the range and drops the clean ones, since packs are not read
            // soon. This is only advice, so errors are ignored.
            fadvise(&self.file, self.started, Some(behind), Advice::DontNeed).ok();
            self.started = self.length;
        }
        Ok(())
    }
}

enum PublishFailure {
    Io(&'static str, IoError),
    NoExclusiveLink,
}

impl ObjectWriter for TemporaryFile {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.write(bytes)
            .map_err(|source| self.tree.error("write", &self.object.to_string(), source))
    }

    fn commit(self: Box<Self>) -> Result<Put> {
        self.publish()
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        // After a rename there is nothing to remove; a file that cannot be removed now is removed later by
        // its age.
        unlinkat(&self.folder, &self.source_name, AtFlags::empty()).ok();
    }
}

/// A name that is unique on all hosts.
///
/// It must never be reused: a writer whose file was cleaned away would otherwise publish a half-written file of another
/// writer. The standard library's hash keys are seeded from the operating system's randomness, once per thread, and
/// differ for each state.
fn unique_name() -> String {
    let draw = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", draw(), draw())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::ObjectKind;

    #[test]
    fn without_hard_links_the_first_rename_wins() {
        let folder = tempfile::TempDir::new().unwrap();
        let tree = Arc::new(FolderTree::open(folder.path()).unwrap());
        let name = ObjectName::new(ObjectKind::Index, "a").unwrap();
        let target = tree.make_folder(&folders(&name)).unwrap();
        for (bytes, expected) in [(b"first", Put::Created), (b"other", Put::AlreadyExists)] {
            let mut temporary = TemporaryFile::create(&tree, &name).unwrap();
            temporary.append(bytes).unwrap();
            assert!(matches!(temporary.rename(&target), Ok(put) if put == expected));
        }
        assert_eq!(std::fs::read(folder.path().join("index/a")).unwrap(), b"first");
        assert_eq!(std::fs::read_dir(folder.path().join("tmp")).unwrap().count(), 0);
    }

    #[test]
    fn temporary_names_do_not_repeat() {
        let names: std::collections::BTreeSet<_> = (0..10_000).map(|_| unique_name()).collect();
        assert_eq!(names.len(), 10_000);
        assert!(names.iter().all(|name| name.len() == 32));
    }
}
