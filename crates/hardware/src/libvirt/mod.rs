//! libvirt's domain XML, for machines of QEMU.
//!
//! Source: libvirt, "Domain XML format" (formatdomain). The reader lists host-specific settings as dropped:
//! passed-through devices, shared folders, huge pages, CPU pinning. It does not list controllers, addresses, displays,
//! keyboards, serial ports and the balloon, which every hypervisor provides itself.

mod read;
mod write;

pub use read::read;
pub use unsupported::OF_ITS_HOST;
pub use write::{DiskPlace, LibvirtOptions, write};

#[cfg(test)]
pub(crate) mod tests;
mod unsupported;
