//! Locks that keep other programs away from a file.

use std::fs::File;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

/// The result of [`lock_file`].
#[derive(Debug)]
pub enum LockOutcome {
    /// The file is locked.
    Locked(FileLock),
    /// Another open of the file, in this process or in another one, holds a lock.
    HeldElsewhere,
    /// The file system has no locks (some FUSE and 9p mounts); no program can lock the file.
    Unsupported,
}

/// A lock on a file, which is released when this is dropped.
#[derive(Debug)]
pub struct FileLock {
    /// A descriptor of the open file that is locked.
    file: File,
}

/// Takes an exclusive lock on the whole of `file`, which must be open for writing. Does not wait.
///
/// It is a lock of the open file description (`F_OFD_SETLK`), which other opens of the file do not affect. A POSIX
/// record lock (`F_SETLK`) would end as soon as the process closes any descriptor of the file, also one of another
/// open. Both kinds conflict with each other, so programs that take POSIX record locks (swtpm) or lock single bytes
/// (QEMU) are kept away, and keep this lock away.
pub fn lock_file(file: &File) -> std::io::Result<LockOutcome> {
    lock_as(file, libc::F_WRLCK)
}

/// Takes a shared lock on the whole of `file`, like [`lock_file`]: any number of programs can hold one, while none
/// holds an exclusive lock.
pub fn lock_file_shared(file: &File) -> std::io::Result<LockOutcome> {
    lock_as(file, libc::F_RDLCK)
}

/// Bytes on which QEMU holds shared locks, while it has a permission, or does not share one with others.
///
/// Source: QEMU, `block/file-posix.c`.
const QEMU_HAS: u8 = 100;
const QEMU_REFUSES: u8 = 200;
/// Numbers of QEMU's permissions.
const QEMU_READ: u8 = 0;
const QEMU_WRITE: u8 = 1;
const QEMU_RESIZE: u8 = 3;

/// Locks an image or device like a QEMU that reads it and refuses writers: any number of such readers can share it. A QEMU that
/// has it open for writing, and [`lock_file`], keep this lock away, and are kept away. `file` may be open for reading only.
pub fn lock_file_at_rest(file: &File) -> std::io::Result<LockOutcome> {
    let lock = FileLock {
        file: file.try_clone()?,
    };
    for byte in [
        QEMU_HAS + QEMU_READ,
        QEMU_REFUSES + QEMU_WRITE,
        QEMU_REFUSES + QEMU_RESIZE,
    ] {
        let taken = fcntl(&lock.file, FcntlArg::F_OFD_SETLK(&one_byte(libc::F_RDLCK, byte)));
        if let Err(errno) = taken {
            return refused(errno);
        }
    }
    // As in QEMU, others are looked for after the locks were taken: of two, one finds the other.
    for byte in [QEMU_HAS + QEMU_WRITE, QEMU_HAS + QEMU_RESIZE, QEMU_REFUSES + QEMU_READ] {
        if has_conflict(&lock.file, one_byte(libc::F_WRLCK, byte))? {
            return Ok(LockOutcome::HeldElsewhere);
        }
    }
    Ok(LockOutcome::Locked(lock))
}

fn lock_as(file: &File, kind: libc::c_int) -> std::io::Result<LockOutcome> {
    let duplicate = file.try_clone()?;
    match set_lock(&duplicate, kind) {
        Ok(()) => Ok(LockOutcome::Locked(FileLock { file: duplicate })),
        Err(errno) => refused(errno),
    }
}

/// What it means that a lock was not granted.
fn refused(errno: Errno) -> std::io::Result<LockOutcome> {
    match errno {
        Errno::EAGAIN | Errno::EACCES => Ok(LockOutcome::HeldElsewhere),
        Errno::ENOLCK | Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EINVAL => Ok(LockOutcome::Unsupported),
        errno => Err(errno.into()),
    }
}

/// Whether another open of the file, in this process or in another one, holds an exclusive lock of `file`. Takes no lock,
/// not even for a moment, so that another process which takes one meanwhile is never refused.
///
/// A file system without locks answers that there is none.
///
/// # Errors
/// The descriptor cannot be examined.
pub fn is_locked(file: &File) -> std::io::Result<bool> {
    has_conflict(file, whole_file(libc::F_RDLCK))
}

/// Whether a QEMU, or a holder of [`lock_file`], may write to an image or device. Takes no lock, like [`is_locked`].
///
/// A file system without locks answers that none has.
///
/// # Errors
/// The descriptor cannot be examined.
pub fn is_open_for_writing(file: &File) -> std::io::Result<bool> {
    has_conflict(file, one_byte(libc::F_WRLCK, QEMU_HAS + QEMU_WRITE))
}

/// Whether another open of the file holds a lock that conflicts with this one.
fn has_conflict(file: &File, mut lock: libc::flock) -> std::io::Result<bool> {
    match fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock)) {
        Ok(_) => Ok(libc::c_int::from(lock.l_type) != libc::F_UNLCK),
        Err(errno) => refused(errno).map(|_| false),
    }
}

fn set_lock(file: &File, kind: libc::c_int) -> nix::Result<()> {
    fcntl(file, FcntlArg::F_OFD_SETLK(&whole_file(kind))).map(drop)
}

fn whole_file(kind: libc::c_int) -> libc::flock {
    #[expect(clippy::cast_possible_truncation, reason = "all kinds are small")]
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        // To the end of the file, however long it becomes.
        l_len: 0,
        // Other values are refused.
        l_pid: 0,
    }
}

