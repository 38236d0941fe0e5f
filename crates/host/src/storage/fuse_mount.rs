//! Mounts of file systems that a process of this program serves over FUSE.
//!
//! Root mounts with mount(2). Other users need `fusermount3`, or the older `fusermount`, which is setuid root and passes
//! the opened device through a socket. Sources: `fs/fuse/inode.c` of Linux, fusermount3(1).

use std::ffi::CString;
use std::io::{ErrorKind, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use holdfast_block::Clock;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType, recvmsg, socketpair,
};

use super::provider::Mounts;
use super::retries::retry_while_in_use;
use crate::system::process::command;

const DEVICE: &str = "/dev/fuse";
/// Subtype of the file systems, which `mount` and `findmnt` show as `fuse.holdfast`.
const SUBTYPE: &str = "holdfast";
const FILE_SYSTEM_TYPE: &str = "fuse.holdfast";
/// Helper programs for users without the right to mount, in the order in which they are tried.
const HELPERS: [&str; 2] = ["fusermount3", "fusermount"];
/// File descriptor of the socket in the helper: its standard input.
const HELPER_SOCKET: &str = "0";
const HELPER_VARIABLE: &str = "_FUSE_COMMFD";

/// A FUSE file system cannot be mounted or unmounted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FuseMountError {
    /// The kernel has no FUSE, or its device cannot be opened.
    #[error("{DEVICE} cannot be opened")]
    Device {
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The user has no right to mount, and no helper is installed.
    #[error("only root can mount without the program {}", HELPERS[0])]
    NoHelper,
    /// Mounting failed.
    #[error("mount on {}", folder.display())]
    Mount {
        /// The folder.
        folder: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The helper failed.
    #[error("{program} failed for {}: {reason}", folder.display())]
    Helper {
        /// The helper.
        program: &'static str,
        /// The folder.
        folder: PathBuf,
        /// Its message.
        reason: String,
    },
    /// Programs use the file system.
    #[error("{} is in use", folder.display())]
    InUse {
        /// The folder.
        folder: PathBuf,
    },
    /// Unmounting failed.
    #[error("unmount {}", folder.display())]
    Unmount {
        /// The folder.
        folder: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
}

/// Which users can read a mounted file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MountReaders {
    /// The user who mounts it.
    Owner,
    /// All users.
    Everyone,
}

/// What to mount.
#[derive(Debug, Clone, Copy)]
pub struct FuseMountRequest<'a> {
    /// Name of the source in the list of mounts.
    pub source: &'a str,
    /// An empty folder.
    pub folder: &'a Path,
    /// Which users can use it.
    pub readers: MountReaders,
    /// Whether it can be written.
    pub access: MountAccess,
}

/// Whether a mounted file system can be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MountAccess {
    /// Not even by root.
    ReadOnly,
    /// As the modes of its files allow it.
    Writable,
}

/// How to unmount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnmountMode {
    /// Only if no program uses it.
    Unused,
    /// The folder is empty at once; programs that use the file system keep it until they close their files.
    Detach,
}

/// Mounts a file system. Returns its device, on which it must be served; without a server, programs that
/// access the folder wait.
pub fn mount_fuse(request: &FuseMountRequest<'_>) -> Result<OwnedFd, FuseMountError> {
    match mount_directly(request) {
        Err(FuseMountError::Mount { source, .. }) if source.kind() == ErrorKind::PermissionDenied => {
            mount_by_helper(request)
        }
        Err(FuseMountError::Device { source }) if source.kind() == ErrorKind::PermissionDenied => {
            // The helper opens it with the rights of the user, too.
            mount_by_helper(request).map_err(|error| match error {
                FuseMountError::Helper { .. } => FuseMountError::Device { source },
                other => other,
            })
        }
        result => result,
    }
}

/// Characters that separate options are written with a backslash, as fusermount and the kernel's list of mounts expect.
fn escaped(source: &str) -> String {
    source.replace('\\', "\\\\").replace(',', "\\,")
}

fn mount_directly(request: &FuseMountRequest<'_>) -> Result<OwnedFd, FuseMountError> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let device = rustix::fs::open(DEVICE, flags, Mode::empty())
        .map_err(|errno| FuseMountError::Device { source: errno.into() })?;
    let failed = |source: std::io::Error| FuseMountError::Mount {
        folder: request.folder.to_owned(),
        source,
    };
    let readers = match request.readers {
        MountReaders::Owner => "",
        MountReaders::Everyone => ",allow_other",
    };
    let options = format!(
        "fd={},rootmode=40000,user_id={},group_id={},default_permissions{readers}",
        device.as_raw_fd(),
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw()
    );
    let options = CString::new(options).map_err(|error| failed(error.into()))?;
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    if request.access == MountAccess::ReadOnly {
        flags |= MountFlags::RDONLY;
    }
    rustix::mount::mount(request.source, request.folder, FILE_SYSTEM_TYPE, flags, &*options)
        .map_err(|errno| failed(errno.into()))?;
    Ok(device)
}

