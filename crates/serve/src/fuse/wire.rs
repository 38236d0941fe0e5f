//! Messages of the kernel's FUSE protocol: requests are parsed, replies are encoded.
//!
//! Numbers are in the byte order of the host. Source: `include/uapi/linux/fuse.h` of Linux. Fields that later versions
//! append to a request are ignored, as that file prescribes.

#![deny(
    clippy::indexing_slicing,
    reason = "the length of a request is not checked before it is parsed"
)]

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

/// Version of the protocol that this server uses. Kernels since 7.23 (Linux 3.15) understand its replies.
pub(super) const MAJOR: u32 = 7;
pub(super) const MINOR: u32 = 38;
/// Oldest minor version that has the reply to `INIT` in its present length.
pub(super) const MINOR_MIN: u32 = 23;
/// Length of the header of a reply.
pub(super) const REPLY_HEADER_LENGTH: usize = 16;
/// Bytes of a directory entry before its name.
const DIRECTORY_ENTRY_LENGTH: usize = 24;
/// Directory entries start at multiples of this.
const DIRECTORY_ENTRY_ALIGNMENT: usize = 8;
/// Bytes of the attributes and the node of an entry.
const NODE_ENTRY_LENGTH: usize = 128;

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
}

/// Flag of an opened file: the kernel keeps its pages from earlier opens.
pub(super) const OPEN_KEEPS_CACHE: u32 = 1 << 1;

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

/// The header of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RequestHeader {
    /// Identifies the request in its reply.
    pub(super) unique: u64,
    pub(super) node: NodeId,
    opcode: u32,
}

/// The kernel's part of the negotiation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KernelOffer {
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) readahead_bytes_max: u32,
    pub(super) capabilities: u64,
}

/// Part of a file or of a listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReadRange {
    pub(super) handle: HandleId,
    pub(super) offset: u64,
    pub(super) length: u32,
}

/// How a listing is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ListingForm {
    Names,
    WithAttributes,
}

/// What to seek.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SeekTarget {
    Data,
    Hole,
}

/// A parsed request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request<'a> {
    Init(KernelOffer),
    Lookup {
        name: &'a OsStr,
    },
    Attributes,
    ReadLink,
    Open,
    Read(ReadRange),
    Release(HandleId),
    OpenDirectory,
    ReadDirectory {
        range: ReadRange,
        form: ListingForm,
    },
    ReleaseDirectory(HandleId),
    Seek {
        handle: HandleId,
        offset: u64,
        target: SeekTarget,
    },
    Statistics,
    /// The kernel does not wait for a reply.
    WithoutReply,
    /// A request without effect on a file system that is read-only.
    Nothing,
    /// The file system is unmounted.
    Destroy,
    Unsupported,
    /// The request changes the file system.
    Change,
}

/// Why a request cannot be parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ParseError {
    /// It has no complete header, so no reply is possible.
    NoHeader,
    /// Its fields are incomplete or invalid.
    Invalid(RequestHeader),
}

/// Reads the fields of a message in turn.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take<const LENGTH: usize>(&mut self) -> Option<[u8; LENGTH]> {
        let (field, rest) = self.0.split_first_chunk::<LENGTH>()?;
        self.0 = rest;
        Some(*field)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_ne_bytes)
    }

    /// A name that ends with a zero byte and is the rest of the message.
    fn name(&mut self) -> Option<&'a OsStr> {
        let (last, name) = self.0.split_last()?;
        let is_name = *last == 0 && !name.is_empty() && !name.contains(&0) && !name.contains(&b'/');
        is_name.then(|| OsStr::from_bytes(name))
    }
}

/// Parses a message of the kernel, which is exactly one request.
pub(super) fn parse(message: &[u8]) -> Result<(RequestHeader, Request<'_>), ParseError> {
    let mut fields = Fields(message);
    let header = header(&mut fields, message.len()).ok_or(ParseError::NoHeader)?;
    let request = request(header.opcode, &mut fields).ok_or(ParseError::Invalid(header))?;
    Ok((header, request))
}

