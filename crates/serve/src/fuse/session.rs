//! Answers the requests of the kernel: messages in, replies out. Pure but for the devices.

mod files;

use std::os::unix::ffi::OsStrExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;

use super::event::MountEvents;
use super::handles::Handles;
use super::tree::FileTree;
use super::wire::{
    self, Agreement, Attributes, FuseRequest, KernelOffer, Listing, ListingEntry, ListingForm, NodeId, ParseError,
    REPLY_HEADER_LENGTH, ReadRange, capability,
};

/// Limit of bytes that one read returns. The kernel sends larger reads in parts.
pub(super) const READ_BYTES_MAX: u32 = 1 << 20;
/// Limit of bytes of data in one request.
const WRITE_BYTES_MAX: u32 = 1 << 20;
/// The same if no file can be written: the smallest that the kernel accepts.
const WRITE_BYTES_MIN: u32 = 4096;
/// Room for the headers of a request besides its data.
const REQUEST_HEADERS_LENGTH: usize = 4096;
/// The kernel refuses to use a shorter buffer for a request.
const REQUEST_BYTES_MIN: usize = 8192;
/// Limit of pages in one request.
const PAGES_MAX: u16 = 256;
/// Reads in advance that the kernel may send before it waits for replies.
const BACKGROUND_COUNT_MAX: u16 = 16;
/// How long the kernel uses names and attributes before it asks again: a new snapshot appears after this time.
const VALID_SECONDS: u64 = 5;

/// How a request is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FuseAnswer {
    /// With this header, and the bytes in the buffer for the body.
    Reply([u8; REPLY_HEADER_LENGTH]),
    /// The kernel does not wait for a reply.
    Nothing,
}

/// How a session starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionStart {
    /// The file system was just mounted.
    New,
    /// A server has ended, and this one continues. Handles of the predecessor stay valid: their nodes are opened again.
    Successor {
        /// Number of servers that have ended.
        predecessor_count: u32,
    },
}

/// What the kernel and the server have agreed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Negotiation {
    /// The kernel has not asked yet.
    Pending,
    /// If the server ends, a successor can continue.
    WithSuccessors,
    /// If the server ends, the file system is lost.
    WithoutSuccessors,
}

/// The state of a mounted file system.
pub(super) struct FuseSession {
    tree: Arc<FileTree>,
    handles: Handles,
    events: Arc<dyn MountEvents>,
    start: SessionStart,
    write_bytes_max: u32,
    is_negotiated: AtomicBool,
    has_resend: AtomicBool,
}

/// Whether the body has the answer of a request.
type Outcome = Result<(), Errno>;

impl FuseSession {
    pub(super) fn new(tree: Arc<FileTree>, events: Arc<dyn MountEvents>, start: SessionStart) -> Self {
        let (is_successor, predecessor_count) = match start {
            SessionStart::New => (false, 0),
            SessionStart::Successor { predecessor_count } => (true, predecessor_count),
        };
        Self {
            write_bytes_max: if tree.is_writable() {
                WRITE_BYTES_MAX
            } else {
                WRITE_BYTES_MIN
            },
            tree,
            handles: Handles::new(predecessor_count),
            events,
            start,
            is_negotiated: AtomicBool::new(is_successor),
            // The predecessor has agreed on it, or there would be no successor.
            has_resend: AtomicBool::new(is_successor),
        }
    }

    /// Length of the longest request.
    pub(super) fn request_bytes_max(&self) -> usize {
        (self.write_bytes_max as usize + REQUEST_HEADERS_LENGTH).max(REQUEST_BYTES_MIN)
    }

    pub(super) fn negotiation(&self) -> Negotiation {
        match (
            self.is_negotiated.load(Ordering::SeqCst),
            self.has_resend.load(Ordering::SeqCst),
        ) {
            (false, _) => Negotiation::Pending,
            (true, true) => Negotiation::WithSuccessors,
            (true, false) => Negotiation::WithoutSuccessors,
        }
    }

    /// Number of open files.
    pub(super) fn open_file_count(&self) -> usize {
        self.handles.file_count()
    }

