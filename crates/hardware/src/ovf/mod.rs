//! OVF descriptors, as VMware, VirtualBox, XenServer and oVirt write them.
//!
//! Sources: DMTF DSP0243, "Open Virtualization Format Specification" 1.1 and 2.1; the CIM classes of its `rasd`
//! elements; the extensions in descriptors of the products. Elements and attributes are matched by their local names:
//! oVirt and versions before 1.0 use other namespaces, and `Section` with a type for each section.
//!
//! [`OvfPackage`] lists the files of the machine in their order in an OVA; [`read`] reads the machine. The key of a
//! disk is its `diskId`, or the id of the file for a CD image without a disk element.

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
