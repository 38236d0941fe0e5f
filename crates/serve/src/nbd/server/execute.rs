//! Carrying out requests: from one that makes sense to its reply.

mod holes;
mod read;
mod status;

use std::sync::Arc;

use holdfast_block::{BlockDeviceMut, Clock, Error, to_usize};

use holes::HoleSense;

use super::export::ZeroSpeed;
use super::handshake::Session;
use super::reply::{Address, ReplyBuffer};
use super::request::{Command, Durability, Refusal, Request, Zeroes};
use crate::nbd::wire::ErrorNumber;

/// Bytes that are read ahead, or written as zeroes, in one go.
const PIECE_BYTES: u64 = 1 << 20;
/// Zeroes that take space are really written: as many as that at one request.
const PROVISIONED_BYTES_MAX: u64 = 1 << 30;

/// Sends what was gathered, and empties the buffer.
pub(crate) type Drain<'a> = Option<&'a mut dyn FnMut(&mut ReplyBuffer)>;

/// Why a request was not carried out.
#[derive(Debug)]
enum Failure {
    /// By the protocol.
    Refused(Refusal),
    /// By the device.
    Device(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Device(error)
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// Carries out what one client asks of its export, on any thread.
pub(crate) struct Executor {
    pub(crate) session: Session,
    clock: Arc<dyn Clock>,
    holes: HoleSense,
}

impl Executor {
    pub(crate) fn new(session: Session, clock: Arc<dyn Clock>) -> Self {
        Self {
            session,
            clock,
            holes: HoleSense::default(),
        }
    }

    /// Carries `request` out, appends the whole reply to `replies`, and returns the error of the device, if there was one.
    ///
    /// With a `drain`, a long reply may be sent while the rest of it is gathered.
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
        let address = Address {
            cookie: request.cookie,
            offset: request.offset,
        };
        let done = match request.command {
            Command::Read(fragments) => read::read(self, request, fragments, replies, drain).map_err(Failure::from),
            Command::BlockStatus { extents, contexts } => {
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
            Failure::Refused(Refusal { error, reason }) => {
                replies.error(style, address, error, reason);
                Ok(())
            }
            Failure::Device(error) => {
                replies.error(style, address, errno(&error), &with_sources(&error));
                Err(error)
            }
        }
    }
}

/// The requests that have nothing to tell but success.
fn change(session: &Session, request: &Request, payload: &[u8], replies: &mut ReplyBuffer) -> Result<(), Failure> {
    if request.command == Command::Cache {
        return prefetch(session, request, replies);
    }
    let device = session.export.device().writer().ok_or(Refusal {
        error: ErrorNumber::EPERM,
        reason: "the export is read-only",
    })?;
    match request.command {
        Command::Write => device.write_at(payload, request.offset)?,
        Command::Trim => device.trim(request.range())?,
        Command::WriteZeroes(zeroes) => {
            write_zeroes(device, session.export.zero_speed(), request, zeroes, replies)?;
        }
        Command::Flush => return Ok(device.flush()?),
        Command::Read(_) | Command::Cache | Command::BlockStatus { .. } => {}
    }
    if request.durability == Durability::BeforeReply {
        device.flush()?;
    }
    Ok(())
}

/// Reads the range and forgets it: what is slow to get, a chunk of a repository, is then in the cache of its device.
fn prefetch(session: &Session, request: &Request, replies: &mut ReplyBuffer) -> Result<(), Failure> {
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
) -> Result<(), Failure> {
    let is_quick = zeroes == Zeroes::Quick && speed == ZeroSpeed::Quick;
    if matches!(zeroes, Zeroes::Quick | Zeroes::QuickProvisioned) && !is_quick {
        return Err(Failure::Refused(Refusal {
            error: ErrorNumber::ENOTSUP,
            reason: "writing zeroes is not known to be quicker than writing",
        }));
    }
    if zeroes != Zeroes::Provisioned {
        return Ok(device.write_zeroes(request.range())?);
    }
    // A device has no way to reserve space but to write: `write_zeroes` gives space back where it can.
    if request.length > PROVISIONED_BYTES_MAX {
        return Err(Failure::Refused(Refusal {
            error: ErrorNumber::EOVERFLOW,
            reason: "zeroes that are to take space are written 1 GiB at a time",
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

/// The range of `request` in pieces: offset, bytes.
fn pieces(request: &Request) -> impl Iterator<Item = (u64, usize)> + use<> {
    let range = request.range();
    let piece = to_usize(PIECE_BYTES);
    range
        .clone()
        .step_by(piece)
        .map(move |offset| (offset, to_usize((range.end - offset).min(PIECE_BYTES))))
}

/// The number of the protocol that says best what went wrong.
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

/// An error with what caused it, as one line.
fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
