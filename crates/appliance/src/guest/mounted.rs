//! A file system that the appliance's kernel has mounted.

use std::collections::HashMap;
use std::ffi::{CString, OsStr};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use holdfast_block::to_usize;
use holdfast_guest_files::{
    Content, DirectoryEntry, Error, ExtendedAttribute, FileKind, FilePiece, FileSystem, Metadata, ModifiedTime, NodeId,
    PIECE_BYTES_MAX, Result,
};
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, SeekFrom, Stat, fstat, openat, readlinkat, seek, statat};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};

use super::modules::try_load;

/// Most bytes of names and nodes: the memory of the appliance is small.
const NODE_BYTES_MAX: usize = 224 << 20;
/// Most files whose other names are remembered.
const SHARED_COUNT_MAX: usize = 1 << 20;
/// Directories and files that are kept open.
const OPEN_COUNT_MAX: usize = 64;
const ROOT: u32 = 0;
const UNREAD: u32 = u32::MAX;
const DIRECTORY_FLAGS: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// What to mount.
pub(super) struct MountRequest<'a> {
    pub(super) device: &'a Path,
    pub(super) content: Content,
    pub(super) number: u32,
    /// All devices of a file system of several.
    pub(super) parts: Vec<PathBuf>,
}

/// How the kernel names a file system, the modules that it needs, and the options of its mount.
struct Driver {
    name: &'static str,
    modules: &'static [&'static str],
    options: &'static str,
}

fn driver_of(content: Content) -> Option<Driver> {
    let driver = |name, modules, options| Some(Driver { name, modules, options });
    match content {
        Content::Ext2 | Content::Ext3 | Content::Ext4 => driver("ext4", &["ext4"], ""),
        Content::Xfs => driver("xfs", &["xfs"], "nouuid"),
        Content::Btrfs => driver("btrfs", &["btrfs"], "subvolid=5"),
        Content::F2fs => driver("f2fs", &["f2fs"], ""),
        Content::ReiserFs => driver("reiserfs", &["reiserfs"], ""),
        Content::Jfs => driver("jfs", &["nls_utf8", "jfs"], "iocharset=utf8"),
        Content::Nilfs2 => driver("nilfs2", &["nilfs2"], ""),
        Content::Squashfs => driver("squashfs", &["squashfs"], ""),
        Content::Iso9660 => driver("iso9660", &["nls_utf8", "isofs"], "iocharset=utf8"),
        Content::Udf => driver("udf", &["nls_utf8", "udf"], "iocharset=utf8"),
        Content::Erofs => driver("erofs", &["erofs"], ""),
        Content::HfsPlus => driver("hfsplus", &["nls_utf8", "hfsplus"], ""),
        Content::Bcachefs => driver("bcachefs", &["bcachefs"], ""),
        Content::Fat => driver(
            "vfat",
            &["nls_cp437", "nls_utf8", "nls_iso8859_1", "nls_ascii", "vfat"],
            "utf8",
        ),
        Content::ExFat => driver("exfat", &["nls_utf8", "exfat"], "iocharset=utf8"),
        Content::Ntfs => driver("ntfs3", &["nls_utf8", "ntfs3"], "iocharset=utf8"),
        _ => None,
    }
}

/// Mounts a volume, read-only for this process; its log is replayed on the disk, whose changes are thrown away.
pub(super) fn mount_volume(request: &MountRequest<'_>) -> Result<Box<dyn FileSystem>> {
    let unsupported = |detail: String| Error::Unsupported {
        what: format!("{} in the appliance", request.content.name()),
        detail,
    };
    let driver = driver_of(request.content).ok_or_else(|| unsupported(String::new()))?;
    try_load(&["crc32c_generic", "crc32c_intel", "crc32c_cryptoapi", "libcrc32c"]);
    try_load(driver.modules);
    let parts = request.parts.iter().filter(|part| *part != request.device);
    let parts = parts.map(|part| format!("device={}", part.display()));
    let options = [driver.options.to_owned()]
        .into_iter()
        .chain(parts)
        .filter(|option| !option.is_empty());
    let options = options.collect::<Vec<_>>().join(",");
    let options = CString::new(options).map_err(|error| unsupported(error.to_string()))?;
    let point = PathBuf::from(format!("/mnt/{}", request.number));
    fs::create_dir_all(&point).map_err(|error| read_error(&error))?;
    let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::NOATIME;
    match mount(request.device, &point, driver.name, flags, Some(&*options)) {
        Ok(()) => Ok(Box::new(MountedFileSystem::open(&point, driver.name)?)),
        Err(Errno::NODEV) => Err(unsupported(format!("its kernel has no driver {}", driver.name))),
        Err(error) => Err(Error::Damaged {
            what: request.content.name().into(),
            detail: format!("it cannot be mounted: {}{}", io::Error::from(error), last_kernel_line()),
        }),
    }
}

