//! Storage of the host: snapshots of its volumes and file systems, and what changed between two of them.

pub mod changed_blocks;
pub(crate) mod file_system;
pub mod freeze;
pub mod fuse_mount;
pub mod grace_periods;
pub mod loop_device;
pub mod nbd_device;
pub mod provider;
pub(crate) mod retries;