fn mount_by_helper(request: &FuseMountRequest<'_>) -> Result<OwnedFd, FuseMountError> {
    let failed = |source: std::io::Error| FuseMountError::Mount {
        folder: request.folder.to_owned(),
        source,
    };
    let readers = match request.readers {
        MountReaders::Owner => "",
        MountReaders::Everyone => ",allow_other",
    };
    let source = escaped(request.source);
    let access = match request.access {
        MountAccess::ReadOnly => "ro",
        MountAccess::Writable => "rw",
    };
    let options =
        format!("{access},nosuid,nodev,noexec,default_permissions,subtype={SUBTYPE},fsname={source}{readers}");
    for program in HELPERS {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(|errno| failed(errno.into()))?;
        let mut helper = command(program);
        helper.args(["-o", &options, "--"]).arg(request.folder);
        helper.env(HELPER_VARIABLE, HELPER_SOCKET).stdin(Stdio::from(theirs));
        let output = match helper.stdout(Stdio::null()).stderr(Stdio::piped()).output() {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(failed(error)),
            Ok(output) => output,
        };
        // The command still has its end of the socket, without which the next call would end.
        drop(helper);
        return match received_device(&ours) {
            Ok(Some(device)) => Ok(device),
            Ok(None) => Err(FuseMountError::Helper {
                program,
                folder: request.folder.to_owned(),
                reason: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            }),
            Err(errno) => Err(failed(errno.into())),
        };
    }
    Err(FuseMountError::NoHelper)
}

/// Receives the device from the helper; `None` if the helper closed the socket without it.
fn received_device(socket: &OwnedFd) -> Result<Option<OwnedFd>, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let flags = RecvFlags::CMSG_CLOEXEC;
    recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, flags)?;
    let files = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    Ok(files)
}

/// Whether a file system of this program is mounted on the folder; also if its server has ended. `folder` is absolute,
/// without symbolic links.
pub fn is_fuse_mount(folder: &Path, mounts: &Mounts) -> bool {
    mounts.is_mounted(folder, FILE_SYSTEM_TYPE)
}

/// The mount points of file systems of this program whose server has ended. Without a list of mounts there are none.
pub fn dead_fuse_mounts() -> Vec<PathBuf> {
    let is_dead = |point: &PathBuf| {
        let error = std::fs::symlink_metadata(point).err();
        error.is_some_and(|error| error.raw_os_error() == Some(Errno::NOTCONN.raw_os_error()))
    };
    let mounts = Mounts::read().unwrap_or_default();
    mounts.points_of_kind(FILE_SYSTEM_TYPE).filter(is_dead).collect()
}

/// Unmounts a file system that [`mount_fuse`] mounted, with [retries](retry_while_in_use) while programs use it.
pub fn unmount_unused_fuse(folder: &Path, clock: &dyn Clock) -> Result<(), FuseMountError> {
    let is_in_use = |error: &FuseMountError| matches!(error, FuseMountError::InUse { .. });
    retry_while_in_use(clock, is_in_use, || unmount_fuse(folder, UnmountMode::Unused))
}

/// Unmounts a file system that [`mount_fuse`] mounted.
pub fn unmount_fuse(folder: &Path, mode: UnmountMode) -> Result<(), FuseMountError> {
    let flags = match mode {
        UnmountMode::Unused => UnmountFlags::NOFOLLOW,
        UnmountMode::Detach => UnmountFlags::NOFOLLOW | UnmountFlags::DETACH,
    };
    let folder = || folder.to_owned();
    match rustix::mount::unmount(folder(), flags) {
        Ok(()) => Ok(()),
        Err(Errno::BUSY) => Err(FuseMountError::InUse { folder: folder() }),
        Err(Errno::PERM) => unmount_by_helper(&folder(), mode),
        Err(errno) => Err(FuseMountError::Unmount {
            folder: folder(),
            source: errno.into(),
        }),
    }
}

fn unmount_by_helper(folder: &Path, mode: UnmountMode) -> Result<(), FuseMountError> {
    for program in HELPERS {
        let mut helper = command(program);
        helper.arg("-u");
        if mode == UnmountMode::Detach {
            helper.arg("-z");
        }
        let output = match helper.arg("--").arg(folder).stdin(Stdio::null()).output() {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(source) => {
                return Err(FuseMountError::Unmount {
                    folder: folder.to_owned(),
                    source,
                });
            }
            Ok(output) => output,
        };
        if output.status.success() {
            return Ok(());
        }
        let reason = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        let folder = folder.to_owned();
        return Err(if reason.ends_with("Device or resource busy") {
            FuseMountError::InUse { folder }
        } else {
            FuseMountError::Helper {
                program,
                folder,
                reason,
            }
        });
    }
    Err(FuseMountError::NoHelper)
}

#[cfg(test)]
mod tests {
    use super::escaped;

    #[test]
    fn separators_of_options_are_escaped() {
        assert_eq!(escaped("/backup/vms"), "/backup/vms");
        assert_eq!(escaped(r"/a,b\c"), r"/a\,b\\c");
    }
}
