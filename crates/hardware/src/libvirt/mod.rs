//! libvirt's domain XML, for machines of QEMU.
//!
//! Source: libvirt, "Domain XML format" (formatdomain). Read, everything that is of the host alone is listed as dropped: devices that
//! are passed through, shared folders, memory in huge pages, processors that are pinned. Controllers, addresses, screens, keyboards, serial lines
//! and the balloon are not: every hypervisor gives a machine its own.

mod read;
mod write;

pub use read::read;
pub use unsupported::OF_ITS_HOST;
pub use write::{DiskPlace, LibvirtOptions, write};

#[cfg(test)]
pub(crate) mod tests;
mod unsupported;