/// The last message of the kernel, which says why a mount failed; for the end of an error.
pub(super) fn last_kernel_line() -> String {
    let Ok(log) = File::options().read(true).open("/dev/kmsg") else {
        return String::new();
    };
    let flags = rustix::fs::fcntl_getfl(&log).unwrap_or(OFlags::empty()) | OFlags::NONBLOCK;
    if rustix::fs::fcntl_setfl(&log, flags).is_err() {
        return String::new();
    }
    let mut last = String::new();
    let mut record = vec![0; 8192];
    // Each read returns one message: "priority,sequence,time,flags;text".
    loop {
        match rustix::io::read(&log, &mut *record) {
            Ok(0) => break,
            Ok(count) => {
                let text = String::from_utf8_lossy(record.get(..count).unwrap_or_default()).into_owned();
                if let Some((_, text)) = text.split_once(';') {
                    text.lines().next().unwrap_or_default().trim().clone_into(&mut last);
                }
            }
            // Messages were lost.
            Err(Errno::PIPE | Errno::INTR) => {}
            Err(_) => break,
        }
    }
    if last.is_empty() { last } else { format!(" ({last})") }
}

fn read_error(error: &io::Error) -> Error {
    match Errno::from_io_error(error) {
        Some(Errno::NOENT) => Error::NotFound,
        Some(Errno::NOTDIR) => Error::NotADirectory,
        Some(Errno::NOKEY) => Error::Unsupported {
            what: "encryption of single files".to_owned(),
            detail: String::new(),
        },
        Some(Errno::OPNOTSUPP) => Error::Unsupported {
            what: "the way in which it is stored".to_owned(),
            detail: String::new(),
        },
        _ => Error::Damaged {
            what: "file".into(),
            detail: format!("the kernel of the appliance cannot read it: {error}"),
        },
    }
}

fn failed(errno: Errno) -> Error {
    read_error(&errno.into())
}

struct Node {
    parent: u32,
    name: Box<[u8]>,
    /// The first of its entries, which have consecutive numbers.
    first_entry: u32,
    entry_count: u32,
}

struct MountedFileSystem {
    root: OwnedFd,
    nodes: Vec<Node>,
    node_bytes: usize,
    /// Numbers of files with several names, by device and inode.
    shared: HashMap<(u64, u64), u64>,
    /// Directories that are open, the last used one at the end.
    directories: Vec<(u32, OwnedFd)>,
    /// The file that was read last.
    file: Option<(u32, File)>,
    ignores_case: bool,
    notes: Vec<String>,
}

impl MountedFileSystem {
    fn open(point: &Path, driver: &str) -> Result<Self> {
        let root = openat(CWD, point, DIRECTORY_FLAGS, Mode::empty()).map_err(failed)?;
        let notes = match driver {
            "btrfs" => vec!["paths begin at the top level of the btrfs, whose subvolumes are directories".to_owned()],
            _ => Vec::new(),
        };
        Ok(Self {
            root,
            nodes: vec![Node {
                parent: ROOT,
                name: Box::default(),
                first_entry: UNREAD,
                entry_count: 0,
            }],
            node_bytes: 0,
            shared: HashMap::new(),
            directories: Vec::new(),
            file: None,
            ignores_case: matches!(driver, "vfat" | "exfat" | "ntfs3" | "hfsplus"),
            notes,
        })
    }

    fn node(&self, node: NodeId) -> Result<u32> {
        let number = u32::try_from(node.0)
            .ok()
            .filter(|number| to_usize(u64::from(*number)) < self.nodes.len());
        number.ok_or(Error::NotFound)
    }

    fn entry(&self, number: u32) -> Result<&Node> {
        self.nodes.get(to_usize(u64::from(number))).ok_or(Error::NotFound)
    }

