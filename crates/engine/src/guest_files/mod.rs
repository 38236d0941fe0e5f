//! Files inside the guests' file systems, read straight from a snapshot.
//!
//! The disks of the snapshot are searched for volumes in this process. The file system of a volume is read by a process
//! without rights, which gets the bytes of the volume through a pipe; what that cannot read is read by an appliance, a
//! virtual machine with a kernel of Linux.

mod address;
mod appliance;
mod open;
mod read;
mod readers;
mod restart;
mod restore;
mod target;
mod walk;

pub use address::{GuestAddress, GuestAddressError};
pub use appliance::ApplianceOptions;
pub use open::{GuestVolumes, LocatedFiles, open_guest_volumes};
pub use read::read_guest_file;
pub use readers::{GuestVolume, ReaderChoice, ReaderKind, ReaderLauncher, ReaderOptions};
pub use restore::{RestoredFiles, TreeRestoreRequest, restore_tree};
pub use target::TargetConflicts;
pub use walk::{UnreadableFile, WalkDepth, WalkReport, WalkedFile, walk_files};
