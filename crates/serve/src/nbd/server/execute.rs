//! Executes validated requests and produces their replies.

mod holes;
mod read;
mod status;

use std::sync::Arc;

use holdfast_block::{BlockDeviceMut, Clock, Error, error_text, to_usize};

use holes::HoleTracker;

use super::export::ZeroSpeed;
use super::handshake::NbdSession;
use super::reply::{ReplyBuffer, ReplyTarget};
use super::request::{Durability, Request, RequestCommand, RequestError, Zeroes};
use crate::nbd::wire::ErrorNumber;

/// Number of bytes that are read ahead, or written as zeroes, at a time.
const PIECE_BYTES: u64 = 1 << 20;
/// Provisioned zeroes are written as data: at most this many bytes per request.
const PROVISIONED_BYTES_MAX: u64 = 1 << 30;

/// Sends the buffered replies, and empties the buffer.
pub(crate) type Drain<'a> = Option<&'a mut dyn FnMut(&mut ReplyBuffer)>;

/// Why a request was not executed.
#[derive(Debug)]
enum ExecuteError {
    /// The request is invalid by the protocol.
    Refused(RequestError),
    /// The device failed.
    Device(Error),
}

impl From<Error> for ExecuteError {
    fn from(error: Error) -> Self {
        Self::Device(error)
    }
}

impl From<RequestError> for ExecuteError {
    fn from(refusal: RequestError) -> Self {
        Self::Refused(refusal)
    }
}

/// Executes the requests of one client on its export, on any thread.
pub(crate) struct Executor {
    pub(crate) session: NbdSession,
    clock: Arc<dyn Clock>,
    holes: HoleTracker,
}

impl Executor {
    pub(crate) fn new(session: NbdSession, clock: Arc<dyn Clock>) -> Self {
        Self {
            session,
            clock,
            holes: HoleTracker::default(),
        }
    }

    /// Executes `request`, appends the whole reply to `replies`, and returns the error of the device, if any.
    ///
    /// With a `drain`, the start of a long reply may be sent while the rest is produced.
    pub(crate) fn execute(
        &self,
        request: &Request,
        payload: &[u8],
        replies: &mut ReplyBuffer,
        drain: Drain<'_>,
    ) -> Result<(), Error> {
        let session = &self.session;
        replies.begin();
        let style = session.terms.style;
        let address = ReplyTarget {
            cookie: request.cookie,
            offset: request.offset,
        };
        let done = match request.command {
            RequestCommand::Read(fragments) => {
                read::read(self, request, fragments, replies, drain).map_err(ExecuteError::from)
            }
            RequestCommand::BlockStatus { extents, contexts } => {
                status::block_status(session, request, extents, contexts, payload, replies)
            }
            _ => change(session, request, payload, replies).map(|()| replies.success(style, address)),
        };
        let failure = match done {
            Ok(()) => return Ok(()),
            Err(failure) => failure,
        };
        replies.abandon();
        match failure {
            ExecuteError::Refused(RequestError { error, reason }) => {
                replies.error(style, address, error, reason);
                Ok(())
            }
            ExecuteError::Device(error) => {
                replies.error(style, address, errno(&error), &error_text(&error));
                Err(error)
            }
        }
    }
}

/// Executes requests whose reply is only success or an error.
fn change(
    session: &NbdSession,
    request: &Request,
    payload: &[u8],
    replies: &mut ReplyBuffer,
) -> Result<(), ExecuteError> {
    if request.command == RequestCommand::Cache {
        return prefetch(session, request, replies);
    }
    let device = session.export.device().writer().ok_or(RequestError {
        error: ErrorNumber::EPERM,
        reason: "the export is read-only",
    })?;
    match request.command {
        RequestCommand::Write => device.write_at(payload, request.offset)?,
        RequestCommand::Trim => device.trim(request.range())?,
        RequestCommand::WriteZeroes(zeroes) => {
            write_zeroes(device, session.export.zero_speed(), request, zeroes, replies)?;
        }
        RequestCommand::Flush => return Ok(device.flush()?),
        RequestCommand::Read(_) | RequestCommand::Cache | RequestCommand::BlockStatus { .. } => {}
    }
    if request.durability == Durability::BeforeReply {
        device.flush()?;
    }
    Ok(())
}

/// Reads the range and discards the data, so that slow data, such as a chunk of a repository, is in the cache of its
/// device.
fn prefetch(session: &NbdSession, request: &Request, replies: &mut ReplyBuffer) -> Result<(), ExecuteError> {
    let start = replies.len();
    for (offset, length) in pieces(request) {
        replies.rewind(start);
        session
            .export
            .device()
            .reader()
            .read_at(replies.space(length), offset)?;
    }
    replies.rewind(start);
    Ok(())
}

fn write_zeroes(
    device: &dyn BlockDeviceMut,
    speed: ZeroSpeed,
    request: &Request,
    zeroes: Zeroes,
    replies: &mut ReplyBuffer,
) -> Result<(), ExecuteError> {
    let is_quick = zeroes == Zeroes::Quick && speed == ZeroSpeed::Quick;
    if matches!(zeroes, Zeroes::Quick | Zeroes::QuickProvisioned) && !is_quick {
        return Err(ExecuteError::Refused(RequestError {
            error: ErrorNumber::ENOTSUP,
            reason: "writing zeroes is not known to be quicker than writing",
        }));
    }
    if zeroes != Zeroes::Provisioned {
        return Ok(device.write_zeroes(request.range())?);
    }
    // A device can reserve space only by writing data: `write_zeroes` releases space if it can.
    if request.length > PROVISIONED_BYTES_MAX {
        return Err(ExecuteError::Refused(RequestError {
            error: ErrorNumber::EOVERFLOW,
            reason: "at most 1 GiB of provisioned zeroes can be written at a time",
        }));
    }
    let start = replies.len();
    let nothing = replies.space(to_usize(request.length.min(PIECE_BYTES)));
    nothing.fill(0);
    for (offset, length) in pieces(request) {
        device.write_at(&nothing[..length], offset)?;
    }
    replies.rewind(start);
    Ok(())
}

/// Splits the range of `request` into pieces: offset, length.
fn pieces(request: &Request) -> impl Iterator<Item = (u64, usize)> + use<> {
    let range = request.range();
    let piece = to_usize(PIECE_BYTES);
    range
        .clone()
        .step_by(piece)
        .map(move |offset| (offset, to_usize((range.end - offset).min(PIECE_BYTES))))
}

/// The protocol's error number that fits the error best.
fn errno(error: &Error) -> ErrorNumber {
    use std::io::ErrorKind;
    if error.is_no_space() {
        return ErrorNumber::ENOSPC;
    }
    match error {
        Error::OutOfBounds { .. } | Error::Unsupported { .. } => ErrorNumber::EINVAL,
        Error::Io { source, .. } | Error::Path { source, .. } => match source.kind() {
            ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => ErrorNumber::EPERM,
            ErrorKind::FileTooLarge => ErrorNumber::ENOSPC,
            ErrorKind::OutOfMemory => ErrorNumber::ENOMEM,
            _ => ErrorNumber::EIO,
        },
        _ => ErrorNumber::EIO,
    }
}
