//! Proxmox VE: the configuration of a machine, as `/etc/pve/qemu-server/100.conf` and the `qemu-server.conf` of a VMA have it.
//!
//! Sources: the manual page qm.conf(5); qemu-server, `PVE/QemuServer.pm` for the settings and `PVE/VZDump/QemuServer.pm` for what a backup
//! adds. A line is a name, a colon and a value; lines with `#` are the description, with escapes as in a URI, and what follows a name in
//! brackets belongs to a snapshot. A backup adds lines `#qmdump#map:scsi0:drive-scsi0:local-lvm:raw:`: the disk, the device in the archive,
//! where it was.
//!
//! The key of a disk is the device that the archive has for it.

mod conf;
mod read;
mod write;

pub use read::read;
pub use write::{ProxmoxExport, ProxmoxOptions, write};

#[cfg(test)]
mod tests;
