//! What a server can do that the protocol forbids.

/// A breach of the protocol by the server. After one, nothing that it sends has a meaning.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// The first bytes are not those of a newstyle server.
    #[error("its greeting is {found:#018x}, not that of a newstyle NBD server")]
    Greeting {
        /// What stands in the place of the magic number.
        found: u64,
    },
    /// It speaks the handshake of before 2010.
    #[error("it speaks the oldstyle handshake, which has no names of exports and no options")]
    Oldstyle,
    /// A magic number is wrong.
    #[error("{what} begins with {found:#x}")]
    Magic {
        /// What should begin here.
        what: &'static str,
        /// What stands in the place of the magic number.
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
    /// A reply of this kind is no answer to the option.
    #[error("it answers option {option} with a reply of kind {kind:#x}")]
    WrongReply {
        /// The number of the option sent.
        option: u32,
        /// The kind of the reply.
        kind: u32,
    },
    /// Something is longer, shorter or more than the protocol, or reason, allows.
    #[error("{what} is {found}, which is not {allowed}")]
    Size {
        /// What has that size.
        what: &'static str,
        /// The size.
        found: u64,
        /// What it should be.
        allowed: &'static str,
    },
    /// A string is not UTF-8, or has NUL in it.
    #[error("{what} is not text")]
    NotText {
        /// Which string.
        what: &'static str,
    },
    /// The same was said twice.
    #[error("it gives {what} twice")]
    Twice {
        /// What.
        what: &'static str,
    },
    /// Something that must be said was not.
    #[error("it leaves out {what}")]
    Missing {
        /// What.
        what: &'static str,
    },
    /// A metadata context is granted that nobody asked for.
    #[error("it grants the metadata context {name:?}, which was not asked for")]
    ForeignContext {
        /// Its name.
        name: String,
    },
    /// A reply belongs to no request that is under way.
    #[error("it answers a request that is not under way (cookie {cookie:#x})")]
    UnknownCookie {
        /// The number in the reply.
        cookie: u64,
    },
    /// A chunk of this kind is no answer to the request.
    #[error("it answers a {request} with a chunk of type {kind:#x}")]
    WrongChunk {
        /// The kind of the request.
        request: &'static str,
        /// The type of the chunk.
        kind: u16,
    },
    /// A simple reply where a structured one must be.
    #[error("it answers a {request} with a simple reply")]
    SimpleReply {
        /// The kind of the request.
        request: &'static str,
    },
    /// The header of a chunk repeats another offset than the request had.
    #[error("the header of its reply says offset {found}, the request said {expected}")]
    WrongOffset {
        /// That of the request.
        expected: u64,
        /// That of the reply.
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
    /// A chunk covers what an earlier one covered.
    #[error("it sends {length} bytes at offset {offset} twice")]
    Overlap {
        /// First byte of the chunk.
        offset: u64,
        /// Bytes of the chunk.
        length: u64,
    },
    /// A read ended as a success without all of its bytes.
    #[error("it ends a read of {length} bytes at offset {offset} after {received} bytes")]
    Incomplete {
        /// First byte of the request.
        offset: u64,
        /// Bytes of the request.
        length: u64,
        /// Bytes that came.
        received: u64,
    },
    /// A block status reply has no answer for a context.
    #[error("its block status at offset {offset} leaves out the metadata context {context:?}")]
    ContextForgotten {
        /// First byte of the request.
        offset: u64,
        /// Name of the context.
        context: String,
    },
    /// Extents make no sense.
    #[error("its block status at offset {offset} has {what}")]
    Extents {
        /// First byte of the request.
        offset: u64,
        /// What is wrong with them.
        what: &'static str,
    },
}