    /// The open directory of a node. Directories above it are opened as needed, one name at a time: a path can be
    /// longer than the kernel accepts.
    fn directory(&mut self, number: u32) -> Result<&OwnedFd> {
        let mut missing = Vec::new();
        let mut at = number;
        while at != ROOT && !self.directories.iter().any(|(other, _)| *other == at) {
            missing.push(at);
            at = self.entry(at)?.parent;
        }
        while let Some(next) = missing.pop() {
            let node = self.entry(next)?;
            let above = if node.parent == ROOT {
                Some(&self.root)
            } else {
                self.opened(node.parent)
            };
            let above = above.ok_or(Error::NotFound)?;
            let opened =
                openat(above, OsStr::from_bytes(&node.name), DIRECTORY_FLAGS, Mode::empty()).map_err(failed)?;
            if self.directories.len() >= OPEN_COUNT_MAX {
                self.directories.remove(0);
            }
            self.directories.push((next, opened));
        }
        if number == ROOT {
            return Ok(&self.root);
        }
        if let Some(place) = self.directories.iter().position(|(other, _)| *other == number) {
            let last = self.directories.remove(place);
            self.directories.push(last);
        }
        self.opened(number).ok_or(Error::NotFound)
    }

    fn opened(&self, number: u32) -> Option<&OwnedFd> {
        self.directories
            .iter()
            .find(|(other, _)| *other == number)
            .map(|(_, directory)| directory)
    }

    /// Calls `work` with the directory of a node and its name in it.
    fn at<T>(&mut self, node: NodeId, work: impl FnOnce(&OwnedFd, &OsStr) -> rustix::io::Result<T>) -> Result<T> {
        let number = self.node(node)?;
        let entry = self.entry(number)?;
        let (parent, name) = (entry.parent, entry.name.clone());
        let name: &[u8] = if number == ROOT { b"." } else { &name };
        work(self.directory(parent)?, OsStr::from_bytes(name)).map_err(failed)
    }

    fn stat(&mut self, node: NodeId) -> Result<Stat> {
        self.at(node, |directory, name| {
            statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)
        })
    }

    /// Remembers the entries of a directory.
    fn list(&mut self, number: u32) -> Result<()> {
        let first = self.nodes.len();
        let directory = self.directory(number)?;
        let mut entries = Dir::read_from(directory).map_err(failed)?;
        let listed = self.append(number, &mut entries);
        let count = self.nodes.len() - first;
        let count = match listed.map(|()| u32::try_from(count)) {
            Ok(Ok(count)) => count,
            Ok(Err(_)) => return Err(Error::NotFound),
            Err(error) => {
                self.nodes.truncate(first);
                return Err(error);
            }
        };
        if let Some(node) = self.nodes.get_mut(to_usize(u64::from(number))) {
            node.first_entry = u32::try_from(first).unwrap_or(UNREAD);
            node.entry_count = count;
        }
        Ok(())
    }

    fn append(&mut self, parent: u32, entries: &mut Dir) -> Result<()> {
        while let Some(entry) = entries.read() {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name().to_bytes();
            if !DirectoryEntry::is_valid_name(name) {
                continue;
            }
            self.node_bytes += size_of::<Node>() + name.len() + 16;
            if self.node_bytes > NODE_BYTES_MAX {
                return Err(Error::TooLarge {
                    what: "what the appliance remembers of directories (name a directory further below)".into(),
                    limit: NODE_BYTES_MAX as u64,
                });
            }
            self.nodes.push(Node {
                parent,
                name: name.into(),
                first_entry: UNREAD,
                entry_count: 0,
            });
        }
        Ok(())
    }

    fn shared_id(&mut self, stat: &Stat) -> Option<u64> {
        let next = self.shared.len() as u64;
        if stat.st_nlink < 2 || FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return None;
        }
        let key = (stat.st_dev, stat.st_ino);
        if self.shared.len() >= SHARED_COUNT_MAX && !self.shared.contains_key(&key) {
            return None;
        }
        Some(*self.shared.entry(key).or_insert(next))
    }

    /// Opens a regular file, unless it is the one that was read last.
    fn open_file(&mut self, node: NodeId) -> Result<&File> {
        let number = self.node(node)?;
        if self.file.as_ref().is_none_or(|(last, _)| *last != number) {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            if kind_of(&self.stat(node)?) != FileKind::File {
                return Err(Error::NotAFile);
            }
            let file = self.at(node, |directory, name| openat(directory, name, flags, Mode::empty()))?;
            self.file = Some((number, File::from(file)));
        }
        self.file.as_ref().map(|(_, file)| file).ok_or(Error::NotFound)
    }
}

fn kind_of(stat: &Stat) -> FileKind {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => FileKind::File,
        FileType::Directory => FileKind::Directory,
        FileType::Symlink => FileKind::Link,
        _ => FileKind::Special,
    }
}

