//! Errors of the client.

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
    /// The text is not an NBD URI, or the URI is not supported.
    #[error("{uri:?} is not a usable NBD URI: {detail}")]
    Uri {
        /// The text.
        uri: String,
        /// The fault.
        detail: &'static str,
    },
    /// An invalid name of an export or a metadata context.
    #[error("{name:?} is not a valid name: names have at most 4096 bytes, and no NUL")]
    Name {
        /// The name.
        name: String,
    },
    /// The server does not support the operation, and there is no fallback.
    #[error("{server} does not offer {what}: {detail}")]
    Unsupported {
        /// The server.
        server: String,
        /// The operation.
        what: &'static str,
        /// The consequence.
        detail: &'static str,
    },
    /// No connection could be made.
    #[error("connect to {server}")]
    Connect {
        /// The server.
        server: String,
        /// The operating system's reason.
        source: io::Error,
    },
    /// The handshake took too long.
    #[error("{server} did not finish the handshake within {waited_ms} ms")]
    HandshakeTimeout {
        /// The server.
        server: String,
        /// The time limit in milliseconds.
        waited_ms: u64,
    },
    /// The connection ended before the first request.
    #[error("the connection to {server} ended during the handshake")]
    Handshake {
        /// The server.
        server: String,
        /// The operating system's reason, or that the server closed the connection.
        source: io::Error,
    },
    /// The server violated the protocol.
    #[error("{server} breaks the NBD protocol: {violation}")]
    Violation {
        /// The server.
        server: String,
        /// The violation.
        violation: Violation,
    },
    /// The server requires TLS.
    #[error("{server} requires TLS{}", Suffix(message))]
    TlsRequired {
        /// The server.
        server: String,
        /// The server's message; may be empty.
        message: String,
    },
    /// The server has no such export.
    #[error("{server} has no export {export:?}{}", Suffix(message))]
    NoSuchExport {
        /// The server.
        server: String,
        /// The requested name.
        export: String,
        /// The server's message; may be empty.
        message: String,
    },
    /// The server refused something required.
    #[error("{server} refuses {option}: {reason}{}", Suffix(message))]
    Refused {
        /// The server.
        server: String,
        /// The name of the handshake option.
        option: &'static str,
        /// Name of the error.
        reason: &'static str,
        /// The server's message; may be empty.
        message: String,
    },
    /// A required metadata context is not offered.
    #[error("{server} does not offer the metadata context {context:?} of export {export:?}: {detail}")]
    ContextMissing {
        /// The server.
        server: String,
        /// The export.
        export: String,
        /// Name of the context.
        context: String,
        /// The reason.
        detail: &'static str,
    },
    /// A metadata context was used that was not requested when the connection was made.
    #[error("the metadata context {context:?} was not requested when the connection was made")]
    ContextUnknown {
        /// Name of the context.
        context: String,
    },
    /// The server replied to a request with an error. The connection is still usable.
    #[error("{server} cannot do the {}: {}{}", RequestText(request), name_of(*number), Suffix(message))]
    Server {
        /// The server.
        server: Arc<str>,
        /// The request.
        request: Request,
        /// The protocol's error number, which is that of Linux.
        number: u32,
        /// The server's message; may be empty.
        message: String,
    },
    /// The connection is lost, with all requests in flight.
    #[error("the connection to {server} is lost: {loss}")]
    Lost {
        /// The server.
        server: Arc<str>,
        /// The reason; it is the same for all requests in flight and for later ones.
        loss: Arc<Loss>,
    },
    /// The export cannot be written.
    #[error("{server} offers the export {export:?} read-only")]
    ReadOnly {
        /// The server.
        server: String,
        /// The export.
        export: String,
    },
    /// A further connection leads to a different export.
    #[error("{server} shows another export {export:?} than before: {what} was {before} and is {now}")]
    Changed {
        /// The server.
        server: String,
        /// The export.
        export: String,
        /// The property that differs.
        what: &'static str,
        /// The value on the first connection.
        before: String,
        /// The value on the further connection.
        now: String,
    },
}

impl Error {
    /// Whether the connection is lost, so that further requests need a new one.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. })
    }
}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Loss {
    /// The server closed the connection.
    #[error("the server closed it")]
    Closed,
    /// The operating system reported an error.
    #[error("{action}: {source}")]
    Io {
        /// The operation that failed.
        action: &'static str,
        /// The operating system's reason.
        source: io::Error,
    },
    /// The server violated the protocol. Nothing that it sends later can be interpreted.
    #[error("the server breaks the NBD protocol: {0}")]
    Violation(Violation),
    /// The server did not answer a request in time.
    #[error("the server did not answer a {} for {waited_ms} ms", RequestText(request))]
    TimedOut {
        /// The oldest unanswered request.
        request: Request,
        /// Time since the request was sent, in milliseconds.
        waited_ms: u64,
    },
    /// The server stopped accepting data.
    #[error("the server accepted no byte of a {} for {waited_ms} ms", RequestText(request))]
    SendTimedOut {
        /// The request that was being sent.
        request: Request,
        /// Time since the server last accepted a byte, in milliseconds.
        waited_ms: u64,
    },
    /// The server announced that it shuts down.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// Cancellation was requested.
    #[error("cancelled while the server did not respond")]
    Stopped,
    /// A thread ended in the middle of a reply.
    #[error("a thread of this program ended in the middle of a reply")]
    Abandoned,
}

impl From<Error> for holdfast_block::Error {
    /// A full disk is still recognized by [`is_no_space`](holdfast_block::Error::is_no_space).
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

/// An optional suffix of a message.
struct Suffix<'a>(&'a str);

impl fmt::Display for Suffix<'_> {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            "" => Ok(()),
            text => write!(to, " ({text})"),
        }
    }
}

/// Formats a request for messages.
struct RequestText<'a>(&'a Request);

impl fmt::Display for RequestText<'_> {
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
