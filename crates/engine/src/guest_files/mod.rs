//! Files inside the guests' file systems, read straight from a snapshot.
//!
//! The disks of the snapshot are searched for volumes in this process. The file system of a volume is read by a process
//! without rights, which gets the bytes of the volume through a pipe.

mod address;
mod open;
mod read;
mod restore;
mod target;
mod walk;

pub use address::{GuestAddress, GuestAddressError};
pub use open::{GuestVolumes, LocatedFiles, ReaderLauncher, open_guest_volumes};
pub use read::read_guest_file;
pub use restore::{RestoredFiles, TreeRestoreRequest, restore_tree};
pub use target::TargetConflicts;
pub use walk::{UnreadableFile, WalkDepth, WalkedFile, walk_files};
