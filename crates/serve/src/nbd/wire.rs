//! Numbers and headers of the protocol, for both ends. All integers are big-endian.

use std::ops::{BitOr, BitOrAssign};

/// First bytes that a server sends: "NBDMAGIC".
pub(crate) const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second bytes that a newstyle server sends, and the first of every option: "IHAVEOPT".
pub(crate) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
pub(crate) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub(crate) const REQUEST_MAGIC: u32 = 0x2560_9513;
/// With extended headers.
pub(crate) const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
pub(crate) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub(crate) const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// With extended headers.
pub(crate) const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Limit of bytes of an export name, a description or the name of a metadata context: "The strings are limited to
/// 4096".
pub(crate) const STRING_BYTES_MAX: usize = 4096;
/// Limit of bytes of the data of one option (server), and of one reply to an option (client).
pub(crate) const OPTION_BYTES_MAX: usize = 256 << 10;
/// Limit of bytes that one request may carry or read: all known servers and clients support it.
pub(crate) const PAYLOAD_BYTES_MAX: u32 = 32 << 20;

/// A set of flags of one kind.
macro_rules! flags {
    ($(#[$meta:meta])* $name:ident: $bits:ty { $($(#[$flag_meta:meta])* $flag:ident = $value:expr;)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub(crate) struct $name(pub(crate) $bits);

        #[allow(dead_code, reason = "the set is complete, and each end uses a part of it")]
        impl $name {
            $($(#[$flag_meta])* pub(crate) const $flag: Self = Self($value);)*

            /// Whether all of `flags` are set.
            pub(crate) fn has(self, flags: Self) -> bool {
                self.0 & flags.0 == flags.0
            }

            /// The flags that are set but not in `known`.
            pub(crate) fn without(self, known: Self) -> Self {
                Self(self.0 & !known.0)
            }

            pub(crate) fn is_empty(self) -> bool {
                self.0 == 0
            }
        }

        impl BitOr for $name {
            type Output = Self;

            fn bitor(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }
        }

        impl BitOrAssign for $name {
            fn bitor_assign(&mut self, other: Self) {
                self.0 |= other.0;
            }
        }
    };
}

flags! {
    /// Flags of a server's greeting.
    GreetingFlags: u16 {
        FIXED_NEWSTYLE = 1 << 0;
        /// The server can omit the 124 zeroes after the reply to `EXPORT_NAME`.
        NO_ZEROES = 1 << 1;
    }
}

flags! {
    /// Flags of a client's answer to the greeting.
    ClientFlags: u32 {
        FIXED_NEWSTYLE = 1 << 0;
        NO_ZEROES = 1 << 1;
    }
}

flags! {
    /// Transmission flags: what an export supports.
    ExportFlags: u16 {
        /// Always set.
        HAS_FLAGS = 1 << 0;
        READ_ONLY = 1 << 1;
        FLUSH = 1 << 2;
        FUA = 1 << 3;
        ROTATIONAL = 1 << 4;
        TRIM = 1 << 5;
        WRITE_ZEROES = 1 << 6;
        /// `DF` of reads is supported; only with structured or extended replies.
        DONT_FRAGMENT = 1 << 7;
        /// A flush on one connection covers the acknowledged writes of all connections.
        MULTI_CONN = 1 << 8;
        RESIZE = 1 << 9;
        CACHE = 1 << 10;
        FAST_ZERO = 1 << 11;
        /// Block status may carry a list of contexts; only with extended headers.
        BLOCK_STATUS_PAYLOAD = 1 << 12;
    }
}

flags! {
    /// Flags of a request.
    CommandFlags: u16 {
        /// Forced unit access: durable before the reply.
        FUA = 1 << 0;
        /// Space for the zeroes must be allocated.
        NO_HOLE = 1 << 1;
        /// The reply must be one data chunk, or an error.
        DONT_FRAGMENT = 1 << 2;
        /// One extent of block status is sufficient.
        REQUEST_ONE = 1 << 3;
        /// Write zeroes only if that is faster than writing data.
        FAST_ZERO = 1 << 4;
        /// With extended headers: the length is that of the payload.
        PAYLOAD_LENGTH = 1 << 5;
    }
}

flags! {
    /// Flags of a chunk of a structured or extended reply.
    ReplyFlags: u16 {
        /// The last chunk of its request.
        DONE = 1 << 0;
    }
}

flags! {
    /// Flags of the context `base:allocation`.
    AllocationFlags: u32 {
        HOLE = 1 << 0;
        ZERO = 1 << 1;
    }
}

/// A named number of the protocol; unknown numbers are kept.
macro_rules! numbers {
    ($(#[$meta:meta])* $name:ident: $number:ty { $($(#[$flag_meta:meta])* $flag:ident = $value:expr;)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(crate) struct $name(pub(crate) $number);

        #[allow(dead_code, reason = "the set is complete, and each end uses a part of it")]
        impl $name {
            $($(#[$flag_meta])* pub(crate) const $flag: Self = Self($value);)*
        }
    };
}

numbers! {
    /// Options of the handshake.
    OptionKind: u32 {
        EXPORT_NAME = 1;
        ABORT = 2;
        LIST = 3;
        STARTTLS = 5;
        INFO = 6;
        GO = 7;
        STRUCTURED_REPLY = 8;
        LIST_META_CONTEXT = 9;
        SET_META_CONTEXT = 10;
        EXTENDED_HEADERS = 11;
    }
}

numbers! {
    /// Replies to an option; errors have the highest bit set.
    OptionReplyKind: u32 {
        ACK = 1;
        SERVER = 2;
        INFO = 3;
        META_CONTEXT = 4;
        ERR_UNSUP = 0x8000_0001;
        ERR_POLICY = 0x8000_0002;
        ERR_INVALID = 0x8000_0003;
        ERR_PLATFORM = 0x8000_0004;
        ERR_TLS_REQD = 0x8000_0005;
        ERR_UNKNOWN = 0x8000_0006;
        ERR_SHUTDOWN = 0x8000_0007;
        ERR_BLOCK_SIZE_REQD = 0x8000_0008;
        ERR_TOO_BIG = 0x8000_0009;
        ERR_EXT_HEADER_REQD = 0x8000_000a;
    }
}

impl OptionReplyKind {
    pub(crate) fn is_error(self) -> bool {
        self.0 & 0x8000_0000 != 0
    }
}

numbers! {
    /// Kinds of information in a reply to `INFO` or `GO`.
    InfoKind: u16 {
        EXPORT = 0;
        NAME = 1;
        DESCRIPTION = 2;
        BLOCK_SIZE = 3;
    }
}

numbers! {
    /// Commands of the transmission phase.
    CommandKind: u16 {
        READ = 0;
        WRITE = 1;
        DISCONNECT = 2;
        FLUSH = 3;
        TRIM = 4;
        CACHE = 5;
        WRITE_ZEROES = 6;
        BLOCK_STATUS = 7;
        RESIZE = 8;
    }
}

numbers! {
    /// Kinds of chunks of a structured or extended reply; errors have the highest bit set.
    ChunkKind: u16 {
        NONE = 0;
        /// u64 offset, then data.
        OFFSET_DATA = 1;
        /// u64 offset, u32 length.
        OFFSET_HOLE = 2;
        /// u32 context, then descriptors of u32 length, u32 flags.
        BLOCK_STATUS = 5;
        /// u32 context, u32 count, then descriptors of u64 length, u64 flags.
        BLOCK_STATUS_EXT = 6;
        /// u32 error, u16 length of the message, message.
        ERROR = 0x8001;
        /// u32 error, u16 length of the message, message, then u64 offset.
        ERROR_OFFSET = 0x8002;
    }
}

impl ChunkKind {
    pub(crate) fn is_error(self) -> bool {
        self.0 & 0x8000 != 0
    }
}

numbers! {
    /// Error numbers: a selection of Linux' errno, on every platform.
    ErrorNumber: u32 {
        OK = 0;
        EPERM = 1;
        EIO = 5;
        ENOMEM = 12;
        EINVAL = 22;
        ENOSPC = 28;
        EOVERFLOW = 75;
        ENOTSUP = 95;
        ESHUTDOWN = 108;
    }
}

/// The header format of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HeaderStyle {
    /// Requests of 28 bytes; replies are simple.
    Simple,
    /// Requests of 28 bytes; replies in chunks with headers of 20 bytes.
    Structured,
    /// Requests of 32 bytes; replies in chunks with headers of 32 bytes.
    Extended,
}

/// The header of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RequestHeader {
    pub(crate) flags: CommandFlags,
    pub(crate) kind: CommandKind,
    /// The client's number of the request; the replies repeat it.
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
    /// The length of the range, or of the payload of a write.
    pub(crate) length: u64,
}

impl RequestHeader {
    /// Bytes of the header.
    pub(crate) fn size_bytes(style: HeaderStyle) -> usize {
        match style {
            HeaderStyle::Simple | HeaderStyle::Structured => 28,
            HeaderStyle::Extended => 32,
        }
    }

    /// Appends the header. Lengths of more than 32 bits need extended headers.
    pub(crate) fn encode(&self, style: HeaderStyle, to: &mut Vec<u8>) {
        let magic = match style {
            HeaderStyle::Simple | HeaderStyle::Structured => REQUEST_MAGIC,
            HeaderStyle::Extended => EXTENDED_REQUEST_MAGIC,
        };
        to.extend(magic.to_be_bytes());
        to.extend(self.flags.0.to_be_bytes());
        to.extend(self.kind.0.to_be_bytes());
        to.extend(self.cookie.to_be_bytes());
        to.extend(self.offset.to_be_bytes());
        match style {
            HeaderStyle::Simple | HeaderStyle::Structured => {
                let length = u32::try_from(self.length).expect("the caller keeps to 32 bits");
                to.extend(length.to_be_bytes());
            }
            HeaderStyle::Extended => to.extend(self.length.to_be_bytes()),
        }
    }

    /// Decodes a header of [`size_bytes`](Self::size_bytes) bytes; [`None`] if its magic number is wrong.
    pub(crate) fn decode(bytes: &[u8], style: HeaderStyle) -> Option<Self> {
        let mut fields = Fields(bytes);
        let magic = fields.u32();
        let header = Self {
            flags: CommandFlags(fields.u16()),
            kind: CommandKind(fields.u16()),
            cookie: fields.u64(),
            offset: fields.u64(),
            length: match style {
                HeaderStyle::Simple | HeaderStyle::Structured => u64::from(fields.u32()),
                HeaderStyle::Extended => fields.u64(),
            },
        };
        let wanted = match style {
            HeaderStyle::Simple | HeaderStyle::Structured => REQUEST_MAGIC,
            HeaderStyle::Extended => EXTENDED_REQUEST_MAGIC,
        };
        (magic == wanted).then_some(header)
    }
}

/// Bytes of a simple reply: u32 magic, u32 error, u64 cookie; data follows a successful read.
pub(crate) const SIMPLE_REPLY_BYTES: usize = 16;

/// The header of a chunk of a structured or extended reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChunkHeader {
    pub(crate) flags: ReplyFlags,
    pub(crate) kind: ChunkKind,
    pub(crate) cookie: u64,
    /// The offset of the request with extended headers, otherwise 0.
    pub(crate) offset: u64,
    /// Number of bytes that follow the header.
    pub(crate) length: u64,
}

impl ChunkHeader {
    /// Bytes of the header. Simple replies have none.
    pub(crate) fn size_bytes(style: HeaderStyle) -> usize {
        match style {
            HeaderStyle::Simple => 0,
            HeaderStyle::Structured => 20,
            HeaderStyle::Extended => 32,
        }
    }

    /// Appends the header.
    pub(crate) fn encode(&self, style: HeaderStyle, to: &mut Vec<u8>) {
        let magic = match style {
            HeaderStyle::Simple | HeaderStyle::Structured => STRUCTURED_REPLY_MAGIC,
            HeaderStyle::Extended => EXTENDED_REPLY_MAGIC,
        };
        to.extend(magic.to_be_bytes());
        to.extend(self.flags.0.to_be_bytes());
        to.extend(self.kind.0.to_be_bytes());
        to.extend(self.cookie.to_be_bytes());
        match style {
            HeaderStyle::Simple | HeaderStyle::Structured => {
                let length = u32::try_from(self.length).expect("payloads are bounded");
                to.extend(length.to_be_bytes());
            }
            HeaderStyle::Extended => {
                to.extend(self.offset.to_be_bytes());
                to.extend(self.length.to_be_bytes());
            }
        }
    }

    /// Decodes a header of [`size_bytes`](Self::size_bytes) bytes; [`None`] if its magic number is wrong.
    pub(crate) fn decode(bytes: &[u8], style: HeaderStyle) -> Option<Self> {
        let mut fields = Fields(bytes);
        let magic = fields.u32();
        let flags = ReplyFlags(fields.u16());
        let kind = ChunkKind(fields.u16());
        let cookie = fields.u64();
        let (wanted, offset, length) = match style {
            HeaderStyle::Simple | HeaderStyle::Structured => (STRUCTURED_REPLY_MAGIC, 0, u64::from(fields.u32())),
            HeaderStyle::Extended => (EXTENDED_REPLY_MAGIC, fields.u64(), fields.u64()),
        };
        (magic == wanted).then_some(Self {
            flags,
            kind,
            cookie,
            offset,
            length,
        })
    }
}

/// Reads consecutive integers from bytes whose length the caller has checked; missing bytes read as zero.
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let Some((first, rest)) = self.0.split_first_chunk() else {
            self.0 = &[];
            return [0; N];
        };
        self.0 = rest;
        *first
    }

    pub(crate) fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.take())
    }

    pub(crate) fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.take())
    }

    pub(crate) fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.take())
    }
}

