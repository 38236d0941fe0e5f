//! Proxmox VE: the configuration of a machine, as in `/etc/pve/qemu-server/100.conf` and in the `qemu-server.conf` of a
//! VMA.
//!
//! Sources: the manual page qm.conf(5); qemu-server, `PVE/QemuServer.pm` for the settings and
//! `PVE/VZDump/QemuServer.pm` for the lines that a backup adds. A line is a name, a colon and a value. Lines with `#`
//! are the description, with escapes as in a URI. A section with a name in brackets belongs to a snapshot. A backup
//! adds lines like `#qmdump#map:scsi0:drive-scsi0:local-lvm:raw:`: the disk, the device in the archive, and the
//! original storage and format.
//!
//! The key of a disk is its device name in the archive.

mod conf;
mod read;
mod write;

pub use read::read;
pub use write::{ProxmoxExport, ProxmoxOptions, write};

#[cfg(test)]
mod tests;
