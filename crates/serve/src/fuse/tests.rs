//! Requests of the kernel and their replies, without a kernel.

mod changes;
mod requests;
mod successors;
mod writes;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use holdfast_block::{BlockDevice, BlockDeviceMut, Error as DeviceError, ExtentList, MemoryDevice};

use super::event::MountEvents;
use super::session::{FuseAnswer, FuseSession, SessionStart};
use super::tree::{Directory, FileContent, FileOwner, FileTree, TreeEntry};
use super::wire::{FileAccess, NodeId};
use crate::nbd::ExportDevice;

pub(super) const LOOKUP: u32 = 1;
pub(super) const FORGET: u32 = 2;
pub(super) const GETATTR: u32 = 3;
pub(super) const READLINK: u32 = 5;
pub(super) const OPEN: u32 = 14;
pub(super) const READ: u32 = 15;
pub(super) const STATFS: u32 = 17;
pub(super) const RELEASE: u32 = 18;
pub(super) const INIT: u32 = 26;
pub(super) const OPENDIR: u32 = 27;
pub(super) const READDIR: u32 = 28;
pub(super) const RELEASEDIR: u32 = 29;
pub(super) const READDIRPLUS: u32 = 44;
pub(super) const LSEEK: u32 = 46;

pub(super) const OWNER: FileOwner = FileOwner { user: 1000, group: 100 };
pub(super) const TIME_MS: i64 = 1_700_000_000_250;

/// A reply: its error number, and its body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) error: i32,
    pub(super) body: Vec<u8>,
}

impl Reply {
    pub(super) fn u64_at(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.body[at..at + 8].try_into().unwrap())
    }

    pub(super) fn u32_at(&self, at: usize) -> u32 {
        u32::from_ne_bytes(self.body[at..at + 4].try_into().unwrap())
    }
}

/// Collects what is reported.
#[derive(Default)]
pub(super) struct Reports(pub(super) Mutex<Vec<String>>);

impl MountEvents for Reports {
    fn open_failed(&self, file: &str, error: &std::io::Error) {
        self.0.lock().unwrap().push(format!("open {file}: {error}"));
    }

    fn request_failed(&self, file: &str, error: &DeviceError) {
        self.0.lock().unwrap().push(format!("request to {file}: {error}"));
    }
}

/// A file with data in the first and third 4 KiB of 16 KiB and 5 bytes.
pub(super) struct Sparse;

impl FileContent for Sparse {
    fn size_bytes(&self) -> u64 {
        16389
    }

    fn identity(&self) -> String {
        "sparse".to_owned()
    }

    fn open(&self) -> std::io::Result<ExportDevice> {
        let device = MemoryDevice::new(self.size_bytes());
        device.write_at(&[1; 4096], 0).unwrap();
        device.write_at(&[3; 4096], 8192).unwrap();
        Ok(ExportDevice::ReadOnly(Arc::new(device)))
    }
}

/// A file that cannot be opened.
pub(super) struct Unopenable;

impl FileContent for Unopenable {
    fn size_bytes(&self) -> u64 {
        1
    }

    fn identity(&self) -> String {
        "unopenable".to_owned()
    }

    fn open(&self) -> std::io::Result<ExportDevice> {
        Err(std::io::Error::other("no key"))
    }
}

/// A file that cannot be read.
pub(super) struct Damaged;

impl BlockDevice for Damaged {
    fn size_bytes(&self) -> u64 {
        4096
    }

    fn read_at(&self, _: &mut [u8], offset: u64) -> holdfast_block::Result<()> {
        Err(DeviceError::io("read", offset, std::io::Error::other("bad sector")))
    }

    fn extents(&self, range: std::ops::Range<u64>, _: usize) -> holdfast_block::Result<ExtentList> {
        Err(DeviceError::io("map", range.start, std::io::Error::other("bad sector")))
    }
}

impl FileContent for Damaged {
    fn size_bytes(&self) -> u64 {
        4096
    }

    fn identity(&self) -> String {
        "damaged".to_owned()
    }

    fn open(&self) -> std::io::Result<ExportDevice> {
        Ok(ExportDevice::ReadOnly(Arc::new(Self)))
    }
}

