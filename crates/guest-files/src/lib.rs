//! Volumes of guests, and the files in their file systems, read from any device and without mounting.
//!
//! [`find_volumes`] reads the partition tables and the LVM metadata of a set of disks, and detects what each volume
//! holds. [`open_file_system`] opens a volume whose file system can be read. The host's kernel never sees a guest's
//! file system.
//!
//! All bytes here are written by a guest, which may be hostile. Whatever a reader does not understand is refused: an
//! error is better than a wrong byte. The readers can run in another process ([`protocol`]), so that an error in one of
//! them stays there.

mod cached;
mod error;
mod fields;
mod file_system;
#[cfg(feature = "hostile")]
#[doc(hidden)]
pub mod hostile;
mod path;
pub mod protocol;
mod readers;
mod volumes;

pub use cached::CachedDevice;
pub use error::{Error, Result};
pub use file_system::{
    DirectoryEntry, ExtendedAttribute, FileKind, FilePiece, FileSystem, Metadata, ModifiedTime, NodeId, PIECE_BYTES_MAX,
};
pub use path::{LINK_COUNT_MAX, ResolvedPath, resolve_path};
pub use readers::open_file_system;
pub use volumes::{
    Content, DiskSource, Found, Unreadable, Volume, VolumeDevice, VolumeSegment, detect_content, find_volumes,
};
