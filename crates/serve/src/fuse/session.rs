//! Answers the requests of the kernel: messages in, replies out. Pure but for the devices.

use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use holdfast_block::{BlockDevice, ExtentKind};
use rustix::io::Errno;

use super::event::MountEvents;
use super::handles::{Handles, OpenFile};
use super::tree::FileTree;
use super::wire::{
    self, Agreement, Attributes, HandleId, KernelOffer, Listing, ListingEntry, ListingForm, NodeId, NodeType,
    ParseError, REPLY_HEADER_LENGTH, ReadRange, Request, SeekTarget, capability,
};

/// Limit of bytes that one read returns. The kernel sends larger reads in parts.
pub(super) const READ_BYTES_MAX: u32 = 1 << 20;
/// Limit of bytes of data in one request; nothing is written, so this is the smallest that the kernel accepts.
const WRITE_BYTES_MAX: u32 = 4096;
/// Length of the buffer for a request. The kernel refuses to use a shorter one than 8 KiB, or the limit of a write and
/// its header.
pub(super) const REQUEST_BYTES_MAX: usize = 16 << 10;
/// Limit of pages in one request.
const PAGES_MAX: u16 = 256;
/// Reads in advance that the kernel may send before it waits for replies.
const BACKGROUND_COUNT_MAX: u16 = 16;
/// How long the kernel uses names and attributes before it asks again: a new snapshot appears after this time.
const VALID_SECONDS: u64 = 5;
/// Extents of a device that one step of a search for data or a hole looks at.
const SEEK_EXTENT_COUNT: usize = 256;

/// How a request is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// With this header, and the bytes in the buffer for the body.
    Reply([u8; REPLY_HEADER_LENGTH]),
    /// The kernel does not wait for a reply.
    Nothing,
}

/// The state of a mounted file system.
pub(super) struct Session {
    tree: Arc<FileTree>,
    handles: Handles,
    events: Arc<dyn MountEvents>,
    is_negotiated: AtomicBool,
}

/// Whether the body has the answer of a request.
type Outcome = Result<(), Errno>;

impl Session {
    pub(super) fn new(tree: Arc<FileTree>, events: Arc<dyn MountEvents>) -> Self {
        Self {
            tree,
            handles: Handles::default(),
            events,
            is_negotiated: AtomicBool::new(false),
        }
    }

    /// Number of open files.
    pub(super) fn open_file_count(&self) -> usize {
        self.handles.file_count()
    }

    /// Answers a message. `body` is reused for all replies of a thread; its old content has no meaning.
    pub(super) fn answer(&self, message: &[u8], body: &mut Vec<u8>) -> Answer {
        let (header, outcome) = match wire::parse(message) {
            Ok((_, Request::WithoutReply)) | Err(ParseError::NoHeader) => return Answer::Nothing,
            Ok((header, request)) => (header, self.execute(header.node, request, body)),
            Err(ParseError::Invalid(header)) => (header, Err(Errno::INVAL)),
        };
        let error = match outcome {
            Ok(()) => 0,
            Err(errno) => {
                body.clear();
                errno.raw_os_error()
            }
        };
        Answer::Reply(wire::reply_header(header.unique, body.len(), error))
    }

    fn execute(&self, node: NodeId, request: Request<'_>, body: &mut Vec<u8>) -> Outcome {
        if let Request::Init(offer) = request {
            return self.negotiate(&offer, body);
        }
        if !self.is_negotiated.load(Ordering::Relaxed) {
            return Err(Errno::IO);
        }
        match request {
            Request::Init(_) | Request::WithoutReply => {}
            Request::Nothing | Request::Destroy => body.clear(),
            Request::Lookup { name } => {
                let found = self.tree.lookup(node, name).ok_or(Errno::NOENT)?;
                *body = wire::entry_reply(&found, VALID_SECONDS);
            }
            Request::Attributes => *body = wire::attributes_reply(&self.attributes(node)?, VALID_SECONDS),
            Request::ReadLink => {
                let target = self.tree.link_target(node).ok_or(Errno::INVAL)?;
                *body = target.as_os_str().as_bytes().to_vec();
            }
            Request::Open => {
                let handle = self.open(node)?;
                *body = wire::open_reply(handle, wire::OPEN_KEEPS_CACHE);
            }
            Request::Read(range) => self.read(range, body)?,
            Request::Release(handle) => {
                self.handles.close_file(handle);
                body.clear();
            }
            Request::OpenDirectory => {
                let entries = self.tree.list(node).ok_or(Errno::NOTDIR)?;
                let handle = self.handles.open_listing(entries).ok_or(Errno::NFILE)?;
                *body = wire::open_reply(handle, 0);
            }
            Request::ReadDirectory { range, form } => *body = self.list(range, form)?,
            Request::ReleaseDirectory(handle) => {
                self.handles.close_listing(handle);
                body.clear();
            }
            Request::Seek { handle, offset, target } => *body = self.seek(handle, offset, target)?,
            Request::Statistics => *body = wire::statistics_reply(self.tree.file_bytes(), self.tree.node_count()),
            Request::Change => return Err(Errno::ROFS),
            Request::Unsupported => return Err(Errno::NOSYS),
        }
        Ok(())
    }