pub(super) fn file(content: impl FileContent + 'static) -> TreeEntry {
    TreeEntry::File {
        content: Arc::new(content),
        modified_ms: TIME_MS,
    }
}

/// `sparse`, `unopenable`, `damaged`, the directory `below` with `sparse`, and the link `link` to it.
pub(super) fn sample() -> Directory {
    let mut below = Directory::new(TIME_MS);
    below.insert("sparse", file(Sparse)).unwrap();
    let mut root = Directory::new(TIME_MS);
    root.insert("below", TreeEntry::Directory(below)).unwrap();
    root.insert("damaged", file(Damaged)).unwrap();
    let link = TreeEntry::Link {
        target: "below/sparse".into(),
        modified_ms: TIME_MS,
    };
    root.insert("link", link).unwrap();
    root.insert("sparse", file(Sparse)).unwrap();
    root.insert("unopenable", file(Unopenable)).unwrap();
    root
}

/// A session and its reports.
pub(super) struct World {
    pub(super) session: FuseSession,
    pub(super) tree: Arc<FileTree>,
    pub(super) reports: Arc<Reports>,
}

impl World {
    /// A session before its negotiation.
    pub(super) fn unnegotiated() -> Self {
        Self::with(&sample(), SessionStart::New)
    }

    pub(super) fn with(root: &Directory, start: SessionStart) -> Self {
        let tree = Arc::new(FileTree::new(root, OWNER));
        let reports = Arc::new(Reports::default());
        Self {
            session: FuseSession::new(Arc::clone(&tree), Arc::clone(&reports) as Arc<dyn MountEvents>, start),
            tree,
            reports,
        }
    }

    pub(super) fn new() -> Self {
        let world = Self::unnegotiated();
        assert_eq!(world.ask(INIT, NodeId(0), &offer(7, 45, u32::MAX)).error, 0);
        world
    }

    /// The reply to a request, which must have one.
    pub(super) fn ask(&self, opcode: u32, node: NodeId, fields: &[u8]) -> Reply {
        self.answer(&message(opcode, 77, node, fields)).expect("a reply")
    }

    /// The reply to a message, whose header is checked.
    pub(super) fn answer(&self, message: &[u8]) -> Option<Reply> {
        // A reused buffer has the body of an earlier reply.
        let mut body = vec![0xee; 40];
        match self.session.answer(message, &mut body) {
            FuseAnswer::Nothing => None,
            FuseAnswer::Reply(header) => {
                let number = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
                assert_eq!(number(0) as usize, 16 + body.len());
                assert_eq!(header[8..16], message[8..16]);
                let error = -number(4).cast_signed();
                assert!(error == 0 || body.is_empty(), "{error}: {body:?}");
                Some(Reply { error, body })
            }
        }
    }

    /// The node of a path below the root.
    pub(super) fn node(&self, path: &str) -> NodeId {
        path.split('/').fold(NodeId::ROOT, |node, name| {
            let reply = self.ask(LOOKUP, node, &text(name));
            assert_eq!(reply.error, 0, "{path}");
            NodeId(reply.u64_at(0))
        })
    }

    /// Opens a file or directory, and returns its handle.
    pub(super) fn open(&self, opcode: u32, node: NodeId) -> u64 {
        let reply = self.ask(opcode, node, &[0; 8]);
        assert_eq!((reply.error, reply.body.len()), (0, 16));
        reply.u64_at(0)
    }

    pub(super) fn take_reports(&self) -> Vec<String> {
        std::mem::take(&mut *self.reports.0.lock().unwrap())
    }
}

pub(super) fn message(opcode: u32, unique: u64, node: NodeId, fields: &[u8]) -> Vec<u8> {
    let length = u32::try_from(40 + fields.len()).unwrap();
    let mut message = Vec::new();
    message.extend(length.to_ne_bytes());
    message.extend(opcode.to_ne_bytes());
    message.extend(unique.to_ne_bytes());
    message.extend(node.0.to_ne_bytes());
    message.extend([0; 16]);
    message.extend(fields);
    message
}

pub(super) fn offer(major: u32, minor: u32, capabilities: u32) -> Vec<u8> {
    let fields = [major, minor, 128 << 10, capabilities, 0];
    let mut bytes: Vec<u8> = fields.into_iter().flat_map(u32::to_ne_bytes).collect();
    bytes.extend([0; 44]);
    bytes
}

