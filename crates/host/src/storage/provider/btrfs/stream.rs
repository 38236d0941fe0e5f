//! The gate in front of `btrfs receive`.
//!
//! # The problem
//!
//! `btrfs receive` executes a stream as root, below a given folder: it creates and renames files by path, creates
//! devices, opens files by path for writing, and clones from any subvolume of the file system whose UUID is in the
//! stream. btrfs-receive(8) warns against streams of untrusted senders. Here the sender is a host that may have been
//! compromised.
//!
//! # What passes
//!
//! A stream of version 1 with one subvolume of the announced name and UUID, which ends with `END`. Every command is
//! read completely, its checksum is compared, its attributes are parsed, and the output is encoded from them, so it
//! contains nothing unchecked.
//!
//! | in the stream | what is done |
//! |---|---|
//! | another version, an unknown command or attribute, an attribute twice or missing, a wrong length or checksum | refused |
//! | a second subvolume; anything before the first or after `END` | refused |
//! | a name or UUID that was not announced, or that the dataset has already | refused |
//! | a parent that is not a host snapshot of this dataset | refused |
//! | a path that is absolute, or has an empty component, `.`, `..` or NUL | refused |
//! | a path through a symbolic link, or data for one | refused: [`tree`] knows all links |
//! | `CLONE` from a subvolume other than this one and its parent | refused |
//! | devices, FIFOs, sockets, and later commands about them | left out, with a note |
//! | set-user-id and set-group-id bits | cleared, with a note |
//! | extended attributes other than `user.*`, `btrfs.*` and access lists | left out, with a note |
//! | `UPDATE_EXTENT` (a stream without data) | refused |
//!
//! The subvolume is created under a hidden name, and is renamed after it was compared with the announcement.

mod command;
mod gate;
#[cfg(feature = "hostile")]
pub(crate) mod hostile;
#[cfg(any(test, feature = "hostile"))]
mod replay;
#[cfg(any(test, feature = "hostile"))]
mod specimen;
#[cfg(test)]
mod tests;
mod tree;

pub(super) use gate::{Arrival, BtrfsAnnouncement, BtrfsGate, ParentSnapshot};
