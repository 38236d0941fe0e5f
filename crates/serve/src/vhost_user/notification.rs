//! Files of a front end through which it and the server notify each other.

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::OFlags;
use rustix::io::Errno;

/// Prepares a file of the front end for notifications: a thread of the server must not block on it.
pub(super) fn without_blocking(file: File) -> io::Result<File> {
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags | OFlags::NONBLOCK)?;
    Ok(file)
}

/// Resets the counter of notifications.
pub(super) fn read_counter(file: BorrowedFd<'_>) -> io::Result<()> {
    let mut bytes = [0; 8];
    match rustix::io::read(file, &mut bytes) {
        // Another thread of the front end may have read it.
        Ok(8) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
        Ok(_) => Err(io::ErrorKind::InvalidData.into()),
        Err(errno) => Err(errno.into()),
    }
}
