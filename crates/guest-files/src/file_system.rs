//! The interface of all readers of file systems.

use crate::Result;

/// Most bytes of one piece of a file.
pub const PIECE_BYTES_MAX: usize = 1 << 20;

/// A file or directory of a file system, as its reader numbers them: an inode, a record of the MFT, the position of a
/// directory entry. It comes from [`FileSystem::root`] and [`FileSystem::read_directory`]; other values cause an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u64);

/// What a node is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link, or what a guest uses as one: a junction of NTFS.
    Link,
    /// A device, a named pipe or a socket, which holds no data.
    Special,
}

/// A time in UTC; FAT stores local time, which is taken for UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ModifiedTime {
    /// Seconds since 1970.
    pub seconds: i64,
    /// Nanoseconds, below one thousand million.
    pub nanoseconds: u32,
}

/// What a file system stores about a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metadata {
    /// What it is.
    pub kind: FileKind,
    /// Size in bytes; of a link, the length of its target; 0 for directories and special files.
    pub size_bytes: u64,
    /// Permission bits with setuid, setgid and sticky; none if the file system has none.
    pub mode: Option<u32>,
    /// Owner; none if the file system has none that the host could use.
    pub uid: Option<u32>,
    /// Group, like the owner.
    pub gid: Option<u32>,
    /// Time of the last change of the content.
    pub modified: Option<ModifiedTime>,
    /// A number that all names of a file have in common; none if the file has one name, or its file system cannot tell.
    pub shared_id: Option<u64>,
}

/// An extended attribute, as Linux names and stores it: `user.comment`, `system.posix_acl_access`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ExtendedAttribute {
    /// The name with its namespace.
    pub name: Vec<u8>,
    /// The value, in the format of the system calls of Linux.
    pub value: Vec<u8>,
}

impl ExtendedAttribute {
    /// The access control list of a file.
    pub const ACCESS_LIST: &'static [u8] = b"system.posix_acl_access";
    /// The access control list that files in a directory inherit.
    pub const DEFAULT_LIST: &'static [u8] = b"system.posix_acl_default";

    /// Whether Linux accepts the name and the length of the value.
    pub fn is_valid(&self) -> bool {
        const NAME_BYTES_MAX: usize = 255;
        const VALUE_BYTES_MAX: usize = 64 << 10;
        (1..=NAME_BYTES_MAX).contains(&self.name.len())
            && !self.name.contains(&0)
            && self.name.contains(&b'.')
            && self.value.len() <= VALUE_BYTES_MAX
    }
}

/// A name in a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectoryEntry {
    /// The name, in the guest's encoding or as UTF-8: never empty, `.`, `..`, and without `/` and zero bytes.
    pub name: Vec<u8>,
    /// What it names.
    pub node: NodeId,
}

impl DirectoryEntry {
    /// Whether a name is valid: one component of a path that leads downwards.
    pub fn is_valid_name(name: &[u8]) -> bool {
        const NAME_BYTES_MAX: usize = 1024;
        !name.is_empty()
            && name.len() <= NAME_BYTES_MAX
            && name != b"."
            && name != b".."
            && !name.iter().any(|byte| matches!(byte, 0 | b'/'))
    }
}

/// The next bytes of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FilePiece {
    /// Bytes; never empty.
    Data(Vec<u8>),
    /// This number of zeroes, which take no space in the guest; never 0.
    Hole(u64),
    /// The offset is at the end of the file or past it.
    End,
}

/// A file system that is read.
///
/// Implementers must
/// - return exactly the bytes that the guest would read, or an error;
/// - bound memory and time by the size of the volume, whatever its bytes are;
/// - check names with [`DirectoryEntry::is_valid_name`].
pub trait FileSystem {
    /// The root directory.
    fn root(&self) -> NodeId;

    /// Whether names that differ only in case are the same name.
    fn ignores_case(&self) -> bool {
        false
    }

    /// What a user should know about the state of the file system: "not unmounted cleanly".
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// The metadata of a node.
    fn metadata(&mut self, node: NodeId) -> Result<Metadata>;

    /// Visits all entries of a directory but `.` and `..`, in the order in which they are stored. An error of `visit`
    /// ends the reading.
    fn read_directory(&mut self, node: NodeId, visit: &mut dyn FnMut(DirectoryEntry) -> Result<()>) -> Result<()>;

    /// The bytes of a regular file at `offset`: at most `length_max` and [`PIECE_BYTES_MAX`] bytes of data, and a hole
    /// of any length that ends at or before the end of the file.
    fn read_file(&mut self, node: NodeId, offset: u64, length_max: usize) -> Result<FilePiece>;

    /// The target of a link, as the guest would interpret it.
    fn read_link(&mut self, node: NodeId) -> Result<Vec<u8>>;

    /// The extended attributes of a node, access control lists included; none if the file system has none that Linux
    /// could use.
    fn attributes(&mut self, node: NodeId) -> Result<Vec<ExtendedAttribute>> {
        let _ = node;
        Ok(Vec::new())
    }
}

impl<F: FileSystem + ?Sized> FileSystem for Box<F> {
    fn root(&self) -> NodeId {
        (**self).root()
    }
    fn ignores_case(&self) -> bool {
        (**self).ignores_case()
    }
    fn notes(&self) -> Vec<String> {
        (**self).notes()
    }
    fn metadata(&mut self, node: NodeId) -> Result<Metadata> {
        (**self).metadata(node)
    }
    fn read_directory(&mut self, node: NodeId, visit: &mut dyn FnMut(DirectoryEntry) -> Result<()>) -> Result<()> {
        (**self).read_directory(node, visit)
    }
    fn read_file(&mut self, node: NodeId, offset: u64, length_max: usize) -> Result<FilePiece> {
        (**self).read_file(node, offset, length_max)
    }
    fn read_link(&mut self, node: NodeId) -> Result<Vec<u8>> {
        (**self).read_link(node)
    }
    fn attributes(&mut self, node: NodeId) -> Result<Vec<ExtendedAttribute>> {
        (**self).attributes(node)
    }
}
