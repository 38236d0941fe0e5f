//! Files on which another program holds a lease: an NFS server for a client (a delegation), or a Samba server (an oplock).

use std::os::fd::{AsRawFd as _, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags, fstat};
use rustix::io::{Errno, Result};

/// Opens a file with `NONBLOCK`, so that a pipe in its place does not block. If another program holds a lease on the file,
/// waits until it has given it back, at most the time that the system grants it (`/proc/sys/fs/lease-break-time`).
///
/// With `NONBLOCK`, the system answers `EAGAIN` instead of waiting. The file is then pinned, and opened again without the
/// flag: it is not exchanged meanwhile. `open` opens it with the given flags.
///
/// # Errors
/// It cannot be opened.
pub fn open_past_leases(flags: OFlags, open: impl Fn(OFlags) -> Result<OwnedFd>) -> Result<OwnedFd> {
    match open(flags | OFlags::NONBLOCK) {
        Err(Errno::AGAIN) => {}
        opened => return opened,
    }
    let pinned = open(OFlags::PATH | OFlags::CLOEXEC | flags & OFlags::NOFOLLOW)?;
    if FileType::from_raw_mode(fstat(&pinned)?.st_mode) != FileType::RegularFile {
        return Err(Errno::AGAIN);
    }
    let known = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let path = format!("/proc/self/fd/{}", pinned.as_raw_fd());
    rustix::fs::open(path, flags - known, Mode::empty())
}
