//! A model of the subvolume while it is being received, which determines the file that a path refers to.
//!
//! `btrfs receive` opens files by path and follows symbolic links. A link may point anywhere, so the gate has to know
//! every path that is a link. Links come with the stream, or with the parent snapshot; both may be renamed later, alone
//! or with a folder above them.
//!
//! The model is a tree of the paths that have occurred. A folder of the parent snapshot is recorded with its path
//! there, and unrecorded names in it are looked up on the disk: the snapshot is read-only, and its folder stays open.
//! A folder that the stream has created contains only entries that the stream has created. Files among them are not
//! recorded, so the memory usage depends only on folders, links and changes of the parent.
//!
//! Files that were left out of the copy (devices, sockets) are part of the model too: later commands about them are
//! left out as well.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, statat};
use rustix::io::Errno;

use super::super::super::incoming::StreamRefusal;
use super::command::Result;

/// Limit on the entries of the model. Each takes some hundred bytes.
const ENTRY_COUNT_MAX: usize = 1 << 19;
/// Limits on the bytes of a path, and of one name in it, as in the kernel.
const PATH_BYTES_MAX: usize = 4095;
const NAME_BYTES_MAX: usize = 255;
/// Limit on the names in a path: deeper trees cannot be accessed by path anyway.
const DEPTH_MAX: usize = 2048;

/// A path below the subvolume, as a list of names without special ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StreamPath(Vec<Vec<u8>>);

impl StreamPath {
    /// # Errors
    /// The path is empty or absolute, or has an empty component, `.`, `..` or NUL.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self> {
        let refused = |why: &str| {
            let path = String::from_utf8_lossy(&bytes[..bytes.len().min(200)]);
            Err(StreamRefusal::new(format!("the path {path:?} {why}")))
        };
        if bytes.len() > PATH_BYTES_MAX {
            return refused("is too long");
        }
        if bytes.contains(&0) {
            return refused("contains a NUL");
        }
        let names: Vec<Vec<u8>> = bytes.split(|byte| *byte == b'/').map(<[u8]>::to_vec).collect();
        if names.len() > DEPTH_MAX {
            return refused("is too deep");
        }
        for name in &names {
            match &name[..] {
                b"" => return refused("is empty or absolute, or has an empty component"),
                b"." | b".." => return refused("contains . or .."),
                name if name.len() > NAME_BYTES_MAX => return refused("has a name that is too long"),
                _ => {}
            }
        }
        Ok(Self(names))
    }

    fn split(&self) -> (&[Vec<u8>], &[u8]) {
        let (name, above) = self.0.split_last().expect("a path has a name");
        (above, name)
    }

    pub(super) fn shown(&self) -> String {
        String::from_utf8_lossy(&self.0.join(&b'/')).into_owned()
    }
}

/// The kind of file that a path refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PathKind {
    /// A file, a folder or nothing, but certainly not a link.
    Plain,
    /// A symbolic link.
    Symlink,
    /// A device, FIFO or socket that an earlier version of this program has received. It must not be opened.
    Special,
    /// A file that was left out of the copy, now or when its parent was received.
    LeftOut,
}

/// An entry of the model.
#[derive(Debug, Clone)]
enum Node {
    Plain(TreeNode),
    Symlink,
    Special,
    LeftOut,
}

/// A file or folder.
#[derive(Debug, Clone, Default)]
struct TreeNode {
    /// The path in the parent snapshot; none if the stream has created the file.
    before: Option<PathBuf>,
    /// The recorded entries. None marks a name that is free now.
    entries: BTreeMap<Vec<u8>, Option<Node>>,
}

impl TreeNode {
    /// Whether the entry need not be recorded in a folder that the stream has created.
    fn is_trivial(&self) -> bool {
        self.before.is_none() && self.entries.is_empty()
    }
}

impl Node {
    fn found(&self) -> PathKind {
        match self {
            Self::Plain(_) => PathKind::Plain,
            Self::Symlink => PathKind::Symlink,
            Self::Special => PathKind::Special,
            Self::LeftOut => PathKind::LeftOut,
        }
    }
}

/// The subvolume that is being received.
pub(super) struct Tree {
    root: TreeNode,
    parent: Option<OwnedFd>,
    entry_count: usize,
}

/// A folder.
enum TreeFolder<'a> {
    Recorded(&'a TreeNode),
    /// Unchanged since the parent snapshot, where it has this path.
    Before(PathBuf),
    /// Created by the stream, without recorded entries.
    Made,
}

/// The state of a name in a folder.
enum Entry {
    /// Recorded, or in the parent snapshot.
    Known(PathKind),
    /// Not recorded, in a folder that the stream has created: a file or folder of the stream, or nothing.
    Unrecorded,
    /// The name is free.
    Free,
}

