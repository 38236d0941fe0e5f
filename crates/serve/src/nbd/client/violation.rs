//! Violations of the protocol by a server.

/// A violation of the protocol by the server. Nothing that the server sends later can be interpreted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// The first bytes are not those of a newstyle server.
    #[error("its greeting is {found:#018x}, not that of a newstyle NBD server")]
    Greeting {
        /// The value in the place of the magic number.
        found: u64,
    },
    /// The server uses the handshake of before 2010.
    #[error("it uses the oldstyle handshake, which has no export names and no options")]
    Oldstyle,
    /// A magic number is wrong.
    #[error("{what} begins with {found:#x}")]
    Magic {
        /// The structure that should begin here.
        what: &'static str,
        /// The value in the place of the magic number.
        found: u64,
    },
    /// A reply answers another option than the one sent.
    #[error("it answers option {found} while option {expected} waits for an answer")]
    WrongOption {
        /// The number of the option sent.
        expected: u32,
        /// The number in the reply.
        found: u32,
    },
    /// The kind of reply does not fit the option.
    #[error("it answers option {option} with a reply of kind {kind:#x}")]
    WrongReply {
        /// The number of the option sent.
        option: u32,
        /// The kind of the reply.
        kind: u32,
    },
    /// A length or number is outside of the allowed range.
    #[error("{what} is {found}, which is not {allowed}")]
    Size {
        /// The value that has this size.
        what: &'static str,
        /// The size.
        found: u64,
        /// The allowed sizes.
        allowed: &'static str,
    },
    /// A string is not UTF-8, or contains NUL.
    #[error("{what} is not text")]
    NotText {
        /// The string.
        what: &'static str,
    },
    /// The same information arrived twice.
    #[error("it gives {what} twice")]
    Twice {
        /// The information.
        what: &'static str,
    },
    /// Required information is missing.
    #[error("it omits {what}")]
    Missing {
        /// The information.
        what: &'static str,
    },
    /// A metadata context was granted that was not requested.
    #[error("it grants the metadata context {name:?}, which was not requested")]
    ForeignContext {
        /// The name of the context.
        name: String,
    },
    /// A reply belongs to no request in flight.
    #[error("it answers a request that is not in flight (cookie {cookie:#x})")]
    UnknownCookie {
        /// The cookie in the reply.
        cookie: u64,
    },
    /// A chunk of this kind does not fit the request.
    #[error("it answers a {request} with a chunk of type {kind:#x}")]
    WrongChunk {
        /// The kind of the request.
        request: &'static str,
        /// The type of the chunk.
        kind: u16,
    },
    /// A simple reply where a structured one is required.
    #[error("it answers a {request} with a simple reply")]
    SimpleReply {
        /// The kind of the request.
        request: &'static str,
    },
    /// The header of a chunk has another offset than the request.
    #[error("the header of its reply says offset {found}, the request said {expected}")]
    WrongOffset {
        /// The offset of the request.
        expected: u64,
        /// The offset in the reply.
        found: u64,
    },
    /// A chunk lies outside of its request.
    #[error("it sends {length} bytes at offset {offset} for a request of {request_length} bytes at {request_offset}")]
    Outside {
        /// First byte of the chunk.
        offset: u64,
        /// Bytes of the chunk.
        length: u64,
        /// First byte of the request.
        request_offset: u64,
        /// Bytes of the request.
        request_length: u64,
    },
    /// A chunk overlaps an earlier one.
    #[error("it sends {length} bytes at offset {offset} twice")]
    Overlap {
        /// First byte of the chunk.
        offset: u64,
        /// Bytes of the chunk.
        length: u64,
    },
    /// A read completed without all of its bytes.
    #[error("it ends a read of {length} bytes at offset {offset} after {received} bytes")]
    Incomplete {
        /// First byte of the request.
        offset: u64,
        /// Bytes of the request.
        length: u64,
        /// Bytes that arrived.
        received: u64,
    },
    /// A block status reply omits a context.
    #[error("its block status at offset {offset} omits the metadata context {context:?}")]
    ContextForgotten {
        /// First byte of the request.
        offset: u64,
        /// Name of the context.
        context: String,
    },
    /// Extents are invalid.
    #[error("its block status at offset {offset} has {what}")]
    Extents {
        /// First byte of the request.
        offset: u64,
        /// The fault.
        what: &'static str,
    },
}
