//! The files of a mounted file system: directories, files with the content of a device, and symbolic links.
//!
//! The tree is held in memory, and files are opened on demand. It is replaced as a whole when its source changes: nodes
//! that exist before and after keep their numbers, so that open files and the kernel's caches stay valid.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use super::wire::{Attributes, FileAccess, NAME_BYTES_MAX, NodeId, NodeType};
use crate::nbd::ExportDevice;

/// Content of a file.
pub trait FileContent: Send + Sync {
    /// Its size in bytes. A file that can be written may grow.
    fn size_bytes(&self) -> u64;

    /// Identifies the content. A file of the same path and identity keeps its node when the tree is replaced.
    fn identity(&self) -> String;

    /// Whether it can be written.
    fn access(&self) -> FileAccess {
        FileAccess::ReadOnly
    }

    /// Opens it. The device is dropped when the file is closed. It is writable if [`access`](Self::access) is.
    fn open(&self) -> std::io::Result<ExportDevice>;
}

/// An entry of a directory.
#[derive(Clone)]
pub enum TreeEntry {
    /// A directory.
    Directory(Directory),
    /// A file.
    File {
        /// Its content.
        content: Arc<dyn FileContent>,
        /// Time of its last change, in milliseconds since 1970-01-01 UTC.
        modified_ms: i64,
    },
    /// A symbolic link.
    Link {
        /// Its target, relative to its directory.
        target: PathBuf,
        /// Time of its last change, in milliseconds since 1970-01-01 UTC.
        modified_ms: i64,
    },
}

/// A directory.
#[derive(Clone, Default)]
pub struct Directory {
    entries: BTreeMap<OsString, TreeEntry>,
    /// Time of its last change, in milliseconds since 1970-01-01 UTC.
    pub modified_ms: i64,
}

/// The name cannot be that of an entry.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} cannot be the name of a file")]
pub struct InvalidName {
    /// The name.
    pub name: OsString,
}

impl Directory {
    /// An empty directory.
    pub fn new(modified_ms: i64) -> Self {
        Self {
            entries: BTreeMap::new(),
            modified_ms,
        }
    }

    /// Adds an entry, or replaces the entry of this name.
    pub fn insert(&mut self, name: impl Into<OsString>, entry: TreeEntry) -> Result<(), InvalidName> {
        let name = name.into();
        let bytes = name.as_bytes();
        let is_special = matches!(bytes, b"" | b"." | b"..") || bytes.contains(&b'/') || bytes.contains(&0);
        if is_special || bytes.len() > NAME_BYTES_MAX as usize {
            return Err(InvalidName { name });
        }
        self.entries.insert(name, entry);
        Ok(())
    }

    /// Whether there is an entry of this name.
    pub fn contains(&self, name: &OsStr) -> bool {
        self.entries.contains_key(name)
    }
}

/// A node of the tree.
#[derive(Clone)]
struct Node {
    parent: NodeId,
    modified_ms: i64,
    kind: NodeKind,
}

#[derive(Clone)]
enum NodeKind {
    Directory(BTreeMap<OsString, NodeId>),
    File(Arc<dyn FileContent>),
    Link(PathBuf),
}

impl Node {
    fn node_type(&self) -> NodeType {
        match self.kind {
            NodeKind::Directory(_) => NodeType::Directory,
            NodeKind::File(ref content) => NodeType::File(content.access()),
            NodeKind::Link(_) => NodeType::Link,
        }
    }

    /// Whether the node can represent `entry` after the tree is replaced.
    fn is_same(&self, entry: &TreeEntry) -> bool {
        match (&self.kind, entry) {
            // The kernel asks for the target of a link at each use.
            (NodeKind::Directory(_), TreeEntry::Directory(_)) | (NodeKind::Link(_), TreeEntry::Link { .. }) => true,
            (NodeKind::File(old), TreeEntry::File { content, .. }) => old.identity() == content.identity(),
            _ => false,
        }
    }
}

#[derive(Default)]
struct Nodes {
    by_id: BTreeMap<NodeId, Node>,
    /// Numbers are never used twice.
    last: u64,
    file_bytes: u64,
}

/// Owner of all files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileOwner {
    /// The user.
    pub user: u32,
    /// The group.
    pub group: u32,
}

/// The files of a file system.
pub struct FileTree {
    owner: FileOwner,
    nodes: RwLock<Nodes>,
    use_count: AtomicU64,
}

/// An entry of a listed directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ListedEntry {
    pub(super) name: OsString,
    pub(super) node: NodeId,
    pub(super) node_type: NodeType,
}

impl FileTree {
    /// A file system with these files.
    pub fn new(root: &Directory, owner: FileOwner) -> Self {
        let tree = Self {
            owner,
            nodes: RwLock::default(),
            use_count: AtomicU64::new(0),
        };
        tree.replace(root);
        tree
    }

    /// Replaces all files. Files that are open stay readable.
    pub fn replace(&self, root: &Directory) {
        let mut guard = self.nodes.write().unwrap_or_else(PoisonError::into_inner);
        let old = std::mem::take(&mut *guard);
        let mut new = Nodes {
            last: old.last.max(NodeId::ROOT.0),
            ..Nodes::default()
        };
        let is_known = old.by_id.contains_key(&NodeId::ROOT);
        new.add_directory(root, NodeId::ROOT, NodeId::ROOT, is_known.then_some(&old));
        *guard = new;
    }