/// The error for a link in the middle of a path, which `btrfs receive` would follow.
fn link_in_path(path: &StreamPath, what: &str) -> StreamRefusal {
    StreamRefusal::new(format!("the path {:?} leads through {what}", path.shown()))
}

/// The kind of a file in the parent snapshot; none if the file does not exist.
fn lookup(parent: &OwnedFd, place: &Path) -> Result<Option<Node>> {
    match statat(parent, place, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(found) => Ok(Some(match FileType::from_raw_mode(found.st_mode) {
            FileType::RegularFile | FileType::Directory => Node::Plain(TreeNode {
                before: Some(place.to_owned()),
                entries: BTreeMap::new(),
            }),
            FileType::Symlink => Node::Symlink,
            _ => Node::Special,
        })),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
        Err(error) => Err(StreamRefusal::new(format!("cannot read the parent snapshot: {error}"))),
    }
}

fn join(folder: &Path, name: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStrExt as _;
    folder.join(std::ffi::OsStr::from_bytes(name))
}

impl Tree {
    /// An empty subvolume, or the content of the read-only snapshot `parent`.
    pub(super) fn new(parent: Option<OwnedFd>) -> Self {
        let before = parent.as_ref().map(|_| PathBuf::new());
        Self {
            root: TreeNode {
                before,
                entries: BTreeMap::new(),
            },
            parent,
            entry_count: 0,
        }
    }

