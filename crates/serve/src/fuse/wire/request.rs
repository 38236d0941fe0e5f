//! Requests of the kernel.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use super::{HandleId, NodeId, capability};

/// The header of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FuseRequestHeader {
    /// Identifies the request in its reply.
    pub(crate) unique: u64,
    pub(crate) node: NodeId,
    opcode: u32,
}

/// The kernel's part of the negotiation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KernelOffer {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) readahead_bytes_max: u32,
    pub(crate) capabilities: u64,
}

/// Part of a file or of a listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReadRange {
    pub(crate) handle: HandleId,
    pub(crate) offset: u64,
    pub(crate) length: u32,
}

/// How a listing is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ListingForm {
    Names,
    WithAttributes,
}

/// What to seek.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SeekTarget {
    Data,
    Hole,
}

/// Bytes to write to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WriteRequest<'a> {
    pub(crate) handle: HandleId,
    pub(crate) offset: u64,
    pub(crate) data: &'a [u8],
}

/// A change of the allocated space of a file: `fallocate(2)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SpaceChange {
    pub(crate) handle: HandleId,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    /// `FALLOC_FL_*`.
    pub(crate) mode: u32,
}

/// A change of attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AttributeChange {
    /// The new size, if it is to be changed.
    pub(crate) size_bytes: Option<u64>,
}

/// Bit of the changed attributes for the size.
const ATTRIBUTE_SIZE: u32 = 1 << 3;

/// A parsed request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FuseRequest<'a> {
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
    Write(WriteRequest<'a>),
    Allocate(SpaceChange),
    SetAttributes(AttributeChange),
    /// Make the writes to a file durable.
    Sync(HandleId),
    /// Make all writes durable.
    SyncAll,
    Statistics,
    /// The kernel does not wait for a reply.
    WithoutReply,
    /// A request that needs no action: a file was closed, a directory is to be made durable.
    Nothing,
    /// The file system is unmounted.
    Destroy,
    Unsupported,
    /// The request changes a directory, which is always refused.
    Change,
}

/// Why a request cannot be parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ParseError {
    /// It has no complete header, so no reply is possible.
    NoHeader,
    /// Its fields are incomplete or invalid.
    Invalid(FuseRequestHeader),
}

/// Reads the fields of a message in turn.
struct FuseFields<'a>(&'a [u8]);

impl<'a> FuseFields<'a> {
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
pub(crate) fn parse(message: &[u8]) -> Result<(FuseRequestHeader, FuseRequest<'_>), ParseError> {
    let mut fields = FuseFields(message);
    let header = header(&mut fields, message.len()).ok_or(ParseError::NoHeader)?;
    let request = request(header.opcode, &mut fields).ok_or(ParseError::Invalid(header))?;
    Ok((header, request))
}

fn header(fields: &mut FuseFields<'_>, message_length: usize) -> Option<FuseRequestHeader> {
    let length = fields.u32()?;
    let opcode = fields.u32()?;
    let unique = fields.u64()?;
    let node = NodeId(fields.u64()?);
    // User, group and process of the caller, and extensions: the kernel checks permissions.
    fields.take::<16>()?;
    (length as usize == message_length).then_some(FuseRequestHeader { unique, node, opcode })
}

fn request<'a>(opcode: u32, fields: &mut FuseFields<'a>) -> Option<FuseRequest<'a>> {
    Some(match opcode {
        1 => FuseRequest::Lookup { name: fields.name()? },
        // FORGET, INTERRUPT, BATCH_FORGET: nodes are not counted, and no request takes long enough to be interrupted.
        2 | 36 | 42 => FuseRequest::WithoutReply,
        3 => FuseRequest::Attributes,
        5 => FuseRequest::ReadLink,
        14 => FuseRequest::Open,
        15 => FuseRequest::Read(read_range(fields)?),
        17 => FuseRequest::Statistics,
        18 => FuseRequest::Release(HandleId(fields.u64()?)),
        4 => FuseRequest::SetAttributes(attribute_change(fields)?),
        16 => FuseRequest::Write(write_request(fields)?),
        20 => FuseRequest::Sync(HandleId(fields.u64()?)),
        // FLUSH (a handle is closed), FSYNCDIR.
        25 | 30 => FuseRequest::Nothing,
        26 => FuseRequest::Init(offer(fields)?),
        27 => FuseRequest::OpenDirectory,
        28 => FuseRequest::ReadDirectory {
            range: read_range(fields)?,
            form: ListingForm::Names,
        },
        29 => FuseRequest::ReleaseDirectory(HandleId(fields.u64()?)),
        38 => FuseRequest::Destroy,
        44 => FuseRequest::ReadDirectory {
            range: read_range(fields)?,
            form: ListingForm::WithAttributes,
        },
        43 => FuseRequest::Allocate(space_change(fields)?),
        46 => seek(fields)?,
        50 => FuseRequest::SyncAll,
        // SYMLINK, MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK, SETXATTR, REMOVEXATTR, CREATE, RENAME2, TMPFILE.
        6 | 8..=13 | 21 | 24 | 35 | 45 | 51 => FuseRequest::Change,
        _ => FuseRequest::Unsupported,
    })
}

fn offer(fields: &mut FuseFields<'_>) -> Option<KernelOffer> {
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

fn read_range(fields: &mut FuseFields<'_>) -> Option<ReadRange> {
    Some(ReadRange {
        handle: HandleId(fields.u64()?),
        offset: fields.u64()?,
        length: fields.u32()?,
    })
}

fn write_request<'a>(fields: &mut FuseFields<'a>) -> Option<WriteRequest<'a>> {
    let handle = HandleId(fields.u64()?);
    let offset = fields.u64()?;
    let length = fields.u32()? as usize;
    // Flags of the write, the owner of a lock, flags of the file, padding.
    fields.take::<20>()?;
    Some(WriteRequest {
        handle,
        offset,
        data: fields.0.get(..length)?,
    })
}

fn space_change(fields: &mut FuseFields<'_>) -> Option<SpaceChange> {
    Some(SpaceChange {
        handle: HandleId(fields.u64()?),
        offset: fields.u64()?,
        length: fields.u64()?,
        mode: fields.u32()?,
    })
}

fn attribute_change(fields: &mut FuseFields<'_>) -> Option<AttributeChange> {
    let changed = fields.u32()?;
    // Padding, and the handle.
    fields.take::<12>()?;
    let size_bytes = fields.u64()?;
    Some(AttributeChange {
        size_bytes: (changed & ATTRIBUTE_SIZE != 0).then_some(size_bytes),
    })
}

fn seek<'a>(fields: &mut FuseFields<'_>) -> Option<FuseRequest<'a>> {
    let handle = HandleId(fields.u64()?);
    let offset = fields.u64()?;
    let target = match fields.u32()? {
        3 => SeekTarget::Data,
        4 => SeekTarget::Hole,
        _ => return None,
    };
    Some(FuseRequest::Seek { handle, offset, target })
}
