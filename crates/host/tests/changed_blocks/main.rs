//! What file systems say of changes, compared with what changed.
//!
//! Each file system is made in a file and mounted; that takes root, and the programs to make it. Where they are missing the test says
//! so and passes.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "tests make file systems with their own programs, and say what they skip"
)]

mod btrfs;
mod fixtures;
mod history;
mod mounts;
mod refusals;
mod xfs;
mod zfs_fuse;