    fn negotiate(&self, offer: &KernelOffer, body: &mut Vec<u8>) -> Outcome {
        if offer.major < wire::MAJOR || (offer.major == wire::MAJOR && offer.minor < wire::MINOR_MIN) {
            return Err(Errno::PROTO);
        }
        let wanted = capability::ASYNC_READ
            | capability::READDIRPLUS
            | capability::READDIRPLUS_AUTO
            | capability::PARALLEL_DIROPS
            | capability::MAX_PAGES;
        let agreement = Agreement {
            readahead_bytes_max: offer.readahead_bytes_max.min(READ_BYTES_MAX),
            capabilities: offer.capabilities & wanted,
            background_count_max: BACKGROUND_COUNT_MAX,
            write_bytes_max: WRITE_BYTES_MAX,
            pages_max: PAGES_MAX,
        };
        *body = agreement.encode();
        // A kernel with a later major version asks again with the version of the reply.
        self.is_negotiated.store(offer.major == wire::MAJOR, Ordering::Relaxed);
        Ok(())
    }

    /// The attributes of a node that is in the tree, or open.
    fn attributes(&self, node: NodeId) -> Result<Attributes, Errno> {
        let of_open_file = || self.handles.file_of(node).map(|file| file.attributes);
        self.tree.attributes(node).or_else(of_open_file).ok_or(Errno::STALE)
    }

    fn open(&self, node: NodeId) -> Result<HandleId, Errno> {
        if let Some(file) = self.handles.file_of(node) {
            return self.handles.open_file(file).ok_or(Errno::NFILE);
        }
        let attributes = self.attributes(node)?;
        let content = self.tree.content(node).ok_or(match attributes.node_type {
            NodeType::Directory => Errno::ISDIR,
            NodeType::File | NodeType::Link => Errno::INVAL,
        })?;
        let device = content.open().map_err(|error| {
            self.events.open_failed(&content.identity(), &error);
            match error.kind() {
                ErrorKind::NotFound => Errno::STALE,
                _ => Errno::IO,
            }
        })?;
        self.handles
            .open_file(OpenFile { attributes, device })
            .ok_or(Errno::NFILE)
    }

    fn device(&self, handle: HandleId) -> Result<OpenFile, Errno> {
        self.handles.file(handle).ok_or(Errno::BADF)
    }

    fn failed(&self, file: &OpenFile, error: &holdfast_block::Error) -> Errno {
        let content = self.tree.content(file.attributes.node);
        let name = content.map_or_else(|| "a removed file".to_owned(), |content| content.identity());
        self.events.read_failed(&name, error);
        Errno::IO
    }

    /// Reads up to the end of the file.
    fn read(&self, range: ReadRange, body: &mut Vec<u8>) -> Outcome {
        let file = self.device(range.handle)?;
        let left = file.device.size_bytes().saturating_sub(range.offset);
        let length = u64::from(range.length.min(READ_BYTES_MAX)).min(left);
        // The read overwrites everything, so only bytes that the buffer did not have yet are cleared.
        body.resize(usize::try_from(length).expect("at most 1 MiB"), 0);
        if body.is_empty() {
            // A device refuses a read that starts past its end.
            return Ok(());
        }
        let read = file.device.read_at(body, range.offset);
        read.map_err(|error| self.failed(&file, &error))
    }

    fn list(&self, range: ReadRange, form: ListingForm) -> Result<Vec<u8>, Errno> {
        let entries = self.handles.listing(range.handle).ok_or(Errno::BADF)?;
        let mut listing = Listing::new(range.length.min(READ_BYTES_MAX) as usize, form, VALID_SECONDS);
        let start = usize::try_from(range.offset).unwrap_or(usize::MAX);
        for (number, entry) in entries.iter().enumerate().skip(start) {
            let is_itself = matches!(entry.name.as_bytes(), b"." | b"..");
            let has_room = listing.push(&ListingEntry {
                name: &entry.name,
                node: entry.node,
                node_type: entry.node_type,
                next_offset: number as u64 + 1,
                attributes: (!is_itself).then(|| self.tree.attributes(entry.node)).flatten(),
            });
            if !has_room {
                break;
            }
        }
        Ok(listing.into_body())
    }

    /// The next data or hole at or after `offset`. The end of the file is a hole.
    fn seek(&self, handle: HandleId, offset: u64, target: SeekTarget) -> Result<Vec<u8>, Errno> {
        let file = self.device(handle)?;
        let found = seek(&*file.device, offset, target).map_err(|error| self.failed(&file, &error))?;
        found.map(wire::seek_reply).ok_or(Errno::NXIO)
    }
}

fn seek(device: &dyn BlockDevice, offset: u64, target: SeekTarget) -> holdfast_block::Result<Option<u64>> {
    let size_bytes = device.size_bytes();
    let mut at = offset;
    while at < size_bytes {
        let list = device.extents(at..size_bytes, SEEK_EXTENT_COUNT)?;
        let found = list.iter().find(|extent| match target {
            SeekTarget::Data => extent.kind == ExtentKind::Data,
            SeekTarget::Hole => extent.kind != ExtentKind::Data,
        });
        if let Some(extent) = found {
            return Ok(Some(extent.offset.max(offset)));
        }
        at = list.end();
    }
    let is_end = target == SeekTarget::Hole && offset < size_bytes;
    Ok(is_end.then_some(size_bytes))
}