    /// Finds the folder that contains a path.
    fn folder_of(&self, path: &StreamPath) -> Result<TreeFolder<'_>> {
        let (above, _) = path.split();
        let mut folder_of = TreeFolder::Recorded(&self.root);
        for name in above {
            let place = match folder_of {
                TreeFolder::Recorded(folder) => match (folder.entries.get(name), &folder.before) {
                    (Some(Some(Node::Plain(plain))), _) => {
                        folder_of = TreeFolder::Recorded(plain);
                        continue;
                    }
                    (Some(Some(Node::Symlink)), _) => return Err(link_in_path(path, "a symbolic link")),
                    (Some(Some(Node::Special)), _) => return Err(link_in_path(path, "a device, FIFO or socket")),
                    (Some(_), _) => return Err(link_in_path(path, "nothing")),
                    (None, Some(before)) => join(before, name),
                    (None, None) => return Ok(TreeFolder::Made),
                },
                TreeFolder::Before(place) => join(&place, name),
                TreeFolder::Made => return Ok(TreeFolder::Made),
            };
            folder_of = match self.lookup(&place)? {
                Some(Node::Plain(_)) => TreeFolder::Before(place),
                Some(Node::Symlink) => return Err(link_in_path(path, "a symbolic link")),
                Some(_) => return Err(link_in_path(path, "a device, FIFO or socket")),
                None => return Err(link_in_path(path, "nothing")),
            };
        }
        Ok(folder_of)
    }

    fn lookup(&self, place: &Path) -> Result<Option<Node>> {
        match &self.parent {
            Some(parent) => lookup(parent, place),
            None => Ok(None),
        }
    }

    fn entry(&self, path: &StreamPath) -> Result<Entry> {
        let (_, name) = path.split();
        let place = match self.folder_of(path)? {
            TreeFolder::Recorded(folder) => match (folder.entries.get(name), &folder.before) {
                (Some(Some(node)), _) => return Ok(Entry::Known(node.found())),
                (Some(None), _) => return Ok(Entry::Free),
                (None, Some(before)) => join(before, name),
                (None, None) => return Ok(Entry::Unrecorded),
            },
            TreeFolder::Before(place) => join(&place, name),
            TreeFolder::Made => return Ok(Entry::Unrecorded),
        };
        Ok(self
            .lookup(&place)?
            .map_or(Entry::Free, |node| Entry::Known(node.found())))
    }

    /// Returns the folder that contains a path, and records it. [`Self::folder_of`] has checked the path.
    fn record(&mut self, path: &StreamPath) -> Result<&mut TreeNode> {
        let (above, _) = path.split();
        let mut folder = &mut self.root;
        for name in above {
            let before = folder.before.as_ref().map(|before| join(before, name));
            let entry = folder.entries.entry(name.clone()).or_insert_with(|| {
                self.entry_count += 1;
                let entries = BTreeMap::new();
                Some(Node::Plain(TreeNode { before, entries }))
            });
            let Some(Node::Plain(plain)) = entry else {
                return Err(link_in_path(path, "nothing"));
            };
            folder = plain;
        }
        // The entry that will be recorded in the folder.
        self.entry_count += 1;
        if self.entry_count > ENTRY_COUNT_MAX {
            return Err(StreamRefusal::new(format!(
                "it has more than {ENTRY_COUNT_MAX} symbolic links, special files and changes to the parent's folders"
            )));
        }
        Ok(folder)
    }

    /// The kind of a file that will be changed. A missing file was left out when the parent snapshot was received.
    pub(super) fn find(&self, path: &StreamPath) -> Result<PathKind> {
        Ok(match self.entry(path)? {
            Entry::Known(found) => found,
            Entry::Unrecorded => PathKind::Plain,
            Entry::Free => PathKind::LeftOut,
        })
    }

    /// Adds an entry, whose name must be free.
    fn put(&mut self, path: &StreamPath, node: Node) -> Result<()> {
        if let Entry::Known(found) = self.entry(path)? {
            // The name of a left-out file is free as well.
            if found != PathKind::LeftOut {
                let path = path.shown();
                return Err(StreamRefusal::new(format!("it creates {path:?}, which already exists")));
            }
        }
        let (_, name) = path.split();
        let is_trivial = matches!(&node, Node::Plain(plain) if plain.is_trivial());
        let is_recorded = match self.folder_of(path)? {
            TreeFolder::Recorded(folder) => folder.before.is_some() || folder.entries.contains_key(name),
            TreeFolder::Before(_) => true,
            TreeFolder::Made => false,
        };
        if !is_trivial || is_recorded {
            self.record(path)?.entries.insert(name.to_owned(), Some(node));
        }
        Ok(())
    }

    /// Adds a file or folder.
    pub(super) fn make(&mut self, path: &StreamPath) -> Result<()> {
        self.put(path, Node::Plain(TreeNode::default()))
    }

    /// Adds a symbolic link.
    pub(super) fn make_link(&mut self, path: &StreamPath) -> Result<()> {
        self.put(path, Node::Symlink)
    }

    /// Adds a file that is left out.
    pub(super) fn leave_out(&mut self, path: &StreamPath) -> Result<()> {
        self.put(path, Node::LeftOut)
    }

    /// Removes an entry from the model and returns it, so that its name is free. An unrecorded entry is a file or
    /// folder of the stream.
    fn take(&mut self, path: &StreamPath) -> Result<Node> {
        let (_, name) = path.split();
        match self.entry(path)? {
            Entry::Unrecorded => return Ok(Node::Plain(TreeNode::default())),
            Entry::Free => return Ok(Node::LeftOut),
            Entry::Known(_) => {}
        }
        let folder = self.record(path)?;
        let known = folder.entries.remove(name).flatten();
        let place = folder.before.as_ref().map(|before| join(before, name));
        let on_disk = match &place {
            Some(place) => self.lookup(place)?,
            None => None,
        };
        if on_disk.is_some() {
            self.record(path)?.entries.insert(name.to_owned(), None);
        }
        Ok(known.or(on_disk).unwrap_or(Node::LeftOut))
    }

    /// Removes an entry, and returns its kind.
    pub(super) fn remove(&mut self, path: &StreamPath) -> Result<PathKind> {
        Ok(self.take(path)?.found())
    }

    /// Renames an entry with its descendants, and returns its kind.
    pub(super) fn rename(&mut self, from: &StreamPath, to: &StreamPath) -> Result<PathKind> {
        if to.0.starts_with(&from.0) {
            return Err(StreamRefusal::new(format!("it moves {:?} into itself", from.shown())));
        }
        let node = self.take(from)?;
        let found = node.found();
        self.put(to, node)?;
        Ok(found)
    }

    /// Adds a hard link, and returns the kind of the file.
    pub(super) fn link(&mut self, from: &StreamPath, to: &StreamPath) -> Result<PathKind> {
        let found = self.find(from)?;
        let node = match found {
            PathKind::Plain => Node::Plain(TreeNode::default()),
            PathKind::Symlink => Node::Symlink,
            PathKind::Special => Node::Special,
            PathKind::LeftOut => Node::LeftOut,
        };
        self.put(to, node)?;
        Ok(found)
    }

    /// Whether a path of the parent snapshot is a regular file, without links in the path.
    pub(super) fn is_file_of_parent(&self, path: &StreamPath) -> Result<bool> {
        let Some(parent) = &self.parent else { return Ok(false) };
        let mut place = PathBuf::new();
        let (above, name) = path.split();
        let kind = |place: &Path| match statat(parent, place, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(found) => Ok(Some(FileType::from_raw_mode(found.st_mode))),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
            Err(error) => Err(StreamRefusal::new(format!("cannot read the parent snapshot: {error}"))),
        };
        for name in above {
            place = join(&place, name);
            if kind(&place)? != Some(FileType::Directory) {
                return Ok(false);
            }
        }
        Ok(kind(&join(&place, name))? == Some(FileType::RegularFile))
    }
}