fn header(fields: &mut Fields<'_>, message_length: usize) -> Option<RequestHeader> {
    let length = fields.u32()?;
    let opcode = fields.u32()?;
    let unique = fields.u64()?;
    let node = NodeId(fields.u64()?);
    // User, group and process of the caller, and extensions: the kernel checks permissions.
    fields.take::<16>()?;
    (length as usize == message_length).then_some(RequestHeader { unique, node, opcode })
}

fn request<'a>(opcode: u32, fields: &mut Fields<'a>) -> Option<Request<'a>> {
    Some(match opcode {
        1 => Request::Lookup { name: fields.name()? },
        // FORGET, INTERRUPT, BATCH_FORGET: nodes are not counted, and no request takes long enough to be interrupted.
        2 | 36 | 42 => Request::WithoutReply,
        3 => Request::Attributes,
        5 => Request::ReadLink,
        14 => Request::Open,
        15 => Request::Read(read_range(fields)?),
        17 => Request::Statistics,
        18 => Request::Release(HandleId(fields.u64()?)),
        // FSYNC, FLUSH, FSYNCDIR, SYNCFS.
        20 | 25 | 30 | 50 => Request::Nothing,
        26 => Request::Init(offer(fields)?),
        27 => Request::OpenDirectory,
        28 => Request::ReadDirectory {
            range: read_range(fields)?,
            form: ListingForm::Names,
        },
        29 => Request::ReleaseDirectory(HandleId(fields.u64()?)),
        38 => Request::Destroy,
        44 => Request::ReadDirectory {
            range: read_range(fields)?,
            form: ListingForm::WithAttributes,
        },
        46 => seek(fields)?,
        // SETATTR, SYMLINK, MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK, WRITE, SETXATTR, REMOVEXATTR, CREATE, FALLOCATE,
        // RENAME2, COPY_FILE_RANGE, TMPFILE.
        4 | 6 | 8..=13 | 16 | 21 | 24 | 35 | 43 | 45 | 47 | 51 => Request::Change,
        _ => Request::Unsupported,
    })
}

fn offer(fields: &mut Fields<'_>) -> Option<KernelOffer> {
    let major = fields.u32()?;
    let minor = fields.u32()?;
    let readahead_bytes_max = fields.u32()?;
    let low = u64::from(fields.u32()?);
    let high = if low & capability::EXTENDED == 0 {
        0
    } else {
        u64::from(fields.u32()?)
    };
    Some(KernelOffer {
        major,
        minor,
        readahead_bytes_max,
        capabilities: low | high << 32,
    })
}

fn read_range(fields: &mut Fields<'_>) -> Option<ReadRange> {
    Some(ReadRange {
        handle: HandleId(fields.u64()?),
        offset: fields.u64()?,
        length: fields.u32()?,
    })
}

fn seek<'a>(fields: &mut Fields<'_>) -> Option<Request<'a>> {
    let handle = HandleId(fields.u64()?);
    let offset = fields.u64()?;
    let target = match fields.u32()? {
        3 => SeekTarget::Data,
        4 => SeekTarget::Hole,
        _ => return None,
    };
    Some(Request::Seek { handle, offset, target })
}

/// A message that is being encoded.
#[derive(Debug, Default)]
pub(super) struct Encoder(pub(super) Vec<u8>);

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
pub(super) fn reply_header(unique: u64, body_length: usize, error: i32) -> [u8; REPLY_HEADER_LENGTH] {
    let mut header = Encoder::default();
    let length = u32::try_from(REPLY_HEADER_LENGTH + body_length).expect("a reply is far below 4 GiB");
    header.u32(length).u32((-error).cast_unsigned()).u64(unique);
    header.0.try_into().expect("4 + 4 + 8 bytes")
}

