//! The qcow2 format, versions 2 and 3: `docs/interop/qcow2.txt` of QEMU is the specification.
//!
//! A disk is divided into clusters, which are mapped by two levels of tables: the L1 table, kept in memory, points to
//! L2 tables, which point to data. Host clusters have refcounts, because snapshots inside the file share them.

mod allocator;
pub(crate) mod bitmap;
pub(crate) mod bulk;
mod change;
pub(crate) mod check;
pub(crate) mod codec;
mod commit;
pub(crate) mod entry;
pub(crate) mod features;
pub(crate) mod geometry;
pub(crate) mod header;
pub(crate) mod layer;
pub(crate) mod layout;
pub(crate) mod mapping;
mod rebuild;
pub(crate) mod refcount;
mod refcount_changes;
pub(crate) mod repair;
mod reserved;
pub(crate) mod resize;
pub(crate) mod snapshot;
mod state;
pub(crate) mod writer;

mod clear_invalid;
#[cfg(test)]
mod crash_tests;
pub(crate) mod describe;
#[cfg(test)]
mod hostile_tests;
mod refcount_table;
mod unshare_clusters;