#[cfg(test)]
mod tests {
    use super::{ChunkHeader, ChunkKind, CommandFlags, CommandKind, HeaderStyle, ReplyFlags, RequestHeader};

    #[test]
    fn headers_have_the_layout_of_the_protocol() {
        let request = RequestHeader {
            flags: CommandFlags::FUA,
            kind: CommandKind::WRITE,
            cookie: 0x0102_0304_0506_0708,
            offset: 0x1000,
            length: 0x200,
        };
        let mut bytes = Vec::new();
        request.encode(HeaderStyle::Simple, &mut bytes);
        let expected = "25609513 0001 0001 0102030405060708 0000000000001000 00000200";
        assert_eq!(hex(&bytes), expected.replace(' ', ""));
        bytes.clear();
        request.encode(HeaderStyle::Extended, &mut bytes);
        let expected = "21e41c71 0001 0001 0102030405060708 0000000000001000 0000000000000200";
        assert_eq!(hex(&bytes), expected.replace(' ', ""));
        let chunk = ChunkHeader {
            flags: ReplyFlags::DONE,
            kind: ChunkKind::OFFSET_DATA,
            cookie: 7,
            offset: 0x3000,
            length: 12,
        };
        bytes.clear();
        chunk.encode(HeaderStyle::Structured, &mut bytes);
        assert_eq!(
            hex(&bytes),
            "668e33ef 0001 0001 0000000000000007 0000000c".replace(' ', "")
        );
        bytes.clear();
        chunk.encode(HeaderStyle::Extended, &mut bytes);
        let expected = "6e8a278c 0001 0001 0000000000000007 0000000000003000 000000000000000c";
        assert_eq!(hex(&bytes), expected.replace(' ', ""));
    }