    /// Answers a message. `body` is reused for all replies of a thread; its old content has no meaning.
    pub(super) fn answer(&self, message: &[u8], body: &mut Vec<u8>) -> FuseAnswer {
        let (header, outcome) = match wire::parse(message) {
            Ok((_, FuseRequest::WithoutReply)) | Err(ParseError::NoHeader) => return FuseAnswer::Nothing,
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
        FuseAnswer::Reply(wire::reply_header(header.unique, body.len(), error))
    }

    fn execute(&self, node: NodeId, request: FuseRequest<'_>, body: &mut Vec<u8>) -> Outcome {
        if let FuseRequest::Init(offer) = request {
            return self.negotiate(&offer, body);
        }
        if !self.is_negotiated.load(Ordering::SeqCst) {
            return Err(Errno::IO);
        }
        match request {
            FuseRequest::Init(_) | FuseRequest::WithoutReply => {}
            FuseRequest::Nothing | FuseRequest::Destroy => body.clear(),
            FuseRequest::Lookup { name } => {
                let found = self.tree.lookup(node, name).ok_or(Errno::NOENT)?;
                *body = wire::entry_reply(&found, VALID_SECONDS);
            }
            FuseRequest::Attributes => *body = wire::attributes_reply(&self.attributes(node)?, VALID_SECONDS),
            FuseRequest::ReadLink => {
                let target = self.tree.link_target(node).ok_or(Errno::INVAL)?;
                *body = target.as_os_str().as_bytes().to_vec();
            }
            FuseRequest::Open => {
                let opened = self.open(node)?;
                *body = wire::open_reply(opened.handle, opened.flags);
            }
            FuseRequest::Read(range) => self.read(node, range, body)?,
            FuseRequest::Write(write) => {
                let length = self.write(node, &write)?;
                *body = wire::write_reply(length);
            }
            FuseRequest::Allocate(change) => {
                self.allocate(node, &change)?;
                body.clear();
            }
            FuseRequest::SetAttributes(change) => {
                let attributes = self.set_attributes(node, change)?;
                *body = wire::attributes_reply(&attributes, VALID_SECONDS);
            }
            FuseRequest::Sync(handle) => {
                self.sync(node, handle)?;
                body.clear();
            }
            FuseRequest::SyncAll => {
                self.sync_all()?;
                body.clear();
            }
            FuseRequest::Release(handle) => {
                self.handles.close_file(handle);
                body.clear();
            }
            FuseRequest::OpenDirectory => {
                let entries = self.tree.list(node).ok_or(Errno::NOTDIR)?;
                let handle = self.handles.open_listing(entries).ok_or(Errno::NFILE)?;
                *body = wire::open_reply(handle, 0);
            }
            FuseRequest::ReadDirectory { range, form } => *body = self.list(node, range, form)?,
            FuseRequest::ReleaseDirectory(handle) => {
                self.handles.close_listing(handle);
                body.clear();
            }
            FuseRequest::Seek { handle, offset, target } => {
                let found = self.seek(node, handle, offset, target)?;
                *body = wire::seek_reply(found);
            }
            FuseRequest::Statistics => *body = wire::statistics_reply(self.tree.file_bytes(), self.tree.node_count()),
            FuseRequest::Change => return Err(Errno::ROFS),
            FuseRequest::Unsupported => return Err(Errno::NOSYS),
        }
        Ok(())
    }

    fn negotiate(&self, offer: &KernelOffer, body: &mut Vec<u8>) -> Outcome {
        if offer.major < wire::MAJOR || (offer.major == wire::MAJOR && offer.minor < wire::MINOR_MIN) {
            return Err(Errno::PROTO);
        }
        let has_resend = offer.capabilities & capability::RESEND != 0;
        let wanted = capability::ASYNC_READ
            | capability::READDIRPLUS
            | capability::READDIRPLUS_AUTO
            | capability::PARALLEL_DIROPS
            | capability::MAX_PAGES
            | capability::EXTENDED
            | capability::RESEND;
        let agreement = Agreement {
            readahead_bytes_max: offer.readahead_bytes_max.min(READ_BYTES_MAX),
            capabilities: offer.capabilities & wanted,
            background_count_max: BACKGROUND_COUNT_MAX,
            write_bytes_max: self.write_bytes_max,
            pages_max: PAGES_MAX,
        };
        *body = agreement.encode();
        self.has_resend.store(has_resend, Ordering::SeqCst);
        // A kernel with a later major version asks again with the version of the reply.
        self.is_negotiated.store(offer.major == wire::MAJOR, Ordering::SeqCst);
        Ok(())
    }

    /// The attributes of a node that is in the tree, or open.
    fn attributes(&self, node: NodeId) -> Result<Attributes, Errno> {
        let of_open_file = || self.handles.file_of(node).map(|file| file.attributes);
        self.tree.attributes(node).or_else(of_open_file).ok_or(Errno::STALE)
    }

    fn list(&self, node: NodeId, range: ReadRange, form: ListingForm) -> Result<Vec<u8>, Errno> {
        let entries = match (self.handles.listing(range.handle), self.start) {
            (Some(entries), _) => entries,
            (None, SessionStart::New) => return Err(Errno::BADF),
            // Opened by a predecessor.
            (None, SessionStart::Successor { .. }) => self.tree.list(node).ok_or(Errno::NOTDIR)?.into(),
        };
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
}
