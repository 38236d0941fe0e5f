//! OVF descriptors, as VMware, VirtualBox, XenServer and oVirt write them.
//!
//! Sources: DMTF DSP0243, "Open Virtualization Format Specification" 1.1 and 2.1; the CIM classes of its `rasd` elements; what products
//! add, by the descriptors that they write. Elements and attributes are known by their names without the namespace: oVirt and those before
//! version 1.0 have other namespaces for the same, and `Section` with a type for each section.
//!
//! [`OvfPackage`] says which files belong to the machine, and in which order they come in an OVA; [`read`] says what the machine is. The
//! key of a disk is its `diskId`, or the id of the file for an image of a CD that is in the package as it is.

mod hardware;
mod package;
mod read;
mod units;
mod write;

pub use package::{OvfDisk, OvfFile, OvfPackage};
pub use read::read;
pub use write::{DiskFile, OvfOptions, STREAM_OPTIMIZED, write};

#[cfg(test)]
pub(crate) mod tests;