/// The server's part of the negotiation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Agreement {
    pub(super) readahead_bytes_max: u32,
    pub(super) capabilities: u64,
    /// Reads in advance that the kernel sends at a time.
    pub(super) background_count_max: u16,
    pub(super) write_bytes_max: u32,
    pub(super) pages_max: u16,
}

impl Agreement {
    /// Encodes the reply to `INIT`.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the low and the high word of the capabilities"
    )]
    pub(super) fn encode(&self) -> Vec<u8> {
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
pub(super) enum NodeType {
    Directory,
    File,
    Link,
}

impl NodeType {
    /// The type and the permissions; nothing can be written.
    fn mode(self) -> u32 {
        match self {
            Self::Directory => 0o040_555,
            Self::File => 0o100_444,
            Self::Link => 0o120_777,
        }
    }

    /// The type in a directory entry.
    fn entry_type(self) -> u32 {
        self.mode() >> 12
    }
}

/// Attributes of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Attributes {
    pub(super) node: NodeId,
    pub(super) node_type: NodeType,
    pub(super) size_bytes: u64,
    /// Time of the last change, in milliseconds since 1970-01-01 UTC.
    pub(super) modified_ms: i64,
    pub(super) link_count: u32,
    pub(super) user: u32,
    pub(super) group: u32,
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
pub(super) fn attributes_reply(attributes: &Attributes, valid_seconds: u64) -> Vec<u8> {
    let mut body = Encoder::default();
    body.u64(valid_seconds).u32(0).u32(0);
    attributes.encode(&mut body);
    body.0
}

/// Encodes the reply to `LOOKUP`.
pub(super) fn entry_reply(attributes: &Attributes, valid_seconds: u64) -> Vec<u8> {
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
pub(super) fn open_reply(handle: HandleId, flags: u32) -> Vec<u8> {
    let mut body = Encoder::default();
    body.u64(handle.0).u32(flags).u32(0);
    body.0
}

/// Encodes the reply to `LSEEK`.
pub(super) fn seek_reply(offset: u64) -> Vec<u8> {
    offset.to_ne_bytes().to_vec()
}

/// Longest name in a directory.
pub(super) const NAME_BYTES_MAX: u32 = 255;
/// Size of the blocks in which `STATFS` counts.
const BLOCK_BYTES: u32 = 4096;

/// Encodes the reply to `STATFS`: no space is free.
pub(super) fn statistics_reply(total_bytes: u64, file_count: u64) -> Vec<u8> {
    let mut body = Encoder::default();
    body.u64(total_bytes.div_ceil(BLOCK_BYTES.into())).u64(0).u64(0);
    body.u64(file_count).u64(0);
    body.u32(BLOCK_BYTES).u32(NAME_BYTES_MAX).u32(BLOCK_BYTES).u32(0);
    body.zeroes(24);
    body.0
}

/// An entry of a listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ListingEntry<'a> {
    pub(super) name: &'a OsStr,
    pub(super) node: NodeId,
    pub(super) node_type: NodeType,
    /// Where the next read of the listing continues after this entry.
    pub(super) next_offset: u64,
    /// Attributes, if the listing has them. Without attributes in such a listing, the kernel looks the entry up.
    pub(super) attributes: Option<Attributes>,
}

/// A part of a listing.
#[derive(Debug)]
pub(super) struct Listing {
    body: Encoder,
    length_max: usize,
    form: ListingForm,
    valid_seconds: u64,
}

impl Listing {
    pub(super) fn new(length_max: usize, form: ListingForm, valid_seconds: u64) -> Self {
        Self {
            body: Encoder::default(),
            length_max,
            form,
            valid_seconds,
        }
    }

    /// Adds an entry; returns whether there was room for it.
    pub(super) fn push(&mut self, entry: &ListingEntry<'_>) -> bool {
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

    pub(super) fn into_body(self) -> Vec<u8> {
        self.body.0
    }
}
