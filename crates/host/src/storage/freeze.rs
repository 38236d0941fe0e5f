//! Freezes mounted file systems of this host, and frees what they do not use.
//!
//! Sources: `include/uapi/linux/fs.h`, ioctl_fsfreeze of `fs/ioctl.c`.
#![expect(unsafe_code, reason = "ioctl; the contract stands beside each use")]

use std::fs::File;
use std::path::Path;

use rustix::io::Errno;
use rustix::ioctl::{Opcode, Setter, Updater, ioctl, opcode};

use super::grace_periods::{SWITCH, ShortGracePeriods};

const FREEZE: Opcode = opcode::read_write::<u32>(b'X', 119);
const THAW: Opcode = opcode::read_write::<u32>(b'X', 120);
const TRIM: Opcode = opcode::read_write::<TrimRange>(b'X', 121);

/// `struct fstrim_range`.
#[repr(C)]
struct TrimRange {
    start: u64,
    length: u64,
    minimum: u64,
}

/// Writes everything that is pending in the file system that is mounted on `folder`.
///
/// # Errors
/// The folder cannot be opened, or a write fails.
pub fn sync_file_system(folder: &Path) -> std::io::Result<()> {
    Ok(rustix::fs::syncfs(File::open(folder)?)?)
}

/// A frozen file system: what was written is on its device, and writes wait. It is thawed on drop.
#[derive(Debug)]
pub struct FrozenFileSystem {
    folder: File,
}

impl FrozenFileSystem {
    /// Freezes the file system that is mounted on `folder`. A [`sync_file_system`] before leaves it little to do.
    ///
    /// # Errors
    /// The file system cannot be frozen, is frozen already, or the user is not root.
    pub fn freeze(folder: &Path) -> std::io::Result<Self> {
        let folder = File::open(folder)?;
        let _short = ShortGracePeriods::begin(Path::new(SWITCH));
        // SAFETY: FREEZE ignores its argument.
        unsafe { ioctl(&folder, Setter::<FREEZE, u32>::new(0)) }?;
        Ok(Self { folder })
    }

    /// Lets writes continue.
    ///
    /// # Errors
    /// The system refuses.
    pub fn thaw(self) -> std::io::Result<()> {
        thaw_folder(&self.folder)
    }
}

impl Drop for FrozenFileSystem {
    fn drop(&mut self) {
        // It fails if it is thawed.
        thaw_folder(&self.folder).ok();
    }
}

fn thaw_folder(folder: &File) -> std::io::Result<()> {
    // SAFETY: THAW ignores its argument.
    Ok(unsafe { ioctl(folder, Setter::<THAW, u32>::new(0)) }?)
}

/// Thaws the file system that is mounted on `folder`. Returns whether it was frozen.
///
/// # Errors
/// The folder cannot be opened, or the user is not root.
pub fn thaw_file_system(folder: &Path) -> std::io::Result<bool> {
    match thaw_folder(&File::open(folder)?) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Tells the device of the file system that is mounted on `folder` what the file system does not use. Returns the
/// number of bytes.
///
/// # Errors
/// The file system or its device does not support it, or the user is not root.
pub fn trim_file_system(folder: &Path) -> std::io::Result<u64> {
    let folder = File::open(folder)?;
    let mut range = TrimRange {
        start: 0,
        length: u64::MAX,
        minimum: 0,
    };
    // SAFETY: TRIM reads and writes a `struct fstrim_range`, which has the layout of `TrimRange`.
    unsafe { ioctl(&folder, Updater::<TRIM, TrimRange>::new(&mut range)) }?;
    Ok(range.length)
}