    fn read(&self) -> RwLockReadGuard<'_, Nodes> {
        self.nodes.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of look-ups and listings of directories since the start.
    pub fn use_count(&self) -> u64 {
        self.use_count.load(Ordering::Relaxed)
    }

    pub(super) fn lookup(&self, directory: NodeId, name: &OsStr) -> Option<Attributes> {
        self.use_count.fetch_add(1, Ordering::Relaxed);
        let nodes = self.read();
        let NodeKind::Directory(entries) = &nodes.by_id.get(&directory)?.kind else {
            return None;
        };
        nodes.attributes(*entries.get(name)?, self.owner)
    }

    pub(super) fn attributes(&self, node: NodeId) -> Option<Attributes> {
        self.read().attributes(node, self.owner)
    }

    pub(super) fn content(&self, node: NodeId) -> Option<Arc<dyn FileContent>> {
        match &self.read().by_id.get(&node)?.kind {
            NodeKind::File(content) => Some(Arc::clone(content)),
            NodeKind::Directory(_) | NodeKind::Link(_) => None,
        }
    }

    pub(super) fn link_target(&self, node: NodeId) -> Option<PathBuf> {
        match &self.read().by_id.get(&node)?.kind {
            NodeKind::Link(target) => Some(target.clone()),
            NodeKind::Directory(_) | NodeKind::File(_) => None,
        }
    }

    /// The entries of a directory, with those for itself and its parent.
    pub(super) fn list(&self, directory: NodeId) -> Option<Vec<ListedEntry>> {
        self.use_count.fetch_add(1, Ordering::Relaxed);
        let nodes = self.read();
        let node = nodes.by_id.get(&directory)?;
        let NodeKind::Directory(entries) = &node.kind else {
            return None;
        };
        let directory_entry = |name: &str, node| ListedEntry {
            name: name.into(),
            node,
            node_type: NodeType::Directory,
        };
        let mut listed = vec![directory_entry(".", directory), directory_entry("..", node.parent)];
        listed.extend(entries.iter().filter_map(|(name, id)| {
            Some(ListedEntry {
                name: name.clone(),
                node: *id,
                node_type: nodes.by_id.get(id)?.node_type(),
            })
        }));
        Some(listed)
    }

    /// Whether a file can be written.
    pub(super) fn is_writable(&self) -> bool {
        let nodes = self.read();
        let mut types = nodes.by_id.values().map(Node::node_type);
        types.any(|node_type| node_type == NodeType::File(FileAccess::Writable))
    }

    /// Number of nodes.
    pub(super) fn node_count(&self) -> u64 {
        self.read().by_id.len() as u64
    }

    /// Total size of all files.
    pub(super) fn file_bytes(&self) -> u64 {
        self.read().file_bytes
    }
}

impl Nodes {
    fn attributes(&self, id: NodeId, owner: FileOwner) -> Option<Attributes> {
        let node = self.by_id.get(&id)?;
        let (size_bytes, link_count) = match &node.kind {
            NodeKind::File(content) => (content.size_bytes(), 1),
            NodeKind::Link(target) => (target.as_os_str().len() as u64, 1),
            // Programs such as find(1) derive the number of subdirectories from the count, except from 1.
            NodeKind::Directory(_) => (0, 1),
        };
        Some(Attributes {
            node: id,
            node_type: node.node_type(),
            size_bytes,
            modified_ms: node.modified_ms,
            link_count,
            user: owner.user,
            group: owner.group,
        })
    }

    /// Adds a directory with all that is below it. `old` has the nodes of the tree that is replaced, if the directory
    /// was part of it.
    fn add_directory(&mut self, directory: &Directory, id: NodeId, parent: NodeId, old: Option<&Self>) {
        let old_entries = old.and_then(|old| match &old.by_id.get(&id)?.kind {
            NodeKind::Directory(entries) => Some((old, entries)),
            NodeKind::File(_) | NodeKind::Link(_) => None,
        });
        let mut entries = BTreeMap::new();
        for (name, entry) in &directory.entries {
            let same = old_entries.and_then(|(old, entries)| {
                let id = *entries.get(name)?;
                old.by_id.get(&id)?.is_same(entry).then_some(id)
            });
            let child = same.unwrap_or_else(|| {
                self.last += 1;
                NodeId(self.last)
            });
            entries.insert(name.clone(), child);
            self.add_entry(entry, child, id, old.filter(|_| same.is_some()));
        }
        self.by_id.insert(
            id,
            Node {
                parent,
                modified_ms: directory.modified_ms,
                kind: NodeKind::Directory(entries),
            },
        );
    }

    fn add_entry(&mut self, entry: &TreeEntry, id: NodeId, parent: NodeId, old: Option<&Self>) {
        let (kind, modified_ms) = match entry {
            TreeEntry::Directory(directory) => return self.add_directory(directory, id, parent, old),
            TreeEntry::File { content, modified_ms } => {
                self.file_bytes = self.file_bytes.saturating_add(content.size_bytes());
                (NodeKind::File(Arc::clone(content)), *modified_ms)
            }
            TreeEntry::Link { target, modified_ms } => (NodeKind::Link(target.clone()), *modified_ms),
        };
        self.by_id.insert(
            id,
            Node {
                parent,
                modified_ms,
                kind,
            },
        );
    }
}
