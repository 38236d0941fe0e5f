//! Bytes between two sockets, or a socket and a program.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use holdfast_host::Piped;

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

/// Forwards bytes between a stream and the standard input and output of a program, until both have ended.
pub(crate) fn join_program(stream: &UnixStream, program: &mut Piped) {
    let Some((input, output)) = program.take_input().zip(program.take_output()) else {
        return;
    };
    std::thread::scope(|scope| {
        scope.spawn(move || {
            if copy_bytes(stream, input).is_err() {
                stream.shutdown(Shutdown::Read).ok();
            }
        });
        copy_bytes(output, stream).ok();
        stream.shutdown(Shutdown::Write).ok();
    });
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
