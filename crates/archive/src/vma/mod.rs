//! VMA: the backup format of Proxmox VE.
//!
//! Source: `vma_spec.txt`, `vma.h`, `vma-reader.c` and `vma-writer.c` in the patches of pve-qemu. A header with the machine's configuration
//! and the names and sizes of its devices; then, to the end of the file, extents, each with a header and the data of up to 59 clusters.
//!
//! - A cluster is 64 KiB of a device. Of its 16 blocks of 4 KiB, those are stored whose bit is set in the cluster's mask; the others are
//!   zero. Every cluster of every disk is in the archive, even with an empty mask: a missing one is an error.
//! - Clusters come in any order, and those of several devices are interleaved: a disk is copied while its machine runs, and a cluster that the
//!   machine is about to overwrite is copied first.
//! - The device `vmstate` is the memory of the running machine.
//! - Header and extents have the same UUID, and an MD5 of themselves. There is no checksum of the data.

mod clusters;
mod format;
#[cfg(feature = "hostile")]
pub(crate) mod hostile;
mod read;
mod write;

pub(crate) use format::MAGIC;
pub use read::VmaReader;
pub use write::{VmaDisk, VmaWriteOptions, VmaWritten, write_vma};
#[cfg(test)]
mod tests;
