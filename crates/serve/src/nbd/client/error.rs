//! What can go wrong between this client and a server.

use std::fmt;
use std::io;
use std::sync::Arc;

use holdfast_block::{Request, RequestKind};

use super::violation::Violation;
use crate::nbd::wire::ErrorNumber;

/// Result of an operation of the client.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the NBD client.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is no NBD URI, or one that cannot be served.
    #[error("{uri:?} is no usable NBD URI: {detail}")]
    Uri {
        /// The text.
        uri: String,
        /// What is wrong with it.
        detail: &'static str,
    },
    /// A name of an export or a metadata context that no server can have.
    #[error("{name:?} is no name: names have at most 4096 bytes, and no NUL")]
    Name {
        /// The name.
        name: String,
    },
    /// The server cannot do what was asked, and there is no other way.
    #[error("{server} does not offer {what}: {detail}")]
    Unsupported {
        /// Who.
        server: String,
        /// The operation.
        what: &'static str,
        /// What follows from that.
        detail: &'static str,
    },
    /// No connection came about.
    #[error("connect to {server}")]
    Connect {
        /// Where to.
        server: String,
        /// The operating system's reason.
        source: io::Error,
    },
    /// The server was silent, or dawdled, before the first request.
    #[error("{server} did not finish the handshake within {waited_ms} ms")]
    HandshakeTimeout {
        /// Who.
        server: String,
        /// How long it was given.
        waited_ms: u64,
    },
    /// The connection ended before the first request.
    #[error("the connection to {server} ended during the handshake")]
    Handshake {
        /// Who.
        server: String,
        /// The operating system's reason, or that the server closed it.
        source: io::Error,
    },
    /// The server says or does what the protocol forbids.
    #[error("{server} breaks the NBD protocol: {violation}")]
    Violation {
        /// Who.
        server: String,
        /// What it did.
        violation: Violation,
    },
    /// The server talks to clients with TLS only.
    #[error("{server} wants TLS{}", Remark(message))]
    TlsRequired {
        /// Who.
        server: String,
        /// In the server's words; may be empty.
        message: String,
    },
    /// The server has no such export.
    #[error("{server} has no export {export:?}{}", Remark(message))]
    NoSuchExport {
        /// Who.
        server: String,
        /// Name asked for.
        export: String,
        /// In the server's words; may be empty.
        message: String,
    },
    /// The server refuses something that cannot be done without.
    #[error("{server} refuses {option}: {reason}{}", Remark(message))]
    Refused {
        /// Who.
        server: String,
        /// Name of the option of the handshake.
        option: &'static str,
        /// Name of the error.
        reason: &'static str,
        /// In the server's words; may be empty.
        message: String,
    },
    /// A metadata context that was asked for is not offered.
    #[error("{server} does not offer the metadata context {context:?} of export {export:?}: {detail}")]
    ContextMissing {
        /// Who.
        server: String,
        /// Which export.
        export: String,
        /// Name of the context.
        context: String,
        /// How that came out.
        detail: &'static str,
    },
    /// A metadata context was used that was not asked for when the connection was made.
    #[error("the metadata context {context:?} was not asked for when the connection was made")]
    ContextUnknown {
        /// Name of the context.
        context: String,
    },
    /// The server answered a request with an error; the connection goes on.
    #[error("{server} cannot do the {}: {}{}", Described(request), name_of(*number), Remark(message))]
    Server {
        /// Who.
        server: Arc<str>,
        /// What was asked.
        request: Request,
        /// The number that the protocol has for the error; those of Linux.
        number: u32,
        /// In the server's words; may be empty.
        message: String,
    },
    /// The connection is gone, with all requests that were under way.
    #[error("the connection to {server} is lost: {loss}")]
    Lost {
        /// Who.
        server: Arc<str>,
        /// Why; the same for all requests that were under way, and for later ones.
        loss: Arc<Loss>,
    },
    /// The export cannot be written.
    #[error("{server} offers the export {export:?} read-only")]
    ReadOnly {
        /// Who.
        server: String,
        /// Which export.
        export: String,
    },
    /// A further connection does not lead to the same export.
    #[error("{server} shows another export {export:?} than before: {what} was {before} and is {now}")]
    Changed {
        /// Who.
        server: String,
        /// Which export.
        export: String,
        /// What differs.
        what: &'static str,
        /// On the first connection.
        before: String,
        /// On the further one.
        now: String,
    },
}

