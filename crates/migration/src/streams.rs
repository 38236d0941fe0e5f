//! Bytes between two sockets.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

const PIECE_BYTES: usize = 256 << 10;

/// Forwards bytes in both directions, until both have ended.
pub(crate) fn join_streams(one: &UnixStream, other: &UnixStream) {
    std::thread::scope(|scope| {
        scope.spawn(|| forward_bytes(one, other));
        forward_bytes(other, one);
    });
}

/// Forwards bytes until `from` ends or `to` takes no more, and passes the end on.
pub(crate) fn forward_bytes(mut from: &UnixStream, mut to: &UnixStream) {
    let mut piece = vec![0; PIECE_BYTES];
    while let Ok(count @ 1..) = from.read(&mut piece) {
        if to.write_all(&piece[..count]).is_err() {
            // The source would wait for ever.
            from.shutdown(Shutdown::Read).ok();
            break;
        }
    }
    to.shutdown(Shutdown::Write).ok();
}
