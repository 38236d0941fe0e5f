//! Replies to the kernel.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use super::request::ListingForm;
use super::{HandleId, MAJOR, MINOR, NAME_BYTES_MAX, NodeId, REPLY_HEADER_LENGTH};

/// Bytes of a directory entry before its name.
const DIRECTORY_ENTRY_LENGTH: usize = 24;
/// Directory entries start at multiples of this.
const DIRECTORY_ENTRY_ALIGNMENT: usize = 8;
/// Bytes of the attributes and the node of an entry.
const NODE_ENTRY_LENGTH: usize = 128;

/// A message that is being encoded.
#[derive(Debug, Default)]
pub(crate) struct Encoder(pub(crate) Vec<u8>);

impl Encoder {
    fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_ne_bytes())
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_ne_bytes())
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_ne_bytes())
    }

    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    fn zeroes(&mut self, count: usize) -> &mut Self {
        self.0.resize(self.0.len() + count, 0);
        self
    }
}

/// The header of a reply. `error` is 0, or a positive error number.
pub(crate) fn reply_header(unique: u64, body_length: usize, error: i32) -> [u8; REPLY_HEADER_LENGTH] {
    let mut header = Encoder::default();
    let length = u32::try_from(REPLY_HEADER_LENGTH + body_length).expect("a reply is far below 4 GiB");
    header.u32(length).u32((-error).cast_unsigned()).u64(unique);
    header.0.try_into().expect("4 + 4 + 8 bytes")
}

/// The server's part of the negotiation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Agreement {
    pub(crate) readahead_bytes_max: u32,
    pub(crate) capabilities: u64,
    /// Reads in advance that the kernel sends at a time.
    pub(crate) background_count_max: u16,
    pub(crate) write_bytes_max: u32,
    pub(crate) pages_max: u16,
}

impl Agreement {
    /// Encodes the reply to `INIT`.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the low and the high word of the capabilities"
    )]
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut body = Encoder::default();
        body.u32(MAJOR).u32(MINOR).u32(self.readahead_bytes_max);
        body.u32(self.capabilities as u32);
        body.u16(self.background_count_max)
            .u16(self.background_count_max / 4 * 3);
        // Times are in nanoseconds.
        body.u32(self.write_bytes_max).u32(1);
        body.u16(self.pages_max).u16(0);
        body.u32((self.capabilities >> 32) as u32).zeroes(28);
        body.0
    }
}

/// The type of a node, as in `st_mode` and in directory entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NodeType {
    Directory,
    File(FileAccess),
    Link,
}

impl NodeType {
    /// The type and the permissions.
    fn mode(self) -> u32 {
        match self {
            Self::Directory => 0o040_555,
            Self::File(FileAccess::ReadOnly) => 0o100_444,
            Self::File(FileAccess::Writable) => 0o100_644,
            Self::Link => 0o120_777,
        }
    }

    /// The type in a directory entry.
    fn entry_type(self) -> u32 {
        self.mode() >> 12
    }
}

/// Whether a file can be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileAccess {
    /// It cannot.
    ReadOnly,
    /// Its owner can write it.
    Writable,
}

/// Attributes of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Attributes {
    pub(crate) node: NodeId,
    pub(crate) node_type: NodeType,
    pub(crate) size_bytes: u64,
    /// Time of the last change, in milliseconds since 1970-01-01 UTC.
    pub(crate) modified_ms: i64,
    pub(crate) link_count: u32,
    pub(crate) user: u32,
    pub(crate) group: u32,
}

/// Sector size in which `st_blocks` counts.
const SECTOR_BYTES: u64 = 512;
/// Preferred size of a read: a whole frame of a repository is decoded for less, too.
const PREFERRED_READ_BYTES: u32 = 1 << 20;

impl Attributes {
    fn encode(&self, body: &mut Encoder) {
        body.u64(self.node.0).u64(self.size_bytes);
        body.u64(self.size_bytes.div_ceil(SECTOR_BYTES));
        let seconds = self.modified_ms.div_euclid(1000).cast_unsigned();
        body.u64(seconds).u64(seconds).u64(seconds);
        let milliseconds = u32::try_from(self.modified_ms.rem_euclid(1000)).expect("a rest of 1000");
        let nanoseconds = milliseconds * 1_000_000;
        body.u32(nanoseconds).u32(nanoseconds).u32(nanoseconds);
        body.u32(self.node_type.mode()).u32(self.link_count);
        body.u32(self.user).u32(self.group);
        // No device number, and no flags.
        body.u32(0).u32(PREFERRED_READ_BYTES).u32(0);
    }
}