impl FileSystem for MountedFileSystem {
    fn root(&self) -> NodeId {
        NodeId(u64::from(ROOT))
    }

    fn ignores_case(&self) -> bool {
        self.ignores_case
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    fn metadata(&mut self, node: NodeId) -> Result<Metadata> {
        let stat = self.stat(node)?;
        let kind = kind_of(&stat);
        let has_size = matches!(kind, FileKind::File | FileKind::Link);
        Ok(Metadata {
            kind,
            size_bytes: if has_size {
                u64::try_from(stat.st_size).unwrap_or(0)
            } else {
                0
            },
            mode: Some(stat.st_mode & 0o7777),
            uid: Some(stat.st_uid),
            gid: Some(stat.st_gid),
            modified: Some(ModifiedTime {
                seconds: stat.st_mtime,
                nanoseconds: u32::try_from(stat.st_mtime_nsec).unwrap_or(0).min(999_999_999),
            }),
            shared_id: self.shared_id(&stat),
        })
    }

    fn read_directory(&mut self, node: NodeId, visit: &mut dyn FnMut(DirectoryEntry) -> Result<()>) -> Result<()> {
        let number = self.node(node)?;
        if self.entry(number)?.first_entry == UNREAD {
            self.list(number)?;
        }
        let (first, count) = {
            let node = self.entry(number)?;
            (node.first_entry, node.entry_count)
        };
        for entry in first..first.saturating_add(count) {
            visit(DirectoryEntry {
                name: self.entry(entry)?.name.to_vec(),
                node: NodeId(u64::from(entry)),
            })?;
        }
        Ok(())
    }

    fn read_file(&mut self, node: NodeId, offset: u64, length_max: usize) -> Result<FilePiece> {
        let file = self.open_file(node)?;
        let size_bytes = u64::try_from(fstat(file).map_err(failed)?.st_size).unwrap_or(0);
        if offset >= size_bytes {
            return Ok(FilePiece::End);
        }
        match seek(file, SeekFrom::Data(offset)) {
            Ok(data) if data > offset => return Ok(FilePiece::Hole(data.min(size_bytes) - offset)),
            Err(Errno::NXIO) => return Ok(FilePiece::Hole(size_bytes - offset)),
            // A driver that knows no holes has data everywhere.
            Ok(_) | Err(Errno::INVAL | Errno::OPNOTSUPP) => {}
            Err(error) => return Err(failed(error)),
        }
        let length = (length_max.min(PIECE_BYTES_MAX) as u64).min(size_bytes - offset);
        let mut bytes = vec![0; to_usize(length)];
        let mut filled = 0;
        while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match file.read_at(rest, offset + filled as u64) {
                Ok(0) => {
                    return Err(Error::Damaged {
                        what: "file".into(),
                        detail: format!(
                            "it ends at {} and should have {size_bytes} bytes",
                            offset + filled as u64
                        ),
                    });
                }
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(read_error(&error)),
            }
        }
        Ok(FilePiece::Data(bytes))
    }

    fn read_link(&mut self, node: NodeId) -> Result<Vec<u8>> {
        let target = self.at(node, |directory, name| readlinkat(directory, name, Vec::new()))?;
        Ok(target.into_bytes())
    }

    fn attributes(&mut self, node: NodeId) -> Result<Vec<ExtendedAttribute>> {
        self.at(node, |directory, name| {
            // By a name below the open directory: a link has attributes of its own, and cannot be opened.
            let path = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd())).join(name);
            attributes_of(&path)
        })
    }
}

fn attributes_of(path: &Path) -> rustix::io::Result<Vec<ExtendedAttribute>> {
    let mut names = vec![0; 64 << 10];
    let length = match rustix::fs::llistxattr(path, &mut names[..]) {
        Err(Errno::OPNOTSUPP) => 0,
        listed => listed?,
    };
    let mut attributes = Vec::new();
    let is_known = |name: &&[u8]| {
        let spaces = [&b"user."[..], b"trusted.", b"security.", b"system.posix_acl_"];
        spaces.iter().any(|space| name.starts_with(space))
    };
    let names = names.get(..length).unwrap_or_default();
    for name in names
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
        .filter(is_known)
    {
        let mut value = vec![0; 64 << 10];
        match rustix::fs::lgetxattr(path, name, &mut value[..]) {
            Ok(length) => {
                value.truncate(length);
                attributes.push(ExtendedAttribute {
                    name: name.to_vec(),
                    value,
                });
            }
            Err(Errno::NODATA | Errno::OPNOTSUPP) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(attributes)
}
