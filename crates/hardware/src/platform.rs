//! The hypervisors that a machine is translated for.

/// The hypervisor that a machine moves to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Platform {
    /// QEMU, managed by libvirt.
    Qemu,
    /// QEMU, managed by Proxmox VE.
    Proxmox,
    /// XenServer and XCP-ng.
    Xen,
    /// Hypervisors that import OVF: VMware, VirtualBox.
    Ovf,
    /// VirtualBox, by its own settings.
    VirtualBox,
}
