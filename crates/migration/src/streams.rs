//! Bytes between two sockets.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, poll};

const PIECE_BYTES: usize = 256 << 10;

/// Forwards bytes in both directions, until both have ended.
pub(crate) fn join_streams(one: &UnixStream, other: &UnixStream) {
    std::thread::scope(|scope| {
        scope.spawn(|| forward_bytes(one, other));
        forward_bytes(other, one);
    });
}

/// Forwards bytes until `from` ends or `to` takes no more, and passes the end on.
pub(crate) fn forward_bytes(from: &UnixStream, to: &UnixStream) {
    if copy_bytes(from, to).is_err() {
        // The source would wait for ever.
        from.shutdown(Shutdown::Read).ok();
    }
    to.shutdown(Shutdown::Write).ok();
}

/// Copies bytes until `from` ends.
///
/// Not `std::io::copy`: it uses splice(2), which locks a pipe while it waits for a socket, so that the pipe cannot be read.
///
/// # Errors
/// `to` takes no more.
pub(crate) fn copy_bytes(mut from: impl Read, mut to: impl Write) -> std::io::Result<()> {
    let mut piece = vec![0; PIECE_BYTES];
    while let Ok(count @ 1..) = from.read(&mut piece) {
        to.write_all(&piece[..count])?;
    }
    Ok(())
}

/// Waits until one of these is ready.
pub(crate) fn wait_for_any(waited: &mut [PollFd<'_>]) -> std::io::Result<()> {
    loop {
        match poll(waited, None) {
            Err(rustix::io::Errno::INTR) => {}
            other => return Ok(other.map(drop)?),
        }
    }
}