impl Error {
    /// Whether the connection is gone, so that no further request can succeed without a new one.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. })
    }
}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Loss {
    /// The server closed it.
    #[error("the server closed it")]
    Closed,
    /// The operating system reports an error.
    #[error("{action}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The operating system's reason.
        source: io::Error,
    },
    /// The server broke the protocol: what it says after that means nothing.
    #[error("the server breaks the NBD protocol: {0}")]
    Violation(Violation),
    /// The server left a request without an answer.
    #[error("the server left a {} without an answer for {waited_ms} ms", Described(request))]
    TimedOut {
        /// The oldest request without an answer.
        request: Request,
        /// Time since it was sent.
        waited_ms: u64,
    },
    /// The server did not take what was sent.
    #[error("the server took nothing of a {} for {waited_ms} ms", Described(request))]
    SendTimedOut {
        /// The request that was being sent.
        request: Request,
        /// Time since the server last took a byte.
        waited_ms: u64,
    },
    /// The server said that it shuts down.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// Somebody asked to stop.
    #[error("somebody asked to stop while the server said nothing")]
    Stopped,
    /// A thread ended in the middle of a reply.
    #[error("a thread of this program ended in the middle of a reply")]
    Abandoned,
}

impl From<Error> for holdfast_block::Error {
    /// A full medium stays one that [`is_no_space`](holdfast_block::Error::is_no_space) knows.
    fn from(error: Error) -> Self {
        match &error {
            Error::Server { request, number, .. } if *number == ErrorNumber::ENOSPC.0 => {
                let (action, offset) = (action_of(request.kind), request.offset);
                Self::io(action, offset, io::Error::new(io::ErrorKind::StorageFull, error))
            }
            _ => Self::layer(error),
        }
    }
}

/// An addition to a sentence, where there is one.
struct Remark<'a>(&'a str);

impl fmt::Display for Remark<'_> {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            "" => Ok(()),
            text => write!(to, " ({text})"),
        }
    }
}

/// A request in words.
struct Described<'a>(&'a Request);

impl fmt::Display for Described<'_> {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Request { kind, offset, length } = self.0;
        match kind {
            RequestKind::Flush => to.write_str("flush"),
            kind => write!(to, "{} of {length} bytes at offset {offset}", action_of(*kind)),
        }
    }
}

fn action_of(kind: RequestKind) -> &'static str {
    match kind {
        RequestKind::Read => "read",
        RequestKind::Extents => "block status query",
        RequestKind::Write => "write",
        RequestKind::WriteZeroes => "write of zeroes",
        RequestKind::Trim => "trim",
        RequestKind::Flush => "flush",
    }
}

fn name_of(number: u32) -> &'static str {
    match ErrorNumber(number) {
        ErrorNumber::EPERM => "operation not permitted (EPERM)",
        ErrorNumber::EIO => "input/output error (EIO)",
        ErrorNumber::ENOMEM => "out of memory (ENOMEM)",
        ErrorNumber::ENOSPC => "no space left (ENOSPC)",
        ErrorNumber::EOVERFLOW => "the request is too large (EOVERFLOW)",
        ErrorNumber::ENOTSUP => "not supported (ENOTSUP)",
        ErrorNumber::ESHUTDOWN => "the server is shutting down (ESHUTDOWN)",
        ErrorNumber::EINVAL => "invalid request (EINVAL)",
        // "The client SHOULD treat an unexpected error value as if it had been NBD_EINVAL".
        _ => "invalid request (an error number that the protocol does not have)",
    }
}
