//! The rights for opening a file whose path was provided by another user.
//!
//! A machine's configuration contains paths: disks, firmware variables, the state of a TPM. If the hypervisor runs as
//! another user, that user chose the paths. Root must not open a file with its own rights if this user cannot open
//! it. Otherwise a machine could be used to read `/etc/shadow`. So these files are opened on a thread that has the
//! user's identity for access checks, and nothing else.
//!
//! The real and the saved user of that thread remain root, so that the user can neither signal nor trace it.
//! Credentials belong to a thread, not to the process, and end with the thread. Source: credentials(7),
//! capabilities(7) ("Effect of user ID changes on capabilities"), unix(7).

use std::fs::File;
use std::io::{Error as IoError, ErrorKind, Read as _, Result as IoResult};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use holdfast_block::open_past_leases;
use rustix::fs::{Mode, OFlags, fcntl_getfl, fcntl_setfl, open};
use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use crate::system::processes::{Process, UserIdentity};

/// The identity whose rights decide which files may be opened.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Rights {
    /// The rights of this process: root or the user of this process provided the path.
    #[default]
    Own,
    /// The rights of another user.
    Of(UserIdentity),
}

/// The accepted kinds of file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A regular file or a block device.
    RegularOrBlockDevice,
}

/// Whether the last component of a path may be a symbolic link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Links {
    /// A symbolic link is followed.
    Follow,
    /// A symbolic link is refused, since the folder belongs to a user with fewer rights.
    Refuse,
}

impl Rights {
    /// The rights of the process at the other end of a UNIX socket.
    ///
    /// The kernel records the process that called listen. A process that later gave up rights, as QEMU does with
    /// `-runas`, now has other rights. If one of both identities is not root, that identity is used.
    pub fn of_peer(socket: &impl AsFd) -> IoResult<Self> {
        let peer = rustix::net::sockopt::socket_peercred(socket)?;
        let now = Process::of_number(peer.pid).identity();
        let user = peer.uid.as_raw();
        Ok(match now {
            Some(now) if now.user == user || user == 0 => Self::of(now),
            _ => Self::of(UserIdentity {
                user,
                group: peer.gid.as_raw(),
                groups: Vec::new(),
            }),
        })
    }

    /// The rights of a user. Root, and the user of this process, get the rights of this process.
    pub fn of(identity: UserIdentity) -> Self {
        if identity.user == 0 || identity.user == geteuid().as_raw() {
            Self::Own
        } else {
            Self::Of(identity)
        }
    }

    /// The other user, if there is one.
    pub fn other_user(&self) -> Option<u32> {
        match self {
            Self::Own => None,
            Self::Of(identity) => Some(identity.user),
        }
    }

    /// Runs `work` with these rights, on a separate thread unless they are those of this process.
    ///
    /// # Errors
    /// The thread cannot assume the rights. Only root can.
    pub fn exercise<T: Send>(&self, work: impl FnOnce() -> T + Send) -> IoResult<T> {
        let Self::Of(identity) = self else {
            return Ok(work());
        };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("rights".to_owned());
            let handle = thread.spawn_scoped(scope, || {
                identity.assume_identity()?;
                Ok(work())
            })?;
            handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Opens the file at `path` for reading. A FIFO does not block.
    ///
    /// # Errors
    /// The file does not exist, is of another kind, or these rights do not permit opening it.
    pub fn open(&self, path: &Path, kind: FileKind, links: Links) -> IoResult<File> {
        self.exercise(|| open_checked(path, kind, links))?
    }

    /// Reads the regular file at `path`; more than `bytes_max` bytes are an error.
    pub fn read(&self, path: &Path, bytes_max: u64, links: Links) -> IoResult<Vec<u8>> {
        let file = self.open(path, FileKind::Regular, links)?;
        let mut bytes = Vec::new();
        file.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > bytes_max {
            let reason = format!("it has more than {bytes_max} bytes");
            return Err(IoError::new(ErrorKind::FileTooLarge, reason));
        }
        Ok(bytes)
    }
}

fn open_checked(path: &Path, kind: FileKind, links: Links) -> IoResult<File> {
    let link = match links {
        Links::Follow => OFlags::empty(),
        Links::Refuse => OFlags::NOFOLLOW,
    };
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY | link;
    let opened = open_past_leases(flags, |flags| open(path, flags, Mode::empty()));
    let file = File::from(opened.map_err(|errno| match errno {
        rustix::io::Errno::LOOP if links == Links::Refuse => {
            IoError::new(ErrorKind::InvalidInput, "it is a symbolic link")
        }
        other => other.into(),
    })?);
    let found = file.metadata()?.file_type();
    let is_fit = found.is_file() || kind == FileKind::RegularOrBlockDevice && found.is_block_device();
    if !is_fit {
        let reason = match kind {
            FileKind::Regular => "it is not a regular file",
            FileKind::RegularOrBlockDevice => "it is neither a regular file nor a block device",
        };
        return Err(IoError::new(ErrorKind::InvalidInput, reason));
    }
    fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    Ok(file)
}

impl UserIdentity {
    /// Changes the identity of this thread to the user. The capabilities of root are dropped together with the
    /// effective user.
    fn assume_identity(&self) -> IoResult<()> {
        let failed = |errno: rustix::io::Errno| {
            IoError::new(
                ErrorKind::PermissionDenied,
                format!(
                    "user {} gave its path, and only root can open it with the rights of that user: {errno}",
                    self.user
                ),
            )
        };
        let (root, user) = (Uid::ROOT, Uid::from_raw(self.user));
        let groups: Vec<Gid> = self.groups.iter().map(|group| Gid::from_raw(*group)).collect();
        set_thread_groups(&groups).map_err(failed)?;
        set_thread_res_gid(Gid::ROOT, Gid::from_raw(self.group), Gid::ROOT).map_err(failed)?;
        set_thread_res_uid(root, user, root).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, Permissions};
    use std::io::{ErrorKind, Write as _};
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::{UnixListener, UnixStream};

    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use rustix::process::geteuid;