fn one_byte(kind: libc::c_int, byte: u8) -> libc::flock {
    libc::flock {
        l_start: libc::off_t::from(byte),
        l_len: 1,
        ..whole_file(kind)
    }
}

impl Drop for FileLock {
    /// Closing the descriptors is not enough: a process that another thread is starting has copies of them until it
    /// executes its program.
    fn drop(&mut self) {
        // An error leaves the lock until the file is closed.
        set_lock(&self.file, libc::F_UNLCK).ok();
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::Path;

    use nix::errno::Errno;
    use rustix::fs::{FlockOperation, fcntl_lock};

    use super::{
        FileLock, LockOutcome, is_locked, is_open_for_writing, lock_file, lock_file_at_rest, lock_file_shared, refused,
    };

    fn open(path: &Path) -> File {
        File::options().read(true).write(true).open(path).unwrap()
    }

    /// The lock on a file, unless another one is held.
    fn lock(file: &File) -> Option<FileLock> {
        match lock_file(file).unwrap() {
            LockOutcome::Locked(lock) => Some(lock),
            LockOutcome::HeldElsewhere => None,
            LockOutcome::Unsupported => panic!("the tests need a file system with locks"),
        }
    }

    #[test]
    fn another_open_of_the_file_neither_gets_nor_drops_the_lock() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let first = open(file.path());
        let held = lock(&first).unwrap();
        drop(first);
        for _ in 0..2 {
            let second = open(file.path());
            assert!(lock(&second).is_none());
            drop(second);
            drop(File::open(file.path()).unwrap());
        }
        drop(held);
        lock(&open(file.path())).unwrap();
    }

    /// A descriptor that a new process inherits is such a copy.
    #[test]
    fn a_copy_of_the_descriptor_does_not_keep_a_released_lock() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let first = open(file.path());
        let copy = first.try_clone().unwrap();
        drop(lock(&first).unwrap());
        lock(&open(file.path())).unwrap();
        drop(copy);
    }

    /// Record locks are those of other programs, such as swtpm. The kernel compares the owners, not the processes.
    #[test]
    fn record_locks_conflict_in_both_directions() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (own, other) = (open(file.path()), open(file.path()));
        let held = lock(&own).unwrap();
        fcntl_lock(&other, FlockOperation::NonBlockingLockExclusive).unwrap_err();
        drop(held);
        fcntl_lock(&other, FlockOperation::NonBlockingLockExclusive).unwrap();
        assert!(lock(&own).is_none());
    }

    #[test]
    fn a_query_reports_exclusive_locks_of_other_opens() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let reader = File::open(file.path()).unwrap();
        assert!(!is_locked(&reader).unwrap());
        let writer = open(file.path());
        let held = lock(&writer).unwrap();
        assert!(is_locked(&reader).unwrap());
        assert!(!is_locked(&writer).unwrap());
        drop(held);
        assert!(!is_locked(&reader).unwrap());
        let shared = lock_file_shared(&writer).unwrap();
        assert!(!is_locked(&reader).unwrap());
        drop(shared);
        fcntl_lock(&writer, FlockOperation::NonBlockingLockExclusive).unwrap();
        assert!(is_locked(&reader).unwrap(), "a record lock");
    }

    fn at_rest(file: &File) -> Option<FileLock> {
        match lock_file_at_rest(file).unwrap() {
            LockOutcome::Locked(lock) => Some(lock),
            LockOutcome::HeldElsewhere => None,
            LockOutcome::Unsupported => panic!("the tests need a file system with locks"),
        }
    }

    #[test]
    fn readers_at_rest_share_a_file_and_keep_writers_away() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (one, two, writer) = (
            File::open(file.path()).unwrap(),
            File::open(file.path()).unwrap(),
            open(file.path()),
        );
        let readers = (at_rest(&one).unwrap(), at_rest(&two).unwrap());
        assert!(lock(&writer).is_none());
        drop(readers);
        let held = lock(&writer).unwrap();
        assert!(at_rest(&one).is_none());
        drop(held);
        // A refused attempt has left nothing.
        drop(lock(&writer).unwrap());
        at_rest(&one).unwrap();
    }

    #[test]
    fn a_query_reports_writers_and_no_readers() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let reader = File::open(file.path()).unwrap();
        let other = File::open(file.path()).unwrap();
        let at_rest = at_rest(&other).unwrap();
        assert!(!is_open_for_writing(&reader).unwrap());
        drop(at_rest);
        // What a QEMU holds while it may write.
        let byte = super::one_byte(super::libc::F_RDLCK, super::QEMU_HAS + super::QEMU_WRITE);
        super::fcntl(&other, super::FcntlArg::F_OFD_SETLK(&byte)).unwrap();
        assert!(is_open_for_writing(&reader).unwrap());
        drop(other);
        assert!(!is_open_for_writing(&reader).unwrap());
        let writer = open(file.path());
        let held = lock(&writer).unwrap();
        assert!(is_open_for_writing(&reader).unwrap());
        drop(held);
    }

    #[test]
    fn a_file_system_without_locks_is_no_error_and_a_wrong_descriptor_is() {
        for errno in [Errno::ENOLCK, Errno::EOPNOTSUPP, Errno::ENOSYS, Errno::EINVAL] {
            assert!(matches!(refused(errno), Ok(LockOutcome::Unsupported)));
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = lock_file(&File::open(file.path()).unwrap()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::EBADF as i32));
    }
}
