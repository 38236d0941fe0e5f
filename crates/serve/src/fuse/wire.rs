//! Messages of the kernel's FUSE protocol: requests are parsed, replies are encoded.
//!
//! Numbers are in the byte order of the host. Source: `include/uapi/linux/fuse.h` of Linux. Fields that later versions
//! append to a request are ignored, as that file prescribes.

#![deny(
    clippy::indexing_slicing,
    reason = "the length of a request is not checked before it is parsed"
)]

mod reply;
mod request;

pub use reply::FileAccess;
pub(super) use reply::{
    Agreement, Attributes, Listing, ListingEntry, NodeType, attributes_reply, entry_reply, open_reply, reply_header,
    resend_notification, seek_reply, statistics_reply, write_reply,
};
pub(super) use request::{
    AttributeChange, FuseRequest, KernelOffer, ListingForm, ParseError, ReadRange, SeekTarget, SpaceChange,
    WriteRequest, parse,
};

/// Version of the protocol that this server uses. Kernels since 7.23 (Linux 3.15) understand its replies.
pub(super) const MAJOR: u32 = 7;
pub(super) const MINOR: u32 = 38;
/// Oldest minor version that has the reply to `INIT` in its present length.
pub(super) const MINOR_MIN: u32 = 23;
/// Length of the header of a reply.
pub(super) const REPLY_HEADER_LENGTH: usize = 16;
/// Longest name in a directory.
pub(super) const NAME_BYTES_MAX: u32 = 255;

/// Capabilities that are negotiated by `INIT`.
pub(super) mod capability {
    /// Several reads of one file at a time.
    pub(crate) const ASYNC_READ: u64 = 1;
    /// Directories are listed with attributes, where the kernel considers this useful.
    pub(crate) const READDIRPLUS: u64 = 1 << 13;
    pub(crate) const READDIRPLUS_AUTO: u64 = 1 << 14;
    /// Several look-ups in one directory at a time.
    pub(crate) const PARALLEL_DIROPS: u64 = 1 << 18;
    /// Requests of more than 32 pages.
    pub(crate) const MAX_PAGES: u64 = 1 << 22;
    /// The second word of capabilities is in use.
    pub(crate) const EXTENDED: u64 = 1 << 30;
    /// On request, the kernel sends requests again that were not answered. Linux 6.9.
    pub(crate) const RESEND: u64 = 1 << 39;
}

/// Flags of an opened file.
pub(super) mod open_flag {
    /// Reads and writes bypass the kernel's cache.
    pub(crate) const DIRECT: u32 = 1;
    /// The kernel keeps its pages from earlier opens.
    pub(crate) const KEEPS_CACHE: u32 = 1 << 1;
    /// Several direct writes to one file at a time.
    pub(crate) const PARALLEL_WRITES: u32 = 1 << 6;
}

/// A node of a file system, as the kernel knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u64);

impl NodeId {
    /// The root of every file system.
    pub const ROOT: Self = Self(1);
}

/// A file or directory that is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct HandleId(pub(super) u64);
