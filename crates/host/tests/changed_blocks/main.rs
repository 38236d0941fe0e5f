//! Changes that file systems report, compared with the real ones.
//!
//! Each file system is created in a file and mounted, which needs root and the programs. Without them a test prints
//! that it was skipped, and passes.

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