/// A name as the kernel sends it.
pub(super) fn text(name: &str) -> Vec<u8> {
    let mut bytes = name.as_bytes().to_vec();
    bytes.push(0);
    bytes
}

/// The fields of `READ`, `READDIR` and `READDIRPLUS`.
pub(super) fn range(handle: u64, offset: u64, length: u32) -> Vec<u8> {
    let mut bytes = handle.to_ne_bytes().to_vec();
    bytes.extend(offset.to_ne_bytes());
    bytes.extend(length.to_ne_bytes());
    bytes.extend([0; 20]);
    bytes
}

/// The fields of `LSEEK`.
pub(super) fn seek(handle: u64, offset: u64, whence: u32) -> Vec<u8> {
    let mut bytes = handle.to_ne_bytes().to_vec();
    bytes.extend(offset.to_ne_bytes());
    bytes.extend(whence.to_ne_bytes());
    bytes.extend([0; 4]);
    bytes
}

/// The fields of `WRITE`.
pub(super) fn write(handle: u64, offset: u64, data: &[u8]) -> Vec<u8> {
    let mut bytes = handle.to_ne_bytes().to_vec();
    bytes.extend(offset.to_ne_bytes());
    bytes.extend(u32::try_from(data.len()).unwrap().to_ne_bytes());
    bytes.extend([0; 20]);
    bytes.extend(data);
    bytes
}

/// The fields of `FALLOCATE`.
pub(super) fn space(handle: u64, offset: u64, length: u64, mode: u32) -> Vec<u8> {
    let mut bytes: Vec<u8> = [handle, offset, length]
        .into_iter()
        .flat_map(u64::to_ne_bytes)
        .collect();
    bytes.extend(mode.to_ne_bytes());
    bytes.extend([0; 4]);
    bytes
}

/// A file in memory that can be written, and notes its flushes.
#[derive(Default)]
pub(super) struct Writable {
    pub(super) device: Arc<NotingDevice>,
}

/// A device of 16 KiB.
pub(super) struct NotingDevice {
    pub(super) memory: MemoryDevice,
    pub(super) flush_count: AtomicUsize,
    pub(super) fails: Mutex<Option<std::io::ErrorKind>>,
}

impl Default for NotingDevice {
    fn default() -> Self {
        Self {
            memory: MemoryDevice::from_bytes(&[1; 16384]),
            flush_count: AtomicUsize::new(0),
            fails: Mutex::default(),
        }
    }
}

impl NotingDevice {
    fn check(&self) -> holdfast_block::Result<()> {
        match *self.fails.lock().unwrap() {
            Some(kind) => Err(DeviceError::io("write", 0, std::io::Error::from(kind))),
            None => Ok(()),
        }
    }
}

impl BlockDevice for NotingDevice {
    fn size_bytes(&self) -> u64 {
        self.memory.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> holdfast_block::Result<()> {
        self.memory.read_at(buffer, offset)
    }

    fn extents(&self, range: std::ops::Range<u64>, extent_count_max: usize) -> holdfast_block::Result<ExtentList> {
        self.memory.extents(range, extent_count_max)
    }
}

impl BlockDeviceMut for NotingDevice {
    fn write_at(&self, data: &[u8], offset: u64) -> holdfast_block::Result<()> {
        self.check()?;
        self.memory.write_at(data, offset)
    }

    fn write_zeroes(&self, range: std::ops::Range<u64>) -> holdfast_block::Result<()> {
        self.check()?;
        self.memory.write_zeroes(range)
    }

    fn trim(&self, range: std::ops::Range<u64>) -> holdfast_block::Result<()> {
        self.memory.trim(range)
    }

    fn flush(&self) -> holdfast_block::Result<()> {
        self.check()?;
        self.flush_count.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

impl FileContent for Writable {
    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    fn identity(&self) -> String {
        "writable".to_owned()
    }

    fn access(&self) -> FileAccess {
        FileAccess::Writable
    }

    fn open(&self) -> std::io::Result<ExportDevice> {
        Ok(ExportDevice::Writable(
            Arc::clone(&self.device) as Arc<dyn BlockDeviceMut>
        ))
    }
}
