//! A reader in another process that is started again when it ends.
//!
//! A node keeps its number in a new process, so a long restore continues with the file at which the old process ended.

use holdfast_guest_files::{DirectoryEntry, Error, ExtendedAttribute, FilePiece, FileSystem, Metadata, NodeId, Result};

/// Most starts after the first one: a reader that ends at each file would otherwise be started for each.
const RESTART_COUNT_MAX: u32 = 8;

/// Opens the file system in a new process.
pub(super) type Opener = Box<dyn Fn() -> Result<Box<dyn FileSystem>>>;

/// A file system whose reader is started again when it ends.
pub(super) struct RestartedFileSystem {
    file_system: Box<dyn FileSystem>,
    open: Opener,
    restarts_left: u32,
}

impl RestartedFileSystem {
    pub(super) fn open(open: Opener) -> Result<Self> {
        Ok(Self {
            file_system: open()?,
            open,
            restarts_left: RESTART_COUNT_MAX,
        })
    }

    /// Does `work`, and once more with a new process if the process ends. If that ends too, the error is that of the
    /// file, and the next file gets another process.
    fn retried<T>(&mut self, mut work: impl FnMut(&mut dyn FileSystem) -> Result<T>) -> Result<T> {
        let mut is_second = false;
        loop {
            let failure = match work(&mut *self.file_system) {
                Err(failure @ Error::Reader(_)) if self.restarts_left > 0 => failure,
                other => return other,
            };
            self.restarts_left -= 1;
            self.file_system = (self.open)()?;
            if is_second {
                return Err(failure);
            }
            is_second = true;
        }
    }
}

impl FileSystem for RestartedFileSystem {
    fn root(&self) -> NodeId {
        self.file_system.root()
    }

    fn ignores_case(&self) -> bool {
        self.file_system.ignores_case()
    }

    fn notes(&self) -> Vec<String> {
        self.file_system.notes()
    }

    fn metadata(&mut self, node: NodeId) -> Result<Metadata> {
        self.retried(|file_system| file_system.metadata(node))
    }

    fn read_directory(&mut self, node: NodeId, visit: &mut dyn FnMut(DirectoryEntry) -> Result<()>) -> Result<()> {
        // Entries that were visited before the end are skipped: a directory is listed in the same order again.
        let mut visited = 0_u64;
        self.retried(|file_system| {
            let mut skipped = 0;
            file_system.read_directory(node, &mut |entry| {
                if skipped < visited {
                    skipped += 1;
                    return Ok(());
                }
                visited += 1;
                skipped += 1;
                visit(entry)
            })
        })
    }

    fn read_file(&mut self, node: NodeId, offset: u64, length_max: usize) -> Result<FilePiece> {
        self.retried(|file_system| file_system.read_file(node, offset, length_max))
    }

    fn read_link(&mut self, node: NodeId) -> Result<Vec<u8>> {
        self.retried(|file_system| file_system.read_link(node))
    }

    fn attributes(&mut self, node: NodeId) -> Result<Vec<ExtendedAttribute>> {
        self.retried(|file_system| file_system.attributes(node))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use holdfast_guest_files::{DirectoryEntry, Error, FileKind, FilePiece, FileSystem, Metadata, NodeId, Result};

    use super::{RESTART_COUNT_MAX, RestartedFileSystem};

    /// A reader that ends at its `left`-th request, or at each request about node 9.
    struct Mortal {
        left: u32,
    }

    impl Mortal {
        fn live(&mut self, node: NodeId) -> Result<()> {
            if self.left == 0 || node.0 == 9 {
                self.left = 0;
                return Err(Error::Reader("ended by signal 9".to_owned()));
            }
            self.left -= 1;
            Ok(())
        }
    }

    impl FileSystem for Mortal {
        fn root(&self) -> NodeId {
            NodeId(0)
        }
        fn metadata(&mut self, node: NodeId) -> Result<Metadata> {
            self.live(node)?;
            Ok(Metadata {
                kind: FileKind::File,
                size_bytes: node.0,
                mode: None,
                uid: None,
                gid: None,
                modified: None,
                shared_id: None,
            })
        }
        fn read_directory(&mut self, node: NodeId, visit: &mut dyn FnMut(DirectoryEntry) -> Result<()>) -> Result<()> {
            for number in 1..4 {
                self.live(node)?;
                visit(DirectoryEntry {
                    name: vec![b'a'; number],
                    node: NodeId(number as u64),
                })?;
            }
            Ok(())
        }
        fn read_file(&mut self, node: NodeId, _offset: u64, _length_max: usize) -> Result<FilePiece> {
            self.live(node).map(|()| FilePiece::End)
        }
        fn read_link(&mut self, node: NodeId) -> Result<Vec<u8>> {
            self.live(node).map(|()| b"x".to_vec())
        }
    }

    #[test]
    fn a_reader_that_ends_is_started_again_within_a_bound() {
        let starts = Rc::new(Cell::new(0));
        let counted = Rc::clone(&starts);
        let mut files = RestartedFileSystem::open(Box::new(move || {
            counted.set(counted.get() + 1);
            Ok(Box::new(Mortal { left: 5 }))
        }))
        .unwrap();
        for node in 1..8 {
            assert_eq!(files.metadata(NodeId(node)).unwrap().size_bytes, node);
        }
        assert_eq!(starts.get(), 2);
        // It ends within the directory, whose entries are visited once.
        assert!(files.read_file(NodeId(1), 0, 1).is_ok() && files.read_file(NodeId(1), 0, 1).is_ok());
        let mut names = Vec::new();
        files
            .read_directory(NodeId(2), &mut |entry| {
                names.push(entry.name.len());
                Ok(())
            })
            .unwrap();
        assert_eq!(names, [1, 2, 3]);
        // One file that kills each reader does not stop the others.
        assert!(matches!(files.read_link(NodeId(9)), Err(Error::Reader(_))));
        assert!(files.read_link(NodeId(8)).is_ok());
        while starts.get() <= RESTART_COUNT_MAX {
            assert!(files.read_link(NodeId(9)).is_err());
        }
        assert!(files.read_link(NodeId(9)).is_err() && starts.get() == RESTART_COUNT_MAX + 1);
    }
}