    use super::{FileKind, Links, Rights};
    use crate::system::processes::UserIdentity;

    const NOBODY: u32 = 65_534;

    fn other_user() -> Rights {
        Rights::of(UserIdentity {
            user: NOBODY,
            group: NOBODY,
            groups: Vec::new(),
        })
    }

    #[test]
    fn a_file_is_opened_with_the_rights_of_the_other_user() {
        if !geteuid().is_root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
        let path = folder.path().join("secret");
        File::create(&path).unwrap().write_all(b"secret").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        let refused = other_user().read(&path, 100, Links::Follow).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
        // Root's supplementary groups do not count either.
        std::fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        assert!(other_user().read(&path, 100, Links::Follow).is_err());
        assert_eq!(Rights::Own.read(&path, 100, Links::Follow).unwrap(), b"secret");
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        assert_eq!(other_user().read(&path, 100, Links::Follow).unwrap(), b"secret");
        // The identity of this thread and of the process is unchanged.
        assert!(geteuid().is_root());
        assert!(Rights::Own.read("/etc/shadow".as_ref(), 1 << 20, Links::Follow).is_ok());
    }

    #[test]
    fn only_the_expected_kind_is_opened_and_a_fifo_does_not_block() {
        let folder = tempfile::tempdir().unwrap();
        let (fifo, file, link) = (
            folder.path().join("fifo"),
            folder.path().join("file"),
            folder.path().join("link"),
        );
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RWXU, 0).unwrap();
        File::create(&file).unwrap().write_all(b"12345").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        for kind in [FileKind::Regular, FileKind::RegularOrBlockDevice] {
            for wrong in [fifo.as_path(), "/dev/null".as_ref(), folder.path()] {
                assert!(Rights::Own.open(wrong, kind, Links::Follow).is_err(), "{wrong:?}");
            }
            assert!(Rights::Own.open(&link, kind, Links::Refuse).is_err());
            assert!(Rights::Own.open(&link, kind, Links::Follow).is_ok());
        }
        assert_eq!(Rights::Own.read(&file, 5, Links::Refuse).unwrap(), b"12345");
        let long = Rights::Own.read(&file, 4, Links::Refuse).unwrap_err();
        assert_eq!(long.kind(), ErrorKind::FileTooLarge);
    }

    #[test]
    fn the_peer_of_a_socket_is_found_by_its_credentials() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let _own = UnixListener::bind(&path).unwrap();
        assert_eq!(
            Rights::of_peer(&UnixStream::connect(&path).unwrap()).unwrap(),
            Rights::Own
        );
        if !geteuid().is_root() {
            return;
        }
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
        let path = folder.path().join("other");
        let _other = other_user().exercise(|| UnixListener::bind(&path)).unwrap().unwrap();
        let found = Rights::of_peer(&UnixStream::connect(&path).unwrap()).unwrap();
        assert_eq!(found.other_user(), Some(NOBODY));
    }
}