/// Encodes the reply to `GETATTR`.
pub(crate) fn attributes_reply(attributes: &Attributes, valid_seconds: u64) -> Vec<u8> {
    let mut body = Encoder::default();
    body.u64(valid_seconds).u32(0).u32(0);
    attributes.encode(&mut body);
    body.0
}

/// Encodes the reply to `LOOKUP`.
pub(crate) fn entry_reply(attributes: &Attributes, valid_seconds: u64) -> Vec<u8> {
    let mut body = Encoder::default();
    encode_entry(attributes, valid_seconds, &mut body);
    body.0
}

fn encode_entry(attributes: &Attributes, valid_seconds: u64, body: &mut Encoder) {
    // A node is never used again for another file, so all have generation 0.
    body.u64(attributes.node.0).u64(0);
    body.u64(valid_seconds).u64(valid_seconds).u32(0).u32(0);
    attributes.encode(body);
}

/// Encodes the reply to `OPEN` and `OPENDIR`.
pub(crate) fn open_reply(handle: HandleId, flags: u32) -> Vec<u8> {
    let mut body = Encoder::default();
    body.u64(handle.0).u32(flags).u32(0);
    body.0
}

/// Encodes the reply to `WRITE`.
pub(crate) fn write_reply(length: u32) -> Vec<u8> {
    let mut body = Encoder::default();
    body.u32(length).u32(0);
    body.0
}

/// The notification that makes the kernel send unanswered requests again: `FUSE_NOTIFY_RESEND`.
pub(crate) fn resend_notification() -> [u8; REPLY_HEADER_LENGTH] {
    // A notification is a reply to no request; its code is in the place of the error.
    let mut header = reply_header(0, 0, 0);
    let code = header.get_mut(4..8).expect("it has 16 bytes");
    code.copy_from_slice(&7_u32.to_ne_bytes());
    header
}

/// Encodes the reply to `LSEEK`.
pub(crate) fn seek_reply(offset: u64) -> Vec<u8> {
    offset.to_ne_bytes().to_vec()
}

/// Size of the blocks in which `STATFS` counts.
const BLOCK_BYTES: u32 = 4096;

/// Encodes the reply to `STATFS`: no space is free.
pub(crate) fn statistics_reply(total_bytes: u64, file_count: u64) -> Vec<u8> {
    let mut body = Encoder::default();
    body.u64(total_bytes.div_ceil(BLOCK_BYTES.into())).u64(0).u64(0);
    body.u64(file_count).u64(0);
    body.u32(BLOCK_BYTES).u32(NAME_BYTES_MAX).u32(BLOCK_BYTES).u32(0);
    body.zeroes(24);
    body.0
}

/// An entry of a listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ListingEntry<'a> {
    pub(crate) name: &'a OsStr,
    pub(crate) node: NodeId,
    pub(crate) node_type: NodeType,
    /// Where the next read of the listing continues after this entry.
    pub(crate) next_offset: u64,
    /// Attributes, if the listing has them. Without attributes in such a listing, the kernel looks the entry up.
    pub(crate) attributes: Option<Attributes>,
}

/// A part of a listing.
#[derive(Debug)]
pub(crate) struct Listing {
    body: Encoder,
    length_max: usize,
    form: ListingForm,
    valid_seconds: u64,
}

impl Listing {
    pub(crate) fn new(length_max: usize, form: ListingForm, valid_seconds: u64) -> Self {
        Self {
            body: Encoder::default(),
            length_max,
            form,
            valid_seconds,
        }
    }

    /// Adds an entry; returns whether there was room for it.
    pub(crate) fn push(&mut self, entry: &ListingEntry<'_>) -> bool {
        let name = entry.name.as_bytes();
        let prefix = match self.form {
            ListingForm::Names => 0,
            ListingForm::WithAttributes => NODE_ENTRY_LENGTH,
        };
        let length = prefix + (DIRECTORY_ENTRY_LENGTH + name.len()).next_multiple_of(DIRECTORY_ENTRY_ALIGNMENT);
        if self.body.0.len() + length > self.length_max {
            return false;
        }
        let end = self.body.0.len() + length;
        if self.form == ListingForm::WithAttributes {
            match &entry.attributes {
                Some(attributes) => encode_entry(attributes, self.valid_seconds, &mut self.body),
                None => drop(self.body.zeroes(NODE_ENTRY_LENGTH)),
            }
        }
        self.body.u64(entry.node.0).u64(entry.next_offset);
        let name_length = u32::try_from(name.len()).expect("a name has at most 255 bytes");
        self.body.u32(name_length).u32(entry.node_type.entry_type()).bytes(name);
        self.body.0.resize(end, 0);
        true
    }

    pub(crate) fn into_body(self) -> Vec<u8> {
        self.body.0
    }
}