    #[test]
    fn headers_read_back_and_foreign_magic_is_refused() {
        for style in [HeaderStyle::Simple, HeaderStyle::Structured, HeaderStyle::Extended] {
            let request = RequestHeader {
                flags: CommandFlags::default(),
                kind: CommandKind::BLOCK_STATUS,
                cookie: 9,
                offset: 1 << 40,
                length: 77,
            };
            let mut bytes = Vec::new();
            request.encode(style, &mut bytes);
            assert_eq!(bytes.len(), RequestHeader::size_bytes(style));
            assert_eq!(RequestHeader::decode(&bytes, style), Some(request));
            bytes[0] ^= 1;
            assert_eq!(RequestHeader::decode(&bytes, style), None);
        }
        for style in [HeaderStyle::Structured, HeaderStyle::Extended] {
            let chunk = ChunkHeader {
                flags: ReplyFlags::default(),
                kind: ChunkKind::ERROR,
                cookie: 1,
                offset: 0,
                length: 6,
            };
            let mut bytes = Vec::new();
            chunk.encode(style, &mut bytes);
            assert_eq!(bytes.len(), ChunkHeader::size_bytes(style));
            assert_eq!(ChunkHeader::decode(&bytes, style), Some(chunk));
            bytes[3] ^= 1;
            assert_eq!(ChunkHeader::decode(&bytes, style), None);
        }
    }

    fn hex(bytes: &[u8]) -> String {
        let digits =
            |byte: &u8| [byte >> 4, byte & 15].map(|digit| char::from(b"0123456789abcdef"[usize::from(digit)]));
        bytes.iter().flat_map(digits).collect()
    }
}
