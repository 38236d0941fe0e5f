//! The gate in front of `btrfs receive`.
//!
//! # The problem
//!
//! `btrfs receive` carries out what a stream says, as root, below the folder that it is given: it makes and renames files by paths, makes
//! devices, opens by name what it writes to, and clones from any subvolume of the file system whose UUID the stream names. btrfs-receive(8)
//! warns against streams of untrusted senders. Here the sender is a host that may have been broken into.
//!
//! # What passes
//!
//! A stream of version 1 with one subvolume of the announced name and UUID, which ends with `END`. Every command is read whole, its
//! checksum compared, its attributes are parsed, and what goes on is encoded anew from them, so there is nothing in it that was not looked at.
//!
//! | in the stream | what is done |
//! |---|---|
//! | another version, an unknown command or attribute, an attribute twice or missing, a wrong length or checksum | refused |
//! | a second subvolume; anything before the first or after `END` | refused |
//! | a name or UUID that was not announced, or that the dataset has already | refused |
//! | a parent that is not a host snapshot of this dataset | refused |
//! | a path that is absolute, or has an empty component, `.`, `..` or NUL | refused |
//! | a path through a symbolic link, or data for one | refused: [`tree`] knows where they are |
//! | `CLONE` from anything but this subvolume and its parent | refused |
//! | devices, FIFOs, sockets, and all that is said of them later | left out, with a note |
//! | set-user-id and set-group-id bits | cleared, with a note |
//! | extended attributes but `user.*`, `btrfs.*` and access lists | left out, with a note |
//! | `UPDATE_EXTENT` (a stream without data) | refused |
//!
//! The subvolume is made under a hidden name, and gets its own when what has arrived was compared with what was announced.

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
